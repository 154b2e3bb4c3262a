"""The server around the app: sockets, the drain hook, and a lifespan that breaks."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from proxy.web import server


async def app(scope, receive, send):
    """Starts, answers nothing, stops."""
    assert scope["type"] == "lifespan"
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


def terminate() -> None:
    """Stop this process's server as an operator would."""
    os.kill(os.getpid(), signal.SIGTERM)


def never() -> None:
    """A ready line that mustn't be printed."""
    raise AssertionError


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    """Listens on a free port."""
    with closing(server.listen("127.0.0.1", 0)) as bound:
        yield bound


def test_a_url_names_the_port_that_was_taken(sock: socket.socket):
    """And puts an IPv6 address in brackets."""
    assert server.url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    if socket.has_ipv6:
        with closing(server.listen("::1", 0)) as other:
            assert server.url(other) == f"http://[::1]:{other.getsockname()[1]}"


def test_an_address_that_somebody_listens_on_is_refused(sock: socket.socket):
    """At once, not first when the app has started."""
    with pytest.raises(server.ListenError) as refused:
        server.listen(*sock.getsockname())
    assert refused.value.reason.errno == errno.EADDRINUSE


def test_who_connects_early_waits_for_the_app(sock: socket.socket):
    """The ready line comes after start-up, and connections made before it are served."""
    early = socket.create_connection(sock.getsockname(), timeout=10)

    async def answering(scope, receive, send):
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
            terminate()

    early.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    server.run(answering, sock, ready=lambda: None)
    with early:
        assert early.recv(100).startswith(b"HTTP/1.1 204 ")


def test_the_signals_are_given_back(sock: socket.socket):
    """After the end the process's own handlers stand again."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    server.run(app, sock, ready=terminate)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_drain_hook_runs_while_the_socket_is_open(sock: socket.socket):
    """After the signal, before connections are refused."""
    address = sock.getsockname()
    reached = []

    async def drain() -> None:
        _, writer = await asyncio.open_connection(*address)
        reached.append(address)
        writer.close()
        await writer.wait_closed()

    server.run(app, sock, ready=terminate, drain=drain)
    assert reached == [address]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


def test_a_drain_that_breaks_still_ends_the_app(sock: socket.socket):
    """The app gets its shutdown, and the error comes out."""
    told = []

    async def noted(scope, receive, send):
        async def tell(message):
            told.append(message["type"])
            await send(message)

        await app(scope, receive, tell)

    async def drain() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        server.run(noted, sock, ready=terminate, drain=drain)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_a_lifespan_that_says_it_failed_is_an_error(sock: socket.socket):
    """With the reason it gave."""

    async def refusing(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no disk"})

    with pytest.raises(RuntimeError, match="no disk"):
        server.run(refusing, sock, ready=never)


def test_a_lifespan_that_breaks_while_serving_ends_the_server(sock: socket.socket):
    """What it held up is gone: going on would only look alive."""
    broken = asyncio.Event()

    async def breaking(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await broken.wait()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        server.run(breaking, sock, ready=broken.set)


def test_a_lifespan_that_breaks_at_the_end_is_an_error(sock: socket.socket):
    """A log that can't be closed isn't passed over."""

    async def breaking(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        server.run(breaking, sock, ready=terminate)


# --- in a loop that runs already ----------------------------------------------------------------------


@pytest.fixture
def anyio_backend() -> str:
    """The loop that uvicorn runs on."""
    return "asyncio"


@pytest.mark.anyio
async def test_serving_answers_while_its_block_lasts(anyio_backend: str):
    """At the URL it gives; afterwards nobody listens there, and the app has had its shutdown."""
    told = []

    async def answering(scope, receive, send):
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            told.append("stopped")
        else:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

    async with httpx.AsyncClient() as client:
        async with server.serving(answering) as url:
            assert (await client.get(url)).status_code == 204
        assert told == ["stopped"]
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


@pytest.mark.anyio
async def test_serving_raises_what_the_start_raised(anyio_backend: str):
    """The block isn't entered."""

    async def breaking(scope, receive, send):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with server.serving(breaking):
            never()
