"""The state machine of a task: one table, ``handle(input) -> effects``.

Rules:

1. Everything that changes a task's state is in this file; it is changed by ``handle`` alone.
2. The table says which inputs a phase takes and which phases may follow. A pair that isn't in it is an
   error, never nothing.
3. State is plain data in two halves. The *ledger* is what the log's records fold to, so a restart has it
   by reading; the rest belongs to the cycle in flight and is lost with the process on purpose.
4. A follow-up goes out only behind an intent mark that is on the disk, and is never sent again once
   upstream can have seen it: an outcome that is unknown ends in ``needs_review``.

How a task moves::

    queued ──Started──> running ──continuation──> continuing ──Opened──> running ──ending──> completed
                          │  ▲                        │  ▲                      failed, incomplete,
                 (pause)  ▼  │ (resume)        (wait) └──┘ retry                input_required,
                         paused                                                 needs_review, held
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from proxy.core import messages as m
from proxy.core import refusals, words
from proxy.core.dialects import followup
from proxy.core.dialects.responses import Action, action_of
from proxy.core.ledger import Ledger
from proxy.core.merge import own_event
from proxy.core.messages import Effect, Event, Input, Note, Phase, Record, Summary
from proxy.core.refusals import Refusal
from proxy.core.rules import judge
from proxy.core.spec import Spec
from proxy.core.splice import dumps
from proxy.core.sse import Framer
from proxy.core.stitch import Ending, Stitch
from proxy.errors import IllegalMove

# --- the table ----------------------------------------------------------------------------------------

_Row = dict[type, frozenset[Phase]]

_STREAMING: frozenset[Phase] = frozenset({"running", "continuing"})
_ENDED: frozenset[Phase] = frozenset({"completed", "failed", "incomplete", "input_required", "needs_review"})
# What a pause covers: it comes back on resume. Any other end is the end, paused or not.
_COVERED: frozenset[Phase] = frozenset({"held", "input_required", "needs_review"})
_RESTING: frozenset[Phase] = frozenset({"held", "input_required", "needs_review", "failed"})
_CYCLE: _Row = {
    m.BytesReceived: _STREAMING | _ENDED,
    m.BodyEnded: _STREAMING | _ENDED,
    m.ExchangeFailed: _STREAMING | _ENDED,
    m.TimerFired: _STREAMING | _ENDED,
}
_ANSWERS: _Row = {
    m.Opened: frozenset({"running"}),
    m.Refused: frozenset({"continuing", "failed", "needs_review", "held"}),
    m.ExchangeFailed: frozenset({"continuing", "failed", "needs_review"}),
    m.TimerFired: frozenset({"continuing", "failed"}),
}
_CANCEL: _Row = {m.CancelRequested: frozenset({"cancelled"})}
_PAUSE: _Row = {m.PauseRequested: frozenset({"paused"})}

TABLE: dict[Phase, _Row] = {
    "queued": {m.Started: frozenset({"running"}), **_CANCEL},
    "running": {m.Opened: frozenset({"running"}), **_CYCLE, **_CANCEL, **_PAUSE},
    "continuing": {**_ANSWERS, **_CANCEL, **_PAUSE},
    # What runs beneath a pause goes on to the end of its cycle; only the next follow-up is withheld.
    "paused": {
        m.Opened: frozenset({"paused"}),
        m.Refused: frozenset({"paused", "failed"}),
        m.BytesReceived: _ENDED - _COVERED | {"paused"},
        m.BodyEnded: _ENDED - _COVERED | {"paused"},
        m.ExchangeFailed: _ENDED - _COVERED | {"paused"},
        m.TimerFired: _ENDED - _COVERED | {"paused"},
        m.ResumeRequested: _STREAMING | _RESTING,
        **_CANCEL,
        **_PAUSE,
    },
    "held": {**_CANCEL, **_PAUSE},
    "input_required": {**_CANCEL, **_PAUSE},
    "needs_review": {**_CANCEL, **_PAUSE},
    "completed": {},
    "failed": {},
    "incomplete": {},
    "cancelled": {},
    "declined": {},
}

# Waits between tries where upstream named none: doubled each time, from one second to half a minute.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0


class Task:
    """One task. The shell calls ``handle`` and carries out what it returns, in order."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.ledger = Ledger()
        self.phase: Phase = "queued"
        self.beneath: Phase = "queued"
        self.reason: str | None = None
        self.reason_beneath: str | None = None
        self.actions: tuple[Action, ...] = ()
        self.form = spec.form
        self.proven = spec.proven
        self.key_tried = False
        self.withheld = False
        self.attempts = 0
        self.waiting_since: float | None = None
        self.refusal: Refusal | None = None
        self.framer = Framer(spec.max_frame)
        self.stitch: Stitch | None = None
        self.logged = 0
        self._out: list[Record] = []
        self._written = -1
        self._effects: list[Effect] = []
        self._grace = False
        self._summary: Summary | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.Started: self._started,
            m.Opened: self._opened,
            m.Refused: self._refused,
            m.BytesReceived: self._bytes,
            m.BodyEnded: self._body_ended,
            m.ExchangeFailed: self._exchange_failed,
            m.TimerFired: self._timer,
            m.CancelRequested: self._cancel,
            m.PauseRequested: self._pause,
            m.ResumeRequested: self._resume,
        }

    def __repr__(self) -> str:
        return (
            f"<Task {self.phase} cycle={self.ledger.cycle} cursor={self.ledger.cursor} {self.spec.task_id}>"
        )

    def handle(self, happened: Input) -> list[Effect]:
        """Take one input; ``IllegalMove`` if the table has no place for it."""
        before, kind = self.phase, type(happened)
        after = TABLE[before].get(kind)
        if after is None:
            raise IllegalMove(f"{before} takes no {kind.__name__}")
        self._effects = []
        self._handlers[kind](happened)
        if self.phase not in after:
            raise IllegalMove(f"{before} may not become {self.phase} by {kind.__name__}")
        return self._effects

    @property
    def open(self) -> bool:
        """Whether readers have more to come; a task may rest with its stream over."""
        return (self.beneath if self.phase == "paused" else self.phase) in ("queued", *_STREAMING)

    def summary(self) -> Summary:
        """What lists and readers need to know."""
        ledger = self.ledger
        return Summary(
            state=self.phase,
            open=self.open,
            reason=self.reason,
            response_id=ledger.response_id,
            cycles=ledger.cycle,
            step=ledger.step,
            done=ledger.done,
            required=tuple(action.id for action in self.actions),
            continues=self.spec.carried.continues,
        )

    # --- a cycle ----------------------------------------------------------------------------------

    def _started(self, happened: m.Started) -> None:
        self.phase = "running"
        self._record(Note("request", self.spec.request_note))
        body = followup.first_body(self.spec.body, force=self.spec.force)
        carried = self.spec.carried
        why = "started" if carried.continues is None else f"started, continues {carried.continues}"
        self._send(happened.now, body, cycle=1, answers=list(carried.continued), why=why)

    def _opened(self, happened: m.Opened) -> None:
        self._become("running")
        self.framer = Framer(self.spec.max_frame)
        declared, authorization = self.spec.conversation.declared, self.spec.authorization
        self.stitch = Stitch(self.ledger, self._out, declared, authorization)
        self.attempts, self.waiting_since, self.refusal = 0, None, None
        if self.ledger.cycle > 1 and not self.proven and followup.proves(self.ledger.items, self.form[0]):
            self.proven = True
            self._effects.append(m.Learned(*self.form))
        self._note("opened", cycle=self.ledger.cycle, at=happened.now, request_id=happened.request_id)
        self._write()

    def _bytes(self, happened: m.BytesReceived) -> None:
        stitch = self._cycle()
        frames = self.framer.feed(happened.data)
        for frame in frames:
            stitch.feed(frame)
        if stitch.over:
            self._end_cycle(happened.now, close=True)
        elif self.framer.too_large:
            self._abandon()
            self._fail(happened.now, "frame_too_large", words.frame_too_large(self.spec.max_frame))
        elif self.logged > self.spec.max_log:
            self._abandon()
            self._fail(happened.now, "log_full", words.log_full(self.spec.max_log))
        else:
            if frames and stitch.waiting:
                self._grace = True
                self._effects.append(m.SetTimer("grace", self.spec.seam_grace))
            elif frames:
                self._no_grace()
            if self._out:
                self._write()

    def _body_ended(self, happened: m.BodyEnded) -> None:
        self._end_cycle(happened.now, close=False)

    def _exchange_failed(self, happened: m.ExchangeFailed) -> None:
        if self.stitch is not None:
            # An ending that stood before the connection broke is an ending all the same.
            self._end_cycle(happened.now, close=False, why=happened.message)
            return
        self.refusal = None  # an earlier one is not what this failure is about
        if happened.sent:
            self._unknown(happened.now, happened.message)
            return
        self._note("unsent", operation=self.ledger.operation, message=happened.message, at=happened.now)
        if self.ledger.cycle <= 1:
            self._fail(happened.now, "upstream_unreachable", words.unreachable(happened.message))
        else:
            self._wait(happened.now, None, happened.message)

    def _timer(self, happened: m.TimerFired) -> None:
        if happened.name == "grace":
            self._grace = False
            self._end_cycle(happened.now, close=True)
        else:
            self._follow_up(happened.now, words.retry(self.attempts, self.refusal))

    def _end_cycle(self, now: float, *, close: bool, why: str = words.NO_ENDING) -> None:
        stitch = self._cycle()
        for frame in self.framer.end():
            stitch.feed(frame)
        ending = stitch.finish()
        self._close_cycle(close=close)
        if stitch.opaque:
            facts: dict[str, object] = {"cycle": self.ledger.cycle, "frames": stitch.opaque}
            self._effects.append(m.Tell("warning", "frames that are not JSON passed on unchanged", facts))
        if ending.kind == "none":
            stitch.release(terminal=False)
            self._unknown(now, why)
            return
        self._note("cycle", cycle=self.ledger.cycle, ending=ending.kind, at=now)
        if ending.kind == "failed":
            self._finish("failed", "upstream_error")
        elif ending.kind == "continue":
            self._continue(now, stitch)
        else:
            self._complete(now, ending, stitch)

    def _complete(self, now: float, ending: Ending, stitch: Stitch) -> None:
        """An ending that needs no follow-up: upstream's terminal event is the task's."""
        self.actions = self._open_actions() if ending.kind != "incomplete" else ()
        shown = stitch.release(terminal=True)
        if self.actions:
            if not shown:
                self._own("response.completed", now)
            self._record(Note("actions", dumps([list(action) for action in self.actions]).encode()))
            self._finish("input_required", self.actions[0].kind)
        else:
            self._finish("completed" if ending.kind == "completed" else "incomplete", ending.reason)

    def _continue(self, now: float, stitch: Stitch) -> None:
        ids = [item.id for item in stitch.continuations]
        if self._open_actions():
            # legato never answers for a person, not even where upstream would go on.
            self._complete(now, Ending("continue"), stitch)
            return
        stitch.release(terminal=False)
        if None in ids:
            self._fail(now, "bad_continuation", words.BAD_CONTINUATION)
        elif self.ledger.answered.intersection(ids):
            self._stop(now, "repeated_continuation", {})
        elif (verdict := judge(self.ledger, self.spec.limits)) is not None:
            self._stop(now, verdict.rule, {"limit": verdict.limit, "used": verdict.used})
        else:
            self._become("continuing")
            self._follow_up(now, words.step(self.ledger))

    # --- follow-ups -------------------------------------------------------------------------------

    def _follow_up(self, now: float, why: str) -> None:
        """Send the answer to the open continuations, unless a pause withholds it."""
        if self.phase == "paused":
            self.withheld = True
            self._note("withheld", at=now, reason=self.reason)
            self._write()
            return
        spec, (replay, key) = self.spec, self.form
        asked = [item for item in self.ledger.items if item.is_continuation]
        newest = max(item.cycle for item in asked)
        body = followup.follow_up(
            spec.body,
            spec.conversation.key,
            key,
            self.ledger.items,
            replay,
            long_task=spec.force or spec.conversation.long_task is True,
        )
        if spec.body_limit is not None and len(body) > spec.body_limit:
            self._smaller(now, words.over_limit(len(body), spec.body_limit))
            return
        answers = [item.id or "" for item in asked if item.cycle == newest]
        self._send(now, body, cycle=newest + 1, answers=answers, why=why)

    def _send(self, now: float, body: bytes, *, cycle: int, answers: list[str], why: str) -> None:
        """One request, behind its intent mark."""
        operation = f"op_{self.spec.task_id.removeprefix('task_')}_{self.ledger.operations + 1}"
        self._note(
            "intent",
            operation=operation,
            cycle=cycle,
            answers=answers,
            digest=hashlib.sha256(body).hexdigest(),
            form=list(self.form),
            why=why,
            at=now,
        )
        self._write(sync=True)
        self._effects.append(m.OpenExchange(operation, cycle, body))

    def _refused(self, happened: m.Refused) -> None:
        refusal = self.refusal = refusals.read(happened)
        now, verdict = happened.now, refusal.verdict
        if verdict == "unknown":
            self._unknown(now, words.status(refusal))
            return
        self._note("refused", operation=self.ledger.operation, at=now, **refusal.facts())
        if verdict == "wait":
            self._wait(now, refusal.wait, words.status(refusal))
        elif verdict == "smaller":
            self._smaller(now, words.status(refusal))
        elif verdict == "credential":
            self._own_failure(now, "credential_expired", words.credential(refusal))
            self._finish("held", "credential_expired")
        elif verdict == "form" and self.spec.auto and not self.proven:
            self._other_form(now, refusal)
        else:
            self._fail(now, "upstream_refused", words.refused(refusal))

    def _other_form(self, now: float, refusal: Refusal) -> None:
        """A 400: another form of the follow-up, if its text says that the form is what is wrong."""
        form = followup.next_form(*self.form, refusal.message, key_tried=self.key_tried)
        if form is None:
            self._fail(now, "upstream_refused", words.refused(refusal))
            return
        self.key_tried = self.key_tried or form[1] != self.form[1]
        self.form = form
        self._follow_up(now, f"{words.status(refusal)}; trying {form[0]} under {form[1]}")

    def _smaller(self, now: float, why: str) -> None:
        form = followup.smaller(*self.form) if self.spec.auto else None
        if form is None:
            self._fail(now, "follow_up_too_large", words.too_large(why))
            return
        self.form = form
        self._follow_up(now, f"{why}; trying {form[0]}")

    def _wait(self, now: float, told: float | None, why: str) -> None:
        """Wait and send again what was not accepted, within the budget."""
        since = self.waiting_since = now if self.waiting_since is None else self.waiting_since
        seconds = min(_LONGEST_WAIT, _FIRST_WAIT * 2**self.attempts) if told is None else told
        self.attempts += 1
        if now + seconds <= since + self.spec.retry_budget:
            self._write()
            self._effects.append(m.SetTimer("retry", seconds, seconds / 2 if told is None else 0.0))
            return
        code = "upstream_unreachable" if self.refusal is None else "upstream_refused"
        self._fail(now, code, words.gave_up(why, self.attempts, self.spec.retry_budget))

    # --- people -----------------------------------------------------------------------------------

    def _cancel(self, happened: m.CancelRequested) -> None:
        was_open = self.open
        self._abandon()
        self._effects.append(m.CancelTimer("retry"))
        if was_open:
            self._own("response.incomplete", happened.now, reason="cancelled")
        self._finish("cancelled", f"cancelled by {happened.actor}")

    def _pause(self, happened: m.PauseRequested) -> None:
        if self.phase != "paused":
            self.beneath, self.reason_beneath = self.phase, self.reason
            self.phase, self.reason = "paused", happened.reason
            self._note("state", state=self.phase, reason=self.reason, actor=happened.actor, at=happened.now)
            self._write()

    def _resume(self, happened: m.ResumeRequested) -> None:
        self.phase, self.reason = self.beneath, self.reason_beneath
        self._note("state", state=self.phase, reason=self.reason, actor=happened.actor, at=happened.now)
        if self.withheld:
            self.withheld = False
            self._follow_up(happened.now, f"resumed by {happened.actor}")
        else:
            self._write()

    # --- endings ----------------------------------------------------------------------------------

    def _unknown(self, now: float, why: str) -> None:
        """Nobody can say what upstream did. Nothing is sent again."""
        if self.ledger.cycle <= 1:
            self._fail(now, "upstream_incomplete", words.incomplete(why))
            return
        self._own_failure(now, "continuation_unknown", words.unknown(why, self.ledger))
        self._finish("needs_review", "continuation_unknown")

    def _fail(self, now: float, code: str, message: str) -> None:
        self._own_failure(now, code, message)
        self._finish("failed", code)

    def _stop(self, now: float, rule: str, facts: dict[str, Any]) -> None:
        """A rule stops the task at this seam."""
        report = {"reason": rule, "stopped_at": words.place(self.ledger), **facts}
        self._own("response.incomplete", now, reason=rule, report=report)
        self._finish("incomplete", rule)

    def _own_failure(self, now: float, code: str, message: str) -> None:
        error: dict[str, Any] = {"code": code, "message": message}
        if self.refusal is not None:
            error["upstream"] = self.refusal.facts()
        self._own("response.failed", now, error=error)

    def _own(self, type_: str, now: float, **parts: Any) -> None:
        """An event of legato's own, under the next cursor."""
        data = own_event(self.ledger, type_, response_id=self.spec.own_response_id, now=now, **parts)
        self._record(Event(self.ledger.cursor + 1, data))

    def _finish(self, phase: Phase, reason: str | None) -> None:
        if self.phase == "paused" and phase in _COVERED:
            self.beneath, self.reason_beneath = phase, reason
        else:
            self.phase, self.reason = phase, reason
        self._note("state", state=phase, reason=reason)
        self._write()
        level: m.Level = "info" if phase in ("completed", "cancelled", "input_required") else "warning"
        facts = {"state": phase, "reason": reason, **words.place(self.ledger)}
        if self.refusal is not None:
            facts["upstream"] = words.status(self.refusal)
        self._effects += (m.Tell(level, "task ended", facts), m.Finish())

    # --- small things -----------------------------------------------------------------------------

    def _become(self, phase: Phase) -> None:
        """The phase, or what lies beneath a pause."""
        if self.phase == "paused":
            self.beneath = phase
        else:
            self.phase = phase

    def _cycle(self) -> Stitch:
        if self.stitch is None:
            raise IllegalMove("no exchange is open")
        return self.stitch

    def _close_cycle(self, *, close: bool) -> None:
        self.stitch = None
        self._no_grace()
        if close:
            self._effects.append(m.CloseExchange())

    def _no_grace(self) -> None:
        if self._grace:
            self._grace = False
            self._effects.append(m.CancelTimer("grace"))

    def _abandon(self) -> None:
        """Close the exchange in the middle; what the cycle showed stays."""
        if self.stitch is not None:
            self.stitch.finish()
            self.stitch.release(terminal=False)
        self._close_cycle(close=True)

    def _open_actions(self) -> tuple[Action, ...]:
        """What only a person or the client can give, and nobody has given yet."""
        given = self.spec.conversation
        found = (
            action_of(item.body, item.type, item.cursor, given.declared, self.spec.authorization)
            for item in self.ledger.unanswered()
        )
        carried = (action for action in self.spec.carried.actions if action.id not in self.ledger.outputs)
        own = (action for action in found if action is not None)
        return tuple(action for action in (*carried, *own) if action.id not in given.answered)

    def _note(self, kind: str, **facts: Any) -> None:
        self._record(Note(kind, dumps(facts).encode()))

    def _record(self, record: Record) -> None:
        """Enter a record; it is written with the next ``_write``."""
        self.ledger.fold(record)
        self._out.append(record)

    def _write(self, *, sync: bool = False) -> None:
        """Order the log to be written: all that is pending, and the summary where it changed."""
        records = tuple(self._out)
        self._out.clear()
        for record in records:
            self.logged += len(record.data)
        summary = self._changed()
        self._effects.append(m.Append(records, self._written, summary, sync))
        self._written = self.ledger.cursor

    def _changed(self) -> Summary | None:
        """The summary, if anything in it but the step has moved since it was last written."""
        known, ledger = self._summary, self.ledger
        if (
            known is not None
            and known.state == self.phase
            and known.open == self.open
            and known.response_id == ledger.response_id
            and known.done == ledger.done
            and known.reason == self.reason
            and known.cycles == ledger.cycle
        ):
            return None
        self._summary = self.summary()
        return self._summary
