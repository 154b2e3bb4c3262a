"""Carries out what a task's core orders. No decision is made here; this is the only writer of its task.

One asyncio task runs the exchanges one after another. Whatever else happens to the task (a timer, a
command) is told through ``take``, which a lock keeps in one order.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio
import structlog

from proxy.core import messages as m
from proxy.core.messages import Effect, Input, TimerName
from proxy.core.task import Task
from proxy.errors import LogUnavailable, UpstreamFault, UpstreamTimeout, UpstreamUnreachable
from proxy.log.base import Log, NewTask
from proxy.upstream import Exchange, Request, Upstream

# How much of a refusal's body is read: more is no message, and nobody should wait for it.
MAX_REFUSAL = 64 * 1024

logger = structlog.stdlib.get_logger(__name__)


def is_event_stream(exchange: Exchange) -> bool:
    """A 2xx whose media type says event stream, in any letter case, and whose encoding could be undone."""
    if not 200 <= exchange.status < 300:
        return False
    named = {name.lower(): value.strip().lower() for name, value in exchange.headers}
    if named.get(b"content-encoding", b"identity") != b"identity":
        return False
    return named.get(b"content-type", b"").split(b";")[0].strip() == b"text/event-stream"


class Runner:
    """One live task.

    ``template``: the request without its body, as it goes upstream in every cycle. ``secrets``: values
    that are masked in what upstream says of a refusal. ``first``: the first request where it goes out
    just as the client sent it, digests and compression included. ``readers``: cut when the task
    breaks.
    """

    def __init__(
        self,
        task: Task,
        row: NewTask,
        template: Request,
        *,
        log: Log,
        upstream: Upstream,
        secrets: Sequence[str] = (),
        learned: Callable[[str, str], None] = lambda replay, key: None,
        first: Request | None = None,
    ) -> None:
        self.task = task
        self.row = row
        self.template = template
        self.secrets = secrets
        self.broken = False
        self.status = 200
        self.head: tuple[tuple[bytes, bytes], ...] = ()
        self.readers: set[Callable[[], None]] = set()
        self._log = log
        self._upstream = upstream
        self._learned = learned
        self._first = first
        self._epoch = 0
        self._created = False
        self._lock = asyncio.Lock()
        self._order: m.OpenExchange | None = None
        self._exchange: Exchange | None = None
        self._scope: anyio.CancelScope | None = None
        self._own_task: asyncio.Task[object] | None = None
        self._wake = asyncio.Event()
        self._finished = False
        self._timers: dict[TimerName, asyncio.TimerHandle] = {}
        self._fires: set[asyncio.Task[None]] = set()
        self._logger = logger.bind(task=row.id)

    # --- the first cycle --------------------------------------------------------------------------

    async def begin(self) -> Exchange:
        """Write the task down, send its first request, and return upstream's answer, whatever it is.

        ``UpstreamFault`` if there is none. Unless the answer is then given to ``run``, the task must be
        forgotten by its caller.
        """
        order: m.OpenExchange | None = None
        for effect in self.task.handle(m.Started(time.time())):
            if isinstance(effect, m.Append):
                self._created = True  # even if the waiting for the disk is cancelled
                self._epoch = await self._log.create(self.row, effect.records, sync=effect.sync)
            elif isinstance(effect, m.OpenExchange):
                order = effect
        if order is None:
            raise AssertionError("a start orders one exchange")
        first = self._first or self.template.with_body(order.body)
        return await self._upstream.open(replace(first, retry_connect=True))

    async def abandon(self) -> None:
        """Nothing came of the start: close what is open, and leave nothing in the log."""
        await self._close()
        if self._created:
            await self._log.delete(self.row.id)

    async def accept(self, exchange: Exchange) -> None:
        """Upstream's answer is an event stream: the task stands, and is in the log before its head is."""
        self._exchange = exchange
        self.status, self.head = exchange.status, tuple(exchange.headers)
        await self.take(m.Opened(time.time(), _request_id(exchange)))

    # --- the life of a task -----------------------------------------------------------------------

    async def run(self) -> None:
        """Run exchanges until the core says that nobody need."""
        self._own_task = asyncio.current_task()
        try:
            while not self._finished:
                if self._exchange is None and self._order is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                with anyio.CancelScope() as self._scope:
                    await self._run_exchange()
            if self._fires:  # the one that has ended the task may still have something to write
                await asyncio.wait(self._fires)
        except asyncio.CancelledError:
            for fire in self._fires:
                fire.cancel()
            raise
        except LogUnavailable as exc:
            self._break(exc)
        except Exception as exc:  # noqa: BLE001  the one place where a bug of the core's ends: this task is cut
            self._break(exc)
        finally:
            self._finished = True
            for timer in self._timers.values():
                timer.cancel()
            await self._close()

    async def take(self, happened: Input) -> None:
        """Tell the core, and carry out what it orders."""
        async with self._lock:
            await self._carry_out(self.task.handle(happened))

    async def interrupt(self, why: str) -> None:
        """This process is about to end: close what is open, and say what is known of it.

        A request that is on its way has an unknown outcome then. What only waits is left as it is.
        """
        async with self._lock:
            on_its_way = self._exchange is not None or self.task.ledger.operation is not None
            if on_its_way and not self._finished:
                await self._close_exchange()
                await self._carry_out(self.task.handle(m.ExchangeFailed(time.time(), sent=True, message=why)))
            self._finished = True
            self._wake.set()
        for cut in tuple(self.readers) if self.task.open else ():
            cut()

    async def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if type(effect) is m.Append:
                await self._append(effect)
            else:
                await self._perform(effect)

    def _break(self, exc: Exception) -> None:
        """The log is gone, or we have a bug: readers are cut without an ending, since none is true."""
        if isinstance(exc, LogUnavailable):
            self._logger.error("the log can't be written; the task is cut", error=exc.message)
        else:
            self._logger.error("a task broke; it is cut", exc_info=exc)
        self._finished = self.broken = True
        self._wake.set()
        if self._scope is not None:
            self._scope.cancel()
        for cut in tuple(self.readers):
            cut()

    async def _append(self, order: m.Append) -> None:
        if order.records or order.summary is not None:
            await self._log.append(
                self.row.id, self._epoch, order.after, order.records, order.summary, sync=order.sync
            )

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case m.OpenExchange():
                self._order = effect
                self._wake.set()
            case m.CloseExchange():
                await self._close_exchange()
            case m.SetTimer(name, seconds, jitter):
                self._set_timer(name, seconds + random.uniform(0, jitter))
            case m.CancelTimer(name):
                self._cancel_timer(name)
            case m.Learned(replay, key):
                self._learned(replay, key)
            case m.Tell(level, event, facts):
                self._tell(level, event, facts)
            case m.Finish():
                self._finished = True
                self._wake.set()
            case m.Append():
                await self._append(effect)

    def _tell(self, level: m.Level, event: str, facts: dict[str, object]) -> None:
        """A line that can't be written breaks no task: a closed stderr, a text that has no encoding."""
        try:
            getattr(self._logger, level)(event, **facts)
        except Exception:  # noqa: BLE001  whatever whoever configured logging has put there
            pass

    # --- exchanges --------------------------------------------------------------------------------

    async def _run_exchange(self) -> None:
        exchange: Exchange | None = None
        try:
            exchange = self._exchange or await self._open()
            while exchange is not None and exchange is self._exchange:
                chunk = await exchange.chunk()
                async with self._lock:
                    if self._exchange is not exchange:
                        return
                    if chunk:
                        await self._carry_out(self.task.handle(m.BytesReceived(chunk, time.time())))
                        continue
                    await self._close()
                    await self._carry_out(self.task.handle(m.BodyEnded(time.time())))
                    return
        except UpstreamFault as exc:
            async with self._lock:
                if self._exchange is exchange and not self._finished:  # nobody has closed it meanwhile
                    await self._close()
                    await self._carry_out(self.task.handle(_failure(exc)))

    async def _open(self) -> Exchange | None:
        """Send the ordered request; an answer that is no event stream is a refusal."""
        order, self._order = self._order, None
        if order is None:
            return None
        exchange = await self._upstream.open(self.template.with_body(order.body))
        if not is_event_stream(exchange):
            try:
                body = await _bounded(exchange)
            finally:
                await exchange.close()
            headers = tuple((n.decode("latin-1"), v.decode("latin-1")) for n, v in exchange.headers)
            await self.take(m.Refused(time.time(), exchange.status, headers, self._masked(body)))
            return None
        self._exchange = exchange
        await self.take(m.Opened(time.time(), _request_id(exchange)))
        return exchange

    async def _close_exchange(self) -> None:
        """Stop reading. The reading itself sees it when it comes back; anybody else must cancel it."""
        self._order = None
        if self._scope is not None and asyncio.current_task() is not self._own_task:
            self._scope.cancel()
        await self._close()

    async def _close(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await exchange.close()

    def _masked(self, body: bytes) -> bytes:
        for secret in self.secrets:
            body = body.replace(secret.encode(), b"***")
        return body

    # --- timers -----------------------------------------------------------------------------------

    def _set_timer(self, name: TimerName, seconds: float) -> None:
        self._cancel_timer(name)
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, self._fire, name)

    def _cancel_timer(self, name: TimerName) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _fire(self, name: TimerName) -> None:
        """In no task, so anyio's groups can't be used: they would not know which loop they are in."""
        fire = asyncio.get_running_loop().create_task(self._fired(name, self._timers[name]))
        self._fires.add(fire)  # the loop itself keeps no strong reference
        fire.add_done_callback(self._fires.discard)

    async def _fired(self, name: TimerName, timer: asyncio.TimerHandle) -> None:
        """A timer counts only if nothing that was waiting before it has cancelled it or set it anew."""
        try:
            async with self._lock:
                if self._timers.get(name) is timer and not self._finished:
                    del self._timers[name]
                    await self._carry_out(self.task.handle(m.TimerFired(time.time(), name)))
        except Exception as exc:  # noqa: BLE001  as in ``run``
            self._break(exc)


def _failure(exc: UpstreamFault) -> m.ExchangeFailed:
    return m.ExchangeFailed(
        time.time(),
        sent=not isinstance(exc, UpstreamUnreachable),
        message=exc.message,
        silence=isinstance(exc, UpstreamTimeout),
    )


async def _bounded(exchange: Exchange) -> bytes:
    body = b""
    try:
        while len(body) < MAX_REFUSAL and (chunk := await exchange.chunk()):
            body += chunk
    except UpstreamFault:
        pass  # the status says what counts
    return body[:MAX_REFUSAL]


def _request_id(exchange: Exchange) -> str | None:
    for name, value in exchange.headers:
        if name.lower() in (b"x-request-id", b"x-databricks-request-id"):
            return value.decode("latin-1")
    return None
