"""Settings that differ for some endpoints: how tables are written, which one counts, what it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.frames import DONE, SSE, asks, created, done, message, sse, two_cycles
from support.legato import ASKED, OWNER, ROUTE, Legato, proxied, request
from support.rules import check
from support.upstream import Answer

from proxy.core.rules import Limits
from proxy.endpoints import EndpointConfig, Endpoints, Rule
from proxy.settings import Settings, SettingsError, load
from proxy.web.app import endpoints

MODELS = "/serving-endpoints/responses"
TABLES = (
    "--endpoint / LEGATO_ENDPOINT / endpoint: must be [[endpoint]] tables, or as JSON "
    '[{"match": "/serving-endpoints/sup-*", "max_cycles": 20}]'
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


def tables(*tables: dict[str, Any], **settings: Any) -> Settings:
    """Settings with these tables."""
    return load({"endpoint": json.dumps(tables), "upstream": "http://127.0.0.1:9", **settings}, environ={})


def problems(folder: Path, text: str) -> list[str]:
    """What is wrong with a file."""
    path = folder / "legato.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as refused:
        load({}, environ={}, config=str(path))
    return list(refused.value.problems)


# --- how they are written -----------------------------------------------------------------------------


def test_tables_stand_in_the_file(tmp_path: Path):
    """What one doesn't set, it takes from the general settings."""
    path = tmp_path / "legato.toml"
    path.write_text(
        """
        heartbeat = 5
        [[endpoint]]
        match = "/serving-endpoints/sup-*/invocations"
        engage = "stream"
        replay = "last_pair"
        followup_key = "messages"
        max_cycles = 7
        heartbeat = 2.5
        upstream_body_limit = "4MiB"
        [[endpoint]]
        model = "quick-*"
        engage = "off"
        """
    )
    made = endpoints(load({}, environ={}, config=str(path)))
    assert made.of("/serving-endpoints/sup-a/invocations") == EndpointConfig(
        engage="stream",
        replay="last_pair",
        followup_key="messages",
        limits=Limits(max_cycles=7),
        heartbeat=2.5,
        upstream_body_limit=4 * 2**20,
    )
    assert made.of(MODELS, "quick-1") == EndpointConfig(engage="off", heartbeat=5)
    assert made.of(MODELS, "slow") == EndpointConfig(heartbeat=5)


def test_a_table_can_take_a_general_limit_back():
    """``off`` is a value too."""
    made = endpoints(tables({"match": "/a", "upstream_body_limit": "off"}, upstream_body_limit="4MiB"))
    assert made.of("/a").upstream_body_limit is None
    assert made.of("/b").upstream_body_limit == 4 * 2**20


def test_tables_come_from_a_variable_too():
    """As JSON, for those who have no file."""
    text = '[{"match": "/a", "max_cycles": 3}]'
    settings = load({}, environ={"LEGATO_ENDPOINT": text})
    assert settings.sources["endpoint"] == "environment"
    assert endpoints(settings).of("/a").limits.max_cycles == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[[endpoint]]\nmatch = "/a"\n[[endpoint]]\nmatch = "/s/sup-*"\nmax_cycles = 0',
            "[[endpoint]] #2 match=/s/sup-* max_cycles: must be a whole number above 0, got 0",
        ),
        (
            '[[endpoint]]\nmodel = "sup-*"\nengage = "always"',
            "[[endpoint]] #1 model=sup-* engage: must be one of long_task, stream, force, off, got 'always'",
        ),
        (
            '[[endpoint]]\nmatch = "/a"\nmodel = "b"\nmax_cycle = 3',
            "[[endpoint]] #1 match=/a model=b max_cycle: there is no such setting; did you mean max_cycles?",
        ),
        (
            '[[endpoint]]\nmatch = "/a"\nport = 3',
            "[[endpoint]] #1 match=/a port: there is no such setting",
        ),
        (
            '[[endpoint]]\nmatch = "sup-*"',
            "[[endpoint]] #1 match: must be a path such as /serving-endpoints/sup-*, got 'sup-*'",
        ),
        (
            '[[endpoint]]\nmodel = ""',
            "[[endpoint]] #1 model: must be the name of a model, such as sup-*, got ''",
        ),
        (
            "[[endpoint]]\nmax_cycles = 3",
            "[[endpoint]] #1: must have match (a path), model (a name), or both",
        ),
        ("endpoint = [3]", "[[endpoint]] #1: must be a table"),
        (
            "[endpoint]\nmatch = '/a'",
            f"{TABLES}, got {{'match': '/a'}}",
        ),
        (
            "endpoint = 'x'",
            f"{TABLES}, got 'x'",
        ),
    ],
)
def test_a_problem_names_table_and_key(tmp_path: Path, text: str, told: str):
    """One line each: which table, by number and by what it fits; which key; what would be right."""
    assert problems(tmp_path, text) == [told]


def test_all_problems_of_all_tables_are_told(tmp_path: Path):
    """At once, beside those of other settings."""
    text = 'port = -1\n[[endpoint]]\nmatch = "/a"\nheartbeat = true\nreplay = "all"\n[[endpoint]]\n'
    assert sorted(line.partition(":")[0] for line in problems(tmp_path, text)) == [
        "--port / LEGATO_PORT / port",
        "[[endpoint]] #1 match=/a heartbeat",
        "[[endpoint]] #1 match=/a replay",
        "[[endpoint]] #2",
    ]


# --- which one counts ---------------------------------------------------------------------------------


def rules(*pairs: tuple[str, str]) -> Endpoints:
    """The n-th pair of match and model allows n cycles."""
    made = [
        Rule(match, model, EndpointConfig(limits=Limits(number)))
        for number, (match, model) in enumerate(pairs, 1)
    ]
    return Endpoints(EndpointConfig(limits=Limits(99)), made)


@pytest.mark.parametrize(
    ("match", "fits", "fits_not"),
    [
        (
            "/serving-endpoints/sup-*/invocations",
            ["/serving-endpoints/sup-a/invocations"],
            ["/serving-endpoints/sup-a/b/invocations", "/serving-endpoints/a/invocations"],
        ),
        (
            "/serving-endpoints/sup-*",
            ["/serving-endpoints/sup-a", "/serving-endpoints/sup-a/invocations"],
            [],
        ),
        ("/a", ["/a", "/a/b"], ["/ab", "/b/a", "/A"]),
        ("/a.c", ["/a.c"], ["/abc"]),
    ],
)
def test_match_fits_a_path_and_what_lies_below(match: str, fits: list[str], fits_not: list[str]):
    """``*`` stands for one part of a path, or a piece of one."""
    made = rules((match, ""))
    assert [made.of(path).limits.max_cycles for path in fits] == [1] * len(fits)
    assert [made.of(path).limits.max_cycles for path in fits_not] == [99] * len(fits_not)


@pytest.mark.parametrize(
    ("model", "fits", "fits_not"),
    [
        ("sup-*", ["sup-", "sup-a", "sup-a/b"], ["a-sup-", "SUP-a", "", None, 3, ["sup-a"]]),
        ("gpt.5", ["gpt.5"], ["gpt-5"]),
        ("*", ["anything", ""], []),
    ],
)
def test_model_fits_the_name_in_the_body(model: str, fits: list[str], fits_not: list[object]):
    """``*`` stands for anything; a body without a name fits no name."""
    made = rules(("", model))
    assert [made.of("/x", name).limits.max_cycles for name in fits] == [1] * len(fits)
    assert [made.of("/x", name).limits.max_cycles for name in fits_not] == [99] * len(fits_not)


def test_the_first_table_that_fits_counts():
    """All of it, and nothing of the others; where match and model stand, both must fit."""
    made = rules(("/a", "m*"), ("/a", ""), ("", "m*"), ("/*", ""))
    found = [made.of(path, model).limits.max_cycles for path in ("/a", "/b") for model in ("m1", "n1")]
    assert found == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("general", "first", "second", "may"),
    [
        ("off", ("/a", "", "stream"), ("", "m", "off"), True),
        ("off", ("/b", "", "stream"), ("", "m", "off"), False),
        ("off", ("", "m", "stream"), ("/b", "", "off"), True),
        ("stream", ("/a", "", "off"), ("", "m", "stream"), False),
        ("stream", ("/a", "m", "off"), ("/b", "", "off"), True),
        ("stream", ("/a", "m", "off"), ("/a", "", "off"), False),
    ],
)
def test_a_body_is_read_only_where_a_task_is_possible(general: str, first: Any, second: Any, may: bool):
    """Whatever the model: told from the path alone."""
    made = [Rule(match, model, EndpointConfig(engage=engage)) for match, model, engage in (first, second)]
    assert Endpoints(EndpointConfig(engage=general), made).may_engage("/a") is may


# --- what they do -------------------------------------------------------------------------------------


def body(**more: Any) -> dict[str, Any]:
    """A streaming request that doesn't ask for a task by itself."""
    return {"input": "hi", "stream": True, **more}


async def became_a_task(proxy: Legato, path: str, asked: dict[str, Any], **headers: str) -> bool:
    """Whether this request became one."""
    pairs = [OWNER, *((name.replace("_", "-"), value) for name, value in headers.items())]
    async with proxy.start(asked, path=path, headers=pairs) as reading:
        await reading.rest()
        return reading.one("legato-task") is not None


@pytest.mark.anyio
async def test_endpoints_engage_each_in_its_way():
    """By path, by model, and for what fits neither the general setting; a request's own word wins."""
    made = tables({"match": "/serving-endpoints/sup-*", "engage": "stream"}, {"model": "q", "engage": "off"})
    async with proxied(endpoint=made.endpoint) as (upstream, proxy):
        upstream.plays(sse(created(), DONE))
        assert await became_a_task(proxy, ROUTE, body())
        assert not await became_a_task(proxy, "/serving-endpoints/other/invocations", body())
        assert not await became_a_task(proxy, MODELS, ASKED | {"model": "q"})
        assert await became_a_task(proxy, MODELS, ASKED | {"model": "r"})
        assert await became_a_task(proxy, MODELS, ASKED | {"model": "q"}, legato_engage="long_task")
        assert not await became_a_task(proxy, ROUTE, body(), legato_engage="off")


@pytest.mark.anyio
async def test_force_adds_long_task_for_its_endpoint_only():
    """Others keep their bodies."""
    made = tables({"match": ROUTE, "engage": "force"})
    async with proxied(endpoint=made.endpoint) as (upstream, proxy):
        upstream.plays(sse(created(), DONE))
        await became_a_task(proxy, ROUTE, body())
        await became_a_task(proxy, MODELS, body())
        forced, plain = (json.loads(seen.body) for seen in upstream.requests)
        assert forced == body(databricks_options={"long_task": True})
        assert plain == body()


@pytest.mark.anyio
async def test_an_endpoint_has_its_own_limit():
    """Its tasks stop there; requests may tighten below it, and no higher, whatever the general one is."""
    made = tables({"match": ROUTE, "max_cycles": 2}, max_cycles=50)
    async with proxied(endpoint=made.endpoint, max_cycles=50) as (upstream, proxy):
        upstream.rule = lambda seen: sse(created(), asks(f"continue_{len(upstream.requests)}"))
        stopped = check((await proxy.whole()).body)
        assert stopped.events[-1]["response"]["incomplete_details"]["reason"] == "max_cycles"
        assert len(upstream.requests) == 2
        await proxy.whole(headers=[OWNER, ("legato-limits", "max_cycles=1")])
        assert len(upstream.requests) == 3
        for headers, asked in (
            ([("legato-limits", "max_cycles=3")], ASKED),
            ([], ASKED | {"legato": {"max_cycles": 3}}),
        ):
            answer = await proxy.ask(request(asked, headers=[OWNER, *headers]))
            assert json.loads(answer.body)["error"]["code"] == "limit_not_allowed"
        answer = await proxy.ask(
            request(ASKED, path=MODELS, headers=[OWNER, ("legato-limits", "max_cycles=51")])
        )
        assert b"limit_not_allowed" in answer.body


@pytest.mark.anyio
async def test_an_endpoint_has_its_own_form_of_follow_up():
    """What is carried, and under which key."""
    made = tables({"match": ROUTE, "replay": "last_pair", "followup_key": "messages"})
    async with proxied(endpoint=made.endpoint) as (upstream, proxy):
        upstream.plays(*two_cycles(), *two_cycles())
        await proxy.whole()
        await proxy.whole(path=MODELS)
        special, general = (json.loads(upstream.requests[number].body) for number in (1, 3))
        types = [item.get("type") for item in special["messages"]]
        assert types == [None, "task_continue_request", "task_continue_response"]
        assert "input" not in special
        types = [item.get("type") for item in general["input"]]
        assert types == [None, "message", "task_continue_request", "task_continue_response"]


@pytest.mark.anyio
async def test_an_endpoint_has_its_own_body_limit():
    """A follow-up above it carries less; the other endpoint's carries all."""
    long = message("x" * 5000, "m1")
    made = tables({"match": ROUTE, "upstream_body_limit": 4096})
    async with proxied(endpoint=made.endpoint) as (upstream, proxy):
        first, second = two_cycles()
        first = sse(created(), done(long), asks())
        upstream.plays(first, second, first, second)
        await proxy.whole()
        await proxy.whole(path=MODELS)
        assert len(upstream.requests[1].body) < 4096 < len(upstream.requests[3].body)


@pytest.mark.anyio
async def test_an_endpoint_has_its_own_heartbeat():
    """The one that is quick gets comments while its upstream is silent."""
    made = tables({"match": ROUTE, "heartbeat": 0.05})
    async with proxied(endpoint=made.endpoint, heartbeat=60.0) as (upstream, proxy):
        gate = anyio.Event()
        upstream.plays(Answer(headers=SSE, chunks=[created(), gate, DONE]))
        async with proxy.start() as reading:
            await reading.until(b": legato\n")
            gate.set()
            await reading.rest()
