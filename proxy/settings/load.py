"""Flags over environment over TOML file over default: the only place that reads the last three."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from .describe import PREFIX, Setting, describe
from .model import Settings, Source
from .problems import invalid, one_line, unknown


class SettingsError(Exception):
    """The settings can't be used. Its text is one line for each of ``problems``; no secret is in it."""

    def __init__(self, problems: Collection[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load(
    flags: Mapping[str, object],
    *,
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
    required: Collection[str] = (),
) -> Settings:
    """The settings from flags, environment, TOML file and defaults, in this order.

    Args:
        flags: Values from the command line by setting name; None counts as not given.
        environ: The environment; the process's own if None. An empty variable counts as not set.
        config: The TOML file; ``LEGATO_CONFIG`` if None, and none at all if that isn't set either.
        required: Names of settings that the caller can't do without.

    Raises:
        SettingsError: With every problem there is, one line each.
    """
    environ = os.environ if environ is None else environ
    known = describe()
    problems: list[str] = []
    layers: dict[Source, Mapping[str, object]] = {
        "file": _from_file(config or environ.get(PREFIX + "CONFIG"), known, problems),
        "environment": _from_environment(environ, known, problems),
        "flag": {name: value for name, value in flags.items() if value is not None},
    }
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in layers.items():
        values |= layer
        sources |= dict.fromkeys(layer, source)
    problems += [
        known[name].problem(f"must be set: {known[name].form.expects}")
        for name in required
        if name not in values
    ]
    try:
        settings = Settings(**values)
    except ValidationError as exc:
        problems += [invalid(error, known, values) for error in exc.errors(include_url=False)]
    if problems:
        raise SettingsError(problems)
    settings._sources = sources
    return settings


def _from_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting], problems: list[str]
) -> dict[str, str]:
    ours = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value}
    ours = {name: value for name, value in ours.items() if not _of_kubernetes(name, value)}
    variables = {setting.variable: name for name, setting in known.items()}
    problems += [
        unknown(name, name, variables)
        for name in sorted(ours.keys() - variables.keys() - {PREFIX + "CONFIG"})
    ]
    return {variables[name]: value for name, value in ours.items() if name in variables}


def _of_kubernetes(name: str, value: str) -> bool:
    """Whether this is one of the variables that Kubernetes gives every pod beside a service "legato…"."""
    if re.fullmatch(r"LEGATO_(\w+_)?SERVICE_(HOST|PORT(_\w+)?)", name):
        return True
    if re.fullmatch(r"LEGATO_(\w+_)?PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?", name):
        return True
    return name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))


def _from_file(path: str | None, known: Mapping[str, Setting], problems: list[str]) -> dict[str, object]:
    if not path:
        return {}
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as exc:
        problems.append(f"--config / {PREFIX}CONFIG: can't read {path}: {exc.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        problems.append(f"--config / {PREFIX}CONFIG: {path} is not TOML: {one_line(str(exc))}")
        return {}
    problems += [unknown(f"{name} in {path}", name, known) for name in sorted(values.keys() - known.keys())]
    return {name: value for name, value in values.items() if name in known}
