"""Every scenario of the simulator through the proxy, over real sockets: state, stream and requests."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from support.legato import ASKED, Legato, legato, request
from support.rules import Stream, check
from support.server import serve

from proxy.simulator import Scenario, shipped_scenarios, simulator_app

pytestmark = pytest.mark.anyio

MAX_CYCLES = 7
TOOLS = [{"type": "function", "name": "get_location", "parameters": {}}]


class Outcome(NamedTuple):
    """How a scenario's task comes out. ``code`` stands in the error of legato's own failure."""

    state: str
    reason: str | None = None
    cycles: int | None = None
    code: str | None = None


UNKNOWN = Outcome("needs_review", "continuation_unknown", 2, "continuation_unknown")
FAILED = Outcome("failed", "upstream_error", 2)
STOPPED = Outcome("incomplete", "max_cycles", MAX_CYCLES)
# What isn't here completes, after as many cycles as the scenario has.
TROUBLE = {
    "approval": Outcome("input_required", "approval", 2),
    "approval-and-continuation": Outcome("input_required", "approval", 1),
    "authorization": Outcome("input_required", "authorization", 1),
    "client-tool": Outcome("input_required", "client_tool", 1),
    "cut": UNKNOWN,
    "endless": STOPPED,
    "error-event": FAILED,
    "error-failed": FAILED,
    "error-in-200": FAILED,
    "error-text": FAILED,
    "expired-token": Outcome("held", "credential_expired", 2, "credential_expired"),
    "gateway-timeout": UNKNOWN,
    "loop": STOPPED,
    "no-ending": UNKNOWN,
    "overloaded": UNKNOWN,
    "refused": Outcome("failed", "upstream_refused", 2, "upstream_refused"),
    "reset": UNKNOWN,
    "server-error": UNKNOWN,
    "silent": UNKNOWN,
    "too-slow": UNKNOWN,
    "unknown-outcome": UNKNOWN,
}
SHORTER: dict[str, dict[str, float]] = {"silent": {"max_silence": 0.5}, "open-body": {"seam_grace": 0.05}}
LEFT_OUT = {"first-error"}  # no task comes of it


def said(scenario: Scenario) -> str:
    """All that the supervisor says, in order."""
    steps = [step for cycle in scenario.cycles for step in cycle.steps if step.say]
    return "".join(step.say.replace("{n}", str(n)) for step in steps for n in range(1, step.times + 1))


def messages(items: list[dict[str, Any]]) -> str:
    """The text of all messages among these items."""
    return "".join(item["content"][0]["text"] for item in items if item["type"] == "message")


async def played(name: str, proxy: Legato) -> tuple[Stream, dict[str, Any]]:
    """The scenario's stream and its task."""
    reading = await proxy.whole(ASKED | {"tools": TOOLS}, limit=20)
    return check(reading.body), await proxy.show(reading.task)


@pytest.mark.parametrize("name", sorted(set(shipped_scenarios()) - LEFT_OUT))
async def test_scenario(name: str) -> None:
    """The state that its story implies, a stream that obeys the rules, and nothing sent twice."""
    scenario = shipped_scenarios()[name]
    expected = TROUBLE.get(name, Outcome("completed", None, len(scenario.cycles)))
    async with (
        serve(simulator_app(scenario, speed=0)) as supervisor,
        legato(supervisor.url, max_cycles=MAX_CYCLES, **SHORTER.get(name, {})) as proxy,
    ):
        stream, shown = await played(name, proxy)
        facts = json.loads((await proxy.ask(request(method="GET", path="/simulator/requests"))).body)
    assert (shown["state"], shown["reason"], shown["cycles"]) == expected[:3]
    assert facts["first"] == 1
    (task,) = facts["by_task"].values()
    assert set(task["answered"].values()) <= {1}, "a continuation was answered twice"
    if expected.state == "completed":
        assert task["follow_ups"] == expected.cycles - 1 if expected.cycles else True
        assert messages(stream.items) == said(scenario)
    if expected.code is not None:
        assert stream.error["code"] == expected.code
    if expected.state == "input_required":
        assert stream.types[-1] == "response.completed"
        assert len(shown["required_actions"]) == 1
        assert shown["required_actions"][0]["kind"] == expected.reason
    if expected.state == "incomplete":
        assert stream.response["incomplete_details"] == {"reason": "max_cycles"}
        assert task["follow_ups"] == MAX_CYCLES - 1


async def test_a_refused_start_is_no_task() -> None:
    """``first-error``: the 500 is the client's, unchanged and without a second try."""
    async with serve(simulator_app("first-error", speed=0)) as supervisor, legato(supervisor.url) as proxy:
        answer = await proxy.ask(request(ASKED))
        assert (answer.status, json.loads(answer.body)["error_code"]) == (500, "INTERNAL_ERROR")
        assert await proxy.tasks() == []
        facts = json.loads((await proxy.ask(request(method="GET", path="/simulator/requests"))).body)
        assert facts["count"] == 0


def test_the_table_knows_only_scenarios_that_there_are() -> None:
    """A scenario that was renamed isn't taken for one that completes."""
    assert set(TROUBLE) | LEFT_OUT <= set(shipped_scenarios())


async def test_scenarios_end_the_same_with_a_log_on_disk(tmp_path: Any) -> None:
    """A few of them once more, with SQLite beneath."""
    for name in ("default", "openai", "cut", "loop", "approval"):
        path = f"sqlite:{tmp_path / name}.db"
        async with (
            serve(simulator_app(name, speed=0)) as supervisor,
            legato(supervisor.url, log=path, max_cycles=MAX_CYCLES) as proxy,
        ):
            _, shown = await played(name, proxy)
            expected = TROUBLE.get(name, Outcome("completed"))
            assert (shown["state"], shown["reason"]) == expected[:2]
