"""The SQLite database of a log while it is in use: one connection in the loop, commits in place.

What may take long is not done here: fdatasync and checkpoints run in threads (wal.py).
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from proxy.errors import LogUnavailable
from proxy.log import files
from proxy.log.wal import Wal

# How often a write looks whether the files are still there.
LOOK_SECONDS = 1.0


class Database:
    """In use from ``open`` to ``close``. Its methods raise ``LogUnavailable`` or ``LogFull`` only."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._wal: Wal | None = None
        self._inode = (0, 0)
        self._looked = 0.0
        self._error: str | None = None
        self._refusal: str | None = "The log is not open."
        """Why nothing can be written, whatever is tried."""

    @property
    def failed(self) -> str | None:
        """Why the last write failed, or the last checkpoint, or why every write will."""
        checkpoint = None if self._wal is None else self._wal.checkpoint_error
        return self._refusal or self._error or checkpoint

    # --- opening and closing ----------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None

    def open(self) -> None:
        """Lock, make, connect. What was begun is let go with ``close``, after an error too."""
        try:
            self._lock = files.lock(self._path)
            files.make(self._path)
            self._connection = files.connect(self._path)
            files.prepare(self._connection, self._path)
            # SQLite makes the write-ahead file with the first write, which also tells whether it can.
            files.beat(self._connection)
            status = os.stat(self._path)
            self._inode = (status.st_dev, status.st_ino)
            self._wal = Wal(self._path, self.refuse)
            self._refusal = None
        except (OSError, sqlite3.Error) as exc:
            raise LogUnavailable(f"The log sqlite:{self._path} can't be opened: {exc}.", param="log") from exc

    def refuse(self, reason: str) -> None:
        """Nothing is written from now on."""
        self._refusal = self._refusal or reason

    async def settle(self) -> None:
        """Refuse new writes and finish what runs in threads; a last ``transaction`` is still possible."""
        self.refuse("The log is closed.")
        if self._wal is not None:
            await self._wal.settle()

    async def close(self) -> None:
        """Let go of everything; idempotent."""
        await self.settle()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        wal, self._wal = self._wal, None
        if wal is not None:
            await wal.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    # --- use --------------------------------------------------------------------------------------

    async def writable(self) -> None:
        """Wait while writers are held. After it, a ``transaction`` may follow without a further await."""
        wal = self._wal
        if wal is not None and wal.held:
            await wal.released()
        self._look()
        if self._refusal is not None:
            raise LogUnavailable(self._refusal)

    @contextmanager
    def transaction(self, size: int = 0) -> Iterator[sqlite3.Cursor]:
        """One commit, whole or not at all; ``size``: about how many bytes of records."""
        connection = self._connected()
        cursor = connection.cursor()
        try:
            cursor.execute("BEGIN IMMEDIATE")
            yield cursor
            cursor.execute("COMMIT")
        except sqlite3.Error as exc:
            raise self._failure(exc) from exc
        finally:
            # After an error of another kind as well.
            if connection.in_transaction:
                self._roll_back(connection)
        self._wrote(size)

    def execute(self, sql: str, parameters: tuple[Any, ...], size: int) -> None:
        """A transaction of one statement, which costs a third less than ``transaction``."""
        try:
            self._connected().execute(sql, parameters)
        except sqlite3.Error as exc:
            raise self._failure(exc) from exc
        self._wrote(size)

    def fetch(self, sql: str, parameters: tuple[Any, ...], *, max_bytes: int | None = None) -> list[Any]:
        """The rows; with ``max_bytes`` only as many as have about so much in their last column."""
        found: list[Any] = []
        size = 0
        try:
            cursor = self._connected().execute(sql, parameters)
            if max_bytes is None:
                return cursor.fetchall()
            for row in cursor:
                found.append(row)
                size += len(row[-1])
                if size >= max_bytes:
                    break
            # A read left open would keep the write-ahead file from being emptied.
            cursor.close()
        except sqlite3.Error as exc:
            raise self._failure(exc) from exc
        return found

    def sync(self) -> asyncio.Future[None]:
        """Done when all that is committed by now is on the disk. Shared: await it under a shield."""
        if self._wal is None:
            raise LogUnavailable(self._refusal or "The log is closed.")
        return self._wal.sync()

    async def probe(self) -> str | None:
        """``failed``, after the smallest of writes if the last one failed."""
        try:
            await self.writable()
            if self._error is not None:
                with self.transaction() as cursor:
                    files.beat(cursor)
            if self._wal is not None and self._wal.checkpoint_error is not None:
                self._wal.checkpoint()
        except LogUnavailable:
            pass
        return self.failed

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            raise LogUnavailable(self._refusal or "The log is closed.")
        return self._connection

    def _wrote(self, size: int) -> None:
        self._error = None
        if self._wal is not None:
            self._wal.grew(size)

    def _failure(self, exc: sqlite3.Error) -> LogUnavailable:
        error = files.unavailable(exc)
        self._error = error.message
        return error

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # SQLite has done so itself

    def _look(self) -> None:
        """Once a second: writing to a file that was removed succeeds, and is for nothing."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS or self._wal is None:
            return
        self._looked = now
        try:
            status = os.stat(self._path)
            there = (status.st_dev, status.st_ino) == self._inode and not self._wal.gone()
        except OSError:
            there = False
        if not there:
            self.refuse("The log's file was removed or replaced while it was in use.")
