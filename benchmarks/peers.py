"""What is measured: legato, and what it is compared with. Each is started anew for each measurement."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import machine

HERE = Path(__file__).parent
KEY = f"sk-{secrets.token_hex(24)}"  # all clients' credential; LiteLLM doesn't start without a strong one

NGINX = """\
{user}
daemon off;
worker_processes 1;
worker_rlimit_nofile {files};
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  keepalive_timeout 75s;
  keepalive_requests 1000000;
  upstream supervisor {{
    server 127.0.0.1:{upstream};
    keepalive 256;
    keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://supervisor;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""

LITELLM = """\
model_list:
  - model_name: "*"
    litellm_params:
      model: "openai/*"
      api_base: http://127.0.0.1:{upstream}
      api_key: sk-bench
general_settings:
  master_key: {key}
litellm_settings:
  telemetry: false
"""


class Absent(Exception):
    """A peer that isn't here; the text says why, and how to get it."""


class Failed(Exception):
    """A measurement that came to nothing; the text says why."""


@dataclass(frozen=True)
class Proxy:
    """One that runs. ``command`` is its process; ``pids`` are it and its children."""

    name: str
    port: int
    pids: Sequence[int]


@dataclass(frozen=True)
class Place:
    """Where things are: built programs, a folder for this run, and the cores."""

    build: Path
    folder: Path
    others: int
    proxy: int


def nginx(place: Place, upstream: int, port: int) -> Sequence[str]:
    """An unbuffered pipe."""
    found = subprocess.run(
        ["sh", HERE / "nginx.sh", place.build / "nginx"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise Absent(found.stderr.strip())
    config = place.folder / "nginx.conf"
    # As root it would give its worker away to nobody, who can't write to our folder.
    user = "user root;" if os.geteuid() == 0 else ""
    files = machine.raise_open_files()
    config.write_text(NGINX.format(folder=place.folder, upstream=upstream, port=port, user=user, files=files))
    return [found.stdout.strip(), "-c", str(config), "-p", str(place.folder)]


def loop(place: Place, upstream: int, port: int) -> Sequence[str]:
    """What people write."""
    options = ["--port", str(port), "--no-access-log", "--log-level", "warning"]
    return [sys.executable, "-m", "uvicorn", "naive:app", "--app-dir", str(HERE), *options]


def legato_memory(place: Place, upstream: int, port: int) -> Sequence[str]:
    """legato with its log in memory."""
    return _legato(upstream, port, "memory:")


def legato_sqlite(place: Place, upstream: int, port: int) -> Sequence[str]:
    """legato with its log on disk; a new one each time."""
    for old in place.folder.glob("legato.db*"):
        old.unlink()
    return _legato(upstream, port, f"sqlite:{place.folder}/legato.db")


def litellm(place: Place, upstream: int, port: int) -> Sequence[str]:
    """LiteLLM's proxy with one worker and nothing switched on."""
    program = place.build / "gateways/bin/litellm"
    if not program.exists():
        raise Absent("LiteLLM is not installed: make bench-gateways")
    config = place.folder / "litellm.yaml"
    config.write_text(LITELLM.format(upstream=upstream, key=KEY))
    return [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


def _legato(upstream: int, port: int, log: str) -> Sequence[str]:
    program = str(Path(sys.executable).with_name("legato"))
    return [program, "serve", "--upstream", f"http://127.0.0.1:{upstream}", "--port", str(port), "--log", log]


PEERS = {
    "nginx": nginx,
    "the usual loop": loop,
    "legato memory:": legato_memory,
    "legato sqlite:": legato_sqlite,
    "LiteLLM": litellm,
}


@contextmanager
def upstream(place: Place) -> Iterator[int]:
    """The load generator's supervisor; gives its port."""
    program = [str(place.build / "upstream"), "600"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, preexec_fn=machine.on_core(place.others))
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        machine.stop(process)


@contextmanager
def running(name: str, place: Place, upstream_port: int) -> Iterator[Proxy]:
    """One of ``PEERS`` on its core, ready for requests. ``direct`` stands for none: upstream itself."""
    if name == "direct":
        yield Proxy(name, upstream_port, ())
        return
    port = machine.free_port()
    command = PEERS[name](place, upstream_port, port)
    told = place.folder / "proxy.log"
    with told.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=place.folder,
            env=_environment(upstream_port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=machine.on_core(place.proxy),
        )
    try:
        if not machine.await_port(port, process, 60):
            raise Failed(f"did not start: {last_line(told)}")
        yield Proxy(name, port, machine.tree(process.pid))
    finally:
        machine.stop(process)


def last_line(log: Path) -> str:
    """What a program said last."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"


def _environment(upstream_port: int) -> Mapping[str, str]:
    return {
        **machine.clean_environment(),
        "BENCH_UPSTREAM": f"http://127.0.0.1:{upstream_port}",
        # LiteLLM would fetch a price list at its start.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
