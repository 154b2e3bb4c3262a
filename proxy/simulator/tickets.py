"""What was handed out, what came back for it, and what is refused.

Continuations, approvals and calls that a client must run are **tickets**: each is handed out once, and the
newest one that a request answers says which task it belongs to and which cycle comes next. Nothing of a
conversation is kept but digests, and every table has a bound.
"""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from .conversation import Answer, Conversation, Digest, digest, plain_forms
from .orders import Item, Offer
from .scenario import Fault, Scenario, Step

MAX_TICKETS = 10_000
MAX_TASKS = 1_000
MAX_ATTEMPTS = 10_000


@dataclass(slots=True)
class Ticket:
    """Something handed out that a later request may answer."""

    id: str
    kind: str
    task: Task
    cycle: int
    digest: Digest
    step: Step | None
    answered: bool = False


@dataclass(slots=True)
class SentCycle:
    """What one response has shown: its finished items, and which of them are continuations."""

    items: tuple[Digest, ...] = ()
    continuations: dict[str, Digest] = field(default_factory=dict)


@dataclass(slots=True)
class Task:
    """One piece of work over all its requests, known by its first response id."""

    key: str
    scenario: Scenario
    original: tuple[tuple[Digest, ...], ...]  # for each item, the forms in which it may come back
    hex: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    base: int | None = None  # the cycle after which the client last wrote the whole conversation itself
    sent: dict[int, SentCycle] = field(default_factory=dict)
    runs: Counter[int] = field(default_factory=Counter)
    last_items: tuple[Item, ...] = ()
    first: int = 0
    follow_ups: int = 0
    refused: int = 0
    answered: Counter[str] = field(default_factory=Counter)

    def shown(self) -> Iterator[SentCycle]:
        """The cycles whose items a follow-up adds to the original conversation.

        Where the client wrote the conversation itself, that cycle's items are in it already, all but the
        continuations.
        """
        for number, cycle in self.sent.items():
            if self.base is None or number > self.base:
                yield cycle
            elif number == self.base:
                yield SentCycle(tuple(cycle.continuations.values()), cycle.continuations)

    def continuation(self, ticket_id: str) -> Digest | None:
        """The continuation item with this id, if this task was given it."""
        for cycle in self.sent.values():
            if ticket_id in cycle.continuations:
                return cycle.continuations[ticket_id]
        return None

    def facts(self) -> Item:
        """What tests want to know."""
        return {
            "scenario": self.scenario.name,
            "first": self.first,
            "follow_ups": self.follow_ups,
            "refused": self.refused,
            "answered": dict(self.answered),
        }


class Tickets:
    """All tables of one simulator."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Ticket] = OrderedDict()
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self.first = 0
        self.follow_ups = 0
        self.refused = 0

    def find(self, answer: Answer) -> Ticket | None:
        """The ticket that this answers."""
        ticket = self._open.get(answer.id)
        return ticket if ticket and ticket.kind == answer.kind else None

    def begin(self, key: str, scenario: Scenario, conversation: Conversation) -> Task:
        """A new task."""
        task = Task(key, scenario, original_forms(conversation))
        task.first = 1
        self.first += 1
        _keep(self._tasks, key, task, MAX_TASKS)
        return task

    def offer(self, task: Task, offer: Offer) -> None:
        """Write down what is being handed out."""
        mark = digest(offer.item)
        ticket = Ticket(offer.id, offer.kind, task, offer.cycle, mark, offer.step)
        _keep(self._open, offer.id, ticket, MAX_TICKETS)
        sent = task.sent.setdefault(offer.cycle, SentCycle())
        sent.items = (*(digest(item) for item in offer.before), mark)
        if offer.kind == "continuation":
            sent.continuations[offer.id] = mark
        following = task.scenario.cycle(offer.cycle + 1)
        if following.repeat_earlier:
            task.last_items = tuple(item for item in offer.before if item["type"] != "task_continue_request")

    def accept(self, task: Task, tickets: Iterable[Ticket]) -> None:
        """A follow-up that answers these was taken."""
        self.follow_ups += 1
        task.follow_ups += 1
        for ticket in tickets:
            ticket.answered = True
            task.answered[ticket.id] += 1

    def refuse(self, task: Task | None) -> None:
        """A request was turned down."""
        self.refused += 1
        if task:
            task.refused += 1

    def fault(self, key: str, faults: tuple[Fault, ...]) -> Fault | None:
        """The fault that this attempt meets; attempts with the same key are counted."""
        attempt = self._attempts.get(key, 0)
        _keep(self._attempts, key, attempt + 1, MAX_ATTEMPTS)
        for fault in faults:
            if fault.times is None or attempt < fault.times:
                return fault
            attempt -= fault.times
        return None

    def facts(self) -> Item:
        """What tests want to know."""
        return {
            "count": self.first + self.follow_ups,
            "first": self.first,
            "follow_ups": self.follow_ups,
            "refused": self.refused,
            "by_task": {key: task.facts() for key, task in self._tasks.items()},
        }


def original_forms(conversation: Conversation) -> tuple[tuple[Digest, ...], ...]:
    """For each item, what a follow-up may show in its place: itself, or any form of a plain string."""
    if conversation.plain:
        return (plain_forms(conversation.items[0]["content"]),)
    return tuple((mark,) for mark in conversation.digests)


def _keep(table: MutableMapping[str, Any], key: str, value: Any, limit: int) -> None:
    """Put it into the table, and let the oldest entry go where there are too many."""
    table[key] = value
    while len(table) > limit:
        del table[next(iter(table))]
