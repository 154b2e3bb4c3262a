"""A log in one SQLite file: survives kill -9, or with ``durability="power"`` a power cut.

Every write is committed in place, in the loop, by code that doesn't suspend: no two can mix, and what is in
memory follows what is in the file. Live readers are served from memory (feed.py); what lies further back
is read in the loop as well, in bounded batches.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from proxy.core.messages import Event, Note, Record, Summary
from proxy.errors import LogUnavailable, StaleWriter
from proxy.log.base import Durability, NewTask
from proxy.log.database import Database
from proxy.log.index import READ_BYTES, Index, IndexedLog
from proxy.log.stored import Stored, rows, to_json

# After so many records without a summary a task's row is written anew: opening never has to count more.
SAVE_AFTER = 1000
# What one step of a deletion takes; the loop is free in between.
PURGE_ROWS = 200
PURGE_BYTES = 1024 * 1024
RECORDS_AT_ONCE = 1000

INSERT = "INSERT INTO record VALUES (?, ?, ?, ?)"
CREATE = "INSERT INTO task VALUES (NULL, ?, ?, ?, ?, ?, ?, 1, ?, ?, ?, ?)"
SAVE = "UPDATE task SET updated_at = ?, next = ?, cursor = ?, size = ? WHERE number = ?"
SUMMARY = "UPDATE task SET summary = ? WHERE number = ?"
EPOCH = "UPDATE task SET epoch = ? WHERE number = ?"
EVENTS = (
    "SELECT cursor, data FROM record WHERE id >= ? AND id < ? AND cursor > ? AND cursor <= ?"
    " ORDER BY id LIMIT ?"
)
RECORDS = "SELECT cursor, kind, data FROM record WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"
SIZES = "SELECT id, length(data) FROM record WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"
PURGE = "DELETE FROM record WHERE id >= ? AND id <= ?"
NEWEST = "SELECT id, length(data) FROM record WHERE id >= ? AND id < ? AND cursor = ?"
BEHIND = (
    "SELECT task.number, count(*), max(record.cursor), sum(length(record.data)) FROM task JOIN record"
    " ON record.id >= (task.number << 32 | task.next) AND record.id < (task.number + 1 << 32)"
    " GROUP BY task.number"
)


class SqliteLog(IndexedLog[Stored]):
    """``path`` is the database's; ``-wal``, ``-shm`` and ``-lock`` stand beside it."""

    def __init__(self, path: str, *, durability: Durability = "process") -> None:
        super().__init__()
        self._database = Database(path)
        self._power = durability == "power"

    @property
    def failed(self) -> str | None:
        return self._database.failed

    async def probe(self) -> str | None:
        return await self._database.probe()

    async def open(self) -> None:
        if self._database.in_use:
            raise LogUnavailable("This log is open already.")
        try:
            self._database.open()
            self._load()
            for (number,) in self._database.fetch("SELECT number FROM removed", ()):
                await self._purge(number)
        except BaseException:
            await self._database.close()
            raise

    def _load(self) -> None:
        self._index, self._closed = Index(), False
        entries: dict[int, Stored] = {}
        for row in self._database.fetch("SELECT * FROM task ORDER BY number", ()):
            entry = entries[row[0]] = Stored.load(row)
            self._index.add(entry)
        for number, count, cursor, size in self._database.fetch(BEHIND, ()):
            entry = entries[number]
            entry.next += count
            entry.size += size
            entry.updated_at = time.time()
            if cursor is not None:
                entry.cursor = entry.written = cursor
        self._save()

    def _save(self) -> None:
        """Write the rows that lag behind their records."""
        behind = [entry for entry in self._index if entry.saved != entry.next]
        if behind:
            with self._database.transaction() as cursor:
                cursor.executemany(SAVE, [(e.updated_at, *e.counters(), e.order) for e in behind])
            for entry in behind:
                entry.saved = entry.next

    async def close(self) -> None:
        await self._database.settle()
        self._close_readers()
        try:
            self._save()
        except LogUnavailable:
            pass  # closed before, or the next start has to count
        await self._database.close()

    # --- writing ----------------------------------------------------------------------------------

    async def create(self, task: NewTask, records: Sequence[Record], *, sync: bool = False) -> int:
        await self._database.writable()
        if self._index.get(task.id) is not None:
            raise StaleWriter(f"{task.id} exists already")
        entry = Stored(task, 0)
        events, size = entry.check(1, -1, records)
        entry.updated_at = time.time()
        entry.next, entry.written, entry.size = len(records), len(events) - 1, size
        with self._database.transaction(size) as cursor:
            cursor.execute(CREATE, entry.columns())
            entry.order = cursor.lastrowid or 0
            cursor.executemany(INSERT, rows(entry.order, 0, records))
        entry.saved = entry.next
        self._index.add(entry)
        await self._tell(entry, partial(entry.publish, events, None), sync=sync)
        return 1

    async def take(self, task_id: str) -> int:
        await self._database.writable()
        entry = self._index.entry(task_id)
        epoch = entry.epoch + 1
        with self._database.transaction() as cursor:
            cursor.execute(EPOCH, (epoch, entry.order))
        entry.epoch = epoch
        if entry.pending:
            # The one overtaken may have committed what no row and no reader tells of yet.
            await asyncio.shield(self._database.sync())
        return epoch

    async def append(
        self,
        task_id: str,
        epoch: int,
        expected_cursor: int,
        records: Sequence[Record],
        summary: Summary | None = None,
        *,
        sync: bool = False,
    ) -> None:
        await self._database.writable()
        entry = self._index.entry(task_id)
        events, size = entry.check(epoch, expected_cursor, records)
        self._write(entry, records, len(events), size, summary)
        if sync or self._power:
            await self._tell(entry, partial(entry.publish, events, summary), sync=True)
        else:
            entry.publish(events, summary)

    async def supersede(
        self, task_id: str, epoch: int, cursor: int, data: bytes, records: Sequence[Record], summary: Summary
    ) -> None:
        await self._database.writable()
        entry = self._index.entry(task_id)
        size = entry.check_supersede(epoch, cursor, records)
        event = Event(cursor, data)
        self._write(entry, records, 0, size, summary, superseding=event)
        await self._tell(entry, partial(entry.supersede, event, summary), sync=False)

    def _write(
        self,
        entry: Stored,
        records: Sequence[Record],
        events: int,
        size: int,
        summary: Summary | None,
        *,
        superseding: Event | None = None,
    ) -> None:
        """Commit, and let the row in memory follow."""
        now = time.time()
        place, newest = entry.next + len(records), entry.written + events
        save = summary is not None or place - entry.saved >= SAVE_AFTER
        new = rows(entry.order, entry.next, records)
        if len(new) == 1 and not save:
            self._database.execute(INSERT, new[0], size)
        else:
            with self._database.transaction(size) as cursor:
                if superseding is not None:
                    size += _put_in_place(cursor, entry, superseding)
                cursor.executemany(INSERT, new)
                if save:
                    cursor.execute(SAVE, (now, place, newest, entry.size + size, entry.order))
                if summary is not None:
                    cursor.execute(SUMMARY, (to_json(summary), entry.order))
        entry.updated_at = now
        entry.next, entry.written = place, newest
        entry.size += size
        if save:
            entry.saved = place
        if summary is not None:
            self._index.learn(entry, summary)

    async def _tell(self, entry: Stored, tell: Callable[[], None], *, sync: bool) -> None:
        """Let readers know once it is as durable as it has to be, even if the writer no longer waits."""
        if not (sync or self._power):
            tell()
            return
        entry.pending += 1
        done = self._database.sync()
        done.add_done_callback(partial(_synced, entry, tell))
        await asyncio.shield(done)

    # --- reading ----------------------------------------------------------------------------------

    def _batch(self, entry: Stored, after: int, limit: int, max_bytes: int) -> Sequence[Event]:
        if after >= entry.cursor:
            return ()
        first, end = entry.order << 32, entry.order + 1 << 32
        found = self._database.fetch(
            EVENTS, (first + max(after + 1, 0), end, after, entry.cursor, limit), max_bytes=max_bytes
        )
        return [Event(cursor, data) for cursor, data in found]

    async def records(self, task_id: str) -> AsyncIterator[Record]:
        place = 0
        while place < (entry := self._index.entry(task_id)).next:
            first, end = entry.order << 32, entry.order + 1 << 32
            found = self._database.fetch(RECORDS, (first + place, end, RECORDS_AT_ONCE), max_bytes=READ_BYTES)
            for cursor, kind, data in found:
                yield Note(kind, data) if cursor is None else Event(cursor, data)
            if not found:
                raise LogUnavailable(f"Record {place} of {task_id} is missing from the log.")
            place += len(found)
            await asyncio.sleep(0)

    # --- deleting ---------------------------------------------------------------------------------

    async def delete(self, task_id: str) -> None:
        await self._database.writable()
        entry = self._index.get(task_id)
        if entry is None:
            return
        with self._database.transaction() as cursor:
            cursor.execute("DELETE FROM task WHERE number = ?", (entry.order,))
            cursor.execute("INSERT INTO removed VALUES (?)", (entry.order,))
        self._forget_task(entry)
        await self._purge(entry.order)
        if self._power:
            await asyncio.shield(self._database.sync())

    async def _purge(self, number: int) -> None:
        """Delete a removed task's records step by step; whatever is left is deleted at the next start."""
        first, end = number << 32, number + 1 << 32
        while True:
            await self._database.writable()
            found = self._database.fetch(SIZES, (first, end, PURGE_ROWS))
            count = _within(PURGE_BYTES, [size for _, size in found])
            finished = count == len(found) < PURGE_ROWS
            with self._database.transaction() as cursor:
                if found:
                    cursor.execute(PURGE, (first, found[count - 1][0]))
                if finished:
                    cursor.execute("DELETE FROM removed WHERE number = ?", (number,))
            if finished:
                return
            await asyncio.sleep(0)


def _put_in_place(cursor: sqlite3.Cursor, entry: Stored, event: Event) -> int:
    """Give the newest event other bytes; by how much it grew."""
    first = entry.order << 32
    cursor.execute(NEWEST, (first + event.cursor, first + entry.next, event.cursor))
    place, size = cursor.fetchone()
    cursor.execute("UPDATE record SET data = ? WHERE id = ?", (event.data, place))
    return len(event.data) - int(size)


def _synced(entry: Stored, tell: Callable[[], None], done: asyncio.Future[None]) -> None:
    if not done.cancelled() and done.exception() is None:
        entry.pending -= 1
        tell()


def _within(max_bytes: int, sizes: Sequence[int]) -> int:
    """How many of them stay within ``max_bytes``; at least one if there is any."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > max_bytes and count:
            return count
    return len(sizes)
