"""``legato simulate``."""

from __future__ import annotations

import click


@click.command("simulate")
@click.argument("scenario", default="default")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    default=8788,
    show_default=True,
    help="Port to listen on; 0 takes any free one. Beside that of serve, so that both run together.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, max=1e6),
    metavar="X",
    default=1.0,
    show_default=True,
    help="How fast scripted pauses pass: 2 is twice as fast, 0 leaves them out.",
)
def command(scenario: str, port: int, speed: float) -> None:
    """Run a scripted upstream, to try things without an account.

    Answers like a supervisor that works on a long task. SCENARIO is the story it plays unless a request
    asks for another: a name, or the path of a TOML file. GET / lists the names. Listens on 127.0.0.1
    only. Prints one line once it takes requests: "legato simulator listening on http://HOST:PORT". Stops
    on SIGTERM or Ctrl-C.

    \b
    Examples:
      legato simulate
      legato simulate --port 0 --speed 0
    """
    from proxy import logs
    from proxy.simulator.scenario import ScenarioError
    from proxy.simulator.server import simulator_app

    from . import Refusal
    from .running import listen, run

    logs.configure("info", "auto")
    try:
        app = simulator_app(scenario, speed)
    except ScenarioError as exc:
        raise Refusal(str(exc)) from None
    run("legato simulator", listen("127.0.0.1", port), lambda: app, grace=0)
