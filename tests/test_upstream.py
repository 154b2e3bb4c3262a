"""The seam to upstream over real sockets: exact bytes, connections, what each failure is called."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
import respx
from support.upstream import Answer, ScriptedUpstream, whole

from proxy.errors import InvalidRequest, UpstreamCut, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream import Request, Upstream, UpstreamConfig, base_url


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


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    """A body that comes in pieces."""
    for part in parts:
        yield part


# --- exact bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [b"/c/a%2Fb", b"/c/%2e%2e/x", b"/c//d", b"/c/%E4%BD%A0", b"/a?", b"/a?x=%2f&x=+&y", b"//d/\xe9?q='|"],
)
async def test_target_goes_out_as_it_came(
    upstream: Upstream, scripted: ScriptedUpstream, target: bytes
) -> None:
    """PX-08: percent-encoding, hex case, double slashes and an empty query stay."""
    await whole(await upstream.open(Request("GET", target)))
    assert scripted.requests[0].target == target


async def test_request_headers_go_out_as_they_came(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """Order, repeats, letter case and bytes that are no UTF-8 stay; Host is upstream's; nothing is added."""
    headers = [(b"X-One", b"1"), (b"cookie", b"a=1"), (b"x-one", b"2"), (b"cookie", b"b=2"), (b"l", b"\xe9")]
    await whole(await upstream.open(Request("GET", b"/", [(b"Host", b"elsewhere"), *headers])))
    assert scripted.requests[0].headers == ((b"Host", scripted.authority.encode()), *headers)


async def test_answer_headers_are_raw_and_repeated(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """Set-Cookie twice, letter case and Latin-1 bytes come through; no cookie is kept for later."""
    headers: list[tuple[str | bytes, str | bytes]] = [("Set-Cookie", "a=1"), ("set-cookie", "b=2")]
    headers += [("X", b"\xe9"), ("content-length", "0")]
    scripted.plays(Answer(headers=headers, framing="none"))
    exchange = await upstream.open(Request("GET", b"/"))
    assert exchange.headers == [
        (b"Set-Cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"X", b"\xe9"),
        (b"content-length", b"0"),
    ]
    await whole(exchange)
    await whole(await upstream.open(Request("GET", b"/")))
    assert scripted.requests[1].all("cookie") == []


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("HEAD", Answer(headers={"content-length": "1234"}, framing="none")),
        ("GET", Answer(status=204, framing="none")),
        ("GET", Answer(status=304, headers={"content-length": "99"}, framing="none")),
        ("GET", Answer(status=302, headers={"location": "http://[", "content-length": "0"}, framing="none")),
    ],
)
async def test_answers_without_body_end_at_once(
    upstream: Upstream, scripted: ScriptedUpstream, method: str, answer: Answer
) -> None:
    """HEAD with a length, 204, 304, and a redirect that nobody follows; the connection stays usable."""
    scripted.plays(answer)
    for _ in range(2):
        exchange = await upstream.open(Request(method, b"/"))
        assert exchange.status == answer.status
        assert await whole(exchange) == b""
    assert scripted.made == 1


@pytest.mark.parametrize(
    ("request_", "framing", "body"),
    [
        (Request("POST", b"/", (), b"abc"), {"content-length": b"3"}, b"abc"),
        (Request("POST", b"/"), {"content-length": b"0"}, b""),
        (Request("GET", b"/"), {}, b""),
        (Request("DELETE", b"/"), {}, b""),
        (Request("POST", b"/", [(b"content-length", b"9")], b"abc"), {"content-length": b"3"}, b"abc"),
    ],
)
async def test_body_is_framed_once(
    upstream: Upstream,
    scripted: ScriptedUpstream,
    request_: Request,
    framing: dict[str, bytes],
    body: bytes,
) -> None:
    """One Content-Length, or none where there is no body; a caller's wrong one doesn't go out."""
    await whole(await upstream.open(request_))
    seen = scripted.requests[0]
    assert {n: seen.one(n) for n in ("content-length", "transfer-encoding") if seen.one(n)} == framing
    assert seen.body == body


async def test_body_in_pieces_is_chunked_or_counted(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """Pieces go out as chunks, or under the Content-Length that the client gave."""
    await whole(await upstream.open(Request("POST", b"/", (), pieces(b"ab", b"", b"c"))))
    counted = Request("PUT", b"/", [(b"content-length", b"3")], pieces(b"ab", b"c"))
    await whole(await upstream.open(counted))
    first, second = scripted.requests
    assert (first.body, first.one("transfer-encoding"), first.one("content-length")) == (
        b"abc",
        b"chunked",
        None,
    )
    assert (second.body, second.one("transfer-encoding"), second.one("content-length")) == (
        b"abc",
        None,
        b"3",
    )
    assert scripted.made == 1


@pytest.mark.parametrize(
    "request_",
    [
        Request("GET", b"/ HTTP/1.1\r\nX: 1\r\n\r\n"),
        Request("GET", b"/a b"),
        Request("GET", b"/", [(b"x", b"1\r\ny: 2")]),
        Request("GET", b"/", [(b"x\ny", b"1")]),
        Request("GET", b"http://elsewhere/"),
    ],
)
async def test_nothing_can_be_smuggled_into_a_request(
    upstream: Upstream, scripted: ScriptedUpstream, request_: Request
) -> None:
    """A line break in a header or path, a space in a path, or another host is refused before it is sent."""
    with pytest.raises(InvalidRequest):
        await upstream.open(request_)
    assert scripted.requests == []


@pytest.mark.parametrize(
    "target",
    [
        b"/../x",
        b"/a/../../x",
        b"/%2e%2e/x",
        b"/.%2E/x",
        b"/a%2f..%2f..%2fx",
        b"/..\\x",
        b"/%5c..%5cx",
        b"/%252e%252e/x",
        b"/%25252525252e%2525252525e/x",
        b"/..;v=1/x",
        b"//../x",
    ],
)
async def test_no_way_out_of_the_base_path(scripted: ScriptedUpstream, target: bytes) -> None:
    """PX-08: a path that would climb out of upstream's base path, however written, is 400."""
    async with Upstream(UpstreamConfig(scripted.url + "/base/")) as upstream:
        with pytest.raises(InvalidRequest, match="base path"):
            await upstream.open(Request("GET", target))
        await whole(await upstream.open(Request("GET", b"/a/..//b%2F..%2fc?q=/../..")))
    assert [r.target for r in scripted.requests] == [b"/base/a/..//b%2F..%2fc?q=/../.."]


@pytest.mark.parametrize(
    "url", ["", "workspace.example", "ftp://a", "http://", "http://u:p@a", "http://a/?q=1", "http://a/#f"]
)
def test_upstream_url_is_checked(url: str) -> None:
    """A bad upstream URL is refused with the setting's name."""
    with pytest.raises(ValueError, match="LEGATO_UPSTREAM"):
        base_url(url)


# --- the body -----------------------------------------------------------------------------------------


async def test_chunks_come_as_they_arrive(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """No buffering: each chunk is there before upstream writes the next."""
    gates = [anyio.Event(), anyio.Event()]
    scripted.plays(Answer(chunks=[b"a", gates[0], b"b", gates[1]]))
    exchange = await upstream.open(Request("GET", b"/"))
    with anyio.fail_after(5):
        assert await exchange.chunk() == b"a"
        gates[0].set()
        assert await exchange.chunk() == b"b"
        gates[1].set()
        assert await exchange.chunk() == b""
        assert await exchange.chunk() == b""


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_decoded_answers_keep_their_timing(
    upstream: Upstream, scripted: ScriptedUpstream, encoding: str
) -> None:
    """PX-01: with ``decode`` each flushed event comes out at once, and no header speaks of compression."""
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    gate = anyio.Event()
    parts = [
        packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) for part in (b"data: 1\n\n", b"data: 2\n\n")
    ]
    headers = {"content-encoding": encoding, "x": "1"}
    scripted.plays(Answer(headers=headers, chunks=[parts[0], gate, parts[1], packer.flush()]))
    exchange = await upstream.open(Request("POST", b"/", (), b"{}", decode=True))
    assert (b"content-encoding", encoding.encode()) not in exchange.headers
    assert (b"x", b"1") in exchange.headers
    with anyio.fail_after(5):
        assert await exchange.chunk() == b"data: 1\n\n"
    gate.set()
    assert await whole(exchange) == b"data: 2\n\n"


async def test_compressed_answers_are_left_alone(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """PX-03: without ``decode`` the compressed bytes come with their headers."""
    packed = gzip.compress(b'{"a":1} ' * 2000)
    scripted.plays(Answer(headers={"content-encoding": "gzip"}, chunks=[packed], framing="length"))
    exchange = await upstream.open(Request("GET", b"/"))
    assert (b"content-encoding", b"gzip") in exchange.headers
    assert (b"content-length", b"%d" % len(packed)) in exchange.headers
    assert await whole(exchange) == packed


async def test_unasked_100_and_103_are_skipped(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """Interim answers are not the answer."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n"
    scripted.plays(Answer(raw=interim + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", framing="none"))
    exchange = await upstream.open(Request("POST", b"/", (), b"x"))
    assert (exchange.status, await whole(exchange)) == (200, b"ok")


async def test_early_answer_stops_the_upload(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """A 413 that comes while the body is still being sent is the answer, and the sending stops."""
    stopped = anyio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 16384
                await anyio.lowlevel.checkpoint()
        finally:
            stopped.set()

    scripted.plays(Answer(status=413, chunks=[b"too large"], framing="length", early=True))
    exchange = await upstream.open(Request("POST", b"/", (), endless()))
    assert (exchange.status, await whole(exchange)) == (413, b"too large")
    with anyio.fail_after(5):
        await stopped.wait()
    await scripted.until(lambda: scripted.open == 0)


async def test_source_of_a_body_may_fail(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """What the body's iterator raises comes out of ``open``; upstream never sees a proper end."""

    class SourceError(Exception):
        pass

    async def half() -> AsyncIterator[bytes]:
        yield b"half"
        raise SourceError

    with pytest.raises(SourceError):
        await upstream.open(Request("POST", b"/", (), half()))
    short = Request("POST", b"/", [(b"content-length", b"9")], pieces(b"short"))
    with pytest.raises(InvalidRequest, match="Content-Length"):
        await upstream.open(short)
    await scripted.until(lambda: scripted.open == 0)
    assert not any(request.complete for request in scripted.requests)


# --- a stand-in ---------------------------------------------------------------------------------------


async def test_respx_can_stand_in(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """respx sees method, URL, headers and body, and its answers and failures come out of the seam."""
    with respx.MockRouter(using="httpx") as router:
        route = router.post(f"{scripted.url}/serving-endpoints/a/invocations", params={"q": "1"})
        route.mock(return_value=httpx.Response(429, headers=[("a", "1"), ("a", "2")], content=b"slow"))
        target = b"/serving-endpoints/a/invocations?q=1"
        exchange = await upstream.open(Request("POST", target, [(b"x", b"y")], b"{}"))
        assert exchange.status == 429
        assert [pair for pair in exchange.headers if pair[0] == b"a"] == [(b"a", b"1"), (b"a", b"2")]
        assert await whole(exchange) == b"slow"
        await exchange.close()
        seen = route.calls.last.request
        assert (seen.content, seen.headers["x"]) == (b"{}", "y")

        route.mock(return_value=httpx.Response(200, stream=Streamed()))
        assert await whole(await upstream.open(Request("POST", target))) == b"ab"
        for broken, fault in [
            (httpx.ConnectError("refused"), UpstreamUnreachable),
            (httpx.ReadTimeout("slow"), UpstreamTimeout),
            (httpx.ReadError("cut"), UpstreamCut),
        ]:
            route.mock(side_effect=broken)
            with pytest.raises(fault) as failed:
                await upstream.open(Request("POST", target))
            assert failed.value.__cause__ is broken
    assert scripted.made == 0


class Streamed(httpx.AsyncByteStream):
    """An httpx stream with an empty chunk in it."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in (b"a", b"", b"b"):
            yield part
