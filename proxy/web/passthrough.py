"""Everything that is no task goes through unchanged, streaming both ways.

Bytes are exact: raw path and query, repeated headers, status, compressed bodies, redirects. What changes is
what a proxy must change: hop-by-hop headers, ``Host``, framing, ``Expect`` (see ``engine``), ``Legato-*``.
There is one upstream, and nothing in a request chooses another.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable

import anyio
from starlette.types import Message, Receive, Scope, Send

from proxy.engine import SAFE_METHODS
from proxy.errors import InvalidRequest, LegatoError, UpgradeRefused, UpstreamCut
from proxy.upstream import Exchange, Request, Upstream
from proxy.web.answers import cut_short, send_error
from proxy.web.body import ClientGone, Incoming, gone
from proxy.web.headers import Header, end_to_end, without_legato

NO_BODY = frozenset({204, 304})
LINGER_SECONDS = 1.0
"""For a client to read an answer that came before it had sent its body."""

UNSENDABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""What uvicorn refuses to write into a header's value; it would turn upstream's answer into a 500."""


async def passthrough(
    scope: Scope, receive: Receive, send: Send, upstream: Upstream, *, body: bytes | None = None
) -> None:
    """One request through to upstream and its answer back. ``body``: where the caller has read it."""
    incoming = Incoming(receive)
    try:
        request = outgoing(scope, incoming.pieces() if body is None else body)
    except LegatoError as error:
        incoming.close()
        await send_error(send, error)
        return
    try:
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await (incoming.until_gone() if body is None else gone(receive))
                group.cancel_scope.cancel()

            group.start_soon(watch)
            if body is None and expects_continue(scope):
                send = closing_unless(incoming, send)
            await _forward(upstream, request, send)
            group.cancel_scope.cancel()
    finally:
        incoming.close()


async def relay(exchange: Exchange, receive: Receive, send: Send) -> None:
    """Hand on an answer that upstream has begun; the request's body must have been read."""
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            await gone(receive)
            group.cancel_scope.cancel()

        group.start_soon(watch)
        await _answer(exchange, send)
        group.cancel_scope.cancel()


def expects_continue(scope: Scope) -> bool:
    """Whether the client may be waiting to be told to send its body."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])


def closing_unless(incoming: Incoming, send: Send) -> Send:
    """Close the connection behind an answer that comes before the body has.

    A client that expects ``100 Continue`` and sees the answer first may never send the body, and put its
    next request where the server waits for it (curl does after 417). One that is just sending would get a
    RST, and perhaps see that before the answer; so what it sends is taken for a moment longer.
    """
    early = False

    async def closing(message: Message) -> None:
        nonlocal early
        if message["type"] == "http.response.start" and not incoming.whole:
            early = True
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif early and not message.get("more_body"):
            await send({**message, "more_body": True})
            message = {"type": "http.response.body", "body": b""}
            with anyio.move_on_after(LINGER_SECONDS):
                await incoming.drop_rest()
        await send(message)

    return closing


def target_of(scope: Scope) -> bytes:
    """The request target as the client sent it: raw path and raw query."""
    path: bytes = scope.get("raw_path") or b""
    query: bytes = scope["query_string"]
    if not path.startswith(b"/"):
        raise InvalidRequest("the request target must be a path", param="path")
    return path + b"?" + query if query else path


def outgoing(scope: Scope, body: bytes | AsyncIterable[bytes]) -> Request:
    """The request as it goes upstream."""
    names = {name.lower(): value for name, value in scope["headers"]}
    if b"websocket" in names.get(b"upgrade", b"").lower():
        raise UpgradeRefused("legato carries HTTP, not WebSocket; connect to upstream directly")
    has_body = names.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in names
    content = body if has_body else b"" if b"content-length" in names else None
    method = scope["method"]
    return Request(
        method,
        target_of(scope),
        without_legato(end_to_end(scope["headers"])),
        content,
        retry_connect=True,
        # What may not be repeated must not get lost on a connection that upstream is just closing.
        fresh=has_body or method not in SAFE_METHODS,
    )


async def _forward(upstream: Upstream, request: Request, send: Send) -> None:
    try:
        exchange = await upstream.open(request)
    except LegatoError as error:
        await send_error(send, error)
    except ClientGone:
        pass  # the watcher sees it too, and cancels
    else:
        await _answer(exchange, send)


async def _answer(exchange: Exchange, send: Send) -> None:
    """Head and chunks as they come. A cut body is cut for the client as well: no end is made up for it."""
    try:
        if not 200 <= exchange.status <= 599:
            await send_error(send, UpstreamCut(f"upstream answered with the status {exchange.status}"))
            return
        headers = sendable(exchange.status, exchange.headers)
        await send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        while chunk := await exchange.chunk():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except (LegatoError, ClientGone):
        cut_short()
    finally:
        await exchange.close()


def sendable(status: int, headers: list[Header]) -> list[Header]:
    """Upstream's headers as they may go to the client."""
    kept = without_legato(end_to_end(headers))
    if status in NO_BODY:  # uvicorn would wait for the bytes that a 304's Content-Length speaks of
        kept = [pair for pair in kept if pair[0].lower() != b"content-length"]
    return [pair for pair in kept if not UNSENDABLE.search(pair[1])]
