"""What the core is told (inputs: facts), what it orders (effects), and what is kept (records).

The contract with the shell, five steps for each input:

1. The shell makes one input from what happened and calls ``Task.handle(input)``.
2. It carries out the effects in their order, and decides nothing.
3. ``Append`` is awaited before the next chunk is read: nothing reaches a client before it is logged.
4. ``OpenExchange`` starts one request; exactly one of ``Opened``, ``Refused`` or ``ExchangeFailed``
   answers it, and after ``Opened`` any number of ``BytesReceived``, then ``BodyEnded`` or
   ``ExchangeFailed``, unless ``CloseExchange`` came first: then nothing more is told of it.
5. A timer that was cancelled or set anew is never told of.

Times are seconds since the epoch; bytes are as on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# --- records: what the log keeps, in one order -------------------------------------------------------


class Event(NamedTuple):
    """A frame under its cursor, as every reader gets it."""

    cursor: int
    data: bytes


class Note(NamedTuple):
    """A record without a cursor; ``data`` is JSON unless the kind says otherwise."""

    kind: str
    data: bytes


Record = Event | Note

Phase = Literal[
    "queued",
    "running",
    "continuing",
    "paused",
    "held",
    "input_required",
    "needs_review",
    "completed",
    "failed",
    "incomplete",
    "cancelled",
    "declined",
]


class Summary(NamedTuple):
    """The little that lists and readers need to know of a task without reading its records.

    ``open``: readers wait for more; false once the stream has its ending (also for ``input_required``
    with its stream closed). ``done``: the ``[DONE]`` frame's bytes if this task ends with one.
    ``required``: ids of the open required actions. ``continues`` and ``continued_by`` link the tasks of one
    piece of work that waited for an answer in between.
    """

    state: Phase
    open: bool
    reason: str | None = None
    response_id: str | None = None
    cycles: int = 1
    step: int | None = None
    done: bytes | None = None
    required: tuple[str, ...] = ()
    continues: str | None = None
    continued_by: str | None = None


# --- inputs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The request has been read and may go out."""

    now: float


@dataclass(frozen=True, slots=True)
class Opened:
    """Upstream answered 2xx with an event stream."""

    now: float
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Upstream answered with anything but a 2xx event stream; ``body`` is bounded by the shell."""

    now: float
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class BytesReceived(NamedTuple):
    """One read's worth of the body: the one input that comes often, so the one that is cheap to make."""

    data: bytes
    now: float


@dataclass(frozen=True, slots=True)
class BodyEnded:
    """The body ended properly."""

    now: float


@dataclass(frozen=True, slots=True)
class ExchangeFailed:
    """The exchange broke. ``sent``: whether upstream can have seen the request."""

    now: float
    sent: bool
    message: str
    silence: bool = False


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that the core had set."""

    now: float
    name: TimerName


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody stops the task for good."""

    now: float
    actor: str = "owner"


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Hold the next follow-up."""

    now: float
    actor: str = "owner"
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Go on."""

    now: float
    actor: str = "owner"


Input = (
    Started
    | Opened
    | Refused
    | BytesReceived
    | BodyEnded
    | ExchangeFailed
    | TimerFired
    | CancelRequested
    | PauseRequested
    | ResumeRequested
)

TimerName = Literal["grace", "retry"]
Level = Literal["debug", "info", "warning", "error"]

# --- effects ------------------------------------------------------------------------------------------


class Append(NamedTuple):
    """Write these records in one batch: the one effect that comes often, so the one that is cheap to make.

    ``after`` is the newest event's cursor before them. ``sync``: they must be on the disk before a later
    effect.
    """

    records: tuple[Record, ...]
    after: int
    summary: Summary | None = None
    sync: bool = False


@dataclass(frozen=True, slots=True)
class OpenExchange:
    """Send one request. ``body`` is whole; headers are the shell's, from the client's request."""

    operation: str
    cycle: int
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CloseExchange:
    """Stop reading; nothing more of this exchange is told."""


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Fire once after ``seconds``, plus up to ``jitter`` seconds of the shell's choosing."""

    name: TimerName
    seconds: float
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Forget this timer."""

    name: TimerName


@dataclass(frozen=True, slots=True)
class Learned:
    """A follow-up of this form was accepted (or not): worth knowing for this endpoint's next tasks."""

    replay: str
    key: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Something for the program's own log, once."""

    level: Level
    event: str
    facts: dict[str, object]


@dataclass(frozen=True, slots=True)
class Finish:
    """Nobody need run this task any longer (ended, held, or waiting for a person)."""


Effect = Append | OpenExchange | CloseExchange | SetTimer | CancelTimer | Learned | Tell | Finish
