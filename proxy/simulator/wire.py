"""Items to events, in the two styles that are in use.

**Raw** is what public clients of the supervisor read: no ``response.created``, no numbers, ``step`` and
``id`` on the events, text in deltas and again (or only) in the finished item, ``[DONE]`` at the end.
**OpenAI** is the full lifecycle of the Responses API as OpenAI documents it.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from .orders import Fail, Item, Order, Send, Wait
from .scenario import ErrorFault, Scenario, Usage

DONE = b"data: [DONE]\n\n"


def words(text: str) -> list[str]:
    """The text in pieces of one word with the space after it; joined, they are the text."""
    return re.findall(r"\s*\S+\s*", text) or [text]


class RawWriter:
    """One response in the raw style."""

    event_lines = False

    def __init__(self, scenario: Scenario, response_id: str, model: str, created_at: int) -> None:
        self.scenario = scenario
        self.response_id = response_id
        self.model = model
        self.created_at = created_at
        self.output: list[Item] = []  # of this response
        self.items: list[Item] = []  # of the whole body, which differs where responses stand inside
        self.step = 1
        if scenario.event_lines is not None:
            self.event_lines = scenario.event_lines
        self._pace = 1 / scenario.words_per_second

    def opening(self) -> Iterator[Order]:
        """What stands before the first item: nothing."""
        yield from ()

    def write(self, item: Item) -> Iterator[Order]:
        """All events of one item."""
        if item["type"] == "message":
            yield from self._message(item)
        elif item["type"] == "function_call_output":
            # A public capture has a bare UUID here and no step, unlike all other events.
            yield self._done(item, id=uuid_like(item["call_id"]))
        elif item["type"] == "mcp_approval_request":
            yield self._done(item)
        else:
            yield self._done(item, id=self.response_id, step=self.step)

    def _message(self, item: Item) -> Iterator[Order]:
        if self.scenario.text != "done":
            for word in words(item["content"][0]["text"]):
                yield Wait(self._pace)
                yield self.event(
                    "response.output_text.delta",
                    item_id=item["id"],
                    delta=word,
                    step=self.step,
                    id=self.response_id,
                )
        if self.scenario.text != "deltas":
            yield self._done(item, id=self.response_id, step=self.step)

    def _done(self, item: Item, **fields: object) -> Send:
        self._keep(item)
        return self.event("response.output_item.done", item=item, **fields)

    def continuation(self, item: Item) -> Iterator[Order]:
        """The pause, as vendor documentation shows it: no number, no index, nothing before it."""
        self._keep(item)
        if self.scenario.continuation_event:
            yield self.event("response.output_item.done", item=item, id=self.response_id)

    def _keep(self, item: Item) -> None:
        self.output.append(item)
        self.items.append(item)

    def completed(self, usage: Usage | None) -> Send:
        """The terminal event."""
        return self.event(
            "response.completed", response=self.response("completed", usage), id=self.response_id
        )

    def response(self, status: str, usage: Usage | None, output: Sequence[Item] | None = None) -> Item:
        """The response object, with the little that the raw style has."""
        items = self.output if output is None else output
        body: Item = {"id": self.response_id, "object": "response", "status": status, "output": list(items)}
        return body | {"usage": usage_object(usage)} if usage else body

    def body(self, usage: Usage | None) -> Item:
        """The answer where no stream was asked for; a public capture has these keys in this order."""
        return {"model": self.model, "object": "response", "output": self.items, "id": self.response_id}

    def inner(self, response_id: str) -> None:
        """Begin a response inside the response: everything starts again."""
        self.response_id = response_id
        self.output = []

    def finished(self, item: Item) -> Item:
        """The item as its last event shows it."""
        return item

    def event(self, kind: str, **fields: object) -> Send:
        """One event."""
        return Send(self.frame({"type": kind, **fields}, kind))

    def frame(self, payload: dict[str, Any], name: str, *, named: bool | None = None) -> bytes:
        """One frame; ``named`` overrides the scenario's choice of ``event:`` lines."""
        data = b"data: " + orjson.dumps(payload) + b"\n\n"
        return b"event: %s\n%s" % (name.encode(), data) if (named or self.event_lines) else data

    def failure(self, fault: ErrorFault) -> Fail:
        """The error in its form; the forms are those that public clients and SDKs parse."""
        error = {"message": fault.message, "type": "server_error", "code": fault.code}
        brief = {"code": fault.code, "message": fault.message}
        match fault.form:
            case "databricks":
                payload = {"error_code": fault.code, "message": fault.message}
                return Fail((self.frame(payload, "error", named=True), DONE))
            case "text":
                return Fail((self.frame({"error": fault.message}, "error"), DONE))
            case "object":
                return Fail((self.frame({"error": error}, "error"),))
            case "typed":
                return Fail((self.frame({"type": "error", "error": error}, "error"),))
            case "flat":
                return Fail((self.event("error", **brief, param=None).data,))
            case "failed":
                response = self.response("failed", None) | {"error": brief}
                return Fail((self.event("response.failed", response=response).data,))
            case "response_error":
                return Fail((self.event("response.error", error=error).data,))


class OpenAIWriter(RawWriter):
    """One response in the OpenAI style."""

    event_lines = True

    def __init__(self, scenario: Scenario, response_id: str, model: str, created_at: int) -> None:
        super().__init__(scenario, response_id, model, created_at)
        self._sequence = 0

    def opening(self) -> Iterator[Order]:
        """The two events before the first item."""
        for kind in ("response.created", "response.in_progress"):
            yield self.event(kind, response=self.response("in_progress", None, ()))

    def write(self, item: Item) -> Iterator[Order]:
        """All events of one item."""
        yield self._item("response.output_item.added", _begun(item))
        if item["type"] == "message":
            yield from self._text(item)
        elif item["type"] == "function_call":
            at = {"output_index": len(self.output), "item_id": item["id"]}
            yield self.event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield self.event(
                "response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]
            )
        yield self._finish(item)

    def _text(self, item: Item) -> Iterator[Order]:
        at = {"output_index": len(self.output), "content_index": 0, "item_id": item["id"]}
        part = item["content"][0]
        yield self.event("response.content_part.added", **at, part=part | {"text": ""})
        for word in words(part["text"]):
            yield Wait(self._pace)
            yield self.event("response.output_text.delta", **at, delta=word, logprobs=[])
        yield self.event("response.output_text.done", **at, text=part["text"], logprobs=[])
        yield self.event("response.content_part.done", **at, part=part)

    def continuation(self, item: Item) -> Iterator[Order]:
        """The pause as one more item of the output."""
        if not self.scenario.continuation_event:
            self._keep(item)
            return
        yield self._item("response.output_item.added", item)
        yield self._finish(item)

    def _finish(self, item: Item) -> Send:
        event = self._item("response.output_item.done", item)
        self._keep(item)
        return event

    def _item(self, kind: str, item: Item) -> Send:
        return self.event(kind, output_index=len(self.output), item=item)

    def completed(self, usage: Usage | None) -> Send:
        """The terminal event."""
        return self.event("response.completed", response=self.response("completed", usage))

    def response(self, status: str, usage: Usage | None, output: Sequence[Item] | None = None) -> Item:
        """The whole response object."""
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.model,
            "output": list(self.output if output is None else output),
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": usage_object(usage) if usage else None,
        }

    def body(self, usage: Usage | None) -> Item:
        """The answer where no stream was asked for."""
        return self.response("completed", usage, self.items)

    def inner(self, response_id: str) -> None:
        """Begin a response inside the response: everything starts again."""
        super().inner(response_id)
        self._sequence = 0

    def finished(self, item: Item) -> Item:
        """The item as its last event shows it."""
        return item | {"status": "completed"} if item["type"] in ("message", "function_call") else item

    def event(self, kind: str, **fields: object) -> Send:
        """One event, numbered."""
        number = self._sequence
        self._sequence += 1
        return Send(self.frame({"type": kind, "sequence_number": number, **fields}, kind))


def writer_for(scenario: Scenario, response_id: str, model: str, created_at: int) -> RawWriter:
    """A writer in the scenario's style."""
    style = OpenAIWriter if scenario.style == "openai" else RawWriter
    return style(scenario, response_id, model, created_at)


def usage_object(usage: Usage) -> Item:
    """With both ``*_details``, which MLflow's types demand."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def uuid_like(text: str) -> str:
    """An id in the form of a bare UUID, always the same for the same text."""
    return str(uuid.UUID(bytes=hashlib.sha256(text.encode()).digest()[:16]))


def _begun(item: Item) -> Item:
    """The item as its first event shows it."""
    if item["type"] == "message":
        return item | {"status": "in_progress", "content": []}
    if item["type"] == "function_call":
        return item | {"status": "in_progress", "arguments": ""}
    return item
