"""The rooms: imports go one way, and the core does nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import proxy

ROOT = Path(proxy.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A room may import itself and those on lower floors.
FLOORS = {
    "errors": 0,
    "core": 1,
    "log": 2,
    "wire": 2,
    "endpoints": 2,
    "engine": 3,
    "upstream": 4,
    "runner": 5,
    "tasks": 6,
    "web": 7,
    "cli": 8,
}
# Rooms that stand apart, and who may enter them.
APART = {
    "settings": {"settings", "web/app.py", "cli"},
    "simulator": {"simulator", "cli"},
    "logs": {"logs", "cli"},
}
NO_IO = {
    "email.utils",  # dates in headers: a parser, no I/O
    "json",
    "re",
    "hashlib",
    "enum",
    "typing",
    "dataclasses",
    "collections.abc",
    "__future__",
    "orjson",
}


def imports(path: Path) -> Iterator[str]:
    """The modules that a file names in its imports, relative ones made absolute."""
    package = ["proxy", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{a.name}" if module == "proxy" else module for a in node.names)


def room(module: str) -> str | None:
    """``proxy.web.app`` stands in the room ``web``."""
    parts = module.split(".")
    return parts[1] if parts[0] == "proxy" and len(parts) > 1 else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    """No file imports from a floor above its own, and rooms that stand apart have few visitors."""
    relative = path.relative_to(ROOT)
    own = relative.parts[0].removesuffix(".py")
    for module in imports(path):
        other = room(module)
        if other is None or other == own or other.startswith("__"):
            continue
        if other in APART:
            visitors = APART[other]
            assert own in visitors or str(relative) in visitors, f"{relative} may not import {module}"
        else:
            assert other in FLOORS, f"{other} is a room that this test doesn't know"
            assert FLOORS.get(own, 99) > FLOORS[other] or own == other, f"{relative} imports {module}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if "core" in p.relative_to(ROOT).parts], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_core_has_no_io(path: Path) -> None:
    """The core awaits nothing and imports nothing that could do anything: no clock, no randomness."""
    for module in imports(path):
        assert module.startswith("proxy.") or module in NO_IO, f"{path.name} imports {module}"
    forbidden = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, forbidden)]


def test_only_the_settings_read_the_environment() -> None:
    """No other file asks the environment; the settings are handed down as plain values."""
    readers = {
        path.relative_to(ROOT).parts[0]
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers <= {"settings", "cli"}
