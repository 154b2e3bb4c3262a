"""The ordered, durable records of every task."""

from __future__ import annotations

from proxy.errors import InvalidRequest, NotAvailable
from proxy.log.base import Durability, Log
from proxy.log.memory import MemoryLog
from proxy.log.sqlite import SqliteLog

__all__ = ["open_log"]

FORMS = "Write `memory:` or `sqlite:PATH`."


def open_log(spec: str, *, durability: Durability = "process") -> Log:
    """The log that ``spec`` names, still to be opened; ``InvalidRequest`` or ``NotAvailable``."""
    if durability not in ("process", "power"):
        raise InvalidRequest(f"There is no durability {durability!r}: process or power.", param="durability")
    if spec == "memory:":
        return MemoryLog()
    kind, _, path = spec.partition(":")
    if kind == "sqlite" and path and path != ":memory:":
        return SqliteLog(path, durability=durability)
    if kind in ("redis", "rediss"):
        raise NotAvailable(f"A log in Redis is not available yet. {FORMS}", param="log")
    raise InvalidRequest(f"There is no log {spec!r}. {FORMS}", param="log")
