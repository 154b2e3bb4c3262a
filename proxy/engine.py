"""The transport behind the upstream seam: httpx's interface over aiohttp's connections.

aiohttp gives the connector (pool, DNS, TLS, HTTP proxies) and the response parser; the request's head is
written here, as the bytes that it came in, and the answer's head is handed on as the bytes that upstream
sent. aiohttp's own ``ClientSession`` would go through ``str``, URL objects and multidicts (``/a?`` loses its
question mark, a Latin-1 header its bytes), repeats a broken PUT or DELETE by itself, and costs more.

**Nothing is sent twice**, but for one case: GET, HEAD and OPTIONS without a body, on a connection that had
been idle and turns out to be closed, before any byte of an answer. That is RFC 9112, 9.3.1, and without it
every pause longer than upstream's keep-alive would show up as a 502.

**Expect: 100-continue** never goes upstream. legato's server answers the client's with ``100 Continue`` when
the body is asked for, and the body goes upstream without waiting for anybody. That works with an upstream
that never sends 100, with one that sends it unasked (1xx answers are skipped), and with one that refuses
early (413, 417): an answer is read while the body is still being sent, and reading it to its end stops the
sending; the client's connection is closed behind such an answer (``web/passthrough``). The price: a client
may send a body that upstream would have refused.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from weakref import WeakSet

import aiohttp
import anyio
import httpx
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from anyio.abc import TaskGroup
from yarl import URL

from proxy.wire import Wire

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
OURS = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect"})
FRESH_SECONDS = 1.0
"""A connection on which upstream answered this long ago is taken to be alive: servers and load balancers
close idle ones after 5 s and more, and a request lost in that race has an unknown outcome."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where requests go, and the bounds on the way. Made from ``UpstreamConfig``, which says why."""

    scheme: str
    authority: bytes
    tls: ssl.SSLContext | None
    proxy: str | None = field(repr=False)
    connect_timeout: float
    max_silence: float
    keep_alive: float
    max_head: int
    read_buffer: int


class Body(httpx.AsyncByteStream):
    """A request's body as the seam was given it; httpx (and so respx) may read it too."""

    def __init__(self, content: bytes | AsyncIterable[bytes] | None) -> None:
        self.content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if isinstance(self.content, bytes):
            yield self.content
        elif self.content is not None:
            async for piece in self.content:
                yield piece


class Engine(httpx.AsyncBaseTransport):
    """Carries requests to one upstream; reads its options from the request's ``extensions``."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._stack = AsyncExitStack()
        self._used: WeakSet[ResponseHandler] = WeakSet()

    async def __aenter__(self) -> Self:
        self._pool = await self._stack.enter_async_context(self._connector(self._route.keep_alive))
        self._fresh = await self._stack.enter_async_context(self._connector(FRESH_SECONDS))
        self._uploads: TaskGroup = await self._stack.enter_async_context(anyio.create_task_group())
        proxy = URL(self._route.proxy) if self._route.proxy else None
        url = URL(f"{self._route.scheme}://{self._route.authority.decode('ascii')}/")
        # The connector asks a request where to connect to; one serves for all.
        self._destination = ClientRequest(
            "GET", url, proxy=proxy, ssl=self._route.tls or True, loop=asyncio.get_running_loop()
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._uploads.cancel_scope.cancel()
        await self._stack.aclose()

    def _connector(self, keep_alive: float) -> aiohttp.TCPConnector:
        # No limit on connections: a long stream holds its own, and a hidden limit would make the next wait.
        return aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=keep_alive)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request, one answer; its head stands on the ``Wire`` in ``extensions["wire"]``.

        httpx itself is shown a bare status: it would parse ``Set-Cookie`` and refuse a ``Location`` that
        it can't read, and both are the client's to judge.
        """
        body = request.stream.content if isinstance(request.stream, Body) else request.stream
        assert body is None or isinstance(body, bytes | AsyncIterable)
        length, head = self._head(request, body)
        repeatable = not body and request.method in SAFE_METHODS
        while True:
            connection = await self._connect(request)
            reused = self._known(connection)
            wire = Wire(connection, self._route.max_silence, self._uploads)
            wire.expect(
                body=request.method != "HEAD",
                decode=bool(request.extensions.get("decode")),
                max_head=self._route.max_head,
                read_buffer=self._route.read_buffer,
            )
            try:
                await wire.open(head, body, length)
            except httpx.ReadError:
                if reused and repeatable:
                    continue
                raise
            return httpx.Response(wire.status, stream=wire, extensions={"wire": wire})

    async def _connect(self, request: httpx.Request) -> Connection:
        """A connection from the pool or a new one; every failure here means that nothing was sent."""
        pool = self._fresh if request.extensions.get("fresh") else self._pool
        again = bool(request.extensions.get("retry_connect"))
        deadline = anyio.current_time() + self._route.connect_timeout
        while True:
            left = max(deadline - anyio.current_time(), 0.001)
            try:
                return await pool.connect(self._destination, [], aiohttp.ClientTimeout(connect=left))
            except TimeoutError as exc:
                raise httpx.ConnectTimeout(f"no answer within {self._route.connect_timeout:g} s") from exc
            except (aiohttp.ClientError, OSError) as exc:
                if not again or anyio.current_time() >= deadline:
                    raise httpx.ConnectError(connect_reason(exc)) from exc
                again = False

    def _known(self, connection: Connection) -> bool:
        """Whether this connection has carried a request before."""
        protocol = connection.protocol
        assert protocol is not None
        if protocol in self._used:
            return True
        self._used.add(protocol)
        if protocol.closed is not None:
            protocol.closed.add_done_callback(_retrieve)
        return False

    def _head(
        self, request: httpx.Request, body: bytes | AsyncIterable[bytes] | None
    ) -> tuple[int | None, bytes]:
        """The request's head, and how long its body is where it comes in pieces and says so."""
        target = request.extensions.get("target") or request.url.raw_path
        if self._destination.proxy is not None and self._route.scheme == "http":
            target = b"http://" + self._route.authority + target
        lines = [request.method.encode("ascii") + b" " + target + b" HTTP/1.1"]
        lines.append(b"Host: " + self._route.authority)
        lengths = [v for k, v in request.headers.raw if k.lower() == b"content-length"]
        lines += [k + b": " + v for k, v in request.headers.raw if k.lower() not in OURS]
        lines += self._proxy_credentials()
        length = None
        if isinstance(body, bytes):
            lines.append(b"Content-Length: %d" % len(body))
        elif body is not None and lengths:
            length = int(lengths[0])
            lines.append(b"Content-Length: %d" % length)
        elif body is not None:
            lines.append(b"Transfer-Encoding: chunked")
        elif request.method in BODY_METHODS:
            lines.append(b"Content-Length: 0")
        return length, _one_head(lines)

    def _proxy_credentials(self) -> Sequence[bytes]:
        """For a plain-HTTP upstream behind a proxy; for TLS they go with the connector's CONNECT."""
        proxy = self._destination.proxy
        if proxy is None or not proxy.user or self._route.scheme != "http":
            return ()
        credentials = aiohttp.encode_basic_auth(proxy.user, proxy.password or "")
        return (b"Proxy-Authorization: " + credentials.encode("ascii"),)


def _one_head(lines: Sequence[bytes]) -> bytes:
    """Join the lines; a line break inside one of them would smuggle in a header or a whole request."""
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    breaks = len(lines) + 1
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
        raise httpx.LocalProtocolError("a header holds a line break")
    if lines[0].count(b" ") != 2:
        raise httpx.LocalProtocolError("the path holds a space")
    return head


def _retrieve(closed: asyncio.Future[None]) -> None:
    """asyncio complains of an exception that nobody looked at."""
    if not closed.cancelled():
        closed.exception()


def connect_reason(exc: BaseException) -> str:
    """Why there is no connection, in a few words and without anything that a header held."""
    if isinstance(exc, aiohttp.ClientHttpProxyError):
        return f"the HTTP proxy refused with status {exc.status}"
    cause = exc.os_error if isinstance(exc, aiohttp.ClientConnectorError) else exc
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        cause = exc.certificate_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({cause.verify_message})"
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed ({cause.reason or 'handshake'})"
    reason = type(cause).__name__
    if isinstance(cause, OSError):  # uvloop and asyncio word it differently; the system's words are short
        errno = cause.errno or 0
        reason = os.strerror(errno) if errno > 0 else cause.strerror or str(cause) or reason
    reason = reason[:1].lower() + reason[1:]
    return f"HTTP proxy: {reason}" if isinstance(exc, aiohttp.ClientProxyConnectionError) else reason
