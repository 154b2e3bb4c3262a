"""What reaches upstream: the client's own bytes first, then the same request with the task's answers."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from support.cases import assert_continues, load
from support.client import connect
from support.frames import asks, completed, created, done, message, sse, two_cycles
from support.legato import ASKED, OWNER, ROUTE, legato, proxied, request
from support.rules import check
from support.upstream import Answer, Received, ScriptedUpstream

pytestmark = pytest.mark.anyio

CONTINUE = {"type": "task_continue_request", "id": "continue_a1", "step": 3}
Pairs = list[tuple[str, str]]


def sent(seen: Received) -> Pairs:
    """A request's headers but for those of its connection and framing."""
    ours = {"host", "content-length", "accept-encoding"}
    pairs = [(name.decode().lower(), value.decode("latin-1")) for name, value in seen.headers]
    return [pair for pair in pairs if pair[0] not in ours]


def two_requests(upstream: ScriptedUpstream) -> tuple[Received, Received]:
    """The first request and the only follow-up."""
    assert len(upstream.requests) == 2
    first, follow_up = upstream.requests
    return first, follow_up


# --- headers ------------------------------------------------------------------------------------------


async def test_headers_of_the_client_go_along() -> None:
    """Repeats, order, credentials and cookies: the same in both requests, with upstream's own Host."""
    extra = [OWNER, ("x-two", "a"), ("X-Two", "b"), ("cookie", "c=1; d=2"), ("user-agent", "curl/8")]
    extra += [("x-forwarded-access-token", "tok-F"), ("x-latin", "é"), ("accept", "text/event-stream")]
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        check((await proxy.whole(headers=extra)).body)
        first, follow_up = two_requests(upstream)
        expected = [*((name.lower(), value) for name, value in extra), ("content-type", "application/json")]
        assert sent(first) == sent(follow_up) == expected
        for seen in (first, follow_up):
            assert seen.all("host") == [upstream.authority.encode()]
            assert seen.all("accept-encoding") == [b"identity"]
            assert seen.one("content-length") == b"%d" % len(seen.body)


async def test_what_belongs_to_one_connection_or_to_legato_stays_here() -> None:
    """Hop-by-hop headers, what ``Connection`` names, and every ``Legato-*`` header reach neither request."""
    dropped = [("connection", "close, x-mine"), ("x-mine", "1"), ("keep-alive", "5"), ("te", "trailers")]
    dropped += [("proxy-authorization", "Basic eDp5"), ("Legato-Engage", "long_task"), ("LEGATO-X", "1")]
    dropped += [("legato-limits", "max_cycles=5"), ("expect", "100-continue")]
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        async with proxy.start(headers=[OWNER, *dropped]) as reading:
            check(await reading.rest())
            assert await reading.client.reader.read() == b"", "the client asked for its connection's end"
        for seen in two_requests(upstream):
            assert sent(seen) == [OWNER, ("content-type", "application/json")]
            assert not seen.all("connection")


ONCE = [
    ("idempotency-key", "K1"),
    ("content-md5", "Q2hlY2sgSW50ZWdyaXR5IQ=="),
    ("digest", "sha-256=abc="),
    ("content-digest", "sha-256=:abc=:"),
    ("repr-digest", "sha-256=:abc=:"),
    ("signature", "sig1=:abc=:"),
    ("signature-input", 'sig1=("content-digest")'),
]


async def test_what_is_true_of_the_first_bytes_only_goes_with_them_only() -> None:
    """Digests, signatures and ``Idempotency-Key`` speak of the client's own request, not of a follow-up."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        check((await proxy.whole(headers=[OWNER, *ONCE])).body)
        first, follow_up = two_requests(upstream)
        assert first.body == json.dumps(ASKED).encode()
        assert sent(first) == [OWNER, *ONCE, ("content-type", "application/json")]
        assert sent(follow_up) == [OWNER, ("content-type", "application/json")]


async def test_digests_of_a_body_that_legato_changed_are_dropped() -> None:
    """A body that loses its ``legato`` member is no longer what the digest speaks of."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        body = ASKED | {"legato": {"max_cycles": 9}}
        check((await proxy.whole(body, headers=[OWNER, *ONCE])).body)
        first, _ = two_requests(upstream)
        assert json.loads(first.body) == ASKED
        assert not {"content-md5", "digest", "signature"} & {name for name, _ in sent(first)}


async def test_host_is_upstreams_in_every_cycle() -> None:
    """PX-11: an upstream that answers 421 to any other Host serves both requests."""
    case = load("PX-11")
    async with proxied() as (upstream, proxy):
        cycles = case.answers()
        own = upstream.authority.encode()

        def rule(seen: Received) -> Answer:
            return cycles.pop(0) if seen.all("host") == [own] else Answer(status=421)

        upstream.rule = rule
        assert check((await proxy.whole(**case.request)).body).types == ["response.completed"]
        for seen in two_requests(upstream):
            assert seen.one("x-forwarded-host") in (None, b"proxy.internal:8080")


async def test_upstream_hears_of_the_task_where_it_is_to() -> None:
    """``tell_upstream`` adds ``Legato-Task``, legato's own and not the client's; off by default."""
    async with proxied(tell_upstream=True) as (upstream, proxy):
        upstream.plays(*two_cycles())
        reading = await proxy.whole(headers=[OWNER, ("legato-task", "forged")])
        for seen in two_requests(upstream):
            assert seen.one("legato-task") == reading.task.encode()


# --- path and query -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/serving-endpoints/a%2Fb/invocations",
        "/serving-endpoints/a%2fb/invocations?x=%20&x=2&y",
        "/serving-endpoints/%E4%BD%A0/invocations",
        "/serving-endpoints/a%20b/invocations?a=b?c=/d",
    ],
)
async def test_path_and_query_are_the_clients_in_every_cycle(path: str) -> None:
    """PX-08 on a task route: nothing is decoded, folded or sorted; both requests have the same target."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        check((await proxy.whole(path=path)).body)
        assert [seen.target.decode() for seen in two_requests(upstream)] == [path, path]


@pytest.mark.parametrize("path", ["/serving-endpoints/%2e%2e/invocations", "/serving-endpoints/../x"])
async def test_no_task_leads_out_of_the_base_path(path: str) -> None:
    """PX-08: with a base path, ``..`` stays within it or is 400; it is never rewritten."""
    async with ScriptedUpstream() as upstream, legato(f"{upstream.url}/base") as proxy:
        upstream.plays(*two_cycles())
        answer = await proxy.ask(request(ASKED, path=path))
        if answer.status != 400:
            assert {seen.target.decode() for seen in upstream.requests} == {f"/base{path}"}
        out = await proxy.ask(request(ASKED, path="/..%2f..%2fserving-endpoints/a/invocations"))
        assert (out.status, out.one("x-should-retry")) == (400, b"false")


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "PURGE"])
async def test_other_methods_on_a_task_route_pass_through(method: str) -> None:
    """PX-10: only a POST may start a task; upstream sees the method and its answer goes back."""
    async with proxied() as (upstream, proxy):
        upstream.plays(
            Answer(status=200, headers={"x-method": method, "content-length": "0"}, framing="none")
        )
        answer = await proxy.ask(request(ASKED, method=method), method)
        assert (answer.status, answer.one("x-method"), answer.one("legato-task")) == (
            200,
            method.encode(),
            None,
        )
        assert upstream.requests[0].method == method
        assert await proxy.tasks() == []


# --- bodies -------------------------------------------------------------------------------------------


async def test_body_keeps_its_bytes() -> None:
    """PX-15: the first body is the client's; in the follow-up all but the conversation keeps its text."""
    case = load("PX-15")
    async with proxied() as (upstream, proxy):
        upstream.plays(*case.answers())
        reading = await proxy.whole(**case.request)
        assert reading.status == 200
        check(reading.body)
        first, follow_up = two_requests(upstream)
        assert first.body == case.body
        original = '{"role":"user","content":"hi \\ud83d \\u00e9"}'
        item = '{"type":"task_continue_request","id":"continue_a1","step":3}'
        answered = '{"type":"task_continue_response","continue_request_id":"continue_a1"}'
        expected = case.body.decode().replace(f"[{original}]", f"[{original},{item},{answered}]")
        assert follow_up.body.decode() == expected


async def test_bodies_elsewhere_are_never_parsed() -> None:
    """PX-15: on any other route a body goes through as it is, JSON or not."""
    body = load("PX-15").body + b"\xff\x00"
    async with proxied() as (upstream, proxy):
        answer = await proxy.ask(request(path="/api/2.0/jobs", raw=body))
        assert (answer.status, upstream.requests[0].body) == (200, body)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_body_goes_first_as_it_is_then_plain(encoding: str) -> None:
    """legato looks into it; the first request keeps the client's bytes, the follow-up is plain."""
    plain = json.dumps(ASKED).encode()
    packed = gzip.compress(plain) if encoding == "gzip" else zlib.compress(plain)
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        check((await proxy.whole(raw=packed, headers=[OWNER, ("content-encoding", encoding)])).body)
        first, follow_up = two_requests(upstream)
        assert (first.body, first.one("content-encoding")) == (packed, encoding.encode())
        assert follow_up.one("content-encoding") is None
        assert_continues(plain, follow_up.body, CONTINUE)


async def test_compressed_body_that_legato_must_change_goes_plain() -> None:
    """Where ``legato`` has to be taken out, the first request is plain too, and says so."""
    packed = gzip.compress(json.dumps(ASKED | {"legato": {"max_cycles": 2}}).encode())
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        check((await proxy.whole(raw=packed, headers=[OWNER, ("content-encoding", "gzip")])).body)
        first, _ = two_requests(upstream)
        assert (json.loads(first.body), first.one("content-encoding")) == (ASKED, None)


async def test_chunked_body_may_start_a_task() -> None:
    """A body without a length is read all the same; upstream gets one with a length."""
    body = json.dumps(ASKED).encode()
    head = request(headers=[OWNER, ("transfer-encoding", "chunked"), ("content-type", "application/json")])
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:])) + b"0\r\n\r\n"
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        answer = await proxy.ask(head + chunks)
        check(answer.body)
        first, _ = two_requests(upstream)
        assert (first.body, first.one("content-length")) == (body, b"%d" % len(body))


async def test_expect_gets_its_100_before_the_body_is_sent() -> None:
    """``Expect: 100-continue`` is answered by legato; the body that follows starts the task."""
    body = json.dumps(ASKED).encode()
    headers = [OWNER, ("expect", "100-continue"), ("content-length", str(len(body)))]
    async with proxied() as (upstream, proxy), connect(proxy.port) as client:
        upstream.plays(*two_cycles())
        await client.send(request(headers=headers))
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        assert upstream.requests == []
        await client.send(body)
        check((await client.answer()).body)
        assert two_requests(upstream)[0].one("expect") is None


@pytest.mark.parametrize("packed", [False, True])
async def test_body_above_the_bound_is_refused(packed: bool) -> None:
    """413 that names the setting, also where only the unpacked body is too large; upstream hears nothing."""
    body = json.dumps(ASKED | {"pad": "x" * 3000}).encode()
    headers = [OWNER, ("content-encoding", "gzip")] if packed else [OWNER]
    async with proxied(max_body=2000) as (upstream, proxy):
        answer = await proxy.ask(request(raw=gzip.compress(body) if packed else body, headers=headers))
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["code"]) == (413, "body_too_large")
        assert "max_body" in error["message"]
        assert answer.one("x-should-retry") == b"false"
        assert upstream.requests == []


@pytest.mark.parametrize("raw", [b"not json", b"[1]", b'"x"', b"", b"{", b'{"input":\xff}', b"\x1f\x8b?"])
async def test_body_that_is_no_object_passes_through(raw: bytes) -> None:
    """It is upstream's to judge; with ``Legato-Engage: force`` it is 400, since no task can be made of it."""
    async with proxied() as (upstream, proxy):
        upstream.plays(Answer(status=400, chunks=[b'{"error_code":"MALFORMED_REQUEST"}'], framing="length"))
        passed = await proxy.ask(request(raw=raw, headers=[OWNER, ("x-a", "1")]))
        assert (passed.status, passed.body) == (400, b'{"error_code":"MALFORMED_REQUEST"}')
        assert passed.one("legato-task") is None
        assert upstream.requests[0].body == raw
        refused = await proxy.ask(request(raw=raw, headers=[OWNER, ("legato-engage", "force")]))
        error = json.loads(refused.body)["error"]
        assert (refused.status, error["code"], error["param"]) == (400, "invalid_request", "body")
        assert "Legato-Engage" in error["message"]
        assert len(upstream.requests) == 1


# --- which requests become tasks ----------------------------------------------------------------------

PLAIN = {"input": "hi", "stream": True}
SHORT = PLAIN | {"databricks_options": {"long_task": False}}
LONG = PLAIN | {"databricks_options": {"long_task": True}}


@pytest.mark.parametrize(
    ("engage", "body", "taken"),
    [
        (None, PLAIN, False),
        (None, SHORT, False),
        (None, LONG, True),
        (None, PLAIN | {"databricks_options": {"long_task": "true"}}, False),
        (None, LONG | {"databricks_options": None}, False),
        ("long_task", PLAIN, False),
        ("long_task", LONG, True),
        ("stream", PLAIN, True),
        ("stream", SHORT, True),
        ("stream", {"input": "hi"}, False),
        ("force", PLAIN, True),
        ("force", SHORT, False),
        ("FORCE ", PLAIN | {"databricks_options": None}, True),
        ("off", LONG, False),
    ],
)
async def test_engage_decides(engage: str | None, body: dict[str, Any], taken: bool) -> None:
    """``Legato-Engage`` chooses for one request; ``force`` adds ``long_task``, nothing else is changed."""
    headers = [OWNER] if engage is None else [OWNER, ("Legato-Engage", engage)]
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), completed(message("a"))))
        reading = await proxy.whole(body, headers=headers)
        assert (reading.one("legato-task") is not None) == taken
        first = json.loads(upstream.requests[0].body)
        if taken and engage and engage.strip().lower() == "force":
            assert first == body | {"databricks_options": {"long_task": True}}
        else:
            assert upstream.requests[0].body == json.dumps(body).encode()
        assert upstream.requests[0].one("legato-engage") is None


@pytest.mark.parametrize(
    ("setting", "body", "taken"),
    [("stream", PLAIN, True), ("force", PLAIN, True), ("off", LONG, False), ("long_task", PLAIN, False)],
)
async def test_engage_is_a_setting_too(setting: str, body: dict[str, Any], taken: bool) -> None:
    """The operator's choice holds where the request makes none."""
    async with proxied(engage=setting) as (upstream, proxy):
        upstream.plays(sse(created(), completed(message("a"))))
        reading = await proxy.whole(body)
        assert (reading.one("legato-task") is not None) == taken


async def test_off_is_a_door_out() -> None:
    """``Legato-Engage: off`` passes a long task through with its continuation, byte for byte."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        reading = await proxy.whole(headers=[OWNER, ("legato-engage", "off")])
        assert reading.body == b"".join(two_cycles()[0].chunks)  # type: ignore[arg-type]
        assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    "path",
    [
        ROUTE,
        "/serving-endpoints/responses",
        "/invocations",
        "/responses",
        "/v1/responses",
        "/mlflow/v1/responses",
        "/ai-gateway/mlflow/v1/responses",
    ],
)
async def test_every_task_route(path: str) -> None:
    """The paths of the Responses API, wherever it lives."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        check((await proxy.whole(path=path)).body)
        assert len(upstream.requests) == 2


@pytest.mark.parametrize("path", ["/serving-endpoints/a/b/invocations", "/responses/", "/x/v1/responses"])
async def test_any_other_path_passes_through(path: str) -> None:
    """A long task elsewhere is no task of legato's."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        reading = await proxy.whole(path=path)
        assert reading.one("legato-task") is None
        assert len(upstream.requests) == 1


# --- choices that are refused -------------------------------------------------------------------------

LIMITED: dict[str, Any] = ASKED | {"legato": {"max_cycles": 2}}


@pytest.mark.parametrize(
    ("body", "headers", "code", "param"),
    [
        (ASKED, [("Legato-Engage", "sometimes")], "invalid_request", "Legato-Engage"),
        (ASKED, [("Legato-Heartbeat", "5")], "invalid_request", "Legato-Heartbeat"),
        (ASKED, [("Legato-Event-Ids", "yes")], "invalid_request", "Legato-Event-Ids"),
        (ASKED, [("Legato-Shape", "canonical")], "not_available", "Legato-Shape"),
        (ASKED, [("Legato-Shape", "round")], "invalid_request", "Legato-Shape"),
        (ASKED, [("Legato-Multitask", "enqueue")], "not_available", "Legato-Multitask"),
        (ASKED, [("Legato-Limits", "max_cycles=101")], "limit_not_allowed", "Legato-Limits"),
        (ASKED, [("Legato-Limit", "max_cycles=5")], "invalid_request", "Legato-Limit"),
        (ASKED, [("Legato-Heart-Beat", "off")], "invalid_request", "Legato-Heart-Beat"),
        (ASKED, [("Legato-Limits", "max_cycles=0")], "limit_not_allowed", "Legato-Limits"),
        (ASKED, [("Legato-Limits", "max_cycles=-1")], "limit_not_allowed", "Legato-Limits"),
        (ASKED, [("Legato-Limits", "max_cycles=2.5")], "limit_not_allowed", "Legato-Limits"),
        (ASKED, [("Legato-Limits", "max_cycles=" + "9" * 5000)], "limit_not_allowed", "Legato-Limits"),
        (ASKED, [("Legato-Limits", "max_cats=3")], "invalid_request", "Legato-Limits"),
        (ASKED, [("Legato-Limits", "max_cycles")], "limit_not_allowed", "Legato-Limits"),
        (ASKED | {"legato": {"max_cycles": 101}}, [], "limit_not_allowed", "legato.max_cycles"),
        (ASKED | {"legato": {"max_cycles": True}}, [], "limit_not_allowed", "legato.max_cycles"),
        (ASKED | {"legato": {"max_cats": 1}}, [], "invalid_request", "legato.max_cats"),
        (ASKED | {"legato": 7}, [], "invalid_request", "legato"),
        (ASKED | {"background": True}, [], "not_available", "background"),
    ],
)
async def test_choices_that_are_refused(body: dict[str, Any], headers: Pairs, code: str, param: str) -> None:
    """400 with the place of what is wrong; upstream hears nothing and no task is made."""
    async with proxied() as (upstream, proxy):
        answer = await proxy.ask(request(body, headers=[OWNER, *headers]))
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["code"], error["param"]) == (400, code, param)
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert answer.one("x-should-retry") == b"false"
        assert answer.one("content-type") == b"application/json"
        assert upstream.requests == []
        assert await proxy.tasks() == []


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (ASKED, [("Legato-Limits", "max_cycles=2")]),
        (LIMITED, []),
        (ASKED | {"legato": {"max_cycles": 50}}, [("Legato-Limits", " max_cycles = 2 ")]),
        (LIMITED, [("Legato-Limits", "max_cycles=50")]),
    ],
    ids=["header", "body", "the header is tighter", "the body is tighter"],
)
async def test_a_request_may_tighten_a_limit(body: dict[str, Any], headers: Pairs) -> None:
    """Two cycles and no third request; ``response.incomplete`` names the rule, and the task's state does."""
    cycles = [sse(created(), done(message(f"{n}", f"m{n}")), asks(f"continue_{n}", n)) for n in (1, 2, 3)]
    async with proxied() as (upstream, proxy):
        upstream.plays(*cycles)
        reading = await proxy.whole(body, headers=[OWNER, *headers])
        stream = check(reading.body)
        assert stream.types[-1] == "response.incomplete"
        assert stream.response["incomplete_details"] == {"reason": "max_cycles"}
        assert [item["id"] for item in stream.response["output"]] == ["m1", "m2"]
        assert stream.response["legato"]["limit"] == stream.response["legato"]["used"] == 2
        assert all("legato" not in json.loads(seen.body) for seen in two_requests(upstream))
        shown = await proxy.show(reading.task)
        assert (shown["state"], shown["reason"], shown["cycles"]) == ("incomplete", "max_cycles", 2)


# --- compression on the way back ----------------------------------------------------------------------


def flushed(*parts: bytes, wbits: int = 31) -> list[bytes]:
    """Each part compressed and flushed on its own, as a server does that means well."""
    squeeze = zlib.compressobj(wbits=wbits)
    packed = [squeeze.compress(part) + squeeze.flush(zlib.Z_SYNC_FLUSH) for part in parts]
    return [*packed[:-1], packed[-1] + squeeze.flush()]


@pytest.mark.parametrize("obeys", [True, False], ids=["asks first", "compresses anyway"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_upstream_that_compresses_its_events(encoding: str, obeys: bool) -> None:
    """PX-01: identity is asked for; one that compresses nevertheless is unpacked, headers and all (PX-03)."""
    case = load("PX-01")
    bodies = case.bodies()
    wbits = 31 if encoding == "gzip" else 15

    def rule(seen: Received) -> Answer:
        body = bodies[len(upstream.requests) - 1]
        if obeys and encoding.encode() not in (seen.one("accept-encoding") or b""):
            return Answer(headers={"content-type": "text/event-stream"}, chunks=[body])
        headers = {"content-type": "text/event-stream", "content-encoding": encoding}
        return Answer(headers=headers, chunks=flushed(body[:50], body[50:], wbits=wbits))

    async with proxied() as (upstream, proxy):
        upstream.rule = rule
        reading = await proxy.whole(**case.request)
        assert check(reading.body).types == ["response.completed"]
        assert reading.one("content-encoding") is reading.one("content-length") is None
        first, follow_up = two_requests(upstream)
        assert first.one("accept-encoding") == follow_up.one("accept-encoding") == b"identity"
        assert_continues(first.body, follow_up.body, CONTINUE, whole=True)


@pytest.mark.parametrize("status", [200, 404])
async def test_compressed_refusal_of_a_first_cycle_can_be_read(status: int) -> None:
    """PX-03: an answer that makes no task reaches the client so that headers and bytes agree."""
    body = b'{"error_code":"RESOURCE_DOES_NOT_EXIST"} ' * 200
    packed = gzip.compress(body)
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with proxied() as (upstream, proxy), connect(proxy.port) as client:
        upstream.plays(Answer(status=status, headers=headers, chunks=[packed], framing="length"))
        for _ in range(2):
            await client.send(request(ASKED, headers=[OWNER, ("accept-encoding", "gzip")]))
            answer = await client.answer()
            assert (answer.status, answer.complete) == (status, True)
            got = answer.body if answer.one("content-encoding") is None else gzip.decompress(answer.body)
            assert got == body
