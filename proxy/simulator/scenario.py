"""What a scenario may say, and how one is loaded.

A scenario is a TOML file: settings at the top, then ``[[cycles]]``, each with ``[[cycles.steps]]`` and,
where something is to go wrong, ``[[cycles.faults]]``. Every field is described where it stands below.
Times are seconds at speed 1.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

Seconds = Annotated[float, Field(ge=0)]

MAX_BODY_BYTES = 16 * 1024 * 1024  # vendor documentation: the limit for any request to model serving


class ScenarioError(ValueError):
    """A scenario that can't be used; the message names the file and the field."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Step(_Part):
    """Something said, then perhaps a tool called; with ``times``, ``{n}`` in a text is the count."""

    wait: Seconds = 0.0
    """Silence before anything of this step."""
    frame: str = ""
    """Lines written as they are, for what no other field can say (comments, broken JSON)."""
    reason: str = ""
    """A reasoning item."""
    say: str = ""
    """A message item."""
    call: str = ""
    """The name of the tool that is called."""
    arguments: JsonValue = {}
    """The call's arguments; a string stays as it is, JSON or not."""
    output: JsonValue = ""
    """The call's result; a string stays as it is."""
    output_bytes: NonNegativeInt = 0
    """Makes the result a text of this size."""
    seconds: Seconds = 0.0
    """How long the call takes; nothing is on the wire meanwhile."""
    answered: bool = True
    """False: the call never gets a result, as public clients saw with parallel calls."""
    ask: Literal["approval", "client_tool", "authorization"] | None = None
    """The call isn't made: somebody else must approve it, run it, or let the tool in."""
    times: PositiveInt = 1

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not (self.wait or self.frame or self.reason or self.say or self.call):
            raise ValueError("an empty step: give it say, call, reason, frame or wait")
        if self.ask and not self.call:
            raise ValueError("ask needs a call")
        return self


class _Fault(_Part):
    times: PositiveInt | None = None
    """At how many attempts it strikes before the next fault, or none, has its turn; absent: always."""


class StatusFault(_Fault):
    """A plain HTTP answer in place of the stream; the request doesn't count as accepted."""

    kind: Literal["status"]
    status: int = Field(ge=300, le=599)
    error_code: str = "INTERNAL_ERROR"
    message: str = "Internal error."
    headers: dict[str, str] = {}
    text: str = ""
    """A body in place of the JSON one, sent as HTML, as gateways in front of an API do."""


class ErrorFault(_Fault):
    """An error inside a 200, in one of the forms that public clients met."""

    kind: Literal["error"]
    form: Literal["databricks", "text", "object", "typed", "flat", "failed", "response_error"] = "databricks"
    code: str = "INTERNAL_ERROR"
    message: str = "Internal error."
    after: NonNegativeInt = 1
    """How many events go out before."""


class CutFault(_Fault):
    """The body stops: ``fin`` and ``reset`` break the connection, ``end`` is a clean end of a body with no
    ending in it."""

    kind: Literal["cut"]
    how: Literal["fin", "reset", "end"] = "fin"
    after: NonNegativeInt = 1


class SilenceFault(_Fault):
    """Nothing for a while; ``seconds = inf`` lasts until the client leaves, whatever the speed."""

    kind: Literal["silence"]
    seconds: Seconds
    after: NonNegativeInt = 1


Fault = Annotated[StatusFault | ErrorFault | CutFault | SilenceFault, Field(discriminator="kind")]


class Usage(_Part):
    """What the response's ending reports."""

    input_tokens: NonNegativeInt
    output_tokens: NonNegativeInt


class Cycle(_Part):
    """One response of the supervisor."""

    steps: tuple[Step, ...] = ()
    faults: tuple[Fault, ...] = ()
    continuations: NonNegativeInt | None = None
    """How many continuations it ends with; absent: one, none in the last cycle or where it asks."""
    step: NonNegativeInt | None = None
    """The continuation's ``step``; absent: the tool calls so far, as vendor documentation defines it."""
    head_seconds: Seconds = 0.0
    """Silence before the answer's head; ``inf`` lasts until the client leaves."""
    repeat_earlier: bool = False
    """Begins with the items of the cycle before, word for word."""
    usage: Usage | None = None
    """Absent: words are counted in the OpenAI style, and raw reports none."""

    @property
    def asks(self) -> bool:
        """Whether somebody must answer before it can go on."""
        return any(step.ask for step in self.steps)

    @property
    def calls(self) -> int:
        """How many tool calls it makes."""
        return sum(step.times for step in self.steps if step.call)


class Scenario(_Part):
    """A supervisor's whole task."""

    name: str
    description: str = Field(min_length=1)
    cycles: tuple[Cycle, ...] = Field(min_length=1)
    loop: bool = False
    """The last cycle comes again for ever."""

    style: Literal["raw", "openai"] = "raw"
    event_lines: bool | None = None
    """Absent: in the OpenAI style only."""
    words_per_second: float = Field(default=40.0, gt=0)
    text: Literal["both", "deltas", "done"] = "both"
    """Where the text of a raw message stands: in deltas, in the finished item, or in both."""
    ids: Literal["unique", "restart", "placeholder", "uuid"] = "unique"
    """``restart``: each cycle takes the ids of the first again, for other things; ``placeholder``: all
    messages have the one id that MLflow agents give."""
    inner_pairs: bool = False
    """Each step is a created…completed pair of its own, as MLflow agents relay inner model calls."""
    usage: bool = True

    continuation_event: bool = True
    """False: a continuation stands only in the output of ``response.completed``."""
    after_continuation: Literal["nothing", "completed", "done", "both", "open"] = "done"
    """``open``: the body stays open until the client leaves."""
    ending: Literal["nothing", "completed", "done", "both"] | None = None
    """Absent: ``[DONE]`` in the raw style, ``response.completed`` in the OpenAI style."""

    accepts: Literal["input", "messages", "either"] = "input"
    """The key of the conversation."""
    follow_up_key: Literal["input", "messages", "either"] | None = None
    """Absent: the same as ``accepts``."""
    replay: Literal["any", "all_items", "all_pairs", "last_pair"] = "any"
    """What a follow-up must hold after the original conversation."""
    resend: Literal["refuse", "accept"] = "refuse"
    """Whether an answered continuation may be answered again."""
    token: str = ""
    """A bearer token that every request must bring."""
    limit_seconds: float = Field(default=297.0, gt=0)
    """Upstream's own limit on one response, on the scripted clock; the default is the vendor's."""
    body_limit: PositiveInt = MAX_BODY_BYTES
    """A larger request is refused with 413."""

    @model_validator(mode="after")
    def _leads_to_its_end(self) -> Self:
        if self.cycles[-1].asks and not self.loop:
            raise ValueError("the last cycle asks for something: a cycle must follow that goes on after it")
        if self.cycles[-1].continuations and not self.loop:
            raise ValueError("the last cycle has continuations: a cycle must follow, or loop be set")
        for index, cycle in enumerate(self.cycles[:-1]):
            if cycle.continuations == 0 and not cycle.asks:
                raise ValueError(f"cycles[{index}] has no continuation: the next one can't be reached")
        if not self.continuation_event and self.after_continuation not in ("completed", "both"):
            raise ValueError("without continuation_event, after_continuation must be completed or both")
        return self

    def cycle(self, index: int) -> Cycle:
        """The cycle with this number; a loop goes on with its last one."""
        return self.cycles[min(index, len(self.cycles) - 1)]

    def is_last(self, index: int) -> bool:
        """Whether nothing follows this cycle."""
        return not self.loop and index >= len(self.cycles) - 1

    def continuations(self, index: int) -> int:
        """How many continuations this cycle ends with."""
        cycle = self.cycle(index)
        if cycle.continuations is not None:
            return cycle.continuations
        return 0 if cycle.asks or self.is_last(index) else 1

    def calls_before(self, index: int) -> int:
        """How many tool calls the cycles before this one make."""
        beyond = max(index - len(self.cycles), 0)
        return sum(cycle.calls for cycle in self.cycles[:index]) + beyond * self.cycles[-1].calls


def parse_scenario(text: str, *, name: str = "inline", source: str = "inline.toml") -> Scenario:
    """A scenario from TOML text; ``source`` is what an error calls the file."""
    try:
        return Scenario.model_validate({"name": name, **tomllib.loads(text)})
    except tomllib.TOMLDecodeError as exc:
        raise ScenarioError(f"{source}: not TOML: {exc}") from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ScenarioError(f"{source}: {_field(first['loc'])}: {first['msg']}") from exc


def load_scenario(name: str | Path) -> Scenario:
    """A shipped scenario by its name, or any by the path of its file (one that ends in ``.toml``)."""
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ScenarioError(f"{path}: can't be read: {exc}") from exc
        return parse_scenario(text, name=path.stem, source=str(path))
    shipped = shipped_scenarios()
    if str(name) not in shipped:
        raise ScenarioError(f"no scenario is called {str(name)!r}; there are: {', '.join(shipped)}")
    return shipped[str(name)]


@functools.cache
def shipped_scenarios() -> dict[str, Scenario]:
    """Every scenario that comes with legato, by name."""
    folder = resources.files(__package__).joinpath("scenarios")
    files = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda e: e.name
    )
    return {
        (name := file.name.removesuffix(".toml")): parse_scenario(
            file.read_text(encoding="utf-8"), name=name, source=file.name
        )
        for file in files
    }


def _field(location: tuple[int | str, ...]) -> str:
    """``cycles[1].steps[0].seconds``; the kind that pydantic puts after a fault's index is left out."""
    path = ""
    previous: Any = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (isinstance(previous, int) and part in ("status", "error", "cut", "silence")):
            path += f".{part}" if path else part
        previous = part
    return path or "the whole file"
