"""Upstream breaks off, falls silent or isn't there; and what nobody may do about it by himself."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.cases import load, single_bytes
from support.frames import SSE, asks, completed, created, delta, done, message, sse
from support.legato import ASKED, Legato, legato, proxied, released, request
from support.rules import Stream, check
from support.upstream import Answer, ScriptedUpstream

from proxy.errors import UpstreamUnreachable
from proxy.upstream import Exchange, Request, Upstream

pytestmark = pytest.mark.anyio

CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "pay", "arguments": "{}"}


def first_cycle() -> Answer:
    """A first cycle that asks to go on."""
    return sse(created(), done(message("one", "m1")), asks())


async def played(
    upstream: ScriptedUpstream, proxy: Legato, *answers: Answer, **how: Any
) -> tuple[Stream, dict[str, Any]]:
    """A task with these answers: its stream and its state."""
    upstream.plays(*answers)
    reading = await proxy.whole(**how)
    return check(reading.body), await proxy.show(reading.task)


# --- in the middle of a body --------------------------------------------------------------------------


@pytest.mark.parametrize("single", [False, True], ids=["as written", "byte by byte"])
async def test_a_cut_first_cycle_is_one_failure(single: bool) -> None:
    """PX-17: a well-formed end after one failure, no half event, upstream let go, nothing sent again."""
    case = load("PX-17")
    async with proxied() as (upstream, proxy):
        answers = case.answers()
        played_ = [single_bytes(answer) for answer in answers] if single else answers
        stream, shown = await played(upstream, proxy, *played_, **case.request)
        assert stream.types == ["response.created", "response.output_text.delta", "response.failed"]
        assert stream.error["code"] == "upstream_incomplete"
        assert "broke" in stream.error["message"]
        assert stream.response["id"] == "resp_u1"
        assert stream.response["status"] == "failed"
        assert b'"respon"' not in stream.body
        assert (shown["state"], shown["reason"]) == ("failed", "upstream_incomplete")
        await released(upstream, proxy)
        assert len(upstream.requests) == 1


async def test_a_first_cycle_that_just_ends_is_one_failure() -> None:
    """PX-19: the same response id, the next number, a text that says so; failed, not completed."""
    case = load("PX-19")
    async with proxied() as (upstream, proxy):
        stream, shown = await played(upstream, proxy, *case.answers(), **case.request)
        assert stream.types == ["response.created", "response.output_text.delta", "response.failed"]
        assert stream.events[-1]["sequence_number"] == 2
        assert stream.response["id"] == "resp_u1"
        assert stream.error["code"] == "upstream_incomplete"
        assert "ended the body early" in stream.error["message"]
        assert shown["state"] == "failed"
        assert len(upstream.requests) == 1


async def test_a_cut_second_cycle_has_numbers_without_gaps() -> None:
    """RS-06: 0 to n, legato's own failure included, though openings and the continuation are hidden."""
    case = load("RS-06")
    async with proxied() as (upstream, proxy):
        stream, shown = await played(upstream, proxy, *case.answers(), **case.request)
        assert [event["sequence_number"] for event in stream.events] == list(range(8))
        assert stream.types[-1] == "response.failed"
        assert stream.error["code"] == "continuation_unknown"
        assert stream.text == "part onepart two"
        assert [item["id"] for item in stream.response["output"]] == ["m1"], "m2 was never finished"
        assert (shown["state"], shown["reason"]) == ("needs_review", "continuation_unknown")
        await released(upstream, proxy)
        assert len(upstream.requests) == 2


@pytest.mark.parametrize("end", ["fin", "cut", "reset"])
async def test_a_broken_later_cycle_names_what_is_uncertain(end: Any) -> None:
    """The call that was seen and has no output is named; nothing is sent again."""
    broken = sse(done(CALL, id="resp_u2"), end=end)
    async with proxied() as (upstream, proxy):
        stream, shown = await played(upstream, proxy, first_cycle(), broken)
        assert stream.error["code"] == "continuation_unknown"
        assert "pay (call_1)" in stream.error["message"]
        assert "nothing was sent again" in stream.error["message"]
        assert [item["id"] for item in stream.response["output"]] == ["m1", "fc_1"]
        assert (shown["state"], len(upstream.requests)) == ("needs_review", 2)


@pytest.mark.parametrize("framing", ["length", "close", "chunked"])
@pytest.mark.parametrize("end", ["cut", "reset"])
async def test_an_ending_that_stood_before_the_break_is_an_ending(framing: Any, end: Any) -> None:
    """Upstream said that it was complete; that the connection broke behind it changes nothing."""
    async with proxied() as (upstream, proxy):
        ending = sse(completed(message("a")), framing=framing, end=end)
        if framing == "length":
            ending.headers = SSE | {"content-length": "99999"}
        stream, shown = await played(upstream, proxy, sse(asks()), ending)
        assert stream.types == ["response.completed"]
        assert (shown["state"], len(upstream.requests)) == ("completed", 2)
        await released(upstream, proxy)


async def test_a_continuation_that_stood_before_the_break_is_answered() -> None:
    """The checkpoint had been reached: the follow-up goes out once."""
    async with proxied() as (upstream, proxy):
        first = sse(created(), done(message("one")), asks(), end="reset")
        stream, _ = await played(upstream, proxy, first, sse(completed(message("b", "m2"))))
        assert stream.types[-1] == "response.completed"
        assert len(upstream.requests) == 2


async def test_a_body_that_stays_open_behind_its_ending_is_closed() -> None:
    """Upstream forgets to hang up: after ``seam_grace`` the client has its end, and upstream is closed."""
    async with proxied(seam_grace=0.05) as (upstream, proxy):
        first, second = sse(asks(), end="hang"), sse(completed(message("a")), end="hang")
        stream, shown = await played(upstream, proxy, first, second)
        assert stream.types == ["response.completed"]
        assert shown["state"] == "completed"
        await released(upstream, proxy)
        assert upstream.left == 2


async def test_done_ends_a_body_at_once() -> None:
    """Behind ``[DONE]`` nothing is waited for: not the end of the body, not ``seam_grace``."""
    gate = anyio.Event()
    async with proxied(seam_grace=60) as (upstream, proxy):
        first = sse(delta("a"), asks(), b"data: [DONE]\n\n", gate, delta("never"), end="hang")
        stream, _ = await played(upstream, proxy, first, sse(delta("b", "m2"), b"data: [DONE]\n\n", gate))
        assert stream.text == "ab"
        assert stream.done
        await released(upstream, proxy)


# --- silence ------------------------------------------------------------------------------------------


async def test_silence_before_the_head_is_504_and_not_to_be_repeated() -> None:
    """SDKs repeat a 504 by themselves; upstream has the request, so ``x-should-retry`` says no."""
    async with proxied(max_silence=0.2) as (upstream, proxy):
        upstream.plays(Answer(gate=anyio.Event()))
        answer = await proxy.ask(request(ASKED))
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["code"]) == (504, "upstream_timeout")
        assert (answer.one("x-should-retry"), answer.one("retry-after")) == (b"false", None)
        assert await proxy.tasks() == []
        await released(upstream, proxy)
        assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    ("cycle", "code", "state"),
    [(1, "upstream_incomplete", "failed"), (2, "continuation_unknown", "needs_review")],
)
async def test_silence_in_the_middle_is_a_failure(cycle: int, code: str, state: str) -> None:
    """After ``max_silence`` without a byte the outcome is unknown; heartbeats went on until then."""
    silent = sse(delta("a", "m2"), end="hang")
    async with proxied(max_silence=0.4, heartbeat=0.1) as (upstream, proxy):
        stream, shown = await played(upstream, proxy, *[first_cycle()][: cycle - 1], silent)
        assert stream.error["code"] == code
        assert "silent" in stream.error["message"]
        assert stream.heartbeats >= 2
        assert shown["state"] == state
        await released(upstream, proxy)
        assert len(upstream.requests) == cycle


async def test_silence_before_a_later_head_is_unknown() -> None:
    """A follow-up was sent and nothing came back: a person must look."""
    async with proxied(max_silence=0.3) as (upstream, proxy):
        stream, shown = await played(upstream, proxy, first_cycle(), Answer(gate=anyio.Event()))
        assert stream.error["code"] == "continuation_unknown"
        assert shown["state"] == "needs_review"
        await released(upstream, proxy)
        assert len(upstream.requests) == 2


# --- no answer ----------------------------------------------------------------------------------------


async def test_an_upstream_that_is_not_there_is_502_within_two_seconds() -> None:
    """Nothing was sent: ``x-should-retry: true`` with a ``Retry-After``, and no task remains."""
    async with proxied() as (upstream, proxy):
        upstream.shut()
        answer = await proxy.ask(request(ASKED), limit=2)
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["code"]) == (502, "upstream_unreachable")
        assert (answer.one("x-should-retry"), answer.one("retry-after")) == (b"true", b"1")
        assert await proxy.tasks() == []


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 2", b"SSH-2.0-x\r\n\r\n"], ids=["closed", "half", "no HTTP"])
@pytest.mark.parametrize("end", ["cut", "reset"])
async def test_a_first_request_that_got_no_answer_is_not_to_be_repeated(raw: bytes, end: Any) -> None:
    """It may have been taken: 502 with ``x-should-retry: false``, one request, no task."""
    async with proxied() as (upstream, proxy):
        upstream.plays(Answer(raw=raw, framing="none", end=end))
        answer = await proxy.ask(request(ASKED))
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (502, "upstream_incomplete")
        assert answer.one("x-should-retry") == b"false"
        await released(upstream, proxy)
        assert len(upstream.requests) == 1
        assert await proxy.tasks() == []


@pytest.mark.parametrize("log", ["memory:", "sqlite:"])
async def test_a_refused_connection_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str
) -> None:
    """RT-03, connect refused: nothing was sent, so it is tried until upstream is back; one follow-up."""
    monkeypatch.setattr("proxy.core.task._FIRST_WAIT", 0.01)
    case = load("RT-03")
    first, last = case.answers("connect refused on follow-up, then up")
    gate = anyio.Event()
    first.headers, first.chunks = SSE | {"connection": "close"}, [*first.chunks, gate]
    if log == "sqlite:":
        log += str(tmp_path / "log.db")
    async with ScriptedUpstream() as upstream, legato(upstream, log=log) as proxy:
        refused = back_after(monkeypatch, upstream, 2)
        upstream.plays(first, last)
        async with proxy.start(**case.request) as reading:
            await reading.until(b"response.created")
            upstream.shut()
            gate.set()
            stream = check(await reading.rest())
        assert stream.types == ["response.created", "response.completed"]
        assert len(refused) == 2
        assert len(upstream.requests) == 2
        assert (await proxy.show(reading.task))["state"] == "completed"
    if log != "memory:":
        assert notes(tmp_path / "log.db").count("unsent") == 2


def back_after(
    monkeypatch: pytest.MonkeyPatch, upstream: ScriptedUpstream, times: int
) -> list[UpstreamUnreachable]:
    """Watch the product's seam: after so many failed connections upstream accepts them again."""
    failures: list[UpstreamUnreachable] = []
    opens = Upstream.open

    async def watched(self: Upstream, request: Request) -> Exchange:
        try:
            return await opens(self, request)
        except UpstreamUnreachable as exc:
            failures.append(exc)
            if len(failures) == times:
                await upstream.listen()
            raise

    monkeypatch.setattr(Upstream, "open", watched)
    return failures


def notes(path: Path) -> list[str]:
    """The kinds of the notes in a log's file."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT kind FROM record WHERE kind IS NOT NULL").fetchall()
    connection.close()
    return [kind for (kind,) in rows]


async def test_an_upstream_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past ``retry_budget``: failed, ``upstream_unreachable``, with the output so far."""
    monkeypatch.setattr("proxy.core.task._FIRST_WAIT", 0.05)
    gate = anyio.Event()
    first = first_cycle()
    first.headers, first.chunks = SSE | {"connection": "close"}, [*first.chunks, gate]
    async with proxied(retry_budget=0.2) as (upstream, proxy):
        upstream.plays(first)
        async with proxy.start() as reading:
            await reading.until(b"response.created")
            upstream.shut()
            gate.set()
            stream = check(await reading.rest())
        assert stream.error["code"] == "upstream_unreachable"
        assert "could not connect" in stream.error["message"]
        assert [item["id"] for item in stream.response["output"]] == ["m1"]
        assert (await proxy.show(reading.task))["state"] == "failed"


async def test_a_504_on_a_follow_up_is_not_repeated() -> None:
    """RT-03, 504: the outcome is unknown; one accepted follow-up, and the text says what is unknown."""
    case = load("RT-03")
    async with proxied() as (upstream, proxy):
        stream, shown = await played(upstream, proxy, *case.answers("504 on follow-up"), **case.request)
        assert_unknown(stream, shown, upstream)
        assert "504" in stream.error["message"]


async def test_a_reset_before_the_head_of_a_follow_up_is_not_repeated() -> None:
    """RT-03, accepted and reset: the same, though not one byte of an answer came."""
    case = load("RT-03")
    first, last = case.answers("accepted, then RST before head")
    reset = Answer(raw=b"", framing="none", end="reset")
    async with proxied() as (upstream, proxy):
        stream, shown = await played(upstream, proxy, first, reset, last, **case.request)
        assert_unknown(stream, shown, upstream)
        await released(upstream, proxy)


async def test_a_kept_connection_that_dies_is_no_reason_to_repeat() -> None:
    """A follow-up on the first cycle's own connection, cut before a byte came back: unknown, not repeated."""
    async with proxied() as (upstream, proxy):
        lost = Answer(raw=b"", framing="none", end="cut")
        stream, shown = await played(upstream, proxy, first_cycle(), lost, sse(completed(message("b"))))
        assert_unknown(stream, shown, upstream)
        first, follow_up = upstream.requests
        assert first.connection == follow_up.connection


def assert_unknown(stream: Stream, shown: dict[str, Any], upstream: ScriptedUpstream) -> None:
    """The outcome of the one follow-up is unknown, and that is what everybody is told."""
    assert stream.types[-1] == "response.failed"
    assert stream.error["code"] == "continuation_unknown"
    assert stream.error["message"].lower().startswith("continuation state unknown")
    assert (shown["state"], shown["reason"]) == ("needs_review", "continuation_unknown")
    assert len(upstream.requests) == 2
