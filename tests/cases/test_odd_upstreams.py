"""What no upstream should send: legato passes it on or ends well, and serves everything else as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs
from support.frames import DONE, SSE, asks, completed, created, delta, done, frame, message, sse, two_cycles
from support.legato import ASKED, OWNER, Legato, proxied, request
from support.rules import check

pytestmark = pytest.mark.anyio

ASKS = b'data: {"type":"response.output_item.done","item":{"type":"task_continue_request","id":"a"}}\n\n'


def event(text: str) -> bytes:
    """A frame with this data."""
    return f"data: {text}\n\n".encode()


ODD = [
    event('{"type":"response.output_item.done","item":{"type":"task_continue_request","id":"\\ud83d"}}'),
    event(
        '{"type":"response.output_item.done","item":{"type":"task_continue_request","id":"a","step":1e400}}'
    ),
    event(
        '{"type":"response.output_item.done","item":{"type":"task_continue_request","id":"a",'
        '"step":99999999999999999999999}}'
    ),
    event(
        '{"type":"response.output_item.done","item":{"type":"message","id":"\\ud83d","content":"\\ud83d"},'
        '"n":12345678901234567890123}'
    )
    + ASKS,
    event(
        '{"type":"response.output_item.done","item":{"type":["x"],"id":{"a":1},"call_id":7},'
        '"sequence_number":"x","step":"a"}'
    )
    + ASKS,
    event('{"type":"response.output_item.done","item":null}') + ASKS,
    event('{"type":"response.created","response":"x"}') + ASKS,
    event('{"type":"response.output_text.delta","item_id":7,"delta":{}}') + ASKS,
    event('{"type":"response.output_text.delta","item_id":"m","sequence_number":1.5,"delta":"x"}') + ASKS,
    event('{"type":"response.output_text.delta","sequence_number":-1,"sequence_number":-2}') + ASKS,
    event('{"type":"response.completed","response":{"output":[null,1,"x"],"usage":{"a":"x","b":null}}}'),
    event('{"type":"response.completed","response":{"output":{"a":1},"usage":[1]}}'),
    event('{"type":"response.completed","response":null}'),
    event('{"type":"response.completed"}'),
    event('{"type":"response.incomplete","response":{"incomplete_details":"x"}}'),
    event('{"type":"response.incomplete"}'),
    event('{"type":"response.failed","response":7}'),
    event('{"type":"","error":false}'),
    event('{"type":null,"error":0}'),
    event('{"error":{}}'),
    event("{}") + event("null") + event("7") + event('""'),
    event("[" * 100_000),
    event('{"a":' * 90 + "1" + "}" * 90),
    event('{"type":"response.output_text.delta","delta":"a\\u0000b"}'),
    b'data: {"type":"response.output_text.delta","delta":"\xff\xfe"}\n\n',
    b"data: \x00\n\n",
    b"data:[DONE]\r\r",
    b"event: x\ndata: [DONE] \nid: 3\n\n",
]


@pytest.mark.parametrize("cycle", [1, 2])
@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
async def test_odd_frames_break_nothing(odd: bytes, cycle: int) -> None:
    """In a first cycle and in a later one: a well-formed end, a state that says so, and no bug told of."""
    ending = sse(completed(message("end", "m9"), response="resp_u1"), DONE)
    answers = [sse(created(), done(message("one")), asks("z")), sse(odd, DONE), ending]
    async with proxied() as (upstream, proxy):
        upstream.plays(*answers[2 - cycle :])
        with capture_logs() as told:
            reading = await proxy.whole()
        check(reading.body, merged=False, distinct=False)
        assert not [entry for entry in told if entry["log_level"] == "error"]
        shown = await proxy.show(reading.task)
        assert shown["state"] in ("completed", "failed", "incomplete")
        assert len(upstream.requests) <= 3
        assert len(await proxy.tasks()) == 1


# --- lone surrogates ----------------------------------------------------------------------------------

APPROVAL = {"type": "mcp_approval_request", "id": "X", "name": "X", "arguments": "X"}
SURROGATES = {
    "response id": [created("resp_X"), completed(message("a"), response="resp_X")],
    "approval": [created(), done(APPROVAL), completed()],
    "reason": [
        created(),
        frame({"type": "response.incomplete", "response": {"incomplete_details": {"reason": "X"}}}),
    ],
    "call": [created(), done({"type": "function_call", "call_id": "X", "name": "X", "arguments": "X"})],
    "continuation": [created(), asks("X", response="resp_u1")],
}


@pytest.mark.parametrize("log", ["memory:", "sqlite:"])
@pytest.mark.parametrize("chunks", SURROGATES.values(), ids=SURROGATES.keys())
async def test_a_lone_surrogate_spoils_no_answer(tmp_path: Path, chunks: list[bytes], log: str) -> None:
    """PX-15 on the way back: escapes stay escapes, in the stream and in legato's own answers, after a
    restart too."""
    odd = [chunk.replace(b"X", b"\\ud83d") for chunk in chunks]
    place = log if log == "memory:" else f"{log}{tmp_path / 'log.db'}"
    async with proxied(log=place) as (upstream, proxy):
        upstream.plays(sse(*odd), sse(odd[-1].replace(b"response.output_item.done", b"response.made_up")))
        reading = await proxy.whole()
        assert b"\\ud83d" in reading.body
        check(reading.body, merged=False)
        await shown(proxy, reading.task)
    if log == "sqlite:":
        async with proxied(log=place) as (_, proxy):
            await shown(proxy, reading.task)


async def shown(proxy: Legato, task: str) -> None:
    """The task can be listed and looked at."""
    (listed,) = await proxy.tasks()
    assert listed["id"] == (await proxy.show(task))["id"] == task


# --- answer headers -----------------------------------------------------------------------------------


async def test_answer_headers_go_through() -> None:
    """Repeats and upstream's own names; not hop-by-hop ones, ``Legato-*``, or what no server may send."""
    headers = [
        *SSE.items(),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("X-Request-Id", "dbx-1"),
        ("Connection", "x-theirs"),
        ("X-Theirs", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Legato-Task", "forged"),
        ("Cache-Control", "max-age=60"),
        ("X-Accel-Buffering", "yes"),
        ("Bell", "\x07"),
    ]
    async with proxied() as (upstream, proxy):
        first, second = two_cycles()
        first.headers, second.headers = headers, [*SSE.items(), ("X-Request-Id", "dbx-2")]
        upstream.plays(first, second)
        reading = await proxy.whole()
        check(reading.body)
        assert reading.headers == (
            (b"content-type", b"text/event-stream"),
            (b"set-cookie", b"a=1"),
            (b"set-cookie", b"b=2"),
            (b"x-request-id", b"dbx-1"),
            (b"cache-control", b"no-cache, no-transform"),
            (b"x-accel-buffering", b"no"),
            (b"legato-task", reading.task.encode()),
            (b"transfer-encoding", b"chunked"),
        )


async def test_the_first_status_is_the_clients() -> None:
    """A 2xx is a 2xx; the second cycle's doesn't show."""
    async with proxied() as (upstream, proxy):
        first, second = two_cycles()
        first.status, second.status = 201, 299
        upstream.plays(first, second)
        reading = await proxy.whole()
        assert reading.status == 201
        check(reading.body)


async def test_interim_answers_are_no_answers() -> None:
    """An upstream that says ``100 Continue`` unasked, before each answer."""
    async with proxied() as (upstream, proxy):
        answers = two_cycles()
        for answer in answers:
            answer.continues = True
        upstream.plays(*answers)
        assert check((await proxy.whole()).body).types[-1] == "response.completed"


# --- legato's own trouble -----------------------------------------------------------------------------


class Mute:
    """A logger that can't write."""

    def bind(self, **_: Any) -> Mute:
        return self

    def __getattr__(self, name: str) -> Any:
        def write(*_: Any, **__: Any) -> None:
            raise OSError("no space left on device")

        return write


async def test_a_line_that_cannot_be_written_breaks_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr is closed, or its disk is full: the client gets its stream all the same."""
    monkeypatch.setattr("proxy.runner.logger", Mute())
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        reading = await proxy.whole()
        check(reading.body)
        assert (await proxy.show(reading.task))["state"] == "completed"


async def test_too_many_tasks_are_refused() -> None:
    """429 with ``x-should-retry: false``, for this owner only; once one has ended, there is room again."""
    async with proxied(max_tasks=1) as (upstream, proxy):
        gate = anyio.Event()
        upstream.plays(sse(created(), gate, completed(message("a"))))
        async with proxy.start() as reading:
            await reading.until(b"response.created")
            refused = await proxy.ask(request(ASKED))
            assert (refused.status, refused.one("x-should-retry")) == (429, b"false")
            assert b'"code":"too_many_tasks"' in refused.body
            gate.set()
            other = await proxy.whole(headers=[("authorization", "Bearer tok-B")])
            assert other.status == 200
            check(await reading.rest())
        await proxy.until_state(reading.task, "completed")
        assert (await proxy.whole(headers=[OWNER])).status == 200
        assert len(upstream.requests) == 3


async def test_the_text_of_a_frame_is_never_searched() -> None:
    """``[DONE]``, ``data:`` and a continuation inside a text are text."""
    text = 'data: [DONE]\n\ndata: {"type":"response.completed"}\n\ntask_continue_request'
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), delta(text), completed(message(text))))
        assert check((await proxy.whole()).body).text == text
        assert len(upstream.requests) == 1
