"""The HTTP server: uvicorn on a socket of our own, from start-up to the last signal.

uvicorn's own runner exits with 3 and a traceback when start-up fails, dies of the signal that stopped it,
and knows no drain. ``run`` mends these three and leaves the serving to uvicorn.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import FrameType

import anyio
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BACKLOG = 2048

# Longer than the idle limit of the load balancers in front (60 s is usual): else one of them could send a
# request on a connection that is just being closed, which its client would see as a 502.
KEEP_ALIVE = 75

# New objects before a collection, and collections before one of the next older generation; the defaults
# (700, 10, 10) suit short scripts.
GC_THRESHOLD = (50_000, 20, 50)

Drain = Callable[[], Awaitable[None]]


class ListenError(Exception):
    """The address is in use, not ours, or unknown; ``reason`` says which."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Whoever connects before the app is ready waits in the backlog.

    Listening can't be left to the loop: two processes may bind an address as long as neither listens, and
    uvloop says nothing when the second one's ``listen`` fails.

    Raises:
        ListenError: The address can't be taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ListenError(exc) from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise ListenError(exc) from exc
    return sock


def url(sock: socket.socket) -> str:
    """``http://HOST:PORT`` of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: ASGIApp,
    sock: socket.socket,
    *,
    ready: Callable[[], None],
    drain: Drain | None = None,
    grace: float = 8.0,
) -> None:
    """Serve ``app`` on ``sock`` until SIGTERM or SIGINT; a second signal ends the process at once.

    Args:
        app: Its lifespan is run; what it raises there comes out of here.
        sock: From ``listen``; closed in the end.
        ready: Called once start-up has succeeded and connections are taken.
        drain: Awaited after the first signal while the sockets are still open.
        grace: Seconds that open requests get to end after that, before they are cancelled.

    Raises:
        Exception: What the app's lifespan raised.
    """

    def started() -> None:
        _spare_the_collector()
        ready()

    guard = _LifespanGuard(app)
    server = _Server(_config(guard, grace), ready=started, drain=drain)
    guard.on_failure = server.stop
    try:
        with guard.telling():
            server.run(sockets=[sock])
    finally:
        sock.close()


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve ``app`` in the running loop while the block lasts, and give its URL. Takes no signals."""
    guard = _LifespanGuard(app)
    config = _config(guard, grace=1)
    config.load()
    server = _Server(config, ready=lambda: None, drain=None)
    server.lifespan = config.lifespan_class(config)
    sock = listen(host, port)
    try:
        with guard.telling():
            await server.startup([sock])
            try:
                yield url(sock)
            finally:
                with anyio.CancelScope(shield=True):
                    await server.shutdown([sock])
    finally:
        sock.close()


def _config(app: _LifespanGuard, grace: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http="httptools",
        loop="uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, math.ceil(grace)),  # with 0, idle connections count as late
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, *, ready: Callable[[], None], drain: Drain | None) -> None:
        super().__init__(config)
        self._ready = ready
        self._drain = drain

    def stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            _spare_the_collector()
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            if self._drain is not None:
                await self._drain()
        finally:
            await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals without raising them again in the end: a graceful stop exits with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ours = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in ours}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops gracefully, the second at once, whatever the loop is busy with.

        Not by restoring the default handler: it does nothing for process 1 of a container. The log needs no
        goodbye, since it survives a kill at any moment.
        """
        if self.should_exit:
            os._exit(128 + sig)
        self.stop()


def _spare_the_collector() -> None:
    """What start-up made stays, and events make no cycles: look for garbage seldom.

    For a process of our own only: the thresholds are everybody's in it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


class _LifespanGuard:
    """Keeps what the lifespan raises, so that ``run`` can raise it; other calls go straight through."""

    def __init__(self, app: ASGIApp) -> None:
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            return self._lifespan(scope, receive, send)
        return self._app(scope, receive, send)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Raise at the end what the lifespan raised, in place of uvicorn's ``SystemExit``."""
        try:
            yield
        except SystemExit:
            if self.failure is None:
                raise
        if self.failure is not None:
            raise self.failure from self.failure.__cause__  # its own cause, and not the SystemExit

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        told: set[str] = set()

        async def tell(message: Message) -> None:
            told.add(message["type"])
            if message["type"].endswith(".failed"):
                self.failure = RuntimeError(message.get("message") or "the app said so, without a reason")
            await send({"type": message["type"]})  # without its text: run tells it

        try:
            await self._app(scope, receive, tell)
        except Exception as exc:  # noqa: BLE001 - kept, and raised by run
            self.failure = _alone(exc)
            self.on_failure()
            stage = "shutdown" if "lifespan.startup.complete" in told else "startup"
            if f"lifespan.{stage}.failed" not in told:
                await send({"type": f"lifespan.{stage}.failed"})


def _alone(exc: Exception) -> Exception:
    """The one error that a task group has wrapped."""
    while isinstance(exc, ExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc
