"""What can go wrong between legato and upstream, and what each of it is called."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream
from support.tls import self_signed, server_tls
from support.upstream import Answer, ScriptedUpstream, whole

from proxy.errors import UpstreamCut, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream import Request, Upstream, UpstreamConfig
from proxy.wire import Silence

POST = Request("POST", b"/", (), b"{}", retry_connect=True)


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as upstream:
        yield upstream


@pytest.fixture
async def upstream(scripted: ScriptedUpstream) -> AsyncIterator[Upstream]:
    async with Upstream(UpstreamConfig(scripted.url)) as seam:
        yield seam


# --- never sent ---------------------------------------------------------------------------------------


async def test_refused_connection_is_told_within_two_seconds() -> None:
    """Nobody listens: ``UpstreamUnreachable`` with the place, the reason and the setting."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with Upstream(UpstreamConfig(f"http://127.0.0.1:{port}")) as upstream:
        with anyio.fail_after(2), pytest.raises(UpstreamUnreachable) as failed:
            await upstream.open(POST)
    assert failed.value.message == (
        f"could not connect to 127.0.0.1:{port}: connection refused; check --upstream / LEGATO_UPSTREAM"
    )
    assert failed.value.__cause__ is not None


async def test_connect_timeout_covers_both_tries() -> None:
    """A host that swallows connection attempts costs one ``connect_timeout``, not two."""
    assert UpstreamConfig("http://a").connect_timeout < 2
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        queued = [socket.socket() for _ in range(4)]  # more than the backlog: the next SYN is dropped
        for waiting in queued:
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        async with Upstream(UpstreamConfig(f"http://127.0.0.1:{port}", connect_timeout=0.3)) as upstream:
            began = anyio.current_time()
            with anyio.fail_after(5), pytest.raises(UpstreamUnreachable, match=r"within 0\.3 s"):
                await upstream.open(POST)
            assert anyio.current_time() - began < 0.6
        for waiting in queued:
            waiting.close()


async def test_unknown_host_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that doesn't resolve means that nothing was sent."""

    async def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("aiohttp.resolver.ThreadedResolver.resolve", fails)
    monkeypatch.setattr("aiohttp.resolver.AsyncResolver.resolve", fails)
    async with Upstream(UpstreamConfig("http://workspace.invalid")) as upstream:
        with pytest.raises(UpstreamUnreachable, match=r"workspace\.invalid:80: name or service not known"):
            await upstream.open(POST)


@pytest.mark.parametrize(("again", "tries"), [(True, 2), (False, 1)])
async def test_connection_is_tried_once_more_where_asked(again: bool, tries: int) -> None:
    """Exactly one more try, at once: an upstream that hangs up in the TLS handshake counts them."""
    made = 0

    async def hang_up(stream: SocketStream) -> None:
        nonlocal made
        made += 1
        await stream.aclose()

    async with listening(hang_up) as port, Upstream(UpstreamConfig(f"https://127.0.0.1:{port}")) as upstream:
        with anyio.fail_after(2), pytest.raises(UpstreamUnreachable):
            await upstream.open(Request("POST", b"/", (), b"{}", retry_connect=again))
        assert made == tries


async def test_certificates_are_verified(certificate: Path) -> None:
    """TLS by an unknown authority is refused before anything is sent; ``ca_file`` names one to trust."""
    async with ScriptedUpstream(tls=server_tls(certificate), host="localhost") as scripted:
        async with Upstream(UpstreamConfig(scripted.url)) as upstream:
            with pytest.raises(UpstreamUnreachable, match="not trusted"):
                await upstream.open(POST)
        assert scripted.requests == []
        async with Upstream(UpstreamConfig(scripted.url, ca_file=str(certificate))) as upstream:
            assert await whole(await upstream.open(POST)) == b"ok"
            scripted.plays(Answer(chunks=[b"a"], end="hang"))
            exchange = await upstream.open(POST)
            assert await exchange.chunk() == b"a"
            await exchange.close()
            await scripted.until(lambda: scripted.open == 0, limit=2)


async def test_plain_requests_go_through_an_http_proxy(scripted: ScriptedUpstream) -> None:
    """The proxy sees the absolute form and its own credentials; the target's bytes stay."""
    proxy = f"http://user:secret@{scripted.authority}"
    config = UpstreamConfig("http://workspace.example/base", proxy=proxy)
    assert "secret" not in repr(config)
    async with Upstream(config) as upstream:
        assert await whole(await upstream.open(Request("GET", b"/c//a%2fb?"))) == b"ok"
    seen = scripted.requests[0]
    assert seen.target == b"http://workspace.example/base/c//a%2fb?"
    assert seen.one("host") == b"workspace.example"
    assert seen.one("proxy-authorization") == b"Basic dXNlcjpzZWNyZXQ="


async def test_tls_requests_are_tunnelled(certificate: Path) -> None:
    """CONNECT through the proxy, TLS with upstream inside, two requests on one tunnel."""
    asked: list[bytes] = []
    async with ScriptedUpstream(tls=server_tls(certificate), host="localhost") as scripted:

        async def tunnel(stream: SocketStream) -> None:
            asked.append(await stream.receive())
            async with await anyio.connect_tcp("localhost", scripted.port) as inner:
                await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
                async with anyio.create_task_group() as group:
                    group.start_soon(_pump, stream, inner)
                    group.start_soon(_pump, inner, stream)

        async with listening(tunnel) as port:
            proxy = f"http://user:secret@127.0.0.1:{port}"
            config = UpstreamConfig(scripted.url, proxy=proxy, ca_file=str(certificate))
            async with Upstream(config) as upstream:
                for _ in range(2):
                    assert await whole(await upstream.open(POST)) == b"ok"
        assert len(asked) == 1
        assert asked[0].startswith(b"CONNECT localhost:%d HTTP/1.1" % scripted.port)
        assert b"Proxy-Authorization: Basic dXNlcjpzZWNyZXQ=" in asked[0]
        assert scripted.requests[0].one("proxy-authorization") is None


async def test_proxy_that_refuses_means_never_sent(scripted: ScriptedUpstream) -> None:
    """A 407 to CONNECT is ``UpstreamUnreachable`` with the status, and without the credentials."""
    scripted.plays(Answer(status=407, framing="length", headers={"x": "hidden"}))
    config = UpstreamConfig("https://workspace.example", proxy=f"http://user:secret@{scripted.authority}")
    async with Upstream(config) as upstream:
        with pytest.raises(UpstreamUnreachable, match="refused with status 407") as failed:
            await upstream.open(POST)
    assert not {"secret", "hidden"} & set(failed.value.message.split())


# --- silence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begins", [False, True])
async def test_silence_is_a_timeout(scripted: ScriptedUpstream, begins: bool) -> None:
    """No byte for ``max_silence``, before the head or after some bytes; the connection is closed."""
    scripted.plays(Answer(chunks=[b"a"], end="hang", gate=None if begins else anyio.Event()))
    async with Upstream(UpstreamConfig(scripted.url, max_silence=0.1)) as upstream:
        with anyio.fail_after(5), pytest.raises(UpstreamTimeout, match=r"no byte for 0\.1 s"):
            await whole(await upstream.open(POST))
        await scripted.until(lambda: scripted.open == 0)


async def test_slow_reader_is_not_upstreams_silence(scripted: ScriptedUpstream) -> None:
    """While nobody reads, the time doesn't run: another exchange times out three times meanwhile."""
    gate = anyio.Event()
    scripted.plays(Answer(chunks=[b"a", gate, b"b"]), Answer(gate=anyio.Event()))
    async with Upstream(UpstreamConfig(scripted.url, max_silence=0.05)) as upstream:
        exchange = await upstream.open(POST)
        assert await exchange.chunk() == b"a"
        for _ in range(3):
            with pytest.raises(UpstreamTimeout):
                await upstream.open(POST)
        gate.set()
        assert await whole(exchange) == b"b"


async def test_slow_upload_is_not_upstreams_silence(scripted: ScriptedUpstream) -> None:
    """A client that takes its time with the body doesn't make upstream late."""
    scripted.rule = lambda seen: (
        Answer(chunks=[b"ok"]) if seen.target == b"/up" else Answer(gate=anyio.Event())
    )

    async with Upstream(UpstreamConfig(scripted.url, max_silence=0.05)) as upstream:

        async def slow() -> AsyncIterator[bytes]:
            yield b"a"
            for _ in range(3):
                with pytest.raises(UpstreamTimeout):
                    await upstream.open(POST)
            yield b"b"

        assert await whole(await upstream.open(Request("POST", b"/up", (), slow()))) == b"ok"
    assert [seen.body for seen in scripted.requests if seen.target == b"/up"] == [b"ab"]


async def test_steady_bytes_hold_the_timer_off() -> None:
    """The one timer looks at how long the present wait has lasted, not at how old the exchange is."""
    expired = anyio.Event()
    began = anyio.current_time()
    silence = Silence(0.05, expired.set)
    while anyio.current_time() - began < 0.15:
        silence.begin()
        await anyio.lowlevel.checkpoint()
        assert not expired.is_set()
    with anyio.fail_after(5):
        await expired.wait()


# --- breaks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["cut", "reset"])
@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_cut_body_is_never_a_clean_end(
    upstream: Upstream, scripted: ScriptedUpstream, end: str, framing: str
) -> None:
    """PX-17: FIN or RST before the end of the body is ``UpstreamCut``, after the bytes that did come."""
    headers = {"content-length": "99"} if framing == "length" else {}
    scripted.plays(Answer(headers=headers, chunks=[b"par"], end=end, framing=framing))  # type: ignore[arg-type]
    exchange = await upstream.open(POST)
    await scripted.until(lambda: scripted.open == 0)  # the break has happened before the first read
    assert await exchange.chunk() == b"par"
    for _ in range(2):
        with pytest.raises(UpstreamCut) as failed:
            await exchange.chunk()
    assert failed.value.__cause__ is not None
    assert len(scripted.requests) == 1


async def test_body_that_ends_with_the_connection(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """Without length and chunks a FIN is the end, and a RST is a break."""
    scripted.plays(Answer(chunks=[b"all"], framing="close"))
    assert await whole(await upstream.open(POST)) == b"all"
    scripted.plays(Answer(chunks=[b"par"], framing="close", end="reset"))
    exchange = await upstream.open(POST)
    with pytest.raises(UpstreamCut):
        await whole(exchange)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX-Sec",
        b"HTP/1.1 200 OK\r\nX: hidden\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX hidden\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\nX: hidden\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: hidden\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"hidden " * 20_000 + b"\r\n\r\n",
    ],
    ids=["nothing", "half a head", "no HTTP", "no colon", "two lengths", "101", "large"],
)
async def test_bad_head_is_a_cut(upstream: Upstream, scripted: ScriptedUpstream, raw: bytes) -> None:
    """An answer that can't be read: outcome unknown, and its bytes stay out of the message."""
    scripted.plays(Answer(raw=raw, framing="none", end="cut"))
    with pytest.raises(UpstreamCut) as failed:
        await upstream.open(POST)
    assert "hidden" not in failed.value.message
    await scripted.until(lambda: scripted.open == 0)
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("size", [9_000, 60_000])
async def test_large_headers_are_read(upstream: Upstream, scripted: ScriptedUpstream, size: int) -> None:
    """Gateways send headers far above 8 KiB."""
    scripted.plays(Answer(headers={"x": "v" * size, "content-length": "0"}, framing="none"))
    exchange = await upstream.open(POST)
    assert (b"x", b"v" * size) in exchange.headers
    await whole(exchange)


async def test_broken_framing_is_told_at_once(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """A chunk size that is none ends the exchange, though upstream keeps the connection open."""
    gate = anyio.Event()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    scripted.plays(Answer(raw=head, chunks=[gate, b"zz\r\n"], framing="none", end="hang"))
    exchange = await upstream.open(POST)
    assert await exchange.chunk() == b"hello"
    gate.set()
    with anyio.fail_after(5), pytest.raises(UpstreamCut, match="not valid HTTP"):
        await exchange.chunk()


async def test_bad_compression_is_a_cut(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """With ``decode``, an answer that is no gzip ends as a break."""
    scripted.plays(Answer(headers={"content-encoding": "gzip"}, chunks=[b"no gzip at all"]))
    exchange = await upstream.open(Request("POST", b"/", decode=True))
    with pytest.raises(UpstreamCut, match="decompressed"):
        await whole(exchange)


# --- helpers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that signs itself, with its key in the same file."""
    return self_signed(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def listening(handler: Callable[[SocketStream], object]) -> AsyncIterator[int]:
    """A listener on a free port that hands every connection to the handler."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler)
        yield listener.extra(anyio.abc.SocketAttribute.local_port)
        group.cancel_scope.cancel()


async def _pump(source: SocketStream, sink: SocketStream) -> None:
    try:
        async for data in source:
            await sink.send(data)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass
    await sink.aclose()
