"""One client at a task's stream: handed over at once, waited for where the client is slow."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from starlette.types import Message

from proxy.core.messages import Event, Summary
from proxy.log.base import NewTask
from proxy.log.memory import MemoryLog
from proxy.web.stream import Reader, heartbeat_line

pytestmark = pytest.mark.anyio

RUNNING = Summary("running", open=True)
DONE = Summary("completed", open=False, done=b"data: [DONE]\n\n")


@pytest.fixture
def anyio_backend() -> str:
    """The reader drives asyncio."""
    return "asyncio"


class Client:
    """An ASGI server's side of one response. While ``slow`` is set, ``send`` waits for ``reads``."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.slow = False
        self.reads = anyio.Event()
        self.left = anyio.Event()
        self.news = anyio.Event()
        self.fails = False

    async def send(self, message: Message) -> None:
        """Take one message, sooner or later."""
        if self.fails:
            raise OSError("gone")
        if self.slow:
            await self.reads.wait()
        self.got.append(message["body"])
        self.news.set()

    async def receive(self) -> Message:
        """Says when the client has left."""
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def until(self, count: int) -> None:
        """Wait until so many messages have come."""
        with anyio.fail_after(5):
            while len(self.got) < count:
                self.news = anyio.Event()
                await self.news.wait()


class Task:
    """A task in a log in memory."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.cursor = -1

    async def append(self, *data: bytes, summary: Summary | None = None) -> None:
        """Write events."""
        events = [Event(self.cursor + 1 + n, part) for n, part in enumerate(data)]
        await self.log.append("t", 1, self.cursor, events, summary)
        self.cursor += len(events)


@pytest.fixture
async def task() -> AsyncIterator[Task]:
    """A running task without events."""
    task = Task()
    await task.log.open()
    await task.log.create(NewTask("t", "o", None, "/", 0.0, RUNNING), [])
    yield task
    await task.log.close()


async def reading(task: Task, client: Client, **how: float) -> Reader:
    """A reader from the beginning."""
    tail = await task.log.tail("t")
    return Reader(tail, client.send, **{"heartbeat": 0, "write_timeout": 5, **how})


async def test_an_event_goes_out_in_the_turn_that_wrote_it(task: Task) -> None:
    """A waiting reader needs no turn of its own: when append returns, the bytes are with the server."""
    client = Client()
    reader = await reading(task, client)
    async with anyio.create_task_group() as group:
        group.start_soon(reader.run, client.receive)
        await anyio.wait_all_tasks_blocked()
        await task.append(b"a")
        assert client.got == [b"a"]
        await task.append(b"b", b"c")
        assert client.got == [b"a", b"bc"]
        await task.append(b"d", summary=DONE)
    assert client.got == [b"a", b"bc", b"d", b"data: [DONE]\n\n"]
    assert reader.complete


async def test_a_slow_client_holds_up_nobody_and_loses_nothing(task: Task) -> None:
    """Where the server's send waits, the writer goes on, and the reader catches up later, in order."""
    client = Client()
    reader = await reading(task, client)
    async with anyio.create_task_group() as group:
        group.start_soon(reader.run, client.receive)
        await anyio.wait_all_tasks_blocked()
        client.slow = True
        for part in (b"a", b"b", b"c"):
            await task.append(part)
        await anyio.wait_all_tasks_blocked()
        assert client.got == []
        client.slow = False
        client.reads.set()
        await client.until(2)
        await task.append(b"d", summary=DONE)
    assert b"".join(client.got) == b"abcddata: [DONE]\n\n"
    assert reader.complete


async def test_a_client_that_never_reads_is_cut(task: Task) -> None:
    """After write_timeout, twice at most, the reader ends without an ending."""
    client = Client()
    reader = await reading(task, client, write_timeout=0.02)
    client.slow = True
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run, client.receive)
            await anyio.wait_all_tasks_blocked()
            await task.append(b"a")
    assert not reader.complete
    assert client.got == []


async def test_a_send_that_fails_is_the_readers_trouble(task: Task) -> None:
    """The writer never meets it."""
    client = Client()
    reader = await reading(task, client)

    async def run() -> None:
        with pytest.raises(ExceptionGroup) as failed:
            await reader.run(client.receive)
        assert failed.group_contains(OSError)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        client.fails = True
        await task.append(b"a")
    assert (await task.log.read("t"))[0].data == b"a"


async def test_a_silent_stream_gets_heartbeats(task: Task) -> None:
    """Comment lines while nothing comes, and none between the bytes of an event."""
    client = Client()
    reader = await reading(task, client, heartbeat=0.01)
    async with anyio.create_task_group() as group:
        group.start_soon(reader.run, client.receive)
        await client.until(2)
        await task.append(b"data: x\n\n", summary=DONE)
    *beats, event, done = client.got
    assert set(beats) == {b": legato\n"}
    assert (event, done) == (b"data: x\n\n", DONE.done)


async def test_a_client_that_leaves_ends_its_reader(task: Task) -> None:
    """And nothing else: the task goes on."""
    client = Client()
    reader = await reading(task, client)
    async with anyio.create_task_group() as group:
        group.start_soon(reader.run, client.receive)
        await anyio.wait_all_tasks_blocked()
        client.left.set()
    assert not reader.complete
    await task.append(b"a")


def test_a_pause_says_why_on_one_line() -> None:
    """Line ends and control characters of a reason become spaces, 200 characters at most."""
    line = heartbeat_line(Summary("paused", open=True, reason="a\r\nb\x00c" + "x" * 300))
    assert line.startswith(b": legato paused: a  b cx")
    assert line.count(b"\n") == 1
    assert len(line) == len(b": legato paused: \n") + 200
