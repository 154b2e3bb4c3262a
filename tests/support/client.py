"""A client on a raw socket: exact bytes out, exact bytes back, and whether an answer was cut.

::

    async with connect(server.port) as client:
        await client.send(b"GET /c//d HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        answer = await client.answer()
        assert answer.complete
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

LIMIT = 5.0
"""Seconds that a test waits for something that should happen at once."""


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """``complete``: the body came to its proper end, by Content-Length or by the last chunk."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    complete: bool

    def all(self, name: str) -> list[bytes]:
        """Every value of this header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower().encode()]

    def one(self, name: str) -> bytes | None:
        """The header's only value, or None."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} stands {len(values)} times"
        return values[0] if values else None


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Write these bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, tuple[tuple[bytes, bytes], ...]]:
        """The next status and headers, 1xx left out."""
        while True:
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            status = int(first.split(b" ")[1])
            if status >= 200:
                pairs = (line.partition(b":") for line in lines)
                return status, tuple((name, value.strip(b" ")) for name, _, value in pairs)

    async def answer(self, method: str = "GET", limit: float = LIMIT) -> RawAnswer:
        """The next answer with its body."""
        with anyio.fail_after(limit):
            status, headers = await self.head()
            names = {name.lower(): value for name, value in headers}
            if method == "HEAD" or status in (204, 304):
                return RawAnswer(status, headers, b"", complete=True)
            body = bytearray()
            try:
                await self._body(names, body)
            except (asyncio.IncompleteReadError, ConnectionError) as exc:
                body += getattr(exc, "partial", b"")
                return RawAnswer(status, headers, bytes(body), complete=False)
            return RawAnswer(status, headers, bytes(body), complete=True)

    async def chunk(self, limit: float = LIMIT) -> bytes:
        """One chunk of a chunked body; ``b""`` for the last."""
        with anyio.fail_after(limit):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            return data

    async def _body(self, names: dict[bytes, bytes], body: bytearray) -> None:
        if names.get(b"transfer-encoding") == b"chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        elif b"content-length" in names:
            body += await self.reader.readexactly(int(names[b"content-length"]))
        else:
            body += await self.reader.read()


@asynccontextmanager
async def connect(port: int, host: str = "127.0.0.1") -> AsyncIterator[RawClient]:
    """A connection that is closed (aborted, if need be) at the end."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
