"""Run an ASGI app under a real uvicorn in the test's own event loop.

::

    async with serve(app) as server:
        ...                       # talk to server.url
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import uvicorn

GRACE = 2
"""Seconds that requests still open at the end of a test get before they are cancelled."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    host: str
    port: int
    uvicorn: uvicorn.Server

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``."""
        return f"http://{self.host}:{self.port}"

    @property
    def requests_open(self) -> int:
        """How many requests the app is still working on."""
        return len(self.uvicorn.server_state.tasks)


@asynccontextmanager
async def serve(app: Any, *, host: str = "127.0.0.1", **settings: Any) -> AsyncIterator[Running]:
    """Start uvicorn on a free port, with lifespan; ``settings`` go to ``uvicorn.Config``.

    Neither ``Server.serve`` (it takes the signals) nor its main loop (it only polls) is used.
    """
    options: dict[str, Any] = {
        "http": "httptools",
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,
        "timeout_graceful_shutdown": GRACE,
    }
    config = uvicorn.Config(app, host=host, port=0, **(options | settings))
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield Running(host, server.servers[0].sockets[0].getsockname()[1], server)
    finally:
        await _stop(server)


async def _stop(server: uvicorn.Server) -> None:
    """What ``Server.shutdown`` does, without its waits of a tenth of a second each."""
    for listener in server.servers:
        listener.close()
    state = server.server_state
    for connection in list(state.connections):
        connection.shutdown()
    with anyio.move_on_after(server.config.timeout_graceful_shutdown):
        while state.connections or state.tasks:  # noqa: ASYNC110  uvicorn tells nobody
            await anyio.sleep(0.001)
    for task in list(state.tasks):
        task.cancel()
    await server.lifespan.shutdown()
