"""A request's body and the news that its client has left: both come out of one ``receive()``.

At any time exactly one coroutine awaits ``receive()``: ``read_body``, then ``until_gone``; or one
``Incoming`` for the whole request. A second one would steal the first one's messages.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

import anyio
from starlette.types import Receive

from proxy.errors import BodyTooLarge, LegatoError

T = TypeVar("T")

PIECES_AHEAD = 1
"""Pieces of a body taken from the server before upstream has taken them. One, so that ``receive()`` is
awaited (and a disconnect seen) while upstream reads slowly; more would only be memory."""


class ClientGone(Exception):
    """The client has closed its connection: nobody is left to answer."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body; ``BodyTooLarge`` above ``limit`` bytes, ``ClientGone`` where it never came whole."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(
                f"the request's body is larger than the setting max_body ({limit} bytes)", param="max_body"
            )
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def gone(receive: Receive) -> None:
    """Returns when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The work's result; if the client leaves first, the work is cancelled and ``ClientGone`` raised."""
    results: list[T] = []
    failure: Exception = ClientGone()
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            await gone(receive)
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            results.append(await work)
        except (LegatoError, ClientGone) as exc:  # out of the group as it is, not inside an ExceptionGroup
            failure = exc
        group.cancel_scope.cancel()
    if not results:
        raise failure
    return results[0]


class Incoming:
    """A body on its way through: ``until_gone`` feeds ``pieces`` from another task.

    ``until_gone`` returns when the client has left. ``pieces`` ends only with a whole body and raises
    ``ClientGone`` otherwise, so that half a body is never taken for one.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._give, self._take = anyio.create_memory_object_stream[bytes](PIECES_AHEAD)
        self._whole = anyio.Event()

    @property
    def whole(self) -> bool:
        """Whether the body has come to its end."""
        return self._whole.is_set()

    async def drop_rest(self) -> None:
        """Let the client send the rest of its body to nobody; returns at the body's end."""
        self._take.close()
        await self._whole.wait()

    async def until_gone(self) -> None:
        """Hand over the body, then wait until the client has left. Once, in a task of its own."""
        with self._give:
            while not self.whole:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    return
                await self._hand_over(message.get("body", b""))
                if not message.get("more_body", False):
                    self._whole.set()
        await gone(self._receive)

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body, piece by piece."""
        with self._take:
            async for piece in self._take:
                yield piece
        if not self.whole:
            raise ClientGone

    def close(self) -> None:
        """Nobody will read any more."""
        self._give.close()
        self._take.close()

    async def _hand_over(self, piece: bytes) -> None:
        if not piece:
            return
        try:
            await self._give.send(piece)
        except anyio.BrokenResourceError:
            pass  # upstream has answered without it; the rest is taken from the client and dropped
