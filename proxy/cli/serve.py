"""``legato serve``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from proxy.settings import Settings, SettingsError, load

from . import Refusal
from .options import GroupedCommand, setting_options

if TYPE_CHECKING:
    from starlette.types import ASGIApp

# In place of the real one where tests pass it as click's ``obj``: ``main(obj=make_app)``.
AppFactory = Callable[[Settings], "ASGIApp"]


@click.pass_obj
def serve(make_app: AppFactory | None, /, config: str | None, **flags: object) -> None:
    """Run the proxy in front of an upstream.

    Every path goes to upstream unchanged; what asks for a long task on a task route becomes a task.
    Prints one line once it takes requests: "legato listening on http://HOST:PORT". Its own log goes to
    stderr. Stops on SIGTERM or Ctrl-C: open cycles get the time of --drain; a second one stops at once.

    \b
    Examples:
      legato serve --upstream https://dbc-12345.cloud.databricks.com
      legato serve --config legato.toml --port 0
      LEGATO_UPSTREAM=http://127.0.0.1:8788 legato serve --log memory:

    Each option --some-name is also the variable LEGATO_SOME_NAME and the key some_name of the TOML file.
    A flag wins over the variable, the variable over the file. Sizes are written 16MiB, 512KiB or in
    bytes; lists with commas or as JSON.
    """
    try:
        settings = load(flags, config=config, required=["upstream"])
    except SettingsError as exc:
        raise Refusal(*exc.problems) from None
    _run(settings, make_app)


def _run(settings: Settings, make_app: AppFactory | None) -> None:
    # Imported late: --help and a typing error in a flag shouldn't wait for the server.
    from proxy import logs

    from .running import listen, run

    secrets = [value.get_secret_value() for value in (settings.secret, settings.upstream_proxy) if value]
    logs.configure(settings.log_level, settings.log_format, secrets=secrets)
    sock = listen(settings.host, settings.port, secret=settings.secret is not None)
    app = (make_app or _real_app)(settings)
    # What is left after the drain has been cut: its connections need a moment to close, no more.
    run("legato", sock, lambda: app, drain=getattr(app, "drain", None), grace=1)


def _real_app(settings: Settings) -> ASGIApp:
    from proxy.web.app import create_app

    return create_app(settings)


command = GroupedCommand("serve", callback=serve, params=setting_options(), help=serve.__doc__)
