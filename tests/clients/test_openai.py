"""The official Python SDK, sync and async, through the proxy: what it yields, and what it repeats."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import openai
import pytest
from openai.types.responses import Response
from support.frames import asks, completed, created, delta, done, message, sse, two_cycles
from support.legato import Legato, legato, proxied
from support.server import serve
from support.upstream import Answer, ScriptedUpstream

from proxy.errors import UpstreamUnreachable
from proxy.simulator import Scenario, load_scenario, simulator_app
from proxy.upstream import Exchange, Request, Upstream

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {
    "model": "sup-demo",
    "input": [{"role": "user", "content": "Why did tent sales fall?"}],
    "extra_body": {"databricks_options": {"long_task": True}},
}
Reader = Callable[[str], Any]


def scenario(style: str) -> Scenario:
    """The five cycles of the demo in this style."""
    return load_scenario("default").model_copy(update={"style": style})


@asynccontextmanager
async def supervised(style: str) -> AsyncIterator[Legato]:
    """The proxy before a simulated supervisor of five cycles."""
    app = simulator_app(scenario(style), speed=0)
    async with serve(app) as supervisor, legato(supervisor.url) as proxy:
        yield proxy


def options(proxy: Legato | str, **more: Any) -> dict[str, Any]:
    """What both clients are made with."""
    url = proxy if isinstance(proxy, str) else proxy.url
    return {"base_url": f"{url}/serving-endpoints", "api_key": "tok-A", "timeout": 10} | more


def said(style: str) -> str:
    """All that the supervisor says."""
    return "".join(step.say for cycle in scenario(style).cycles for step in cycle.steps)


def text(events: list[Any]) -> str:
    """All deltas."""
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def named(item: Any) -> tuple[str, str | None, str | None]:
    """What tells one item from another."""
    return item.type, item.id, getattr(item, "call_id", None)


# --- reading a task -----------------------------------------------------------------------------------


async def created_async(url: str) -> list[Any]:
    """``responses.create(stream=True)``, async."""
    async with openai.AsyncOpenAI(**options(url)) as client:
        return [event async for event in await client.responses.create(**ASKED, stream=True)]


async def created_sync(url: str) -> list[Any]:
    """The same with the sync client, in a thread."""

    def read() -> list[Any]:
        with openai.OpenAI(**options(url)) as client:
            return list(client.responses.create(**ASKED, stream=True))

    return await anyio.to_thread.run_sync(read)


async def streamed_async(url: str) -> tuple[list[Any], Response]:
    """``responses.stream()``, async: the events and the final response."""
    async with (
        openai.AsyncOpenAI(**options(url)) as client,
        client.responses.stream(**ASKED) as stream,
    ):
        events = [event async for event in stream]
        return events, await stream.get_final_response()


async def streamed_sync(url: str) -> tuple[list[Any], Response]:
    """The same with the sync client, in a thread."""

    def read() -> tuple[list[Any], Response]:
        with openai.OpenAI(**options(url)) as client, client.responses.stream(**ASKED) as stream:
            return list(stream), stream.get_final_response()

    return await anyio.to_thread.run_sync(read)


both = pytest.mark.parametrize("read", [created_async, created_sync], ids=["async", "sync"])


@both
@pytest.mark.parametrize("style", ["raw", "openai"])
async def test_create_reads_five_cycles_as_one_stream(read: Reader, style: str) -> None:
    """No exception, the whole text once, rising numbers, no pause item, one ending at most."""
    async with supervised(style) as proxy:
        events = await read(proxy.url)
    assert text(events) == said(style)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types.count("response.completed") == (1 if style == "openai" else 0)
    assert types.count("response.created") == (1 if style == "openai" else 0)
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert "task_continue_request" not in {item.type for item in items}
    assert sum(item.type == "function_call" for item in items) == sum(
        bool(step.call) for cycle in scenario(style).cycles for step in cycle.steps
    )


@pytest.mark.parametrize("read", [streamed_async, streamed_sync], ids=["async", "sync"])
async def test_stream_builds_the_whole_response(read: Reader) -> None:
    """``get_final_response()`` has every item of all five cycles, each under an id of its own."""
    async with supervised("openai") as proxy:
        events, final = await read(proxy.url)
        shown = (await proxy.tasks(("authorization", "Bearer tok-A")))[0]
    assert shown["cycles"] == 5
    assert (final.id, final.status) == (shown["response_id"], "completed")
    assert final.output_text == said("openai")
    ids = [item.id for item in final.output if item.id is not None]
    assert len(ids) == len(set(ids))
    finished = [event.item for event in events if event.type == "response.output_item.done"]
    assert [named(item) for item in final.output] == [named(item) for item in finished]
    assert final.usage is not None
    assert final.usage.total_tokens > 0


async def test_stream_survives_used_ids_and_repeated_items() -> None:
    """What would raise 'conflicting output identities' is renamed or dropped on the way."""
    for name in ("reused-ids", "repeats", "inner-pairs"):
        # Each message a part of its own, as the helper needs it: the OpenAI style.
        story = load_scenario(name).model_copy(update={"style": "openai", "ending": "completed"})
        async with serve(simulator_app(story, speed=0)) as supervisor, legato(supervisor.url) as proxy:
            _, final = await streamed_async(proxy.url)
        expected = "".join(step.say for cycle in story.cycles for step in cycle.steps)
        assert final.output_text == expected, name


# --- failures in the stream ---------------------------------------------------------------------------

BROKEN = sse(created("resp_u2"), delta("half", "m2"), end="reset")


@both
async def test_create_yields_a_failure_as_an_event(read: Reader) -> None:
    """A task that breaks in its second cycle: the last event is ``response.failed`` with code and items."""
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), done(message("one")), asks()), BROKEN)
        events = await read(proxy.url)
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "continuation_unknown")
    assert "nothing was sent again" in failed.error.message
    assert [item.id for item in failed.output] == ["m1"]


async def test_stream_raises_on_a_failure() -> None:
    """The helper shows the event; asked for the final response, it raises rather than give half of it."""
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), asks()), sse(created("resp_u2"), end="reset"))
        async with (
            openai.AsyncOpenAI(**options(proxy)) as client,
            client.responses.stream(**ASKED) as stream,
        ):
            assert [event.type async for event in stream] == ["response.created", "response.failed"]
            with pytest.raises(RuntimeError):
                await stream.get_final_response()


@both
async def test_create_yields_a_stop_as_an_event(read: Reader) -> None:
    """A rule's stop is ``response.incomplete`` with the rule's name."""
    async with proxied(max_cycles=1) as (upstream, proxy):
        upstream.plays(*two_cycles())
        events = await read(proxy.url)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_cycles"


# --- HTTP errors: what the SDK repeats ----------------------------------------------------------------


async def refused_async(url: str, **more: Any) -> openai.APIStatusError:
    """The error that the async client raises, with its default retries."""
    async with openai.AsyncOpenAI(**options(url, **more)) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(**ASKED, stream=True)
    return caught.value


async def refused_sync(url: str, **more: Any) -> openai.APIStatusError:
    """The same with the sync client."""

    def ask() -> openai.APIStatusError:
        with openai.OpenAI(**options(url, **more)) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                client.responses.create(**ASKED, stream=True)
            return caught.value

    return await anyio.to_thread.run_sync(ask)


refused = pytest.mark.parametrize("ask", [refused_async, refused_sync], ids=["async", "sync"])


@refused
async def test_a_bad_choice_is_told_once(ask: Callable[..., Any]) -> None:
    """400 with code and field, and not repeated."""
    async with proxied() as (upstream, proxy):
        error = await ask(proxy.url, default_headers={"Legato-Limits": "max_cycles=1000"})
        assert isinstance(error, openai.BadRequestError)
        assert (error.code, error.param) == ("limit_not_allowed", "Legato-Limits")
        assert "max_cycles" in str(error)
        assert upstream.requests == []


@refused
@pytest.mark.parametrize(
    ("silent", "status", "code"),
    [(True, 504, "upstream_timeout"), (False, 502, "upstream_incomplete")],
    ids=["silent", "reset"],
)
async def test_an_unknown_outcome_is_not_repeated(
    ask: Callable[..., Any], silent: bool, status: int, code: str
) -> None:
    """Left to itself the SDK sends 502 and 504 three times; upstream has seen one request."""
    async with proxied(max_silence=0.3) as (upstream, proxy):
        lost = Answer(raw=b"", framing="none", end="reset")
        upstream.plays(Answer(gate=anyio.Event()) if silent else lost)
        error = await ask(proxy.url)
        assert (error.status_code, error.code) == (status, code)
        assert len(upstream.requests) == 1


@refused
async def test_an_unreachable_upstream_is_tried_again_by_the_client(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """502 ``upstream_unreachable`` says that nothing was sent, so the SDK may repeat it, and does."""
    failures = watched(monkeypatch)
    async with proxied() as (upstream, proxy):
        upstream.shut()
        error = await ask(proxy.url, max_retries=1)
        assert (error.status_code, error.code) == (502, "upstream_unreachable")
        assert len(failures) == 2
        assert error.response.headers["retry-after"] == "1"


async def test_a_client_that_repeats_finds_upstream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's own second try becomes the task."""
    async with ScriptedUpstream() as upstream, legato(upstream) as proxy:
        failures = watched(monkeypatch, upstream)
        upstream.plays(*two_cycles())
        upstream.shut()
        events = await created_async(proxy.url)
        assert events[-1].type == "response.completed"
        assert len(failures) == 1
        assert len(upstream.requests) == 2


def watched(
    monkeypatch: pytest.MonkeyPatch, back: ScriptedUpstream | None = None
) -> list[UpstreamUnreachable]:
    """Count the product's failed connections; after the first one ``back`` accepts them again."""
    failures: list[UpstreamUnreachable] = []
    opens = Upstream.open

    async def open_(self: Upstream, request: Request) -> Exchange:
        try:
            return await opens(self, request)
        except UpstreamUnreachable as exc:
            failures.append(exc)
            if back is not None:
                await back.listen()
            raise

    monkeypatch.setattr(Upstream, "open", open_)
    return failures


async def test_an_upstream_refusal_keeps_its_body_and_hint() -> None:
    """A 429 of upstream's is upstream's: the SDK sees status, code text and ``Retry-After``."""
    body = b'{"error_code":"REQUEST_LIMIT_EXCEEDED","message":"slow down"}'
    headers = {"content-type": "application/json", "retry-after": "7"}
    async with proxied() as (upstream, proxy):
        upstream.plays(Answer(status=429, headers=headers, chunks=[body], framing="length"))
        error = await refused_async(proxy.url, max_retries=0)
        assert isinstance(error, openai.RateLimitError)
        assert error.response.headers["retry-after"] == "7"
        assert "slow down" in str(error)
        assert error.response.json() == {
            "error_code": "REQUEST_LIMIT_EXCEEDED",
            "message": "slow down",
        }


# --- other calls of the same client -------------------------------------------------------------------


async def test_what_is_no_long_task_passes_through() -> None:
    """Without ``long_task``, and without ``stream``: upstream's own answer, body untouched."""
    answer = {"id": "resp_1", "object": "response", "output": [message("hi")], "status": "completed"}
    async with proxied() as (upstream, proxy), openai.AsyncOpenAI(**options(proxy)) as client:
        content = httpx.Response(200, json=answer).content
        headers = {"content-type": "application/json"}
        upstream.plays(Answer(headers=headers, chunks=[content], framing="length"))
        response = await client.responses.create(model="sup-demo", input="hi")
        assert (response.id, response.output_text) == ("resp_1", "hi")
        upstream.plays(sse(created(), completed(message("hi"))))
        events = await client.responses.create(model="sup-demo", input="hi", stream=True)
        assert [event.type async for event in events] == ["response.created", "response.completed"]
        assert await proxy.tasks(("authorization", "Bearer tok-A")) == []
