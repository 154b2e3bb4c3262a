"""What a log promises; ``memory.py`` and ``sqlite.py`` keep it, one contract suite holds both to it.

A task's records (events and notes) stand in one order. Events carry cursors 0, 1, 2, … without a gap;
notes carry none. A *batch* is written whole or not at all. Only the holder of the newest epoch writes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from proxy.core.messages import Event, Record, Summary

Durability = Literal["process", "power"]


class TaskRow(NamedTuple):
    """What a log knows of a task without reading its records. Times are seconds since the epoch.

    ``cursor`` is the newest event's, -1 before the first.
    """

    id: str
    owner: str
    conversation: str | None
    route: str
    created_at: float
    updated_at: float
    cursor: int
    size: int
    summary: Summary


class NewTask(NamedTuple):
    """What ``create`` needs."""

    id: str
    owner: str
    conversation: str | None
    route: str
    created_at: float
    summary: Summary


class Tail(Protocol):
    """One reader's place in a task's events. Whoever got it must ``close`` it."""

    async def next(self) -> Sequence[Event]:
        """The events after the last ones given, waiting until there are some; bounded in bytes.

        Empty when there is a new summary or ``wake`` was called meanwhile, or, with ``ended`` true, when
        the task's stream is over and all of it was given: then it doesn't wait, so look at ``ended`` before
        asking again. ``TaskNotFound`` if the task was deleted, ``LogUnavailable`` if the log was closed or
        can't be read. For one caller at a time; a cancelled call loses nothing.
        """

    @property
    def ready(self) -> bool:
        """Whether ``next`` would not wait."""

    def take(self) -> Sequence[Event]:
        """``next`` without waiting: what there is, perhaps nothing."""

    def watch(self, news: Callable[[], None]) -> None:
        """Call ``news`` once, when ``ready`` becomes true; only while it is false, and not beside ``next``.

        It is called in the writer's own turn, so that an event needs no turn of the reader's: it must be
        quick, must not raise, and may ``take`` and ``watch`` again.
        """

    @property
    def ended(self) -> bool:
        """True once the summary says ``open=False`` and the last event was given; false again if reopened."""

    @property
    def summary(self) -> Summary:
        """The newest summary."""

    def wake(self) -> None:
        """Make a waiting ``next`` return now, or else the next one that would wait (heartbeats, a cut)."""

    def close(self) -> None:
        """Forget this reader: ``next`` gives nothing more, and ``ended`` is true. Idempotent."""


class Log(Protocol):
    """The contract. Methods that write raise ``LogUnavailable`` or ``LogFull`` when they can't.

    Whatever names a task that isn't there raises ``TaskNotFound``, but for ``get``, ``find`` and ``delete``.
    """

    @property
    def failed(self) -> str | None:
        """Why nothing can be written; none if the last write went well."""

    async def probe(self) -> str | None:
        """``failed``, after trying a write as small as can be if the last one failed.

        Also notices that the files have gone. Cheap enough for every ``/legato/ready``.
        """

    async def open(self) -> None:
        """Make ready; a second process on the same place raises ``LogUnavailable``."""

    async def close(self) -> None:
        """Let go of everything; idempotent."""

    async def create(self, task: NewTask, records: Sequence[Record], *, sync: bool = False) -> int:
        """Write a new task with its first records; returns its epoch (1). ``StaleWriter`` if there is one."""

    async def take(self, task_id: str) -> int:
        """Become the task's only writer: returns a new, higher epoch. ``TaskNotFound``."""

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
        """Compare-and-append one batch, and the summary with it where given.

        ``expected_cursor`` is the newest event's cursor that the writer knows of (-1 before the first);
        the events in ``records`` must go on from there. ``StaleWriter`` for an older epoch, a cursor
        that isn't the newest, or events out of step; nothing is written then. ``sync`` returns only
        once the batch is on the disk, whatever ``durability`` says.
        """

    async def supersede(
        self, task_id: str, epoch: int, cursor: int, data: bytes, records: Sequence[Record], summary: Summary
    ) -> None:
        """Put ``data`` in place of the newest event, ``cursor``, and append ``records`` (notes)."""

    async def read(self, task_id: str, after: int = -1, limit: int = 1000) -> Sequence[Event]:
        """Events with a cursor above ``after``, at most ``limit`` and about 1 MiB, at least one if any.

        There are no more once it is empty; a short answer doesn't say so. ``TaskNotFound``.
        """

    def records(self, task_id: str) -> AsyncIterator[Record]:
        """Every record in order, for rebuilding the core's state."""

    async def tail(self, task_id: str, after: int = -1) -> Tail:
        """A reader that begins behind ``after``. ``TaskNotFound``."""

    async def get(self, task_id: str) -> TaskRow | None:
        """What is known of one task."""

    async def find(self, response_id: str, owner: str) -> TaskRow | None:
        """The owner's newest task whose stream carries this response id."""

    async def list(
        self,
        *,
        owner: str | None = None,
        conversation: str | None = None,
        states: Sequence[str] | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Sequence[TaskRow]:
        """Newest first; ``after`` is the last id of the page before (``InvalidRequest`` if not listed)."""

    async def delete(self, task_id: str) -> None:
        """Remove a task and its records; its readers are told. Idempotent."""

    async def expire(self, before: float) -> int:
        """Remove tasks that aren't open and were last written before ``before``; how many."""
