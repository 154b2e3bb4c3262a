"""The smallest proxy: a scripted upstream, and a server that passes everything on to it.

::

    async with proxied() as (scripted, server), connect(server.port) as client:
        await client.send(request("GET", b"/c//d"))
        answer = await client.answer()
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.errors import BodyTooLarge
from proxy.upstream import Upstream, UpstreamConfig
from proxy.web.answers import send_error
from proxy.web.body import read_body
from proxy.web.passthrough import passthrough
from support.server import Running, serve
from support.upstream import ScriptedUpstream


@asynccontextmanager
async def proxied(
    base: str = "", *, limit: int | None = None, **config: Any
) -> AsyncIterator[tuple[ScriptedUpstream, Running]]:
    """``base``: upstream's base path. ``limit``: read up to so many bytes first, as task routes do.

    ``config`` goes to ``UpstreamConfig``.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = None
        if limit is not None:
            try:
                body = await read_body(receive, limit)
            except BodyTooLarge as error:
                await send_error(send, error)
                return
        await passthrough(scope, receive, send, upstream, body=body)

    async with (
        ScriptedUpstream() as scripted,
        Upstream(UpstreamConfig(scripted.url + base, **config)) as upstream,
        serve(app, lifespan="off") as server,
    ):
        yield scripted, server


def request(method: str, target: bytes, *lines: bytes, body: bytes = b"") -> bytes:
    """One request as bytes, with a Host that is not upstream's."""
    head = [method.encode() + b" " + target + b" HTTP/1.1", b"Host: proxy.internal:8080", *lines]
    if body:
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(head) + b"\r\n\r\n" + body
