"""Whatever upstream sends, the stream is sound: the stitcher on streams that nobody wrote by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from playbook import Playbook, spec_of

from proxy.core.sse import Framer

REQUEST = (
    b'{"input":[],"tools":[{"type":"function","name":"click"}],'
    b'"databricks_options":{"long_task":true},"stream":true}'
)


def frame(body: object) -> bytes:
    """One event on one data line; lone surrogates as escapes."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def ask(number: int, step: int) -> dict[str, Any]:
    """A continuation's event."""
    item = {"type": "task_continue_request", "id": f"continue_{number}", "step": step}
    return {"type": "response.output_item.done", "item": item}


def is_continuation(item: object) -> bool:
    """Whether this is what must never be shown."""
    return isinstance(item, dict) and item.get("type") == "task_continue_request"


def played(cycles: Iterable[bytes]) -> Playbook:
    """A task with these bodies, as far as it goes."""
    play = Playbook(spec_of(REQUEST)).start()
    for body in cycles:
        if play.exchange == "asked":
            play.opened().feed(body).end()
    return play


def shown(play: Playbook) -> list[Any]:
    """The data of all events, parsed; None where it is no JSON."""
    datas = []
    for event in play.events:
        frames = Framer().feed(event)
        assert len(frames) == 1, "an event is one frame"
        assert frames[0].raw == event
        try:
            datas.append(json.loads(frames[0].data))
        except ValueError:
            datas.append(None)
    return datas


# --- what is held, and for how long --------------------------------------------------------------------


def message(id_: str, text: str) -> dict[str, Any]:
    """A finished message."""
    return {"type": "message", "id": id_, "content": [{"type": "output_text", "text": text}]}


def delta(id_: str, text: str) -> dict[str, Any]:
    """A piece of a message's text."""
    return {"type": "response.output_text.delta", "item_id": id_, "delta": text}


def done(item: dict[str, Any]) -> dict[str, Any]:
    """An item is finished."""
    return {"type": "response.output_item.done", "item": item}


def resumed(*first: dict[str, Any]) -> Playbook:
    """A task in its second cycle; the first one finished these items."""
    items = b"".join(frame(done(item)) for item in first)
    return played([items + frame(ask(1, 1))]).opened()


def test_a_difference_shows_at_once() -> None:
    """Deltas are held while they repeat a finished item, and stream on from the first that doesn't."""
    play = resumed(message("m1", "Looking it up."))
    play.feed(frame(delta("m1", "Looking ")), frame(delta("m1", "it ")))
    assert len(play.events) == 1
    play.feed(frame(delta("m1", "over")))
    assert [data["delta"] for data in shown(play)[1:]] == ["Looking ", "it ", "over"]
    play.feed(frame(delta("m1", " there")))
    assert len(play.events) == 5
    assert {data["item_id"] for data in shown(play)[1:]} == {"m1_2"}


def test_text_of_another_kind_is_a_difference() -> None:
    """A message under an id that a call or an empty item had isn't held: that one never said a word of it."""
    call = {"type": "function_call", "id": "x", "call_id": "call_1", "name": "f", "arguments": "{}"}
    for first in (call, {"type": "message", "id": "x", "content": []}, {"type": "reasoning", "id": "x"}):
        play = resumed(first).feed(frame(delta("x", "Hello")))
        assert shown(play)[1:] == [{**delta("x_2", "Hello"), "sequence_number": 1}]


def test_reasoning_that_was_finished_without_its_words() -> None:
    """A reasoning item may have streamed what its end leaves out: only the end tells if it is the same."""
    item = {"type": "reasoning", "id": "rs_1", "summary": []}
    thought = {"type": "response.reasoning_text.delta", "item_id": "rs_1", "delta": "Hm"}
    play = resumed(item).feed(frame(thought), frame(done(item)))
    assert len(play.events) == 1
    play = resumed(item).feed(frame(thought), frame(done({**item, "summary": ["Hm"]})))
    assert [data.get("item_id", data.get("item", {}).get("id")) for data in shown(play)] == [
        "rs_1",
        "rs_1_2",
        "rs_1_2",
    ]


def test_what_is_held_at_the_end_was_said_before() -> None:
    """A repeat that its cycle never finishes is not shown: the client has every word of it."""
    play = resumed(message("m1", "Looking it up."))
    play.feed(
        frame(delta("m1", "Looking ")), frame({"type": "response.completed", "response": {"id": "r"}})
    ).end()
    play.check()
    assert [data["type"] for data in shown(play)] == ["response.output_item.done", "response.completed"]
    assert play.last["response"]["output"] == [message("m1", "Looking it up.")]


def test_a_fresh_name_is_free() -> None:
    """A new name is never one that upstream has used itself."""
    play = resumed(message("m1", "a"), message("m1_2", "b")).feed(frame(done(message("m1", "c"))))
    assert shown(play)[-1]["item"]["id"] == "m1_3"


# --- anything at all ------------------------------------------------------------------------------------

WEIRD: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        0,
        1,
        -1,
        1.5,
        10**23,
        "",
        "m1",
        "m2",
        "resp_1",
        "click",
        "\ud83d",
        [],
        {},
        ["m1"],
        {"id": "m1"},
        [[]],
    ]
)
TYPES = st.sampled_from(
    [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.completed",
        "response.completed",
        "response.incomplete",
        "response.metadata",
        "ping",
    ]
)
ITEM_TYPES = st.sampled_from(
    [
        "message",
        "function_call",
        "function_call_output",
        "task_continue_request",
        "mcp_approval_request",
        "reasoning",
    ]
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": ITEM_TYPES | WEIRD,
        "id": WEIRD,
        "call_id": WEIRD,
        "name": WEIRD,
        "step": WEIRD,
        "arguments": WEIRD,
        "output": WEIRD,
        "approval_request_id": WEIRD,
        "content": st.lists(st.fixed_dictionaries({}, optional={"text": WEIRD}) | WEIRD, max_size=2) | WEIRD,
    },
)
RESPONSES = st.fixed_dictionaries(
    {},
    optional={
        "id": WEIRD,
        "created_at": WEIRD,
        "model": WEIRD,
        "output": st.lists(ITEMS | WEIRD, max_size=3) | WEIRD,
        "usage": st.dictionaries(st.sampled_from(["a", "b"]), WEIRD, max_size=2) | WEIRD,
        "incomplete_details": st.fixed_dictionaries({}, optional={"reason": WEIRD}) | WEIRD,
    },
)
EVENTS = st.fixed_dictionaries(
    {"type": TYPES | WEIRD},
    optional={
        "item": ITEMS | WEIRD,
        "response": RESPONSES | WEIRD,
        "id": WEIRD,
        "item_id": WEIRD,
        "call_id": WEIRD,
        "output_index": WEIRD,
        "content_index": WEIRD,
        "sequence_number": WEIRD,
        "step": WEIRD,
        "delta": WEIRD,
        "text": WEIRD,
    },
)
FRAMES = st.one_of(
    EVENTS.map(frame),
    EVENTS.map(frame),
    EVENTS.map(lambda body: b"event: x\n" + frame(body)),
    st.sampled_from([b"data: [DONE]\n\n", b"data: x\n\n", b'data: {"error":7}\n\n', b": comment\n\n"]),
)
BODIES = st.lists(
    st.tuples(st.lists(FRAMES, max_size=8), st.booleans()).map(lambda parts: (b"".join(parts[0]), parts[1])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(BODIES)
def test_no_body_breaks_the_stream(bodies: list[tuple[bytes, bool]]) -> None:
    """Members of any type at any place: no exception, numbers without a gap, and a log that reads back."""
    play = played(
        body + (frame(ask(number, number)) if goes_on else b"")
        for number, (body, goes_on) in enumerate(bodies)
    )
    if not play.finished:
        play.cancel()
    play.check()
    datas = shown(play)
    for number, data in enumerate(datas):
        if isinstance(data, dict):
            assert data["sequence_number"] == number
            if data.get("type") in ("response.output_item.added", "response.output_item.done"):
                assert not is_continuation(data.get("item"))
    types = [data.get("type") for data in datas if isinstance(data, dict)]
    assert types.count("response.created") <= 1
    assert (
        sum(type_ in ("response.completed", "response.incomplete", "response.failed") for type_ in types) <= 1
    )
    for body in play.bodies:
        json.loads(body)


# --- histories of a sound upstream ----------------------------------------------------------------------

TEXTS = st.text("ab", min_size=1, max_size=4)
MESSAGES = st.builds(
    lambda id_, text: {"type": "message", "id": id_, "content": [{"type": "output_text", "text": text}]},
    st.sampled_from(["m", "n", "__fake_id__"]),
    TEXTS,
)
CALLS = st.builds(
    lambda call_id, arguments: {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": "lookup",
        "arguments": arguments,
    },
    st.sampled_from(["call_1", "call_2"]),
    TEXTS,
)
OUTPUTS = st.builds(
    lambda call_id, text: {"type": "function_call_output", "call_id": call_id, "output": text},
    st.sampled_from(["call_1", "call_2"]),
    TEXTS,
)


def _unique(items: list[dict[str, Any]]) -> bool:
    """Whether no id stands for two items, nor a call id for two calls or two outputs."""
    ids = [item["id"] for item in items if "id" in item]
    calls = [(item["type"], item["call_id"]) for item in items if "call_id" in item]
    return len(ids) == len(set(ids)) and len(calls) == len(set(calls))


def _answered(cycles: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The cycles without outputs that no call asked for."""
    calls: set[str] = set()
    for items in cycles:
        for item in list(items):
            if item["type"] == "function_call":
                calls.add(item["call_id"])
            elif item["type"] == "function_call_output" and item["call_id"] not in calls:
                items.remove(item)
    return cycles


CYCLES = st.lists(
    st.lists(MESSAGES | CALLS | OUTPUTS, max_size=4).filter(_unique), min_size=1, max_size=4
).map(_answered)


def events_of(items: list[dict[str, Any]], *, full: bool, size: int) -> list[dict[str, Any]]:
    """An upstream cycle: each item begun (in the full style), its text in deltas of ``size``, and done."""
    events: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        place = {"output_index": index} if full else {}
        if full:
            begun = {
                key: value for key, value in item.items() if key not in ("content", "arguments", "output")
            }
            events.append({"type": "response.output_item.added", "item": begun, **place})
        text = item["content"][0]["text"] if item["type"] == "message" else item.get("arguments")
        kind = "output_text" if item["type"] == "message" else "function_call_arguments"
        for at in range(0, len(text or "") if size else 0, size or 1):
            delta = {"item_id": item["id"], "delta": text[at : at + size], **place}
            events.append({"type": f"response.{kind}.delta", **delta})
        events.append({"type": "response.output_item.done", "item": item, **place})
    return events


@settings(max_examples=40, deadline=None)
@given(CYCLES, st.booleans(), st.integers(0, 3))
def test_any_history_gives_one_sound_stream(
    cycles: list[list[dict[str, Any]]], full: bool, size: int
) -> None:
    """Ids used again, items told again: no id stands for two items, no text is lost, no index left out."""
    bodies = []
    for number, items in enumerate(cycles):
        last = number == len(cycles) - 1
        end = {"type": "response.completed", "response": {"id": f"r{number}", "output": items}}
        events = events_of(items, full=full, size=size)
        bodies.append(b"".join(map(frame, [*events, end if last else ask(number, number)])))
    play = played(bodies)
    play.check()
    assert play.task.phase == "completed"
    datas = shown(play)
    done = [data for data in datas if data["type"] == "response.output_item.done"]
    kept = _kept(cycles)
    # Every item but the repeats is there, in order, with its own words.
    assert [_words(data["item"]) for data in done] == [_words(item) for item in kept]
    assert play.last["response"]["output"] == [data["item"] for data in done]
    assert _unique([data["item"] for data in done])
    _check_parts(datas, done, full=full, size=size)
    # Upstream sees what it sent, as it sent it.
    replayed = [one for one in json.loads(play.bodies[-1])["input"] if not one["type"].startswith("task_")]
    assert replayed == _kept(cycles[:-1])


def _kept(cycles: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The items without those that say word for word what one of the same id or call id said before."""
    kept: list[dict[str, Any]] = []
    for items in cycles:
        known = list(kept)
        kept += [
            item
            for item in items
            if not any(_repeats(item, old) for old in known) or _answers_open_call(item, items, known)
        ]
    return kept


def _answers_open_call(
    item: dict[str, Any], items: list[dict[str, Any]], known: list[dict[str, Any]]
) -> bool:
    """Whether an output belongs to a call that has none yet."""
    if item["type"] != "function_call_output":
        return False
    now = [one for one in items[: items.index(item)] if not any(_repeats(one, old) for old in known)]
    about = [one for one in known + now if one.get("call_id") == item["call_id"]]
    return about[-1]["type"] == "function_call"


def _repeats(item: dict[str, Any], old: dict[str, Any]) -> bool:
    same_id = any(key in item and item[key] == old.get(key) for key in ("id", "call_id"))
    return same_id and _words(item) == _words(old) and item.get("call_id") == old.get("call_id")


def _words(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def _check_parts(datas: list[Any], done: list[Any], *, full: bool, size: int) -> None:
    """Deltas and beginnings have the id and the index of their item; indexes go up by one."""
    if full:
        assert [data["output_index"] for data in done] == list(range(len(done)))
        begun = [data for data in datas if data["type"] == "response.output_item.added"]
        assert [
            (data["output_index"], data["item"].get("id"), data["item"].get("call_id")) for data in begun
        ] == [(data["output_index"], data["item"].get("id"), data["item"].get("call_id")) for data in done]
    if not size:
        return
    said: dict[str, str] = {}
    for data in datas:
        if data["type"].endswith(".delta"):
            said[data["item_id"]] = said.get(data["item_id"], "") + data["delta"]
    texts = {
        data["item"]["id"]: data["item"]["content"][0]["text"]
        if "content" in data["item"]
        else data["item"]["arguments"]
        for data in done
        if "id" in data["item"]
    }
    assert said == texts
