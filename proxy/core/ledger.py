"""What a task has come to so far: plain data, and a fold over the task's records.

The live path and a restart use the same fold (``event`` and ``note``), so that reading the log gives back
exactly what was there when it was written. Nothing here belongs to the cycle in flight: that is lost with
the process, and section 7 of the design says what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.core.dialects import responses as dialect
from proxy.core.dialects.responses import Kind, Seen
from proxy.core.messages import Note, Record
from proxy.core.splice import Editor, loads
from proxy.core.sse import Framer

# What lifts an intent mark: its cycle ended, upstream clearly refused it, it never left.
_LIFTS_MARK = frozenset({"cycle", "refused", "unsent"})

# Some endpoints refuse ids that are longer than this (public clients).
MAX_ID = 64


class Item(NamedTuple):
    """A finished output item. ``raw`` as upstream sent it; ``shown`` as the client's output has it."""

    raw: str
    shown: str
    cycle: int
    cursor: int | None
    type: str | None
    id: str | None
    call_id: str | None
    answers: str | None

    def body(self) -> dict[str, Any]:
        """The item as upstream sent it, parsed; kept as text because few are ever asked."""
        found = loads(self.raw.encode())
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str | None:
        """A call's tool."""
        name = self.body().get("name")
        return name if isinstance(name, str) else None

    @property
    def is_continuation(self) -> bool:
        """Whether this is an upstream's ask to go on: hidden from the client, needed in follow-ups."""
        return self.type == dialect.CONTINUE_REQUEST


def make_item(raw: str, shown: str, body: dict[str, Any], cycle: int, cursor: int | None) -> Item:
    """An item's record; ``body`` is ``raw``, parsed."""
    id_, call_id = body.get("id"), body.get("call_id")
    return Item(
        raw,
        shown,
        cycle,
        cursor,
        dialect.type_of(body),
        id_ if isinstance(id_, str) and id_ else None,
        call_id if isinstance(call_id, str) and call_id else None,
        dialect.answers(body),
    )


@dataclass(slots=True)
class Ledger:
    """The durable half of a task's state.

    ``cursor`` is the newest event's, -1 before the first; ``operation`` the one whose intent mark stands;
    ``cycles_before`` those of the tasks that this one continues.
    """

    cursor: int = -1
    cycle: int = 0
    cycles_before: int = 0
    segments: int = 0
    response_id: str | None = None
    firm_id: bool = False
    created_at: str | None = None
    model: str | None = None
    event_lines: bool | None = None
    openings: set[str] = field(default_factory=set)
    has_index: bool = False
    next_index: int = 0
    items: list[Item] = field(default_factory=list)
    by_id: dict[str, list[Item]] = field(default_factory=dict)
    by_call: dict[tuple[str | None, str], list[Item]] = field(default_factory=dict)
    open_calls: dict[tuple[str | None, str], Item] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    usages: list[tuple[int, dict[str, Any] | None]] = field(default_factory=list)
    outputs: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    step: int | None = None
    done: bytes | None = None
    operation: str | None = None
    operations: int = 0
    pending_raw: str | None = None

    # --- the fold ---------------------------------------------------------------------------------

    def fold(self, record: Record) -> None:
        """Take in one record, as read from the log."""
        if isinstance(record, Note):
            self.note(record)
            return
        framer = Framer(len(record.data) + 1)
        for frame in (*framer.feed(record.data), *framer.end()):
            seen = dialect.classify(frame)
            raw = Editor(frame.data.decode()).raw("item") if seen.kind is Kind.ITEM else None
            self.event(record.cursor, seen, raw, event_line=frame.event is not None)

    def event(self, cursor: int, seen: Seen, shown_item: str | None, *, event_line: bool) -> None:
        """Take in one event as the client sees it; ``shown_item`` is its item's text."""
        self.cursor = cursor
        kind, type_, body = seen
        if type_ is None:
            return
        if self.event_lines is None:
            self.event_lines = event_line
        step = body.get("step")
        if step is not None:
            self._step(dialect.step_of(seen))
        if kind is Kind.PART:
            item_id = body.get("item_id")
            if item_id.__class__ is str:
                self.used.add(item_id)
            index = body.get("output_index")
            if index.__class__ is int and (index >= self.next_index or not self.has_index):
                self._index(index)
            if self.response_id is None and "id" in body:
                self._identify(seen)
            if type_ == dialect.CALL_OUTPUT and isinstance(body.get("call_id"), str):
                self.outputs.add(body["call_id"])
            return
        self._identify(seen)
        if kind is Kind.OPENING:
            self.openings.add(type_)
        elif kind in (Kind.ADDED, Kind.ITEM):
            self._index(body.get("output_index"))
            item = body["item"]
            self._use(item)
            if kind is Kind.ITEM and shown_item is not None:
                raw, self.pending_raw = self.pending_raw or shown_item, None
                self.add(make_item(raw, shown_item, loads(raw.encode()), self.cycle, cursor))

    def note(self, note: Note) -> None:
        """Take in one note; kinds that say nothing of the stream are passed over."""
        kind = note.kind
        if kind == "done":
            self.done = self.done or note.data
        elif kind == "item":
            self.pending_raw = note.data.decode()
        elif kind == "hidden":
            self._hidden(note.data.decode())
        elif kind == "segment":
            self._segment(loads(note.data))
        elif kind == "request":
            self.cycles_before = loads(note.data).get("cycles_before", 0)
        elif kind == "intent":
            facts = loads(note.data)
            self.cycle, self.operation = facts["cycle"], facts["operation"]
            self.operations += 1
            self.answered.update(facts["answers"])
        elif kind in _LIFTS_MARK:
            self.operation = None

    def _hidden(self, text: str) -> None:
        """An item that the stream doesn't show: a continuation, or one that only a terminal lists."""
        facts = Editor(text)
        raw = facts.raw("item") or "{}"
        body = loads(raw.encode())
        shown = facts.raw("shown")
        if shown is not None:
            self._use(loads(shown.encode()))
        self.add(make_item(raw, shown or raw, body, self.cycle, None))
        self._step(body.get("step"))
        rest = loads(text.encode())
        if self.event_lines is None and rest.get("event_line") is not None:
            self.event_lines = rest["event_line"]
        if self.response_id is None:
            self.response_id = rest.get("response_id")
        if self.segments == 0 and rest.get("index"):
            self.has_index = True

    def _segment(self, facts: dict[str, Any]) -> None:
        """One response of upstream is over; what its ending told and the stream doesn't."""
        self.segments += 1
        self.usages.append((self.cycle, facts.get("usage")))
        self.response_id = self.response_id or facts.get("response_id")
        self.created_at = self.created_at or facts.get("created_at")
        self.model = self.model or facts.get("model")
        self.next_index = max(self.next_index, sum(1 for item in self.items if not item.is_continuation))

    def add(self, item: Item) -> None:
        """A finished item; by_id and by_call find it when its id comes again."""
        self.items.append(item)
        if item.id is not None:
            self.by_id.setdefault(item.id, []).append(item)
            self.used.add(item.id)
        if item.call_id is not None:
            self.by_call.setdefault((item.type, item.call_id), []).append(item)
            self.used.add(item.call_id)
            base = dialect.answered_type(item.type)
            if base is None:
                self.open_calls[item.type, item.call_id] = item
            else:
                self.open_calls.pop((base, item.call_id), None)
        if item.answers is not None:
            self.outputs.add(item.answers)

    def _use(self, item: dict[str, Any]) -> None:
        """The ids that an item has in the stream are taken."""
        self.used.update(item[key] for key in ("id", "call_id") if isinstance(item.get(key), str))

    def _step(self, step: object) -> None:
        if type(step) is int and step >= 0 and (self.step is None or step > self.step):
            self.step = step

    def _index(self, index: object) -> None:
        if type(index) is int:
            self.has_index = self.has_index or self.segments == 0
            self.next_index = max(self.next_index, index + 1)

    def _identify(self, seen: Seen) -> None:
        if self.firm_id:
            return
        found, firm = dialect.response_id(seen)
        if found is not None and (firm or self.response_id is None):
            self.response_id, self.firm_id = found, firm
        response = seen.response
        if response is not None:
            created = response.get("created_at")
            if self.created_at is None:
                self.created_at = dialect.time_of(created)
            if self.model is None and isinstance(response.get("model"), str):
                self.model = response["model"]

    # --- what others ask --------------------------------------------------------------------------

    def fresh(self, taken: str) -> str:
        """``taken`` with the first free ``_2``, ``_3``, …, at most 64 characters; counts as used."""
        number = 2
        while True:
            suffix = f"_{number}"
            fresh = taken[: MAX_ID - len(suffix)] + suffix
            if fresh not in self.used:
                self.used.add(fresh)
                return fresh
            number += 1

    def output(self) -> list[str]:
        """The merged output as the client sees it: every item's text but the continuations'."""
        return [item.shown for item in self.items if not item.is_continuation]

    def usage(self) -> tuple[dict[str, Any] | None, str | None]:
        """The sum over the cycles that reported usage, and ``"1 of 2"`` where some didn't."""
        total: dict[str, Any] | None = None
        for _, usage in self.usages:
            if usage is not None:
                total = usage if total is None else _sum(total, usage)
        cycles = {cycle for cycle, _ in self.usages}
        # What stands around a cycle's inner responses reports none and takes nothing from theirs.
        spoke = {cycle for cycle, usage in self.usages if usage is not None}
        if total is None or spoke == cycles:
            return total, None
        return total, f"{len(spoke)} of {len(cycles)}"

    def open_call(self, type_: str | None, call_id: str) -> Item | None:
        """The newest call under this id that an output of this type would answer."""
        base = dialect.answered_type(type_)
        return self.open_calls.get((base, call_id)) if base is not None else None

    def unanswered(self) -> list[Item]:
        """Items whose id or call id no later item answers, nor an output that was an event of its own."""
        found: list[Item] = []
        answered = self.outputs.difference(item.answers for item in self.items)
        for item in reversed(self.items):
            if item.answers is not None:
                answered.add(item.answers)
            elif item.id not in answered and item.call_id not in answered:
                found.append(item)
        return found[::-1]

    def uncertain(self) -> list[Item]:
        """Calls without an output: called, and nobody can say what became of it."""
        return [item for item in self.unanswered() if item.type == dialect.CALL and item.call_id is not None]


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    total = dict(one)
    for key, value in other.items():
        held = total.get(key)
        if isinstance(value, dict) and isinstance(held, dict):
            total[key] = _sum(held, value)
        elif _is_count(value) and _is_count(held):
            total[key] = held + value
        elif held is None:
            total[key] = value
    return total


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def rebuilt(records: list[Record]) -> Ledger:
    """The ledger that these records make."""
    ledger = Ledger()
    for record in records:
        ledger.fold(record)
    return ledger
