"""Flags made from the settings, and a ``--help`` that shows them in groups."""

from __future__ import annotations

from collections.abc import Iterable

import click

from proxy.settings import Setting, describe

SOURCES = "Where settings come from"
# Stands for a hyphen while lines are broken: flags and paths stay whole, to be copied.
_HELD = "\ue000"


class GroupedOption(click.Option):
    """An option that knows under which heading it is shown."""

    def __init__(
        self, declarations: Iterable[str], *, group: str, metavar: str | None, help: str, hidden: bool = False
    ) -> None:
        super().__init__(list(declarations), metavar=metavar, help=help, default=None, hidden=hidden)
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
                formatter.write_dl([(option, text.replace("-", _HELD)) for option, text in records])
        formatter.buffer[:] = [text.replace(_HELD, "-") for text in formatter.buffer]


def setting_options(*, hidden: bool = False) -> list[click.Parameter]:
    """``--config`` and one option for each setting. All are taken as text, since ``load`` checks them.

    ``hidden``: taken, but not shown, but for ``--config``.
    """
    config = GroupedOption(
        ["--config"],
        group=SOURCES,
        metavar="FILE",
        help="TOML file with settings, also LEGATO_CONFIG. None is read unless it is named, not even "
        "./legato.toml.",
    )
    return [config, *(_option(setting, hidden=hidden) for setting in describe().values())]


def _option(setting: Setting, *, hidden: bool) -> GroupedOption:
    help = f"{setting.description}  [default: {setting.default.replace(',', ', ')}]"
    if setting.switch:
        off = "--no-" + setting.flag.removeprefix("--")
        flags, metavar = f"{setting.flag}/{off}", None
    else:
        flags, metavar = setting.flag, setting.form.metavar
    return GroupedOption([flags], group=setting.group, metavar=metavar, help=help, hidden=hidden)
