"""Frames as upstreams send them, for tests that write their own story."""

from __future__ import annotations

import json
from typing import Any

from support.upstream import Answer

SSE = {"content-type": "text/event-stream"}
DONE = b"data: [DONE]\n\n"


def frame(event: dict[str, Any]) -> bytes:
    """One event on one data line."""
    return b"data: %b\n\n" % json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()


def created(response: str = "resp_u1") -> bytes:
    """The opening."""
    body = {"id": response, "object": "response", "created_at": 1, "status": "in_progress", "output": []}
    return frame({"type": "response.created", "sequence_number": 0, "response": body})


def delta(text: str, item: str = "m1", **extra: Any) -> bytes:
    """A piece of text."""
    return frame({"type": "response.output_text.delta", "item_id": item, "delta": text} | extra)


def message(text: str, item: str = "m1") -> dict[str, Any]:
    """A finished message."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": item, "type": "message", "role": "assistant", "status": "completed", "content": content}


def done(item: dict[str, Any], **extra: Any) -> bytes:
    """An item's end."""
    return frame({"type": "response.output_item.done", "item": item} | extra)


def asks(id_: object = "continue_a1", step: int = 3, response: str = "resp_u1", **extra: Any) -> bytes:
    """A continuation."""
    return done({"type": "task_continue_request", "id": id_, "step": step} | extra, id=response)


def completed(*items: dict[str, Any], response: str = "resp_u1", **extra: Any) -> bytes:
    """The good ending."""
    body = {"id": response, "object": "response", "created_at": 1, "status": "completed", "output": items}
    return frame({"type": "response.completed", "sequence_number": 9, "response": body | extra})


def sse(*chunks: Any, **answer: Any) -> Answer:
    """An answer that streams these chunks."""
    return Answer(headers=SSE, chunks=list(chunks), **answer)


def two_cycles() -> list[Answer]:
    """A continuation, then the ending."""
    first = sse(created(), done(message("one", "m1")), asks())
    return [first, sse(delta("two", "m2"), completed(message("two", "m2"), response="resp_u2"))]
