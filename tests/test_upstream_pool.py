"""Connections to upstream: kept, avoided, closed, never used twice; and sound after thousands of cancels."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import AsyncIterator, Iterator

import anyio
import pytest
from support.upstream import Answer, Received, ScriptedUpstream, whole

from proxy import engine
from proxy.errors import UpstreamCut
from proxy.upstream import Exchange, Request, Upstream, UpstreamConfig

CANCELS = int(os.environ.get("STRESS_CANCELS", "1500"))
"""How many requests the stress test cancels; 10000 takes a few seconds."""


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


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for two sockets for each stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_connection_is_kept_only_after_a_whole_body(
    upstream: Upstream, scripted: ScriptedUpstream
) -> None:
    """``close`` after the end keeps the connection, before it closes it; twice is once."""
    exchange = await upstream.open(Request("GET", b"/"))
    await whole(exchange)
    await exchange.close()
    scripted.plays(Answer(chunks=[b"a"], end="hang"), Answer(chunks=[b"b"]))
    exchange = await upstream.open(Request("GET", b"/"))
    assert (await exchange.chunk(), scripted.made) == (b"a", 1)
    await exchange.close()
    await exchange.close()
    await scripted.until(lambda: scripted.open == 0)
    with pytest.raises(anyio.ClosedResourceError):
        await exchange.chunk()
    assert await whole(await upstream.open(Request("GET", b"/"))) == b"b"


async def test_fresh_requests_avoid_connections_that_were_idle(
    scripted: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection on which upstream answered just now will do; one that has been idle longer won't."""
    async with Upstream(UpstreamConfig(scripted.url)) as upstream:
        for _ in range(3):
            await whole(await upstream.open(Request("POST", b"/", fresh=True)))
        assert scripted.made == 1
    monkeypatch.setattr(engine, "FRESH_SECONDS", 0.0)
    async with Upstream(UpstreamConfig(scripted.url)) as upstream:
        for _ in range(3):
            await whole(await upstream.open(Request("POST", b"/", fresh=True)))
        assert scripted.made == 4


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "GET", "HEAD", "OPTIONS"])
async def test_only_safe_requests_are_repeated_and_only_on_an_idle_connection(
    upstream: Upstream, scripted: ScriptedUpstream, method: str
) -> None:
    """A connection that dies at its second request: GET goes out once more, POST, PUT, DELETE never."""
    done = Answer(headers={"content-length": "0"}, framing="none")
    dies = Answer(raw=b"", framing="none", end="cut")
    scripted.rule = lambda seen: done if seen.target == b"/first" or seen.connection > 1 else dies
    await whole(await upstream.open(Request("GET", b"/first")))
    safe = method in ("GET", "HEAD", "OPTIONS")
    if safe:
        await whole(await upstream.open(Request(method, b"/second")))
    else:
        with pytest.raises(UpstreamCut):
            await upstream.open(Request(method, b"/second"))
    assert [seen.target for seen in scripted.requests].count(b"/second") == (2 if safe else 1)


async def test_a_new_connection_that_breaks_is_no_reason_to_repeat(
    upstream: Upstream, scripted: ScriptedUpstream
) -> None:
    """Upstream that closes without an answer on a new connection gets a GET once."""
    scripted.plays(Answer(raw=b"", framing="none", end="cut"))
    with pytest.raises(UpstreamCut):
        await upstream.open(Request("GET", b"/"))
    assert len(scripted.requests) == 1


def by_target(seen: Received) -> Answer:
    """``/hang`` never ends, ``/wait`` never begins."""
    if seen.target == b"/hang":
        return Answer(chunks=[b"a"], end="hang")
    if seen.target == b"/wait":
        return Answer(gate=anyio.Event())
    return Answer(chunks=[b"ok"])


@pytest.mark.parametrize("target", [b"/hang", b"/wait"])
async def test_cancelling_closes_the_connection(
    upstream: Upstream, scripted: ScriptedUpstream, target: bytes
) -> None:
    """A cancelled ``open`` or ``chunk`` leaves nothing open upstream, and the pool works on."""
    scripted.rule = by_target
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            await whole(await upstream.open(Request("POST", target, (), b"x")))

        group.start_soon(wait)
        await scripted.until(lambda: any(seen.complete for seen in scripted.requests))
        group.cancel_scope.cancel()
    await scripted.until(lambda: scripted.open == 0)
    assert await whole(await upstream.open(Request("POST", b"/"))) == b"ok"


async def test_a_busy_stream_can_be_cancelled(upstream: Upstream, scripted: ScriptedUpstream) -> None:
    """A reader that never has to wait notices its cancellation all the same."""

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 16384

    scripted.plays(Answer(chunks=endless()))
    flowing = anyio.Event()

    async def read(exchange: Exchange) -> None:
        while await exchange.chunk():
            flowing.set()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(read, await upstream.open(Request("GET", b"/")))
            await flowing.wait()
            group.cancel_scope.cancel()
    await scripted.until(lambda: scripted.open == 0)


async def test_thousands_of_cancels_leave_the_pool_sound(scripted: ScriptedUpstream) -> None:
    """Cancelled at any point, once or twice: afterwards 20 of 20 requests work and nothing is left open."""
    scripted.rule = by_target
    chance = random.Random(7)
    left = CANCELS

    async def one(upstream: Upstream) -> None:
        target = chance.choice([b"/hang", b"/wait", b"/ok"])
        exchange = await upstream.open(Request("POST", target, (), b"x", fresh=chance.random() < 0.5))
        try:
            await whole(exchange)
        finally:
            await exchange.close()

    async def worker(upstream: Upstream) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            with anyio.move_on_after(chance.random() * 0.01) as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(one, upstream)
                    if chance.random() < 0.5:  # twice: the group's scope too, a little earlier or later
                        await anyio.sleep(chance.random() * 0.01)
                        group.cancel_scope.cancel()
            assert scope is not None

    async with Upstream(UpstreamConfig(scripted.url)) as upstream:
        with anyio.fail_after(50):
            async with anyio.create_task_group() as workers:
                for _ in range(40):
                    workers.start_soon(worker, upstream)
        for _ in range(20):
            assert await whole(await upstream.open(Request("POST", b"/ok", (), b"x"))) == b"ok"
        await scripted.until(lambda: scripted.busy == 0)
    await scripted.until(lambda: scripted.open == 0)


@pytest.mark.usefixtures("many_files")
async def test_five_hundred_streams_after_two_hundred(scripted: ScriptedUpstream) -> None:
    """A ramp: 200 streams come and go, then 500 are open at once and every one of them delivers."""
    gate = anyio.Event()
    scripted.rule = lambda _: Answer(chunks=[b"first", gate, b"last"])
    finished = 0

    async def stream(upstream: Upstream, begun: list[bytes]) -> None:
        nonlocal finished
        exchange = await upstream.open(Request("POST", b"/", (), b"{}", fresh=True))
        begun.append(await exchange.chunk())
        assert await whole(exchange) == b"last"
        finished += 1

    async with Upstream(UpstreamConfig(scripted.url, connect_timeout=20)) as upstream:
        for count in (200, 500):
            gate, finished = anyio.Event(), 0
            begun: list[bytes] = []
            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    for _ in range(count):
                        group.start_soon(stream, upstream, begun)
                    while len(begun) < count:
                        await anyio.lowlevel.checkpoint()
                    assert scripted.busy == count
                    gate.set()
            assert finished == count
