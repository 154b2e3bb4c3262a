"""What the scripts share.

Called as: python CLIENT.py CALL[,CALL] URL..., one line of JSON for each call of each URL.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

ASKED: dict[str, Any] = {
    "input": [{"role": "user", "content": "Why did tent sales fall?"}],
    "databricks_options": {"long_task": True},
}
ENDINGS = ("response.completed", "response.failed", "response.incomplete")


@dataclass
class Seen:
    """What a client shows of one stream."""

    text: str = ""
    ids: list[str] = field(default_factory=list)
    pauses: int = 0
    ending: str | None = None
    error: str | None = None
    final: str | None = None
    heartbeats: int = 0

    def note(self, event: dict[str, Any]) -> None:
        """One event."""
        kind = event.get("type")
        if kind == "response.output_text.delta":
            self.text += event["delta"]
        elif kind == "response.output_item.done":
            self.pauses += event["item"]["type"] == "task_continue_request"
        elif kind in ENDINGS:
            self.ending = kind
        id_ = (event.get("response") or {}).get("id") or event.get("id") or ""
        if id_.startswith("resp_") and id_ not in self.ids:
            self.ids.append(id_)


def report(read: Callable[[str, Seen, str], None]) -> None:
    """``read(url, seen, call)`` notes what the client shows; what it raises counts too."""
    calls, *urls = sys.argv[1:]
    for call in calls.split(","):
        for url in urls:
            seen = Seen()
            try:
                read(url, seen, call)
            except Exception as exc:  # noqa: BLE001 - whatever a client raises is what the test is about
                seen.error = f"{type(exc).__name__}: {exc}"
            print(json.dumps(asdict(seen)), flush=True)  # noqa: T201
