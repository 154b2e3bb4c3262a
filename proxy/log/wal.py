"""The write-ahead log file of a SQLite log: made durable, and emptied, without ever blocking the loop.

*Durable*: ``sync`` joins all who ask in one fdatasync, done in a thread on a descriptor of our own.

*Emptied*: SQLite starts the file anew only once all of it is in the database, which under steady writing
is never so by chance. So at ``CHECKPOINT_BYTES`` a thread with its own connection copies what there is
while writing goes on (a PASSIVE checkpoint takes no lock that a writer wants), and then, with writers held
for the moment it takes, the few pages that came meanwhile. It also makes the first write of the new round,
since SQLite syncs the file's header with that one.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from proxy.log import files

PAGE = 4096 + 24  # with its header
CHECKPOINT_BYTES = 32 * 1024 * 1024
# Copied with writers held: a millisecond's work.
FEW_PAGES = 256
# A stranger who reads the database (its owner's shell) makes the restart wait, and writers with it.
STRANGERS_SECONDS = 0.1


class Wal:
    """Belongs to one loop. ``fail`` is told of an fdatasync that failed, once and for all."""

    def __init__(self, path: str, fail: Callable[[str], None]) -> None:
        self.held = False
        """Nobody may write now; wait with ``released``."""
        self.checkpoint_error: str | None = None
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._fd = os.open(path + "-wal", os.O_RDWR | os.O_CLOEXEC)
        self._connection = files.connect(path, busy_timeout=STRANGERS_SECONDS)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="legato-log")
        self._jobs: set[asyncio.Future[object]] = set()
        self._release = asyncio.Event()
        self._closing = False
        self._bytes = 0
        self._checkpointing = False
        self._syncing = False
        self._lost: BaseException | None = None
        self._next_sync: asyncio.Future[None] | None = None

    async def settle(self) -> None:
        """Begin no further checkpoint, and wait for what runs."""
        self._closing = True
        while self._jobs or self._syncing:
            await (asyncio.wait(self._jobs) if self._jobs else asyncio.sleep(0))

    async def close(self) -> None:
        """The last connection to close copies what is left and deletes the file: in a thread, too."""
        await self.settle()
        await self._run(self._connection.close)
        self._pool.shutdown()
        os.close(self._fd)

    def gone(self) -> bool:
        """Whether the file was unlinked."""
        return os.fstat(self._fd).st_nlink == 0

    # --- durable ----------------------------------------------------------------------------------

    def sync(self) -> asyncio.Future[None]:
        """Done when all that is committed by now is on the disk. Shared: await it under a shield."""
        # A sync under way may have begun before the last commit, so it is never joined.
        if self._next_sync is None:
            self._next_sync = self._loop.create_future()
            if not self._syncing:
                self._syncing = True
                self._loop.call_soon(self._start_sync)
        return self._next_sync

    def _start_sync(self) -> None:
        waiting, self._next_sync = self._next_sync, None
        if waiting is None:
            self._syncing = False
        else:
            self._run(_sync_file, self._fd).add_done_callback(partial(self._synced, waiting))

    def _synced(self, waiting: asyncio.Future[None], job: asyncio.Future[object]) -> None:
        error = job.exception()
        if error is not None and self._lost is None:
            # The kernel tells of a lost page once, and the next fdatasync would succeed: no further one
            # can be believed.
            self._lost = error
            self._fail(files.unavailable(error).message)
        if self._lost is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(files.unavailable(self._lost))
            waiting.exception()  # whoever waited may have gone
        self._start_sync()

    # --- emptied ----------------------------------------------------------------------------------

    def grew(self, size: int) -> None:
        """About so many bytes of records were committed."""
        self._bytes += PAGE + size
        if self._bytes >= CHECKPOINT_BYTES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Begin one unless one runs."""
        if not self._checkpointing and not self._closing:
            self._checkpointing = True
            self._run(_copy, self._connection).add_done_callback(self._copied)

    async def released(self) -> None:
        """Wait until writing is allowed."""
        while self.held:
            await self._release.wait()

    def _copied(self, job: asyncio.Future[object]) -> None:
        if self._closing or self._note_error(job):
            self._checkpointed()
            return
        self.held = True
        self._release.clear()
        self._run(_restart, self._connection).add_done_callback(self._restarted)

    def _restarted(self, job: asyncio.Future[object]) -> None:
        self._note_error(job)
        self.held = False
        self._release.set()
        self._checkpointed()

    def _checkpointed(self) -> None:
        # After a failure too: the next try comes when as much again was written.
        self._bytes = 0
        self._checkpointing = False

    def _note_error(self, job: asyncio.Future[object]) -> bool:
        error = job.exception()
        self.checkpoint_error = None if error is None else files.unavailable(error).message
        return error is not None

    def _run(self, work: Callable[..., object], *args: object) -> asyncio.Future[object]:
        job = self._loop.run_in_executor(self._pool, partial(work, *args))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job


def _sync_file(fd: int) -> None:
    # macOS has no fdatasync.
    getattr(os, "fdatasync", os.fsync)(fd)


def _copy(connection: sqlite3.Connection) -> None:
    for _ in range(3):
        _, pages, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if pages - copied < FEW_PAGES:
            return


def _restart(connection: sqlite3.Connection) -> None:
    busy, _, _ = connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
    if not busy:
        files.beat(connection)
