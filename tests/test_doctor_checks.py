"""What ``legato doctor`` finds at the log and at upstream."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from collections import namedtuple
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from support.tls import self_signed, server_tls
from support.upstream import Answer, ScriptedUpstream

from proxy.cli.checks import Check, check_log, check_upstream
from proxy.cli.checks.base import size
from proxy.log import files
from proxy.settings import Settings

NOWHERE = "http://127.0.0.1:9"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


def found(checks: Iterator[Check] | list[Check]) -> dict[str, Check]:
    """The checks by their names; a name stands once, but for several secrets."""
    return {check.name: check for check in checks}


def at_log(log: Path | str, *, served: bool = False, **settings: Any) -> dict[str, Check]:
    """What is found at a log."""
    return found(check_log(Settings(log=f"sqlite:{log}", **settings), served=served))


async def at_upstream(url: str, environ: dict[str, str] | None = None, **settings: Any) -> dict[str, Check]:
    """What is found at an upstream."""
    made = check_upstream(Settings(upstream=url, **settings), environ or {})
    return found([check async for check in made])


# --- the log ------------------------------------------------------------------------------------------


def made(path: Path) -> Path:
    """A log as legato leaves it."""
    files.make(str(path))
    connection = files.connect(str(path))
    files.prepare(connection, str(path))
    connection.close()
    return path


def test_a_log_in_memory_is_no_trouble():
    """But it is said what that means."""
    checks = found(check_log(Settings(log="memory:"), served=False))
    assert [check.status for check in checks.values()] == ["ok"]
    assert "forgotten" in checks["log"].text


def test_a_new_log_is_not_made(tmp_path: Path):
    """Only whether it could be."""
    checks = at_log(tmp_path / "legato.db")
    assert [check.status for check in checks.values()] == ["ok", "ok", "ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_log_is_opened_and_left_as_it_was(tmp_path: Path):
    """It can be written; its bytes stay the same."""
    path = made(tmp_path / "legato.db")
    before = path.read_bytes()
    checks = at_log(path)
    assert (checks["log"].status, checks["log"].text) == ("ok", f"sqlite:{path} can be opened and written")
    assert checks["log mode"].text == "only its owner may read it (0600)"
    assert path.read_bytes() == before


def test_a_missing_folder_is_a_failure(tmp_path: Path):
    """Named."""
    check = at_log(tmp_path / "none" / "legato.db")["log"]
    assert (check.status, check.text) == ("fail", f"there is no directory {tmp_path / 'none'}")


def test_a_folder_that_takes_no_files_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the system's reason."""

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    check = at_log(tmp_path / "legato.db")["log"]
    assert (check.status, check.text) == ("fail", f"{tmp_path} can't be written: Permission denied")


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("CREATE TABLE t (a)", "is a database, but no log of legato"),
        (f"PRAGMA user_version = {files.SCHEMA_VERSION + 1}", "was written by a newer legato"),
    ],
)
def test_a_database_of_somebody_else_is_a_failure(tmp_path: Path, sql: str, told: str):
    """As serve would refuse it."""
    connection = sqlite3.connect(tmp_path / "legato.db")
    connection.execute(sql)
    connection.close()
    check = at_log(tmp_path / "legato.db")["log"]
    assert check.status == "fail"
    assert told in check.text


def test_a_file_that_is_no_database_is_a_failure(tmp_path: Path):
    """In SQLite's words."""
    (tmp_path / "legato.db").write_bytes(b"no database at all" * 100)
    check = at_log(tmp_path / "legato.db")["log"]
    assert check.status == "fail"
    assert "file is not a database" in check.text


def test_a_log_in_use_is_told(tmp_path: Path):
    """A warning, unless it is the legato that answers on our port; the holder keeps its lock."""
    path = made(tmp_path / "legato.db")
    held = files.lock(str(path))
    try:
        check = at_log(path)["log"]
        assert (check.status, check.text) == ("warn", f"sqlite:{path} is in use by another process")
        assert at_log(path, served=True)["log"].status == "ok"
    finally:
        os.close(held)
    assert at_log(path)["log"].status == "ok"


def test_files_that_others_may_read_are_told(tmp_path: Path):
    """Each with its mode, and the command that mends it."""
    path = made(tmp_path / "legato.db")
    (tmp_path / "legato.db-key").touch(mode=0o600)
    path.chmod(0o644)
    check = at_log(path)["log mode"]
    assert (check.status, check.text) == ("warn", f"others may use {path} (0644)")
    assert check.advice == f"chmod 600 {path}*"


@pytest.mark.parametrize(
    ("free", "status"), [(2**40, "ok"), (2**30, "ok"), (2**30 - 1, "warn"), (2**26 - 1, "fail")]
)
def test_room_on_the_disk_is_told(free: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With what one task may need."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**41, 0, free))
    check = at_log(tmp_path / "legato.db")["disk"]
    assert check.status == status
    assert status == "ok" or "256 MiB (max_log)" in check.advice


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1.02e+03 B"), (1536, "1.5 KiB"), (78.2 * 2**30, "78.2 GiB")]
)
def test_sizes_are_short(count: float, text: str):
    """Three digits and a unit."""
    assert size(count) == text


# --- upstream -----------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "judged"), [(200, "ok"), (401, "ok"), (404, "ok"), (500, "warn"), (503, "warn")]
)
async def test_any_answer_but_trouble_is_fine(status: int, judged: str):
    """Nobody's credential is sent, so a refusal is an answer."""
    async with ScriptedUpstream() as scripted:
        scripted.plays(Answer(status=status, chunks=[b"x"], framing="length"))
        checks = await at_upstream(f"{scripted.url}/base")
        assert scripted.requests[0].target == b"/base/"
        assert scripted.requests[0].one("authorization") is None
    assert checks["upstream"].status == judged
    assert re.search(rf" answers {status} to GET / in \d+ ms", checks["upstream"].text)
    assert checks["tls"].text == "none, and none is needed: upstream is on this machine"


@pytest.mark.anyio
async def test_an_upstream_that_wants_tls_is_told():
    """legato follows no redirect, so the setting has to change; other redirects are the client's."""
    async with ScriptedUpstream() as scripted:
        for target, judged in (
            ("https://127.0.0.1/x", "warn"),
            ("/login", "ok"),
            ("https://sso.example/", "ok"),
        ):
            scripted.plays(
                Answer(status=301, headers={"location": target, "content-length": "0"}, framing="none")
            )
            assert (await at_upstream(scripted.url))["upstream"].status == judged


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("url", "settings", "told"),
    [
        (
            NOWHERE,
            {},
            "could not connect to 127.0.0.1:9: connection refused; check --upstream / LEGATO_UPSTREAM",
        ),
        (NOWHERE, {"upstream_proxy": NOWHERE}, "connection refused; check upstream and upstream_proxy"),
        ("http://no-such-host.invalid", {}, "could not connect to no-such-host.invalid:80: "),
    ],
)
async def test_an_upstream_that_cannot_be_reached_is_a_failure(url: str, settings: dict[str, Any], told: str):
    """With the reason, and the setting to look at."""
    checks = await at_upstream(url, **settings)
    assert list(checks) == ["upstream"]
    assert checks["upstream"].status == "fail"
    assert told in checks["upstream"].line


@pytest.mark.anyio
async def test_a_proxy_that_is_only_in_the_environment_is_told():
    """legato doesn't look at it, which explains why nothing is reached."""
    checks = await at_upstream(NOWHERE, {"https_proxy": "http://user:word@proxy.example"})
    told = "https_proxy is set but not looked at: set upstream_proxy if it is needed"
    assert checks["upstream"].advice == told


@pytest.mark.anyio
async def test_no_upstream_is_a_failure():
    """It names all three spellings."""
    checks = found([check async for check in check_upstream(Settings(), {})])
    assert checks["upstream"].line == "none is set; set --upstream / LEGATO_UPSTREAM / upstream"


@pytest.mark.anyio
async def test_an_upstream_that_breaks_or_says_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    """Neither ends in a traceback."""
    monkeypatch.setattr("proxy.cli.checks.upstream.ANSWER_SECONDS", 0.05)
    for raw in (b"no HTTP at all\r\n\r\n", b""):
        async with ScriptedUpstream() as scripted:
            scripted.plays(Answer(raw=raw, framing="none", end="hang"))
            assert (await at_upstream(scripted.url))["upstream"].status == "fail"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("offset", "status", "told"),
    [(0, "ok", "within"), (-3600, "warn", "3600 s ahead of"), (3600, "warn", "3600 s behind")],
)
async def test_clocks_are_compared(offset: float, status: str, told: str):
    """By upstream's Date."""
    async with ScriptedUpstream() as scripted:
        date = formatdate(time.time() + offset, usegmt=True)
        scripted.plays(Answer(headers={"Date": date}, chunks=[b"x"]))
        check = (await at_upstream(scripted.url))["clock"]
    assert check.status == status
    assert re.sub("3[56][09][019]", "3600", check.text).startswith(told)


@pytest.mark.anyio
@pytest.mark.parametrize("headers", [{}, {"date": "yesterday"}])
async def test_a_clock_that_is_not_told_is_not_compared(headers: dict[str, str]):
    """That is no fault of ours."""
    async with ScriptedUpstream() as scripted:
        scripted.plays(Answer(headers=headers, chunks=[b"x"]))
        assert (await at_upstream(scripted.url))["clock"].status == "ok"


@pytest.mark.anyio
@pytest.mark.parametrize(("days", "status"), [(2, "warn"), (100, "ok")])
async def test_certificates_are_looked_at(days: int, status: str, tmp_path: Path):
    """Who issued it, and how long it is good; where it isn't trusted, the setting is named."""
    certificate = self_signed(tmp_path, days=days)
    async with ScriptedUpstream(tls=server_tls(certificate), host="localhost") as scripted:
        checks = await at_upstream(scripted.url, upstream_ca=certificate)
        assert (checks["upstream"].status, checks["tls"].status) == ("ok", status)
        assert re.match(rf"TLSv1\.\d, trusted, issued by Tests, good for {days} days", checks["tls"].text)
        check = (await at_upstream(scripted.url))["upstream"]
        assert check.status == "fail"
        assert "its certificate is not trusted (self-signed certificate" in check.text
        assert check.advice == "name the PEM file of the authority that signed it with upstream_ca"


@pytest.mark.anyio
async def test_tls_to_a_plain_upstream_is_told(tmp_path: Path):
    """The scheme is wrong; and a file without certificates is one too."""

    async def plain(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, plain)
        port = listener.extra(SocketAttribute.local_port)
        check = (await at_upstream(f"https://127.0.0.1:{port}"))["upstream"]
        group.cancel_scope.cancel()
    assert check.status == "fail"
    assert check.advice == "something plain answers there: is it http:// (upstream)?"
    (tmp_path / "empty.pem").write_text("no certificate")
    check = (await at_upstream("https://localhost", upstream_ca=tmp_path / "empty.pem"))["upstream"]
    assert (check.status, check.advice) == ("fail", "set upstream_ca to a PEM file")
