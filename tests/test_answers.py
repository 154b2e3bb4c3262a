"""A task that waits for a person: the answer is a new task, and goes on where the old one stopped."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.server import serve

from proxy.settings import Settings
from proxy.simulator import Scenario, parse_scenario, simulator_app
from proxy.web.app import create_app

pytestmark = pytest.mark.anyio

PATH = "/serving-endpoints/sup/invocations"
OWNER = {"authorization": "Bearer tok-A"}
QUESTION = {"role": "user", "content": "clean up"}


@pytest.fixture
def anyio_backend() -> str:
    """The server runs on asyncio."""
    return "asyncio"


@asynccontextmanager
async def legato(scenario: str | Scenario, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The simulator behind the proxy, and a client at the proxy."""
    async with serve(simulator_app(scenario, speed=0)) as supervisor:
        app = create_app(Settings(upstream=supervisor.url, log="memory:", **settings))
        async with serve(app) as proxy, httpx.AsyncClient(base_url=proxy.url, timeout=10) as client:
            yield client


async def ask(client: httpx.AsyncClient, items: list[Any], **more: Any) -> tuple[list[Any], str]:
    """One request: its events (without ``[DONE]``) and its task's id."""
    body = {"input": items, "stream": True, "databricks_options": {"long_task": True}, **more}
    answer = await client.post(PATH, json=body, headers=OWNER)
    assert answer.status_code == 200, answer.text
    frames = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(frame) for frame in frames], answer.headers["legato-task"]


async def state(client: httpx.AsyncClient, task: str) -> Any:
    """What legato says of a task."""
    return (await client.get(f"/legato/tasks/{task}", headers=OWNER)).json()


def done_items(events: list[Any]) -> list[Any]:
    """The finished items of a stream."""
    return [event["item"] for event in events if event.get("type") == "response.output_item.done"]


def approvals(items: list[Any]) -> list[Any]:
    """An answer for each approval that was asked for."""
    return [
        {"type": "mcp_approval_response", "approval_request_id": item["id"], "approve": True}
        for item in items
        if item["type"] == "mcp_approval_request"
    ]


async def test_an_answer_continues_the_task_that_waits_for_it() -> None:
    """The answer starts a task of its own, linked with the old one both ways."""
    async with legato("approval") as client:
        events, first = await ask(client, [QUESTION])
        items = done_items(events)
        waiting = await state(client, first)
        assert waiting["state"] == "input_required"
        assert waiting["reason"] == "approval"
        (action,) = waiting["required_actions"]
        assert (action["kind"], action["id"]) == ("approval", approvals(items)[0]["approval_request_id"])

        _, second = await ask(client, [QUESTION, *items, *approvals(items)])
        assert second != first
        new, old = await state(client, second), await state(client, first)
        assert (new["state"], new["continues"]) == ("completed", first)
        assert (old["state"], old["continued_by"]) == ("completed", second)
        assert old["required_actions"] == []


async def test_the_open_continuation_goes_along_with_the_answer() -> None:
    """An approval beside a continuation: the answer's request carries the pair, so upstream goes on."""
    async with legato("approval-and-continuation") as client:
        events, first = await ask(client, [QUESTION])
        items = done_items(events)
        assert (await state(client, first))["state"] == "input_required"
        assert not [item for item in items if item["type"] == "task_continue_request"]

        _, second = await ask(client, [QUESTION, *items, *approvals(items)])
        assert (await state(client, second))["state"] == "completed"
        counts = (await client.get("/simulator/requests")).json()
        (task,) = counts["by_task"].values()
        assert list(task["answered"].values()) == [1, 1]  # the approval and the continuation, once each


async def test_cycles_count_over_the_tasks_of_one_work() -> None:
    """The limit of the work isn't reset by an answer in between."""
    scenario = parse_scenario(
        """
        description = "an approval in the first of three cycles"
        [[cycles]]
        steps = [{say = "May I?", ask = "approval", call = "delete", arguments = "{}", output = "ok"}]
        [[cycles]]
        steps = [{say = "two"}]
        [[cycles]]
        steps = [{say = "three"}]
        """
    )
    async with legato(scenario, max_cycles=2) as client:
        events, first = await ask(client, [QUESTION])
        items = done_items(events)
        assert (await state(client, first))["state"] == "input_required"
        _, second = await ask(client, [QUESTION, *items, *approvals(items)])
        ended = await state(client, second)
        assert (ended["state"], ended["reason"], ended["cycles"]) == ("incomplete", "max_cycles", 1)


async def test_another_owner_answers_nothing() -> None:
    """The same ids from another credential are an ordinary request."""
    async with legato("approval") as client:
        events, first = await ask(client, [QUESTION])
        items = done_items(events)
        body = {
            "input": [QUESTION, *items, *approvals(items)],
            "stream": True,
            "databricks_options": {"long_task": True},
        }
        other = {"authorization": "Bearer tok-B"}
        answer = await client.post(PATH, json=body, headers=other)
        task = answer.headers["legato-task"]
        assert (await client.get(f"/legato/tasks/{task}", headers=other)).json()["continues"] is None
        assert (await state(client, first))["state"] == "input_required"
