"""``legato doctor``: which settings hold, and whether legato could serve with them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from proxy import __version__
from proxy.settings import Settings, SettingsError, load, shown

from .options import GroupedCommand, setting_options

if TYPE_CHECKING:
    from rich.console import Console

    from .checks import Check

Row = tuple[str, str, str]
# Black on a colour, or white on it: to be read on a light and on a dark screen.
STYLES = {"ok": "black on green", "warn": "black on yellow", "fail": "bold white on red"}


def doctor(config: str | None, as_json: bool, **flags: object) -> None:  # noqa: FBT001  click hands it in
    """Check the settings, upstream and this machine.

    Shows each setting and where it came from (flag, environment, file, default; secrets masked), then one
    line for each check: ok, warn (it runs, but), or fail, with what to do. Takes the options of "legato
    serve" and reads the same variables and file, so it speaks of the proxy that would run. Changes
    nothing; of upstream it asks no more than GET /. Exit code 0 if nothing failed, else 1.

    \b
    Examples:
      legato doctor --upstream https://dbc-12345.cloud.databricks.com
      legato doctor --config legato.toml --json
    """
    import anyio

    try:
        settings = load(flags, config=config)
    except SettingsError as exc:
        from .checks import Check

        report(None, [Check("settings", "fail", problem) for problem in exc.problems], as_json=as_json)
        raise SystemExit(1) from None
    checks = anyio.run(_examine, settings, config)
    report(settings, checks, as_json=as_json)
    raise SystemExit(any(check.status == "fail" for check in checks))


async def _examine(settings: Settings, config: str | None) -> list[Check]:
    from . import checks

    served = checks.serves(settings)
    found = list(checks.check_here(settings, config or os.environ.get("LEGATO_CONFIG"), served=served))
    found += checks.check_log(settings, served=served)
    found += [check async for check in checks.check_upstream(settings, os.environ)]
    return found


# --- showing ------------------------------------------------------------------------------------------


def report(settings: Settings | None, checks: Sequence[Check], *, as_json: bool) -> None:
    """All of it, on stdout; ``settings`` is None where they can't be used."""
    if as_json:
        click.echo(json.dumps(_as_json(settings, checks), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if settings is not None:
        rows = [
            (name, source, shown(name, getattr(settings, name)).replace(",", ", "))
            for name, source in settings.sources.items()
        ]
        _table(console, rows, lambda row: ("", "", "") if row[1] == "default" else ("bold", "bold", "bold"))
    _table(console, [(c.status, c.name, c.line) for c in checks], lambda row: (STYLES[row[0]], "bold", ""))
    console.print(_verdict(checks), style="bold")


def _table(console: Console, rows: Sequence[Row], styles: Callable[[Row], Row]) -> None:
    """Columns, and an empty line; the last column is folded in a terminal and kept on one line in a pipe."""
    if not console.is_terminal:
        widths = [max(len(row[place]) for row in rows) for place in range(2)]
        for first, second, text in rows:
            click.echo(f"{first:<{widths[0]}}  {second:<{widths[1]}}  {text}")
        click.echo()
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(text, style) for text, style in zip(row, styles(row), strict=True)))
    console.print(table)
    console.print()


def _verdict(checks: Iterable[Check]) -> str:
    counted = Counter(check.status for check in checks)
    failed, warned = counted["fail"], counted["warn"]
    told = [f"{failed} failed"] * bool(failed) + [f"{warned} to look at"] * bool(warned)
    return ", ".join(told) or "All is well."


def _as_json(settings: Settings | None, checks: Iterable[Check]) -> dict[str, Any]:
    found = [{"name": c.name, "status": c.status, "text": c.text, "advice": c.advice} for c in checks]
    values = settings.model_dump(mode="json") if settings is not None else {}
    sources = settings.sources if settings is not None else {}
    return {
        "legato": __version__,
        "ok": all(check["status"] != "fail" for check in found),
        "settings": {name: {"value": value, "source": sources[name]} for name, value in values.items()},
        "checks": found,
    }


command = GroupedCommand(
    "doctor",
    callback=doctor,
    params=[
        *setting_options(hidden=True),
        click.Option(["--json", "as_json"], is_flag=True, help="Print all of it as one JSON object."),
    ],
    help=doctor.__doc__,
)
