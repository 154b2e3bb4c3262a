"""Clients that run in Node, and a page in Chromium."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest
from clients.table import NODE, check, chromium, facts, node, node_version, rows, run, supervisors
from starlette.applications import Starlette
from starlette.responses import FileResponse
from starlette.routing import Route
from support.frames import asks, completed, created, delta, done, message, sse
from support.legato import proxied
from support.server import serve

pytestmark = pytest.mark.anyio


async def test_openai() -> None:
    """``create`` reads everything; the helper needs the full lifecycle, and its final response is whole."""
    created, streamed = await rows(node("openai.mjs", "create,stream"))
    version = node_version("openai")
    check("openai-node, `responses.create`", version, created)
    check("openai-node, `responses.stream`", version, streamed, whole=["openai"])


async def test_ai_sdk() -> None:
    """With two providers; a header asks for the long task."""
    databricks, openai = await rows(node("ai_sdk.mjs", "databricks,openai"))
    name = "@databricks/ai-sdk-provider"
    check(f"`{name}`, `streamText`", node_version(name), databricks)
    name = "@ai-sdk/openai"
    check(f"`{name}`, `streamText`", node_version(name), openai, whole=["openai"])


# --- a page in Chromium -------------------------------------------------------------------------------


@pytest.fixture
async def page() -> AsyncIterator[str]:
    """The page, on an origin of its own."""
    app = Starlette(routes=[Route("/", lambda _: FileResponse(NODE / "page.html"))])
    async with serve(app) as server:
        yield server.url


async def test_a_page_of_another_origin(page: str) -> None:
    """It reads all five cycles, preflight and all, and may read the task's id."""
    (seen,) = await rows(chromium(page), cors_origins=(page,))
    check("A page in Chromium, `fetch`", "", seen)
    assert [line["task"][:5] for line in seen.values()] == ["", "task_", "", "task_"]


async def test_a_page_that_is_not_listed(page: str) -> None:
    """It gets nothing, by the browser's own rule."""
    async with supervisors(cors_origins=("http://app.example",)) as urls:
        (seen,) = await run([*chromium(page), urls[1]])
    assert facts(seen) == {"text": "none", "ids": 0, "error": "TypeError: Failed to fetch"}


async def test_the_abort_button(page: str) -> None:
    """The connection is closed while the browser stays open, and the task goes on to its end."""
    gate = anyio.Event()
    command = chromium(f"{page}#abort")
    found = []
    async with proxied(cors_origins=(page,)) as (upstream, proxy), anyio.create_task_group() as group:
        upstream.plays(
            sse(created(), delta("one"), gate, done(message("one")), asks()),
            sse(delta("two", "m2"), completed(message("two", "m2"), response="resp_u2")),
        )

        async def drive() -> None:
            found.extend(await run([*command, proxy.url]))

        group.start_soon(drive)
        await upstream.until(lambda: len(upstream.requests) == 1, limit=30)
        with anyio.fail_after(30):
            while proxy.server.requests_open:
                await anyio.lowlevel.checkpoint()
        (task,) = await proxy.tasks()
        assert task["state"] == "running"
        gate.set()
    (seen,) = found
    assert seen["error"].startswith("AbortError")
    assert (seen["text"], seen["task"], seen["told"]) == ("one", task["id"], "completed")
    assert [request.method for request in upstream.requests] == ["POST", "POST"]
