"""A task's log, as one client's event stream: the same lines for a live and for a resuming reader."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
        tail = self._tail
        while True:
            try:
                events = await tail.next()
            except (TaskNotFound, LogUnavailable):
                return
            if events:
                await self._write(self._body(events))
            elif tail.ended:
                await self._end(tail.summary)
                return
            elif self._heartbeat and self._loop.time() - self._last >= self._heartbeat:
                await self._write(heartbeat_line(tail.summary))

    def _body(self, events: Sequence[Event]) -> bytes:
        if self._event_ids:
            return b"".join(b"id: %d\n%b" % event for event in events)
        if len(events) == 1:
            return events[0].data
        return b"".join([event.data for event in events])

    async def _write(self, body: bytes) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": True}
        self._writes += 1
        self._writing = True
        await self._send(message)
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


def heartbeat_line(summary: Summary) -> bytes:
    """A comment with no blank line behind it: some clients take a blank line for an empty event."""
    if summary.state != "paused":
        return b": legato\n"
    reason = "".join(char if char.isprintable() else " " for char in summary.reason or "")
    return f": legato paused: {reason[:MAX_REASON]}\n".encode()
