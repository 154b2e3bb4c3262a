"""The log: can it be opened and written, is it another process's, who may read it, is there room."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from proxy.log.files import SCHEMA_VERSION
from proxy.settings import Settings

from .base import Check, fail, ok, size, warn

# Below the first a task can hardly be kept, below the second there is little time to react.
NO_ROOM = 64 * 2**20
LITTLE_ROOM = 2**30
FILES = ("", "-wal", "-shm", "-lock", "-key")


def check_log(settings: Settings, *, served: bool) -> Iterator[Check]:
    """``served``: a legato already answers on our port, so that a lock is no surprise."""
    if settings.log == "memory:":
        yield ok("log", "memory: what tasks did is forgotten when legato stops")
        return
    path = Path(settings.log.removeprefix("sqlite:"))
    if not path.parent.is_dir():
        yield fail("log", f"there is no directory {path.parent}", "make it, or set log")
        return
    yield _openable(path, served=served)
    yield _modes(path)
    yield _room(path, settings)


def _openable(path: Path, *, served: bool) -> Check:
    if locked(path):
        if served:
            return ok("log", f"sqlite:{path} is in use by the legato that runs here")
        return warn(
            "log",
            f"sqlite:{path} is in use by another process",
            "stop that legato before you start one, or give this one its own log",
        )
    if not path.exists():
        return _new(path)
    try:
        schema, tables = _look(path)
    except sqlite3.Error as exc:
        return fail("log", f"sqlite:{path} can't be opened and written: {exc}", "mend it, or set log")
    if schema > SCHEMA_VERSION:
        return fail("log", f"sqlite:{path} was written by a newer legato", "use that one, or set log")
    if not schema and tables:
        return fail("log", f"{path} is a database, but no log of legato", "set log to another file")
    return ok("log", f"sqlite:{path} can be opened and written")


def _new(path: Path) -> Check:
    """The directory will have to take files."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as exc:
        return fail("log", f"{path.parent} can't be written: {exc.strerror}", "mend that, or set log")
    return ok("log", f"sqlite:{path} isn't there yet and can be made")


def _look(path: Path) -> tuple[int, int]:
    """Schema and number of tables of a database that can be written; nothing is."""
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw", uri=True, timeout=1, isolation_level=None
    )
    try:
        connection.execute("BEGIN IMMEDIATE")
        schema = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        connection.execute("ROLLBACK")
    finally:
        connection.close()
    return int(schema), int(tables)


def locked(path: Path) -> bool:
    """Whether a running legato holds the log. Asked with a shared lock that is let go of at once."""
    try:
        fd = os.open(f"{path}-lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _modes(path: Path) -> Check:
    """The files hold requests and answers."""
    open_to_others = []
    found = 0
    for name in (f"{path}{end}" for end in FILES):
        try:
            mode = stat.S_IMODE(os.stat(name).st_mode)
        except OSError:
            continue
        found += 1
        if mode & 0o077:
            open_to_others.append(f"{name} ({mode:04o})")
    if open_to_others:
        names = ", ".join(open_to_others)
        return warn("log mode", f"others may use {names}", f"chmod 600 {path}*")
    return ok("log mode", "only its owner may read it (0600)" if found else "new files get 0600")


def _room(path: Path, settings: Settings) -> Check:
    free = shutil.disk_usage(path.parent).free
    text = f"{size(free)} free in {path.parent.absolute()}"
    advice = f"make room: one task may write {size(settings.max_log)} (max_log)"
    if free < NO_ROOM:
        return fail("disk", text, advice)
    if free < max(LITTLE_ROOM, settings.max_log):
        return warn("disk", text, advice)
    return ok("disk", text)
