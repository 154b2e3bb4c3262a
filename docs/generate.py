"""Writes what the docs take from the code: the lines from ``<!-- generated: NAME -->`` to ``<!-- end -->``.

``make docs`` runs it; ``tests/test_docs.py`` fails where a page isn't what it would write.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

import click

import proxy
from proxy.cli import COMMANDS, main
from proxy.cli.options import GroupedOption
from proxy.settings import Setting, describe
from proxy.simulator import shipped_scenarios
from proxy.web.control import ROUTES

DOCS = Path(__file__).parent
GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings() -> str:
    """One table for each group, then the settings that nothing acts on yet."""
    parts = []
    for group, members in groupby(describe().values(), key=lambda setting: setting.group):
        head = ("Name, TOML key", "Default", "What it does", "Flag", "Variable")
        parts.append(f"## {group}\n\n{_table(head, map(_setting, members))}")
    idle = idle_settings()
    if idle:
        names = ", ".join(map(_code, idle))
        parts.append(f"## Without effect\n\nChecked at the start, but nothing acts on them yet: {names}.")
    return "\n".join(parts)


def idle_settings() -> list[str]:
    """Settings that no other room reads."""
    package = Path(proxy.__file__).parent
    read = {
        node.attr
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] != "settings"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr)
        in ("settings", "_settings")
    }
    return [name for name in describe() if name not in read]


def _setting(setting: Setting) -> tuple[str, ...]:
    flags = [setting.flag, "--no-" + setting.flag.removeprefix("--")] if setting.switch else [setting.flag]
    default = "none" if setting.default == "none" else " ".join(map(_code, setting.default.split(",")))
    return (
        _code(setting.name),
        default,
        setting.description,
        " ".join(map(_code, flags)),
        _code(setting.variable),
    )


def routes() -> str:
    """legato's own routes, under the default prefix."""
    prefix = describe()["prefix"].default
    rows = ((_code(route.replace(" ", f" {prefix}", 1)), text) for route, text in ROUTES.items())
    return _table(("Route", "What it answers"), rows)


def scenarios() -> str:
    """Every scenario that comes with legato."""
    rows = ((_code(name), scenario.description) for name, scenario in shipped_scenarios().items())
    return _table(("Scenario", "What happens"), rows)


def commands() -> str:
    """Every command: how it is called, its help, its options."""
    context = click.Context(main, info_name="legato", **main.context_settings)
    return "\n".join(_command(context, name) for name in COMMANDS)


def _command(context: click.Context, name: str) -> str:
    command = main.get_command(context, name)
    assert command is not None
    own = click.Context(command, info_name=name, parent=context)
    usage = f"{own.command_path} {' '.join(command.collect_usage_pieces(own))}"
    parts = [f"## legato {name}", f"```text\n{usage}\n```", *_paragraphs(command.help or "")]
    options = [one for one in command.get_params(own) if isinstance(one, click.Option)]
    plain = [one for one in options if not isinstance(one, GroupedOption)]
    if len(plain) < len(options):
        parts.append("Each of the [settings](settings.md) is an option; `--config FILE` names a TOML file.")
    rows = (_option(record) for one in plain if (record := one.get_help_record(own)))
    return "\n\n".join([*parts, _table(("Option", "What it does"), rows)])


def _paragraphs(help: str) -> Iterable[str]:
    r"""A command's help; what ``\b`` marks are examples."""
    for paragraph in cleandoc(help).split("\n\n"):
        head, *lines = paragraph.removeprefix("\b\n").split("\n")
        if paragraph.startswith("\b"):
            yield head + "\n\n```console\n" + "".join(f"$ {line.strip()}\n" for line in lines) + "```"
        else:
            yield paragraph


def _option(record: tuple[str, str]) -> tuple[str, str]:
    text = record[1].partition("  [")
    return _code(record[0]), " ".join("".join(text).split())


def clients() -> str:
    """What the tests saw each client do, without legato and with it."""
    seen = json.loads((DOCS.parent / "tests/clients/seen.json").read_text(encoding="utf-8"))
    styles = {"raw": "Raw supervisor", "openai": "OpenAI style"}
    heads = (f"{name}, {how} legato" for name in styles.values() for how in ("without", "with"))
    rows = []
    for name, row in seen.items():
        cells = []
        for style in styles:
            without, with_legato = row[f"{style}, without"], row[f"{style}, with"]
            cells += [_seen(without), "the same" if without == with_legato else _seen(with_legato)]
        client, _, call = name.partition(", ")
        rows.append((", ".join(filter(None, (f"{client} {row['version']}".strip(), call))), *cells))
    return _table(("Client", *heads), rows)


def _seen(facts: dict[str, Any]) -> str:
    """One stream in few words."""
    parts = [{"whole": "**whole**", "none": "nothing"}.get(facts["text"], f"cycle {facts['text']}")]
    if "pauses" in facts:
        parts[0] += " and the pause"
    parts += [_code(facts["ending"])] if "ending" in facts else []
    parts += [facts["tools"]] if "tools" in facts else []
    if facts.get("final", facts["text"]) != facts["text"]:
        parts.append(f"final text: {facts['final']}")
    if "error" in facts:
        parts.append(f"`` {shorten(facts['error'], 60, placeholder=' …')} ``")
    return ", ".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


MAKERS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "routes": routes,
    "scenarios": scenarios,
    "commands": commands,
    "clients": clients,
}


def fresh(page: str) -> str:
    """The page with its generated parts made anew."""
    return GENERATED.sub(lambda found: f"{found[1]}\n{MAKERS[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(fresh(path.read_text(encoding="utf-8")), encoding="utf-8")
