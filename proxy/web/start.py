"""A POST on a task route: does it ask for a task, and if so, start one and stream it."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

from proxy.core.dialects import followup
from proxy.core.messages import CancelRequested
from proxy.core.splice import loads
from proxy.endpoints import EndpointConfig, Endpoints, route_pattern
from proxy.errors import BodyTooLarge, IllegalMove, LegatoError, LogUnavailable, NotAvailable
from proxy.log.base import Log
from proxy.runner import Runner
from proxy.tasks import Start, Tasks
from proxy.upstream import Request, Upstream
from proxy.web import auth, options
from proxy.web.answers import cut_short, send_error
from proxy.web.body import ClientGone, read_body, until_gone
from proxy.web.headers import end_to_end, without_legato
from proxy.web.passthrough import passthrough, relay, sendable, target_of
from proxy.web.stream import Reader

# Headers that are ours in every request of a task.
_OURS = frozenset({b"content-length", b"accept-encoding", b"expect"})
# Headers that speak of the bytes or the sending of the client's own request: true of the first one only.
_FIRST_ONLY = frozenset(
    {
        b"content-encoding",
        b"content-md5",
        b"content-digest",
        b"repr-digest",
        b"digest",
        b"signature",
        b"signature-input",
        b"idempotency-key",
    }
)


@dataclass(frozen=True, slots=True)
class StartConfig:
    """The settings that starting needs, as plain values. Times in seconds, sizes in bytes."""

    routes: tuple[str, ...]
    endpoints: Endpoints
    write_timeout: float
    max_body: int
    on_disconnect: str = "continue"


class Starter:
    """Serves the task routes."""

    def __init__(
        self, config: StartConfig, *, tasks: Tasks, log: Log, upstream: Upstream, owners: auth.Owners
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._log = log
        self._upstream = upstream
        self._owners = owners
        self._route = re.compile("|".join(map(route_pattern, config.routes)) or r"(?!)").fullmatch

    def takes(self, scope: Scope) -> bool:
        """Whether a request may start a task; any other one is passed on without reading its body."""
        path = _path(scope)
        if scope["method"] != "POST" or not self._route(path):
            return False
        asks = any(name == b"legato-engage" for name, _ in scope["headers"])
        return asks or self._config.endpoints.may_engage(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start a task, or pass the request on."""
        try:
            raw = await read_body(receive, self._config.max_body)
        except ClientGone:
            return
        except LegatoError as error:
            await send_error(send, error)
            return
        headers = _as_text(scope["headers"])
        try:
            plain = decoded(raw, headers.get("content-encoding"), self._config.max_body)
            body = _object(plain)
            asked = self._asked(scope, headers, raw, plain, body)
        except LegatoError as error:
            await send_error(send, error)
            return
        if asked is not None:
            await self._start(asked, headers, receive, send)
        elif body is not None and "legato" in body and plain is raw:
            await passthrough(scope, receive, send, self._upstream, body=followup.first_body(raw))
        else:
            await passthrough(scope, receive, send, self._upstream, body=raw)

    # --- does it ask for a task? ------------------------------------------------------------------

    def _asked(
        self,
        scope: Scope,
        headers: Mapping[str, str],
        raw: bytes,
        plain: bytes | None,
        body: dict[str, Any] | None,
    ) -> Start | None:
        config = self._config.endpoints.of(_path(scope), body and body.get("model"))
        engage = options.engage(headers) or config.engage
        if body is None or plain is None:
            options.refuse_without_body(headers)
            return None
        conversation = followup.read(body)
        if not _engages(engage, conversation):
            return None
        options.read(headers)
        if body.get("background") is True:
            raise NotAvailable("background tasks are not available yet.", param="background")
        limits = options.limits(headers, body, config.limits)
        target = target_of(scope)
        force = engage == "force"
        sent = [pair for pair in without_legato(end_to_end(scope["headers"])) if pair[0] not in _OURS]
        sent.append((b"accept-encoding", b"identity"))
        untouched = followup.first_body(plain, force=force) == plain
        return Start(
            owner=self._owners.of(auth.client_of(scope), headers),
            conversation_key=_conversation_id(body),
            endpoint=f"{scope['path']} {body.get('model') or ''}",
            target=target,
            headers=[pair for pair in sent if pair[0] not in _FIRST_ONLY],
            body=plain,
            conversation=conversation,
            force=force,
            limits=limits,
            config=config,
            secrets=auth.secret_values(scope["headers"]),
            first=Request("POST", target, sent, raw, decode=True, fresh=True) if untouched else None,
        )

    # --- start and stream -------------------------------------------------------------------------

    async def _start(self, asked: Start, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        try:
            runner, exchange = await until_gone(receive, self._tasks.start(asked))
        except ClientGone:
            return
        except LegatoError as error:
            await send_error(send, error)
            return
        if exchange is not None:
            await relay(exchange, receive, send)
        if runner is not None:
            await self._stream(runner, asked.config, headers, receive, send)

    async def _stream(
        self,
        runner: Runner,
        config: EndpointConfig,
        headers: Mapping[str, str],
        receive: Receive,
        send: Send,
    ) -> None:
        chosen = options.read(headers)
        beats = chosen.heartbeat and takes_comments(headers)
        tail = await self._log.tail(runner.row.id)
        reader = Reader(
            tail,
            send,
            heartbeat=config.heartbeat if beats else 0,
            write_timeout=self._config.write_timeout,
            event_ids=chosen.event_ids,
        )
        runner.readers.add(reader.cut)
        if runner.broken:  # before this reader was there to be cut
            reader.cut()
        try:
            await send(
                {"type": "http.response.start", "status": runner.status, "headers": stream_head(runner)}
            )
            await reader.run(receive)
            if not reader.complete:
                cut_short()
        finally:
            runner.readers.discard(reader.cut)
            if not reader.complete and not runner.readers:
                await self._left_alone(runner, chosen.on_disconnect or self._config.on_disconnect)

    async def _left_alone(self, runner: Runner, on_disconnect: str) -> None:
        """The task's last reader has left: by default it goes on, since closing a tab is no decision."""
        if on_disconnect != "cancel" or runner.broken:
            return
        with anyio.CancelScope(shield=True):
            try:
                await runner.take(CancelRequested(time.time(), actor="disconnect"))
            except (IllegalMove, LogUnavailable):
                pass  # it has just ended, or is cut already


def takes_comments(headers: Mapping[str, str]) -> bool:
    """Whether the client skips a comment line; MLflow's raises on any line but ``data:``.

    Its deployments client has a header of its own, since it sends through the Databricks SDK by default,
    and the ``User-Agent`` is then the SDK's.
    """
    if headers.get("x-databricks-endpoints-api-client") == "Databricks Deployment Client":
        return False
    return "mlflow-python-client" not in headers.get("user-agent", "").lower()


def stream_head(runner: Runner) -> list[tuple[bytes, bytes]]:
    """Upstream's own answer headers, with what a stream needs on its way through other proxies."""
    replaced = (b"content-length", b"content-encoding", b"cache-control", b"x-accel-buffering")
    kept = [pair for pair in sendable(runner.status, list(runner.head)) if pair[0].lower() not in replaced]
    return [
        *kept,
        (b"cache-control", b"no-cache, no-transform"),
        (b"x-accel-buffering", b"no"),
        (b"legato-task", runner.row.id.encode()),
    ]


def decoded(raw: bytes, encoding: str | None, limit: int) -> bytes | None:
    """A request body without its compression; None where we can't look into it. ``BodyTooLarge``."""
    if encoding is None or encoding.strip().lower() == "identity":
        return raw
    if encoding.strip().lower() not in ("gzip", "x-gzip", "deflate"):
        return None
    inflater = zlib.decompressobj(wbits=47)
    try:
        plain = inflater.decompress(raw, limit)
    except zlib.error:
        return None
    if inflater.unconsumed_tail:
        raise BodyTooLarge(f"The decompressed body is larger than max_body ({limit} bytes).")
    return plain


def _engages(engage: str, conversation: followup.Conversation) -> bool:
    if not conversation.streams or engage == "off":
        return False
    if engage == "long_task":
        return conversation.long_task is True
    return engage == "stream" or conversation.long_task is not False


def _object(plain: bytes | None) -> dict[str, Any] | None:
    if plain is None:
        return None
    try:
        body = loads(plain)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _conversation_id(body: Mapping[str, Any]) -> str | None:
    """The conversation that the body names, in the order of section 1 of the design."""
    places = (body, body.get("databricks_options"), body.get("context"))
    keys = ("conversation", "conversation_id", "conversation_id")
    for place, key in zip(places, keys, strict=True):
        value = place.get(key) if isinstance(place, dict) else None
        if isinstance(value, dict):
            value = value.get("id")
        if isinstance(value, str) and value:
            return value
    return None


def _path(scope: Scope) -> str:
    """As it stands in the request, to be compared with routes."""
    return str(scope["raw_path"], "latin-1")


def _as_text(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers for looking at: lower-case names, repeated ones joined."""
    found: dict[str, str] = {}
    for name, value in headers:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found
