"""Behind a proxy that publishes legato under a path prefix, whether it takes the prefix off or not."""

from __future__ import annotations

import json

import pytest
from support.frames import two_cycles
from support.legato import OWNER, ROUTE, proxied, request
from support.rules import check
from support.upstream import Answer

pytestmark = pytest.mark.anyio

ROOT = "/agents"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ("/agents/c/a%2Fb?x=%2F&x", "/c/a%2Fb?x=%2F&x"),
        ("/agents//d", "//d"),
        ("/agents/%E4%BD%A0", "/%E4%BD%A0"),
        ("/agents", "/"),
        ("/agents?q", "/?q"),
        ("/agents/", "/"),
        ("/agents/agents/x", "/agents/x"),
        ("/agentsmith/x", "/agentsmith/x"),
        ("/%61gents/x", "/%61gents/x"),
        ("/x/agents/y", "/x/agents/y"),
        ("/", "/"),
    ],
)
async def test_the_prefix_is_taken_off_once(sent: str, arrives: str):
    """The rest of path and query stays as it is, byte for byte; a path without the prefix stays whole."""
    async with proxied(root_path=ROOT) as (upstream, proxy):
        await proxy.ask(request(method="GET", path=sent), "GET")
        assert upstream.requests[0].target == arrives.encode()


@pytest.mark.parametrize("root", [ROOT, ""])
@pytest.mark.parametrize("path", ["/legato", "/legato/", "/legato/health"])
async def test_legatos_own_routes_stay_right(root: str, path: str):
    """With the prefix as clients see them, without it for checks from inside; there is no redirect."""
    async with proxied(root_path=ROOT) as (upstream, proxy):
        answer = await proxy.ask(request(method="GET", path=root + path), "GET")
        assert (answer.status, answer.one("location")) == (200, None)
        assert upstream.requests == []


async def test_a_task_runs_under_the_prefix():
    """Its route counts without the prefix, in every cycle; the task can be asked for."""
    async with proxied(root_path=ROOT) as (upstream, proxy):
        upstream.plays(*two_cycles())
        reading = await proxy.whole(path=ROOT + ROUTE)
        check(reading.body)
        assert [seen.target for seen in upstream.requests] == [ROUTE.encode()] * 2
        path = f"{ROOT}/legato/tasks/{reading.task}"
        answer = await proxy.ask(request(method="GET", path=path, headers=[OWNER]), "GET")
        assert json.loads(answer.body)["route"] == ROUTE


async def test_a_proxy_that_takes_the_prefix_off_needs_no_setting():
    """What arrives is what it would be without that proxy; legato gives no address that lacks the prefix."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        check((await proxy.whole(path=ROUTE)).body)
        for path in ("/legato", "/legato/tasks"):
            answer = await proxy.ask(request(method="GET", path=path, headers=[OWNER]), "GET")
            assert (answer.status, answer.one("location")) == (200, None)


async def test_a_slash_too_many_is_told_and_not_redirected():
    """A redirect would have to know host, scheme and prefix that the client sees; there is none."""
    async with proxied(root_path=ROOT) as (_, proxy):
        answer = await proxy.ask(request(method="GET", path=f"{ROOT}/legato/tasks/"), "GET")
        assert (answer.status, answer.one("location")) == (404, None)
        assert json.loads(answer.body)["error"]["code"] == "not_found"


async def test_prefix_and_root_path_go_together():
    """A deployment may choose both."""
    async with proxied(root_path="/a/b", prefix="/-/own") as (upstream, proxy):
        answer = await proxy.ask(request(method="GET", path="/a/b/-/own/health"), "GET")
        assert (answer.status, upstream.requests) == (200, [])
        await proxy.ask(request(method="GET", path="/a/b/legato/health"), "GET")
        assert upstream.requests[0].target == b"/legato/health"


async def test_what_a_proxy_in_front_tells_goes_through():
    """legato believes no forwarded header, and takes none away: upstream sees them as they came."""
    async with proxied(root_path=ROOT) as (upstream, proxy):
        told = [
            ("x-forwarded-for", "192.0.2.7"),
            ("x-forwarded-proto", "https"),
            ("forwarded", "for=192.0.2.7"),
        ]
        upstream.plays(Answer(chunks=[b"ok"]))
        await proxy.ask(request(method="GET", path="/agents/x", headers=told), "GET")
        assert [upstream.requests[0].one(name) for name, _ in told] == [value.encode() for _, value in told]
