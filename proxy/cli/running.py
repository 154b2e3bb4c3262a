"""What the commands that serve have in common: the socket, the ready line, and how trouble is told."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable

import click
import structlog
from starlette.types import ASGIApp

from proxy.errors import LegatoError
from proxy.web import server

from . import AddressRefusal, Refusal

log = structlog.stdlib.get_logger(__name__)


def listen(host: str, port: int, *, secret: bool = True) -> socket.socket:
    """A bound socket, or a refusal with exit code 1. ``secret``: whether owners have a key of their own."""
    try:
        sock = server.listen(host, port)
    except server.ListenError as exc:
        raise _refusal(exc, f"[{host}]:{port}" if ":" in host else f"{host}:{port}") from None
    address = sock.getsockname()[0]
    if not secret and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        log.warning(
            "listening beyond this machine without a secret",
            host=address,
            advice="set LEGATO_SECRET, and put TLS in front: legato itself speaks plain HTTP",
        )
    return sock


def run(
    name: str,
    sock: socket.socket,
    make_app: Callable[[], ASGIApp],
    *,
    drain: server.Drain | None = None,
    grace: float,
) -> None:
    """Serve until a signal. A start-up that fails with one of our own errors is one line and exit code 2."""
    url = server.url(sock)

    def ready() -> None:
        click.echo(f"{name} listening on {url}")

    try:
        with contextlib.closing(sock):
            server.run(make_app(), sock, ready=ready, drain=drain, grace=grace)
    except LegatoError as exc:
        raise Refusal(f"{exc.code}: {exc.message}") from None


def _refusal(exc: server.ListenError, address: str) -> AddressRefusal:
    if exc.reason.errno == errno.EADDRINUSE:
        advice = "the port is in use; choose another with --port, 0 for any free one"
    elif exc.reason.errno == errno.EACCES:
        advice = "not allowed; choose a port from 1024 on with --port"
    else:
        advice = f"{exc.reason.strerror}; see --host and --port"
    return AddressRefusal(f"can't listen on {address}: {advice}")
