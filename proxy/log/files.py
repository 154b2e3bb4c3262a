"""The files of a SQLite log: whose they are, how they are made and opened, and their schema.

Never open and close the database file itself by other means than SQLite while it is in use: POSIX drops
all locks of a process on a file when any descriptor of it is closed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3

from proxy.errors import LogFull, LogUnavailable

SCHEMA_VERSION = 1

# ``record.id`` is ``task.number << 32 | place``: records lie beside each other in a task's order, in one
# tree. A place is never below its event's cursor, and above it by the notes before. ``next``, ``cursor`` and
# ``size`` of a task may lag behind its records, never the other way about. ``removed`` names the tasks
# whose records are still to be deleted.
SCHEMA = """
CREATE TABLE task (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    conversation TEXT,
    route TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    epoch INTEGER NOT NULL,
    next INTEGER NOT NULL,
    cursor INTEGER NOT NULL,
    size INTEGER NOT NULL,
    summary BLOB NOT NULL
);
CREATE TABLE record (
    id INTEGER PRIMARY KEY,
    cursor INTEGER,
    kind TEXT,
    data BLOB NOT NULL
);
CREATE TABLE removed (number INTEGER PRIMARY KEY);
"""

PRAGMAS = (
    "synchronous = NORMAL",  # a commit survives kill -9; what must survive a power cut is synced by us
    "wal_autocheckpoint = 0",  # see wal.py
    "cache_size = -32768",  # KiB: the last page of each of some thousand running tasks
    "secure_delete = FAST",
)


def lock(path: str) -> int:
    """Hold ``PATH-lock`` as long as the returned descriptor is open; ``LogUnavailable`` if another does."""
    fd = os.open(path + "-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise LogUnavailable(
            f"Another legato uses the log sqlite:{path}. Stop it, or give this one its own with the setting "
            "`log`.",
            param="log",
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def make(path: str) -> None:
    """An empty file that only its owner may read; SQLite gives ``-wal`` and ``-shm`` the same mode.

    Only to be called with the lock held and before the database is opened.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    # A file whose name isn't on the disk is lost with the power, however well its bytes are synced.
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def connect(path: str, *, busy_timeout: float = 0.0) -> sqlite3.Connection:
    """A connection that begins and commits only where it is told to."""
    connection = sqlite3.connect(path, timeout=busy_timeout, isolation_level=None, check_same_thread=False)
    try:
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(connection: sqlite3.Connection, path: str) -> None:
    """WAL, and our schema, made if the file is new; ``LogUnavailable`` if it is anything else's."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise LogUnavailable(
            f"The log sqlite:{path} was written by a newer legato (schema {version}, this one knows "
            f"{SCHEMA_VERSION}). Use that version, or another file.",
            param="log",
        )
    if version < SCHEMA_VERSION and (version or tables):
        raise LogUnavailable(f"The file {path} is a database, but no log of legato.", param="log")
    if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise LogUnavailable(f"The place of {path} doesn't bear a write-ahead log.", param="log")
    if not version:
        connection.executescript(f"BEGIN;{SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")


def beat(connection: sqlite3.Connection | sqlite3.Cursor) -> None:
    """The smallest write: nothing changes, but whether one can write is known."""
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def is_full(error: BaseException) -> bool:
    """Whether it is for want of room."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # The low byte is the primary code; errors of the module itself have none.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def unavailable(error: BaseException) -> LogUnavailable:
    """The one place where errors of SQLite and of the system become ours."""
    if is_full(error):
        return LogFull(f"There is no room left for the log: {error}.")
    return LogUnavailable(f"The log can't be used: {error}.")
