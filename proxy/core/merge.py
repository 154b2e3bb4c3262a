"""The last word of a task: upstream's terminal event made whole, or legato's own."""

from __future__ import annotations

from typing import Any

from proxy.core.dialects.responses import Seen
from proxy.core.ledger import Ledger
from proxy.core.splice import Editor, dumps


def merged(data: bytes, seen: Seen, ledger: Ledger) -> bytes:
    """A terminal event with every cycle's items, summed usage, the first id and ``created_at``."""
    editor = Editor(data.decode())
    if seen.response is None:
        return editor.result().encode()
    if ledger.response_id is not None:
        editor.set(("response", "id"), dumps(ledger.response_id))
    if ledger.created_at is not None:
        editor.set(("response", "created_at"), ledger.created_at)
    editor.set(("response", "output"), f"[{','.join(ledger.output())}]")
    usage, reported = ledger.usage()
    if usage is not None:
        editor.set(("response", "usage"), dumps(usage))
    if reported is not None:
        editor.set(("response", "legato"), dumps({"usage_cycles": reported}))
    return editor.result().encode()


def own_event(
    ledger: Ledger,
    type_: str,
    *,
    response_id: str,
    now: float,
    error: dict[str, Any] | None = None,
    reason: str | None = None,
    report: dict[str, Any] | None = None,
) -> bytes:
    """A terminal event of legato's own, as a whole frame under the next cursor.

    A standard type on one JSON line, with the task's output so far, its id, or ``response_id`` where
    upstream gave none, and an ``event:`` line where the task's stream has them.
    """
    status = type_.rpartition(".")[2]
    usage, reported = ledger.usage()
    extra = dict(report or {})
    if reported is not None:
        extra["usage_cycles"] = reported
    members = {
        "id": dumps(ledger.response_id or response_id),
        "object": '"response"',
        "created_at": ledger.created_at or str(int(now)),
        "status": dumps(status),
        "error": dumps(error),
        "incomplete_details": dumps({"reason": reason} if reason is not None else None),
        "model": dumps(ledger.model),
        "output": f"[{','.join(_on_one_line(item) for item in ledger.output())}]",
    }
    if usage is not None:
        members["usage"] = dumps(usage)
    if extra:
        members["legato"] = dumps(extra)
    response = ",".join(f'"{key}":{value}' for key, value in members.items())
    line = f"event: {type_}\n" if ledger.event_lines else ""
    number = ledger.cursor + 1
    return (
        f'{line}data: {{"type":"{type_}","sequence_number":{number},"response":{{{response}}}}}\n\n'.encode()
    )


def _on_one_line(raw: str) -> str:
    """Line ends in JSON can only be white space between its tokens."""
    return raw if "\n" not in raw else raw.replace("\n", " ")
