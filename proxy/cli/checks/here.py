"""This machine and this process: versions, limits, the port, and who may come in."""

from __future__ import annotations

import http.client
import importlib.util
import ipaddress
import json
import os
import platform
import resource
import sqlite3
import stat
import sys
from collections.abc import Iterator
from importlib import metadata

from pydantic import SecretStr

from proxy import __version__
from proxy.cli import AddressRefusal
from proxy.cli.running import listen
from proxy.settings import Settings

from .base import Check, fail, ok, warn

STREAMS = 2000
# A connection to the client and one to upstream for each stream; the log, the loop and the libraries.
FILES_EACH, FILES_ELSE = 2, 100
ANSWER_SECONDS = 2.0


def check_here(settings: Settings, config: str | None, *, served: bool) -> Iterator[Check]:
    """``config``: the file that settings came from; ``served``: a legato answers on our port."""
    yield _versions()
    yield _speedups()
    yield _open_files()
    yield _port(settings, served=served)
    yield from _access(settings, config)


def _versions() -> Check:
    names = ("uvicorn", "starlette", "aiohttp", "httpx")
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    python = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    return ok("versions", f"legato {__version__}, {python}, {libraries}")


def _speedups() -> Check:
    missing = [name for name in ("uvloop", "httptools") if importlib.util.find_spec(name) is None]
    if "httptools" in missing:
        return fail("speed", "httptools isn't installed", "install legato anew: it can't serve without")
    if missing and sys.platform != "win32":
        return warn("speed", "uvloop isn't installed: legato runs, but slower", "pip install uvloop")
    return ok("speed", ", ".join(f"{name} {metadata.version(name)}" for name in ("uvloop", "httptools")))


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = STREAMS * FILES_EACH + FILES_ELSE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        allowed = "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"
        return ok("open files", f"{allowed} allowed, enough for {STREAMS:,} streams at a time")
    streams = max(0, soft - FILES_ELSE) // FILES_EACH
    raised = "" if hard != resource.RLIM_INFINITY and hard < needed else f"ulimit -n {needed}, or "
    return warn(
        "open files",
        f"{soft:,} allowed, enough for about {streams:,} streams at a time",
        f"for {STREAMS:,}: {raised}LimitNOFILE={needed} (systemd), --ulimit nofile={needed} (Docker)",
    )


# --- the port -----------------------------------------------------------------------------------------


def _port(settings: Settings, *, served: bool) -> Check:
    if served:
        return ok("port", f"a legato answers on port {settings.port} of {settings.host}")
    try:
        listen(settings.host, settings.port).close()
    except AddressRefusal as exc:
        text, _, advice = exc.message.partition("; ")
        return fail("port", text, advice)
    name = f"port {settings.port} of" if settings.port else "some port of"
    return ok("port", f"{name} {settings.host} is free")


def serves(settings: Settings) -> bool:
    """Whether a legato answers where these settings would listen."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    if not settings.port:
        return False
    connection = http.client.HTTPConnection(host, settings.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", f"{settings.prefix}/")
        return "legato" in json.loads(connection.getresponse().read(2**16))
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return False
    finally:
        connection.close()


# --- who may come in ----------------------------------------------------------------------------------


def _access(settings: Settings, config: str | None) -> Iterator[Check]:
    if _loopback(settings.host):
        yield ok("access", f"only this machine can connect ({settings.host})")
    elif settings.secret is None:
        yield warn(
            "access",
            f"others can connect ({settings.host}), and there is no secret",
            "set LEGATO_SECRET, and put TLS in front: legato speaks plain HTTP",
        )
    else:
        yield ok("access", f"others can connect ({settings.host}); TLS belongs in front")
    yield from _secrets(settings, config)
    if settings.cors_origins:
        yield ok("cors", f"pages of {', '.join(settings.cors_origins)} may call legato")


def _secrets(settings: Settings, config: str | None) -> Iterator[Check]:
    """A secret is none where others can read it."""
    secret = [name for name in type(settings).model_fields if isinstance(getattr(settings, name), SecretStr)]
    sources = settings.sources
    for name in secret:
        if sources[name] == "flag":
            advice = f"set it as LEGATO_{name.upper()} or in the file"
            yield warn("secrets", f"{name} is given as a flag, which others on this machine can see", advice)
    if config and any(sources[name] == "file" for name in secret):
        mode = stat.S_IMODE(os.stat(config).st_mode)
        if mode & 0o044:
            yield warn("secrets", f"others may read {config} ({mode:04o})", f"chmod 600 {config}")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
