"""What holds for one endpoint: the general settings, or a table that fits its path or its model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from proxy.core.rules import Limits


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """The settings that can differ from endpoint to endpoint, as plain values."""

    engage: str = "long_task"
    replay: str = "auto"
    followup_key: str = "same"
    upstream_body_limit: int | None = None
    limits: Limits = field(default_factory=Limits)
    heartbeat: float = 15.0


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds where path and model fit; an empty pattern fits all."""

    match: str
    model: str
    config: EndpointConfig


class Endpoints:
    """The first rule that fits counts, all of it; where none does, the general settings do.

    Patterns are compiled once, and asked once for each request that may become a task.
    """

    def __init__(self, general: EndpointConfig, rules: Iterable[Rule] = ()) -> None:
        self.general = general
        self._rules = [(_path_fits(rule.match), _model_fits(rule.model), rule) for rule in rules]

    def of(self, path: str, model: object = None) -> EndpointConfig:
        """What holds for a raw path and the ``model`` of a request's body."""
        name = model if isinstance(model, str) else ""
        for path_fits, model_fits, rule in self._rules:
            if path_fits(path) and (not rule.model or model_fits(name)):
                return rule.config
        return self.general

    def may_engage(self, path: str) -> bool:
        """Whether a request on this path can become a task by settings alone, whatever its model."""
        for path_fits, _, rule in self._rules:
            if path_fits(path):
                if rule.config.engage != "off":
                    return True
                if not rule.model:
                    return False
        return self.general.engage != "off"


def route_pattern(route: str) -> str:
    """A route as a regular expression; ``*`` stands for one part of the path."""
    return "[^/]+".join(map(re.escape, route.split("*")))


def _path_fits(match: str) -> Callable[[str], object]:
    """Also what lies below: ``/serving-endpoints/sup-*`` fits ``/serving-endpoints/sup-a/invocations``."""
    return re.compile(f"{route_pattern(match)}(/.*)?" if match else ".*", re.DOTALL).fullmatch


def _model_fits(model: str) -> Callable[[str], object]:
    """``*`` stands for anything: some models have slashes in their names."""
    return re.compile(".*".join(map(re.escape, model.split("*"))), re.DOTALL).fullmatch
