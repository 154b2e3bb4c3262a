"""The window of newest events: when the log is asked, what is kept, and for how long."""

from __future__ import annotations

import pytest
from log.builders import COMPLETED, RUNNING, cursors, events, waits

from proxy.core.messages import Event
from proxy.log.feed import WINDOW_BYTES, Feed, bounded

pytestmark = pytest.mark.anyio


class Source:
    """A log that remembers who asked for what was no longer in memory."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.asked: list[int] = []
        self.forgotten: list[Feed] = []
        self.feed = Feed(-1, RUNNING, self.read, self.forgotten.append)

    def read(self, after: int) -> list[Event]:
        """The next two events."""
        self.asked.append(after)
        return self.made(after + 1, 2)

    def made(self, first: int, count: int) -> list[Event]:
        """Events of the size of this source's."""
        return events(first, count, b"x" * self.size)

    def publish(self, first: int, count: int = 1) -> None:
        """Let the readers know of some."""
        self.feed.publish(self.made(first, count), None)


async def test_live_readers_never_ask_the_log():
    """What was published since a reader last looked is handed over from memory."""
    source = Source()
    quick, slow = source.feed.join(-1), source.feed.join(-1)
    for cursor in range(0, 20, 2):
        source.publish(cursor, 2)
        assert cursors(await quick.next()) == [cursor, cursor + 1]
    assert cursors(await slow.next()) == list(range(20))
    assert source.asked == []


async def test_a_slow_reader_costs_a_window_and_no_more():
    """However much is published, the window stays bounded, and what fell out is asked for."""
    source = Source(size=1000)
    slow = source.feed.join(-1)
    for cursor in range(1000):
        source.publish(cursor)
        assert sum(len(event.data) for event in source.feed._window) <= WINDOW_BYTES
    assert cursors(await slow.next()) == [0, 1]
    assert source.asked == [-1]


async def test_nothing_is_kept_for_readers_who_have_had_it():
    """While all wait at the end, a new batch is all that is in memory."""
    source = Source()
    tails = [source.feed.join(-1) for _ in range(3)]
    for cursor in range(5):
        assert [waits(tail) for tail in tails] == [True] * 3
        waiting = [tail.next() for tail in tails]
        for coroutine in waiting:
            coroutine.send(None)
        source.publish(cursor)
        assert len(source.feed._window) == 1
        for coroutine in waiting:
            with pytest.raises(StopIteration):
                coroutine.send(None)
    assert source.asked == []


async def test_a_gap_is_filled_from_the_log():
    """If a batch was told of before the one in front of it, readers still get both in order."""
    source = Source()
    tail = source.feed.join(-1)
    source.publish(0)
    source.publish(3)
    assert cursors(await tail.next()) == [0, 1]
    assert cursors(await tail.next()) == [2, 3]
    assert source.asked == [-1, 1]


async def test_an_event_too_large_for_the_window_is_asked_for():
    """The window's bound holds for a single event, too."""
    source = Source(size=WINDOW_BYTES + 1)
    tail = source.feed.join(-1)
    source.publish(0, 2)
    assert source.feed._window == []
    assert cursors(await tail.next()) == [0, 1]


async def test_a_superseded_event_is_replaced_in_the_window():
    """Who hasn't had it gets the new bytes, who has gets nothing, and sizes stay right."""
    source = Source()
    before, past = source.feed.join(-1), source.feed.join(-1)
    source.publish(0, 2)
    await past.next()
    source.feed.supersede(Event(1, b"new"), COMPLETED)
    assert list(await before.next()) == [*source.made(0, 1), Event(1, b"new")]
    assert list(await past.next()) == []
    assert source.feed._bytes == 13


async def test_each_summary_is_told_once():
    """After an empty answer for a new summary the reader waits again."""
    source = Source()
    tail = source.feed.join(-1)
    source.feed.publish((), RUNNING._replace(cycles=2))
    assert list(await tail.next()) == []
    assert waits(tail)
    source.feed.publish((), RUNNING._replace(cycles=2))
    assert waits(tail)


async def test_the_feed_is_forgotten_with_its_last_reader():
    """Not before, and a reader who leaves twice counts once."""
    source = Source()
    first, second = source.feed.join(-1), source.feed.join(-1)
    first.close()
    first.close()
    assert source.forgotten == []
    second.close()
    assert source.forgotten == [source.feed]


@pytest.mark.parametrize(("max_bytes", "count"), [(1, 1), (10, 1), (11, 2), (29, 3), (1000, 3)])
def test_a_batch_is_bounded_by_the_event_that_reaches_it(max_bytes: int, count: int):
    """At least one event, and none begun after the bound."""
    assert bounded(events(0, 3, b"x" * 10), max_bytes) == events(0, count, b"x" * 10)
