"""What only a log in a file can be asked: restarts, kills, locks, modes, full disks, durability."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest
from log.builders import COMPLETED, RUNNING, cursors, events, everything, fill, ids, row_of, task, waits

from proxy.core.messages import Event, Note, Summary
from proxy.errors import LogFull, LogUnavailable, StaleWriter, TaskNotFound
from proxy.log import database, sqlite, wal
from proxy.log.sqlite import SqliteLog

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the log is."""
    return str(tmp_path / "legato.db")


@pytest.fixture
async def log(path: str) -> AsyncIterator[SqliteLog]:
    """An open log."""
    made = await opened(path)
    yield made
    await made.close()


@pytest.fixture
async def power(path: str) -> AsyncIterator[SqliteLog]:
    """An open log that tells of nothing before it is on the disk."""
    made = SqliteLog(path, durability="power")
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk whose syncs wait until they are allowed."""
    made = Disk()
    monkeypatch.setattr(wal, "_sync_file", made.sync)
    return made


class Disk:
    """Counts fdatasyncs, holds them up, or fails."""

    def __init__(self) -> None:
        self.syncs = 0
        self.error: OSError | None = None
        self.errors = 1_000_000
        self.allowed = threading.Event()

    def sync(self, fd: int) -> None:
        """In place of the true one."""
        self.syncs += 1
        assert self.allowed.wait(5)
        if self.error is not None and self.errors:
            self.errors -= 1
            raise self.error


async def opened(path: str) -> SqliteLog:
    """Opened on what is there."""
    made = SqliteLog(path)
    await made.open()
    return made


async def until(true: Callable[[], bool]) -> None:
    """Let others run until it is so."""
    with anyio.fail_after(5):
        while not true():  # noqa: ASYNC110  what it waits for is inside and has no event
            await asyncio.sleep(0)


def content(path: str) -> bytes:
    """What stands in a file."""
    return Path(path).read_bytes()


def remove(path: str, *, replace: bool) -> None:
    """As somebody with a shell would."""
    os.unlink(path)
    if replace:
        Path(path).touch()


def connection_of(log: SqliteLog) -> sqlite3.Connection:
    """For what only a test may do."""
    connection = log._database._connection
    assert connection is not None
    return connection


def wal_of(log: SqliteLog) -> wal.Wal:
    """As above."""
    found = log._database._wal
    assert found is not None
    return found


# --- restarts -----------------------------------------------------------------------------------------


async def test_a_restart_finds_everything_as_it_was(path: str):
    """Row, summary and every byte of the records are there, and a new epoch is above the old ones."""
    log = await opened(path)
    written = [Note("request", bytes(range(256))), *events(0, 3), Note("intent", b"{}")]
    ended = Summary(
        "incomplete", False, "max_cycles", "resp_1", 3, 17, b"data: [DONE]\xff\n\n", ("req_1", "req_2")
    )
    await log.create(task(conversation="talk \ud800"), written)
    epoch = await log.take("task_1")
    await log.append("task_1", epoch, 2, events(3, 2), ended)
    before = await row_of(log)
    await log.close()

    log = await opened(path)
    assert await row_of(log) == before
    assert before.summary == ended
    assert await log.find("resp_1", "owner") == before
    assert await ids(log, owner="owner", conversation="talk \ud800") == ["task_1"]
    assert [record async for record in log.records("task_1")] == [*written, *events(3, 2)]
    assert cursors(await everything(await log.tail("task_1", after=1))) == [2, 3, 4]
    newer = await log.take("task_1")
    assert newer > epoch
    with pytest.raises(StaleWriter):
        await log.append("task_1", epoch, 4, events(5, 1))
    await log.append("task_1", newer, 4, events(5, 1))
    await log.close()


async def test_a_row_that_lags_is_counted_from_its_records(path: str, monkeypatch: pytest.MonkeyPatch):
    """Cursor and size are right at the next start though nothing was written at the end of this one."""
    log = await opened(path)
    await log.create(task(), [])
    await log.create(task("task_2"), events(0, 1))
    for cursor in range(50):
        await log.append("task_1", 1, cursor - 1, [*events(cursor, 1, b"12345"), Note("item", b"67")])
    monkeypatch.setattr(log, "_save", lambda: None)
    await log.close()

    log = await opened(path)
    row, other = await row_of(log), await row_of(log, "task_2")
    assert (row.cursor, row.size) == (49, 350)
    assert (other.cursor, other.size) == (0, 10)
    epoch = await log.take("task_1")
    await log.append("task_1", epoch, 49, events(50, 1))
    assert len([record async for record in log.records("task_1")]) == 101
    await log.close()


async def test_a_row_never_lags_far(log: SqliteLog):
    """Without any summary the row is written every so often."""
    await log.create(task(), [])
    for start in range(0, 3 * sqlite.SAVE_AFTER, 100):
        await fill(log, 100)
        (known,) = connection_of(log).execute("SELECT cursor FROM task").fetchone()
        assert start + 99 - known < sqlite.SAVE_AFTER


KILLED = """
import asyncio, itertools, os, sys
from log.builders import events, task
from proxy.core.messages import Note
from proxy.log import open_log

async def main():
    log = open_log("sqlite:" + sys.argv[1])
    await log.open()
    await log.create(task(), [])
    for cursor in itertools.count():
        await log.append("task_1", 1, cursor - 1, [*events(cursor, 1, b"%d" % cursor), Note("item", b"{}")])
        os.write(1, b"%d\\n" % cursor)

asyncio.run(main())
"""


def child(path: str) -> subprocess.Popen[bytes]:
    """A process that appends to the log and says so after each append."""
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    return subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, env=environment)


async def test_a_killed_process_loses_nothing_it_was_told_is_written(path: str):
    """kill -9 in the middle of appends: all that returned is there, in order and whole."""
    with child(path) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(1500)]
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split(b"\n")[:-1]]
    log = await opened(path)
    row = await row_of(log)
    assert row.cursor in (told[-1], told[-1] + 1)
    assert await log.take("task_1") == 2
    records = [record async for record in log.records("task_1")]
    assert records == [
        record
        for cursor in range(row.cursor + 1)
        for record in (Event(cursor, b"%d" % cursor), Note("item", b"{}"))
    ]
    assert row.size == sum(len(record.data) for record in records)
    await log.close()


async def test_many_tasks_are_there_soon(path: str):
    """5,000 tasks of 20 events each are opened within two seconds."""
    log = await opened(path)
    for number in range(5000):
        await log.create(task(f"task_{number}", owner=f"owner_{number % 100}"), events(0, 19))
        await log.append(f"task_{number}", 1, 18, events(19, 1))
    await log.close()
    start = time.perf_counter()
    log = await opened(path)
    took = time.perf_counter() - start
    print(f"opened 5,000 tasks in {took * 1000:.0f} ms")  # noqa: T201
    assert (await row_of(log, "task_4999")).cursor == 19
    assert len(await log.list(limit=10_000)) == 5000
    await log.close()
    assert took < 2


# --- whose file it is ---------------------------------------------------------------------------------


async def test_a_second_user_of_the_file_is_refused(log: SqliteLog, path: str):
    """In this process too; it is told which file and which setting, and the first one isn't disturbed."""
    with pytest.raises(LogUnavailable, match=r"legato\.db.*`log`"):
        await opened(path)
    with pytest.raises(LogUnavailable, match="open already"):
        await log.open()
    await log.create(task(), events(0, 1))


async def test_a_second_process_is_refused(path: str):
    """While another process has the log, it can't be opened; once that one is dead, it can."""
    with child(path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(LogUnavailable, match=r"legato\.db.*`log`"):
            await opened(path)
        process.kill()
    await (await opened(path)).close()


async def test_only_the_owner_may_read_the_files(path: str):
    """Mode 0600 for each file, however generous the umask is."""
    umask = os.umask(0)
    try:
        log = await opened(path)
        await log.create(task(), events(0, 1), sync=True)
        files = sorted(Path(path).parent.iterdir())
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in files}
        await log.close()
    finally:
        os.umask(umask)
    assert modes == dict.fromkeys(["legato.db", "legato.db-lock", "legato.db-shm", "legato.db-wal"], 0o600)


async def test_a_newer_schema_is_refused_untouched(path: str):
    """A file of a later version is left as it is, and the message names both versions."""
    await (await opened(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = content(path)
    with pytest.raises(LogUnavailable, match=r"newer legato.*schema 99"):
        await opened(path)
    assert content(path) == before


async def test_a_strangers_database_is_refused(path: str):
    """A database that has tables of somebody else's is no log."""
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(LogUnavailable, match="no log of legato"):
        await opened(path)


@pytest.mark.parametrize("place", ["missing/legato.db", "", "text"])
async def test_what_cant_be_opened_is_named(tmp_path: Path, place: str):
    """A missing directory, a directory, a text file: refused with the path, and the lock is let go."""
    (tmp_path / "text").write_text("no database " * 1000)
    for _ in range(2):
        with pytest.raises(LogUnavailable, match="can't be opened") as caught:
            await opened(str(tmp_path / place))
        assert str(tmp_path) in caught.value.message
        assert caught.value.param == "log"


@pytest.mark.parametrize("suffix", ["", "-wal"])
@pytest.mark.parametrize("replace", [False, True], ids=["removed", "replaced"])
async def test_a_file_that_was_removed_is_noticed(
    log: SqliteLog, path: str, monkeypatch: pytest.MonkeyPatch, suffix: str, replace: bool
):
    """Writing into a file that nobody will find again is refused, for good."""
    monkeypatch.setattr(database, "LOOK_SECONDS", 0)
    await log.create(task(), events(0, 1))
    remove(path + suffix, replace=replace)
    with pytest.raises(LogUnavailable, match="removed or replaced"):
        await log.append("task_1", 1, 0, events(1, 1))
    assert "removed or replaced" in str(log.failed)
    assert "removed or replaced" in str(await log.probe())
    assert cursors(await log.read("task_1")) == [0]


# --- errors -------------------------------------------------------------------------------------------


async def test_a_full_disk_is_told_and_survived(log: SqliteLog):
    """LogFull, nothing half written, what was there stays readable, and with room it goes on."""
    await log.create(task(), events(0, 10))
    tail = await log.tail("task_1")
    connection = connection_of(log)
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LogFull):
        await log.append("task_1", 1, 9, [Note("item", b"{}"), *events(10, 1, b"x" * 100_000)], COMPLETED)
    with pytest.raises(LogFull):
        await log.append("task_1", 1, 9, events(10, 1, b"x" * 100_000))
    with pytest.raises(LogFull):
        await log.create(task("task_2"), [Note("request", b"x" * 100_000)])
    assert "full" in str(log.failed)
    assert (await row_of(log)).summary == RUNNING
    assert len([record async for record in log.records("task_1")]) == 10
    assert cursors(await tail.next()) == list(range(10))
    assert await ids(log) == ["task_1"]

    connection.execute("PRAGMA max_page_count = 1000000")
    await log.append("task_1", 1, 9, events(10, 1, b"x" * 100_000))
    assert log.failed is None
    assert cursors(await tail.next()) == [10]


async def test_a_probe_finds_out_that_writing_works_again(log: SqliteLog):
    """``failed`` doesn't last longer than its cause, though nobody appends."""
    await log.create(task(), [])
    connection = connection_of(log)
    connection.execute("PRAGMA query_only = 1")
    with pytest.raises(LogUnavailable):
        await fill(log, 1)
    assert await log.probe() is not None
    connection.execute("PRAGMA query_only = 0")
    assert await log.probe() is None
    assert log.failed is None
    await fill(log, 1)


async def test_a_batch_that_cant_be_stored_leaves_no_transaction(log: SqliteLog):
    """An error that isn't SQLite's leaves the log usable."""
    await log.create(task(), [])
    with pytest.raises(UnicodeEncodeError):
        await log.append("task_1", 1, -1, [Note("\ud800", b""), *events(0, 1)])
    assert not connection_of(log).in_transaction
    await fill(log, 1)
    assert cursors(await log.read("task_1")) == [0]


async def test_records_that_somebody_else_removed_are_missed(log: SqliteLog):
    """A hole in the file is an error, never a silent gap or an endless wait."""
    await log.create(task(), events(0, 10))
    connection_of(log).execute("DELETE FROM record")
    with pytest.raises(LogUnavailable, match="missing"):
        await (await log.tail("task_1")).next()
    with pytest.raises(LogUnavailable, match="missing"):
        await anext(log.records("task_1"))


# --- durability ---------------------------------------------------------------------------------------


async def test_with_power_nothing_is_told_before_it_is_on_the_disk(disk: Disk, power: SqliteLog):
    """Neither events nor the end reach a reader, a list or a read while the disk works."""
    disk.allowed.set()
    await power.create(task(), events(0, 1))
    tail = await power.tail("task_1")
    disk.allowed.clear()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(power.append, "task_1", 1, 0, events(1, 1), COMPLETED)
            await until(lambda: disk.syncs == 2)
            assert cursors(await tail.next()) == [0]
            assert waits(tail)
            assert not tail.ended
            assert cursors(await power.read("task_1")) == [0]
            assert (await row_of(power))[6:] == (0, 20, RUNNING)
            disk.allowed.set()
            assert cursors(await tail.next()) == [1]
    assert tail.ended
    assert (await row_of(power)).summary == COMPLETED


async def test_many_share_one_sync(disk: Disk, power: SqliteLog):
    """Who commits while a sync runs waits for the next one, all of them for the same."""
    disk.allowed.set()
    for number in range(50):
        await power.create(task(f"task_{number}"), [])
    disk.allowed.clear()
    before = disk.syncs
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(power.append, "task_0", 1, -1, events(0, 1))
            await until(lambda: disk.syncs == before + 1)
            for number in range(1, 50):
                group.start_soon(power.append, f"task_{number}", 1, -1, events(0, 1))
            await until(lambda: all(entry.pending for entry in power._index))
            disk.allowed.set()
    assert disk.syncs == before + 2


async def test_sync_waits_for_the_disk_whatever_the_durability(disk: Disk, log: SqliteLog):
    """Only the batch that asks for it waits."""
    await log.create(task(), [])
    await log.append("task_1", 1, -1, events(0, 1))
    assert disk.syncs == 0
    done = False

    async def append() -> None:
        nonlocal done
        await log.append("task_1", 1, 0, [Note("intent", b"{}")], sync=True)
        done = True

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(append)
            await until(lambda: disk.syncs == 1)
            assert not done
            disk.allowed.set()
    assert done


async def test_readers_are_told_though_the_writer_was_cancelled(disk: Disk, log: SqliteLog):
    """What is committed reaches the readers even if its writer no longer waits for the disk."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: log.append("task_1", 1, -1, events(0, 1), COMPLETED, sync=True))
        await until(lambda: disk.syncs == 1)
        group.cancel_scope.cancel()
    disk.allowed.set()
    with anyio.fail_after(5):
        assert cursors(await everything(tail)) == [0]


async def test_who_takes_over_knows_what_was_committed(disk: Disk, log: SqliteLog):
    """Take waits for the batches of the one overtaken, so that the row tells of them."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: log.append("task_1", 1, -1, events(0, 1), COMPLETED, sync=True))
            await until(lambda: disk.syncs == 1)
            asyncio.get_running_loop().call_later(0.01, disk.allowed.set)
            epoch = await log.take("task_1")
            row = await row_of(log)
            assert (row.cursor, row.summary) == (0, COMPLETED)
    await log.append("task_1", epoch, 0, events(1, 1))
    assert cursors(await everything(tail)) == [0, 1]


async def test_an_overtaking_batch_leaves_no_gap(disk: Disk, log: SqliteLog):
    """A batch that is told of before the one in front of it: readers get both, in order, once."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: log.append("task_1", 1, -1, events(0, 1), sync=True))
            await until(lambda: disk.syncs == 1)
            await log.append("task_1", 1, 0, events(1, 1))
            assert cursors(await tail.next()) == [0, 1]
            disk.allowed.set()
    assert (await row_of(log)).cursor == 1
    await log.append("task_1", 1, 1, events(2, 1))
    assert cursors(await tail.next()) == [2]


async def test_after_a_failed_sync_nothing_is_believed(disk: Disk, power: SqliteLog):
    """A disk that lost a page says so once: the log refuses from then on, and readers saw nothing."""
    disk.allowed.set()
    await power.create(task(), [])
    disk.error = OSError(5, "Input/output error")
    with pytest.raises(LogUnavailable, match="Input/output error"):
        await power.append("task_1", 1, -1, events(0, 1))
    disk.error = None
    assert not await power.read("task_1")
    with pytest.raises(LogUnavailable, match="Input/output error"):
        await power.append("task_1", 1, 0, events(1, 1))
    assert "Input/output error" in str(await power.probe())


async def test_who_waits_behind_a_failed_sync_fails_too(disk: Disk, power: SqliteLog):
    """The next sync would succeed, but what the disk lost may have been its pages as well."""
    disk.allowed.set()
    for name in ("task_1", "task_2"):
        await power.create(task(name), [])
    disk.allowed.clear()
    refused: list[LogUnavailable] = []

    async def append(name: str) -> None:
        try:
            await power.append(name, 1, -1, events(0, 1))
        except LogUnavailable as exc:
            refused.append(exc)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(append, "task_1")
            await until(lambda: disk.syncs == 3)
            group.start_soon(append, "task_2")
            await until(lambda: all(entry.pending for entry in power._index))
            disk.error = OSError(5, "Input/output error")
            disk.errors = 1
            disk.allowed.set()
    assert len(refused) == 2
    assert disk.syncs == 4


# --- checkpoints --------------------------------------------------------------------------------------


async def test_the_write_ahead_file_stays_bounded(path: str, monkeypatch: pytest.MonkeyPatch):
    """Under steady writing it is emptied again and again, and nothing is lost or told twice."""
    monkeypatch.setattr(wal, "CHECKPOINT_BYTES", 500_000)
    log = await opened(path)
    await log.create(task(), [])
    tail = await log.tail("task_1")
    restarts = cursor = since = 0
    held = wal_of(log)
    with anyio.fail_after(30):
        while restarts < 5:
            was_held = held.held
            if since < 1500:  # however slow the thread is
                await log.append("task_1", 1, cursor - 1, events(cursor, 1, b"x" * 1000))
                cursor, since = cursor + 1, since + 1
            await asyncio.sleep(0)
            if was_held and not held.held:
                restarts, since = restarts + 1, 0
        await log.append("task_1", 1, cursor - 1, [], COMPLETED)
        assert cursors(await everything(tail)) == list(range(cursor))
    assert os.stat(path + "-wal").st_size < 20_000_000
    await log.close()
    assert not os.access(path + "-wal", os.F_OK)
    log = await opened(path)
    assert (await row_of(log)).cursor == cursor - 1
    await log.close()


async def test_closing_waits_for_a_checkpoint(path: str):
    """Whatever runs in a thread is finished, not torn, and the next start finds everything."""
    log = await opened(path)
    await log.create(task(), events(0, 1000, b"x" * 1000))
    wal_of(log).checkpoint()
    await log.close()
    log = await opened(path)
    assert (await row_of(log)).cursor == 999
    await log.close()


async def test_a_checkpoint_that_fails_is_told_until_one_works(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
):
    """The log goes on writing, ``failed`` says what is wrong, and a probe tries again."""

    def fail(connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    await log.create(task(), [])
    with monkeypatch.context() as patch:
        patch.setattr(wal, "_copy", fail)
        wal_of(log).checkpoint()
        await until(lambda: log.failed is not None)
    await fill(log, 1)
    assert "disk I/O error" in str(await log.probe())
    await until(lambda: log.failed is None)


async def test_a_stranger_who_reads_the_database_stops_nothing(
    log: SqliteLog, path: str, monkeypatch: pytest.MonkeyPatch
):
    """Somebody's shell with an open read: the checkpoint gives up for now, writing goes on."""
    monkeypatch.setattr(wal, "STRANGERS_SECONDS", 0.01)
    await log.create(task(), events(0, 1))
    stranger = sqlite3.connect(path)
    reading = stranger.execute("SELECT * FROM record")
    wal_of(log).checkpoint()
    await until(lambda: wal_of(log).held)
    await fill(log, 1)
    assert log.failed is None
    reading.close()
    stranger.close()
    assert cursors(await log.read("task_1")) == [0, 1]


# --- deleting -----------------------------------------------------------------------------------------


def stored(log: SqliteLog) -> int:
    """How many records the file holds."""
    return int(connection_of(log).execute("SELECT count(*) FROM record").fetchone()[0])


async def test_deleting_lets_others_work(log: SqliteLog):
    """A large task goes step by step; others are written in between and keep their records."""
    await log.create(task(), events(0, 2000, b"x" * 2000))
    await log.create(task("task_2"), [])
    steps = 0
    async with anyio.create_task_group() as group:
        group.start_soon(log.delete, "task_1")
        await until(lambda: stored(log) < 2000)
        while stored(log) > steps:
            await log.append("task_2", 1, steps - 1, events(steps, 1))
            steps += 1
            await asyncio.sleep(0)
    assert steps > 3
    assert stored(log) == steps


async def test_a_deletion_cut_short_is_finished_by_the_next_start(path: str):
    """The task is gone at once; its records go then or at the next start."""
    log = await opened(path)
    await log.create(task(), events(0, 2000))
    await log.create(task("task_2"), events(0, 1))
    async with anyio.create_task_group() as group:
        group.start_soon(log.delete, "task_1")
        await until(lambda: stored(log) < 2001)
        group.cancel_scope.cancel()
    assert stored(log) > 1
    await log.close()
    log = await opened(path)
    assert stored(log) == 1
    with pytest.raises(TaskNotFound):
        await log.read("task_1")
    assert cursors(await log.read("task_2")) == [0]
    await log.close()
