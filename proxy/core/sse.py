"""Server-sent events: bytes in, frames out, each with the bytes it came in.

The rules of the machine (WHATWG, "Parsing an event stream", but on bytes and with nothing thrown away that
a client could read):

1. CR, LF and CRLF end a line, also mixed; nothing else does (not U+2028, not U+0085). A BOM counts only as
   the body's first three bytes.
2. A blank line ends a block. A block with at least one ``data`` line is a frame; any other vanishes.
3. A frame that ends with CR ends there, at once, since no more may come for a long time; an LF behind it is
   swallowed. Only where the line end before was a CRLF does it wait for the next byte: an LF joins it.
   Rule 3 looks at the bytes of the stream alone, never at where a chunk was cut. So
   **any cut of the same bytes gives the same frames, raw bytes included.**
4. Taken out of the raw bytes: ``id`` and ``retry`` lines, comments, and lines that begin with a BOM (they
   are unknown fields where they stand, and would be others at the front of the client's stream).
5. What is at the front of a block is never a line end: those are blank lines without a block, and an LF
   that rule 3 swallows. Both are stripped in one go, so no state remembers a swallowed LF.
6. An unfinished frame does not exist. A block longer than ``max_frame`` breaks the framer for good: its
   state is then ``_discard``, and nothing more comes out.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_FRAME = 8 * 1024 * 1024
"""One tool result may well be 2 MB on one line; a frame is held whole in memory, so there is an end to it."""

_BOM = b"\xef\xbb\xbf"
_LINE_ENDS = b"\r\n"
_CR, _LF = _LINE_ENDS
_SPACE = ord(" ")

# The end of a block's last line together with the blank line behind it: the first branch is the pair that
# may have to wait (rule 3). "\r\n" alone is one line end and matches no branch.
_block_end = re.compile(rb"\r\n\r\n?|\n[\r\n]|\r\r").search
_WAITING = b"\r\n\r"
# The longest beginning of a block's end that can stand unrecognised behind a block.
_OVERLAP = len(_WAITING)

_only_comments = re.compile(rb"(?::[^\r\n]*+(?:\r\n?|\n))*+").fullmatch
_split_lines = re.compile(rb"\r\n?|\n").split


class Frame:
    """One block with data, as upstream sent it.

    ``raw`` may go out as it is: upstream's bytes with the terminating blank line, less what rule 4 takes
    out. ``event`` is the value of the last ``event`` line, ``None`` where there is none. ``data`` is the
    values of the data lines, joined with LF.
    """

    __slots__ = ("_at", "data", "event", "raw")

    def __init__(self, raw: bytes, event: bytes | None, data: bytes, at: int = 0) -> None:
        self.raw = raw
        self.event = event
        self.data = data
        # Where the value stands in ``raw`` if there is just one data line (with a colon), else 0.
        self._at = at

    def __repr__(self) -> str:
        return f"Frame({self.raw!r})"

    def with_data(self, data: bytes) -> bytes:
        """``raw`` with other data; every other byte stays.

        As many lines as the frame has data lines go each to its own, with that line's prefix and end. Any
        other number is written where the first data line stands, in its manner. A CR in ``data`` counts as
        a line end, since no frame can carry one; read back, it is an LF.
        """
        at = self._at
        if at and _LF not in data and _CR not in data and not data.startswith(b" "):
            return self.raw[:at] + data + self.raw[at + len(self.data) :]
        return self._remade(data)

    def with_event(self, name: bytes | None, data: bytes | None = None) -> bytes:
        """``raw`` with all event lines removed (``None``), or with ``event: name`` where it has none.

        An event line that is there is never renamed. ``data``, if given, is replaced too.
        """
        raw = self.raw if data is None else self.with_data(data)
        if (name is None) == (self.event is None):
            return raw
        *lines, blank = raw.splitlines(keepends=True)
        if name is None:
            return _joined([line for line in lines if _field(line)[0] != b"event"], blank)
        return b"event: " + b" ".join(name.splitlines()) + _end_of(lines[0]) + raw

    def _remade(self, data: bytes) -> bytes:
        *lines, blank = self.raw.splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if _field(line)[0] == b"data"]
        values = _split_lines(data)
        first = places[0]
        if len(values) == len(places):
            for i, value in zip(places, values, strict=True):
                lines[i] = _data_line(lines[i], value)
            return _joined(lines, blank)
        new = [_data_line(lines[first], value) for value in values]
        after = [line for line in lines[first:] if _field(line)[0] != b"data"]
        return _joined([*lines[:first], *new, *after], blank)


class Framer:
    """One response body's framer. It never raises; what is wrong with the body is state.

    ``too_large``: a block was longer than ``max_frame`` bytes, blank line included.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.too_large = False
        self._max_frame = max_frame
        # A block's bytes as far as they have come; never begins with a line end.
        self._held = bytearray()
        # The state is the method that takes the next chunk: _begin, then _go_on, and for good _discard.
        self._take: Callable[[bytes], list[Frame]] = self._begin

    @property
    def clean(self) -> bool:
        """Whether the body, as far as it has come, ends between two frames.

        Comment lines that no blank line has followed yet belong to no frame.
        """
        return not self.too_large and (not self._held or _only_comments(self._held) is not None)

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that ``chunk`` completes."""
        return self._take(chunk)

    def end(self) -> list[Frame]:
        """The body has ended: the frame that waited behind its CR, if one did."""
        if not self._held.endswith(_WAITING):
            return []
        frame = _any_frame(bytes(self._held))
        self._held.clear()
        return [] if frame is None else [frame]

    def _begin(self, chunk: bytes) -> list[Frame]:
        head = bytes(self._held) + chunk
        if len(head) < len(_BOM) and _BOM.startswith(head):
            self._held[:] = head
            return []
        self._held.clear()
        self._take = self._go_on
        return self._go_on(head.removeprefix(_BOM))

    def _go_on(self, chunk: bytes) -> list[Frame]:
        held = self._held
        if not held:
            return self._cut(chunk)
        # Only the new bytes are looked at, so a large frame in small chunks costs no more than in one.
        seen = max(0, len(held) - _OVERLAP)
        may_end = _LF in chunk or _CR in chunk or held.endswith(_WAITING)
        held += chunk
        if may_end and _any_end(held, seen):
            self._held = bytearray()
            return self._cut(bytes(held), seen)
        return self._give_up([]) if len(held) > self._max_frame else []

    def _cut(self, data: bytes, seen: int = 0) -> list[Frame]:
        """Cut ``data``, which begins where a block may begin, into frames; hold the rest.

        No block ends before ``seen``.
        """
        frames: list[Frame] = []
        plain = _CR not in data
        end_of = _lf_end if plain else _any_end
        start = 0
        while start < len(data):
            frame = _usual_frame(data, start) if plain else None
            end = start + len(frame.raw) if frame else end_of(data, max(start, seen))
            if not end:
                break
            if end - start > self._max_frame and self._too_long(data[start:end]):
                return self._give_up(frames)
            frame = frame or _any_frame(data[start:end])
            if frame:
                frames.append(frame)
            start = end
        if start < len(data):
            self._held += data[start:].lstrip(_LINE_ENDS)
        return self._give_up(frames) if len(self._held) > self._max_frame else frames

    def _too_long(self, block: bytes) -> bool:
        return len(block.lstrip(_LINE_ENDS)) > self._max_frame

    def _give_up(self, frames: list[Frame]) -> list[Frame]:
        self.too_large = True
        self._held = bytearray()
        self._take = self._discard
        return frames

    def _discard(self, chunk: bytes) -> list[Frame]:
        return []


# --- where a block ends: the position behind its blank line, 0 if that hasn't come yet ------------------


def _lf_end(data: bytes, start: int) -> int:
    at = data.find(b"\n\n", start)
    return at + 2 if at >= 0 else 0


def _any_end(data: bytes | bytearray, start: int) -> int:
    found = _block_end(data, start)
    if found is None or (found.end() == len(data) and found.group() == _WAITING):
        return 0
    return found.end()


# --- what a block says: the frame, None if it has no data -----------------------------------------------


def _usual_frame(data: bytes, start: int) -> Frame | None:
    """The frame at ``start``, if it has one of the two forms that nearly all have: ``data``, or ``event``
    and ``data``, on one line each. For bytes without a CR.

    One search for one byte finds the end of the line and of the frame: a third of the general way's time.
    """
    event, line = None, start
    if data.startswith(b"event:", start):
        line = data.find(b"\n", start) + 1
        if not line:
            return None
        event = data[start + 6 : line - 1].removeprefix(b" ")
    end = data.find(b"\n", line)
    if not data.startswith(b"\n\n", end) or not data.startswith(b"data:", line):
        return None
    at = line + 6 if data[line + 5] == _SPACE else line + 5
    return Frame(data[start : end + 2], event, data[at:end], at - start)


def _any_frame(block: bytes) -> Frame | None:
    *lines, blank = block.lstrip(_LINE_ENDS).splitlines(keepends=True) or [b""]
    kept: list[bytes] = []
    values: list[bytes] = []
    event = None
    at = size = 0
    for line in lines:
        name, value = _field(line)
        if name == b"data":
            values.append(value)
            at = size + len(_prefix(line)) if line.startswith(b"data:") else 0
        elif name == b"event":
            event = value
        elif name in _TAKEN_OUT or line.startswith(_BOM):
            continue
        kept.append(line)
        size += len(line)
    if not values:
        return None
    return Frame(_joined(kept, blank), event, b"\n".join(values), at if len(values) == 1 else 0)


_TAKEN_OUT = frozenset((b"", b"id", b"retry"))
"""Field names that don't go out; the empty one is a comment's."""


# --- lines: each with its own end -----------------------------------------------------------------------


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.rstrip(_LINE_ENDS).partition(b":")
    return name, value.removeprefix(b" ")


def _end_of(line: bytes) -> bytes:
    return line[len(line.rstrip(_LINE_ENDS)) :]


def _prefix(line: bytes) -> bytes:
    return b"data: " if line.startswith(b"data: ") else b"data:"


def _data_line(like: bytes, value: bytes) -> bytes:
    """A data line with this value in the manner of another: same prefix, same end."""
    if not value and like.rstrip(_LINE_ENDS) == b"data":
        return like
    # A value's own leading space would be taken for the prefix's.
    prefix = b"data: " if value.startswith(b" ") else _prefix(like)
    return prefix + value + _end_of(like)


def _joined(lines: list[bytes], blank: bytes) -> bytes:
    """The block of these lines, which can be fewer than there were.

    Where the last lines were taken out, a CR before them and the LF of the blank line would become one line
    end, and the blank line be lost; then the LF of the line before it stays.
    """
    if lines[-1].endswith(b"\r") and blank.startswith(b"\n"):
        blank = b"\n" + blank
    return b"".join((*lines, blank))
