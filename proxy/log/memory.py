"""A log in memory: for trying out and for tests. Everything is gone with the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from proxy.core.messages import Event, Record, Summary
from proxy.errors import LogUnavailable, StaleWriter
from proxy.log.base import NewTask
from proxy.log.feed import bounded
from proxy.log.index import CLOSED, Entry, IndexedLog

# Records given in one go before others get their turn.
RECORDS_AT_ONCE = 1000


class Kept(Entry):
    """A row with its records; ``events`` are those of them with a cursor, at their cursor's place."""

    __slots__ = ("events", "records")

    def __init__(self, task: NewTask, order: int) -> None:
        super().__init__(task, order)
        self.records: list[Record] = []
        self.events: list[Event] = []


class MemoryLog(IndexedLog[Kept]):
    """``sync`` has no meaning here: a batch is as safe as it will ever be at once."""

    def __init__(self) -> None:
        super().__init__()
        self._created = 0

    async def open(self) -> None:
        self._check_open()

    async def close(self) -> None:
        self._close_readers()

    async def probe(self) -> str | None:
        return self.failed

    async def create(self, task: NewTask, records: Sequence[Record], *, sync: bool = False) -> int:
        self._check_open()
        if self._index.get(task.id) is not None:
            raise StaleWriter(f"{task.id} exists already")
        self._created += 1
        entry = Kept(task, self._created)
        events, size = entry.check(1, -1, records)
        self._index.add(entry)
        self._keep(entry, records, events, size, None)
        return 1

    async def take(self, task_id: str) -> int:
        self._check_open()
        entry = self._index.entry(task_id)
        entry.epoch += 1
        return entry.epoch

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
        self._check_open()
        entry = self._index.entry(task_id)
        events, size = entry.check(epoch, expected_cursor, records)
        self._keep(entry, records, events, size, summary)

    def _keep(
        self,
        entry: Kept,
        records: Sequence[Record],
        events: Sequence[Event],
        size: int,
        summary: Summary | None,
    ) -> None:
        entry.records += records
        entry.events += events
        entry.written += len(events)
        entry.size += size
        entry.updated_at = time.time()
        if summary is not None:
            self._index.learn(entry, summary)
        entry.publish(events, summary)

    async def supersede(
        self, task_id: str, epoch: int, cursor: int, data: bytes, records: Sequence[Record], summary: Summary
    ) -> None:
        self._check_open()
        entry = self._index.entry(task_id)
        size = entry.check_supersede(epoch, cursor, records)
        event, old = Event(cursor, data), entry.events[cursor]
        place = len(entry.records) - 1
        while entry.records[place] is not old:
            place -= 1
        entry.records[place] = entry.events[cursor] = event
        entry.size += len(data) - len(old.data)
        entry.supersede(event, summary)
        self._keep(entry, records, (), size, summary)

    def _batch(self, entry: Kept, after: int, limit: int, max_bytes: int) -> Sequence[Event]:
        first = max(after + 1, 0)
        return bounded(entry.events[first : first + limit], max_bytes)

    async def records(self, task_id: str) -> AsyncIterator[Record]:
        kept = self._index.entry(task_id).records
        for place, record in enumerate(kept, 1):
            yield record
            if place % RECORDS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def delete(self, task_id: str) -> None:
        self._check_open()
        entry = self._index.get(task_id)
        if entry is not None:
            self._forget_task(entry)

    def _check_open(self) -> None:
        if self._closed:
            raise LogUnavailable(CLOSED)
