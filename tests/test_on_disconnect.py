"""The last reader leaves: the task goes on, or it is cancelled where that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from support.frames import completed, created, message, sse
from support.legato import OWNER, proxied, released
from support.upstream import Answer

pytestmark = pytest.mark.anyio

CANCEL = [OWNER, ("Legato-On-Disconnect", "cancel")]


@pytest.fixture
def anyio_backend() -> str:
    """The server runs on asyncio."""
    return "asyncio"


def hanging() -> Answer:
    """A stream that begins and then says nothing."""
    return Answer(headers={"content-type": "text/event-stream"}, chunks=[created()], end="hang")


@pytest.mark.parametrize(
    ("settings", "headers"),
    [({"on_disconnect": "cancel"}, [OWNER]), ({}, CANCEL)],
    ids=["setting", "header"],
)
async def test_a_client_that_leaves_cancels_its_task(settings: dict[str, Any], headers: Any) -> None:
    """Upstream is closed within two seconds, and the task says who cancelled it."""
    async with proxied(**settings) as (upstream, proxy):
        upstream.plays(hanging())
        async with proxy.start(headers=headers) as reading:
            await reading.until(b"response.created")
            task = reading.task
        await released(upstream, proxy)
        shown = await proxy.until_state(task, "cancelled")
        assert shown["reason"] == "cancelled by disconnect"
        assert len(upstream.requests) == 1


async def test_a_request_may_choose_to_go_on() -> None:
    """The header wins over the setting."""
    async with proxied(on_disconnect="cancel") as (upstream, proxy):
        upstream.plays(hanging())
        keep = [OWNER, ("Legato-On-Disconnect", "continue")]
        async with proxy.start(headers=keep) as reading:
            await reading.until(b"response.created")
            task = reading.task
        await proxy.idle()
        assert (await proxy.show(task))["state"] == "running"
        await proxy.cancel(task)


async def test_a_stream_read_to_its_end_cancels_nothing() -> None:
    """Leaving after the ending is no disconnect."""
    async with proxied(on_disconnect="cancel") as (upstream, proxy):
        upstream.plays(sse(created(), completed(message("a"))))
        reading = await proxy.whole()
        assert (await proxy.show(reading.task))["state"] == "completed"
