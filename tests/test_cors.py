"""Browsers: which pages may call legato, and what they may read of its answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support.client import RawAnswer
from support.frames import two_cycles
from support.legato import OWNER, ROUTE, Legato, legato, proxied, request
from support.rules import check
from support.upstream import Answer, ScriptedUpstream

from proxy.settings import Settings
from proxy.web.app import App, around
from proxy.web.cors import ALLOWED, EXPOSED, answer_headers

pytestmark = pytest.mark.anyio

PAGE = "https://app.example"
STRANGER = "https://evil.example"
Pair = tuple[ScriptedUpstream, Legato]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """An upstream, and legato before it, with two listed origins."""
    async with proxied(cors_origins=(PAGE, "http://localhost:3000")) as both:
        yield both


def preflight(*names: str, origin: str = PAGE, method: str = "POST", path: str = ROUTE) -> bytes:
    """What a browser asks before it sends these headers."""
    asked = [("access-control-request-headers", ",".join(names))] if names else []
    headers = [("origin", origin), ("access-control-request-method", method), *asked]
    return request(method="OPTIONS", path=path, headers=headers)


def listed(answer: RawAnswer, name: str) -> list[str]:
    """The names in a header that stands once."""
    return [part.strip() for part in (answer.one(name) or b"").decode().split(",")]


def says_nothing_of_origins(answer: RawAnswer) -> bool:
    """Whether a browser would keep this answer from every page."""
    return not any(name.lower().startswith(b"access-control-") for name, _ in answer.headers)


# --- preflights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
@pytest.mark.parametrize("path", [ROUTE, "/legato/tasks", "/api/2.0/anything"])
async def test_a_preflight_is_answered_on_every_path(pair: Pair, origin: str, path: str):
    """By legato itself, with exactly the page's origin and without cookies; upstream hears nothing."""
    upstream, proxy = pair
    answer = await proxy.ask(preflight(origin=origin, path=path), "OPTIONS")
    assert (answer.status, answer.one("access-control-allow-origin")) == (200, origin.encode())
    assert answer.one("access-control-allow-credentials") is None
    assert "Origin" in listed(answer, "vary")
    assert {"GET", "POST", "DELETE", "PUT", "PATCH"} <= set(listed(answer, "access-control-allow-methods"))
    assert upstream.requests == []


async def test_a_preflight_allows_what_it_asks_for(pair: Pair):
    """PX-10: the known headers always, ``Last-Event-ID`` among them; others where they are asked for."""
    _, proxy = pair
    plain = await proxy.ask(preflight(), "OPTIONS")
    assert listed(plain, "access-control-allow-headers") == list(ALLOWED)
    asked = ("authorization", "x-stainless-os", "legato-engage", "legato-limits")
    more = await proxy.ask(preflight(*asked), "OPTIONS")
    assert listed(more, "access-control-allow-headers") == [*ALLOWED, *asked[1:]]


async def test_what_is_no_header_name_is_not_echoed(pair: Pair):
    """A name with a character that names don't have is left out."""
    _, proxy = pair
    answer = await proxy.ask(preflight("x-good", "x bad", 'x"worse'), "OPTIONS")
    assert listed(answer, "access-control-allow-headers") == [*ALLOWED, "x-good"]


async def test_a_preflight_from_elsewhere_is_refused(pair: Pair):
    """No origin is allowed by it, and upstream isn't asked instead."""
    upstream, proxy = pair
    for origin in (STRANGER, "null", "https://app.example.evil.example", "http://app.example"):
        answer = await proxy.ask(preflight(origin=origin), "OPTIONS")
        assert (answer.status, answer.one("access-control-allow-origin")) == (400, None)
    assert upstream.requests == []


async def test_a_page_in_the_internet_may_call_a_private_address(pair: Pair):
    """Some browsers ask for that by a header of its own; a listed origin may."""
    _, proxy = pair
    headers = [("origin", PAGE), ("access-control-request-method", "GET")]
    headers.append(("access-control-request-private-network", "true"))
    answer = await proxy.ask(request(method="OPTIONS", path=ROUTE, headers=headers), "OPTIONS")
    assert (answer.status, answer.one("access-control-allow-private-network")) == (200, b"true")


async def test_other_options_requests_go_to_upstream(pair: Pair):
    """Only what a browser asks before a request is a preflight."""
    upstream, proxy = pair
    upstream.plays(Answer(status=204, headers={"allow": "GET, OPTIONS"}, framing="none"))
    answer = await proxy.ask(request(method="OPTIONS", path="/x", headers=[("origin", PAGE)]), "OPTIONS")
    assert (answer.status, answer.one("allow")) == (204, b"GET, OPTIONS")
    assert answer.one("access-control-allow-origin") == PAGE.encode()


# --- answers ------------------------------------------------------------------------------------------


async def test_a_task_can_be_read_by_a_page(pair: Pair):
    """Its stream is the same, and its id may be read."""
    upstream, proxy = pair
    upstream.plays(*two_cycles())
    reading = await proxy.whole(headers=[OWNER, ("origin", PAGE)])
    check(reading.body)
    assert reading.one("access-control-allow-origin") == PAGE
    exposed = reading.one("access-control-expose-headers")
    assert exposed == ", ".join(EXPOSED)
    assert {"Legato-Task", "Legato-Resume-Token", "Legato-Cursor", "Legato-After"} <= set(EXPOSED)
    assert reading.one("vary") == "Origin"
    assert len(upstream.requests) == 2


async def test_upstreams_word_on_origins_is_replaced(pair: Pair):
    """There is one ``Access-Control-Allow-Origin``, whatever upstream says; what it exposes stays exposed."""
    upstream, proxy = pair
    theirs = [
        ("access-control-allow-origin", "*"),
        ("Access-Control-Allow-Origin", STRANGER),
        ("access-control-allow-credentials", "true"),
        ("Access-Control-Expose-Headers", "x-upstream, retry-after"),
        ("vary", "accept-encoding"),
        ("Vary", "origin"),
        ("x-upstream", "1"),
    ]
    upstream.plays(Answer(headers=theirs, chunks=[b"ok"], framing="length"))
    answer = await proxy.ask(request(method="GET", path="/x", headers=[("origin", PAGE)]), "GET")
    assert (answer.one("access-control-allow-origin"), answer.body) == (PAGE.encode(), b"ok")
    assert answer.one("access-control-allow-credentials") is None
    assert listed(answer, "access-control-expose-headers") == [*EXPOSED, "x-upstream"]
    assert listed(answer, "vary") == ["accept-encoding", "Origin"]
    assert answer.one("x-upstream") == b"1"


@pytest.mark.parametrize("origin", [STRANGER, "null", "", None])
async def test_no_other_page_may_read_an_answer(pair: Pair, origin: str | None):
    """Even where upstream would let everybody; caches are told that it depends on the origin."""
    upstream, proxy = pair
    upstream.plays(Answer(headers={"access-control-allow-origin": "*"}, chunks=[b"ok"]))
    headers = [] if origin is None else [("origin", origin)]
    answer = await proxy.ask(request(method="GET", path="/x", headers=headers), "GET")
    assert (answer.status, answer.body) == (200, b"ok")
    assert says_nothing_of_origins(answer)
    assert answer.one("vary") == b"Origin"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/legato/tasks/task_none", None, 404, "task_not_found"),
        ("/legato/nowhere", None, 404, "not_found"),
        (ROUTE, b'{"stream": true, "background": true, "databricks_options": {"long_task": true}}', 400, ""),
    ],
)
async def test_errors_can_be_read_by_a_page(pair: Pair, path: str, body: Any, status: int, code: str):
    """legato's own, with what they say of trying again."""
    _, proxy = pair
    method = "GET" if body is None else "POST"
    headers = [OWNER, ("origin", PAGE)]
    answer = await proxy.ask(request(method=method, path=path, headers=headers, raw=body), method)
    assert (answer.status, answer.one("access-control-allow-origin")) == (status, PAGE.encode())
    assert answer.one("x-should-retry") == b"false"
    assert {"X-Should-Retry", "Retry-After"} <= set(listed(answer, "access-control-expose-headers"))
    assert json.loads(answer.body)["error"]["code"] == (code or "not_available")


async def test_an_unreachable_upstream_can_be_read_by_a_page():
    """Also the answer that legato makes because there is none."""
    async with legato("http://127.0.0.1:9", cors_origins=(PAGE,)) as proxy:
        answer = await proxy.ask(request(method="GET", path="/x", headers=[("origin", PAGE)]), "GET")
        assert (answer.status, answer.one("access-control-allow-origin")) == (502, PAGE.encode())


async def test_a_refusal_of_upstreams_can_be_read_by_a_page(pair: Pair):
    """On a task route too."""
    upstream, proxy = pair
    upstream.plays(Answer(status=429, headers={"retry-after": "7"}, chunks=[b"{}"], framing="length"))
    async with proxy.start(headers=[OWNER, ("origin", PAGE)]) as reading:
        answer = await reading.client.answer("POST")
    assert (answer.status, answer.one("access-control-allow-origin")) == (429, PAGE.encode())
    assert answer.one("retry-after") == b"7"


@pytest.mark.parametrize("vary", ["*", "Accept, *"])
def test_an_answer_that_varies_by_everything_stays_so(vary: str):
    """``Vary: *`` says more than the origin."""
    assert answer_headers([(b"vary", vary.encode())], None) == [(b"vary", vary.encode())]


# --- without the setting ------------------------------------------------------------------------------


async def test_without_the_setting_upstream_answers_preflights():
    """PX-10: OPTIONS and what upstream says of origins go through unchanged."""
    async with proxied() as (upstream, proxy):
        theirs = {"access-control-allow-origin": "*", "access-control-allow-headers": "x-a"}
        upstream.plays(Answer(status=204, headers=theirs, framing="none"))
        answer = await proxy.ask(preflight("x-a", origin=STRANGER), "OPTIONS")
        assert answer.status == 204
        assert answer.headers[:2] == tuple((k.encode(), v.encode()) for k, v in theirs.items())
        assert answer.one("vary") is None
        assert upstream.requests[0].method == "OPTIONS"


def test_without_the_setting_nothing_stands_before_the_app():
    """It costs nothing, for no request and no event."""
    app = App(Settings(upstream="http://127.0.0.1:9", log="memory:"))
    assert around(app, Settings()) is app
    assert app._entry == app._serve


async def test_a_page_sends_its_credential_itself(pair: Pair):
    """``Authorization`` works without leave for cookies: the owner is the one that it stands for."""
    upstream, proxy = pair
    upstream.plays(*two_cycles())
    reading = await proxy.whole(headers=[("authorization", "Bearer from-a-page"), ("origin", PAGE)])
    async with httpx.AsyncClient(base_url=proxy.url, headers={"origin": PAGE}) as client:
        path = f"/legato/tasks/{reading.task}"
        mine = await client.get(path, headers={"authorization": "Bearer from-a-page"})
        nobodys = await client.get(path)
    assert (mine.status_code, nobodys.status_code) == (200, 404)
