"""What every log keeps in memory: each task's row, the ways to find it, and the check before an append.

A row is about a kilobyte, so lists and look-ups cost no query, whatever stores the records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

from proxy.core.messages import Event, Record, Summary
from proxy.errors import InvalidRequest, LogUnavailable, StaleWriter, TaskNotFound
from proxy.log.base import NewTask, TaskRow
from proxy.log.feed import BATCH_BYTES, BATCH_EVENTS, Feed, FeedTail

# What one ``read`` gives at most, and what is read at once to rebuild a task.
READ_BYTES = 1024 * 1024
CLOSED = "The log is closed."


class Entry:
    """One task's row.

    ``written`` is the newest event's cursor in the log; ``cursor`` and ``summary`` are what readers may
    know of it. They differ only while a batch waits for the disk. ``order`` grows with each new task.
    """

    __slots__ = (
        "conversation",
        "created_at",
        "cursor",
        "epoch",
        "feed",
        "id",
        "order",
        "owner",
        "response_id",
        "route",
        "size",
        "summary",
        "updated_at",
        "written",
    )

    def __init__(self, task: NewTask, order: int) -> None:
        self.id = task.id
        self.owner = task.owner
        self.conversation = task.conversation
        self.route = task.route
        self.created_at = task.created_at
        self.updated_at = task.created_at
        self.summary = task.summary
        self.response_id: str | None = None
        self.order = order
        self.epoch = 1
        self.written = self.cursor = -1
        self.size = 0
        self.feed: Feed | None = None

    def row(self) -> TaskRow:
        """As readers may know it."""
        return TaskRow(
            self.id,
            self.owner,
            self.conversation,
            self.route,
            self.created_at,
            self.updated_at,
            self.cursor,
            self.size,
            self.summary,
        )

    def check(self, epoch: int, expected: int, records: Sequence[Record]) -> tuple[Sequence[Event], int]:
        """The batch's events and its size in bytes; ``StaleWriter`` unless it goes on from here."""
        if epoch != self.epoch:
            raise StaleWriter(f"{self.id}: epoch {epoch} was overtaken by {self.epoch}")
        if expected != self.written:
            raise StaleWriter(f"{self.id}: the newest event is {self.written}, not {expected}")
        events: list[Event] = []
        size, cursor = 0, expected
        for record in records:
            size += len(record.data)
            if type(record) is Event:
                cursor += 1
                if record.cursor != cursor:
                    raise StaleWriter(f"{self.id}: event {record.cursor} can't stand under {cursor}")
                events.append(record)
        return events, size

    def check_supersede(self, epoch: int, cursor: int, records: Sequence[Record]) -> int:
        """The size of the notes; ``StaleWriter`` unless ``cursor`` is an event's and the newest."""
        events, size = self.check(epoch, cursor, records)
        if cursor < 0 or events:
            raise StaleWriter(f"{self.id}: only notes can follow the event put in place of {cursor}")
        return size

    def publish(self, events: Sequence[Event], summary: Summary | None) -> None:
        """Let readers know."""
        if events and events[-1].cursor > self.cursor:
            self.cursor = events[-1].cursor
        else:
            events = ()
        if summary is not None:
            self.summary = summary
        if self.feed is not None:
            self.feed.publish(events, summary)

    def supersede(self, event: Event, summary: Summary) -> None:
        """Let readers know that the newest event has other bytes."""
        self.summary = summary
        if self.feed is not None:
            self.feed.supersede(event, summary)

    def forget(self, feed: Feed) -> None:
        """The last reader has gone."""
        if self.feed is feed:
            self.feed = None


E = TypeVar("E", bound=Entry)


class Index(Generic[E]):
    """All tasks, oldest first, by id, owner, conversation and response id."""

    def __init__(self) -> None:
        self._tasks: dict[str, E] = {}
        self._groups: dict[tuple[str, str, str], dict[str, E]] = {}

    def __iter__(self) -> Iterator[E]:
        return iter(self._tasks.values())

    def get(self, task_id: str) -> E | None:
        return self._tasks.get(task_id)

    def entry(self, task_id: str) -> E:
        """``TaskNotFound`` if there is none."""
        try:
            return self._tasks[task_id]
        except KeyError:
            raise TaskNotFound(f"There is no task {task_id}.") from None

    def add(self, entry: E) -> None:
        self._tasks[entry.id] = entry
        for key in _keys(entry):
            self._groups.setdefault(key, {})[entry.id] = entry
        self.learn(entry, entry.summary)

    def learn(self, entry: E, summary: Summary) -> None:
        """The summary is new: keep its response id findable."""
        if summary.response_id == entry.response_id:
            return
        self._drop(_response_key(entry), entry)
        entry.response_id = summary.response_id
        if entry.response_id is not None:
            self._groups.setdefault(_response_key(entry), {})[entry.id] = entry

    def remove(self, entry: E) -> None:
        del self._tasks[entry.id]
        for key in (*_keys(entry), _response_key(entry)):
            self._drop(key, entry)

    def _drop(self, key: tuple[str, str, str], entry: E) -> None:
        group = self._groups.get(key)
        if group is not None and group.pop(entry.id, None) is not None and not group:
            del self._groups[key]

    def by_response(self, response_id: str, owner: str) -> E | None:
        group = self._groups.get(("response", owner, response_id), {})
        return max(group.values(), key=lambda entry: entry.order, default=None)

    def newest_first(self, owner: str | None, conversation: str | None) -> Iterable[E]:
        if owner is None:
            entries = reversed(self._tasks.values())
            return (e for e in entries if conversation is None or e.conversation == conversation)
        key = ("owner", owner, "") if conversation is None else ("conversation", owner, conversation)
        return reversed(self._groups.get(key, {}).values())


def _keys(entry: Entry) -> Iterator[tuple[str, str, str]]:
    yield "owner", entry.owner, ""
    if entry.conversation is not None:
        yield "conversation", entry.owner, entry.conversation


def _response_key(entry: Entry) -> tuple[str, str, str]:
    return "response", entry.owner, entry.response_id or ""


class IndexedLog(ABC, Generic[E]):
    """The half of the contract that is the same wherever the records are."""

    def __init__(self) -> None:
        self._index: Index[E] = Index()
        self._closed = False

    @property
    def failed(self) -> str | None:
        """As in the contract."""
        return None

    @abstractmethod
    def _batch(self, entry: E, after: int, limit: int, max_bytes: int) -> Sequence[Event]:
        """At most ``limit`` events that readers may know, about ``max_bytes``, at least one if any."""

    @abstractmethod
    async def delete(self, task_id: str) -> None:
        """As in the contract."""

    async def get(self, task_id: str) -> TaskRow | None:
        entry = self._index.get(task_id)
        return None if entry is None else entry.row()

    async def find(self, response_id: str, owner: str) -> TaskRow | None:
        entry = self._index.by_response(response_id, owner)
        return None if entry is None else entry.row()

    async def list(
        self,
        *,
        owner: str | None = None,
        conversation: str | None = None,
        states: Sequence[str] | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Sequence[TaskRow]:
        entries = iter(self._index.newest_first(owner, conversation))
        if after is not None and not any(entry.id == after for entry in entries):
            raise InvalidRequest(f"There is no task {after} in this list.", param="after")
        rows: list[TaskRow] = []
        for entry in entries:
            if len(rows) >= limit:
                break
            if states is None or entry.summary.state in states:
                rows.append(entry.row())
        return rows

    async def read(self, task_id: str, after: int = -1, limit: int = 1000) -> Sequence[Event]:
        return self._batch(self._index.entry(task_id), after, limit, READ_BYTES)

    async def tail(self, task_id: str, after: int = -1) -> FeedTail:
        if self._closed:
            raise LogUnavailable(CLOSED)
        entry = self._index.entry(task_id)
        if entry.feed is None:
            read = partial(self._batch, entry, limit=BATCH_EVENTS, max_bytes=BATCH_BYTES)
            entry.feed = Feed(entry.cursor, entry.summary, read, entry.forget)
        return entry.feed.join(after)

    async def expire(self, before: float) -> int:
        expired = 0
        for entry in tuple(self._index):
            # Deleting suspends, and the task may have been reopened meanwhile.
            if not entry.summary.open and entry.updated_at < before:
                await self.delete(entry.id)
                expired += 1
        return expired

    def _forget_task(self, entry: E) -> None:
        self._index.remove(entry)
        if entry.feed is not None:
            entry.feed.fail(partial(TaskNotFound, f"There is no task {entry.id} any more."))

    def _close_readers(self) -> None:
        self._closed = True
        for entry in self._index:
            if entry.feed is not None:
                entry.feed.fail(partial(LogUnavailable, CLOSED))
