"""Request bodies on their way in: Expect, bounds, and the news that the client has left."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.client import connect
from support.proxied import proxied
from support.server import serve
from support.upstream import Answer, ScriptedUpstream

from proxy.errors import BodyTooLarge, InvalidRequest
from proxy.upstream import Request, Upstream, UpstreamConfig
from proxy.web.body import ClientGone, Incoming, read_body, until_gone
from proxy.web.passthrough import relay


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


UPLOAD = bytes(range(256)) * 32768


async def curl(url: str, body: Path, *options: str) -> tuple[int, bytes]:
    """POST a file with ``Expect: 100-continue``: status and body."""
    if (program := shutil.which("curl")) is None:
        pytest.skip("curl is the client here")
    command = [program, "-sS", "--noproxy", "*", "--max-time", "10", "--expect100-timeout", "60"]
    command += [
        "-H",
        "Expect: 100-continue",
        "-w",
        "\n%{http_code}",
        "--data-binary",
        f"@{body}",
        *options,
        url,
    ]
    with anyio.fail_after(15):
        done = await anyio.run_process(command)
    text, _, status = done.stdout.rpartition(b"\n")
    return int(status), text


@pytest.fixture
def upload(tmp_path: Path) -> Path:
    """A file of eight megabytes."""
    path = tmp_path / "upload"
    path.write_bytes(UPLOAD)
    return path


# --- Expect: 100-continue -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("-H", "Transfer-Encoding: chunked")], ids=["length", "chunked"])
@pytest.mark.parametrize("continues", [False, True])
async def test_expect_needs_nothing_of_upstream(
    upload: Path, continues: bool, options: tuple[str, ...]
) -> None:
    """curl waits up to a minute for 100; it gets legato's, whether upstream sends one or never does."""
    async with proxied() as (scripted, server):
        scripted.plays(Answer(chunks=[b"ok"], continues=continues))
        assert await curl(f"{server.url}/up", upload, *options) == (200, b"ok")
        assert scripted.requests[0].body == UPLOAD
        assert scripted.requests[0].one("expect") is None


@pytest.mark.parametrize("end", ["fin", "cut"])
async def test_early_refusal_reaches_the_client(upload: Path, end: Any) -> None:
    """An upstream that refuses without reading the body is heard, also if it hangs up right away."""
    async with proxied() as (scripted, server):
        scripted.plays(Answer(status=413, chunks=[b"no"], framing="length", early=True, end=end))
        for _ in range(5):
            assert await curl(f"{server.url}/up", upload) == (413, b"no")
        await scripted.until(lambda: scripted.open == 0)


async def test_early_answer_closes_the_clients_connection() -> None:
    """A client that waits for 100 and gets the answer may never send its body: no second request there."""
    async with proxied() as (scripted, server), connect(server.port) as client:
        scripted.plays(Answer(status=417, chunks=[b"no"], framing="length", early=True))
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        await client.send(head)
        answer = await client.answer()
        assert (answer.status, answer.body, answer.one("connection")) == (417, b"no", b"close")
        with anyio.fail_after(5):
            assert await client.reader.read() == b""


# --- bodies that were read first ----------------------------------------------------------------------


async def test_a_body_read_before_goes_through(upload: Path) -> None:
    """``body``: the caller has read it; the bytes and one Content-Length go upstream."""
    async with proxied(limit=1 << 24) as (scripted, server):
        assert await curl(f"{server.url}/up", upload, "-H", "Transfer-Encoding: chunked") == (200, b"ok")
        seen = scripted.requests[0]
        assert (seen.body, seen.one("transfer-encoding")) == (UPLOAD, None)


async def test_a_body_read_before_and_a_client_that_leaves() -> None:
    """DC-01: the client is watched all the same, before upstream's head too."""
    async with proxied(limit=100) as (scripted, server):
        scripted.plays(Answer(gate=anyio.Event()))
        async with connect(server.port) as client:
            await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
            await scripted.until(lambda: any(seen.complete for seen in scripted.requests))
        await scripted.until(lambda: scripted.open == 0, limit=2)


async def test_a_body_above_the_bound_is_413(upload: Path) -> None:
    """The answer names the setting, upstream hears nothing."""
    async with proxied(limit=1000) as (scripted, server):
        status, text = await curl(f"{server.url}/up", upload)
        assert status == 413
        assert b'"code":"body_too_large"' in text
        assert b"max_body" in text
        assert scripted.requests == []


# --- the parts ----------------------------------------------------------------------------------------


class Messages:
    """A ``receive()`` that gives these messages, then waits for ever; it minds being awaited twice."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.waiting = False

    async def __call__(self) -> dict[str, Any]:
        assert not self.waiting, "receive() has two consumers"
        self.waiting = True
        try:
            await anyio.lowlevel.checkpoint()
            if not self.messages:
                await anyio.sleep_forever()
            return self.messages.pop(0)
        finally:
            self.waiting = False


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    """One message with a part of the body."""
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


async def test_read_body_joins_and_bounds() -> None:
    """Exactly ``limit`` bytes are allowed; one more is ``BodyTooLarge`` though more would follow."""
    assert await read_body(Messages(part(b"ab", more=True), part(b"", more=True), part(b"c")), 3) == b"abc"
    with pytest.raises(BodyTooLarge, match="max_body"):
        await read_body(Messages(part(b"ab", more=True), part(b"cd", more=True)), 3)
    with pytest.raises(ClientGone):
        await read_body(Messages(part(b"ab", more=True), GONE), 3)


async def test_until_gone_gives_what_comes_first() -> None:
    """The result, the work's own error as it is, or ``ClientGone`` with the work cancelled."""

    async def works() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    async def fails() -> int:
        raise InvalidRequest("no")

    stopped = anyio.Event()

    async def hangs() -> int:
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()
        return 0

    assert await until_gone(Messages(), works()) == 7
    with pytest.raises(InvalidRequest):
        await until_gone(Messages(), fails())
    with anyio.fail_after(5), pytest.raises(ClientGone):
        await until_gone(Messages(part(b""), GONE), hangs())
    assert stopped.is_set()


@pytest.mark.parametrize("whole", [True, False])
async def test_incoming_never_takes_half_a_body_for_a_whole_one(whole: bool) -> None:
    """Pieces end with the body; where the client leaves first, they end with ``ClientGone``."""
    last = [part(b"cd"), GONE] if whole else [GONE]
    incoming = Incoming(Messages(part(b"ab", more=True), part(b"", more=True), *last))
    seen: list[bytes] = []
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(incoming.until_gone)
            try:
                async for piece in incoming.pieces():
                    seen.append(piece)  # noqa: PERF401  what came before the break counts
            except ClientGone:
                seen.append(b"gone")
    incoming.close()
    assert seen == ([b"ab", b"cd"] if whole else [b"ab", b"gone"])


async def test_incoming_goes_on_when_nobody_reads() -> None:
    """Upstream has answered early: the rest of the body is dropped, and leaving is still noticed."""
    incoming = Incoming(Messages(*[part(b"x", more=True)] * 5, part(b"x"), GONE))
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(incoming.until_gone)
            pieces = incoming.pieces()
            assert await anext(pieces) == b"x"
            await pieces.aclose()
    incoming.close()


async def test_relay_hands_on_an_answer_that_has_begun() -> None:
    """Status, headers and body of an exchange that somebody else opened; it is closed in the end."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive, 100)
        await relay(await upstream.open(Request("POST", b"/x", (), b"{}")), receive, send)

    async with (
        ScriptedUpstream() as scripted,
        Upstream(UpstreamConfig(scripted.url)) as upstream,
        serve(app, lifespan="off") as server,
    ):
        html = {"content-type": "text/html; charset=utf-8", "legato-task": "forged"}
        scripted.plays(Answer(status=403, headers=html, chunks=[b"<html>sign in</html>"]))
        async with connect(server.port) as client:
            await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
            answer = await client.answer()
            assert (answer.status, answer.body) == (403, b"<html>sign in</html>")
            assert answer.headers[:1] == ((b"content-type", b"text/html; charset=utf-8"),)
            assert answer.one("legato-task") is None
        scripted.plays(Answer(chunks=[b"a"], end="hang"))
        async with connect(server.port) as client:
            await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
            await client.head()
        await scripted.until(lambda: scripted.busy == 0, limit=2)
