"""Flags made from the settings, and a ``--help`` that shows them in groups."""

from __future__ import annotations

from collections.abc import Iterable

import click

from proxy.settings import Setting, describe

SOURCES = "Where settings come from"


class GroupedOption(click.Option):
    """An option that knows under which heading it is shown."""

    def __init__(self, declarations: Iterable[str], *, group: str, metavar: str | None, help: str) -> None:
        super().__init__(list(declarations), metavar=metavar, help=help, default=None)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose options stand under the headings of their groups, those without one last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section for each group, in the order of the first option of each."""
        groups: dict[str, list[tuple[str, str]]] = {}
        rest = []
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is None:
                continue
            if isinstance(option, GroupedOption):
                groups.setdefault(option.group, []).append(record)
            else:
                rest.append(record)
        for heading, records in [*groups.items(), ("Other", rest)]:
            with formatter.section(heading):
                formatter.write_dl(records)


def setting_options() -> list[click.Parameter]:
    """``--config`` and one option for each setting. All are taken as text, since ``load`` checks them."""
    config = GroupedOption(
        ["--config"],
        group=SOURCES,
        metavar="FILE",
        help="TOML file with settings, also LEGATO_CONFIG. None is read unless it is named, not even "
        "./legato.toml.",
    )
    return [config, *(_option(setting) for setting in describe().values())]


def _option(setting: Setting) -> GroupedOption:
    help = f"{setting.description}  [default: {setting.default.replace(',', ', ')}]"
    if setting.switch:
        off = "--no-" + setting.flag.removeprefix("--")
        return GroupedOption([f"{setting.flag}/{off}"], group=setting.group, metavar=None, help=help)
    return GroupedOption([setting.flag], group=setting.group, metavar=setting.form.metavar, help=help)
