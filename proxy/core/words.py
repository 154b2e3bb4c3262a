"""What legato says to people, in one place: plain, and with what to do next."""

from __future__ import annotations

from typing import Any

from proxy.core.ledger import Ledger
from proxy.core.refusals import Refusal

NO_ENDING = "upstream ended the body early, without a terminal event"
BAD_CONTINUATION = (
    "Upstream asked to continue with a task_continue_request that has no id, so it can't be answered."
)


def status(refusal: Refusal) -> str:
    """``429 REQUEST_LIMIT_EXCEEDED: text``."""
    head = f"{refusal.status} {refusal.code}" if refusal.code else str(refusal.status)
    if 200 <= refusal.status < 300:
        head = f"{head}, but no event stream"
    message = refusal.message.rstrip(". ")
    return f"{head}: {message}" if message else head


def step(ledger: Ledger) -> str:
    """Why the ordinary follow-up goes out."""
    at = f"at step {ledger.step}" if ledger.step is not None else f"after cycle {ledger.cycle}"
    return f"upstream asked to continue {at}"


def retry(attempts: int, refusal: Refusal | None) -> str:
    """Why a follow-up goes out again: nothing was accepted."""
    cause = status(refusal) if refusal is not None else "no connection could be made"
    return f"retry {attempts}: {cause}"


def place(ledger: Ledger) -> dict[str, Any]:
    """Where a task stopped."""
    asked = [item.id for item in ledger.items if item.is_continuation]
    return {
        "cycle": ledger.cycle,
        "step": ledger.step,
        "continuation": asked[-1] if asked else None,
        "cursor": ledger.cursor,
    }


def incomplete(why: str) -> str:
    """A first cycle without an ending."""
    return (
        f"The stream broke off: {why}. What upstream did after its last event is unknown, nothing was sent "
        "again. Going on means starting again."
    )


def unknown(why: str, ledger: Ledger) -> str:
    """A later cycle without an ending: the one outcome that a person must settle."""
    calls = ", ".join(f"{item.name or 'call'} ({item.call_id})" for item in ledger.uncertain())
    outcome = f"The outcome of {calls} is unknown" if calls else "What upstream did is unknown"
    return (
        f"Continuation state unknown: {why}. Either one tool or model call outlasted upstream's own limit, "
        f"or the connection broke; checkpoints come only between steps. {outcome}, nothing was sent again."
    )


def unreachable(why: str) -> str:
    """A first request that never left."""
    return f"Upstream can't be reached: {why}. Nothing was sent, so starting again is safe."


def refused(refusal: Refusal) -> str:
    """A follow-up that upstream won't take, whatever is waited for."""
    said = f" (request id {refusal.request_id})" if refusal.request_id else ""
    return f"Upstream refused to continue: {status(refusal)}{said}. Nothing was accepted."


def credential(refusal: Refusal) -> str:
    """401 or 403 in the middle of a task."""
    return (
        f"Upstream no longer takes this task's credential: {status(refusal)}. Upstream accepted nothing; the "
        "work so far can still be read."
    )


def gave_up(why: str, attempts: int, budget: float) -> str:
    """The retry budget is spent."""
    tries = f"{attempts} tries" if attempts != 1 else "one try"
    return (
        f"Gave up continuing after {tries}: {why}. The next wait would pass retry_budget ({budget:g} s). "
        "Upstream accepted nothing."
    )


def over_limit(size: int, limit: int) -> str:
    """A body that upstream would not take."""
    return f"the follow-up has {size} bytes, upstream_body_limit is {limit}"


def too_large(why: str) -> str:
    """No smaller form is left."""
    return f"The task can't be continued: {why}, and no smaller replay policy is left."


def frame_too_large(limit: int) -> str:
    """An event past the bound."""
    return f"Upstream sent an event of more than {limit} bytes. Raise max_frame if such events are real."


def log_full(limit: int) -> str:
    """The task's share of the log is used up."""
    return f"The task's log has passed max_log ({limit} bytes). What is there can still be read."
