"""The wire below the events: line ends, cuts, byte order marks, comments, ids, sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from playbook import Cut, Playbook, spec_of
from structlog.testing import capture_logs
from support.cases import assert_continues, load, single_bytes
from support.frames import DONE, asks, completed, created, delta, done, frame, message, sse
from support.legato import OWNER, proxied
from support.rules import check, read
from support.upstream import Answer, Chunk

pytestmark = pytest.mark.anyio

CONTINUE: dict[str, Any] = {"type": "task_continue_request", "id": "continue_a1", "step": 3}
CONTINUES = ["SSE-01", "SSE-04", "SSE-06", "SSE-08", "SSE-10"]
SINGLES = ["SSE-13", "SSE-14", "SSE-17"]
IDS = ("legato-event-ids", "on")


def played(id_: str, variant: str, cut: Callable[[bytes], list[bytes]]) -> tuple[bytes, list[bytes], str]:
    """A case in the core alone: the client's bytes, upstream's requests, the state."""
    case = load(id_)
    play = Playbook(spec_of(case.body)).start()
    for body in case.bodies(variant):
        play.opened().feed(*cut(body)).end()
    play.check()
    return play.stream, play.bodies, play.task.phase


# --- a continuation is seen, however its bytes come ---------------------------------------------------


@pytest.mark.parametrize("single", [False, True], ids=["as written", "byte by byte"])
@pytest.mark.parametrize("id_", CONTINUES)
async def test_continuation_is_answered_once(id_: str, single: bool) -> None:
    """SSE-01, 04, 06, 08, 10: one event, one follow-up with the item unchanged, then the ending."""
    case = load(id_)
    note = {"note": "keep\u2028me"} if id_ == "SSE-06" else {}
    async with proxied(seam_grace=30) as (upstream, proxy):
        answers = case.answers()
        upstream.plays(*map(single_bytes, answers) if single else answers)
        reading = await proxy.whole(**case.request)
        stream = check(reading.body)
        assert stream.types[-1] == "response.completed"
        assert "response.failed" not in stream.types
        assert b"task_continue" not in reading.body
        first, follow_up = (seen.body for seen in upstream.requests)
        assert first == case.body
        assert_continues(first, follow_up, CONTINUE | note, whole=True)
        assert (await proxy.show(reading.task))["state"] == "completed"


@pytest.mark.parametrize("id_", [*CONTINUES, *SINGLES])
async def test_every_cut_gives_the_same(id_: str) -> None:
    """SSE-01 (3) and its like: any cut of any cycle's bytes gives the same stream and the same requests."""
    case = load(id_)
    for variant in case.variants:
        whole = played(id_, variant, Cut())
        longest = max(map(len, case.bodies(variant)))
        assert played(id_, variant, Cut(size=1)) == whole
        for place in range(1, longest):
            assert played(id_, variant, lambda body, at=place: [body[:at], body[at:]]) == whole


@pytest.mark.parametrize(
    ("end", "last"),
    [
        (end, last)
        for end in (b"\r", b"\n", b"\r\n")
        for last in (b"\r", b"\n", b"\r\n")
        if end + last != b"\r\n"  # that is one line end
    ],
)
async def test_any_line_end_and_any_mixture_of_them(end: bytes, last: bytes) -> None:
    """A line may end one way and its blank line another; one byte a write, so every border is met."""
    first = b"event: response.output_item.done" + end + asks()[:-2] + end + last
    second = completed(message("seven"))[:-2] + end + last
    async with proxied(seam_grace=30) as (upstream, proxy):
        upstream.plays(single_bytes(sse(first)), single_bytes(sse(second)))
        reading = await proxy.whole()
        assert check(reading.body).types == ["response.completed"]
        assert_continues(upstream.requests[0].body, upstream.requests[1].body, CONTINUE, whole=True)


async def test_event_that_ends_with_cr_is_not_held_back() -> None:
    """After CR CR the frame is whole: the client has it before upstream writes another byte."""
    gate = anyio.Event()
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created().replace(b"\n", b"\r"), gate, completed(message("a"))))
        async with proxy.start() as reading:
            await reading.until(b"response.created")
            assert reading.body.endswith(b"\r\r")
            gate.set()
            check(await reading.rest())


# --- what is passed on, and what isn't ----------------------------------------------------------------


async def test_byte_order_marks_stay_here_and_text_keeps_its_own() -> None:
    """SSE-04 (2), (4): no mark at a cycle's start reaches the client; U+FEFF inside a string does."""
    bom = b"\xef\xbb\xbf"
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(bom, asks()), sse(bom, delta("\ufeffseven"), completed(message("\ufeffseven"))))
        reading = await proxy.whole()
        stream = check(reading.body)
        assert stream.text == "\ufeffseven"
        assert reading.body.count(bom) == 2
        assert not reading.body.startswith(bom)


async def test_only_line_ends_end_a_line() -> None:
    """SSE-06 (2): U+2028, U+2029 and U+0085 reach the client as they came."""
    case = load("SSE-06")
    async with proxied() as (upstream, proxy):
        upstream.plays(*case.answers())
        stream = check((await proxy.whole(**case.request)).body)
        sent = json.loads(case.bodies()[0].split(b"\n\n")[0].removeprefix(b"data: "))
        assert stream.text == sent["delta"]
        assert {"\u2028", "\u2029", "\x85"} <= set(stream.text)
        assert stream.response["output"][-1]["content"][0]["text"] == "a\u2029b"


async def test_two_megabytes_on_one_line() -> None:
    """SSE-07 (1) to (3): byte-equal but for the number, the next event is seen, others go on meanwhile."""
    case = load("SSE-07")
    gate = anyio.Event()
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), gate, completed(message("b"))), *case.answers())
        async with proxy.start() as other:
            await other.until(b"response.created")
            async with proxy.start(**case.request) as reading, anyio.create_task_group() as group:
                group.start_soon(reading.rest)
                gate.set()
                check(await other.rest())
        stream = check(reading.body)
        assert (
            stream.blocks[0].raw.replace(b',"sequence_number":0', b"")
            == case.bodies()[0].partition(b"\n\n")[0] + b"\n\n"
        )
        assert len(upstream.requests) == 3
        assert_continues(case.body, upstream.requests[2].body, CONTINUE)
        assert len(upstream.requests[2].body) > 2_000_000


async def test_event_above_the_bound_is_one_failure_that_names_it() -> None:
    """SSE-07 (4): one ``response.failed`` with the limit in its text; upstream is closed, nothing is sent."""
    case = load("SSE-07")
    async with proxied(max_frame=100_000) as (upstream, proxy):
        upstream.plays(*case.answers())
        reading = await proxy.whole(**case.request)
        stream = check(reading.body)
        assert (stream.types, stream.error["code"]) == (["response.failed"], "frame_too_large")
        assert "100000" in stream.error["message"]
        assert len(upstream.requests) == 1
        await upstream.until(lambda: upstream.open == 0)
        assert (await proxy.show(reading.task))["state"] == "failed"


async def test_one_space_is_taken_off_and_an_empty_data_line_is_data() -> None:
    """SSE-08 (3), (4): what is no JSON goes out as it came, and takes its number."""
    odd = [b"data:  x\n\n", b"data\n\n", b"data:\ndata: y\n\n"]
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), *odd, completed(message("a"))))
        stream = check((await proxy.whole()).body)
        assert [block.raw for block in stream.blocks[1:4]] == odd
        assert [block.data for block in stream.blocks[1:4]] == [b" x", b"", b"\ny"]
        assert stream.events[-1]["sequence_number"] == 4


async def test_comments_are_life_but_no_frames() -> None:
    """SSE-10 (4): comments hold off ``max_silence``; they don't hold off the end of ``seam_grace``."""
    paced: list[Chunk] = []
    for _ in range(20):
        paced += [b": ping\n\n", Pause(0.05)]
    async with proxied(max_silence=0.4, seam_grace=0.2) as (upstream, proxy):
        upstream.plays(sse(created(), *paced, asks(), *paced * 50, end="hang"), sse(completed(message("a"))))
        reading = await proxy.whole()
        assert check(reading.body).types == ["response.created", "response.completed"]
        assert b"ping" not in reading.body
        assert upstream.left == 1, "the rest of the first cycle's body is closed"


class Pause:
    """Upstream's own pace: a gate that opens by itself."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def wait(self) -> None:
        await anyio.sleep(self.seconds)


@pytest.mark.parametrize("single", [False, True], ids=["as written", "byte by byte"])
@pytest.mark.parametrize("variant", ["a", "b", "c"])
async def test_unfinished_last_event_does_not_exist(variant: str, single: bool) -> None:
    """SSE-13: one failure of legato's own on a fresh line, no follow-up, nothing of the half event."""
    case = load("SSE-13")
    async with proxied(seam_grace=30) as (upstream, proxy):
        answers = case.answers(variant)
        upstream.plays(*map(single_bytes, answers) if single else answers)
        reading = await proxy.whole(**case.request)
        stream = check(reading.body)
        assert stream.types == ["response.output_text.delta", "response.failed"]
        assert stream.error["code"] == "upstream_incomplete"
        assert "without a terminal event" in stream.error["message"]
        assert b"response.completed" not in reading.body
        assert b"continue_a1" not in reading.body
        assert len(upstream.requests) == 1
        assert (await proxy.show(reading.task))["state"] == "failed"


@pytest.mark.parametrize("ids", [True, False])
async def test_ids_are_legatos_own(ids: bool) -> None:
    """SSE-14 (1) to (3): cursors where they were asked for, else none; no NUL; all three events."""
    case = load("SSE-14")
    request = case.request
    request["headers"] += [IDS] if ids else []
    async with proxied() as (upstream, proxy):
        upstream.plays(*case.answers())
        reading = await proxy.whole(**request)
        stream = check(reading.body, event_ids=ids)
        assert stream.types == ["response.created", "response.output_text.delta", "response.completed"]
        assert [block.id for block in stream.blocks] == (["0", "1", "2"] if ids else [None] * 3)


async def test_ids_grow_over_all_cycles() -> None:
    """SSE-14 (1): upstream counts anew in each cycle, the client's ids go on; ``[DONE]`` has none."""
    numbered = [b"id: 0\n" + delta("a"), b"id: 1\n" + done(message("a")), b"id: 2\n" + asks(), DONE]
    ending = [b"id: 0\nretry: 1\n" + delta("b", "m2"), b"id: 1\n" + done(message("b", "m2")), DONE]
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(*numbered), sse(*ending))
        stream = check((await proxy.whole(headers=[OWNER, IDS])).body, event_ids=True)
        assert [block.id for block in stream.blocks] == ["0", "1", "2", "3", None]


async def test_blocks_without_data_vanish() -> None:
    """SSE-11: no block is made of ``id:``, ``event:`` or ``retry:`` alone, and none takes a number."""
    empty = [b"retry: 3000\n\n", b"id: 5\n\n", b"event: ping\n\n", b"\n\n\n", b"id\nevent\n\n"]
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(*empty, created(), *empty, completed(message("a")), *empty))
        assert len(check((await proxy.whole(headers=[OWNER, IDS])).body, event_ids=True).blocks) == 2


async def test_two_objects_in_one_event_are_no_continuation() -> None:
    """SSE-17: passed on with both lines, told of once, no follow-up; the task completes."""
    case = load("SSE-17")
    async with proxied() as (upstream, proxy):
        upstream.plays(*case.answers())
        with capture_logs() as told:
            reading = await proxy.whole(**case.request)
        stream = check(reading.body)
        assert stream.blocks[0].raw == case.bodies()[0].partition(b"\n\n")[0] + b"\n\n"
        assert stream.types == ["response.output_item.done", "response.completed"]
        assert len(upstream.requests) == 1
        assert len([entry for entry in told if "not JSON" in entry["event"]]) == 1
        assert (await proxy.show(reading.task))["state"] == "completed"


# --- other ways to send the same ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "type_", ["Text/Event-Stream; charset=UTF-8", "text/event-stream;charset=utf-8", " TEXT/EVENT-STREAM "]
)
async def test_media_type_is_known_in_any_spelling(type_: str) -> None:
    """PX-14, counter-check: letter case and parameters don't matter."""
    async with proxied() as (upstream, proxy):
        answers = [sse(asks()), sse(completed(message("a")))]
        for answer in answers:
            answer.headers = {"content-type": type_}
        upstream.plays(*answers)
        reading = await proxy.whole()
        assert check(reading.body).types == ["response.completed"]
        assert reading.one("content-type") == type_.strip()


@pytest.mark.parametrize("framing", ["close", "length"])
async def test_body_may_be_framed_otherwise(framing: str) -> None:
    """A body that ends with its length, or with the connection, is as good as chunks."""
    async with proxied() as (upstream, proxy):
        answers = [sse(created(), asks()), sse(completed(message("a")))]
        for answer in answers:
            answer.framing = framing  # type: ignore[assignment]
        upstream.plays(*answers)
        reading = await proxy.whole()
        assert check(reading.body).types == ["response.created", "response.completed"]
        assert reading.one("content-length") is None


async def test_event_lines_and_pretty_json_keep_their_bytes() -> None:
    """What needs no change has the bytes in which it came: order, spaces, escapes, unknown fields."""
    pretty = (
        b"event: response.created\n"
        b'data: { "type": "response.created",\n'
        b'data:   "sequence_number": 0, "x": 1.10, "n": 12345678901234567890123,\n'
        b'data:   "response": {"id": "resp_u1", "note": "\\ud83d \\u00e9"} }\n\n'
    )
    unknown = frame({"type": "response.made_up", "sequence_number": 1, "a": None})
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(pretty, unknown, completed(message("a"))))
        stream = check((await proxy.whole()).body)
        assert stream.blocks[0].raw == pretty
        assert stream.blocks[1].raw == unknown


def test_the_reader_of_these_tests_follows_the_specification() -> None:
    """The examples of the WHATWG page, and a comment with no blank line of its own."""
    blocks, rest = read(b": test\n\ndata: first\nid: 1\n\ndata:second\nid\n\ndata:  third\n\ndata: x")
    assert [block.data for block in blocks] == [None, b"first", b"second", b" third"]
    assert [block.id for block in blocks] == [None, "1", "", None]
    assert rest == b"data: x"
    blocks, _ = read(b": hb\ndata: a\r\rdata\n\ndata\ndata\r\n\r\n")
    assert [(block.data, block.comments) for block in blocks] == [(b"a", (b": hb",)), (b"", ()), (b"\n", ())]


def test_answers_are_played_as_the_case_has_them() -> None:
    """The player: each element of ``chunks`` is one write, a pause is a gate."""
    gates: list[anyio.Event] = []
    answer: Answer = load("SSE-11").answers("", gates)[0]
    assert [isinstance(chunk, bytes) for chunk in answer.chunks] == [True, False, True]
    assert list(answer.chunks)[1] is gates[0]
