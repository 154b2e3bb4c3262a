"""Clients that are programs of their own: each reads a task of five cycles with and without legato.

What each was seen to do stands in ``seen.json``, and ``make docs`` puts it into ``docs/clients.md``. A test
fails where a client does anything else; ``UPDATE_SEEN=1`` writes it anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.legato import legato
from support.server import serve

from proxy.simulator import Scenario, load_scenario, simulator_app

HERE = Path(__file__).parent
SEEN = HERE / "seen.json"
NODE = HERE / "node"
PYTHON = HERE / "python"
# Made by `make clients`: what some clients need doesn't go together with what the tests need.
OTHER = HERE.parent.parent / "build/clients"

STYLES = ("raw", "openai")
COLUMNS = tuple(f"{style}, {how}" for style in STYLES for how in ("without", "with"))
HEARTBEAT = 0.05
LIMIT = 50.0

Facts = dict[str, Any]


def scenario(style: str) -> Scenario:
    """The five cycles of the demo, without its pace; one call takes long enough for some heartbeats."""
    demo = load_scenario("default")
    cycles = []
    for number, cycle in enumerate(demo.cycles):
        seconds = {"seconds": 5 * HEARTBEAT if number == 1 else 0}
        first, *rest = (step.model_copy(update={"seconds": 0}) for step in cycle.steps)
        steps = (first.model_copy(update=seconds), *rest)
        cycles.append(cycle.model_copy(update={"steps": steps}))
    after = {"raw": "done", "openai": "completed"}[style]
    changed = {"style": style, "cycles": tuple(cycles), "words_per_second": 1e9, "after_continuation": after}
    return demo.model_copy(update=changed)


def said(cycles: int = 5) -> str:
    """All that the supervisor says, or what it says in so many cycles."""
    return "".join(step.say for cycle in scenario("raw").cycles[:cycles] for step in cycle.steps)


@asynccontextmanager
async def supervisors(**settings: Any) -> AsyncIterator[list[str]]:
    """For each style: upstream's URL, then that of the legato before it."""
    async with AsyncExitStack() as stack:
        urls = []
        for style in STYLES:
            upstream = await stack.enter_async_context(serve(simulator_app(scenario(style))))
            proxy = await stack.enter_async_context(legato(upstream.url, heartbeat=HEARTBEAT, **settings))
            urls += [upstream.url, proxy.url]
        yield urls


# --- programs -----------------------------------------------------------------------------------------


def node(script: str, *args: str) -> list[str]:
    """How one of the Node clients is called."""
    program = shutil.which("node")
    needs(program is not None, "node")
    needs((NODE / "node_modules/.package-lock.json").exists(), "tests/clients/node/node_modules")
    return [str(program), str(NODE / script), *args]


def chromium(page: str) -> list[str]:
    """How this page is opened in a real browser."""
    needs(shutil.which("chromium") is not None, "chromium")
    return node("chromium.mjs", page)


def other_python(script: str, *args: str) -> list[str]:
    """How one of the Python clients is called that have an environment of their own."""
    needs((OTHER / ".installed").exists(), "build/clients")
    return [str(OTHER / "bin/python"), str(PYTHON / script), *args]


def our_python(script: str, *args: str) -> list[str]:
    """How one of the Python clients is called that the tests' own environment has."""
    return [sys.executable, str(PYTHON / script), *args]


def needs(there: bool, what: str) -> None:
    """Skip the test where something isn't installed; in CI, where all is, fail."""
    if there:
        return
    if os.environ.get("REQUIRE_CLIENTS"):
        pytest.fail(f"{what} is missing, and REQUIRE_CLIENTS is set")
    pytest.skip(f"{what} is missing: see docs/clients.md")


async def run(command: Sequence[str]) -> list[Facts]:
    """What the program prints: one JSON object in a line."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, anyio.fail_after(LIMIT):
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "TMPDIR": home,
            "NO_PROXY": "*",
            "CHROMIUM": shutil.which("chromium") or "",
            "PYTHONDONTWRITEBYTECODE": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        done = await anyio.run_process(command, env=environ, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- the table ----------------------------------------------------------------------------------------


async def rows(command: Sequence[str], **settings: Any) -> list[dict[str, Facts]]:
    """What a client prints for each column; a row for each way in which it is called."""
    async with supervisors(**settings) as urls:
        lines = await run([*command, *urls])
    ends = range(len(COLUMNS), len(lines) + 1, len(COLUMNS))
    return [dict(zip(COLUMNS, lines[end - len(COLUMNS) : end], strict=True)) for end in ends]


def facts(line: Facts) -> Facts:
    """What is worth telling of one stream; ids and other random parts left out."""
    text = {said(count): f"{count} of 5" for count in range(1, 5)} | {said(): "whole", "": "none"}
    found: Facts = {"text": text.get(line["text"], "wrong"), "ids": len(line["ids"])}
    found |= {name: line[name] for name in ("ending", "pauses", "tools") if line.get(name)}
    if line.get("final") is not None:
        found["final"] = text.get(line["final"], "wrong")
    if line["error"]:
        found["error"] = re.sub(r"\b([a-z]+)_[0-9a-f]{16,}", r"\1_…", line["error"].split("\n")[0])
    return found


def check(name: str, version: str, seen: dict[str, Facts], whole: Sequence[str] = STYLES) -> None:
    """It is what the table says, and with legato these styles are read whole."""
    row = {column: facts(line) for column, line in seen.items()}
    for style in whole:
        cell = row[f"{style}, with"]
        assert (cell["text"], cell.get("pauses", 0)) == ("whole", 0), cell
        assert cell["ids"] <= 1, cell
        assert "error" not in cell, cell
        assert style == "raw" or cell["ending"], cell
        assert cell.get("final", "whole") == "whole", cell
    fresh = {"version": version, **row}
    table = json.loads(SEEN.read_text(encoding="utf-8"))
    if os.environ.get("UPDATE_SEEN"):
        table[name] = fresh
        SEEN.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert comparable(fresh) == comparable(table[name])


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """The row; of a client that isn't pinned to one release, errors are compared by their kind only."""
    if "." in row["version"]:
        return row
    kinds = {"error": lambda text: text.split(":")[0]}
    return {
        column: {key: kinds.get(key, str)(value) for key, value in cell.items()}
        for column, cell in row.items()
        if column != "version"
    }


def node_version(package: str) -> str:
    """The version that is installed."""
    return str(json.loads((NODE / "node_modules" / package / "package.json").read_text())["version"])


def python_version(package: str) -> str:
    """The version in the environment of its own."""
    name = package.replace("-", "_")
    (found,) = OTHER.glob(f"lib/*/site-packages/{name}-*.dist-info")
    return found.name.removeprefix(f"{name}-").removesuffix(".dist-info")
