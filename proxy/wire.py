"""One connection to upstream while it carries one request and its answer.

The order of things, which the classes here keep:

1. ``expect`` says how the answer is to be read, ``open`` writes the request and waits for the answer's head.
2. ``read`` gives what the socket had, as one piece, and ``b""`` once, and only if, the body is complete.
3. The connection goes back to the pool when the parser has seen the end of the body and the request is out
   as well. Everything else closes it: ``close``, a cancelled ``open`` or ``read``, silence, a break.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable

import aiohttp
import anyio
import anyio.lowlevel
import httpx
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage, StreamWriter
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from anyio.abc import TaskGroup

LARGE_BODY = 64 * 1024
"""A body above this is written after the head rather than copied behind it."""

MAX_HEADERS = 512
"""Far more than any upstream sends; aiohttp's own bound is 128."""

READS_UNASKED = 16
"""anyio cancels a task only while it waits for something that has not happened yet. On uvloop a body with
data in every turn of the loop never looks like that, and a cancelled reader would go on for ever: so every
so many reads we ask."""

Broken = (aiohttp.ClientError, HttpProcessingError, OSError, httpx.HTTPError)
"""What aiohttp raises while it waits, and what we plant in its place (httpx's)."""

DECODED = frozenset({b"content-encoding", b"content-length"})


class Silence:
    """Calls ``expire`` once a wait for upstream has lasted ``limit`` seconds.

    One timer for each exchange, armed again only when it fires: nothing but two assignments for each chunk.
    """

    def __init__(self, limit: float, expire: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._expire = expire
        self._since: float | None = None
        self._timer = self._loop.call_later(limit, self._look)

    def begin(self) -> None:
        """From now on upstream owes us something."""
        self._since = self._loop.time()

    def pause(self) -> None:
        """Somebody else is slow: the client that reads, or that sends its body."""
        self._since = None

    def stop(self) -> None:
        """The exchange is over."""
        self._timer.cancel()

    def _look(self) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited >= self._limit:
            self._expire()
        else:
            self._timer = self._loop.call_later(self._limit - waited, self._look)


class Wire(httpx.AsyncByteStream):
    """See the module. ``status`` and ``headers`` are there after ``open``."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def __init__(self, connection: Connection, max_silence: float, uploads: TaskGroup) -> None:
        assert connection.protocol is not None
        self._connection: Connection | None = connection
        self._protocol = connection.protocol
        self._payload: StreamReader = EMPTY_PAYLOAD
        self._max_silence = max_silence
        self._silence = Silence(max_silence, self._time_out)
        self._uploads = uploads
        self._upload: anyio.CancelScope | None = None
        self._sent = False
        self._until_close = False
        self._reads = 0
        self._closed: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None

    def expect(self, *, body: bool, decode: bool, max_head: int, read_buffer: int) -> None:
        """How the answer to this request is to be read."""
        self._decode = decode
        self._protocol.set_response_params(
            skip_payload=not body,
            read_until_eof=True,
            auto_decompress=decode,
            read_timeout=None,  # ours is cheaper, and leaves out the time in which a slow client holds us up
            read_bufsize=read_buffer,
            max_line_size=max_head,
            max_field_size=max_head,
            max_headers=MAX_HEADERS,
        )

    async def open(self, head: bytes, body: bytes | AsyncIterable[bytes] | None, length: int | None) -> None:
        """Send the request and wait for the answer's head; a request body in pieces goes on meanwhile."""
        try:
            self._send(head, body, length)
            self._silence.begin()
            try:
                message, payload = await self._answer()
            except Broken as exc:
                raise self._told(exc)  # noqa: B904  it names its cause itself
            self._silence.pause()
            self._take(message, payload)
        except BaseException:
            self.close()
            raise

    async def read(self) -> bytes:
        """The next piece, or ``b""`` at the proper end."""
        if self._failure is not None:
            raise self._failure
        silence = self._silence
        silence.begin()
        self._reads += 1
        try:
            if not self._reads % READS_UNASKED:
                await anyio.lowlevel.checkpoint_if_cancelled()
            data = await self._payload.readany()
        except Broken as exc:
            return self._broken(exc)
        except BaseException:
            self.close()
            raise
        silence.pause()
        if not data:
            self._end()
        return data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.read():
            yield data

    async def aclose(self) -> None:
        """For httpx; there is nothing to wait for."""
        self.close()

    def close(self) -> None:
        """Let go of the connection: idempotent, and at once, so that no cancellation can get between.

        ``abort`` rather than ``close``: neither unsent bytes nor a TLS farewell may keep a connection that
        is no longer wanted.
        """
        if self._upload is not None:
            self._upload.cancel()
        connection = self._leave()
        if connection is not None:
            if self._failure is None:
                self._failure = anyio.ClosedResourceError()
            self._protocol.abort()
            connection.close()

    def _leave(self) -> Connection | None:
        """Have nothing more to do with the connection; what happens to it is the caller's to say."""
        self._silence.stop()
        if self._closed is not None:
            self._closed.remove_done_callback(self._lost)
            self._closed = None
        connection, self._connection = self._connection, None
        return connection

    # --- the request ---------------------------------------------------------------------------------

    def _send(self, head: bytes, body: bytes | AsyncIterable[bytes] | None, length: int | None) -> None:
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise httpx.ConnectError("the connection was closed")  # nothing of this request went out
        if body is None or isinstance(body, bytes):
            body = body or b""
            if len(body) > LARGE_BODY:
                transport.write(head)
                head = b""
            transport.write(head + body)
            self._sent = True
        else:
            transport.write(head)
            self._upload = anyio.CancelScope()
            self._uploads.start_soon(self._send_pieces, body, length, self._upload)

    async def _send_pieces(
        self, body: AsyncIterable[bytes], length: int | None, scope: anyio.CancelScope
    ) -> None:
        """Runs in the engine's task group, which no failure of one request may bring down."""
        with scope:
            try:
                await self._copy(body, length)
                self._sent = True
            except (OSError, aiohttp.ClientError):
                pass  # upstream no longer reads: whoever waits for its answer learns why
            except Exception as exc:  # noqa: BLE001  the body's source may raise anything; open() re-raises it
                self._failure = exc
                self.close()
            finally:
                if isinstance(body, AsyncGenerator):  # so that the source knows at once that nobody reads
                    await body.aclose()

    async def _copy(self, body: AsyncIterable[bytes], length: int | None) -> None:
        writer = StreamWriter(self._protocol, asyncio.get_running_loop())
        if length is None:
            writer.enable_chunking()
        size = 0
        self._silence.pause()
        async for piece in body:
            size += len(piece)
            if length is not None and size > length:
                break
            self._silence.begin()
            await writer.write(piece)
            self._silence.pause()
        if length is not None and size != length:
            raise httpx.LocalProtocolError("the request's body is not as long as its Content-Length says")
        self._silence.begin()
        await writer.write_eof()

    # --- the answer ----------------------------------------------------------------------------------

    async def _answer(self) -> tuple[RawResponseMessage, StreamReader]:
        while True:
            message, payload = await self._protocol.read()
            if message.code == 101:
                raise httpx.RemoteProtocolError("upstream switched protocols unasked")
            if message.code >= 200:
                return message, payload

    def _take(self, message: RawResponseMessage, payload: StreamReader) -> None:
        self.status = message.code
        self.headers = list(message.raw_headers)
        if self._decode and message.compression and payload is not EMPTY_PAYLOAD:
            self.headers = [pair for pair in self.headers if pair[0].lower() not in DECODED]
        self._until_close = not message.chunked and "content-length" not in message.headers
        self._payload = payload
        self._watch_connection()
        payload.on_eof(self._ended)

    def _watch_connection(self) -> None:
        """aiohttp tells nobody who reads a body that its framing broke; it only closes the connection."""
        closed = self._protocol.closed
        if closed is not None and self._payload is not EMPTY_PAYLOAD:
            self._closed = closed
            closed.add_done_callback(self._lost)

    def _lost(self, _: object) -> None:
        if not self._payload.is_eof() and self._payload.exception() is None:
            self._payload.set_exception(httpx.RemoteProtocolError("its answer is not valid HTTP"))

    def _ended(self) -> None:
        """The parser has seen the end of the body (the reader may not yet have): free the connection."""
        if self._sent and (connection := self._leave()):
            connection.release()

    def _end(self) -> None:
        """The reader has come to the end of the body."""
        if self._until_close and isinstance(self._protocol.exception(), aiohttp.ClientOSError):
            # A body that ends with the connection ends with a FIN; aiohttp takes a RST for one as well.
            self._failure = httpx.ReadError("the connection was reset")
            raise self._failure
        if self._connection is not None:
            # Upstream has answered before it read the whole request: what is left of that goes nowhere.
            self._failure = None
            self.close()
            self._failure = None

    # --- breaks --------------------------------------------------------------------------------------

    def _time_out(self) -> None:
        error = httpx.ReadTimeout(f"no byte for {self._max_silence:g} s")
        self._protocol.set_exception(error)
        self._payload.set_exception(error)

    def _broken(self, exc: BaseException) -> bytes:
        """Give what had arrived before the break, which aiohttp would keep to itself; then raise."""
        self._payload.set_exception(None)  # type: ignore[arg-type]
        rest = self._payload.read_nowait()
        self._failure = self._told(exc)
        self.close()
        if rest:
            return rest
        raise self._failure

    def _told(self, exc: BaseException) -> BaseException:
        """The same in httpx's words, and without a byte of what upstream sent."""
        told = self._failure or (exc if isinstance(exc, httpx.HTTPError) else _in_httpx_words(exc))
        if told is not exc:
            told.__cause__ = exc
        return told


def _in_httpx_words(exc: BaseException) -> httpx.HTTPError:
    if isinstance(exc.__cause__, ContentEncodingError):
        return httpx.DecodingError("its answer can't be decompressed")
    if isinstance(exc, HttpProcessingError):
        return httpx.RemoteProtocolError("its answer is not valid HTTP")
    if isinstance(exc, OSError) and exc.errno:
        return httpx.ReadError("the connection was reset")
    return httpx.ReadError("it closed the connection too early")
