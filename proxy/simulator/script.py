"""One response's share of a scenario, as orders.

With ``long_task`` a response plays one cycle and ends with its continuation. Without it, nothing can go on
later: all cycles are played in one response, until the end, a question, or upstream's limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import JsonValue

from .orders import BodyFault, Hold, Item, Offer, Order, Script, Send, Wait, faulty, limited
from .scenario import Scenario, Step, Usage
from .wire import DONE, uuid_like, words, writer_for

MAX_CYCLES = 10_000  # a loop without long_task, or a task, ends here; far above any stop rule


@dataclass(frozen=True, slots=True)
class Answered:
    """Something that an earlier response asked for, and what was said to it."""

    kind: str
    id: str
    step: Step
    approved: bool


@dataclass(frozen=True, slots=True)
class Part:
    """What one response is to play, with everything that a pure function can't make up."""

    scenario: Scenario
    task: str  # hexadecimal; ids are made from it
    cycle: int
    run: int  # how often this cycle has been played before
    response_id: str
    continuation_ids: tuple[str, ...]
    model: str
    created_at: int
    long_task: bool
    input_words: int = 0
    answered: tuple[Answered, ...] = ()
    repeats: tuple[Item, ...] = ()
    fault: BodyFault | None = None


class Performance:
    """Plays a part once."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._scenario = part.scenario
        self._writer = writer_for(part.scenario, part.response_id, part.model, part.created_at)
        self._cycle = part.cycle
        self._calls = part.scenario.calls_before(part.cycle)
        self._made = 0
        self._pairs = 0

    def orders(self) -> Script:
        """Everything that the server has to do, faults and upstream's limit included."""
        orders = limited(self._whole(), self._scenario.limit_seconds)
        return faulty(orders, self.part.fault, self._writer.failure) if self.part.fault else orders

    def body(self) -> Item:
        """The answer where no stream was asked for; after all orders are carried out."""
        return self._writer.body(self._usage())

    def _whole(self) -> Iterator[Order]:
        if not self._scenario.inner_pairs:
            yield from self._writer.opening()
        for item in self.part.repeats:
            yield from self._write(item)
        for answer in self.part.answered:
            yield from self._answer(answer)
        for number in self._cycles():
            self._cycle = number
            for step in self._scenario.cycle(number).steps:
                yield from self._step(step)
        yield from self._close()

    def _cycles(self) -> Iterator[int]:
        for number in range(self.part.cycle, MAX_CYCLES):
            yield number
            if self.part.long_task or self._scenario.cycle(number).asks or self._scenario.is_last(number):
                return

    # --- steps ---------------------------------------------------------------------------------------

    def _step(self, step: Step) -> Iterator[Order]:
        for count in range(1, step.times + 1):
            if step.wait:
                yield Wait(step.wait)
            if self._scenario.inner_pairs:
                yield from self._pair(step, count)
            else:
                yield from self._beat(step, count)

    def _pair(self, step: Step, count: int) -> Iterator[Order]:
        """A step as a response inside the response: numbers, indexes and the id begin anew."""
        if self._pairs:
            self._writer.inner(self._id("resp"))
        self._pairs += 1
        yield from self._writer.opening()
        yield from self._beat(step, count)
        yield self._writer.completed(self._usage())

    def _beat(self, step: Step, count: int) -> Iterator[Order]:
        self._writer.step = self._calls + 1
        if step.frame:
            yield Send(step.frame.strip("\n").encode() + b"\n\n")
        if step.reason:
            text = _fill(step.reason, count)
            summary = [{"type": "summary_text", "text": text}]
            yield from self._write({"type": "reasoning", "id": self._id("rs"), "summary": summary})
        if step.say:
            yield from self._write(self._message(_fill(step.say, count)))
        if step.ask:
            yield from self._ask(step, count)
        elif step.call:
            yield from self._call(step, count)
        self._calls += bool(step.call)

    def _call(self, step: Step, count: int) -> Iterator[Order]:
        call_id = self._id("call")
        yield from self._write(self._function_call(step, count, call_id))
        if step.seconds:
            yield Wait(step.seconds)
        if step.answered:
            yield from self._write(_result(call_id, step, count))

    def _ask(self, step: Step, count: int) -> Iterator[Order]:
        ask_id = self._id("call" if step.ask == "client_tool" else "toolu", unique=True)
        if step.ask == "client_tool":
            item = self._writer.finished(self._function_call(step, count, ask_id))
        elif step.ask == "approval":
            item = {
                "type": "mcp_approval_request",
                "id": ask_id,
                "name": step.call,
                "server_label": f"mcp-{step.call}",
                "arguments": _text(step.arguments, count),
            }
        else:
            link = f"https://login.example/consent?state={ask_id}"
            item = {"type": "oauth_consent_request", "id": ask_id, "consent_link": link}
        if step.ask:
            yield Offer(step.ask, ask_id, item, tuple(self._writer.items), self._cycle, step)
        yield from self._write(item)

    def _answer(self, answer: Answered) -> Iterator[Order]:
        """The tool runs only now; its result has the approval's id, and no call stands before it."""
        if answer.kind == "client_tool":
            return
        if not answer.approved:
            declined = {
                "type": "function_call_output",
                "call_id": answer.id,
                "output": "Declined by the user.",
            }
            yield from self._write(declined)
            return
        if answer.step.seconds:
            yield Wait(answer.step.seconds)
        yield from self._write(_result(answer.id, answer.step, 1))

    # --- the end -------------------------------------------------------------------------------------

    def _close(self) -> Iterator[Order]:
        if not (self.part.continuation_ids and self.part.long_task):
            ending = self._scenario.ending or ("completed" if self._scenario.style == "openai" else "done")
            # With inner pairs, the last pair's completed was the ending.
            yield from self._ending(
                "nothing" if self._scenario.inner_pairs and ending == "completed" else ending
            )
            return
        step = self._scenario.cycle(self._cycle).step
        for continuation_id in self.part.continuation_ids:
            item: Item = {
                "type": "task_continue_request",
                "id": continuation_id,
                "step": self._calls if step is None else step,
            }
            yield Offer("continuation", continuation_id, item, tuple(self._writer.items), self._cycle)
            yield from self._writer.continuation(item)
        yield from self._ending(self._scenario.after_continuation)

    def _ending(self, ending: str) -> Iterator[Order]:
        if ending in ("completed", "both"):
            yield self._writer.completed(self._usage())
        if ending in ("done", "both"):
            yield Send(DONE)
        if ending == "open":
            yield Hold()

    def _usage(self) -> Usage | None:
        written = self._scenario.cycle(self._cycle).usage
        if not self._scenario.usage or (written is None and self._scenario.style == "raw"):
            return None
        counted = sum(len(words(_words_of(item))) for item in self._writer.output)
        return written or Usage(input_tokens=self.part.input_words, output_tokens=counted)

    # --- items ---------------------------------------------------------------------------------------

    def _write(self, item: Item) -> Iterator[Order]:
        yield from self._writer.write(self._writer.finished(item))

    def _message(self, text: str) -> Item:
        return {
            "type": "message",
            "id": "__fake_id__" if self._scenario.ids == "placeholder" else self._id("msg"),
            "role": "assistant",
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        }

    def _function_call(self, step: Step, count: int, call_id: str) -> Item:
        return {
            "type": "function_call",
            "id": self._id("fc"),
            "call_id": call_id,
            "name": step.call,
            "arguments": _text(step.arguments, count),
        }

    def _id(self, prefix: str, *, unique: bool = False) -> str:
        """A new id, made from the task, the cycle and a count; unlike all others unless asked."""
        self._made += 1
        restart = self._scenario.ids == "restart" and not unique
        place = "" if restart else f"{self._cycle:04x}{self.part.run:02x}"
        seed = f"{self.part.task}{place}{self._made:04x}"
        return uuid_like(prefix + seed) if self._scenario.ids == "uuid" else f"{prefix}_{seed}"


def _result(call_id: str, step: Step, count: int) -> Item:
    output = _text(step.output, count)
    if step.output_bytes:
        output = (output or "row ").ljust(4)
        output = (output * (step.output_bytes // len(output) + 1))[: step.output_bytes]
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def _text(value: JsonValue, count: int) -> str:
    """Arguments and outputs travel as strings that hold JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _fill(text, count)


def _fill(text: str, count: int) -> str:
    return text.replace("{n}", str(count))


def _words_of(item: Item) -> str:
    if item["type"] == "message":
        return str(item["content"][0]["text"])
    return str(item.get("arguments", ""))
