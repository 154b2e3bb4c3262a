"""What an answer that is no event stream means for a follow-up: wait, another form, or which end.

Databricks errors are ``{"error_code", "message"}``; agents on Apps send ``{"detail"}``, OpenAI-shaped ones
``{"error": {"code", "message"}}``, gateways plain text or HTML (public clients).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from proxy.core.messages import Refused
from proxy.core.splice import loads

# How much of a refusal's text is worth repeating to a client.
MAX_TEXT = 2000

_RATE_LIMITS = frozenset(
    {"REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED", "rate_limit_exceeded"}
)
_TITLE = re.compile(r"<title[^>]*>\s*([^<]*?)\s*</title>", re.IGNORECASE).search
_REQUEST_IDS = ("x-request-id", "x-databricks-request-id", "apim-request-id", "request-id")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused follow-up, read. ``verdict``: ``wait``, ``form``, ``smaller``, ``credential``, ``final`` or
    ``unknown``; ``wait`` in seconds, None where upstream didn't say."""

    verdict: str
    status: int
    code: str | None
    message: str
    request_id: str | None
    wait: float | None

    def facts(self) -> dict[str, Any]:
        """What a client is told under ``error.upstream``."""
        facts: dict[str, Any] = {
            "status": self.status,
            "code": self.code,
            "message": self.message,
            "request_id": self.request_id,
        }
        if self.wait is not None:
            facts["retry_after"] = self.wait
        return facts


def read(refused: Refused) -> Refusal:
    """Judge an answer by its status, as section 7 of the design has it."""
    code, message = _text(refused.body)
    headers = {name.lower(): value for name, value in refused.headers}
    wait = _retry_after(headers.get("retry-after"), refused.now)
    return Refusal(
        verdict=_verdict(refused.status, code, wait),
        status=refused.status,
        code=code,
        message=message,
        request_id=next((headers[name] for name in _REQUEST_IDS if name in headers), None),
        wait=wait,
    )


def _verdict(status: int, code: str | None, wait: float | None) -> str:
    limited = status == 429 or (status == 503 and (wait is not None or code in _RATE_LIMITS))
    if limited:
        return "wait"
    named = {400: "form", 413: "smaller", 401: "credential", 403: "credential", 408: "unknown"}
    if status in named:
        return named[status]
    # A redirect went to no agent; 2xx here is a body that is no event stream, so something did happen.
    return "final" if 300 <= status < 500 else "unknown"


def _text(body: bytes) -> tuple[str | None, str]:
    try:
        parsed = loads(body)
    except ValueError:
        return None, _plain(body.decode("utf-8", "replace"))
    if not isinstance(parsed, dict):
        return None, str(parsed)[:MAX_TEXT]
    inner = parsed.get("error")
    if isinstance(inner, dict):
        parsed = inner
    code = parsed.get("error_code") or parsed.get("code")
    message = parsed.get("message") or parsed.get("detail") or (inner if isinstance(inner, str) else "")
    return (str(code) if code else None), str(message)[:MAX_TEXT]


def _plain(text: str) -> str:
    """A gateway's page says what it says in its title."""
    title = _TITLE(text)
    if title is not None:
        text = f"an HTML page, {title.group(1)!r}"
    elif text.lstrip().startswith("<"):
        text = "an HTML page"
    return " ".join(text.split())[:MAX_TEXT]


def _retry_after(value: str | None, now: float) -> float | None:
    """Seconds, or an HTTP date; what can't be read counts as absent."""
    if value is None:
        return None
    try:
        seconds = float(value) if value.strip().isdigit() else _timestamp(value) - now
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, seconds)


def _timestamp(date: str) -> float:
    """An HTTP date is in GMT, also in the old form that doesn't say so."""
    parsed = parsedate_to_datetime(date)
    return (parsed if parsed.tzinfo is not None else parsedate_to_datetime(f"{date} GMT")).timestamp()
