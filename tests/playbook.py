"""Plays the shell to a task, with no I/O: tells it what happens, carries out what it orders, keeps the log.

::

    play = Playbook(spec_of(request))
    play.start().opened().feed(cycle_1).end()      # the follow-up is ordered: play.bodies[1]
    play.opened().feed(cycle_2).end()
    assert play.stream == expected and play.task.phase == "completed"

Whatever a test does, the playbook holds the task to its contract (``messages.py``): one exchange at a time,
each behind an intent mark that is on the disk, cursors without a gap, nothing after the end, and a log that
folds to the ledger that the task has.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.core import messages as m
from proxy.core.dialects import followup
from proxy.core.ledger import rebuilt
from proxy.core.rules import Limits
from proxy.core.spec import Spec
from proxy.core.splice import loads
from proxy.core.task import Task

TASK_ID = "task_0123456789abcdef0123456789abcdef"
NOW = 1_760_000_000.0
RESET = "the connection was reset"


def spec_of(request: bytes, *, replay: str = "all_items", key: str | None = None, **more: Any) -> Spec:
    """The spec of a task that this request starts; ``more`` are further fields of ``Spec``."""
    conversation = followup.read(loads(request))
    form = (replay, key or conversation.key)
    return Spec(TASK_ID, request, conversation, form=form, **more)


class Playbook:
    """One task and the little world around it. Methods that tell the task something return ``self``."""

    def __init__(self, spec: Spec) -> None:
        self.task = Task(spec)
        self.now = NOW
        self.records: list[m.Record] = []
        self.summary: m.Summary | None = None
        self.bodies: list[bytes] = []
        self.operations: list[str] = []
        self.effects: list[m.Effect] = []
        self.told: list[m.Tell] = []
        self.learned: list[m.Learned] = []
        self.timers: dict[str, m.SetTimer] = {}
        self.exchange = "none"
        self.finished = False

    # --- what happens -------------------------------------------------------------------------------

    def tell(self, happened: m.Input) -> Playbook:
        """Tell the task one thing and carry out what it orders."""
        assert not self.finished or isinstance(happened, m.CancelRequested | m.PauseRequested)
        self.effects = self.task.handle(happened)
        for i, effect in enumerate(self.effects):
            self._carry_out(effect, self.effects[:i])
        return self

    def start(self) -> Playbook:
        """The request may go out."""
        return self.tell(m.Started(self.now))

    def opened(self, request_id: str | None = None) -> Playbook:
        """Upstream answers with an event stream."""
        self._answered("open")
        return self.tell(m.Opened(self.now, request_id))

    def refused(self, status: int, body: bytes | str = b"", **headers: str) -> Playbook:
        """Upstream answers with something else; ``retry_after="3"`` is a header."""
        self._answered("none")
        raw = body.encode() if isinstance(body, str) else body
        named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        return self.tell(m.Refused(self.now, status, named, raw))

    def broke(self, *, sent: bool = True, message: str = RESET) -> Playbook:
        """The exchange breaks, before or after its head."""
        assert self.exchange in ("asked", "open")
        self.exchange = "none"
        return self.tell(m.ExchangeFailed(self.now, sent, message))

    def feed(self, *chunks: bytes) -> Playbook:
        """These bytes come, chunk by chunk, as long as the task reads."""
        for chunk in chunks:
            if self.exchange == "open":
                self.tell(m.BytesReceived(chunk, self.now))
        return self

    def end(self, how: str = "fin") -> Playbook:
        """The body ends (``fin``), is cut (``cut``), or stays open until the grace is over (``open``)."""
        if self.exchange != "open":
            return self
        if how == "cut":
            return self.broke()
        if how == "open":
            return self.fire("grace")
        assert how == "fin"
        self.exchange = "none"
        return self.tell(m.BodyEnded(self.now))

    def fire(self, name: m.TimerName) -> Playbook:
        """A timer that was set runs out."""
        self.now += self.timers.pop(name).seconds
        return self.tell(m.TimerFired(self.now, name))

    def pause(self, reason: str | None = None) -> Playbook:
        """Somebody pauses the task."""
        return self.tell(m.PauseRequested(self.now, reason=reason))

    def resume(self) -> Playbook:
        """Somebody lifts the pause."""
        return self.tell(m.ResumeRequested(self.now))

    def cancel(self) -> Playbook:
        """Somebody stops the task for good."""
        return self.tell(m.CancelRequested(self.now))

    # --- what came of it ----------------------------------------------------------------------------

    @property
    def events(self) -> list[bytes]:
        """The events' bytes in the order of their cursors."""
        return [record.data for record in self.records if isinstance(record, m.Event)]

    @property
    def stream(self) -> bytes:
        """What a reader has got so far, ``[DONE]`` included once the stream is over."""
        over = self.summary is not None and not self.summary.open
        return b"".join(self.events) + ((self.summary.done or b"") if over and self.summary else b"")

    @property
    def last(self) -> Any:
        """The newest event's data, parsed."""
        return json.loads(self.events[-1].partition(b"data:")[2])

    def notes(self, kind: str) -> list[Any]:
        """The notes of one kind, parsed."""
        return [json.loads(r.data) for r in self.records if isinstance(r, m.Note) and r.kind == kind]

    @property
    def timeless(self) -> list[m.Record]:
        """The records, but for the times in them."""
        return [_timeless(record) for record in self.records]

    # --- the contract -------------------------------------------------------------------------------

    def _answered(self, now: str) -> None:
        assert self.exchange == "asked", f"nobody asked upstream for anything: {self.exchange}"
        self.exchange = now

    def _carry_out(self, effect: m.Effect, before: list[m.Effect]) -> None:
        assert not self.finished or not isinstance(effect, m.OpenExchange | m.SetTimer)
        match effect:
            case m.Append(records, after, summary):
                assert after == len(self.events) - 1, "the batch goes where the log ends"
                self._append(records, summary)
            case m.OpenExchange(operation, cycle, body):
                self._open(operation, cycle, body, before)
            case m.CloseExchange():
                self.exchange = "none"
            case m.SetTimer(name, seconds):
                assert seconds >= 0
                self.timers[name] = effect
            case m.CancelTimer(name):
                self.timers.pop(name, None)
            case m.Learned():
                self.learned.append(effect)
            case m.Tell():
                self.told.append(effect)
            case m.Finish():
                self._finish()

    def _append(self, records: Iterable[m.Record], summary: m.Summary | None) -> None:
        for record in records:
            if isinstance(record, m.Event):
                assert record.cursor == len(self.events), "a cursor is left out or given twice"
            self.records.append(record)
        self.summary = summary or self.summary

    def _open(self, operation: str, cycle: int, body: bytes, before: list[m.Effect]) -> None:
        """A request goes out: only behind its intent mark, and never while another one is out."""
        assert self.exchange == "none", "one exchange at a time"
        assert operation not in self.operations, "an operation id names one sending"
        assert isinstance(before[-1], m.Append)
        assert before[-1].sync, "the mark must be on the disk"
        mark = self.notes("intent")[-1]
        assert (mark["operation"], mark["cycle"]) == (operation, cycle)
        assert mark["digest"] == hashlib.sha256(body).hexdigest()
        assert mark["why"]
        assert self.task.ledger.operation == operation, "the mark stands"
        self.exchange = "asked"
        self.operations.append(operation)
        self.bodies.append(body)

    def _finish(self) -> None:
        assert self.exchange == "none", "the exchange is closed"
        assert "retry" not in self.timers
        assert "grace" not in self.timers
        self.finished = True

    def check(self) -> None:
        """What must hold whenever the task has nothing more to write."""
        assert self.summary is not None
        assert self.summary.state == self.task.phase
        assert self.summary.reason == self.task.reason
        assert self.summary.open == self.task.open
        assert rebuilt(self.records) == self.task.ledger


def _timeless(record: m.Record) -> m.Record:
    if isinstance(record, m.Event) or b'"at":' not in record.data:
        return record
    facts = json.loads(record.data)
    facts.pop("at", None)
    return m.Note(record.kind, json.dumps(facts).encode())


# --- stories --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Story:
    """One folder of ``fixtures``: a request, upstream's bodies, and what the client must get."""

    name: str
    request: bytes = field(repr=False)
    cycles: tuple[bytes, ...] = field(repr=False)
    expected: bytes = field(repr=False)
    follow_ups: dict[int, bytes] = field(repr=False)
    state: str
    reason: str | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Story:
        """The story in this folder; a member of ``story.toml`` that nobody knows is an error."""
        facts = tomllib.loads((folder / "story.toml").read_text())
        assert facts.pop("shows").endswith(".")
        numbers = range(1, len(list(folder.glob("cycle-*.sse"))) + 1)
        return cls(
            name=folder.name,
            request=(folder / "request.json").read_bytes(),
            cycles=tuple((folder / f"cycle-{n}.sse").read_bytes() for n in numbers),
            expected=(folder / "expected.sse").read_bytes(),
            follow_ups={
                int(path.stem.rpartition("-")[2]): path.read_bytes()
                for path in folder.glob("follow-up-*.json")
            },
            **facts,
        )

    def play(self, cut: Cut) -> Playbook:
        """Play it to its end, each body cut into chunks by ``cut``."""
        play = Playbook(spec_of(self.request, limits=Limits(**self.limits), **self.spec)).start()
        for number, body in enumerate(self.cycles, 1):
            assert play.exchange == "asked", f"no request opens cycle {number}"
            play.opened().feed(*cut(body)).end(self.ends.get(str(number), "fin"))
        return play

    def check(self, play: Playbook) -> None:
        """The stream, the bodies, the state."""
        assert play.stream == self.expected
        assert len(play.bodies) == len(self.cycles)
        for number, body in self.follow_ups.items():
            assert play.bodies[number - 1] == body
        assert (play.task.phase, play.task.reason) == (self.state, self.reason)
        assert play.finished
        play.check()


class Cut:
    """A way to cut a body into chunks."""

    def __init__(self, *, size: int | None = None, at: Iterable[float] = ()) -> None:
        self.size, self.at = size, tuple(at)

    def __call__(self, body: bytes) -> list[bytes]:
        """The chunks: of ``size`` bytes, or cut at these fractions of the body."""
        step = self.size or max(1, len(body))
        places = {*range(step, len(body), step), *(int(part * len(body)) for part in self.at)}
        bounds = [0, *sorted(places - {0}), len(body)]
        return [body[a:b] for a, b in itertools.pairwise(bounds)]
