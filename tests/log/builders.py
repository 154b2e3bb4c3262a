"""Short ways to make what the tests of the logs need."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.messages import Event, Summary
from proxy.log.base import Log, NewTask, Tail, TaskRow

RUNNING = Summary("running", open=True)
COMPLETED = Summary("completed", open=False, response_id="resp_1", done=b"data: [DONE]\n\n")


def task(
    name: str = "task_1",
    *,
    owner: str = "owner",
    conversation: str | None = None,
    summary: Summary = RUNNING,
) -> NewTask:
    """What ``create`` takes."""
    return NewTask(name, owner, conversation, "/responses", 1_700_000_000.25, summary)


def events(first: int, count: int, data: bytes = b"data: {}\n\n") -> list[Event]:
    """Events from the cursor ``first`` on."""
    return [Event(cursor, data) for cursor in range(first, first + count)]


def cursors(read: Sequence[Event]) -> list[int]:
    """Under which cursors they stand."""
    return [event.cursor for event in read]


async def fill(log: Log, count: int, name: str = "task_1", data: bytes = b"data: {}\n\n") -> None:
    """Append events to a task of which this process has had the only epoch."""
    row = await row_of(log, name)
    await log.append(name, 1, row.cursor, events(row.cursor + 1, count, data))


async def row_of(log: Log, name: str = "task_1") -> TaskRow:
    """Its row; there must be one."""
    row = await log.get(name)
    assert row is not None
    return row


async def everything(tail: Tail) -> list[Event]:
    """All that a reader gets until the stream is over."""
    found: list[Event] = []
    while not tail.ended:
        found += await tail.next()
    return found


def waits(tail: Tail) -> bool:
    """Whether ``next`` would wait; an answer that it gives instead is lost."""
    asking = tail.next()
    try:
        asking.send(None)
    except StopIteration:
        return False
    asking.close()
    return True


async def ids(log: Log, **filters: object) -> list[str]:
    """The ids of a list."""
    return [row.id for row in await log.list(**filters)]  # type: ignore[arg-type]
