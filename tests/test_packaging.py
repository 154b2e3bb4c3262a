"""Makefile, Dockerfile, .ci/run, licence and changelog: that they fit the code they are about."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy import __version__
from proxy.cli import main
from proxy.settings import describe

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())


def instructions(name: str) -> list[str]:
    """What stands behind this instruction of the Dockerfile, each time it is used."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def make(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Call make in a folder that holds nothing but our Makefile and project file."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *args], cwd=folder, env=env, capture_output=True, text=True, timeout=30)


def fake_python(folder: Path, script: str) -> str:
    """A program in place of python3."""
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return f"PYTHON={path}"


# --- Makefile and .ci/run -----------------------------------------------------------------------------


def test_make_lists_its_targets(tmp_path: Path):
    """``make`` alone and ``make help`` say what there is."""
    listed = make(tmp_path)
    assert listed.stdout == make(tmp_path, "help").stdout
    targets = re.findall(r"^  make (\w+) +\S", listed.stdout, re.MULTILINE)
    assert {"demo", "test", "check", "help"} <= set(targets)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ('case "$*" in *venv*) mkdir -p .venv/bin; exit 1;; esac', "apt-get install python3-venv"),
        ("exit 1", "too old, legato needs 3.11 or newer"),
    ],
)
def test_a_python_that_will_not_do_is_told_in_one_line(tmp_path: Path, script: str, told: str):
    """What to install is said, and no half-made environment stays behind."""
    done = make(tmp_path, "test", fake_python(tmp_path, script))
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(lines) == 1
    assert told in lines[0]
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_not_there_is_told_in_one_line(tmp_path: Path):
    """Here too."""
    done = make(tmp_path, "demo", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert "no-such-python not found: apt-get install python3" in done.stderr


def test_a_second_run_installs_nothing(tmp_path: Path):
    """The stamps decide, and a changed project file makes them old."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    make(tmp_path, "help")
    for stamp in (".installed", ".installed-dev"):
        (tmp_path / ".venv" / stamp).touch()
        os.utime(tmp_path / ".venv" / stamp, (2**32, 2**32))
    planned = subprocess.run(
        ["make", "-n", "check", "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert "pip install" not in planned.stdout
    os.utime(tmp_path / ".venv/.installed-dev", (1, 1))
    planned = subprocess.run(["make", "-n", "test"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert "pip install" in planned.stdout


def test_ci_runs_what_make_offers():
    """.ci/run is a program, and every target it names exists."""
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], timeout=30).returncode == 0
    named = re.findall(r"^(?:exec )?make --\S+ (.*)$", script.read_text(), re.MULTILINE)
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(" ".join(named).split()) == {"lint", "types", "clients", "test"} <= targets


# --- Dockerfile ---------------------------------------------------------------------------------------


def test_the_image_serves():
    """Its command is one that legato has, with flags that it knows."""
    program, *args = json.loads(instructions("CMD")[0])
    assert program in PYPROJECT["project"]["scripts"]
    # What is missing is the upstream, and nothing else.
    result = CliRunner().invoke(main, args, env={"LEGATO_UPSTREAM": ""})
    assert result.exit_code == 2
    assert result.stderr.startswith("--upstream / ")
    assert len(result.stderr.splitlines()) == 1


def test_the_image_asks_for_its_health_where_legato_answers():
    """On the default port, under the default prefix, with code that compiles."""
    command = json.loads(instructions("HEALTHCHECK")[0].partition(" CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    port, prefix = describe()["port"].default, describe()["prefix"].default
    assert f"'127.0.0.1', {port}," in command[2]
    assert f"'{prefix}/health'" in command[2]
    assert instructions("EXPOSE") == [port]


def test_the_image_runs_as_nobody_special_and_keeps_its_log_in_a_volume():
    """Not as root, and the working directory, where the log is by default, is the volume."""
    assert instructions("USER") == ["legato"]
    assert instructions("VOLUME") == [instructions("WORKDIR")[-1]]


def test_what_the_image_copies_is_there_and_sent_along():
    """Every source exists and isn't kept out by .dockerignore."""
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    sources = [
        source
        for line in instructions("COPY")
        if not line.startswith("--from")
        for source in line.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed)


def test_the_image_has_a_python_that_legato_names():
    """Both stages have the same one, since the environment of the first is used in the second."""
    first, second = (base.split()[0] for base in instructions("FROM"))
    assert first == second
    version = re.fullmatch(r"python:(\d\.\d+)-slim", first)[1]
    assert f"Programming Language :: Python :: {version}" in PYPROJECT["project"]["classifiers"]


# --- texts --------------------------------------------------------------------------------------------


def test_the_licence_is_the_one_named():
    """The whole text of Apache-2.0."""
    text = (ROOT / "LICENSE").read_text()
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_changelog_knows_this_version():
    """The newest entry is the package's version, which is the project's."""
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == __version__ == PYPROJECT["project"]["version"]
