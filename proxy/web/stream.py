"""A task's log, as one client's event stream: the same lines for a live and for a resuming reader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, cast

import anyio
from starlette.types import Message, Receive, Send

from proxy.core.messages import Event, Summary
from proxy.errors import LogUnavailable, TaskNotFound
from proxy.log.base import Tail

# A pause's reason in a comment: one line, and no more of it than a client should have to skip.
MAX_REASON = 200


class Reader:
    """One client at a task's stream.

    Times in seconds. ``heartbeat`` 0 sends none. A client that leaves bytes unread for ``write_timeout``
    is cut without an ending; it may come back at its cursor.
    """

    def __init__(
        self, tail: Tail, send: Send, *, heartbeat: float, write_timeout: float, event_ids: bool = False
    ) -> None:
        self.complete = False
        self._tail = tail
        self._send = send
        self._heartbeat = heartbeat
        self._write_timeout = write_timeout
        self._event_ids = event_ids
        self._loop = asyncio.get_running_loop()
        self._scope = anyio.CancelScope()
        self._timer: asyncio.TimerHandle | None = None
        self._last = self._loop.time()
        self._writes = 0
        self._writing = False
        self._stuck = -1
        self._idle: asyncio.Future[None] = self._loop.create_future()
        self._begun: Begun | None = None

    async def run(self, receive: Receive) -> None:
        """Send everything up to the task's ending. Afterwards ``complete`` says whether it got there."""
        self._tick()
        try:
            with self._scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._watch, receive)
                    await self._pump()
                    group.cancel_scope.cancel()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._tail.close()

    def cut(self) -> None:
        """End this reader without an ending."""
        self._scope.cancel()

    async def _pump(self) -> None:
        """Send what there is, then wait; what comes while we wait is handed over by ``_push``."""
        tail = self._tail
        while True:
            try:
                if not tail.ready:
                    await self._wait()
                events = tail.take()
            except (TaskNotFound, LogUnavailable):
                return
            if events:
                await self._write(self._body(events))
            elif tail.ended:
                await self._end(tail.summary)
                return
            elif self._heartbeat and self._loop.time() - self._last >= self._heartbeat:
                await self._write(heartbeat_line(tail.summary))

    async def _wait(self) -> None:
        """Until there is something that can't be handed over at once."""
        self._idle = self._loop.create_future()
        self._tail.watch(self._push)
        await self._idle
        if self._begun is not None:
            begun, self._begun = self._begun, None
            await begun
            self._writing = False
            self._last = self._loop.time()

    def _push(self) -> None:
        """Hand events over in the turn of whoever wrote them to the log: no task is woken for them.

        A server's ``send`` seldom suspends: only where the client reads slowly. Then, and for all that is
        no plain event, the pump goes on.
        """
        tail = self._tail
        try:
            if tail.summary.open and (events := tail.take()):
                self._begun = _begin(self._send(self._message(self._body(events))))
                if self._begun is None:
                    self._last = self._loop.time()
                    if not tail.ready:
                        tail.watch(self._push)
                        return
                else:
                    self._writing = True
                    self._writes += 1
        except Exception as exc:  # noqa: BLE001  not the writer's trouble: the pump meets it again
            if not self._idle.done():
                self._idle.set_exception(exc)
            return
        if not self._idle.done():
            self._idle.set_result(None)

    def _body(self, events: Sequence[Event]) -> bytes:
        if self._event_ids:
            return b"".join(b"id: %d\n%b" % event for event in events)
        if len(events) == 1:
            return events[0].data
        return b"".join([event.data for event in events])

    def _message(self, body: bytes) -> Message:
        return {"type": "http.response.body", "body": body, "more_body": True}

    async def _write(self, body: bytes) -> None:
        self._writes += 1
        self._writing = True
        await self._send(self._message(body))
        self._writing = False
        self._last = self._loop.time()

    async def _end(self, summary: Summary) -> None:
        await self._send({"type": "http.response.body", "body": summary.done or b"", "more_body": False})
        self.complete = True

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cut()

    def _tick(self) -> None:
        """One timer for both limits, set again for what is left of them: nothing is timed per event."""
        wait = self._write_timeout
        if self._writing:
            if self._stuck == self._writes:
                self.cut()
                return
            self._stuck = self._writes
        elif self._heartbeat:
            left = self._last + self._heartbeat - self._loop.time()
            if left <= 0:
                self._tail.wake()
                left = self._heartbeat
            wait = min(wait, left)
        self._timer = self._loop.call_later(wait, self._tick)


class Begun:
    """A call that was begun outside a task and has suspended: whoever awaits this goes on with it."""

    def __init__(self, call: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._call = call
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                got = yield waits_for
            except BaseException as exc:  # noqa: BLE001  a cancellation belongs into the call
                step: Callable[[], Any] = partial(self._call.throw, exc)
            else:
                step = partial(self._call.send, got)
            try:
                waits_for = step()
            except StopIteration:
                return


def _begin(call: Awaitable[None]) -> Begun | None:
    """Run a call up to where it first suspends; None if it never did and is over."""
    coroutine = cast("Coroutine[Any, Any, None]", call)
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return Begun(coroutine, waits_for)


def heartbeat_line(summary: Summary) -> bytes:
    """A comment with no blank line behind it: some clients take a blank line for an empty event."""
    if summary.state != "paused":
        return b": legato\n"
    reason = "".join(char if char.isprintable() else " " for char in summary.reason or "")
    return f": legato paused: {reason[:MAX_REASON]}\n".encode()
