"""A task whose process has gone: it is never left running, and nothing of it is sent again."""

from __future__ import annotations

import sys

import anyio
import anyio.abc
import httpx
import pytest
from support.frames import asks, created, done, message, sse
from support.rules import check
from support.server import serve
from support.upstream import Answer, ScriptedUpstream

from proxy.core.ledger import Ledger
from proxy.core.messages import Event, Summary
from proxy.core.restart import settle
from proxy.settings import Settings
from proxy.web.app import create_app

pytestmark = pytest.mark.anyio

BODY = {"input": "hi", "stream": True, "databricks_options": {"long_task": True}}
PATH = "/serving-endpoints/sup/invocations"


@pytest.fixture
def anyio_backend() -> str:
    """The server runs on asyncio."""
    return "asyncio"


def test_a_task_that_only_waited_is_held() -> None:
    """Without a standing intent mark nothing was on its way."""
    records, summary = settle(Ledger(cycle=2), Summary("continuing", open=True), response_id="r", now=1.0)
    assert (summary.state, summary.reason, summary.open) == ("held", "restart", False)
    assert not [record for record in records if isinstance(record, Event)]


@pytest.mark.parametrize(
    ("cycle", "state", "code"),
    [(1, "failed", "upstream_incomplete"), (2, "needs_review", "continuation_unknown")],
)
def test_a_request_on_its_way_has_an_unknown_outcome(cycle: int, state: str, code: str) -> None:
    """Its mark stands: a first cycle has failed, a later one needs a person, and the stream says so."""
    ledger = Ledger(cycle=cycle, operation="op_1", cursor=4, response_id="resp_1")
    records, summary = settle(ledger, Summary("running", open=True), response_id="r", now=1.0)
    (event,) = [record for record in records if isinstance(record, Event)]
    assert event.cursor == 5
    assert f'"code":"{code}"'.encode() in event.data
    assert (summary.state, summary.reason, summary.open) == (state, code, False)


async def test_a_stop_in_the_middle_ends_the_stream_with_the_truth(tmp_path) -> None:
    """After the drain an open client's stream ends well-formed, with a failure and no success made up."""
    async with ScriptedUpstream() as upstream:
        first = sse(created(), done(message("one", "m1")), asks())
        open_end = Answer(
            headers={"content-type": "text/event-stream"}, chunks=[created("resp_u2")], end="hang"
        )
        upstream.plays(first, open_end)
        app = create_app(Settings(upstream=upstream.url, log=f"sqlite:{tmp_path}/log.db", drain=0.0))
        async with serve(app) as proxy, httpx.AsyncClient(base_url=proxy.url, timeout=10) as client:
            async with client.stream("POST", PATH, json=BODY) as answer:
                await upstream.until(lambda: len(upstream.requests) == 2)
                with anyio.fail_after(5):
                    await app.drain()
                    body = await answer.aread()
            assert check(body).types[-1] == "response.failed"
            assert b"continuation_unknown" in body
            refused = await client.post(PATH, json=BODY)
            assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
            task = answer.headers["legato-task"]
            told = (await client.get(f"/legato/tasks/{task}")).json()
            assert (told["state"], told["reason"]) == ("needs_review", "continuation_unknown")
        await upstream.until(lambda: upstream.open == 0)
        assert len(upstream.requests) == 2


async def started(upstream: str, log: str) -> tuple[anyio.abc.Process, str]:
    """A real ``legato serve`` and its URL."""
    command = [sys.executable, "-c", "from proxy.cli import main; main()", "serve", "--port", "0"]
    process = await anyio.open_process([*command, "--upstream", upstream, "--log", log], stderr=None)
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        line += await process.stdout.receive()
    return process, line.decode().split()[-1]


async def test_a_kill_leaves_no_task_running(tmp_path) -> None:
    """After kill -9 in a later cycle and a new start the task needs a person; nothing was sent again."""
    log = f"sqlite:{tmp_path}/log.db"
    async with ScriptedUpstream() as upstream:
        first = sse(created(), done(message("one", "m1")), asks())
        hanging = Answer(headers={"content-type": "text/event-stream"}, chunks=[], end="hang")
        upstream.plays(first, hanging)
        with anyio.fail_after(20):
            process, url = await started(upstream.url, log)
            async with (
                httpx.AsyncClient(base_url=url) as client,
                client.stream("POST", PATH, json=BODY) as answer,
            ):
                await upstream.until(lambda: len(upstream.requests) == 2)
                process.kill()
                await process.wait()
                task = answer.headers["legato-task"]
            process, url = await started(upstream.url, log)
            try:
                async with httpx.AsyncClient(base_url=url) as client:
                    told = (await client.get(f"/legato/tasks/{task}")).json()
            finally:
                process.terminate()
                assert await process.wait() == 0
        assert (told["state"], told["reason"]) == ("needs_review", "continuation_unknown")
        assert len(upstream.requests) == 2
