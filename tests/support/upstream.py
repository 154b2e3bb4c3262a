"""A tiny upstream on a raw socket: it plays scripted answers and keeps every request that it got.

::

    async with ScriptedUpstream() as upstream:
        gate = anyio.Event()
        upstream.plays(
            Answer(headers={"content-type": "text/event-stream"}, chunks=[b"data: 1", gate], end="reset"),
            Answer(status=429, headers={"retry-after": "7"}, chunks=[b"{}"], framing="length"),
        )
        ...                                        # talk to upstream.url
        await upstream.until(lambda: len(upstream.requests) == 2)
        await upstream.until(lambda: upstream.open == 0)      # every connection is closed

The n-th request (over all connections) gets the n-th answer, and the last answer is repeated; ``rule``
chooses by the request instead. An event among the chunks is a gate: nothing more is written until it is set.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

import anyio
import anyio.lowlevel

LIMIT = 5.0
"""Seconds that a test waits for something that should happen at once."""


class Gate(Protocol):
    """``anyio.Event`` or ``asyncio.Event``."""

    async def wait(self) -> object: ...


class Body(Protocol):
    """An exchange of the seam."""

    async def chunk(self) -> bytes: ...


async def whole(exchange: Body) -> bytes:
    """An exchange's body to its proper end."""
    with anyio.fail_after(LIMIT):
        parts = []
        while part := await exchange.chunk():
            parts.append(part)
        return b"".join(parts)


Chunk = bytes | Gate
Headers = Mapping[str, str] | Sequence[tuple[str | bytes, str | bytes]]


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it stood on the wire. ``complete``: its body came to its end."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""
    complete: bool = True
    connection: int = 0

    def all(self, name: str) -> list[bytes]:
        """Every value of this header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower().encode()]

    def one(self, name: str) -> bytes | None:
        """The header's only value, or None; an error where it stands twice."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} stands {len(values)} times"
        return values[0] if values else None


@dataclass(slots=True)
class Answer:
    """What upstream sends for one request.

    ``chunks``: each bytes element is one write (one HTTP chunk where chunked); an event is waited for.
    May be endless.
    ``end``: ``fin`` ends the body properly and keeps the connection; ``cut`` closes it (FIN) without the
    end of the body; ``reset`` closes it with a RST; ``hang`` writes nothing more until the peer leaves.
    ``framing``: ``length`` (content-length made from the chunks, unless a header gives it), ``chunked``,
    ``close`` (the body ends with the connection), ``none`` (no body at all, as for HEAD, 204 and 304).
    ``gate``: waited for before the head. ``early``: answer without reading the request's body first.
    ``continues``: send ``100 Continue`` before the body is read. ``raw``: these bytes instead of a head.
    """

    status: int = 200
    headers: Headers = ()
    chunks: Iterable[Chunk] = ()
    end: Literal["fin", "cut", "reset", "hang"] = "fin"
    framing: Literal["chunked", "length", "close", "none"] = "chunked"
    gate: Gate | None = None
    early: bool = False
    continues: bool = False
    raw: bytes | None = None

    def head(self) -> bytes:
        """The status line and the headers."""
        if self.raw is not None:
            return self.raw
        pairs = self.headers.items() if isinstance(self.headers, Mapping) else self.headers
        lines = [b"HTTP/1.1 %d Scripted" % self.status]
        lines += [_bytes(name) + b": " + _bytes(value) for name, value in pairs]
        names = {line.split(b":")[0].lower() for line in lines}
        if self.framing == "chunked":
            lines.append(b"transfer-encoding: chunked")
        elif self.framing == "length" and b"content-length" not in names:
            lines.append(b"content-length: %d" % sum(len(c) for c in self.chunks if isinstance(c, bytes)))
        return b"\r\n".join(lines) + b"\r\n\r\n"


Rule = Callable[[Received], Answer]


@dataclass(slots=True)
class ScriptedUpstream:
    """See the module. ``requests``: complete or not, in the order in which their heads came.

    ``made``: connections accepted so far; ``open``: those that neither side has closed.
    ``busy``: answers that are being written. ``left``: how often the peer closed the connection before its
    answer was at its end.
    """

    answers: list[Answer] = field(default_factory=lambda: [Answer(chunks=[b"ok"], framing="length")])
    rule: Rule | None = None
    tls: ssl.SSLContext | None = None
    host: str = "127.0.0.1"
    requests: list[Received] = field(default_factory=list)
    made: int = 0
    open: int = 0
    left: int = 0
    busy: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _played: int = 0

    async def __aenter__(self) -> ScriptedUpstream:
        await self.listen()
        return self

    async def listen(self) -> None:
        """Accept connections; after ``shut`` on the same port again."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(_Reader(limit=1 << 20, loop=loop), self._serve, loop=loop)

        server = await loop.create_server(protocol, self.host, self.port, ssl=self.tls, backlog=1024)
        self._server, self.port = server, server.sockets[0].getsockname()[1]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self.until(lambda: self.open == 0)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``."""
        return f"{'https' if self.tls else 'http'}://{self.authority}"

    @property
    def authority(self) -> str:
        """What belongs into a Host header."""
        return f"{self.host}:{self.port}"

    def plays(self, *answers: Answer) -> None:
        """From now on play these, the last one again and again."""
        self.answers, self._played = list(answers), 0

    def shut(self) -> None:
        """Accept no more connections: from now on they are refused."""
        assert self._server is not None
        self._server.close()

    async def until(self, holds: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait until this holds; it is looked at whenever a request or a connection changes."""
        with anyio.fail_after(limit):
            while not holds():
                await self._changed.wait()

    # --- one connection -----------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(reader, _Reader)
        self.made += 1
        self.open += 1
        number = self.made
        self._writers.add(writer)
        self._touch()
        try:
            while await self._exchange(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.transport.abort() if self.tls else writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
            self._writers.discard(writer)
            self.open -= 1
            self._touch()

    async def _exchange(self, reader: _Reader, writer: asyncio.StreamWriter, number: int) -> bool:
        """One request and its answer; true while the connection may carry another."""
        try:
            request = _head(await reader.readuntil(b"\r\n\r\n"), number)
        except asyncio.IncompleteReadError:
            return False
        place = len(self.requests)
        self.requests.append(request)
        self._touch()
        answer = self._choose(request)
        if not answer.early:
            if answer.continues:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await _body(reader, request)
            self.requests[place] = _with(request, body=body, complete=True)
            self._touch()
        self.busy += 1
        try:
            return await self._watched(reader, writer, answer)
        finally:
            self.busy -= 1
            self._touch()

    async def _watched(self, reader: _Reader, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        """Play the answer, and notice at once when the peer leaves in the meantime."""
        kept = False
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                if answer.early:  # an unread request body would hold back the end of the connection
                    with suppress(ConnectionError, ssl.SSLError):
                        while await reader.read(65536):
                            pass
                await reader.gone.wait()
                self.left += 1
                self._touch()
                group.cancel_scope.cancel()

            group.start_soon(watch)
            with suppress(ConnectionError, ssl.SSLError):
                kept = await _play(answer, writer)
            group.cancel_scope.cancel()
        return kept and not answer.early

    def _choose(self, request: Received) -> Answer:
        if self.rule is not None:
            return self.rule(request)
        place = min(self._played, len(self.answers) - 1)
        self._played += 1
        return self.answers[place]

    def _touch(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class _Reader(asyncio.StreamReader):
    """Tells when the peer has left, also while nobody reads."""

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=limit, loop=loop)
        self.gone = anyio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.gone.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.gone.set()


async def _play(answer: Answer, writer: asyncio.StreamWriter) -> bool:
    if answer.gate is not None:
        await answer.gate.wait()
    writer.write(answer.head())
    await writer.drain()
    async for data in _pieces(answer.chunks):
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) if answer.framing == "chunked" else data)
        await writer.drain()
    if answer.end == "hang":
        await anyio.sleep_forever()
    if answer.end == "reset":
        reset(writer)
        return False
    if answer.end == "fin" and answer.framing == "chunked":
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return answer.end == "fin" and answer.framing != "close"


async def _pieces(chunks: Iterable[Chunk]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        if isinstance(chunk, bytes):
            yield chunk
            await anyio.lowlevel.checkpoint()
        else:
            await chunk.wait()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a RST, as a crashed or impatient peer does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _head(data: bytes, number: int) -> Received:
    first, *lines = data[:-4].split(b"\r\n")
    method, target, _version = first.split(b" ")
    pairs = tuple((name, value.strip(b" ")) for name, _, value in (line.partition(b":") for line in lines))
    return Received(method.decode(), target, pairs, complete=False, connection=number)


async def _body(reader: asyncio.StreamReader, request: Received) -> bytes:
    if (request.one("transfer-encoding") or b"").lower() == b"chunked":
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        return b"".join(parts)
    return await reader.readexactly(int(request.one("content-length") or 0))


def _with(request: Received, *, body: bytes, complete: bool) -> Received:
    return Received(request.method, request.target, request.headers, body, complete, request.connection)


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
