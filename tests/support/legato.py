"""The whole product over real sockets: its app under a real server, before an upstream.

::

    async with ScriptedUpstream() as upstream, legato(upstream, heartbeat=0.05) as proxy:
        upstream.plays(...)
        async with proxy.start() as reading:
            await reading.until(b"response.created")
            stream = check(await reading.rest())
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from proxy.settings import Settings
from proxy.web.app import create_app
from support.client import LIMIT, RawAnswer, RawClient, connect
from support.server import Running, serve
from support.upstream import ScriptedUpstream

ROUTE = "/serving-endpoints/sup-demo/invocations"
OWNER = ("authorization", "Bearer tok-A")
ASKED: dict[str, Any] = {
    "input": [{"role": "user", "content": "count the red boxes"}],
    "databricks_options": {"long_task": True},
    "stream": True,
}

Headers = Iterable[tuple[str, str]]


def request(
    body: object = None,
    *,
    method: str = "POST",
    path: str = ROUTE,
    headers: Headers = (OWNER,),
    raw: bytes | None = None,
) -> bytes:
    """One request as bytes. ``raw`` is a body as it stands; else ``body`` is written as JSON."""
    content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    names = {name.lower() for name, _ in headers}
    if "host" not in names:
        lines.insert(1, "host: proxy.internal:8080")
    if content:
        if "content-type" not in names:
            lines.append("content-type: application/json")
        if not names & {"content-length", "transfer-encoding"}:
            lines.append(f"content-length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


class Reading:
    """One client at its stream, on a connection of its own.

    ``body``: what has come so far; ``complete``: the answer came to its proper end.
    """

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.status = 0
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.body = b""
        self.complete = False

    async def head(self, limit: float = LIMIT) -> None:
        """Wait for status and headers."""
        with anyio.fail_after(limit):
            self.status, self.headers = await self.client.head()

    def one(self, name: str) -> str | None:
        """The header's only value, or None."""
        return _text(RawAnswer(self.status, self.headers, b"", complete=False).one(name))

    @property
    def task(self) -> str:
        """The task's id."""
        task = self.one("legato-task")
        assert task is not None, f"no task: {self.status}"
        return task

    async def until(self, part: bytes, count: int = 1, limit: float = LIMIT) -> None:
        """Read until the body holds this part so many times."""
        if not self.status:
            await self.head(limit)
        with anyio.fail_after(limit):
            while self.body.count(part) < count:
                chunk = await self.client.chunk(limit)
                assert chunk, f"the stream ended without {part!r}: {self.body!r}"
                self.body += chunk

    async def rest(self, limit: float = LIMIT) -> bytes:
        """Read to the end; the whole body."""
        if not self.status:
            await self.head(limit)
        length = self.one("content-length")
        with anyio.fail_after(limit):
            if length is not None:
                self.body = await self.client.reader.readexactly(int(length))
            else:
                await self._chunks(limit)
        self.complete = True
        return self.body

    async def _chunks(self, limit: float) -> None:
        parts = [self.body]
        try:
            while chunk := await self.client.chunk(limit):
                parts.append(chunk)
        finally:
            self.body = b"".join(parts)


class Legato:
    """A running proxy; ``server`` where it runs in the test's own process."""

    def __init__(self, port: int, server: Running | None = None) -> None:
        self.port, self.server = port, server
        self.url = f"http://127.0.0.1:{port}"

    async def idle(self, limit: float = 2) -> None:
        """Wait until the server works on no request any more."""
        assert self.server is not None
        with anyio.fail_after(limit):
            while self.server.requests_open:
                await anyio.lowlevel.checkpoint()

    @asynccontextmanager
    async def start(
        self,
        body: object = None,
        *,
        path: str = ROUTE,
        headers: Headers = (OWNER,),
        raw: bytes | None = None,
    ) -> AsyncIterator[Reading]:
        """Send a request that starts a task; its head isn't waited for."""
        async with connect(self.port) as client:
            asked = ASKED if body is None else body
            await client.send(request(asked, path=path, headers=headers, raw=raw))
            yield Reading(client)

    async def whole(self, body: object = None, *, limit: float = LIMIT, **how: Any) -> Reading:
        """A task's stream, read to its end; the connection has proved reusable."""
        async with self.start(body, **how) as reading:
            await reading.rest(limit)
            await reading.client.send(request(method="GET", path="/legato/health"))
            assert (await reading.client.answer()).status == 200
        return reading

    async def ask(self, raw: bytes, method: str = "POST", limit: float = LIMIT) -> RawAnswer:
        """One request on a connection of its own, and its answer."""
        async with connect(self.port) as client:
            await client.send(raw)
            return await client.answer(method, limit)

    async def tasks(self, owner: tuple[str, str] = OWNER) -> list[dict[str, Any]]:
        """The owner's tasks."""
        answer = await self.ask(request(method="GET", path="/legato/tasks", headers=[owner]))
        assert answer.status == 200
        found: list[dict[str, Any]] = json.loads(answer.body)["data"]
        return found

    async def show(self, task: str, owner: tuple[str, str] = OWNER) -> dict[str, Any]:
        """One task."""
        answer = await self.ask(request(method="GET", path=f"/legato/tasks/{task}", headers=[owner]))
        assert answer.status == 200, answer.body
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def until_state(self, task: str, *states: str, limit: float = LIMIT) -> dict[str, Any]:
        """Wait until the task is in one of these states."""
        with anyio.fail_after(limit):
            while (shown := await self.show(task))["state"] not in states:
                await anyio.lowlevel.checkpoint()
        return shown

    async def cancel(self, task: str, owner: tuple[str, str] = OWNER) -> RawAnswer:
        """Cancel a task."""
        return await self.ask(request(path=f"/legato/tasks/{task}/cancel", headers=[owner]))


@asynccontextmanager
async def legato(upstream: ScriptedUpstream | str, **settings: Any) -> AsyncIterator[Legato]:
    """The product before this upstream."""
    url = upstream if isinstance(upstream, str) else upstream.url
    app = create_app(Settings(**({"upstream": url, "log": "memory:"} | settings)))
    async with serve(app) as server:
        yield Legato(server.port, server)


@asynccontextmanager
async def proxied(**settings: Any) -> AsyncIterator[tuple[ScriptedUpstream, Legato]]:
    """A scripted upstream with the product before it."""
    async with ScriptedUpstream() as upstream, legato(upstream, **settings) as proxy:
        yield upstream, proxy


async def released(upstream: ScriptedUpstream, proxy: Legato, limit: float = 2) -> None:
    """Within two seconds nothing of an exchange is left open, on either side."""
    await upstream.until(lambda: upstream.open == 0, limit)
    with anyio.fail_after(limit):
        while half_closed(upstream.port, proxy.port):
            await anyio.lowlevel.checkpoint()


def half_closed(upstream: int, proxy: int) -> int:
    """The product's sockets in CLOSE_WAIT: the peer has closed, and it hasn't."""
    table = Path("/proc/net/tcp")
    if not table.exists():
        return 0
    rows = (line.split()[1:4] for line in table.read_text().splitlines()[1:])
    ends = [(_port(local), _port(remote)) for local, remote, state in rows if state == "08"]
    return sum(local == proxy or remote == upstream for local, remote in ends)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
