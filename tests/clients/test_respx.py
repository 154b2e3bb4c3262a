"""respx in place of upstream, beneath the whole app: for people who test what stands behind legato."""

from __future__ import annotations

import json

import httpx
import pytest
import respx
from support.cases import assert_continues
from support.frames import SSE, two_cycles
from support.legato import ASKED, ROUTE, legato
from support.rules import check

pytestmark = pytest.mark.anyio

UPSTREAM = "http://supervisor.example"


async def test_respx_plays_upstream_for_the_whole_app() -> None:
    """Both requests reach respx, with method, URL, headers and body; its answers make the stream."""
    bodies = [b"".join(chunk for chunk in one.chunks if isinstance(chunk, bytes)) for one in two_cycles()]
    with respx.MockRouter(using="httpx") as router:
        route = router.post(UPSTREAM + ROUTE, params={"a": "1"})
        route.side_effect = [httpx.Response(200, headers=SSE, content=body) for body in bodies]
        async with legato(UPSTREAM) as proxy:
            stream = check((await proxy.whole(path=f"{ROUTE}?a=1")).body)
    assert stream.types[-1] == "response.completed"
    first, follow_up = (call.request for call in route.calls)
    assert json.loads(first.content) == ASKED
    assert first.headers["authorization"] == follow_up.headers["authorization"] == "Bearer tok-A"
    asked = {"type": "task_continue_request", "id": "continue_a1", "step": 3}
    assert_continues(first.content, follow_up.content, asked)


async def test_respx_may_refuse_and_fail() -> None:
    """A refusal is handed on; a connection that can't be made is 502, and says that it may be repeated."""
    with respx.MockRouter(using="httpx") as router:
        route = router.post(UPSTREAM + ROUTE)
        async with legato(UPSTREAM) as proxy:
            route.mock(return_value=httpx.Response(403, json={"error_code": "PERMISSION_DENIED"}))
            refused = await proxy.whole()
            assert (refused.status, json.loads(refused.body)["error_code"]) == (403, "PERMISSION_DENIED")
            route.mock(side_effect=httpx.ConnectError("refused"))
            failed = await proxy.whole()
            assert (failed.status, failed.one("x-should-retry")) == (502, "true")
            assert await proxy.tasks() == []
