"""What becomes of a task whose process is gone: it was running, and nobody runs it any more."""

from __future__ import annotations

from proxy.core import words
from proxy.core.ledger import Ledger
from proxy.core.merge import own_event
from proxy.core.messages import Event, Note, Phase, Record, Summary
from proxy.core.splice import dumps

GONE = "legato was stopped in the middle"


def settle(
    ledger: Ledger, summary: Summary, *, response_id: str, now: float
) -> tuple[tuple[Record, ...], Summary]:
    """The records and the summary that end it; ``ledger`` is what its records fold to.

    An intent mark that stands means that upstream may have seen a request whose outcome nobody knows: a first
    cycle has failed, a later one needs a person. Without a mark nothing is on its way, and the task is held.
    """
    phase: Phase
    if ledger.operation is None:
        phase, reason, message = "held", "restart", None
    elif ledger.cycle <= 1:
        phase, reason, message = "failed", "upstream_incomplete", words.incomplete(GONE)
    else:
        phase, reason, message = "needs_review", "continuation_unknown", words.unknown(GONE, ledger)
    records: list[Record] = []
    if message is not None:
        error = {"code": reason, "message": message}
        data = own_event(ledger, "response.failed", response_id=response_id, now=now, error=error)
        records.append(Event(ledger.cursor + 1, data))
    facts = {"state": phase, "reason": reason, "actor": "restart", "at": now}
    records.append(Note("state", dumps(facts).encode()))
    ended = summary._replace(
        state=phase,
        open=False,
        reason=reason,
        response_id=ledger.response_id,
        cycles=ledger.cycle,
        step=ledger.step,
        done=ledger.done,
    )
    return tuple(records), ended
