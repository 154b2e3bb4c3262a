"""What every log promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from log.builders import COMPLETED, RUNNING, cursors, events, everything, fill, ids, row_of, task

from proxy.core.messages import Event, Note, Summary
from proxy.errors import InvalidRequest, LogUnavailable, NotAvailable, StaleWriter, TaskNotFound
from proxy.log import open_log
from proxy.log.base import Log

pytestmark = pytest.mark.anyio

EVERY_BYTE = bytes(range(256))


@pytest.fixture(params=["memory", "sqlite", "sqlite-power"])
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Log]:
    """An open log of each kind."""
    spec = "memory:" if request.param == "memory" else f"sqlite:{tmp_path / 'legato.db'}"
    durability = "power" if request.param == "sqlite-power" else "process"
    made = open_log(spec, durability=durability)
    await made.open()
    yield made
    await made.close()


# --- writing and reading ------------------------------------------------------------------------------


async def test_a_new_task_has_its_first_records_and_a_row(log: Log):
    """Create writes task and records, and hands out the first epoch."""
    epoch = await log.create(task(conversation="talk"), [Note("request", b"{}"), *events(0, 2)], sync=True)
    row = await row_of(log)
    assert epoch == 1
    assert row[:5] == ("task_1", "owner", "talk", "/responses", 1_700_000_000.25)
    assert (row.cursor, row.size, row.summary) == (1, 22, RUNNING)
    assert row.updated_at > row.created_at


async def test_an_id_is_given_once(log: Log):
    """A second task of the same id is refused, and the first stays as it is."""
    await log.create(task(), events(0, 1))
    with pytest.raises(StaleWriter):
        await log.create(task(owner="other"), [])
    assert (await row_of(log)).owner == "owner"


async def test_events_are_read_behind_a_cursor(log: Log):
    """Read gives what is above the cursor, at most as many as asked for, then nothing."""
    await log.create(task(), [])
    await fill(log, 10)
    assert cursors(await log.read("task_1")) == list(range(10))
    assert cursors(await log.read("task_1", after=6)) == [7, 8, 9]
    assert cursors(await log.read("task_1", after=0, limit=3)) == [1, 2, 3]
    assert not await log.read("task_1", after=9)
    assert not await log.read("task_1", after=99)


async def test_one_read_is_bounded_in_bytes(log: Log):
    """A reader of large events gets them in several reads, at least one in each."""
    await log.create(task(), [])
    await fill(log, 5, data=b"x" * 600_000)
    first = await log.read("task_1")
    assert cursors(first) == [0, 1]
    assert cursors(await log.read("task_1", after=1)) == [2, 3]


async def test_records_come_back_in_one_order_with_every_byte(log: Log):
    """Notes and events stand as they were written, whatever bytes they hold."""
    written = [
        Note("request", EVERY_BYTE),
        Event(0, EVERY_BYTE),
        Note("intent", b""),
        Note("item", b"{}"),
        Event(1, b""),
    ]
    await log.create(task(), written[:2])
    await log.append("task_1", 1, 0, written[2:])
    assert [record async for record in log.records("task_1")] == written
    assert await log.read("task_1") == [Event(0, EVERY_BYTE), Event(1, b"")]


async def test_notes_between_events_hide_none(log: Log):
    """However many notes stand before an event, a read finds it."""
    await log.create(task(), [Note("state", b"{}")] * 2500)
    await log.append("task_1", 1, -1, [*events(0, 1), *[Note("state", b"{}")] * 2500, *events(1, 1)])
    assert cursors(await log.read("task_1", after=0)) == [1]
    assert len([record async for record in log.records("task_1")]) == 5002


async def test_a_summary_comes_with_its_batch(log: Log):
    """The summary given with a batch is the task's from then on; without one it stays."""
    await log.create(task(), [])
    waiting = Summary("input_required", open=False, reason="why", cycles=3, step=7, required=("a", "b"))
    await log.append("task_1", 1, -1, events(0, 1), waiting)
    await log.append("task_1", 1, 0, [Note("state", b"{}")])
    assert (await row_of(log)).summary == waiting


async def test_what_no_utf8_can_say_is_kept(log: Log):
    """Lone surrogates in a conversation's key or a reason are no reason to fail."""
    await log.create(task(conversation="\ud800", summary=RUNNING._replace(reason="\udfff")), [])
    assert [row.conversation for row in await log.list(owner="owner", conversation="\ud800")] == ["\ud800"]


# --- who may write ------------------------------------------------------------------------------------


async def test_the_newest_epoch_writes(log: Log):
    """Take raises the epoch, and the one overtaken is refused from then on."""
    await log.create(task(), events(0, 1))
    epoch = await log.take("task_1")
    assert epoch > 1
    with pytest.raises(StaleWriter):
        await log.append("task_1", 1, 0, events(1, 1))
    await log.append("task_1", epoch, 0, events(1, 1))
    assert cursors(await log.read("task_1")) == [0, 1]


async def test_of_two_writers_one_wins(log: Log):
    """Two batches for the same place: one is written, the other refused."""
    await log.create(task(), [])
    batches = [log.append("task_1", 1, -1, [Event(0, data)]) for data in (b"one", b"two")]
    results = await asyncio.gather(*batches, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["NoneType", "StaleWriter"]
    winner = (b"one", b"two")[results.index(None)]
    assert await log.read("task_1") == [Event(0, winner)]


@pytest.mark.parametrize(
    ("expected", "batch"),
    [
        pytest.param(0, events(1, 1), id="fell-behind"),
        pytest.param(2, events(3, 1), id="ran-ahead"),
        pytest.param(1, events(3, 1), id="gap"),
        pytest.param(1, [*events(2, 2), *events(5, 1)], id="gap-later"),
        pytest.param(1, [*events(2, 1), *events(2, 1)], id="twice"),
    ],
)
async def test_a_batch_out_of_step_is_refused_whole(log: Log, expected: int, batch: list[Event]):
    """A wrong cursor writes nothing: no event, no note, no summary."""
    await log.create(task(), events(0, 2))
    with pytest.raises(StaleWriter):
        await log.append("task_1", 1, expected, [Note("state", b"{}"), *batch], COMPLETED)
    row = await row_of(log)
    assert (row.cursor, row.size, row.summary) == (1, 20, RUNNING)
    assert len([record async for record in log.records("task_1")]) == 2


async def test_an_unknown_task_is_not_found(log: Log):
    """Whatever names a task that isn't there is told so; looking it up gives nothing."""
    for refused in (
        log.take("task_9"),
        log.append("task_9", 1, -1, []),
        log.supersede("task_9", 1, 0, b"", [], RUNNING),
        log.read("task_9"),
        log.tail("task_9"),
        anext(log.records("task_9")),
    ):
        with pytest.raises(TaskNotFound):
            await refused
    assert await log.get("task_9") is None
    await log.delete("task_9")


# --- superseding --------------------------------------------------------------------------------------


async def test_the_newest_event_is_superseded_in_place(log: Log):
    """The new bytes stand where the old ones stood, notes follow, and writing goes on behind."""
    await log.create(task(), [*events(0, 1), Event(1, b"ending"), Note("state", b"1")])
    await log.append("task_1", 1, 1, [], COMPLETED)
    await log.supersede("task_1", 1, 1, b"in progress", [Note("state", b"2")], RUNNING)
    await log.append("task_1", 1, 1, [Event(2, b"more")])
    assert [record async for record in log.records("task_1")] == [
        *events(0, 1),
        Event(1, b"in progress"),
        Note("state", b"1"),
        Note("state", b"2"),
        Event(2, b"more"),
    ]
    row = await row_of(log)
    assert (row.cursor, row.size, row.summary) == (2, 27, RUNNING)


@pytest.mark.parametrize(
    ("epoch", "cursor", "records"),
    [(0, 1, []), (1, 0, []), (1, 2, []), (1, 1, events(2, 1))],
    ids=["old-epoch", "not-newest", "not-there", "with-event"],
)
async def test_only_the_newest_event_is_superseded(log: Log, epoch: int, cursor: int, records: list[Event]):
    """Anything else is refused, and nothing changes."""
    await log.create(task(), events(0, 2))
    with pytest.raises(StaleWriter):
        await log.supersede("task_1", epoch, cursor, b"new", records, COMPLETED)
    assert await log.read("task_1") == events(0, 2)
    assert (await row_of(log)).summary == RUNNING


async def test_a_task_without_events_has_none_to_supersede(log: Log):
    """Cursor -1 is no event's."""
    await log.create(task(), [])
    with pytest.raises(StaleWriter):
        await log.supersede("task_1", 1, -1, b"new", [], RUNNING)


async def test_readers_past_a_superseded_event_dont_get_it_again(log: Log):
    """Those who had it only see the new summary; those who hadn't get the new bytes."""
    await log.create(task(), events(0, 1))
    past, before = await log.tail("task_1"), await log.tail("task_1", after=0)
    await log.append("task_1", 1, 0, [Event(1, b"ending")], COMPLETED)
    assert cursors(await everything(past)) == [0, 1]
    await log.supersede("task_1", 1, 1, b"in progress", [], RUNNING)
    assert not past.ended
    assert list(await past.next()) == []
    assert past.summary == RUNNING
    assert list(await before.next()) == [Event(1, b"in progress")]
    await log.append("task_1", 1, 1, [Event(2, b"more")])
    assert list(await past.next()) == [Event(2, b"more")]
    assert list(await before.next()) == [Event(2, b"more")]


# --- reading along ------------------------------------------------------------------------------------


async def test_a_reader_that_comes_in_the_middle_sees_each_event_once(log: Log):
    """Readers who join while 2,000 events are appended get their suffix in order, without gap or double."""
    await log.create(task(), [])
    found: dict[int, list[int]] = {}

    async def read(after: int) -> None:
        found[after] = cursors(await everything(await log.tail("task_1", after=after)))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for cursor in range(2000):
                if cursor % 100 == 50:
                    group.start_soon(read, cursor - 50)
                summary = COMPLETED if cursor == 1999 else None
                await log.append("task_1", 1, cursor - 1, events(cursor, 1), summary)
                if cursor % 7 == 0:
                    await asyncio.sleep(0)
    assert found == {after: list(range(after + 1, 2000)) for after in range(0, 2000, 100)}


async def test_a_reader_behind_the_window_gets_all_in_bounded_batches(log: Log):
    """What memory no longer holds is read from the log, a bounded batch at a time."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    written = [Event(cursor, bytes([cursor % 256]) * 5000) for cursor in range(300)]
    for start in range(0, 300, 3):
        await log.append("task_1", 1, start - 1, written[start : start + 3])
    read: list[Event] = []
    while len(read) < 300:
        batch = await tail.next()
        assert 0 < sum(len(event.data) for event in batch) <= 70_000
        read += batch
    assert read == written


async def test_events_larger_than_the_window_reach_live_readers(log: Log):
    """An event of any size is handed on."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(fill, log, 2, "task_1", b"x" * 1_000_000)
            assert cursors(await tail.next()) == [0]
            assert cursors(await tail.next()) == [1]


async def test_a_thousand_readers_get_everything(log: Log):
    """One task, a thousand readers, each its own copy of the stream."""
    await log.create(task(), [])
    counts: list[int] = []

    async def read() -> None:
        counts.append(len(await everything(await log.tail("task_1"))))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for _ in range(1000):
                group.start_soon(read)
            for cursor in range(20):
                await log.append("task_1", 1, cursor - 1, events(cursor, 1))
                await asyncio.sleep(0)
            await log.append("task_1", 1, 19, [], COMPLETED)
    assert counts == [20] * 1000


async def test_the_stream_ends_after_its_last_event(log: Log):
    """A reader is given all events, then nothing, and only then is it ended."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    await log.append("task_1", 1, -1, events(0, 2), COMPLETED)
    assert not tail.ended
    assert cursors(await tail.next()) == [0, 1]
    assert tail.ended
    assert list(await tail.next()) == []
    assert tail.summary == COMPLETED


async def test_an_ended_stream_is_read_like_a_live_one(log: Log):
    """A reader who comes late gets its suffix, and one past the end is ended at once."""
    await log.create(task(), [])
    await log.append("task_1", 1, -1, events(0, 600), COMPLETED)
    assert cursors(await everything(await log.tail("task_1", after=9))) == list(range(10, 600))
    assert (await log.tail("task_1", after=599)).ended


async def test_a_reopened_stream_goes_on(log: Log):
    """After an ending that was none, readers old and new wait for more."""
    await log.create(task(), [])
    await log.append("task_1", 1, -1, events(0, 1), COMPLETED)
    old = await log.tail("task_1", after=0)
    assert old.ended
    await log.append("task_1", 1, 0, [Note("state", b"{}")], RUNNING)
    new = await log.tail("task_1", after=0)
    assert (old.ended, new.ended) == (False, False)
    await fill(log, 1)
    assert cursors(await new.next()) == [1]
    assert cursors(await old.next()) == [1]


async def test_a_waiting_reader_is_woken_by_a_summary(log: Log):
    """A new summary makes ``next`` return nothing, without being the end; the same one again doesn't."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    paused = Summary("paused", open=True, reason="lunch")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(log.append, "task_1", 1, -1, [Note("state", b"{}")], paused)
            assert list(await tail.next()) == []
    assert (tail.ended, tail.summary) == (False, paused)
    await log.append("task_1", 1, -1, [], paused)
    await fill(log, 1)
    assert cursors(await tail.next()) == [0]


async def test_wake_makes_a_waiting_reader_return(log: Log):
    """``wake`` gives an empty, unended answer, now or, if nobody waits, at the next ``next``."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    with anyio.fail_after(5):
        asyncio.get_running_loop().call_soon(tail.wake)
        assert list(await tail.next()) == []
        tail.wake()
        assert list(await tail.next()) == []
        assert not tail.ended
        asyncio.get_running_loop().call_soon(tail.wake)
        assert list(await tail.next()) == []


async def test_a_cancelled_wait_loses_nothing(log: Log):
    """A reader whose ``next`` was cancelled goes on where it was."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    with anyio.move_on_after(0.01):
        await tail.next()
    await fill(log, 3)
    assert cursors(await tail.next()) == [0, 1, 2]


async def test_a_closed_reader_is_let_go(log: Log):
    """``close`` ends a waiting ``next``, twice is once, and other readers don't notice."""
    await log.create(task(), [])
    closed, other = await log.tail("task_1"), await log.tail("task_1")
    with anyio.fail_after(5):
        asyncio.get_running_loop().call_soon(closed.close)
        assert list(await closed.next()) == []
    closed.close()
    assert closed.ended
    await fill(log, 1)
    assert list(await closed.next()) == []
    assert cursors(await other.next()) == [0]


async def test_a_task_whose_readers_have_all_gone_takes_new_ones(log: Log):
    """The last reader to leave takes nothing with it."""
    await log.create(task(), [])
    (await log.tail("task_1")).close()
    await fill(log, 2)
    tail = await log.tail("task_1", after=0)
    await fill(log, 1)
    assert cursors(await tail.next()) == [1, 2]


# --- finding and listing ------------------------------------------------------------------------------


async def test_a_task_is_found_by_its_response_id(log: Log):
    """The owner's newest task with that id; another owner's is not there."""
    for name, owner in (("task_1", "owner"), ("task_2", "owner"), ("task_3", "other")):
        await log.create(task(name, owner=owner), [])
        await log.append(name, 1, -1, [], COMPLETED)
    found = await log.find("resp_1", "owner")
    assert found is not None
    assert found.id == "task_2"
    assert await log.find("resp_1", "nobody") is None
    await log.delete("task_2")
    found = await log.find("resp_1", "owner")
    assert found is not None
    assert found.id == "task_1"


async def test_a_new_response_id_takes_the_place_of_the_old(log: Log):
    """Only the newest summary's id finds a task."""
    await log.create(task(summary=RUNNING._replace(response_id="resp_old")), [])
    await log.append("task_1", 1, -1, [], RUNNING._replace(response_id="resp_new"))
    assert await log.find("resp_old", "owner") is None
    assert await log.find("resp_new", "owner") == await row_of(log)


async def test_lists_are_newest_first_and_filtered(log: Log):
    """By owner, conversation and state, each alone or together."""
    for number, (owner, talk) in enumerate([("a", "x"), ("a", "y"), ("b", "x"), ("a", "x"), ("a", None)]):
        await log.create(task(f"task_{number}", owner=owner, conversation=talk), [])
    await log.append("task_3", 1, -1, [], COMPLETED)
    assert await ids(log) == ["task_4", "task_3", "task_2", "task_1", "task_0"]
    assert await ids(log, owner="a") == ["task_4", "task_3", "task_1", "task_0"]
    assert await ids(log, conversation="x") == ["task_3", "task_2", "task_0"]
    assert await ids(log, owner="a", conversation="x") == ["task_3", "task_0"]
    assert await ids(log, owner="a", states=["running"]) == ["task_4", "task_1", "task_0"]
    assert await ids(log, states=["completed", "failed"]) == ["task_3"]
    assert await ids(log, owner="c") == []


async def test_lists_come_in_pages(log: Log):
    """``after`` is the last id of the page before; one that isn't in the list is refused."""
    for number in range(5):
        await log.create(task(f"task_{number}"), [])
    assert await ids(log, limit=2) == ["task_4", "task_3"]
    assert await ids(log, limit=2, after="task_3") == ["task_2", "task_1"]
    assert await ids(log, limit=2, after="task_1") == ["task_0"]
    assert await ids(log, after="task_0") == []
    with pytest.raises(InvalidRequest):
        await log.list(after="task_9")
    with pytest.raises(InvalidRequest):
        await log.list(owner="other", after="task_3")


# --- removing and closing -----------------------------------------------------------------------------


async def test_a_deleted_task_is_gone_for_its_readers_too(log: Log):
    """Readers, waiting or not, are told; the writer is; and the id may be used again."""
    await log.create(task(conversation="talk"), events(0, 5))
    waiting, behind = await log.tail("task_1", after=4), await log.tail("task_1")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(log.delete, "task_1")
            with pytest.raises(TaskNotFound):
                await waiting.next()
    with pytest.raises(TaskNotFound):
        await behind.next()
    with pytest.raises(TaskNotFound):
        await log.append("task_1", 1, 4, events(5, 1))
    assert await ids(log, owner="owner") == []
    assert await ids(log, owner="owner", conversation="talk") == []
    await log.create(task(), [])
    assert not await log.read("task_1")


async def test_a_deleted_task_cuts_a_read_of_its_records(log: Log):
    """Deleting while the records are read never gives a wrong record, and never hangs."""
    await log.create(task(), events(0, 3000))
    await log.create(task("task_2"), events(0, 3000, b"other"))
    seen = []
    try:
        async for record in log.records("task_1"):
            seen.append(record)
            if len(seen) == 10:
                await log.delete("task_1")
    except TaskNotFound:
        pass
    assert seen == events(0, len(seen))


async def test_what_is_over_and_old_expires(log: Log):
    """Tasks that are open stay however old they are, and so do those written later."""
    for name in ("task_1", "task_2", "task_3"):
        await log.create(task(name), events(0, 1))
    for name in ("task_1", "task_3"):
        await log.append(name, 1, 0, [], COMPLETED)
    third = await row_of(log, "task_3")
    assert await log.expire(before=(await row_of(log)).created_at) == 0
    assert await log.expire(before=third.updated_at + 60) == 2
    assert await ids(log) == ["task_2"]


async def test_a_closed_log_cuts_its_readers_and_takes_nothing(log: Log):
    """Closing is idempotent; readers and writers alike are told that the log is not there."""
    await log.create(task(), [])
    tail = await log.tail("task_1")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(log.close)
            with pytest.raises(LogUnavailable):
                await tail.next()
    await log.close()
    for refused in (
        log.append("task_1", 1, -1, events(0, 1)),
        log.create(task("task_2"), []),
        log.take("task_1"),
        log.tail("task_1"),
        log.delete("task_1"),
    ):
        with pytest.raises(LogUnavailable):
            await refused


async def test_a_log_that_writes_has_not_failed(log: Log):
    """``failed`` and ``probe`` say nothing as long as all is well."""
    await log.create(task(), events(0, 1), sync=True)
    assert log.failed is None
    assert await log.probe() is None


# --- naming a log -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["", "memory", "memory:x", "sqlite:", "sqlite", "sqlite::memory:", "x:y"])
def test_a_log_that_cant_be_meant_is_refused(spec: str):
    """The message says what to write instead."""
    with pytest.raises(InvalidRequest, match="sqlite:PATH") as caught:
        open_log(spec)
    assert caught.value.param == "log"


def test_redis_is_for_later():
    """A log in Redis is named, and not available yet."""
    with pytest.raises(NotAvailable, match="Redis"):
        open_log("redis://localhost")


def test_an_unknown_durability_is_refused():
    """There are two kinds."""
    with pytest.raises(InvalidRequest, match="process or power"):
        open_log("memory:", durability="never")  # type: ignore[arg-type]
