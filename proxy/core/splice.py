"""Edit a JSON text in place: every byte that isn't named stays.

Bodies and events belong to their senders: key order is somebody's prompt cache, ``1.10`` isn't ``1.1`` to
a hash, a 23-digit integer or a lone surrogate escape must survive. So nothing here is ever serialised
again; a value's place in the text is found with the standard library's scanner, and the text is cut there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

Path = tuple[str, ...]

MAX_DEPTH = 500
"""Half of what the interpreter's own limit lets the scanner go down, which leaves room for the callers."""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# Numbers stay text: the scanner is asked for places, not for values, and int() has a limit on digits.
_scan = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse).raw_decode
_space = re.compile(r"[ \t\n\r]*").match


def loads(data: bytes) -> Any:
    """The JSON value in ``data``; ``ValueError`` if there is none.

    orjson refuses lone surrogates and nothing else that is JSON; the standard library takes over then.
    What is nested deeper than ``MAX_DEPTH`` is refused by all of this module, on whatever stack it is called.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = _loads(data)
    if len(data) > 2 * MAX_DEPTH and data.count(b"[") + data.count(b"{") > MAX_DEPTH and _deep(value):
        raise ValueError("nested too deeply")
    return value


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data.decode(), parse_int=_integer, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(text: str) -> int | float:
    """As orjson has it: what needs more than 64 bits is a float."""
    return float(text) if len(text) > 20 or not -(2**63) <= int(text) < 2**64 else int(text)


def _deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def dumps(value: object) -> str:
    """Compact JSON for what legato itself says; lone surrogates stay escapes."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value, separators=(",", ":"))


class Member(NamedTuple):
    """A member's place: the key's first character, then the value's half-open span."""

    key: str
    key_start: int
    start: int
    end: int


def skip_space(text: str, at: int) -> int:
    """The first position at or behind ``at`` that holds no white space."""
    found = _space(text, at)
    return found.end() if found else at


def _value_end(text: str, start: int) -> int:
    try:
        return _scan(text, start)[1]
    except RecursionError:
        raise ValueError("nested too deeply") from None


def members(text: str, start: int = 0) -> list[Member]:
    """The members of the object at ``start``, in order, repeated keys included."""
    at = skip_space(text, start)
    if text[at : at + 1] != "{":
        raise ValueError("not an object")
    found: list[Member] = []
    at = skip_space(text, at + 1)
    while text[at : at + 1] == '"':
        key, colon = _scan(text, at)
        value = skip_space(text, skip_space(text, colon) + 1)
        end = _value_end(text, value)
        found.append(Member(key, at, value, end))
        at = skip_space(text, end)
        if text[at : at + 1] != ",":
            break
        at = skip_space(text, at + 1)
    return found


def elements(text: str, start: int = 0) -> list[tuple[int, int]]:
    """The spans of the elements of the array at ``start``, in order."""
    at = skip_space(text, start)
    if text[at : at + 1] != "[":
        raise ValueError("not an array")
    found: list[tuple[int, int]] = []
    at = skip_space(text, at + 1)
    while text[at : at + 1] not in ("]", ""):
        end = _value_end(text, at)
        found.append((at, end))
        at = skip_space(text, end)
        if text[at : at + 1] != ",":
            break
        at = skip_space(text, at + 1)
    return found


def raw_elements(text: str) -> list[str]:
    """The elements of an array, each as its own text."""
    return [text[start:end] for start, end in elements(text)]


class Editor:
    """Collects edits to one JSON object and applies them at the end. Edits may not overlap."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._members: dict[int, list[Member]] = {}
        self._edits: list[tuple[int, int, str]] = []
        self._added: dict[int, list[str]] = {}
        self._removed: dict[int, set[str]] = {}

    def members(self, *path: str) -> list[Member]:
        """The members of the object at ``path``; none if there is no object there."""
        start = self._start(path)
        return [] if start is None else self._at(start)

    def span(self, *path: str) -> tuple[int, int] | None:
        """The place of the value at ``path``; of equal keys the last one counts, as parsers have it."""
        *parents, key = path
        for member in reversed(self.members(*parents)):
            if member.key == key:
                return member.start, member.end
        return None

    def raw(self, *path: str) -> str | None:
        """The text of the value at ``path``."""
        span = self.span(*path)
        return None if span is None else self.text[span[0] : span[1]]

    def set(self, path: Path, raw: str) -> None:
        """Replace the value at ``path``, or add the member at the end of its object."""
        span = self.span(*path)
        if span is not None:
            self._edits.append((*span, raw))
            return
        parent = self._start(path[:-1])
        if parent is None:
            raise ValueError(f"no object to hold {path[-1]}")
        self._added.setdefault(parent, []).append(f"{json.dumps(path[-1])}:{raw}")

    def remove(self, *path: str) -> None:
        """Take a member out, with its comma; nothing happens if there is none."""
        parent = self._start(path[:-1])
        if parent is not None:
            self._removed.setdefault(parent, set()).add(path[-1])

    def result(self) -> str:
        """The text with all edits made."""
        edits = list(self._edits)
        for start, keys in self._removed.items():
            edits += _removals(self._at(start), keys)
        for start, parts in self._added.items():
            kept = any(m.key not in self._removed.get(start, ()) for m in self._at(start))
            end = _value_end(self.text, start) - 1
            edits.append((end, end, ("," if kept else "") + ",".join(parts)))
        if not edits:
            return self.text
        pieces: list[str] = []
        at = 0
        for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
            pieces += (self.text[at:start], new)
            at = end
        return "".join((*pieces, self.text[at:]))

    def _at(self, start: int) -> list[Member]:
        if start not in self._members:
            self._members[start] = members(self.text, start)
        return self._members[start]

    def _start(self, path: Iterable[str]) -> int | None:
        start = skip_space(self.text, 0)
        for key in path:
            found = next((member for member in reversed(self._at(start)) if member.key == key), None)
            if found is None or self.text[found.start] != "{":
                return None
            start = found.start
        return start


def _removals(found: list[Member], keys: set[str]) -> list[tuple[int, int, str]]:
    edits: list[tuple[int, int, str]] = []
    kept_before = False
    for i, member in enumerate(found):
        if member.key not in keys:
            kept_before = True
        elif kept_before:
            edits.append((found[i - 1].end, member.end, ""))
        else:
            end = found[i + 1].key_start if i + 1 < len(found) else member.end
            edits.append((member.key_start, end, ""))
    return edits


def extend(array: str, raws: Iterable[str]) -> str:
    """``array`` with further elements put before its closing bracket."""
    close = array.rindex("]")
    parts = list(raws)
    if parts and elements(array):
        parts.insert(0, "")
    return array[:close] + ",".join(parts) + array[close:]


def set_number(data: bytes, body: dict[str, Any], key: str, value: int) -> bytes:
    """``data`` with the top-level member ``key`` set to ``value``; ``body`` is ``data``, parsed.

    The one edit that every event needs, so it has a path without a scan: where the key's text stands only
    once, that is the member; where the object has none, it goes before the last brace.
    """
    old = body.get(key)
    if type(old) is int:
        if old == value:
            return data
        quoted = b'"%b":%d' % (key.encode(), old)
        at = data.find(quoted)
        end = at + len(quoted)
        if at >= 0 and data[end : end + 1] in _AFTER_NUMBER and _only(data, b'"%b"' % key.encode()):
            return b"%b%d%b" % (data[: at + len(key) + 3], value, data[end:])
    elif key not in body:
        brace = data.rindex(b"}")
        comma = b"," if body else b""
        return b'%b%b"%b":%d%b' % (data[:brace], comma, key.encode(), value, data[brace:])
    editor = Editor(data.decode())
    editor.set((key,), str(value))
    return editor.result().encode()


def set_string(data: bytes, body: dict[str, Any], key: str, value: str) -> bytes:
    """``data`` with the top-level string member ``key`` set to ``value``; ``body`` is ``data``, parsed."""
    old = body.get(key)
    if isinstance(old, str) and _plain(old):
        quoted = b'"%b":"%b"' % (key.encode(), old.encode())
        if data.find(quoted) >= 0 and _only(data, b'"%b"' % key.encode()):
            return data.replace(quoted, b'"%b":%b' % (key.encode(), dumps(value).encode()))
    editor = Editor(data.decode())
    editor.set((key,), dumps(value))
    return editor.result().encode()


def _only(data: bytes, key: bytes) -> bool:
    """Whether the one place where a quoted key stands must be the top-level member.

    It must, unless the member itself, or another of its name behind it, is written with an escape.
    """
    return data.count(key) == 1 and not (_ESCAPED in data and _ascii_escape(data))


_ESCAPED = b"\\u00"
_ascii_escape = re.compile(rb"\\u00[2-7]").search
_plain = re.compile(r"[\w.-]+", re.ASCII).fullmatch
_AFTER_NUMBER = (b",", b"}", b" ", b"\n")
