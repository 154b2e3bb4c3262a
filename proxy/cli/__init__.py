"""The command line. Commands are imported when they are called, so that ``legato --help`` is quick."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click

from proxy import __version__


class Place(NamedTuple):
    """Where a command is found, and the line that ``legato --help`` shows for it."""

    module: str
    line: str


COMMANDS = {
    "demo": Place("demo", "Show one long task as it streams, with nothing to set up."),
    "serve": Place("serve", "Run the proxy in front of an upstream."),
    "simulate": Place("simulate", "Run a scripted upstream, to try things without an account."),
    "doctor": Place("doctor", "Check the settings, upstream and this machine."),
}

# Known names without a command yet: in no list, and refused with a clear message.
LATER = ("record", "replay", "inspect", "check", "tasks", "board")


class Refusal(click.ClickException):
    """Ends a command with exit code 2 and one line on stderr for each problem. Never a traceback."""

    exit_code = 2

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(" ".join(line.split()) for line in lines))

    def show(self, file: object = None) -> None:
        """The lines as they are, without click's "Error:"."""
        click.echo(self.message, err=True)


class AddressRefusal(Refusal):
    """The address can't be listened on: exit code 1."""

    exit_code = 1


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module = importlib.import_module(f".{COMMANDS[cmd_name].module}", __name__)
            command: click.Command = module.command
            return command
        return _later(cmd_name) if cmd_name in LATER else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.line) for name, place in COMMANDS.items()])


def _later(name: str) -> click.Command:
    def refuse() -> None:
        raise Refusal(f"not_available: legato {name} comes in a later version")

    anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(name, callback=refuse, context_settings=anything, add_help_option=False)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="legato", message="%(prog)s %(version)s")
def main() -> None:
    """A reverse proxy that joins the cycles of a long agent task into one stream.

    A supervisor that works for long ends its response now and then with the ask to go on. legato sends
    the follow-up, and the client sees one stream that it can leave and come back to.

    \b
    Try it without an account:
      legato demo
      legato simulate &
      legato serve --upstream http://127.0.0.1:8788

    Exit codes: 0 done, 1 the address can't be listened on, or a check of doctor failed, 2 wrong usage,
    settings that can't be used, or a start that failed.
    """
