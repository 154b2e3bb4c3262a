"""curl, which shows every byte that a client gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import anyio
import pytest
from support.frames import two_cycles
from support.legato import ASKED, ROUTE, Legato, legato, proxied
from support.rules import check
from support.server import serve

from proxy.simulator import simulator_app

pytestmark = pytest.mark.anyio


async def curl(proxy: Legato, *options: str, body: str | None = None) -> bytes:
    """POST a long task; what curl writes to stdout. A failure of curl's is an error."""
    if (program := shutil.which("curl")) is None:
        pytest.skip("curl is the client here")
    command = [program, "-sSN", "--noproxy", "*", "--max-time", "10", "--fail-with-body", *options]
    command += ["-H", "Authorization: Bearer tok-A", "-H", "Content-Type: application/json"]
    command += ["--data-binary", body or json.dumps(ASKED), proxy.url + ROUTE]
    with anyio.fail_after(15):
        done = await anyio.run_process(command, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_five_cycles_to_the_end() -> None:
    """One body over one connection, with its proper end (curl would exit with 18 otherwise)."""
    async with serve(simulator_app("default", speed=0)) as supervisor, legato(supervisor.url) as proxy:
        stream = check(await curl(proxy))
        assert stream.done
        (shown,) = await proxy.tasks()
        assert (shown["state"], shown["cycles"]) == ("completed", 5)


async def test_old_http_has_an_end_too() -> None:
    """HTTP/1.0 knows no chunks: the body ends with the connection."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        assert check(await curl(proxy, "--http1.0")).types[-1] == "response.completed"


async def test_expect_100_continue() -> None:
    """A large body that waits for 100 gets it from legato and starts the task; upstream is never asked."""
    body = json.dumps(ASKED | {"custom_inputs": {"pad": "x" * 100_000}})
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        waits = ("-H", "Expect: 100-continue", "--expect100-timeout", "60")
        assert check(await curl(proxy, *waits, body=body)).types[-1] == "response.completed"
        first, follow_up = upstream.requests
        assert first.body == body.encode()
        assert first.one("expect") is follow_up.one("expect") is None


async def test_compressed_is_not_what_a_stream_is() -> None:
    """``--compressed`` offers encodings; the events come as they are all the same."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        assert check(await curl(proxy, "--compressed")).types[-1] == "response.completed"
        assert [seen.one("accept-encoding") for seen in upstream.requests] == [b"identity"] * 2


async def test_headers_are_shown_once(tmp_path: Path) -> None:
    """Each header of the answer stands there once, and the task's id is among them."""
    head = tmp_path / "head"
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        await curl(proxy, "-D", str(head))
        (shown,) = await proxy.tasks()
    lines = head.read_text().splitlines()[1:]
    names = [line.partition(":")[0].lower() for line in lines if line]
    assert len(names) == len(set(names))
    assert f"legato-task: {shown['id']}" in lines
