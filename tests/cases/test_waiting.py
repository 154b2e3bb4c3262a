"""Nothing is held back, and nothing stays silent for long: promptness, heartbeats, slow readers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import anyio
import httpx
import openai
import pytest
from support.cases import load
from support.client import connect
from support.frames import SSE, asks, completed, created, delta, done, message, sse, two_cycles
from support.legato import OWNER, Legato, Reading, proxied, request
from support.rules import check
from support.upstream import Answer, Chunk

pytestmark = pytest.mark.anyio

HEARTBEAT = b": legato\n"


# --- prompt -------------------------------------------------------------------------------------------


async def test_head_and_events_come_at_once() -> None:
    """PX-02: the head before the first event, each event before upstream writes the next."""
    case = load("PX-02")
    gates = [anyio.Event()]
    async with proxied() as (upstream, proxy):
        (answer,) = case.answers("", gates)
        answer.chunks = [gates[0], *answer.chunks]
        upstream.plays(answer)
        async with proxy.start(**case.request) as reading:
            await reading.head(limit=1)
            assert reading.one("content-type") == "text/event-stream"
            assert {"no-cache", "no-transform"} <= set((reading.one("cache-control") or "").split(", "))
            assert reading.one("x-accel-buffering") == "no"
            assert reading.one("content-length") is reading.one("content-encoding") is None
            for gate, seen in zip(gates, (b"created", b"output_text.delta", b"completed"), strict=True):
                assert seen not in reading.body
                gate.set()
                await reading.until(seen, limit=1)
            check(await reading.rest())


async def test_the_seam_is_no_pause() -> None:
    """The follow-up goes out as soon as the first body has ended: not one ``seam_grace`` later."""
    async with proxied(seam_grace=60) as (upstream, proxy):
        upstream.plays(*two_cycles())
        check((await proxy.whole(limit=2)).body)


# --- heartbeats ---------------------------------------------------------------------------------------


async def heard(reading: Reading, more: int = 2) -> None:
    """Some more heartbeats have come."""
    await reading.until(HEARTBEAT, reading.body.count(HEARTBEAT) + more, limit=2)


async def test_every_silence_is_filled() -> None:
    """HB-01: inside a cycle, before a slow head, inside the next; no id, no number, none after the end."""
    case = load("HB-01")
    gates: list[anyio.Event] = []
    async with proxied(heartbeat=0.1) as (upstream, proxy):
        first, second = case.answers("", gates)
        gates.append(anyio.Event())
        second.gate = gates[-1]
        upstream.plays(first, second)
        async with proxy.start(**case.request) as reading:
            await reading.until(b"response.created")
            await heard(reading)
            gates[0].set()
            await upstream.until(lambda: len(upstream.requests) == 2)
            await heard(reading)
            gates[2].set()
            await upstream.until(lambda: upstream.busy == 1)
            await heard(reading)
            gates[1].set()
            stream = check(await reading.rest())
        assert stream.types == ["response.created", "response.completed"]
        assert stream.heartbeats >= 6
        assert (await proxy.show(reading.task))["cursor"] == 1, "heartbeats have no cursor"


async def test_no_heartbeat_inside_a_frame() -> None:
    """Half a frame from upstream and a long wait: the client gets heartbeats, then the frame in one piece."""
    gate, half = anyio.Event(), delta("a long text")
    async with proxied(heartbeat=0.05) as (upstream, proxy):
        upstream.plays(sse(created(), half[:30], gate, half[30:], completed(message("a"))))
        async with proxy.start() as reading:
            await reading.until(b"response.created")
            await heard(reading, 3)
            assert b"output_text" not in reading.body
            gate.set()
            stream = check(await reading.rest())
        assert stream.text == "a long text"
        assert stream.heartbeats >= 3


async def test_heartbeats_go_on_while_a_retry_waits() -> None:
    """PX-12: the client hears something while upstream's ``Retry-After`` passes."""
    limited = Answer(status=429, headers={"retry-after": "60"}, chunks=[b"{}"], framing="length")
    async with proxied(heartbeat=0.05) as (upstream, proxy):
        upstream.plays(sse(created(), asks()), limited)
        async with proxy.start() as reading:
            await upstream.until(lambda: len(upstream.requests) == 2 and upstream.busy == 0)
            await heard(reading, 3)
            assert (await proxy.show(reading.task))["state"] == "continuing"


@pytest.mark.parametrize(
    "headers",
    [[("legato-heartbeat", "off")], [("user-agent", "mlflow-python-client/3.1")]],
    ids=["off", "mlflow"],
)
async def test_some_clients_get_no_heartbeats(headers: list[tuple[str, str]]) -> None:
    """Where they are off, or the client chokes on comments; another client of the same proxy has them."""
    gate = anyio.Event()
    async with proxied(heartbeat=0.05) as (upstream, proxy):
        upstream.plays(sse(created(), gate, completed(message("a"))))
        async with proxy.start(headers=[OWNER, *headers]) as quiet, proxy.start() as other:
            await quiet.until(b"response.created")
            await heard(other, 3)
            gate.set()
            assert check(await quiet.rest()).heartbeats == 0
            assert check(await other.rest()).heartbeats >= 3


class Recording(httpx.AsyncBaseTransport):
    """A client's transport that keeps the bytes of the answer; ``beats`` is set after some heartbeats."""

    def __init__(self) -> None:
        self.inner = httpx.AsyncHTTPTransport()
        self.body = b""
        self.beats = anyio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.inner.handle_async_request(request)
        response.stream = Kept(self, response.stream)
        return response

    async def aclose(self) -> None:
        await self.inner.aclose()

    def keep(self, chunk: bytes) -> None:
        """Take note of a piece."""
        self.body += chunk
        if self.body.count(HEARTBEAT) >= 2:
            self.beats.set()


class Kept(httpx.AsyncByteStream):
    """A body on its way through ``Recording``."""

    def __init__(self, recording: Recording, stream: object) -> None:
        assert isinstance(stream, httpx.AsyncByteStream)
        self.recording, self.stream = recording, stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self.stream:
            self.recording.keep(chunk)
            yield chunk

    async def aclose(self) -> None:
        await self.stream.aclose()


async def test_heartbeats_between_ids_do_not_kill_the_openai_client() -> None:
    """SSE-11: with ``id:`` lines and heartbeats the openai client yields both events and no exception."""
    case = load("SSE-11")
    gates: list[anyio.Event] = []
    transport = Recording()
    async with proxied(heartbeat=0.05) as (upstream, proxy):
        upstream.plays(*case.answers("", gates))
        body = case.input["client"]["body"]
        async with openai.AsyncOpenAI(
            base_url=f"{proxy.url}/serving-endpoints",
            api_key="tok-A",
            http_client=httpx.AsyncClient(transport=transport),
            default_headers={"Legato-Event-Ids": "on"},
        ) as client:
            with anyio.fail_after(20):  # importing the SDK takes a while
                events = await client.responses.create(
                    model="sup-demo",
                    input=body["input"],
                    stream=True,
                    extra_body={"databricks_options": body["databricks_options"]},
                )
                seen = [(await anext(events)).type]
                async with anyio.create_task_group() as group:

                    async def rest() -> None:
                        seen.extend([event.type async for event in events])

                    group.start_soon(rest)
                    await transport.beats.wait()
                    gates[0].set()
        assert seen == ["response.created", "response.completed"]
        stream = check(transport.body, event_ids=True)
        assert stream.heartbeats >= 2


# --- slow readers -------------------------------------------------------------------------------------

BIG = delta("x" * 60_000)


def big() -> list[Answer]:
    """Two cycles of nine megabytes: far more than sockets hold."""
    first: list[Chunk] = [created(), *[BIG] * 150, asks()]
    return [sse(*first), sse(*[BIG] * 3, completed(message("end", "m9")))]


async def test_a_reader_that_does_not_read_slows_nobody() -> None:
    """Its task goes on to the end and another reader gets all of its own; then it reads everything."""
    async with proxied(write_timeout=60) as (upstream, proxy), small(proxy) as stuck:
        upstream.plays(*big())
        await stuck.head()
        await proxy.until_state(stuck.task, "completed")
        upstream.plays(*big())
        assert check((await proxy.whole()).body).types[-1] == "response.completed"
        stream = check(await stuck.rest())
        assert len(stream.of("response.output_text.delta")) == 153


async def test_a_reader_that_is_stuck_for_long_is_cut() -> None:
    """After ``write_timeout`` it is cut without an ending, since none is true; its task has its own."""
    async with proxied(write_timeout=0.2) as (upstream, proxy), small(proxy) as stuck:
        upstream.plays(*big())
        await stuck.head()
        await proxy.until_state(stuck.task, "completed")
        await proxy.idle()
        with pytest.raises((EOFError, ConnectionError)):
            await stuck.rest()
        assert b"response.completed" not in stuck.body
        assert not stuck.complete


class small:  # noqa: N801  it is used like a function
    """A client with a small receive buffer, which has sent its request."""

    def __init__(self, proxy: Legato) -> None:
        self.proxy = proxy

    async def __aenter__(self) -> Reading:
        self.connection = connect(self.proxy.port)
        client = await self.connection.__aenter__()
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)
        await client.send(request({"input": "hi", "stream": True, "databricks_options": {"long_task": True}}))
        return Reading(client)

    async def __aexit__(self, *exc: object) -> None:
        await self.connection.__aexit__(None, None, None)


async def test_streams_at_once_all_move() -> None:
    """Twenty tasks side by side, all open at the same moment; every one comes to its end."""
    gate = anyio.Event()
    async with proxied() as (upstream, proxy):
        first = Answer(headers=SSE, chunks=[created(), done(message("a")), gate, asks()])
        upstream.rule = lambda seen: (
            first if len(upstream.requests) <= 20 else sse(completed(message("b", "m2")))
        )
        bodies: list[bytes] = []
        async with anyio.create_task_group() as group:

            async def one() -> None:
                bodies.append((await proxy.whole()).body)

            for _ in range(20):
                group.start_soon(one)
            await upstream.until(lambda: upstream.busy == 20)
            gate.set()
        assert [check(body).types[-1] for body in bodies] == ["response.completed"] * 20
        assert len(upstream.requests) == 40
