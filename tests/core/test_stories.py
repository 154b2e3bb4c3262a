"""Golden stories: what upstream sends in one folder of ``fixtures``, and the bytes that the client must get.

Each is played whole, byte by byte, and cut at random: the stream, the follow-ups and the log are the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playbook import Cut, Story

FIXTURES = Path(__file__).parents[2] / "fixtures"
STORIES = sorted(path.parent for path in FIXTURES.glob("*/story.toml"))

every_story = pytest.mark.parametrize("folder", STORIES, ids=lambda path: path.name)


@every_story
def test_story(folder: Path) -> None:
    """What the story tells comes true, byte for byte."""
    story = Story.read(folder)
    story.check(story.play(Cut()))


@every_story
def test_story_byte_by_byte(folder: Path) -> None:
    """The same with one byte a read; the log is the same too."""
    story = Story.read(folder)
    play = story.play(Cut(size=1))
    story.check(play)
    assert play.timeless == story.play(Cut()).timeless


@every_story
@settings(max_examples=5, deadline=None)
@given(st.lists(st.floats(0, 1, exclude_max=True), max_size=12))
def test_story_cut_anywhere(folder: Path, places: list[float]) -> None:
    """The same for any cut of the bodies."""
    story = Story.read(folder)
    play = story.play(Cut(at=places))
    story.check(play)
    assert play.timeless == story.play(Cut()).timeless


def test_a_two_megabyte_tool_output() -> None:
    """One long data line passes byte for byte, in the follow-up too, and hides nothing (SSE-07)."""
    request = b'{"input":[],"databricks_options":{"long_task":true},"stream":true}'
    item = b'{"type":"function_call_output","id":"f1","call_id":"c1","output":"%b"}' % (b"A" * 2_000_000)
    head = b'data: {"type":"response.output_item.done","output_index":0,"item":%b' % item
    ask = b'{"type":"task_continue_request","id":"continue_a1","step":3}'
    done = b'data: {"type":"response.output_item.done","item":%b,"id":"resp_u1"}\n\n' % ask
    last = b'data: {"type":"response.completed","response":{"output":[%b],"id":"%b"},"sequence_number":1}\n\n'
    story = Story(
        name="two megabytes",
        request=request,
        cycles=(head + b"}\n\n" + done, last % (b"", b"resp_u2")),
        expected=head + b',"sequence_number":0}\n\n' + last % (item, b"resp_u1"),
        follow_ups={
            2: request.replace(
                b"[]",
                b'[%b,%b,{"type":"task_continue_response","continue_request_id":"continue_a1"}]'
                % (item, ask),
            )
        },
        state="completed",
    )
    for cut in (Cut(), Cut(size=65536), Cut(size=1_000_001)):
        story.check(story.play(cut))
