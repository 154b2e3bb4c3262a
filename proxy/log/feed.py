"""Those who read along: a task's newest events in memory, and whom to wake for them.

A live reader never goes to the log for what was just appended: it is handed over from the *window*. When
every reader waits at the end, the window holds the newest batch only; a reader that falls behind makes it
grow up to ``WINDOW_BYTES`` and no further, and reads the log in bounded batches until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from proxy.core.messages import Event, Summary
from proxy.errors import LogUnavailable

WINDOW_BYTES = 256 * 1024
# What one ``next`` gives at most: a thousand slow readers hold a batch each while they send it.
BATCH_BYTES = 64 * 1024
BATCH_EVENTS = 256


def bounded(events: Sequence[Event], max_bytes: int) -> Sequence[Event]:
    """The beginning of ``events`` up to the one that reaches ``max_bytes``."""
    size = 0
    for count, event in enumerate(events, 1):
        size += len(event.data)
        if size >= max_bytes:
            return events[:count]
    return events


class Feed:
    """One task's readers; it exists while there are some.

    ``read(after)`` gives the next batch from the log itself, and ``forget`` is called when the last reader
    has gone. ``cursor`` and ``summary`` are what readers may know: they follow the log only once a batch
    is as durable as was asked for.
    """

    __slots__ = (
        "_bytes",
        "_forget",
        "_read",
        "_tails",
        "_waiting",
        "_window",
        "cursor",
        "error",
        "summary",
        "version",
    )

    def __init__(
        self,
        cursor: int,
        summary: Summary,
        read: Callable[[int], Sequence[Event]],
        forget: Callable[[Feed], None],
    ) -> None:
        self.cursor = cursor
        self.summary = summary
        self.version = 0
        """Counts the summaries, so that each reader sees whether there was a new one."""
        self.error: Callable[[], Exception] | None = None
        self._read = read
        self._forget = forget
        self._tails: set[FeedTail] = set()
        self._waiting: set[FeedTail] = set()
        self._window: list[Event] = []
        self._bytes = 0

    def join(self, after: int) -> FeedTail:
        """A new reader that begins behind ``after``."""
        tail = FeedTail(self, after)
        self._tails.add(tail)
        return tail

    def leave(self, tail: FeedTail) -> None:
        """Idempotent."""
        self._tails.discard(tail)
        if not self._tails:
            self._forget(self)

    def publish(self, events: Sequence[Event], summary: Summary | None) -> None:
        """Events that follow those published before, and the new summary if there is one."""
        if events:
            self._keep(events)
        if summary is not None and summary != self.summary:
            self.summary = summary
            self.version += 1
        elif not events:
            return
        self._wake_waiting()

    def supersede(self, event: Event, summary: Summary) -> None:
        """The newest event has other bytes now; those who had it don't get it again."""
        if self._window:
            self._bytes += len(event.data) - len(self._window[-1].data)
            self._window[-1] = event
            self._trim()
        self.publish((), summary)

    def fail(self, error: Callable[[], Exception]) -> None:
        """Every reader gets such an error from now on."""
        self.error = error
        self.version += 1
        self._wake_waiting()

    def holds(self, after: int) -> bool:
        """Whether what follows ``after`` is in the window."""
        return bool(self._window) and self._window[0].cursor <= after + 1

    def after(self, cursor: int) -> Sequence[Event]:
        """The next events behind ``cursor``, of which there are some; bounded in bytes and number."""
        if not self.holds(cursor):
            events = self._read(cursor)
            if not events:
                raise LogUnavailable(f"Event {cursor + 1} is missing from the log.")
            return events
        events = self._window[cursor + 1 - self._window[0].cursor :]
        return events if self._bytes <= BATCH_BYTES else bounded(events, BATCH_BYTES)

    def _keep(self, events: Sequence[Event]) -> None:
        # Nobody needs what is in the window when all have had it. A gap comes of a batch whose writer was
        # overtaken while the disk was slow: readers find it in the log.
        if len(self._waiting) == len(self._tails) or events[0].cursor != self.cursor + 1:
            self._window.clear()
            self._bytes = 0
        self.cursor = events[-1].cursor
        self._window += events
        for event in events:
            self._bytes += len(event.data)
        if self._bytes > WINDOW_BYTES:
            self._trim()

    def _trim(self) -> None:
        first = 0
        while self._bytes > WINDOW_BYTES:
            self._bytes -= len(self._window[first].data)
            first += 1
        del self._window[:first]

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for tail in waiting:
            tail.release()

    def wait(self, tail: FeedTail) -> None:
        """Tell this reader of the next news."""
        self._waiting.add(tail)

    def stop_waiting(self, tail: FeedTail) -> None:
        """Idempotent."""
        self._waiting.discard(tail)


class FeedTail:
    """One reader's place in a task's events; ``next`` is for one caller at a time."""

    __slots__ = ("_closed", "_cursor", "_feed", "_loop", "_news", "_seen", "_woken")

    def __init__(self, feed: Feed, after: int) -> None:
        self._feed = feed
        self._cursor = after
        self._seen = feed.version
        self._woken = False
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._news: Callable[[], None] | None = None

    async def next(self) -> Sequence[Event]:
        """As in the contract; raises what the feed failed with."""
        feed = self._feed
        if feed.cursor > self._cursor:
            if not feed.holds(self._cursor):
                # Reading the log doesn't suspend by itself, and others want their turn.
                await asyncio.sleep(0)
        elif not self.ready:
            released = self._loop.create_future()
            self.watch(partial(_release, released))
            try:
                await released
            finally:
                self._news = None
                feed.stop_waiting(self)
        return self.take()

    @property
    def ready(self) -> bool:
        """As in the contract."""
        feed = self._feed
        return (
            feed.cursor > self._cursor or self._seen != feed.version or self._woken or not feed.summary.open
        )

    def watch(self, news: Callable[[], None]) -> None:
        """As in the contract."""
        self._news = news
        self._feed.wait(self)

    def take(self) -> Sequence[Event]:
        """As in the contract; raises what the feed failed with."""
        feed = self._feed
        self._woken = self._closed
        if self._closed:
            return ()
        if feed.error is not None:
            raise feed.error()
        self._seen = feed.version
        if feed.cursor <= self._cursor:
            return ()
        events = feed.after(self._cursor)
        self._cursor = events[-1].cursor
        return events

    def release(self) -> None:
        """There is news: tell whoever watches, once."""
        news, self._news = self._news, None
        if news is not None:
            news()

    def wake(self) -> None:
        """As in the contract."""
        self._woken = True
        self._feed.stop_waiting(self)
        self.release()

    def close(self) -> None:
        """As in the contract; idempotent."""
        self._closed = True
        self.wake()
        self._feed.leave(self)

    @property
    def ended(self) -> bool:
        """True as well once this reader was closed."""
        return self._closed or (not self._feed.summary.open and self._feed.cursor <= self._cursor)

    @property
    def summary(self) -> Summary:
        """The newest summary that readers may know."""
        return self._feed.summary


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
