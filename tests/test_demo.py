"""What ``legato demo`` shows: streamed text, whole words, in a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from proxy.cli.demo import Screen, Watch

TEXT = "Two  words, and\n\n  an indented line — with averylongwordthatfitsnowhere at its end. Öre, 日本語.\n"


def shown(pieces: list[str], *, width: int, terminal: bool) -> str:
    """What stands on the screen after these pieces of text and a line of its own."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    screen = Screen(console, Watch(app=None))
    for piece in pieces:
        screen.text(piece)
    screen.line("next")
    return out.getvalue()


@given(st.lists(st.integers(1, len(TEXT))))
def test_text_in_a_pipe_is_the_text_however_it_came(cuts: list[int]):
    """Nothing is folded or lost, and a line of its own begins on a line of its own."""
    ends = [*sorted(cuts), len(TEXT)]
    pieces = [TEXT[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    assert shown(pieces, width=20, terminal=False) == TEXT + "next\n"


@pytest.mark.parametrize("width", [20, 60, 80, 140])
def test_text_in_a_terminal_breaks_between_words(width: int):
    """No line is too long but one of a single long word, and none is empty that wasn't."""
    lines = shown(list(TEXT * 3), width=width, terminal=True).split("\n")
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []
    assert lines.count("") == TEXT.count("\n\n") * 3 + 1
    assert " ".join(lines).split() == [*(TEXT * 3).split(), "next"]


def test_a_word_that_just_fits_leaves_no_empty_line():
    """The space behind it isn't put on a line of its own."""
    assert shown(["12345 78 0 ", "x"], width=10, terminal=True) == "12345 78 0\nx\nnext\n"
