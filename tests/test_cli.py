"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import http.client
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner, Result

from proxy import __version__
from proxy.cli import COMMANDS, LATER, main, running
from proxy.settings import describe

LEGATO = [str(Path(sys.executable).with_name("legato"))]

# legato with an app in place of the real one, which does what its first argument says.
STUB = [
    sys.executable,
    "-c",
    """
import sys
from proxy.cli import main
from proxy.errors import LogUnavailable

mode = sys.argv.pop(1)

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        if mode == "log_locked":
            raise ExceptionGroup("group", [LogUnavailable("another process\\n has it")])
        if mode == "bug":
            raise ZeroDivisionError
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if mode == "never_ends":
            print("stopping", flush=True)
            await receive()
        print("stopped", flush=True)
        await send({"type": "lifespan.shutdown.complete"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"hi"})

main(obj=lambda settings: app)
""",
]
SERVE = ["serve", "--upstream", "http://127.0.0.1:9", "--log", "memory:", "--port"]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch):
    """Variables of whoever runs the tests count for nothing."""
    for name in [name for name in os.environ if name.startswith("LEGATO_")]:
        monkeypatch.delenv(name)


def run(*args: str) -> Result:
    """One call within this process, at 80 columns."""
    return CliRunner().invoke(main, args, prog_name="legato", terminal_width=80)


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, gone at the end whatever happens."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """The next line on stdout, waited for with a limit."""
    assert select.select([process.stdout], [], [], 30)[0], "nothing was printed"
    return process.stdout.readline().rstrip("\n")


def finished(*command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that ends by itself."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


def get(ready: str, path: str = "/") -> http.client.HTTPResponse:
    """Ask the server that printed this line."""
    host, port = re.fullmatch(r"legato (?:simulator )?listening on http://(.*):(\d+)", ready).groups()
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", path, headers={"connection": "close"})
    response = connection.getresponse()
    response.body = response.read()
    connection.close()
    return response


# --- help ---------------------------------------------------------------------------------------------


def test_help_lists_the_commands():
    """Every command with its line; those of later versions are in no list."""
    result = run("--help")
    assert result.exit_code == 0
    commands = result.stdout.split("Commands:")[1]
    assert re.findall(r"^  (\w+)", commands, re.MULTILINE) == list(COMMANDS)


def test_help_needs_neither_server_nor_settings():
    """``legato --help`` is quick, since nothing heavy is imported for it."""
    code = (
        "import sys; from proxy.cli import main; main(['--help'], standalone_mode=False);"
        "print({'pydantic', 'uvicorn', 'structlog', 'starlette'} & sys.modules.keys())"
    )
    assert finished(sys.executable, "-c", code)[1].endswith("set()\n")


@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"], ["simulate", "-h"], ["doctor", "-h"]])
def test_help_fits_80_columns(args: list[str]):
    """No line is longer, and each page ends in a newline."""
    result = run(*args)
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


@pytest.mark.parametrize("name", ["serve", "simulate"])
def test_help_of_a_command_says_what_it_prints_and_shows_examples(name: str):
    """The first line of its page is the line in the list."""
    result = run(name, "--help")
    assert COMMANDS[name].line in result.stdout
    assert "Examples:" in result.stdout
    assert f"  legato {name}" in result.stdout
    assert "listening on http://HOST:PORT" in " ".join(result.stdout.split())


def test_help_of_serve_shows_every_setting_under_its_group():
    """Flag, description and default of each."""
    page = run("serve", "--help").stdout
    flat = " ".join(page.split())
    for setting in describe().values():
        assert setting.flag in page
        assert f"\n{setting.group}:\n" in page
        words = setting.description.split()
        assert " ".join(words[:4]) in flat
        assert f"[default: {setting.default.split(',')[0]}" in flat


def test_help_breaks_no_flag_and_no_path():
    """What is copied from it stays whole, and hyphens are hyphens."""
    page = run("serve", "--help").stdout
    assert "/ai-gateway/mlflow/v1/responses" in page
    assert not re.search(r"[\w/]-\n|\ue000", page)


def test_help_of_doctor_leaves_the_settings_to_serve():
    """They are taken, but shown once."""
    page = run("doctor", "--help").stdout
    assert "--json" in page
    assert "--config FILE" in page
    assert "--max-cycles" not in page


def test_version():
    """One line."""
    assert run("--version").stdout == f"legato {__version__}\n"


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("args", [[], ["--help"], ["--upstream", "http://x", "DIR"]])
def test_commands_of_later_versions_are_refused(name: str, args: list[str]):
    """With a clear message, whatever else was typed."""
    result = run(name, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"not_available: legato {name} comes in a later version\n"


def test_an_unknown_command_is_refused():
    """As click does it."""
    result = run("sevre")
    assert result.exit_code == 2
    assert "No such command 'sevre'" in result.stderr


def test_bad_settings_are_told_one_line_each(monkeypatch: pytest.MonkeyPatch):
    """On stderr, without secrets, exit code 2."""
    monkeypatch.setenv("LEGATO_MAX_CYCLES", "x")
    monkeypatch.setenv("LEGATO_MAX_CYCEL", "3")
    result = run("serve", "--secret", "hunter2", "--drain", "soon")
    assert (result.exit_code, result.stdout) == (2, "")
    assert sorted(line.split(":")[0] for line in result.stderr.splitlines()) == [
        "--drain / LEGATO_DRAIN / drain",
        "--max-cycles / LEGATO_MAX_CYCLES / max_cycles",
        "--secret / LEGATO_SECRET / secret",
        "--upstream / LEGATO_UPSTREAM / upstream",
        "LEGATO_MAX_CYCEL",
    ]
    assert "hunter2" not in result.stderr


def test_the_file_is_named_by_a_flag(tmp_path: Path):
    """``--config`` reads it, and what is wrong in it is told."""
    (tmp_path / "legato.toml").write_text('upstream = "ftp://x"')
    result = run("serve", "--config", str(tmp_path / "legato.toml"))
    assert result.exit_code == 2
    assert result.stderr.startswith("--upstream / LEGATO_UPSTREAM / upstream: must be ")


@pytest.mark.parametrize("port", ["x", "-1", "65536"])
def test_simulate_refuses_a_port_that_is_none(port: str):
    """As click does it."""
    assert run("simulate", "--port", port).exit_code == 2


def test_simulate_names_an_unknown_scenario():
    """One line, exit code 2."""
    result = run("simulate", "no-such-story", "--port", "0")
    assert result.exit_code == 2
    assert "no-such-story" in result.stderr
    assert len(result.stderr.splitlines()) == 1


# --- serving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_when_it_is_ready_and_stops_on_a_signal(number: signal.Signals):
    """The line names the port that was taken; one signal ends it with 0, after the app's own end."""
    with started(*STUB, "fine", *SERVE, "0") as process:
        response = get(line(process))
        assert (response.status, response.body) == (200, b"hi")
        assert response.getheaders() == [("content-length", "2"), ("connection", "close")]
        process.send_signal(number)
        assert process.communicate(timeout=30) == ("stopped\n", "")
        assert process.returncode == 0


def test_a_second_signal_stops_at_once():
    """Also while the app doesn't come to its end."""
    with started(*STUB, "never_ends", *SERVE, "0") as process:
        line(process)
        process.terminate()
        assert line(process) == "stopping"
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_a_start_that_fails_is_one_line():
    """An error of our own, also out of a task group: exit code 2, no ready line, no traceback."""
    told = finished(*STUB, "log_locked", *SERVE, "0")
    assert told == (2, "", "log_unavailable: another process has it\n")


def test_a_bug_at_the_start_shows_its_traceback():
    """Anything else is a bug, and told as one, once."""
    code, printed, told = finished(*STUB, "bug", *SERVE, "0")
    assert (code, printed) == (1, "")
    assert told.count("Traceback") == told.count("ZeroDivisionError\n") == 1


@pytest.mark.parametrize("command", [[*STUB, "fine", *SERVE], [*LEGATO, "simulate", "{scenario}", "--port"]])
def test_a_port_in_use_is_one_line(command: list[str], scenario: str):
    """It names the flag: exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [part.replace("{scenario}", scenario) for part in command]
        reason = "the port is in use; choose another with --port, 0 for any free one"
        assert finished(*command, port) == (1, "", f"can't listen on 127.0.0.1:{port}: {reason}\n")


def test_an_unknown_host_is_one_line():
    """It names the flags: exit code 1."""
    code, _, told = finished(*STUB, "fine", *SERVE, "0", "--host", "no-such-host.invalid")
    assert code == 1
    assert re.fullmatch(r"can't listen on no-such-host.invalid:0: .*; see --host and --port\n", told)


class Bound:
    """A socket that says it is bound to some address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def getsockname(self) -> tuple[str, int]:
        """The address and a port."""
        return self.address, 8787


@pytest.mark.parametrize(
    ("address", "secret", "warns"),
    [
        ("127.0.0.1", False, False),
        ("::1", False, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("fe80::1%eth0", False, True),
        ("192.0.2.1", False, True),
        ("0.0.0.0", True, False),
    ],
)
def test_listening_beyond_this_machine_without_a_secret_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, address: str, secret: bool, warns: bool
):
    """The warning says what to set, and that TLS belongs in front."""
    monkeypatch.setattr(running.server, "listen", lambda host, port: Bound(address))
    with structlog.testing.capture_logs() as lines:
        running.listen(address, 8787, secret=secret)
    assert [line["log_level"] for line in lines] == ["warning"] * warns
    assert all("LEGATO_SECRET" in line["advice"] and "TLS" in line["advice"] for line in lines)


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    """The path of a scenario of one cycle."""
    path = tmp_path / "story.toml"
    path.write_text('description = "One cycle."\n[[cycles]]\n[[cycles.steps]]\nsay = "hello"\n')
    return str(path)


def test_simulate_says_when_it_is_ready(scenario: str):
    """The line names the port that was taken; a signal ends it with 0."""
    with started(*LEGATO, "simulate", scenario, "--port", "0", "--speed", "0") as process:
        ready = line(process)
        assert ready.startswith("legato simulator listening on http://127.0.0.1:")
        assert get(ready).status == 200
        process.terminate()
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == 0


def test_the_real_app_serves():
    """``legato serve`` as it is installed: ready line, health, SIGTERM."""
    with started(*LEGATO, *SERVE, "0") as process:
        assert get(line(process), "/legato/health").status == 200
        process.terminate()
        assert process.communicate(timeout=30)[0] == ""
        assert process.returncode == 0
