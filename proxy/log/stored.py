"""A task's row as a SQLite log keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from proxy.core.messages import Event, Record, Summary
from proxy.log.base import NewTask
from proxy.log.index import Entry

Row = tuple[int, int | None, str | None, bytes]


class Stored(Entry):
    """``order`` is the task's number, ``next`` the place of its next record.

    ``saved`` is what ``next`` was when the row was last written; ``pending`` counts the batches that are
    committed and wait for the disk.
    """

    __slots__ = ("next", "pending", "saved")

    def __init__(self, task: NewTask, order: int) -> None:
        super().__init__(task, order)
        self.next = self.saved = self.pending = 0

    @classmethod
    def load(cls, row: Sequence[Any]) -> Stored:
        """From the columns of ``task`` in their order."""
        number, task_id, owner, conversation, route, created_at, updated_at = row[:7]
        new = NewTask(
            task_id, owner, from_text(conversation), from_text(route) or "", created_at, from_json(row[11])
        )
        entry = cls(new, number)
        entry.updated_at = updated_at
        entry.epoch, entry.next, entry.cursor, entry.size = row[7:11]
        entry.saved, entry.written = entry.next, entry.cursor
        return entry

    def columns(self) -> tuple[Any, ...]:
        """For a new task's row, without its number and epoch."""
        return (
            self.id,
            self.owner,
            to_text(self.conversation),
            to_text(self.route),
            self.created_at,
            self.updated_at,
            *self.counters(),
            to_json(self.summary),
        )

    def counters(self) -> tuple[int, int, int]:
        """``next``, ``cursor`` and ``size`` as they stand in the log."""
        return self.next, self.written, self.size


def rows(number: int, place: int, records: Sequence[Record]) -> list[Row]:
    """The records of task ``number`` as they are stored from ``place`` on."""
    return [
        (at, record.cursor, None, record.data)
        if isinstance(record, Event)
        else (at, None, record.kind, record.data)
        for at, record in enumerate(records, number << 32 | place)
    ]


def to_text(text: str | None) -> str | bytes | None:
    """As SQLite takes it: a conversation's key may hold what no UTF-8 can say."""
    if text is None:
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def from_text(stored: str | bytes | None) -> str | None:
    """What ``to_text`` was given."""
    return stored.decode("utf-8", "surrogatepass") if isinstance(stored, bytes) else stored


def to_json(summary: Summary) -> str:
    """Not orjson: what comes from outside may hold lone surrogates."""
    done = None if summary.done is None else summary.done.decode("latin-1")
    return json.dumps(summary._replace(done=None)._asdict() | {"done": done})


def from_json(stored: str) -> Summary:
    """Members that this version doesn't know are left out, those that weren't there get their default."""
    members = {name: value for name, value in json.loads(stored).items() if name in Summary._fields}
    if members.get("done") is not None:
        members["done"] = members["done"].encode("latin-1")
    members["required"] = tuple(members.get("required", ()))
    return Summary(**members)
