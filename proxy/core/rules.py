"""Stop rules: what a task has come to, and whether another follow-up may go out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from proxy.core.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_cycles``: upstream requests that one task may make."""

    max_cycles: int = 100


class Verdict(NamedTuple):
    """A rule says stop: its name, the limit, and what was used."""

    rule: str
    limit: int
    used: int


def judge(ledger: Ledger, limits: Limits) -> Verdict | None:
    """None to go on; asked before each follow-up, never in the middle of a cycle."""
    used = ledger.cycles_before + ledger.cycle
    if used >= limits.max_cycles:
        return Verdict("max_cycles", limits.max_cycles, used)
    return None
