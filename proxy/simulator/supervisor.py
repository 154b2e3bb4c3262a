"""From a request to the part that is to be played, or to a refusal. No I/O."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .conversation import Conversation, Key, read_conversation
from .followups import FollowUp, RefusalError, check_follow_up, find_follow_up, take_over
from .orders import Item
from .scenario import Scenario, StatusFault, shipped_scenarios
from .script import MAX_CYCLES, Answered, Part
from .tickets import SentCycle, Task, Tickets


@dataclass(frozen=True, slots=True)
class Call:
    """What the server knows of one request."""

    body: bytes
    endpoint: str | None = None
    scenario: str | None = None
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """An accepted request, and what answers it."""

    task: Task
    part: Part
    stream: bool
    head_seconds: float


class Supervisor:
    """The other side of the wire, but for the wire."""

    def __init__(self, default: Scenario, extra: Iterable[Scenario] = ()) -> None:
        self.default = default
        self.scenarios = {
            **shipped_scenarios(),
            default.name: default,
            **{scenario.name: scenario for scenario in extra},
        }
        self.tickets = Tickets()

    def take(self, call: Call) -> Turn:
        """Accept the request, or raise a refusal; both are counted."""
        try:
            return self._take(call)
        except RecursionError as exc:
            self.tickets.refuse(None)
            raise RefusalError("The request body is nested too deeply", code="MALFORMED_REQUEST") from exc
        except RefusalError as refusal:
            self.tickets.refuse(refusal.task)
            raise

    def _take(self, call: Call) -> Turn:
        body = _read(call.body)
        conversation = _conversation(body)
        follow_up = find_follow_up(conversation, self.tickets) if conversation else None
        task = follow_up.newest.task if follow_up else None
        scenario = task.scenario if task else self._choose(body, call.scenario)
        _check_token(scenario, call.authorization, task)
        _check_size(scenario, call.body, task)
        conversation = _check_key(scenario, body, conversation, task)
        long_task = _long_task(body)
        if follow_up:
            check_follow_up(follow_up, long_task=long_task)
        cycle = follow_up.newest.cycle + 1 if follow_up else 0
        attempt = follow_up.newest.id if follow_up else hashlib.sha256(call.body).hexdigest()
        fault = self.tickets.fault(attempt, scenario.cycle(cycle).faults)
        if isinstance(fault, StatusFault):
            raise RefusalError(
                fault.message,
                status=fault.status,
                code=fault.error_code,
                task=task,
                headers=fault.headers,
                text=fault.text,
            )
        response_id = f"resp_{uuid.uuid4().hex}"
        task = self._accept(follow_up, response_id, scenario, conversation)
        part = Part(
            scenario=scenario,
            task=task.hex,
            cycle=cycle,
            run=task.runs[cycle],
            response_id=response_id,
            continuation_ids=_continuation_ids(scenario, cycle) if long_task else (),
            model=_printable(str(body.get("model") or call.endpoint or "supervisor")),
            created_at=int(time.time()),
            long_task=long_task,
            input_words=len(call.body) // 6,  # an English word and its space, roughly
            answered=_answered(follow_up),
            repeats=task.last_items if scenario.cycle(cycle).repeat_earlier else (),
            fault=fault,
        )
        task.runs[cycle] += 1
        task.sent[cycle] = SentCycle()
        return Turn(task, part, body.get("stream") is True, scenario.cycle(cycle).head_seconds)

    def _choose(self, body: Item, header: str | None) -> Scenario:
        """By ``custom_inputs.scenario``, else the header, else the default."""
        custom = body.get("custom_inputs")
        wanted = custom.get("scenario") if isinstance(custom, dict) else None
        name = wanted if wanted is not None else header
        if name is None:
            return self.default
        if not isinstance(name, str) or name not in self.scenarios:
            raise RefusalError(
                f"No scenario is called {name!r}; there are: {', '.join(sorted(self.scenarios))}"
            )
        return self.scenarios[name]

    def _accept(
        self, follow_up: FollowUp | None, response_id: str, scenario: Scenario, conversation: Conversation
    ) -> Task:
        if follow_up is None:
            return self.tickets.begin(response_id, scenario, conversation)
        self.tickets.accept(follow_up.newest.task, [ticket for _, ticket in follow_up.answers])
        if follow_up.asked:
            take_over(follow_up)
        return follow_up.newest.task


def _read(body: bytes) -> Item:
    try:
        value = json.loads(body)
    except ValueError as exc:
        raise RefusalError("The request body is not valid JSON", code="MALFORMED_REQUEST") from exc
    if not isinstance(value, dict):
        raise RefusalError("The request body must be a JSON object", code="MALFORMED_REQUEST")
    return value


def _printable(text: str) -> str:
    """A client may escape half a character, which can't be written again."""
    return text.encode("utf-8", "replace").decode()


def _conversation(body: Item) -> Conversation | None:
    return read_conversation(body, "input") or read_conversation(body, "messages")


def _long_task(body: Item) -> bool:
    options = body.get("databricks_options")
    return isinstance(options, dict) and options.get("long_task") is True


def _check_token(scenario: Scenario, authorization: str, task: Task | None) -> None:
    if scenario.token and authorization != f"Bearer {scenario.token}":
        raise RefusalError(
            "Credential was not sent or was not accepted", status=401, code="UNAUTHENTICATED", task=task
        )


def _check_size(scenario: Scenario, body: bytes, task: Task | None) -> None:
    if len(body) > scenario.body_limit:
        message = f"Request size {len(body)} exceeds the limit of {scenario.body_limit} bytes"
        raise RefusalError(message, status=413, code="REQUEST_TOO_LARGE", task=task)


def _check_key(
    scenario: Scenario, body: Item, conversation: Conversation | None, task: Task | None
) -> Conversation:
    """The two keys exclude each other; the text is what public clients log from real endpoints."""
    wanted = (scenario.follow_up_key or scenario.accepts) if task else scenario.accepts
    other: dict[str, Key] = {"input": "messages", "messages": "input"}
    if wanted in other and other[wanted] in body:
        text = f"'{other[wanted]}' field is not supported. Please use '{wanted}' field instead."
        raise RefusalError(f"Invalid request: {text}", task=task)
    if conversation is None:
        field = "input" if wanted == "either" else wanted
        raise RefusalError(
            f"Invalid request: '{field}' must be a text or a list of items that isn't empty.", task=task
        )
    return conversation


def _continuation_ids(scenario: Scenario, cycle: int) -> tuple[str, ...]:
    if cycle + 1 >= MAX_CYCLES:
        return ()
    return tuple(f"continue_{uuid.uuid4().hex}" for _ in range(scenario.continuations(cycle)))


def _answered(follow_up: FollowUp | None) -> tuple[Answered, ...]:
    pairs: Any = follow_up.asked if follow_up else ()
    return tuple(
        Answered(ticket.kind, ticket.id, ticket.step, answer.approved)
        for answer, ticket in pairs
        if ticket.step
    )
