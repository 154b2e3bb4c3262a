"""``legato doctor``: what it finds, and how it tells."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from anyio.from_thread import start_blocking_portal
from click.testing import CliRunner, Result
from support.legato import legato
from support.upstream import Answer, ScriptedUpstream

from proxy.cli import main
from proxy.cli.checks import Check, check_here, serves
from proxy.settings import Settings, load

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """In an empty folder, without variables of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name in [
        name for name in os.environ if name.startswith("LEGATO_") or name.upper().endswith("_PROXY")
    ]:
        monkeypatch.delenv(name)


@pytest.fixture
def answering() -> Iterator[ScriptedUpstream]:
    """An upstream in a loop of its own, whose clock is ours."""
    with start_blocking_portal() as portal:
        scripted = ScriptedUpstream()
        scripted.plays(Answer(headers={"date": formatdate(usegmt=True)}, chunks=[b"hi"]))
        with portal.wrap_async_context_manager(scripted):
            yield scripted


def run(*args: str) -> Result:
    """``legato doctor`` within this process, piped."""
    return CliRunner().invoke(main, ["doctor", *args], prog_name="legato")


def found(checks: Iterator[Check] | list[Check]) -> dict[str, Check]:
    """The checks by their names; a name stands once, but for several secrets."""
    return {check.name: check for check in checks}


def at_home(config: str | None = None, *, served: bool = False, **settings: Any) -> dict[str, Check]:
    """What is found on this machine."""
    return found(check_here(load(settings, environ={}, config=config), config, served=served))


# --- the command --------------------------------------------------------------------------------------


def test_all_is_well(answering: ScriptedUpstream):
    """Every setting with its source, one line for each check, exit code 0, and nothing is left behind."""
    result = run("--upstream", answering.url, "--port", "0")
    assert result.exit_code == 0, result.stdout
    settings, checks, verdict = result.stdout.rstrip("\n").split("\n\n")
    rows = [re.split(r"  +", line, maxsplit=2) for line in settings.split("\n")]
    assert [row[0] for row in rows] == list(Settings.model_fields)
    assert ["upstream", "flag", answering.url] in rows
    assert ["max_body", "default", "16MiB"] in rows
    assert {line.split()[0] for line in checks.split("\n")} <= {"ok", "warn"}
    assert re.fullmatch(r"All is well\.|\d to look at", verdict)
    assert [(seen.method, seen.target) for seen in answering.requests] == [("GET", b"/")]
    assert list(Path().iterdir()) == []


def test_sources_are_told_apart_and_secrets_masked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Flag, environment, file and default; neither form shows a secret."""
    (tmp_path / "legato.toml").write_text('max_cycles = 7\n[[endpoint]]\nmatch = "/a"\nengage = "off"\n')
    monkeypatch.setenv("LEGATO_SECRET", "hunter2hunter2hunter2")
    args = (
        "--config",
        "legato.toml",
        "--upstream",
        NOWHERE,
        "--upstream-proxy",
        "http://me:pass@127.0.0.1:9",
    )
    plain, as_json = run(*args).stdout, run(*args, "--json").stdout
    for name, source, value in (
        ("upstream", "flag", NOWHERE),
        ("secret", "environment", r"\*\*\*"),
        ("max_cycles", "file", "7"),
        ("endpoint", "file", "{match=/a engage=off}"),
        ("port", "default", "8787"),
    ):
        assert re.search(f"^{name} +{source} +{value}$", plain, re.MULTILINE)
        assert json.loads(as_json)["settings"][name]["source"] == source
    assert not re.search("hunter2|me:pass", plain + as_json)
    assert json.loads(as_json)["settings"]["endpoint"]["value"] == [{"match": "/a", "engage": "off"}]


def test_a_failure_is_exit_code_1():
    """With what to do; the rest is checked all the same."""
    result = run("--upstream", NOWHERE, "--port", "0")
    assert result.exit_code == 1
    line = "could not connect to 127.0.0.1:9: connection refused; check --upstream / LEGATO_UPSTREAM"
    assert re.search(f"^fail  upstream +{line}$", result.stdout, re.MULTILINE)
    assert re.search("^ok +versions ", result.stdout, re.MULTILINE)
    assert "1 failed" in result.stdout.splitlines()[-1]


def test_settings_that_cannot_be_used_are_failures(tmp_path: Path):
    """One line each, as serve tells them; there is nothing else to check then."""
    (tmp_path / "legato.toml").write_text('[[endpoint]]\nmatch = "/a"\nmax_cycles = 0\n')
    result = run("--config", "legato.toml", "--port", "x")
    assert result.exit_code == 1
    lines = result.stdout.rstrip("\n").split("\n")
    assert sorted(line.split("  ", 2)[2] for line in lines[:2]) == [
        "--port / LEGATO_PORT / port: must be a whole number from 0 to 65535, got 'x'",
        "[[endpoint]] #1 match=/a max_cycles: must be a whole number above 0, got 0",
    ]
    assert lines[2:] == ["", "2 failed"]


def test_machines_get_json(answering: ScriptedUpstream):
    """Everything in one object: values in their own types, and each check."""
    told = json.loads(run("--upstream", answering.url, "--port", "0", "--json").stdout)
    assert told.keys() == {"legato", "ok", "settings", "checks"}
    assert told["ok"] is True
    assert told["settings"].keys() == Settings.model_fields.keys()
    assert told["settings"]["max_body"] == {"value": 16 * 2**20, "source": "default"}
    assert all(check.keys() == {"name", "status", "text", "advice"} for check in told["checks"])
    failed = json.loads(run("--port", "x", "--json").stdout)
    assert (failed["ok"], failed["settings"], failed["checks"][0]["name"]) == (False, {}, "settings")


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_gets_columns_that_fit(width: int, monkeypatch: pytest.MonkeyPatch):
    """Folded under its column, coloured so that it can be read on light and dark."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run("--upstream", NOWHERE, "--port", "0").stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).split("\n")
    assert max(map(len, plain)) <= width
    assert any(line.startswith(" " * 20) and line.split()[-1].endswith("responses") for line in plain)
    assert re.search(r"\x1b\[30;42mok\b", shown)
    assert re.search(r"\x1b\[1;37;41mfail\b", shown)
    assert not re.search(r"[─│┃━]", shown)


def test_nothing_is_coloured_or_folded_in_a_pipe():
    """One line for each check and each setting, however long."""
    shown = run("--upstream", NOWHERE, "--port", "0").stdout
    assert "\x1b" not in shown
    assert "/serving-endpoints/responses, /invocations, /responses, /v1/responses" in shown


# --- this machine -------------------------------------------------------------------------------------


def test_versions_are_told():
    """legato's own, and those that matter in a report of trouble."""
    text = at_home(port="0")["versions"].text
    assert re.match(r"legato \S+, Python 3\.\S+, SQLite \S+, uvicorn ", text)


@pytest.mark.parametrize(("missing", "status"), [("uvloop", "warn"), ("httptools", "fail"), ("", "ok")])
def test_missing_speedups_are_told(missing: str, status: str, monkeypatch: pytest.MonkeyPatch):
    """Without uvloop it is slow, without httptools it can't serve."""
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else real(name))
    assert at_home(port="0")["speed"].status == status


@pytest.mark.parametrize(
    ("limits", "status", "told"),
    [
        ((256, 4096), "warn", "enough for about 78 streams .*; for 2,000: LimitNOFILE=4100 "),
        ((1024, 1 << 20), "warn", "enough for about 462 streams .*; for 2,000: ulimit -n 4100, or "),
        ((4100, 4100), "ok", "4,100 allowed, enough for 2,000 streams"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", "any number allowed"),
    ],
)
def test_open_files_are_counted_in_streams(
    limits: tuple[int, int], status: str, told: str, monkeypatch: pytest.MonkeyPatch
):
    """Against the two thousand that one process should carry."""
    monkeypatch.setattr("resource.getrlimit", lambda what: limits)
    check = at_home(port="0")["open files"]
    assert check.status == status
    assert re.search(told, check.line)


def test_a_port_in_use_is_a_failure():
    """It names what to do; a free one is fine, and free afterwards too."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = at_home(port=str(port))["port"]
    assert check.status == "fail"
    assert check.line.endswith("the port is in use; choose another with --port, 0 for any free one")
    assert [at_home(port=str(port))["port"].status for _ in range(2)] == ["ok", "ok"]


@pytest.mark.anyio
async def test_a_running_legato_is_recognised():
    """What answers on the port is asked; something else is not taken for one."""
    async with legato(NOWHERE, prefix="/own") as proxy, ScriptedUpstream() as other:
        mine = Settings(port=proxy.port, prefix="/own")
        assert await to_thread.run_sync(serves, mine)
        assert not await to_thread.run_sync(serves, Settings(port=proxy.port))
        assert not await to_thread.run_sync(serves, Settings(port=other.port))
        assert at_home(port=str(proxy.port), prefix="/own", served=True)["port"].status == "ok"
    assert not serves(mine)


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"host": "127.0.0.1"}, "ok"),
        ({"host": "::1"}, "ok"),
        ({"host": "localhost"}, "ok"),
        ({"host": "0.0.0.0"}, "warn"),
        ({"host": "0.0.0.0", "secret": "x" * 16}, "ok"),
    ],
)
def test_listening_beyond_this_machine_needs_a_secret(settings: dict[str, str], status: str):
    """The advice names the variable, and TLS."""
    check = at_home(port="0", **settings)["access"]
    assert check.status == status
    assert status == "ok" or ("LEGATO_SECRET" in check.advice and "TLS" in check.advice)


def test_a_secret_on_the_command_line_is_none():
    """Others can see it there."""
    check = at_home(port="0", secret="x" * 16)["secrets"]
    assert (check.status, check.advice) == ("warn", "set it as LEGATO_SECRET or in the file")


@pytest.mark.parametrize(("mode", "status"), [(0o600, None), (0o644, "warn"), (0o640, "warn")])
def test_a_file_with_a_secret_is_nobody_elses(mode: int, status: str | None, tmp_path: Path):
    """Only where a secret stands in it."""
    path = tmp_path / "legato.toml"
    path.write_text(f'secret = "{"x" * 16}"')
    path.chmod(mode)
    check = at_home(str(path), port="0").get("secrets")
    assert (check and check.status) == status
    path.write_text("max_cycles = 3")
    assert "secrets" not in at_home(str(path), port="0")


def test_origins_are_told():
    """Whose pages may call."""
    assert "https://a.example" in at_home(port="0", cors_origins="https://a.example")["cors"].text
    assert "cors" not in at_home(port="0")
