"""Upstream says no, or something that is no stream: to the first request, and to a follow-up."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs
from support.cases import assert_continues, load
from support.client import connect
from support.frames import SSE, asks, completed, created, delta, done, message, sse
from support.legato import ASKED, OWNER, Legato, Reading, proxied, request
from support.rules import Stream, check
from support.upstream import Answer, ScriptedUpstream

pytestmark = pytest.mark.anyio

LIMITED = b'{"error_code":"REQUEST_LIMIT_EXCEEDED","message":"slow down"}'
CONTINUE = {"type": "task_continue_request", "id": "continue_a1", "step": 3}


def says(status: int, body: bytes = b"{}", type_: str = "application/json", **headers: str) -> Answer:
    """An answer that is no stream."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status=status, headers={"content-type": type_, **named}, chunks=[body], framing="length")


def first_cycle() -> Answer:
    """A first cycle that asks to go on."""
    return sse(created(), done(message("one", "m1")), asks())


def last_cycle() -> Answer:
    """A second one that ends well."""
    return sse(completed(message("two", "m2"), response="resp_u2"))


async def refused(
    upstream: ScriptedUpstream, proxy: Legato, *answers: Answer
) -> tuple[Stream, dict[str, Any]]:
    """A task whose follow-ups get these answers: its stream and its state."""
    upstream.plays(first_cycle(), *answers)
    reading = await proxy.whole()
    return check(reading.body), await proxy.show(reading.task)


# --- the first request --------------------------------------------------------------------------------


async def test_a_first_429_is_the_clients() -> None:
    """PX-12: status, headers and body as they are, no SSE, no task, one request."""
    case = load("PX-12")
    async with proxied() as (upstream, proxy), connect(proxy.port) as client:
        upstream.plays(*case.answers("first request"))
        wanted = case.request
        for _ in range(2):
            await client.send(request(raw=wanted["raw"], path=wanted["path"], headers=wanted["headers"]))
            answer = await client.answer()
            assert (answer.status, answer.complete) == (429, True)
            assert answer.one("content-type") == b"application/json"
            assert answer.one("retry-after") == b"7"
            assert answer.one("x-ratelimit-remaining") == b"0"
            assert answer.one("legato-task") is None
            assert answer.body == b'{"error_code":"REQUEST_LIMIT_EXCEEDED"}'
        assert len(upstream.requests) == 2
        assert await proxy.tasks() == []


HTML = b"<html>sign in</html>"


async def test_a_sign_in_page_is_no_stream() -> None:
    """PX-14: body and content type pass unchanged, nothing is added, nothing is sent again."""
    case = load("PX-14")
    async with proxied() as (upstream, proxy):
        upstream.plays(*case.answers())
        reading = await proxy.whole(**case.request)
        assert (reading.status, reading.body) == (200, HTML)
        assert reading.one("content-type") == "text/html; charset=utf-8"
        assert reading.one("legato-task") is reading.one("cache-control") is None
        assert len(upstream.requests) == 1
        assert await proxy.tasks() == []


@pytest.mark.parametrize(
    "answer",
    [
        says(400, b'{"error_code":"BAD_REQUEST"}', x_request_id="dbx-1"),
        says(401, www_authenticate="Bearer"),
        says(404),
        says(500, b"oops", "text/plain"),
        says(503, retry_after="3"),
        says(504, b"<html>504</html>", "text/html"),
        says(307, b"", location="https://elsewhere.example/x"),
        says(200, b'{"output":[]}'),
        says(400, b'data: {"error_code":"BAD_REQUEST"}\n\n', "text/event-stream"),
        says(200, b"data: x\n\n", "text/plain"),
        Answer(status=200, chunks=[b"data: x\n\n"], framing="length"),
        Answer(status=204, framing="none"),
        says(200, b"???", "text/event-stream", content_encoding="unheard-of"),
    ],
    ids=lambda answer: f"{answer.status} {dict(answer.headers).get('content-type')}",
)
async def test_what_is_no_stream_is_handed_on(answer: Answer) -> None:
    """A non-2xx or non-SSE answer to a first request is the client's; legato adds and retries nothing."""
    async with proxied() as (upstream, proxy), connect(proxy.port) as client:
        upstream.plays(answer)
        await client.send(request(ASKED))
        got = await client.answer()
        assert (got.status, got.body) == (answer.status, b"".join(answer.chunks))  # type: ignore[arg-type]
        for name, value in dict(answer.headers).items():
            assert got.one(str(name)) == str(value).encode()
        assert got.one("x-should-retry") is got.one("legato-task") is None
        assert len(upstream.requests) == 1
        await client.send(request(method="GET", path="/legato/tasks"))
        assert json.loads((await client.answer()).body)["data"] == []


async def test_a_stream_that_upstream_labels_as_one_but_refuses_at_once_is_a_task() -> None:
    """An error inside a 200 is a failed task: it is the stream's terminal event, and is not repeated."""
    error = b'data: {"error_code":"BAD_REQUEST","message":"no such agent"}\n\n'
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(error, b"data: [DONE]\n\n"))
        reading = await proxy.whole()
        stream = check(reading.body, merged=False)
        assert stream.events == [
            {"error_code": "BAD_REQUEST", "message": "no such agent", "sequence_number": 0}
        ]
        assert stream.done
        assert (await proxy.show(reading.task))["state"] == "failed"
        assert len(upstream.requests) == 1


# --- a follow-up: wait --------------------------------------------------------------------------------


async def test_a_429_is_waited_out() -> None:
    """PX-12: at least as long as told, heartbeats meanwhile, the same bytes again, then the ending."""
    case = load("PX-12")
    async with proxied(heartbeat=0.1) as (upstream, proxy):
        upstream.plays(*case.answers("follow-up"))
        reading = await proxy.whole(**case.request)
        stream = check(reading.body)
        assert stream.types == ["response.created", "response.completed"]
        assert stream.heartbeats >= 10
        first, follow_up, again = upstream.requests
        assert again.body == follow_up.body
        assert_continues(first.body, again.body, CONTINUE, whole=True)
        assert (await proxy.show(reading.task))["state"] == "completed"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_date_is_waited_for(status: int) -> None:
    """PX-12: ``Retry-After`` may be an HTTP date, on a 503 too; one that has passed means at once."""
    when = int(time.time()) + 1
    dates = [formatdate(time.time() - 3600, usegmt=True), formatdate(when, usegmt=True)]
    async with proxied() as (upstream, proxy):
        answers = [says(status, LIMITED, retry_after=date) for date in dates]
        stream, shown = await refused(upstream, proxy, *answers, last_cycle())
        assert time.time() >= when
        assert stream.types[-1] == "response.completed"
        assert (shown["state"], len(upstream.requests)) == ("completed", 4)


@pytest.mark.parametrize(
    "answer",
    [says(429, LIMITED), says(503, LIMITED), says(429, b"", "text/plain"), says(429, retry_after="soon")],
    ids=["429", "503 with a code", "no body", "unreadable"],
)
async def test_without_a_hint_the_waits_grow(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    """A clear refusal that names no time is repeated with a back-off of legato's own."""
    monkeypatch.setattr("proxy.core.task._FIRST_WAIT", 0.01)
    async with proxied() as (upstream, proxy):
        stream, shown = await refused(upstream, proxy, answer, answer, answer, last_cycle())
        assert stream.types[-1] == "response.completed"
        assert (shown["state"], len(upstream.requests)) == ("completed", 5)
        assert len({seen.body for seen in upstream.requests[1:]}) == 1


async def test_a_spent_budget_is_one_failure_with_the_hint() -> None:
    """PX-12: the wait would pass ``retry_budget``: one ``response.failed`` with the code and the hint."""
    async with proxied(retry_budget=1.0) as (upstream, proxy):
        stream, shown = await refused(
            upstream, proxy, says(429, LIMITED, retry_after="7", x_request_id="r-1")
        )
        assert stream.error["code"] == "upstream_refused"
        assert stream.error["upstream"] == {
            "status": 429,
            "code": "REQUEST_LIMIT_EXCEEDED",
            "message": "slow down",
            "request_id": "r-1",
            "retry_after": 7.0,
        }
        assert "retry_budget" in stream.error["message"]
        assert [item["id"] for item in stream.response["output"]] == ["m1"]
        assert (shown["state"], len(upstream.requests)) == ("failed", 2)


async def test_a_budget_of_nothing_is_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """``retry_budget`` 0: the first refusal is the last."""
    monkeypatch.setattr("proxy.core.task._FIRST_WAIT", 0.01)
    async with proxied(retry_budget=0) as (upstream, proxy):
        stream, _ = await refused(upstream, proxy, says(429, LIMITED))
        assert stream.error["code"] == "upstream_refused"
        assert len(upstream.requests) == 2


async def test_the_budget_is_for_all_tries_of_one_follow_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream that refuses for ever is given up; a new seam has a new budget."""
    monkeypatch.setattr("proxy.core.task._FIRST_WAIT", 0.02)
    wait = says(429, LIMITED)
    second = sse(done(message("b", "m2")), asks("continue_b", 4))
    async with proxied(retry_budget=0.2) as (upstream, proxy):
        stream, shown = await refused(upstream, proxy, wait, wait, second, wait, wait, last_cycle())
        assert stream.types[-1] == "response.completed"
        assert shown["cycles"] == 3
        stream, shown = await refused(upstream, proxy, wait)
        assert stream.error["code"] == "upstream_refused"
        assert shown["state"] == "failed"


@pytest.mark.parametrize("end", ["cut", "reset"])
async def test_a_refusal_whose_body_breaks_is_a_refusal(end: Any) -> None:
    """The status says that nothing was accepted; a body that breaks off changes nothing about that."""
    broken = Answer(
        status=429,
        headers={"content-type": "application/json", "content-length": "99", "retry-after": "0"},
        chunks=[b'{"error'],
        framing="length",
        end=end,
    )
    async with proxied() as (upstream, proxy):
        stream, _ = await refused(upstream, proxy, broken, last_cycle())
        assert stream.types[-1] == "response.completed"
        assert len(upstream.requests) == 3


@pytest.mark.parametrize("endless", [True, False], ids=["endless", "silent"])
async def test_nobody_waits_for_the_rest_of_a_refusal(endless: bool) -> None:
    """Of a refusal's body a part is enough: an endless one is closed, a silent one is not waited for long."""

    def chunks() -> Any:
        yield b"x" * 100
        while endless:
            yield b"x" * 65536

    async with proxied(max_silence=0.3) as (upstream, proxy):
        answer = Answer(status=422, headers={"content-type": "text/plain"}, chunks=chunks(), end="hang")
        stream, _ = await refused(upstream, proxy, answer)
        assert stream.error["code"] == "upstream_refused"
        assert 100 <= len(stream.error["upstream"]["message"]) <= 2000
        await upstream.until(lambda: upstream.open == 0)


# --- a follow-up: never again -------------------------------------------------------------------------


async def test_a_final_refusal_is_told_whole() -> None:
    """DB-04: status, code, message and request id in one failure; one line in the log; no repetition."""
    case = load("DB-04")
    async with proxied() as (upstream, proxy):
        upstream.plays(*case.answers())
        with capture_logs() as told:
            reading = await proxy.whole(**case.request)
        stream = check(reading.body)
        assert stream.types == ["response.created", "response.failed"]
        assert stream.response["id"] == "resp_u1"
        error = stream.error
        assert error["code"] == "upstream_refused"
        assert error["upstream"] == {
            "status": 400,
            "code": "BAD_REQUEST",
            "message": "tool call without result",
            "request_id": "dbx-77",
        }
        for part in ("400", "BAD_REQUEST", "tool call without result", "dbx-77"):
            assert part in error["message"]
        shown = await proxy.show(reading.task)
        assert (shown["state"], shown["reason"], len(upstream.requests)) == ("failed", "upstream_refused", 2)
    line = next(entry for entry in told if entry["event"] == "task ended")
    assert (line["task"], line["cycle"], line["continuation"]) == (reading.task, 2, "continue_a1")
    assert line["log_level"] == "warning"


@pytest.mark.parametrize(
    "answer",
    [
        says(404, b'{"error_code":"RESOURCE_DOES_NOT_EXIST","message":"gone"}'),
        says(422, b'{"detail":"gone"}'),
        says(409, b'{"error":{"code":"X","message":"gone"}}'),
        says(302, b"gone", "text/html", location="https://login.example/"),
        says(405, b"gone", "text/plain"),
    ],
    ids=["404", "422", "409", "302", "405"],
)
async def test_other_4xx_and_redirects_are_final(answer: Answer) -> None:
    """Nothing was accepted and nothing is sent again; a redirect to a sign-in page is never followed."""
    async with proxied() as (upstream, proxy):
        stream, shown = await refused(upstream, proxy, answer)
        assert stream.error["code"] == "upstream_refused"
        assert stream.error["upstream"]["status"] == answer.status
        assert "gone" in stream.error["message"]
        assert (shown["state"], len(upstream.requests)) == ("failed", 2)


@pytest.mark.parametrize(
    "answer",
    [
        says(200, HTML, "text/html"),
        says(200, b'{"output":[]}'),
        says(202, b""),
        says(500, b'{"error_code":"INTERNAL_ERROR"}'),
        says(502, b"<html>502 Bad Gateway</html>", "text/html"),
        says(503, b"overloaded", "text/plain"),
        says(504, b"upstream request timeout", "text/plain"),
        says(408, b"", "text/plain"),
    ],
    ids=lambda answer: f"{answer.status} {dict(answer.headers)['content-type']}",
)
async def test_an_unknown_outcome_is_never_sent_again(answer: Answer) -> None:
    """RT-03 and its like: something may have been done, so a person must look: ``needs_review``."""
    async with proxied() as (upstream, proxy):
        stream, shown = await refused(upstream, proxy, answer, last_cycle())
        assert stream.error["code"] == "continuation_unknown"
        assert "continuation state unknown" in stream.error["message"].lower()
        assert str(answer.status) in stream.error["message"]
        assert [item["id"] for item in stream.response["output"]] == ["m1"]
        assert (shown["state"], len(upstream.requests)) == ("needs_review", 2)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_credential_that_upstream_no_longer_takes(status: int) -> None:
    """The task is held, and the attached stream says why; the credential itself stands nowhere."""
    echo = b'{"error_code":"UNAUTHENTICATED","message":"bad token tok-A-secret"}'
    owner = ("authorization", "Bearer tok-A-secret")
    async with proxied() as (upstream, proxy):
        upstream.plays(first_cycle(), says(status, echo))
        reading = await proxy.whole(headers=[owner])
        stream = check(reading.body)
        assert stream.error["code"] == "credential_expired"
        assert b"tok-A-secret" not in reading.body
        shown = await proxy.show(reading.task, owner)
        assert (shown["state"], shown["reason"]) == ("held", "credential_expired")
        assert len(upstream.requests) == 2


# --- a follow-up: another form ------------------------------------------------------------------------


def later() -> Answer:
    """A second cycle with an item of its own."""
    return sse(done(message("b", "m2")), asks("continue_b", 4))


async def test_a_400_that_names_the_form_brings_the_next_one() -> None:
    """All items, then all pairs, then the last pair; what worked is used for the endpoint's next task."""
    wrong = says(400, b'{"error_code":"BAD_REQUEST","message":"Invalid message sequence."}')
    async with proxied() as (upstream, proxy):
        stream, _ = await refused(upstream, proxy, wrong, wrong, later(), last_cycle())
        assert stream.types[-1] == "response.completed"
        counts = [len(json.loads(seen.body)["input"]) for seen in upstream.requests]
        assert counts == [1, 4, 3, 3, 3], "original; with item and pair; pairs; last pair; last pair again"
        upstream.requests.clear()
        await refused(upstream, proxy, last_cycle())
        assert [len(json.loads(seen.body)["input"]) for seen in upstream.requests] == [1, 3]


async def test_a_400_that_names_the_other_key_brings_that_key() -> None:
    """A body with ``messages`` is told to use ``input``: once, and it keeps its other members."""
    text = b"Invalid request: 'messages' field is not supported. Please use 'input' field instead."
    body = {key: value for key, value in ASKED.items() if key != "input"} | {"messages": ASKED["input"]}
    async with proxied() as (upstream, proxy):
        wrong = says(400, b'{"message":"%b"}' % text)
        upstream.plays(first_cycle(), wrong, last_cycle())
        check((await proxy.whole(body)).body)
        first, second, third = (json.loads(seen.body) for seen in upstream.requests)
        assert list(first) == list(second) == ["databricks_options", "stream", "messages"]
        assert third.pop("input") == second.pop("messages")
        assert third == second


async def test_a_413_takes_the_smaller_policies_then_gives_up() -> None:
    """``follow_up_too_large`` once the last pair is too large as well."""
    async with proxied() as (upstream, proxy):
        stream, shown = await refused(upstream, proxy, says(413, b'{"error_code":"TOO_LARGE"}'))
        assert stream.error["code"] == "follow_up_too_large"
        assert (shown["state"], len(upstream.requests)) == ("failed", 4)


async def test_upstreams_limit_is_kept_without_asking() -> None:
    """With ``upstream_body_limit`` a follow-up above it never leaves; the pairs alone fit."""
    big = sse(done(message("x" * 3000, "m1")), asks())
    async with proxied(upstream_body_limit=2000) as (upstream, proxy):
        upstream.plays(big, last_cycle())
        stream = check((await proxy.whole()).body)
        assert len(stream.response["output"][0]["content"][0]["text"]) == 3000
        assert len(upstream.requests) == 2
        assert_continues(upstream.requests[0].body, upstream.requests[1].body, CONTINUE, whole=True)


# --- secrets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_an_echoed_secret_is_masked(status: int) -> None:
    """What legato repeats of a refusal holds no credential, in the stream and in the log's lines."""
    secrets = {"authorization": "Bearer tok-verysecret", "cookie": "session=s3cr3tcookie"}
    secrets["x-forwarded-access-token"] = "tok-forwarded"
    echo = json.dumps({"message": f"headers were {secrets}"}).encode()
    async with proxied(retry_budget=0) as (upstream, proxy):
        upstream.plays(first_cycle(), says(status, echo, retry_after="9"))
        with capture_logs() as told:
            reading = await proxy.whole(headers=list(secrets.items()))
        check(reading.body)
        for where in (reading.body, repr(told).encode()):
            for secret in (b"tok-verysecret", b"s3cr3tcookie", b"tok-forwarded"):
                assert secret not in where
        assert b"***" in reading.body


# --- a client that reads -------------------------------------------------------------------------------


async def test_the_clients_head_waits_for_upstreams() -> None:
    """Until upstream has answered the client gets nothing, so a refusal can still be its status."""
    gate = anyio.Event()
    async with proxied(heartbeat=0.05) as (upstream, proxy):
        answer = says(418, b'{"error_code":"TEAPOT"}')
        answer.gate = gate
        upstream.plays(answer)
        async with proxy.start() as reading:
            await upstream.until(lambda: any(seen.complete for seen in upstream.requests))
            got: list[Reading] = []
            async with anyio.create_task_group() as group:

                async def head() -> None:
                    await reading.head()
                    got.append(reading)

                group.start_soon(head)
                await anyio.wait_all_tasks_blocked()
                assert got == []
                gate.set()
            assert reading.status == 418


async def test_odd_frames_of_a_refused_stream_do_not_matter() -> None:
    """A 4xx with the media type of a stream is a refusal, for a follow-up too."""
    answer = Answer(status=400, headers=SSE, chunks=[delta("x"), b'data: {"error":"no"}\n\n'])
    async with proxied() as (upstream, proxy):
        stream, _ = await refused(upstream, proxy, answer)
        assert stream.error["code"] == "upstream_refused"
        assert stream.text == ""
        assert OWNER[1].encode() not in stream.body
