"""Edits of a JSON text: what is named changes, every other byte stays."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from proxy.core import splice
from proxy.core.splice import Editor

few = settings(max_examples=25, deadline=None)

# --- JSON texts as anybody may write them ---------------------------------------------------------------

SPACE = st.text(" \t\r\n", max_size=2)
NUMBERS = st.one_of(
    st.integers(-20, 20).map(str),
    st.sampled_from(["1.10", "-0", "1e5", "1E-2", "0.0", "12345678901234567890123", "-1.50e+10"]),
)


@st.composite
def strings(draw: st.DrawFn) -> str:
    """A string literal: every character as it is or escaped, lone surrogates among them."""
    parts = draw(
        st.lists(
            st.one_of(
                st.text("ab1_{}[]:, é😀\u2028", max_size=4),
                st.sampled_from([r"\"", r"\\", r"\/", r"\n", r"\u0061", r"\u00e9", r"\ud83d", r"\udc00"]),
            ),
            max_size=4,
        )
    )
    return f'"{"".join(parts)}"'


KEYS = st.one_of(st.sampled_from(['"a"', '"b"', '"id"', r'"\u0061"', r'"i\u0064"', '""']), strings())
SCALARS = st.one_of(NUMBERS, strings(), st.sampled_from(["true", "false", "null"]))


def _array(space: str, values: list[str]) -> str:
    return f"[{space}{f'{space},{space}'.join(values)}{space}]"


def _object(space: str, members: list[tuple[str, str]]) -> str:
    inner = f"{space},".join(f"{space}{key}{space}:{space}{value}" for key, value in members)
    return f"{{{inner}{space}}}"


def _objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(_object, SPACE, st.lists(st.tuples(KEYS, values), max_size=4))


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.builds(_array, SPACE, st.lists(inner, max_size=3)), _objects(inner)),
    max_leaves=8,
)
OBJECTS = st.builds("{1}{0}{1}".format, _objects(VALUES), SPACE)


def parsed(text: str) -> Any:
    """The value, numbers as they are written, so that not a digit can change unseen."""
    return json.loads(text, parse_int=str, parse_float=str)


# --- loads ----------------------------------------------------------------------------------------------


@few
@given(st.builds("{1}{0}{1}".format, VALUES, SPACE))
def test_loads_reads_what_json_reads(text: str) -> None:
    """Any JSON text gives the standard library's value; integers past 64 bits may lose digits."""
    expected = json.loads(text)
    assume("12345678901234567890123" not in text)
    assert splice.loads(text.encode()) == expected


@pytest.mark.parametrize(
    "data", [b"", b" ", b"{", b"nul", b"NaN", b"-Infinity", b"{'a':1}", b"1 2", b'"\xff"']
)
def test_what_is_not_json_is_a_value_error(data: bytes) -> None:
    """Not JSON, not UTF-8, or one of Python's additions to JSON."""
    with pytest.raises(ValueError):
        splice.loads(data)


@pytest.mark.parametrize(
    ("before", "after"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ('["\\ud83d",', "]")]
)
@pytest.mark.parametrize("depth", [600, 1010, 100_000])
def test_deep_nesting_is_a_value_error(before: str, after: str, depth: int) -> None:
    """Whatever is nested too deeply for the scanner is refused at the door, on any stack."""
    with pytest.raises(ValueError, match="nested too deeply"):
        splice.loads((before * depth + "1" + after * depth).encode())


def test_what_is_let_in_can_be_edited() -> None:
    """Nesting up to the bound is read and edited, with hundreds of callers on the stack."""
    deep = "[" * 400 + "1" + "]" * 400
    text = f'{{"item":{deep},"n":1}}'

    def down(frames: int) -> str:
        if frames:
            return down(frames - 1)
        splice.loads(text.encode())
        return Editor(text).raw("item") or ""

    assert sys.getrecursionlimit() >= 1000
    assert down(300) == deep


def test_many_brackets_are_not_deep() -> None:
    """A long list of small objects, or brackets in a string, are no nesting."""
    assert len(splice.loads(b"[" + b'{"a":[]},' * 5000 + b"1]")) == 5001
    assert splice.loads(b'"' + b"[" * 5000 + b'"') == "[" * 5000


@few
@given(VALUES)
def test_dumps_is_read_back(text: str) -> None:
    """What legato says itself is compact JSON in UTF-8, lone surrogates as escapes."""
    value = json.loads(text)
    assert json.loads(splice.dumps(value).encode()) == value


# --- the editor -----------------------------------------------------------------------------------------


@few
@given(OBJECTS)
def test_no_edit_changes_nothing(text: str) -> None:
    """Without an edit the text is the very same."""
    assert Editor(text).result() == text


@few
@given(OBJECTS, st.sampled_from(["a", "b", "id", "new"]))
def test_raw_is_the_value_that_parsers_see(text: str, key: str) -> None:
    """Of equal keys, however written, the last one counts."""
    raw, value = Editor(text).raw(key), parsed(text)
    assert (raw is not None) == (key in value)
    if raw is not None:
        assert parsed(raw) == value[key]


@few
@given(OBJECTS, st.sampled_from([("a", "b"), ("b", "id"), ("a", "a"), ("a", "b", "id")]))
def test_raw_at_a_path(text: str, path: tuple[str, ...]) -> None:
    """A path leads through the objects that parsers see, and nowhere else."""
    raw, value = Editor(text).raw(*path), parsed(text)
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    assert (None if raw is None else parsed(raw)) == value


@few
@given(OBJECTS, st.sampled_from(["a", "b", "id", "new"]), VALUES)
def test_set_changes_one_value(text: str, key: str, new: str) -> None:
    """The parsed text differs in that member alone; the bytes around it stay."""
    editor = Editor(text)
    span = editor.span(key)
    editor.set((key,), new)
    result = editor.result()
    assert parsed(result) == {**parsed(text), key: parsed(new)}
    if span is None:
        end = text.rindex("}")
        comma = "," if parsed(text) else ""
        assert result == f'{text[:end]}{comma}"{key}":{new}{text[end:]}'
    else:
        assert result == text[: span[0]] + new + text[span[1] :]


@few
@given(OBJECTS, st.sets(st.sampled_from(["a", "b", "id", ""]), min_size=1), VALUES)
def test_remove_and_set_together(text: str, keys: set[str], new: str) -> None:
    """Members go with their commas, all that have the name; what stays keeps its bytes and order."""
    editor = Editor(text)
    kept = [text[member.key_start : member.end] for member in editor.members() if member.key not in keys]
    for key in keys:
        editor.remove(key)
    editor.set(("new",), new)
    result = editor.result()
    expected = {key: value for key, value in parsed(text).items() if key not in keys}
    assert parsed(result) == {**expected, "new": parsed(new)}
    at = 0
    for piece in kept:
        at = result.index(piece, at) + len(piece)


@few
@given(OBJECTS, VALUES)
def test_set_inside(text: str, new: str) -> None:
    """A member of an inner object is set where it stands; where no object is, that is an error."""
    value, editor = parsed(text), Editor(text)
    if isinstance(value.get("a"), dict):
        editor.set(("a", "b"), new)
        assert parsed(editor.result()) == {**value, "a": {**value["a"], "b": parsed(new)}}
    else:
        with pytest.raises(ValueError, match="no object to hold b"):
            editor.set(("a", "b"), new)


@few
@given(st.builds(_array, SPACE, st.lists(VALUES, max_size=4)), st.lists(VALUES, max_size=3))
def test_extend(array: str, more: list[str]) -> None:
    """New elements go before the closing bracket; the bytes of the old ones stay."""
    result = splice.extend(array, more)
    assert parsed(result) == parsed(array) + [parsed(one) for one in more]
    assert result.startswith(array[: array.rindex("]")])
    assert splice.raw_elements(result)[: len(parsed(array))] == splice.raw_elements(array)


# --- the two edits with a short cut ---------------------------------------------------------------------

NUMBERED = st.sampled_from(['"n"', r'"\u006e"', '"x"', '"s"', r'"n\u006e"'])
SMALL = st.one_of(
    st.integers(-1, 30).map(str), st.sampled_from(["1.0", "null", '"5"', '"n"', r'"\"n\":5"', "true"])
)
NESTED = st.recursive(
    SMALL,
    lambda inner: st.builds(_object, SPACE, st.lists(st.tuples(NUMBERED, inner), max_size=3)),
    max_leaves=6,
)
TRICKY = st.builds(
    "{0}{1}".format, st.builds(_object, SPACE, st.lists(st.tuples(NUMBERED, NESTED), max_size=4)), SPACE
)


@settings(max_examples=100, deadline=None)
@given(TRICKY, st.integers(0, 30))
@example(r'{"n":1,"\u006e":1}', 0)
@example(r'{"a":{"n":1},"\u006e":1}', 0)
@example('{"a":{"n":1},"n" :1}', 0)
def test_set_number_is_an_edit_like_any_other(text: str, number: int) -> None:
    """The short cut gives what parsing and editing give, wherever else the name or the digits stand."""
    data = text.encode()
    result = splice.set_number(data, json.loads(text), "n", number).decode()
    assert parsed(result) == {**parsed(text), "n": str(number)}
    span = Editor(text).span("n")
    if span is None:
        end = text.rindex("}")
        assert result == f'{text[:end]}{"," if parsed(text) else ""}"n":{number}{text[end:]}'
    else:
        assert result == text[: span[0]] + str(number) + text[span[1] :]


IDS = st.sampled_from(
    ['"r1"', r'"\u0072\u0031"', '"r2"', '":"', '","', '"n"', r'"\"r1"', r'"a\/b"', '"a/b"', '""']
)
IDENTIFIED = st.builds(
    _object,
    SPACE,
    st.lists(st.tuples(NUMBERED, st.one_of(IDS, st.builds(_array, SPACE, st.lists(IDS)))), max_size=4),
)


@settings(max_examples=100, deadline=None)
@given(IDENTIFIED, st.sampled_from(["r9", 'é"', "\ud83d", ""]))
def test_set_string_is_an_edit_like_any_other(text: str, new: str) -> None:
    """The short cut gives what parsing and editing give, wherever else the string stands."""
    result = splice.set_string(text.encode(), json.loads(text), "n", new).decode()
    assert parsed(result) == {**parsed(text), "n": new}
    span = Editor(text).span("n")
    if span is not None:
        assert result == text[: span[0]] + splice.dumps(new) + text[span[1] :]
