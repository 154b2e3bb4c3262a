"""One exchange with upstream: open, raw chunks, close. Everything that can go wrong is told here, once.

::

    async with Upstream(UpstreamConfig("https://workspace.example")) as upstream:
        exchange = await upstream.open(Request("POST", b"/serving-endpoints/a/invocations", headers, body))
        try:
            while chunk := await exchange.chunk():
                ...
        finally:
            await exchange.close()

Three faults leave this module, and the difference decides what may be sent again: ``UpstreamUnreachable``
(nothing was sent), ``UpstreamTimeout`` and ``UpstreamCut`` (it was, and the outcome is unknown).
httpx is the interface, so respx can stand in for upstream; the connections are aiohttp's (``engine``).
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import NoReturn, Self
from urllib.parse import unquote_to_bytes

import anyio
import httpx

from proxy.engine import Body, Engine, Route
from proxy.errors import InvalidRequest, UpstreamCut, UpstreamFault, UpstreamTimeout, UpstreamUnreachable
from proxy.wire import Wire

NEVER_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)
DECODING_ROUNDS = 4
"""How often a path is decoded in search of ``..``: some servers decode twice. More layers are refused."""

CACHED_URLS = 256
"""Parsed URLs kept for httpx, which wants one for each request; clients ask for few paths, many times."""

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """Where upstream is, and how long it may take."""

    base_url: str
    connect_timeout: float = 1.8
    """For both tries together: a client must hear of an unreachable upstream within 2 s."""
    max_silence: float = 600.0
    """Without a byte, before the head and between chunks: tools and models are silent for minutes."""
    proxy: str | None = field(default=None, repr=False)
    """``http://[user:password@]host:port``."""
    ca_file: str | None = None
    """Trust these authorities (PEM) and no others."""
    keep_alive: float = 15.0
    """Seconds for which an idle connection is kept; used by what may be repeated, see ``Request.fresh``."""
    max_head: int = 64 * 1024
    """Upstream's status line, and each of its headers: gateways send cookies and policies above 8 KiB."""
    read_buffer: int = 128 * 1024
    """Unread bytes of one exchange at which we stop reading from its socket (twice this at most)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What goes upstream. The target is raw (path and query as received), the headers are end-to-end ones.

    ``headers`` may hold one Content-Length, which then frames a body that comes in pieces; Host and
    Transfer-Encoding are ours. ``retry_connect``: try once more, at once, where no connection could be
    made. ``decode``: unpack a gzip or deflate answer. ``fresh``: only on a new connection, or one on which
    upstream answered within the last second, because this request must not be lost in a keep-alive race.
    """

    method: str
    target: bytes
    headers: Headers = field(default=(), repr=False)
    body: bytes | AsyncIterable[bytes] | None = field(default=None, repr=False)
    retry_connect: bool = False
    decode: bool = False
    fresh: bool = False

    def with_body(self, body: bytes) -> Request:
        """The same request with this body."""
        return replace(self, body=body)


class Exchange:
    """One answer: status, raw headers with repeats, and the body as it comes."""

    __slots__ = ("_fault", "_read", "_response", "headers", "status")

    def __init__(self, response: httpx.Response, fault: Callable[[Exception], Exception]) -> None:
        self._response = response
        self._fault = fault
        wire = response.extensions.get("wire")
        self.status = response.status_code
        self.headers: list[tuple[bytes, bytes]]
        self._read: Callable[[], Awaitable[bytes]]
        if isinstance(wire, Wire):
            self.headers, self._read = wire.headers, wire.read
        else:  # a transport that is not ours, such as respx
            self.headers, self._read = list(response.headers.raw), _reader(response)

    async def chunk(self) -> bytes:
        """What the last read of the socket held, or ``b""`` once the body has come to its proper end."""
        try:
            return await self._read()
        except httpx.HTTPError as exc:
            raise self._fault(exc) from exc

    async def close(self) -> None:
        """Idempotent. Keeps the connection for reuse if the body is at its end, closes it otherwise."""
        wire = self._response.extensions.get("wire")
        if isinstance(wire, Wire):
            wire.close()
            return
        with anyio.CancelScope(shield=True):
            await self._response.aclose()


class Upstream:
    """The one configured upstream. Enter it once; any number of exchanges at a time."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._config = config
        self._base = base_url(config.base_url)
        self._prefix = self._base.raw_path.rstrip(b"/")
        self._where = self._base.netloc.decode("ascii")
        if self._base.port is None:
            self._where += ":443" if self._base.scheme == "https" else ":80"
        self._urls: dict[bytes, httpx.URL] = {}
        self._client = CookielessClient(
            transport=Engine(_route(config, self._base)), follow_redirects=False, trust_env=False
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._client.__aexit__(exc_type, exc_value, traceback)

    @property
    def authority(self) -> bytes:
        """What goes into ``Host``."""
        return self._base.netloc

    async def open(self, request: Request) -> Exchange:
        """Send it; status and headers are there when this returns.

        Raises ``UpstreamFault``, ``InvalidRequest`` for a target that leads out of upstream's base path,
        and whatever the body's own iterator raises.
        """
        target = self._prefix + inside(request.target, self._prefix)
        outgoing = httpx.Request(
            request.method,
            self._url(target),
            headers=list(request.headers),
            stream=Body(request.body),
            extensions={
                "target": target,
                "retry_connect": request.retry_connect,
                "decode": request.decode,
                "fresh": request.fresh,
            },
        )
        try:
            response = await self._client.send(outgoing, stream=True)
        except httpx.HTTPError as exc:
            raise self._fault(exc) from exc
        return Exchange(response, self._fault)

    def _url(self, target: bytes) -> httpx.URL:
        """For httpx and those who stand in for it; the bytes that go out are the target's."""
        url = self._urls.get(target)
        if url is None:
            try:
                url = self._base.copy_with(raw_path=target)
            except (httpx.InvalidURL, UnicodeDecodeError):
                url = self._base
            if len(self._urls) >= CACHED_URLS:
                self._urls.clear()
            self._urls[target] = url
        return url

    def _fault(self, exc: Exception) -> Exception:
        """The one place where a failure of the transport becomes one of ours."""
        if isinstance(exc, NEVER_SENT):
            return UpstreamUnreachable(
                f"could not connect to {self._where}: {exc}; check --upstream / LEGATO_UPSTREAM"
            )
        if isinstance(exc, httpx.LocalProtocolError):
            return InvalidRequest(str(exc))
        if isinstance(exc, httpx.TimeoutException):
            return UpstreamTimeout(f"upstream {self._where} was silent: {exc}; its outcome is unknown")
        return UpstreamCut(f"the exchange with upstream {self._where} broke: {exc}; its outcome is unknown")


def base_url(text: str) -> httpx.URL:
    """Upstream's URL, or a ``ValueError`` that says what is wrong with it."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as exc:
        _refuse_url(str(exc))
    if url.scheme not in ("http", "https") or not url.host:
        _refuse_url("it must begin with http:// or https:// and name a host")
    if url.userinfo or url.query or url.fragment:
        _refuse_url("it must not hold a user, a query or a fragment")
    return url


def _refuse_url(why: str) -> NoReturn:
    raise ValueError(f"bad upstream URL: {why}; check --upstream / LEGATO_UPSTREAM")


_DOTS = re.compile(rb"\.\.|%")


def inside(target: bytes, prefix: bytes) -> bytes:
    """The target unchanged, if it is a path and (where upstream has a base path) stays within it."""
    if not target.startswith(b"/"):
        raise InvalidRequest("the request target must be a path", param="path")
    path = target.partition(b"?")[0]
    if prefix and _DOTS.search(path) and _climbs(path):
        raise InvalidRequest("the path leads out of upstream's base path", param="path")
    return target


def _climbs(path: bytes) -> bool:
    """Whether ``..``, however written, leads above where the path begins."""
    for _ in range(DECODING_ROUNDS):
        path, before = unquote_to_bytes(path), path
        if path == before:
            break
    else:
        return True
    depth = 0
    for segment in path.replace(b"\\", b"/").split(b"/"):
        name = segment.partition(b";")[0]  # some servers see "..;x" as ".."
        if name == b"..":
            depth -= 1
        elif name not in (b"", b"."):  # "//" may be folded, so an empty segment is no level to climb from
            depth += 1
        if depth < 0:
            return True
    return False


def _route(config: UpstreamConfig, url: httpx.URL) -> Route:
    tls = None
    if url.scheme == "https":
        tls = ssl.create_default_context(cafile=config.ca_file)
        tls.set_alpn_protocols(["http/1.1"])
    return Route(
        scheme=url.scheme,
        authority=url.netloc,
        tls=tls,
        proxy=config.proxy,
        connect_timeout=config.connect_timeout,
        max_silence=config.max_silence,
        keep_alive=config.keep_alive,
        max_head=config.max_head,
        read_buffer=config.read_buffer,
    )


def _reader(response: httpx.Response) -> Callable[[], Awaitable[bytes]]:
    """Read any httpx response; an empty chunk is not the end."""
    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    chunks = aiter(stream)

    async def read() -> bytes:
        while True:
            try:
                data = await anext(chunks)
            except StopAsyncIteration:
                return b""
            if data:
                return data

    return read


class NoCookies(httpx.Cookies):
    """Takes none and gives none."""

    def extract_cookies(self, response: httpx.Response) -> None:
        """Take none."""

    def set_cookie_header(self, request: httpx.Request) -> None:
        """Give none."""


class CookielessClient(httpx.AsyncClient):
    """Cookies are the client's; httpx would keep them, for all clients alike, and search every answer."""

    _none = NoCookies()

    @property
    def cookies(self) -> httpx.Cookies:
        """Always empty."""
        return self._none

    @cookies.setter
    def cookies(self, cookies: object) -> None:
        raise NotImplementedError


__all__ = ["Exchange", "Request", "Upstream", "UpstreamConfig", "UpstreamFault", "base_url"]
