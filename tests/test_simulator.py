"""The simulator: its scenarios, the shape of its events, and its strictness."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import openai
import pytest
from support.server import serve

from proxy.simulator import (
    Scenario,
    ScenarioError,
    load_scenario,
    parse_scenario,
    shipped_scenarios,
    simulator_app,
)
from proxy.simulator.orders import Wait
from proxy.simulator.script import Part, Performance
from proxy.simulator.server import ROUTES

pytestmark = pytest.mark.anyio

RESPONSES = "/serving-endpoints/responses"
LONG = {"long_task": True}
QUESTION = [{"role": "user", "content": "Why did tent sales fall?"}]
SAYS = '[[cycles]]\nsteps = [{say = "Hello there.", call = "t", output = "o"}]\n'
TWO = SAYS + '[[cycles]]\nsteps = [{say = "Good bye."}]\n'
THREE = SAYS + TWO

# How each scenario ends for a client that answers everything and never sends again what got no clean
# answer; all others end well.
TROUBLE = {
    "cut": "cut",
    "reset": "reset",
    "unknown-outcome": "cut",
    "too-slow": "cut",
    "no-ending": "no ending",
    "error-in-200": "error",
    "error-text": "error",
    "error-event": "error",
    "error-failed": "error",
    "rate-limited": "429",
    "overloaded": "503",
    "server-error": "500",
    "refused": "400",
    "expired-token": "401",
    "gateway-timeout": "504",
    "first-error": "500",
    "body-limit": "413",
    "loop": "too long",
    "endless": "too long",
    "silent": "left",
}


@pytest.fixture
def anyio_backend() -> str:
    """The project runs on asyncio."""
    return "asyncio"


@dataclass
class Cycle:
    """One response as a naive client reads it."""

    status: int
    events: list[dict[str, Any]] = field(default_factory=list)
    raw: str = ""
    end: str = "no ending"
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    @property
    def items(self) -> list[dict[str, Any]]:
        """The finished items, and what only the terminal lists."""
        done = [e["item"] for e in self.events if e.get("type") == "response.output_item.done"]
        for event in self.events:
            if event.get("type") == "response.completed":
                done += [item for item in event["response"]["output"] if item not in done]
        return done

    @property
    def continuations(self) -> list[dict[str, Any]]:
        """What asks to go on."""
        return [item for item in self.items if item["type"] == "task_continue_request"]

    @property
    def text(self) -> str:
        """All deltas, joined."""
        return "".join(e["delta"] for e in self.events if e.get("type") == "response.output_text.delta")

    def take(self, block: str) -> None:
        """Read one frame."""
        data = "\n".join(line[5:].lstrip() for line in block.split("\n") if line.startswith("data:"))
        if data == "[DONE]":
            self.end = "ok" if self.end != "error" else "error"
        elif data.startswith("{"):
            event = json.loads(data)
            self.events.append(event)
            if event.get("type") == "response.completed":
                self.end = "ok"
            elif (
                event.get("type") in ("error", "response.failed") or "error" in event or "error_code" in event
            ):
                self.end = "error"


def answer(item: dict[str, Any]) -> dict[str, Any]:
    """What goes on after this item: only the right answers for each kind."""
    match item["type"]:
        case "task_continue_request":
            return {"type": "task_continue_response", "continue_request_id": item["id"]}
        case "mcp_approval_request":
            return {"type": "mcp_approval_response", "approval_request_id": item["id"], "approve": True}
        case _:
            return {"type": "function_call_output", "call_id": item["call_id"], "output": "Bergen"}


class Client:
    """A naive client: it answers what it is asked, and gives up at the first trouble."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, input: Any, **body: Any) -> httpx.Response:
        """One request that wants JSON."""
        return await self.http.post(RESPONSES, json={"input": input, "databricks_options": LONG} | body)

    async def cycle(self, input: Any, *, until: str | None = None, **body: Any) -> Cycle:
        """One request that wants a stream; the client leaves after a line with ``until`` in it."""
        payload = {"input": input, "stream": True, "databricks_options": LONG} | body
        async with self.http.stream("POST", RESPONSES, json=payload) as response:
            cycle = Cycle(response.status_code, headers=response.headers)
            if response.status_code != 200:
                cycle.raw = (await response.aread()).decode()
                cycle.end = str(response.status_code)
                return cycle
            broken = await self._read(response, cycle, until)
        for block in cycle.raw.split("\n\n"):
            cycle.take(block)
        cycle.end = broken or cycle.end
        return cycle

    async def _read(self, response: httpx.Response, cycle: Cycle, until: str | None) -> str | None:
        try:
            async for line in response.aiter_lines():
                cycle.raw += line + "\n"
                if until and until in line:
                    return "left"
        except httpx.ReadError:
            return "reset"
        except httpx.RemoteProtocolError:
            return "cut"
        return None

    async def task(self, policy: str = "all_items", limit: int = 20, **body: Any) -> list[Cycle]:
        """All cycles of one task."""
        cycles: list[Cycle] = []
        added: list[dict[str, Any]] = []
        while len(cycles) < limit:
            cycle = await self.cycle(QUESTION + added, **body)
            cycles.append(cycle)
            calls = {i["call_id"] for i in cycle.items if i["type"] == "function_call_output"}
            asked = [
                i
                for i in cycle.items
                if i["type"] in ("mcp_approval_request", "oauth_consent_request")
                or (i["type"] == "function_call" and i["call_id"] not in calls)
            ]
            if cycle.end == "left" and cycle.continuations:
                cycle.end = "ok"
            if cycle.end == "no ending" and cycle.continuations:
                cycle.end = "ok"
            if cycle.end != "ok" or not (cycle.continuations or asked):
                return cycles
            news = [i for i in cycle.items if i not in added]
            for item in news:
                paired = item in cycle.continuations
                if policy == "all_items" or paired or item in asked:
                    added.append(item)
                if paired or (item in asked and item["type"] != "oauth_consent_request"):
                    added.append(answer(item))
            if policy == "last_pair" and len(added) > 2:
                del added[:-2]
        cycles[-1].end = "too long"
        return cycles


@asynccontextmanager
async def simulator(scenario: str | Scenario = "default") -> AsyncIterator[Client]:
    """A client of a running simulator that never waits."""
    app = simulator_app(scenario, speed=0)
    async with serve(app) as server, httpx.AsyncClient(base_url=server.url, verify=False) as http:
        yield Client(http)


def scenario(text: str, settings: str = "") -> Scenario:
    """A scenario for one test."""
    return parse_scenario(f'description = "test"\n{settings}\n{text}', name="test")


async def until(condition: Callable[[], bool]) -> None:
    """Give others a turn until it is so."""
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


def message(response: httpx.Response) -> str:
    """The message of a vendor-shaped 400."""
    body = response.json()
    assert (response.status_code, body["error_code"]) == (400, "INVALID_PARAMETER_VALUE"), body
    assert set(body) == {"error_code", "message"}
    return str(body["message"])


# --- loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("cycles = 3", "x.toml: cycles: "),
        ("[[cycles]]\nsteps = [{say = 'a', seconds = -1}]", "x.toml: cycles[0].steps[0].seconds: "),
        ("[[cycles]]\nsteps = [{}]", "x.toml: cycles[0].steps[0]: "),
        ("[[cycles]]\nsteps = [{ask = 'approval', say = 'a'}]", "ask needs a call"),
        ("[[cycles]]\nfaults = [{kind = 'status', status = 'x'}]", "x.toml: cycles[0].faults[0].status: "),
        ("stile = 'raw'\n[[cycles]]", "x.toml: stile: "),
        ("[[cycles]]\nsteps = [{call = 'a', ask = 'approval'}]", "a cycle must follow"),
        ("[[cycles]]\ncontinuations = 1", "a cycle must follow"),
        ("[[cycles]]\ncontinuations = 0\n[[cycles]]", "can't be reached"),
        ("continuation_event = false\n[[cycles]]", "after_continuation must be"),
        ("[[cycles", "x.toml: not TOML: "),
    ],
)
def test_a_bad_scenario_names_file_and_field(text: str, where: str) -> None:
    """Whoever wrote it learns where to look."""
    with pytest.raises(ScenarioError, match=re.escape(where)):
        parse_scenario(f"description = 'd'\n{text}", source="x.toml")


def test_a_scenario_loads_by_name_or_path(tmp_path: Path) -> None:
    """A path is what ends in .toml; its stem is the name."""
    path = tmp_path / "mine.toml"
    path.write_text('description = "mine"\n' + SAYS, encoding="utf-8")
    assert load_scenario(path).name == "mine"
    assert load_scenario("default") is shipped_scenarios()["default"]
    with pytest.raises(ScenarioError, match=r"no scenario is called 'nope'; there are: .*default"):
        load_scenario("nope")
    with pytest.raises(ScenarioError, match="can't be read"):
        load_scenario(tmp_path / "absent.toml")


def test_the_demo_takes_about_twelve_seconds() -> None:
    """The default scenario is a demo of five cycles that nobody has to wait long for."""
    default = load_scenario("default")
    orders = Performance(Part(default, "0", 0, 0, "resp_0", (), "m", 0, long_task=False)).orders()
    assert len(default.cycles) == 5
    assert 10 < sum(order.seconds for order in orders if isinstance(order, Wait)) < 14


# --- every scenario -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_scenarios())
async def test_a_shipped_scenario_runs_to_its_end(name: str) -> None:
    """A naive client gets through, or meets just the trouble that the scenario is for."""
    until = {"silent": '"name":"close_order"', "open-body": "task_continue_request"}.get(name)
    replay = shipped_scenarios()[name].replay
    async with simulator(name) as client:
        cycles = await client.task("all_items" if replay == "any" else replay, until=until)
        facts = (await client.http.get("/simulator/requests")).json()
    expected = TROUBLE.get(name, "ok")
    assert cycles[-1].end == expected
    if expected == "ok":
        assert len(cycles) == len(shipped_scenarios()[name].cycles)
        assert facts["refused"] == 0
    assert facts["count"] + facts["refused"] == len(cycles)
    assert all(count == 1 for task in facts["by_task"].values() for count in task["answered"].values())


@pytest.mark.parametrize(
    ("name", "times"),
    [("rate-limited", 2), ("overloaded", 1), ("cut", 1), ("no-ending", 1), ("unknown-outcome", 1)],
)
async def test_a_fault_that_passes_lets_the_same_follow_up_through(name: str, times: int) -> None:
    """The same bytes sent again go on, and the count says how often they were sent."""
    async with simulator(name) as client:
        first = await client.cycle(QUESTION)
        follow_up = [*QUESTION, *first.continuations, answer(first.continuations[0])]
        tries = [await client.cycle(follow_up) for _ in range(times + 1)]
        task = next(iter((await client.http.get("/simulator/requests")).json()["by_task"].values()))
    assert [attempt.end == "ok" for attempt in tries] == [False] * times + [True]
    assert tries[0].headers.get("retry-after") == ("1" if name == "rate-limited" else None)
    assert task["follow_ups"] + task["refused"] == times + 1


@pytest.mark.parametrize("name", ["cut", "reset", "no-ending", "unknown-outcome", "too-slow"])
async def test_what_was_cut_shows_a_call_without_its_result(name: str) -> None:
    """That is what makes the outcome unknown."""
    async with simulator(name) as client:
        cycles = await client.task()
    assert [item["type"] for item in cycles[-1].items] == ["message", "function_call"]


async def test_repeats_come_word_for_word() -> None:
    """The later cycle begins with what the earlier one ended with."""
    async with simulator("repeats") as client:
        cycles = await client.task()
    assert cycles[1].items[:3] == cycles[0].items[:3]
    assert cycles[2].items[:6] == cycles[1].items[:6]


async def test_reused_ids_stand_for_other_things() -> None:
    """The same id, another text."""
    async with simulator("reused-ids") as client:
        first, second, _ = await client.task()
    assert first.items[0]["id"] == second.items[0]["id"]
    assert first.items[0]["content"] != second.items[0]["content"]


async def test_the_loop_never_advances() -> None:
    """Its continuations all have the same step, those of the endless one rise."""
    async with simulator("loop") as client:
        assert {c.continuations[0]["step"] for c in await client.task(limit=4)} == {1}
        endless = await client.task(limit=4, custom_inputs={"scenario": "endless"})
    assert [c.continuations[0]["step"] for c in endless] == [1, 2, 3, 4]


async def test_an_approved_call_runs_after_the_answer() -> None:
    """Its result has the approval's id, with no call before it; declined, it says so."""
    async with simulator("approval") as client:
        cycles = await client.task()
        asked = cycles[1].items[-1]
        assert asked["type"] == "mcp_approval_request"
        assert cycles[2].items[0] == {
            "type": "function_call_output",
            "call_id": asked["id"],
            "output": '{"sent": true}',
        }
        first = await client.cycle(QUESTION)
        pair = [*first.continuations, answer(first.continuations[0])]
        second = await client.cycle(QUESTION + pair)
        asked = second.items[-1]
        no = answer(asked) | {"approve": False}
        assert (await client.cycle([*QUESTION, *pair, asked, no])).items[0][
            "output"
        ] == "Declined by the user."


# --- the shape of events ------------------------------------------------------------------------------


async def test_the_raw_style_is_what_public_clients_read() -> None:
    """The pause event has just the documented members, and nothing is numbered."""
    async with simulator(scenario(TWO)) as client:
        cycle = await client.cycle(QUESTION)
    response_id = cycle.events[0]["id"]
    delta, done, call, output, pause = cycle.events[1:]
    assert re.fullmatch(r"resp_[0-9a-f]{32}", response_id)
    message_id = done["item"]["id"]
    assert delta == {
        "type": "response.output_text.delta",
        "item_id": message_id,
        "delta": "there.",
        "step": 1,
        "id": response_id,
    }
    text = {"type": "output_text", "text": "Hello there.", "annotations": []}
    assert done == {
        "type": "response.output_item.done",
        "item": {"type": "message", "id": message_id, "role": "assistant", "content": [text]},
        "id": response_id,
        "step": 1,
    }
    assert call["item"] | {"id": "", "call_id": ""} == {
        "type": "function_call",
        "id": "",
        "call_id": "",
        "name": "t",
        "arguments": "{}",
    }
    assert output["item"] == {
        "type": "function_call_output",
        "call_id": call["item"]["call_id"],
        "output": "o",
    }
    assert "step" not in output
    assert not output["id"].startswith("resp_")
    line = next(line for line in cycle.raw.split("\n") if "task_continue_request" in line)
    documented = (
        'data: {"type":"response.output_item.done","item":{"type":"task_continue_request",'
        f'"id":"{pause["item"]["id"]}","step":1}},"id":"{response_id}"}}'
    )
    assert line == documented
    assert re.fullmatch(r"continue_[0-9a-f]{32}", pause["item"]["id"])
    assert cycle.raw.endswith("data: [DONE]\n\n")
    assert cycle.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize(
    ("settings", "last", "done"),
    [
        ('after_continuation = "nothing"', "response.output_item.done", False),
        ('after_continuation = "completed"', "response.completed", False),
        ('after_continuation = "done"', "response.output_item.done", True),
        ('after_continuation = "both"', "response.completed", True),
    ],
)
async def test_what_follows_a_continuation_is_a_setting(settings: str, last: str, done: bool) -> None:
    """No source says what the real one does."""
    async with simulator(scenario(TWO, settings)) as client:
        cycle = await client.cycle(QUESTION)
    assert cycle.events[-1]["type"] == last
    assert cycle.raw.endswith("data: [DONE]\n\n") is done


async def test_the_openai_style_is_the_full_lifecycle() -> None:
    """Opening, added, parts, deltas, done, completed; numbers without holes; usage."""
    async with simulator("one-cycle") as client:
        cycle = await client.cycle(QUESTION)
    kinds = [event["type"] for event in cycle.events]
    message_kinds = [
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
    ]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[2:10] == [
        "response.output_item.added",
        *(f"response.{kind}" for kind in message_kinds),
        "response.output_item.done",
    ]
    assert kinds[10:14] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert [event["sequence_number"] for event in cycle.events] == list(range(len(kinds)))
    final = cycle.events[-1]["response"]
    assert final["output"] == cycle.items
    assert final["usage"]["total_tokens"] == final["usage"]["input_tokens"] + final["usage"]["output_tokens"]
    assert all(f"event: {kind}\ndata: " in cycle.raw for kind in kinds)


async def test_text_may_stand_in_deltas_only() -> None:
    """Then no message item is ever finished."""
    async with simulator(scenario(SAYS, 'text = "deltas"')) as client:
        cycle = await client.cycle(QUESTION)
    assert cycle.text == "Hello there."
    assert [item["type"] for item in cycle.items] == ["function_call", "function_call_output"]


async def test_a_repeated_step_counts() -> None:
    """``{n}`` is the count, a call may stay without a result, and a result may be of any size."""
    unanswered = '{call = "a", arguments = "no {n} json", answered = false, times = 2}'
    sized = '{call = "b", output_bytes = 99}'
    async with simulator(scenario(f"[[cycles]]\nsteps = [{unanswered}, {sized}]")) as client:
        first, second, _, result = (await client.cycle(QUESTION)).items
    assert [first["arguments"], second["arguments"]] == ["no 1 json", "no 2 json"]
    assert first["call_id"] != second["call_id"]
    assert len(result["output"]) == 99


async def test_inner_pairs_begin_again() -> None:
    """Each step has its own response id, numbers from 0 and indexes from 0, as MLflow agents send it."""
    async with simulator("inner-pairs") as client:
        cycle = await client.cycle(QUESTION)
    created = [event for event in cycle.events if event["type"] == "response.created"]
    assert len({event["response"]["id"] for event in created}) == 2
    assert [event["sequence_number"] for event in created] == [0, 0]
    assert [item["id"] for item in cycle.items if item["type"] == "message"] == ["__fake_id__"] * 2


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("databricks", 'event: error\ndata: {"error_code":"C","message":"M"}\n\ndata: [DONE]\n\n'),
        ("text", 'data: {"error":"M"}\n\ndata: [DONE]\n\n'),
        ("object", 'data: {"error":{"message":"M","type":"server_error","code":"C"}}\n\n'),
        ("typed", 'data: {"type":"error","error":{"message":"M","type":"server_error","code":"C"}}\n\n'),
        ("flat", 'data: {"type":"error","code":"C","message":"M","param":null}\n\n'),
        ("failed", '"status":"failed","output":[],"error":{"code":"C","message":"M"}}}\n\n'),
        ("response_error", '"error":{"message":"M","type":"server_error","code":"C"}}\n\n'),
    ],
)
async def test_an_error_in_a_200_has_each_known_form(form: str, expected: str) -> None:
    """Also where no stream was asked for: then the event stream holds the error only."""
    fault = f'faults = [{{kind = "error", form = "{form}", code = "C", message = "M"}}]'
    async with simulator(scenario(SAYS + fault)) as client:
        cycle = await client.cycle(QUESTION)
        whole = await client.post(QUESTION)
    assert cycle.raw.endswith(expected)
    assert [event["type"] for event in cycle.events[:-1]] == ["response.output_text.delta"]
    assert (whole.status_code, whole.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert whole.text.endswith(expected)


async def test_noise_is_written_as_it_stands() -> None:
    """Frames that no other field can say go out word for word."""
    async with simulator("noise") as client:
        first, second = await client.task()
    assert first.raw.startswith(": heartbeat\n\nretry: 3000\n\n")
    assert 'id: 7\nevent: progress\ndata: {"type":"supervisor.progress","percent":50}\n\n' in first.raw
    assert "data: not json\n\n" in second.raw


async def test_the_official_client_reads_the_openai_style() -> None:
    """Its stream helper checks the whole lifecycle, the final output included."""
    async with simulator("one-cycle") as client:
        sdk = openai.AsyncOpenAI(api_key="none", base_url=f"{client.http.base_url}/serving-endpoints")
        async with sdk, sdk.responses.stream(model="supervisor", input="Rain in Bergen?") as stream:
            final = await stream.get_final_response()
    assert final.output_text.endswith("14 mm of rain are expected.")
    assert final.usage is not None


async def test_the_official_client_reads_the_raw_style() -> None:
    """Plain streaming takes it, the pause item included."""
    async with simulator("default") as client:
        sdk = openai.AsyncOpenAI(api_key="none", base_url=f"{client.http.base_url}/serving-endpoints")
        async with sdk:
            options: Any = {"databricks_options": LONG}
            stream = await sdk.responses.create(model="m", input="Why?", stream=True, extra_body=options)
            events = [event async for event in stream]
    assert events[-1].item.type == "task_continue_request"


# --- requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
async def test_every_real_path_answers(path: str) -> None:
    """With the model that the path or the body names."""
    async with simulator("one-cycle") as client:
        answered = await client.http.post(path.format(endpoint="mas-1"), json={"input": "Hi"})
    assert answered.status_code == 200
    assert answered.json()["model"] == ("mas-1" if "{" in path else "supervisor")


async def test_other_paths_are_refused_in_the_vendors_form() -> None:
    """404 for what isn't there, 405 for another method, and an index at the root."""
    async with simulator() as client:
        missing = await client.http.post("/v1/chat/completions", json={})
        wrong = await client.http.get(RESPONSES)
        index = (await client.http.get("/")).json()
    assert (missing.status_code, missing.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")
    assert wrong.status_code == 405
    assert index["default"] == "default"
    assert set(index["scenarios"]) == set(shipped_scenarios())


async def test_a_request_may_choose_its_scenario() -> None:
    """By header or custom input, the latter first; only by the names that the simulator knows."""
    async with simulator("one-cycle") as client:
        headers = {"X-Simulate": "done-only"}
        body = {"input": "Hi", "custom_inputs": {"scenario": "client-tool"}}
        by_header = await client.http.post(RESPONSES, json={"input": "Hi"}, headers=headers)
        by_body = await client.http.post(RESPONSES, json=body, headers=headers)
        unknown = await client.post("Hi", custom_inputs={"scenario": "../default.toml"})
    assert "Föhn 2" in by_header.text
    assert by_body.json()["output"][-1]["name"] == "get_location"
    assert "No scenario is called" in message(unknown)


async def test_without_a_stream_the_answer_is_json() -> None:
    """A raw body has the four members of a public capture, and a long task its continuation."""
    async with simulator(scenario(TWO)) as client:
        body = (await client.post(QUESTION)).json()
    assert list(body) == ["model", "object", "output", "id"]
    assert [item["type"] for item in body["output"]][-1] == "task_continue_request"


async def test_without_long_task_all_cycles_come_at_once() -> None:
    """No continuation is offered; upstream's limit cuts what takes longer, 504 where it isn't streamed."""
    async with simulator() as client:
        whole = await client.cycle(QUESTION, databricks_options={})
        limited = await client.cycle(QUESTION, databricks_options={}, custom_inputs={"scenario": "limit"})
        timeout = await client.post(QUESTION, databricks_options={}, custom_inputs={"scenario": "limit"})
    assert whole.end == "ok"
    assert not whole.continuations
    assert whole.text.endswith("so take it as a rough one.")
    assert limited.end == "cut"
    assert limited.items[-1]["type"] == "function_call"
    assert (timeout.status_code, timeout.json()["error_code"]) == (504, "DEADLINE_EXCEEDED")


async def test_the_two_conversation_keys_exclude_each_other() -> None:
    """The text is what public clients log; a scenario may want it the other way round."""
    other = "Invalid request: '{}' field is not supported. Please use '{}' field instead."
    async with simulator(scenario(TWO, 'follow_up_key = "messages"')) as client:
        refused = await client.http.post(RESPONSES, json={"messages": QUESTION})
        assert message(refused) == other.format("messages", "input")
        first = await client.cycle(QUESTION)
        follow_up = [*QUESTION, *first.continuations, answer(first.continuations[0])]
        assert message(await client.post(follow_up)) == other.format("input", "messages")
        good = {"messages": follow_up, "databricks_options": LONG}
        assert (await client.http.post(RESPONSES, json=good)).status_code == 200
        for empty in ({}, {"input": []}, {"input": 7}):
            assert "must be a text or a list" in message(await client.http.post(RESPONSES, json=empty))


async def test_a_scenario_may_take_either_key() -> None:
    """Both kinds of client get an answer."""
    async with simulator(scenario(SAYS, 'accepts = "either"')) as client:
        for key in ("input", "messages"):
            assert (await client.http.post(RESPONSES, json={key: QUESTION})).status_code == 200


async def test_a_status_fault_may_have_a_body_of_its_own() -> None:
    """As a gateway in front of the API would send it."""
    async with simulator("gateway-timeout") as client:
        cycles = await client.task()
    assert cycles[-1].headers["content-type"].startswith("text/html")
    assert cycles[-1].raw.startswith("<html>")


async def test_a_body_above_the_limit_is_not_read_to_its_end() -> None:
    """413, the vendor's limit for any request."""
    async with simulator() as client:
        refused = await client.http.post(RESPONSES, content=b" " * (16 * 1024 * 1024 + 1))
    assert (refused.status_code, refused.json()["error_code"]) == (413, "REQUEST_TOO_LARGE")


async def test_every_table_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest entries go first; a continuation that was forgotten is an unknown one."""
    monkeypatch.setattr("proxy.simulator.tickets.MAX_TICKETS", 2)
    monkeypatch.setattr("proxy.simulator.tickets.MAX_TASKS", 2)
    async with simulator(scenario(TWO)) as client:
        asks = [(await client.cycle(QUESTION)).continuations[0] for _ in range(3)]
        refused = await client.post([*QUESTION, asks[0], answer(asks[0])])
        assert "Unknown continue_request_id" in message(refused)
        assert (await client.cycle([*QUESTION, asks[1], answer(asks[1])])).end == "ok"
        facts = (await client.http.get("/simulator/requests")).json()
    assert (facts["count"], len(facts["by_task"])) == (4, 2)


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    """400, whatever is wrong with it."""
    async with simulator() as client:
        refused = await client.http.post(RESPONSES, content=body)
    assert (refused.status_code, refused.json()["error_code"]) == (400, "MALFORMED_REQUEST")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (
            rb'{"input": [{"type": ["x"]}, 7, null, "\ud800"], "databricks_options": 1, "custom_inputs": []}',
            200,
        ),
        (rb'{"input": "\ud800", "model": "\ud800", "stream": "yes"}', 200),
        (rb'{"input": "a", "custom_inputs": {"scenario": ["\ud800"]}}', 400),
        (rb'{"input": [{"type": "task_continue_response", "continue_request_id": "\ud800"}]}', 400),
    ],
)
async def test_an_odd_body_gets_an_answer(body: bytes, status: int) -> None:
    """Never a 500: what can be read is a conversation, whatever stands in it."""
    async with simulator(scenario(SAYS)) as client:
        assert (await client.http.post(RESPONSES, content=body)).status_code == status


async def test_a_scenario_may_want_a_token() -> None:
    """401 without it."""
    async with simulator(scenario(SAYS, 'token = "t0k"')) as client:
        assert (await client.post("Hi")).status_code == 401
        client.http.headers["Authorization"] = "Bearer t0k"
        assert (await client.post("Hi")).status_code == 200


# --- strict follow-ups --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["last_pair", "all_pairs", "all_items"])
@pytest.mark.parametrize("wanted", ["any", "last_pair", "all_pairs", "all_items"])
async def test_a_scenario_may_want_one_replay_form(policy: str, wanted: str) -> None:
    """Any other gets the 400 that was seen live."""
    async with simulator(scenario(THREE, f'replay = "{wanted}"')) as client:
        cycles = await client.task(policy)
    if wanted in ("any", policy):
        assert cycles[-1].end == "ok"
    else:
        assert cycles[-1].end == "400"
        assert json.loads(cycles[-1].raw)["message"] == "Invalid message sequence."


BAD = {
    "no original": (lambda ask, reply: [ask, reply], "begin with the original conversation"),
    "changed original": (
        lambda ask, reply: [QUESTION[0] | {"content": "?"}, ask, reply],
        "begin with the original conversation",
    ),
    "no request": (lambda ask, reply: [*QUESTION, reply], "must stand, as sent, before"),
    "not directly before": (
        lambda ask, reply: [*QUESTION, ask, *QUESTION, reply],
        "must stand, as sent, before",
    ),
    "changed request": (
        lambda ask, reply: [*QUESTION, ask | {"step": 7}, reply],
        "must stand, as sent, before",
    ),
    "unknown id": (
        lambda ask, reply: [*QUESTION, ask, reply | {"continue_request_id": "continue_0"}],
        "Unknown continue_request_id",
    ),
    "unknown id before": (
        lambda ask, reply: [*QUESTION, ask, reply | {"continue_request_id": "continue_0"}, ask, reply],
        "belongs to no cycle of this task",
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_follow_up_in_a_wrong_form_is_refused(case: str) -> None:
    """And the right one still goes through afterwards: a refused request has taken nothing."""
    build, expected = BAD[case]
    async with simulator(scenario(TWO)) as client:
        ask = (await client.cycle(QUESTION)).continuations[0]
        assert expected in message(await client.post(build(ask, answer(ask))))
        reordered = {"step": ask["step"], "id": ask["id"], "type": ask["type"]}
        assert (await client.cycle([*QUESTION, reordered, answer(ask)])).end == "ok"


async def test_both_of_two_continuations_must_be_answered() -> None:
    """One response is not enough, with or without the other's request."""
    async with simulator("two-continuations") as client:
        one, two = (await client.cycle(QUESTION)).continuations
        for follow_up in ([one, answer(one)], [one, two, answer(two)]):
            refused = await client.post(QUESTION + follow_up)
            assert f"No task_continue_response for {two['id'] if two not in follow_up else one['id']}" in (
                message(refused)
            )
        assert (await client.cycle([*QUESTION, one, answer(one), two, answer(two)])).end == "ok"


async def test_a_continuation_is_answered_once() -> None:
    """A second follow-up with the same newest id is refused; a new turn of the conversation is not."""
    async with simulator(scenario(TWO)) as client:
        ask = (await client.cycle(QUESTION)).continuations[0]
        follow_up = [*QUESTION, ask, answer(ask)]
        assert (await client.cycle(follow_up)).end == "ok"
        assert "can be answered once only" in message(await client.post(follow_up))
        assert (await client.cycle(follow_up + QUESTION)).continuations
        facts = (await client.http.get("/simulator/requests")).json()
    assert (facts["count"], facts["first"], facts["follow_ups"], facts["refused"]) == (3, 2, 1, 1)
    assert next(iter(facts["by_task"].values())) == {
        "scenario": "test",
        "first": 1,
        "follow_ups": 1,
        "refused": 1,
        "answered": {ask["id"]: 1},
    }


async def test_a_follow_up_must_ask_for_a_long_task_again() -> None:
    """All public clients repeat it."""
    async with simulator(scenario(TWO)) as client:
        ask = (await client.cycle(QUESTION)).continuations[0]
        refused = await client.post([*QUESTION, ask, answer(ask)], databricks_options={})
        assert "databricks_options.long_task must be true" in message(refused)


@pytest.mark.parametrize(
    "form",
    [
        {"role": "user", "content": "Why?"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
    ],
)
async def test_a_plain_text_may_come_back_as_a_message(form: dict[str, Any]) -> None:
    """A conversation given as a string has to become items before something can follow it."""
    async with simulator(scenario(TWO)) as client:
        ask = (await client.cycle("Why?")).continuations[0]
        assert (await client.cycle([form, ask, answer(ask)])).end == "ok"


async def test_people_may_add_messages_before_the_open_pair() -> None:
    """A strict form counts items of the agent only."""
    async with simulator("last-pair") as client:
        ask = (await client.cycle(QUESTION)).continuations[0]
        assert (await client.cycle([*QUESTION, *QUESTION, ask, answer(ask)])).end == "ok"


async def test_an_approval_needs_its_request() -> None:
    """An answer alone is an invalid sequence, an unknown one is refused, an old one is history."""
    asks = '[[cycles]]\nsteps = [{call = "mail", ask = "approval"}]\n'
    async with simulator(scenario(asks + SAYS)) as client:
        ask = (await client.cycle(QUESTION)).items[-1]
        assert message(await client.post([*QUESTION, answer(ask)])) == "Invalid message sequence."
        unknown = answer(ask) | {"approval_request_id": "toolu_0"}
        assert "Unknown approval_request_id" in message(await client.post([*QUESTION, ask, unknown]))
        assert (await client.cycle([*QUESTION, ask, answer(ask)])).end == "ok"
        assert "once only" in message(await client.post([*QUESTION, ask, answer(ask)]))
        again = await client.cycle([*QUESTION, ask, answer(ask), *QUESTION])
    assert again.items[-1]["type"] == "mcp_approval_request"


async def test_after_an_approval_the_clients_conversation_is_the_original() -> None:
    """Whoever answers wrote the conversation anew; later follow-ups must begin with that one."""
    asks = '[[cycles]]\nsteps = [{call = "mail", ask = "approval"}]\n'
    async with simulator(scenario(asks + TWO, 'replay = "all_items"')) as client:
        ask = (await client.cycle(QUESTION)).items[-1]
        base = [*QUESTION, ask, answer(ask)]
        cycle = await client.cycle(base)
        pair = [cycle.continuations[0], answer(cycle.continuations[0])]
        refused = await client.post(QUESTION + cycle.items[:-1] + pair)
        assert "begin with the original conversation" in message(refused)
        assert (await client.cycle(base + cycle.items[:-1] + pair)).end == "ok"


# --- the connection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["head_seconds = inf", 'faults = [{kind = "silence", seconds = inf}]'])
async def test_a_client_that_leaves_ends_the_work(where: str) -> None:
    """Nothing stays open, and the count says that somebody left."""
    app = simulator_app(scenario(SAYS + where), speed=0)
    async with serve(app) as server, httpx.AsyncClient(base_url=server.url, verify=False) as http:
        async with anyio.create_task_group() as group:
            body = {"input": "Hi", "stream": True}
            group.start_soon(lambda: http.post(RESPONSES, json=body))
            await until(lambda: server.requests_open == 1)
            group.cancel_scope.cancel()
        await until(lambda: server.requests_open == 0)
        facts = (await http.get("/simulator/requests")).json()
    assert (facts["open"], facts["left"]) == (0, 1)


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_cut_leaves_no_complaint_in_the_servers_log(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was meant to happen; also where no stream was asked for, and no head has gone out."""
    fault = f'faults = [{{kind = "cut", how = "{how}", after = 2}}]'
    async with simulator(scenario(SAYS + fault)) as client:
        cycle = await client.cycle(QUESTION)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await client.post(QUESTION)
        facts = (await client.http.get("/simulator/requests")).json()
    assert len(cycle.events) == 2
    assert cycle.end == ("cut" if how == "fin" else "reset")
    assert (facts["open"], facts["left"]) == (0, 0)
    assert not caplog.records


async def test_each_event_is_one_write() -> None:
    """Whoever reads sees an event as soon as it is made: sends to the server are one frame each."""
    sent: list[bytes] = []
    app = simulator_app("one-cycle", speed=0)
    body = json.dumps({"input": "Hi", "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": "/responses", "headers": [], "query_string": b""}
    await app(scope, receive, send)  # type: ignore[arg-type]
    frames = [data for data in sent if data]
    assert all(frame.count(b"\n\n") == 1 and frame.endswith(b"\n\n") for frame in frames)
    assert len(frames) == 35


@pytest.mark.parametrize("speed", [-1.0, float("nan")])
async def test_a_speed_below_zero_is_refused(speed: float) -> None:
    """Before anything is served."""
    with pytest.raises(ValueError, match="speed must be 0 or more"):
        simulator_app(speed=speed)


async def test_speed_scales_the_script() -> None:
    """Ten thousand times as fast, forty seconds are no wait."""
    app = simulator_app("slow-call", speed=10_000)
    async with serve(app) as server, httpx.AsyncClient(base_url=server.url, verify=False) as http:
        assert (await Client(http).task())[-1].end == "ok"
