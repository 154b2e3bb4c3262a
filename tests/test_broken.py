"""What broke once under the real commands, each case with the way to see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from support.frames import asks, completed, created, done, message, sse
from support.legato import ASKED, proxied, released
from support.rules import check
from support.upstream import Answer

from proxy.core.task import Task
from proxy.log.base import NewTask
from proxy.log.memory import MemoryLog
from proxy.runner import Runner
from proxy.web.start import Starter


def as_served(work: Coroutine[Any, Any, None]) -> None:
    """Run it as ``legato serve`` runs: in a plain loop, which no test plugin has told anyio of."""
    asyncio.run(work)


def test_a_refused_follow_up_is_sent_again_under_a_plain_loop() -> None:
    """A timer's callback runs in no task; the waiting for the next try never ended there."""

    async def work() -> None:
        async with proxied() as (upstream, proxy):
            refusal = Answer(status=429, headers={"retry-after": "0"}, chunks=[b"{}"], framing="length")
            first = sse(created(), done(message("one", "m1")), asks())
            upstream.plays(first, refusal, sse(completed(message("b", "m2"))))
            reading = await proxy.whole()
            assert check(reading.body).types[-1] == "response.completed"
            assert len(upstream.requests) == 3

    as_served(work())


def test_an_open_body_is_closed_behind_its_ending_under_a_plain_loop() -> None:
    """``seam_grace`` ends there too: upstream forgets to hang up, and the client has its end."""

    async def work() -> None:
        async with proxied(seam_grace=0.05) as (upstream, proxy):
            upstream.plays(sse(asks(), end="hang"), sse(completed(message("a")), end="hang"))
            reading = await proxy.whole()
            assert check(reading.body).types == ["response.completed"]
            await released(upstream, proxy)

    as_served(work())


@pytest.mark.anyio
@pytest.mark.parametrize("conversation", [5, True, {"role": "user", "content": "hi"}])
async def test_a_conversation_that_is_no_list_goes_on(conversation: object) -> None:
    """Upstream took a number for ``input``: the follow-up wraps it, and upstream judges that too."""
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), done(message("one", "m1")), asks()), sse(completed(message("b", "m2"))))
        reading = await proxy.whole({**ASKED, "input": conversation})
        assert check(reading.body).types[-1] == "response.completed"
        assert json.loads(upstream.requests[1].body)["input"][0] == conversation


@pytest.mark.anyio
async def test_a_task_that_broke_before_its_reader_came_leaves_no_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It breaks with its first bytes, while its head is on the way: the client is cut, not left waiting."""

    def breaks(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    stream = Starter._stream

    async def late(self: Starter, runner: Runner, *rest: Any) -> None:
        while not runner.broken:  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0)
        await stream(self, runner, *rest)

    monkeypatch.setattr(Task, "_continue", breaks)
    monkeypatch.setattr(Starter, "_stream", late)
    async with proxied(seam_grace=0.05) as (upstream, proxy):
        upstream.plays(sse(created(), asks(), b"data: [DONE]\n\n"))
        async with proxy.start() as reading:
            with pytest.raises(asyncio.IncompleteReadError):
                await reading.rest()


@pytest.mark.anyio
async def test_a_client_that_leaves_while_its_task_is_written_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stood in the log, but who waits for the disk was gone: nobody took it out again."""
    create, written = MemoryLog.create, asyncio.Event()

    async def slow(self: MemoryLog, row: NewTask, *rest: Any, **how: Any) -> int:
        epoch = await create(self, row, *rest, **how)
        written.set()
        await asyncio.sleep(60)
        return epoch

    monkeypatch.setattr(MemoryLog, "create", slow)
    async with proxied(log="memory:") as (_, proxy):
        async with proxy.start():
            await written.wait()
            assert len(await proxy.tasks()) == 1
        await proxy.idle()
        assert await proxy.tasks() == []
