"""``legato demo``: a simulated supervisor, the proxy in front of it, one long task, seen by a person."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.console import Console
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

QUESTION = "Why did sales of the outdoor range fall in the second quarter?"
# Seconds without a byte from our own proxy after which the demo itself is broken.
PATIENCE = 60.0
# To be read on a light and on a dark screen.
ENDED_WELL, ENDED_BADLY = "black on green", "bold white on red"


@dataclass(slots=True)
class Crossing:
    """One seam as the supervisor sees it: its response ended, the follow-up came, its answer began."""

    cycle: int
    ended: float
    asked: float
    answered: float | None = None


@dataclass(slots=True)
class Watch:
    """Stands before the supervisor and times the seams, since the client's stream doesn't show them."""

    app: ASGIApp
    requests: int = 0
    ended: float = 0.0
    crossings: list[Crossing] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.requests += 1
        crossing = None
        if self.requests > 1:
            crossing = Crossing(self.requests, self.ended, time.perf_counter())
            self.crossings.append(crossing)

        async def watched(message: Message) -> None:
            body = message["type"] == "http.response.body"
            if body and crossing is not None and crossing.answered is None and message.get("body"):
                crossing.answered = time.perf_counter()
            if body and not message.get("more_body"):
                self.ended = time.perf_counter()
            await send(message)

        await self.app(scope, receive, watched)


class Screen:
    """What the person sees. Rich in a terminal, plain lines when piped."""

    def __init__(self, console: Console, watch: Watch) -> None:
        self._console = console
        self._watch = watch
        self._marked = 0
        self._column = 0
        self._gap = ""
        self._word = ""
        self.events = 0
        self.texts: set[str] = set()

    def event(self, body: dict[str, Any]) -> None:
        """One event of the client's stream."""
        self._mark()
        self.events += 1
        item = body.get("item") or {}
        if body.get("type") == "response.output_text.delta":
            self.texts.add(body.get("item_id", ""))
            self.text(body.get("delta", ""))
        elif body.get("type") == "response.output_item.done":
            self._item(item)

    def text(self, text: str) -> None:
        """Streamed text, wherever the line stands; a word is shown once it is whole."""
        *whole, self._word = re.split(r"(?<=\s)", self._word + text)
        for word in whole:
            self._show(word)

    def line(self, text: str, style: str = "") -> None:
        """A line of its own."""
        self._show(self._word)
        self._word = self._gap = ""
        if self._column:
            self._break()
        self._console.print(text, style=style, markup=False, highlight=False)

    def _show(self, word: str) -> None:
        """A word, on a new line of a terminal where it doesn't fit. The space behind it waits."""
        text = self._gap + word.rstrip()
        if self._console.is_terminal and self._column + cell_len(text) > self._console.width and self._column:
            self._break()
            text = text.lstrip()
        if word.strip():
            self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
            self._column += cell_len(text)
            self._gap = ""
        self._gap += word[len(word.rstrip()) :]
        if self._gap.endswith("\n"):
            self._break()

    def _break(self) -> None:
        self._console.print()
        self._column = 0
        self._gap = ""

    def _short(self, text: str, style: str) -> None:
        """One line of the terminal at most: what a tool says can be long."""
        width = self._console.width - 1
        text = text.replace("\n", " ")
        self.line(text if len(text) <= width else text[: width - 1] + "…", style)

    def _item(self, item: dict[str, Any]) -> None:
        kind = item.get("type")
        if kind == "function_call":
            self._short(f"  → {item.get('name')} {item.get('arguments')}", "")
        elif kind == "function_call_output":
            self._short(f"  ← {item.get('output')}", "dim")
        elif kind == "mcp_approval_request":
            self._short(f"  ? asks for approval: {item.get('name')} {item.get('arguments')}", "magenta")
        elif kind == "message" and item.get("id") not in self.texts:
            parts = item.get("content") or []
            self.text("".join(part.get("text", "") for part in parts if isinstance(part, dict)))

    def _mark(self) -> None:
        """A seam was crossed before this event: it belongs to the next cycle."""
        seams = self._watch.crossings
        while self._marked < len(seams) and seams[self._marked].answered is not None:
            seam = seams[self._marked]
            self._marked += 1
            took = (seam.asked - seam.ended) * 1000
            self.line(
                f"┈┈ seam: cycle {seam.cycle - 1} ended, cycle {seam.cycle} asked {took:.1f} ms later ┈┈",
                "bold magenta",
            )

    def report(self, task: dict[str, Any]) -> None:
        """The last lines."""
        seams = self._watch.crossings
        at_seams = sum(seam.asked - seam.ended for seam in seams) * 1000
        self.line("")
        rows = {
            "cycles": task["cycles"],
            "steps": task["step"],
            "follow-ups": len(seams),
            "events": self.events,
            "time at seams": f"{at_seams:.1f} ms",
        }
        for name, value in rows.items():
            self._console.print(f"{name:>14}  {value}", markup=False, highlight=False)
        self.line("")
        state, reason = task["state"], task["reason"]
        word = state if reason is None else f"{state}: {reason}"
        self._console.print(word, style=ENDED_WELL if state == "completed" else ENDED_BADLY, markup=False)


@click.command("demo")
@click.argument("scenario", default="default")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, max=1e6),
    metavar="X",
    default=1.0,
    show_default=True,
    help="How fast the scripted supervisor works: 2 is twice as fast, 0 doesn't wait at all.",
)
def command(scenario: str, speed: float) -> None:
    """Show what legato does: one long task, in five cycles, as one stream.

    Starts the scripted supervisor and the proxy in this process, sends a real request over HTTP, and
    prints the text as it streams, with a mark where a seam was crossed. The client gets no such mark: for
    it the stream was never cut. Ends with what was counted and the task's state; exit code 0 if that is
    "completed". Keeps nothing on disk. SCENARIO is any that "legato simulate" knows.

    \b
    Examples:
      legato demo
      legato demo loop --speed 0
    """
    import anyio

    from proxy import logs
    from proxy.simulator.scenario import ScenarioError
    from proxy.simulator.server import simulator_app

    from . import Refusal

    logs.configure("error", "auto")
    try:
        watch = Watch(simulator_app(scenario, speed))
    except ScenarioError as exc:
        raise Refusal(str(exc)) from None
    state = anyio.run(_demo, watch)
    raise SystemExit(0 if state == "completed" else 1)


async def _demo(watch: Watch) -> str:
    import httpx
    from rich.console import Console

    from proxy.settings import Settings
    from proxy.web.app import create_app
    from proxy.web.server import serving

    console = Console(highlight=False)
    screen = Screen(console, watch)
    async with serving(watch) as supervisor:
        settings = Settings(upstream=supervisor, log="memory:")
        async with serving(create_app(settings)) as legato, httpx.AsyncClient(timeout=PATIENCE) as client:
            screen.line(f"supervisor  {supervisor}   (simulated)", "dim")
            screen.line(f"legato      {legato}   ← the client talks to this one", "dim")
            screen.line("")
            screen.line(f"> {QUESTION}", "bold")
            screen.line("")
            task_id = await _stream(client, f"{legato}/serving-endpoints/demo/invocations", screen)
            task = (await client.get(f"{legato}/legato/tasks/{task_id}")).json()
    screen.report(task)
    return str(task["state"])


async def _stream(client: Any, url: str, screen: Screen) -> str:
    body = {
        "input": [{"role": "user", "content": QUESTION}],
        "databricks_options": {"long_task": True},
        "stream": True,
    }
    async with client.stream("POST", url, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                screen.event(json.loads(line[6:]))
        return str(response.headers["legato-task"])
