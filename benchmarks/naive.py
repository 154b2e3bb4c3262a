"""The loop that applications write today, without legato: Starlette, httpx, ``aiter_lines`` and ``json``.

Kindly written: one pooled client without a limit on connections, every cycle read to its end so that its
connection can be used again.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=os.environ["BENCH_UPSTREAM"], timeout=None, limits=limits
    ) as app.state.client:
        yield


async def start(request: Request) -> StreamingResponse:
    body = await request.json()
    events = stream(request.app.state.client, request.url.path, request.headers["authorization"], body)
    return StreamingResponse(events, media_type="text/event-stream")


async def stream(
    client: httpx.AsyncClient, path: str, authorization: str, body: dict[str, Any]
) -> AsyncIterator[str]:
    number = 0
    while True:
        items: list[dict[str, Any]] = []
        asked: dict[str, Any] | None = None
        async with client.stream(
            "POST", path, json=body, headers={"Authorization": authorization}
        ) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if event["type"] == "response.created" and number:
                    continue
                if event["type"] == "response.output_item.done":
                    items.append(event["item"])
                    if event["item"]["type"] == "task_continue_request":
                        asked = event["item"]
                        continue
                event["sequence_number"] = number
                number += 1
                yield f"data: {json.dumps(event)}\n\n"
        if asked is None:
            yield "data: [DONE]\n\n"
            return
        answer = {"type": "task_continue_response", "continue_request_id": asked["id"]}
        body["input"] = [*body["input"], *items, answer]


app = Starlette(routes=[Route("/v1/responses", start, methods=["POST"])], lifespan=lifespan)
