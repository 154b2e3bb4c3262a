"""The recipes of the docs, followed: their files and commands as they stand there, on ports of our own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import Process
from support.client import LIMIT, RawAnswer, RawClient
from support.frames import DONE, SSE, asks, created, delta, done, message, sse, two_cycles
from support.legato import ASKED, OWNER, ROUTE, Reading, legato, request
from support.rules import check
from support.tls import self_signed
from support.upstream import Answer, ScriptedUpstream

from proxy.settings import load

PAGE = (Path(__file__).parent.parent / "docs/recipes.md").read_text(encoding="utf-8")
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"

pytestmark = pytest.mark.anyio
with_nginx = pytest.mark.skipif(not Path(NGINX).exists(), reason="nginx isn't installed")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


def recipe(title: str, language: str) -> list[str]:
    """The code blocks of one recipe."""
    section = PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


class Nginx:
    """A running nginx. ``folder`` holds its files, and the certificate that it shows, if any."""

    def __init__(self, port: int, folder: Path, *, tls: bool) -> None:
        self.port = port
        self._tls = ssl.create_default_context(cafile=folder / "localhost.pem") if tls else None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[RawClient]:
        """A connection to it, as a client makes it."""
        host = "localhost" if self._tls else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self._tls, server_hostname=host, limit=1 << 20
        )
        try:
            yield RawClient(reader, writer)
        finally:
            writer.transport.abort()

    async def ask(self, raw: bytes, method: str = "POST") -> RawAnswer:
        """One request on a connection of its own, and its answer."""
        async with self.connect() as client:
            await client.send(raw)
            return await client.answer(method)

    async def get(self, path: str) -> RawAnswer:
        """One answer."""
        return await self.ask(request(method="GET", path=path), "GET")


@asynccontextmanager
async def nginx(folder: Path, *blocks: str, **ports: int) -> AsyncIterator[Nginx]:
    """nginx with these blocks; ``p8787=N`` puts the port N in place of 8787."""
    tls = "ssl_certificate" in blocks[0]
    if tls:
        self_signed(folder)
    server = "".join(blocks) if len(blocks) == 1 else blocks[0].removesuffix("}\n") + blocks[1] + "}\n"
    found = re.search(r"listen 127\.0\.0\.1:(\d+)", server)
    assert found is not None
    port = free_port()
    server = server.replace(found[0], f"listen 127.0.0.1:{port}")
    for name, ours in ports.items():
        server = server.replace(f"127.0.0.1:{name[1:]}", f"127.0.0.1:{ours}")
    server = re.sub(r"/etc/nginx/legato\.(pem|key)", str(folder / "localhost.pem"), server)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    user = "user root;" if os.geteuid() == 0 else ""
    config = folder / "nginx.conf"
    # gzip as Debian's own file has it.
    config.write_text(
        f"{user} pid {folder}/pid; error_log stderr error; events {{}}\n"
        f"http {{ access_log off; gzip on; {temporary}\n{server}}}\n"
    )
    command = [NGINX, "-p", str(folder), "-e", "stderr", "-c", str(config), "-g", "daemon off;"]
    async with await anyio.open_process(command, stdout=None, stderr=None) as process:
        try:
            await _listening(process, port)
            yield Nginx(port, folder, tls=tls)
        finally:
            process.terminate()


async def _listening(process: Process, port: int) -> None:
    with anyio.fail_after(LIMIT):
        while True:
            assert process.returncode is None, "nginx refused its configuration"
            try:
                await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
            except OSError:
                await anyio.lowlevel.checkpoint()
            else:
                return


IN_FRONT = "nginx in front"


# --- nginx in front -----------------------------------------------------------------------------------


@with_nginx
async def test_a_stream_comes_through_nginx_as_it_is_made(tmp_path: Path):
    """Without a word about buffering: legato's header does it. Heartbeats come too."""
    async with (
        ScriptedUpstream() as upstream,
        legato(upstream, heartbeat=0.05) as proxy,
        nginx(tmp_path, *recipe(IN_FRONT, "nginx"), p8787=proxy.port) as front,
    ):
        gate = anyio.Event()
        upstream.plays(Answer(headers=SSE, chunks=[created(), delta("one"), gate, delta("two"), DONE]))
        async with front.connect() as client:
            await client.send(request(ASKED))
            reading = Reading(client)
            await reading.until(b'"one"')
            await reading.until(b": legato\n", count=2)
            gate.set()
            check(await reading.rest())
        assert reading.one("x-accel-buffering") is None


@with_nginx
async def test_a_task_of_several_cycles_comes_through_nginx(tmp_path: Path):
    """It is the same stream."""
    async with (
        ScriptedUpstream() as upstream,
        legato(upstream) as proxy,
        nginx(tmp_path, *recipe(IN_FRONT, "nginx"), p8787=proxy.port) as front,
    ):
        upstream.plays(*two_cycles(), *two_cycles())
        answer = await front.ask(request(ASKED))
        assert answer.body == (await proxy.whole()).body
        assert answer.one("legato-task")


@with_nginx
async def test_a_break_is_a_break_behind_nginx(tmp_path: Path):
    """nginx makes no proper end of what legato has cut."""
    async with (
        ScriptedUpstream() as upstream,
        legato(upstream) as proxy,
        nginx(tmp_path, *recipe(IN_FRONT, "nginx"), p8787=proxy.port) as front,
    ):
        upstream.plays(Answer(chunks=[b"half"], end="cut"))
        answer = await front.get("/x")
        assert (answer.body, answer.complete) == (b"half", False)


@with_nginx
async def test_paths_and_large_bodies_come_through_nginx(tmp_path: Path):
    """As they were written; up to what legato takes, where nginx alone would stop at 1 MiB."""
    async with (
        ScriptedUpstream() as upstream,
        legato(upstream) as proxy,
        nginx(tmp_path, *recipe(IN_FRONT, "nginx"), p8787=proxy.port) as front,
    ):
        await front.get("/c/a%2Fb//d?x=%2F&x")
        large = b"x" * (2 << 20)
        assert (await front.ask(request(path="/upload", raw=large))).status == 200
        first, second = upstream.requests
        assert first.target == b"/c/a%2Fb//d?x=%2F&x"
        assert second.body == large


# --- under a path -------------------------------------------------------------------------------------


@with_nginx
async def test_legato_is_published_under_a_path(tmp_path: Path):
    """Its own routes, tasks, and raw paths; the flag is the one that the recipe gives."""
    blocks = [*recipe(IN_FRONT, "nginx"), *recipe("Under a path", "nginx")]
    serve = recipe("Under a path", "sh")[0].split()
    root = serve[serve.index("--root-path") + 1]
    async with (
        ScriptedUpstream() as upstream,
        legato(upstream, root_path=root) as proxy,
        nginx(tmp_path, *blocks, p8787=proxy.port) as front,
    ):
        assert json.loads((await front.get("/agents/legato/health")).body) == {"status": "ok"}
        assert (await front.get("/legato/health")).status == 200
        assert upstream.requests == []
        upstream.plays(*two_cycles(), Answer(chunks=[b"ok"]))
        check((await front.ask(request(ASKED, path=f"/agents{ROUTE}"))).body)
        await front.get("/agents/c/a%2Fb//d?x=%2F")
        targets = [seen.target for seen in upstream.requests]
        assert targets == [ROUTE.encode(), ROUTE.encode(), b"/c/a%2Fb//d?x=%2F"]


@with_nginx
async def test_nginx_rewrites_paths_where_it_takes_the_prefix_off(tmp_path: Path):
    """What the recipe warns of; tasks run nevertheless, with no setting of legato's."""
    blocks = [*recipe(IN_FRONT, "nginx"), *recipe("Under a path", "nginx")]
    blocks[1] = blocks[1].replace("127.0.0.1:8787;", "127.0.0.1:8787/;")
    async with (
        ScriptedUpstream() as upstream,
        legato(upstream) as proxy,
        nginx(tmp_path, *blocks, p8787=proxy.port) as front,
    ):
        upstream.plays(*two_cycles(), Answer(chunks=[b"ok"]))
        check((await front.ask(request(ASKED, path=f"/agents{ROUTE}"))).body)
        assert (await front.get("/agents/legato/health")).status == 200
        await front.get("/agents/c/a%2Fb")
        assert upstream.requests[-1].target == b"/c/a/b"


# --- nginx behind -------------------------------------------------------------------------------------


@with_nginx
@pytest.mark.parametrize("lines", ["as they stand", "without client_max_body_size"])
async def test_legato_works_with_nginx_behind_it(tmp_path: Path, lines: str):
    """The stream isn't collected; a follow-up that is too large for nginx carries less."""
    (server,) = recipe("nginx behind", "nginx")
    if lines != "as they stand":
        server = server.replace("client_max_body_size 16m;", "")
    async with (
        ScriptedUpstream() as upstream,
        nginx(tmp_path, server, p8788=upstream.port) as behind,
        legato(f"http://127.0.0.1:{behind.port}") as proxy,
    ):
        gate = anyio.Event()
        long = message("x" * (1 << 20), "m0")
        first = Answer(headers=SSE, chunks=[created(), delta("one"), gate, done(long), asks()])
        upstream.plays(first, sse(delta("two"), DONE))
        async with proxy.start() as reading:
            await reading.until(b'"one"')
            gate.set()
            check(await reading.rest())
        assert len(upstream.requests) == 2
        carried = json.loads(upstream.requests[1].body)["input"]
        assert (long in carried) is (lines == "as they stand")


# --- several endpoints --------------------------------------------------------------------------------


async def test_the_file_for_several_endpoints_does_what_it_says(tmp_path: Path):
    """Each kind of endpoint is treated in its way."""
    path = tmp_path / "legato.toml"
    path.write_text(recipe("Several endpoints", "toml")[0])
    settings = load({}, environ={}, config=str(path))
    plain = {"input": "Hi", "stream": True}
    async with ScriptedUpstream() as upstream, legato(upstream, endpoint=settings.endpoint) as proxy:
        upstream.plays(sse(created(), DONE))
        for path_, body, forced in (
            ("/serving-endpoints/research-a/invocations", plain, True),
            ("/serving-endpoints/responses", {**plain, "model": "research-a"}, True),
            ("/serving-endpoints/responses", {**plain, "model": "other"}, False),
            ("/serving-endpoints/plain/invocations", ASKED, False),
        ):
            answer = await proxy.ask(request(body, path=path_))
            assert (answer.one("legato-task") is not None) is forced
            assert (json.loads(upstream.requests[-1].body) != body) is forced
        limits = [OWNER, ("legato-limits", "max_cycles=4")]
        answer = await proxy.ask(request(ASKED, path="/serving-endpoints/quick/invocations", headers=limits))
        assert json.loads(answer.body)["error"]["code"] == "limit_not_allowed"


async def test_databricks_apps_names_the_owner() -> None:
    """The recipe's settings: the user whom the platform names owns the task, whatever the token; else 401."""
    (text,) = recipe("Databricks Apps", "yaml")
    names = re.findall(r"name: (\w+)\n    value: \"(.*)\"", text)
    command = json.loads(re.search(r"command: (\[.*\])", text).group(1))
    assert command[:2] == ["legato", "serve"]
    settings = load({}, environ=dict(names), config=None)
    async with ScriptedUpstream() as upstream:
        upstream.plays(*two_cycles())
        chosen = {"owner_header": settings.owner_header, "trusted_proxies": settings.trusted_proxies}
        async with legato(upstream, **chosen) as proxy:
            user = ("X-Forwarded-User", "1234@5678")
            reading = await proxy.whole(headers=[OWNER, user])
            other = ("Authorization", "Bearer rotated")
            raw = request(method="GET", path=f"/legato/tasks/{reading.task}", headers=[other, user])
            assert (await proxy.ask(raw)).status == 200
            raw = request(method="GET", path=f"/legato/tasks/{reading.task}", headers=[OWNER])
            assert (await proxy.ask(raw)).status == 401
