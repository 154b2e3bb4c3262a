"""A scripted supervisor that speaks the real wire, so that everything works with no account.

::

    scenario.py      what a TOML file may say, and loading it
    orders.py        what a performance asks the server to do: wait, send, cut
    wire.py          items -> events, in the raw and the OpenAI style
    script.py        one response's share of a scenario, as orders
    conversation.py  the request's conversation: items, answers, equality
    tickets.py       what was handed out, and what came back
    followups.py     whether a request goes on with a task, and in the right form
    supervisor.py    a request -> the part to be played, or a refusal
    server.py        the ASGI app
"""

from __future__ import annotations

from .scenario import Scenario, ScenarioError, load_scenario, parse_scenario, shipped_scenarios
from .server import simulator_app

__all__ = [
    "Scenario",
    "ScenarioError",
    "load_scenario",
    "parse_scenario",
    "shipped_scenarios",
    "simulator_app",
]
