"""What goes through legato unchanged: a real server, a real upstream, exact bytes on both sides."""

from __future__ import annotations

import gzip
import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest
from support.client import RawClient, connect
from support.proxied import proxied, request
from support.server import serve
from support.upstream import Answer, Headers, Received, ScriptedUpstream

from proxy.web.answers import quiet_cuts


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def pair() -> AsyncIterator[tuple[ScriptedUpstream, RawClient]]:
    """An upstream, and a client's connection to the proxy in front of it."""
    async with proxied() as (scripted, server), connect(server.port) as client:
        yield scripted, client


Pair = tuple[ScriptedUpstream, RawClient]


# --- cases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 404])
async def test_gzip_goes_through_as_it_is(pair: Pair, status: int) -> None:
    """PX-03: raw gzip bytes with both headers as sent, twice on one connection; also for an error."""
    scripted, client = pair
    plain = b'{"a":1} ' * 2000
    packed = gzip.compress(plain)
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    scripted.plays(Answer(status=status, headers=headers, chunks=[packed], framing="length"))
    for _ in range(2):
        await client.send(request("GET", b"/api/2.0/serving-endpoints", b"accept-encoding: gzip"))
        answer = await client.answer()
        assert (answer.status, answer.one("content-encoding")) == (status, b"gzip")
        assert answer.one("content-length") == b"%d" % len(packed)
        assert gzip.decompress(answer.body) == plain
    assert scripted.requests[0].one("accept-encoding") == b"gzip"


@pytest.mark.parametrize(
    "target",
    [b"/c/a%2Fb", b"/c/%2e%2e/x", b"/c//d", b"/c/%E4%BD%A0", b"/c/a%20b", b"/c/a%2fb", b"//d?a=%2F&a=2&b"],
)
async def test_path_and_query_go_through_raw(pair: Pair, target: bytes) -> None:
    """PX-08: each path reaches upstream unchanged."""
    scripted, client = pair
    await client.send(request("GET", target))
    assert (await client.answer()).body == b"ok"
    assert scripted.requests[0].target == target


async def test_base_path_is_a_border() -> None:
    """PX-08: with a base path, a way out of it is 400 and never rewritten; the rest gets the base path."""
    async with proxied("/base") as (scripted, server), connect(server.port) as client:
        for target in (b"/%2e%2e/x", b"/c/..%2F../x", b"/..%5cx"):
            await client.send(request("GET", target))
            answer = await client.answer()
            assert (answer.status, answer.one("x-should-retry")) == (400, b"false")
            assert b'"code":"invalid_request"' in answer.body
        await client.send(request("GET", b"/c/a%2Fb?q"))
        assert (await client.answer()).status == 200
    assert [seen.target for seen in scripted.requests] == [b"/base/c/a%2Fb?q"]


async def test_every_method_goes_through(pair: Pair) -> None:
    """PX-10: upstream sees the method, the client sees upstream's status and headers; HEAD doesn't wait."""
    scripted, client = pair

    def rule(seen: Received) -> Answer:
        if seen.method == "HEAD":
            return Answer(headers={"x-method": "HEAD", "content-length": "1234"}, framing="none")
        return Answer(status=204, headers={"x-method": seen.method}, framing="none")

    scripted.rule = rule
    cors = [b"Origin: https://a.example", b"Access-Control-Request-Method: POST"]
    for method, target, lines in [
        ("HEAD", b"/", []),
        ("HEAD", b"/api/x", []),
        ("OPTIONS", b"/api/x", cors),
        ("PATCH", b"/api/x", []),
        ("PURGE", b"/api/x", []),
    ]:
        await client.send(request(method, target, *lines))
        answer = await client.answer(method)
        assert (answer.status, answer.one("x-method")) == (200 if method == "HEAD" else 204, method.encode())
        assert answer.one("content-length") == (b"1234" if method == "HEAD" else None)
        assert answer.one("transfer-encoding") is None
    assert [seen.method for seen in scripted.requests] == ["HEAD", "HEAD", "OPTIONS", "PATCH", "PURGE"]
    assert scripted.requests[2].one("origin") == b"https://a.example"


async def test_host_is_upstreams(pair: Pair) -> None:
    """PX-11: upstream answers 421 unless Host is its own authority."""
    scripted, client = pair
    own = scripted.authority.encode()
    scripted.rule = lambda seen: Answer(
        status=200 if seen.all("host") == [own] else 421, chunks=[b"{}"], framing="length"
    )
    await client.send(request("POST", b"/serving-endpoints/sup-demo/invocations", body=b'{"stream":true}'))
    assert (await client.answer()).status == 200
    assert scripted.requests[0].body == b'{"stream":true}'


@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_cut_body_is_cut_for_the_client(framing: str, caplog: pytest.LogCaptureFixture) -> None:
    """PX-17 (5): the client sees a cut, not a clean end; one request upstream, and nothing in the logs."""
    caplog.set_level(logging.INFO)
    headers: Headers = {"content-length": "99"} if framing == "length" else {}
    parts = [b"data: 1\n\n", b'data: {"type":"respon']
    quiet_cuts()
    quiet_cuts()
    async with proxied() as (scripted, server), connect(server.port) as client:
        scripted.plays(Answer(headers=headers, chunks=parts, end="reset", framing=framing))  # type: ignore[arg-type]
        await client.send(request("GET", b"/events"))
        answer = await client.answer()
        assert (answer.status, answer.complete) == (200, False)
        assert b"".join(parts).startswith(answer.body)
        await scripted.until(lambda: scripted.open == 0)
        assert len(scripted.requests) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_response_cut_by_mistake_is_still_told(caplog: pytest.LogCaptureFixture) -> None:
    """The filter hides cuts made on purpose, not an app that forgot to end its response."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})

    quiet_cuts()
    async with serve(app, lifespan="off") as server, connect(server.port) as client:
        await client.send(request("GET", b"/"))
        assert not (await client.answer()).complete
    assert "without completing response" in caplog.text


async def test_client_gone_in_the_middle_closes_upstream(caplog: pytest.LogCaptureFixture) -> None:
    """DC-01: an endless download whose client leaves after 64 kB: upstream closed within 2 s, no noise."""

    def endless() -> Any:
        while True:
            yield b"x" * 16384

    async with proxied() as (scripted, server):
        scripted.plays(Answer(headers={"content-type": "application/octet-stream"}, chunks=endless()))
        async with connect(server.port) as client:
            await client.send(request("GET", b"/big-download"))
            await client.reader.readexactly(65536)
        await scripted.until(lambda: scripted.open == 0, limit=2)
        with anyio.fail_after(2):
            while server.requests_open:
                await anyio.lowlevel.checkpoint()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_client_gone_before_the_head_closes_upstream() -> None:
    """DC-01: the same when upstream has not answered yet."""
    async with proxied() as (scripted, server):
        scripted.plays(Answer(gate=anyio.Event()))
        async with connect(server.port) as client:
            await client.send(request("POST", b"/slow", body=b"{}"))
            await scripted.until(lambda: any(seen.complete for seen in scripted.requests))
        await scripted.until(lambda: scripted.open == 0, limit=2)


async def test_client_gone_in_an_upload_closes_upstream() -> None:
    """Half a body is never ended for the client: upstream sees a broken request, not a short one."""
    async with proxied() as (scripted, server):
        async with connect(server.port) as client:
            await client.send(request("POST", b"/up", b"Transfer-Encoding: chunked") + b"4\r\nhalf\r\n")
            await scripted.until(lambda: len(scripted.requests) == 1)
        await scripted.until(lambda: scripted.open == 0, limit=2)
    assert not scripted.requests[0].complete


# --- headers ------------------------------------------------------------------------------------------


async def test_hop_by_hop_and_legato_headers_stay_here(pair: Pair) -> None:
    """Both directions drop what belongs to one connection, what ``Connection`` names, and ``Legato-*``."""
    scripted, client = pair
    dropped = [b"Connection: X-Mine, keep-alive", b"X-Mine: 1", b"Keep-Alive: 5", b"TE: trailers"]
    dropped += [b"Proxy-Authorization: Basic x", b"Upgrade: h2c", b"LEGATO-Token: t", b"legato-after: 3"]
    kept = [b"X-Two: a", b"X-Two: b", b"Cookie: c=1", b"Authorization: Bearer tok-A", b"Via: 1.1 x"]
    answered: Headers = [
        ("Connection", "x-theirs"),
        ("X-Theirs", "1"),
        ("Keep-Alive", "timeout=5"),
        ("LeGaTo-Task", "forged"),
        ("Proxy-Authenticate", "Basic"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("Server", "upstream"),
        ("Bell", "\x07"),
    ]
    scripted.plays(Answer(headers=answered, chunks=[b"ok"], framing="length"))
    await client.send(request("GET", b"/", *dropped, *kept))
    answer = await client.answer()
    assert answer.headers == (
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"server", b"upstream"),
        (b"content-length", b"2"),
    )
    assert [(name.title(), value) for name, value in scripted.requests[0].headers] == [
        (b"Host", scripted.authority.encode()),
        *((line.split(b": ")[0], line.split(b": ")[1]) for line in kept),
    ]


@pytest.mark.parametrize("status", [401, 403, 429, 503])
async def test_refusals_go_through(pair: Pair, status: int) -> None:
    """PX-12: status, body and Retry-After are upstream's own."""
    scripted, client = pair
    headers = {"content-type": "application/json", "retry-after": "7", "x-ratelimit-remaining": "0"}
    body = b'{"error_code":"REQUEST_LIMIT_EXCEEDED"}'
    scripted.plays(Answer(status=status, headers=headers, chunks=[body], framing="length"))
    await client.send(request("POST", b"/serving-endpoints/sup-demo/invocations", body=b"{}"))
    answer = await client.answer()
    assert (answer.status, answer.body, answer.one("retry-after")) == (status, body, b"7")
    assert answer.one("x-should-retry") is None


@pytest.mark.parametrize("location", ["https://elsewhere.example/x", "http://[", "/%ff"])
async def test_redirects_are_the_clients(pair: Pair, location: str) -> None:
    """A 3xx goes through, whatever its Location; nobody follows it."""
    scripted, client = pair
    scripted.plays(Answer(status=307, headers={"location": location, "content-length": "0"}, framing="none"))
    await client.send(request("POST", b"/", body=b"x"))
    answer = await client.answer()
    assert (answer.status, answer.one("location")) == (307, location.encode())
    assert len(scripted.requests) == 1


async def test_304_with_a_length_ends(pair: Pair) -> None:
    """The length of a 304 speaks of another answer; it is left out, and the connection works on."""
    scripted, client = pair
    scripted.plays(
        Answer(status=304, headers={"etag": '"a"', "content-length": "99"}, framing="none"),
        Answer(chunks=[b"ok"]),
    )
    await client.send(request("GET", b"/"))
    answer = await client.answer()
    assert (answer.status, answer.one("etag"), answer.one("content-length")) == (304, b'"a"', None)
    await client.send(request("GET", b"/"))
    assert (await client.answer()).body == b"ok"


# --- no buffering -------------------------------------------------------------------------------------


async def test_chunks_go_through_as_they_come(pair: Pair) -> None:
    """PX-02: the head before the first chunk, each chunk before the next is written."""
    scripted, client = pair
    gates = [anyio.Event(), anyio.Event()]
    scripted.plays(Answer(chunks=[gates[0], b"data: 1\n\n", gates[1], b"data: 2\n\n"]))
    await client.send(request("GET", b"/events"))
    with anyio.fail_after(5):
        assert (await client.head())[0] == 200
        gates[0].set()
        assert await client.chunk() == b"data: 1\n\n"
        gates[1].set()
        assert await client.chunk() == b"data: 2\n\n"
        assert await client.chunk() == b""


async def test_upload_goes_through_as_it_comes(pair: Pair) -> None:
    """A chunked request body reaches upstream, and its answer the client, while it is still being sent."""
    scripted, client = pair
    scripted.plays(Answer(chunks=[b"early"], early=True, end="hang"))
    await client.send(request("POST", b"/up", b"Transfer-Encoding: chunked") + b"3\r\nabc\r\n")
    await scripted.until(lambda: len(scripted.requests) == 1)
    with anyio.fail_after(5):
        assert (await client.head())[0] == 200
        assert await client.chunk() == b"early"
    assert scripted.requests[0].one("transfer-encoding") == b"chunked"


# --- legato's own answers -----------------------------------------------------------------------------


async def test_websocket_is_refused(pair: Pair) -> None:
    """501 ``upgrade_refused``, and upstream never hears of it."""
    scripted, client = pair
    upgrade = [b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13"]
    await client.send(request("GET", b"/ws", *upgrade, b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="))
    answer = await client.answer()
    assert answer.status == 501
    assert b'"code":"upgrade_refused"' in answer.body
    assert scripted.requests == []


async def test_unreachable_upstream_is_502_within_two_seconds() -> None:
    """A request that was never sent may be repeated, and the answer says so."""
    async with proxied() as (scripted, server):
        scripted.shut()
        with anyio.fail_after(2):
            async with httpx.AsyncClient(trust_env=False) as client:
                answer = await client.post(f"{server.url}/serving-endpoints/a/invocations", json={})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (502, "true")
        assert answer.headers["retry-after"] == "1"
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("upstream_unreachable", "upstream_error")
        assert f"127.0.0.1:{scripted.port}: connection refused" in error["message"]


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (Answer(gate=anyio.Event()), 504, b"upstream_timeout"),
        (Answer(raw=b"", framing="none", end="cut"), 502, b"upstream_incomplete"),
        (Answer(raw=b"HTP/1.1 200 OK\r\n\r\n", framing="none", end="cut"), 502, b"upstream_incomplete"),
        (Answer(status=999), 502, b"upstream_incomplete"),
    ],
    ids=["silent", "closed", "no HTTP", "status 999"],
)
async def test_unknown_outcome_is_not_to_be_retried(answer: Answer, status: int, code: bytes) -> None:
    """Silence and breaks before the head: a JSON error that tells SDKs not to repeat the request."""
    async with proxied(max_silence=0.2) as (scripted, server), connect(server.port) as client:
        scripted.plays(answer)
        await client.send(request("POST", b"/", body=b"x"))
        got = await client.answer()
        assert (got.status, got.one("x-should-retry"), got.one("retry-after")) == (status, b"false", None)
        assert got.one("content-type") == b"application/json"
        assert b'"code":"' + code in got.body
        assert len(scripted.requests) == 1


async def test_nobody_is_led_elsewhere(pair: Pair) -> None:
    """No open proxy: an absolute URL in the request line goes to the one upstream."""
    scripted, client = pair
    await client.send(request("GET", b"http://elsewhere.example/c?q=1"))
    assert (await client.answer()).body == b"ok"
    assert scripted.requests[0].target == b"/c?q=1"
    assert scripted.requests[0].one("host") == scripted.authority.encode()
    assert len(scripted.requests) == 1


@pytest.mark.parametrize(("method", "target"), [("OPTIONS", b"*"), ("CONNECT", b"elsewhere.example:443")])
async def test_targets_that_are_no_paths_are_refused(pair: Pair, method: str, target: bytes) -> None:
    """400, and upstream hears nothing."""
    scripted, client = pair
    await client.send(request(method, target))
    assert (await client.answer()).status == 400
    assert scripted.requests == []
