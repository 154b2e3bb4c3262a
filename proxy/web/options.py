"""What a client may ask of legato in one request: ``Legato-*`` headers and the body's ``legato`` object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from proxy.core.rules import Limits
from proxy.errors import InvalidRequest, LimitNotAllowed, NotAvailable

ENGAGE = ("long_task", "stream", "force", "off")
_LATER_LIMITS = frozenset(
    {
        "max_steps",
        "max_seconds",
        "max_seconds_hard",
        "max_tokens",
        "max_tokens_conversation",
        "max_no_progress",
        "max_repeats",
    }
)
_CHOICES = {
    "legato-engage": ENGAGE,
    "legato-heartbeat": ("on", "off"),
    "legato-event-ids": ("on", "off"),
    "legato-shape": ("faithful", "canonical"),
    "legato-gate": ("auto", "ask"),
    "legato-multitask": ("reject", "interrupt", "enqueue"),
    "legato-on-disconnect": ("continue", "hold", "cancel"),
}
# What is refused for now, rather than passed over in silence: (header, value) or every value of a header.
_LATER = {
    "legato-shape": {"canonical"},
    "legato-gate": {"ask"},
    "legato-multitask": {"enqueue", "interrupt"},
    "legato-on-disconnect": {"hold", "cancel"},
}


@dataclass(frozen=True, slots=True)
class Options:
    """One request's choices; None where it made none. ``named``: the headers that made them."""

    engage: str | None = None
    heartbeat: bool = True
    event_ids: bool = False
    named: tuple[str, ...] = ()


def read(headers: Mapping[str, str]) -> Options:
    """The choices in ``Legato-*`` headers; an error names the header."""
    chosen: dict[str, str] = {}
    for name, allowed in _CHOICES.items():
        value = headers.get(name)
        if value is None:
            continue
        value = value.strip().lower()
        if value not in allowed:
            raise InvalidRequest(f"{_title(name)} must be one of {', '.join(allowed)}.", param=_title(name))
        if value in _LATER.get(name, ()):
            raise NotAvailable(f"{_title(name)}: {value} is not available yet.", param=_title(name))
        chosen[name] = value
    if "legato-session" in headers or "legato-parent" in headers:
        name = "Legato-Session" if "legato-session" in headers else "Legato-Parent"
        raise NotAvailable(f"{name} is not available yet.", param=name)
    return Options(
        engage=chosen.get("legato-engage"),
        heartbeat=chosen.get("legato-heartbeat") != "off",
        event_ids=chosen.get("legato-event-ids") == "on",
        named=tuple(_title(name) for name in (*chosen, *(["legato-limits"] * ("legato-limits" in headers)))),
    )


def limits(headers: Mapping[str, str], body: Mapping[str, Any], allowed: Limits) -> Limits:
    """The operator's limits, tightened by ``Legato-Limits: max_cycles=5`` or the body's ``legato`` object."""
    asked: dict[str, tuple[object, str]] = {}
    given = body.get("legato")
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest('legato must be an object such as {"max_cycles": 5}.', param="legato")
    for name, value in (given or {}).items():
        asked[name] = (value, f"legato.{name}")
    for part in filter(None, (part.strip() for part in headers.get("legato-limits", "").split(","))):
        name, _, text = part.partition("=")
        number = int(text) if text.strip().isdecimal() else text
        asked[name.strip()] = (number, "Legato-Limits")
    for name, (value, param) in asked.items():
        allowed = _tighten(allowed, name, value, param)
    return allowed


def _tighten(allowed: Limits, name: str, value: object, param: str) -> Limits:
    if name in _LATER_LIMITS:
        raise NotAvailable(f"The limit {name} is not available yet.", param=param)
    if name != "max_cycles":
        raise InvalidRequest(f"There is no limit named {name!r}; there is max_cycles.", param=param)
    if type(value) is not int or value < 1:
        raise LimitNotAllowed(f"{name} must be a whole number above 0.", param=param)
    if value > allowed.max_cycles:
        raise LimitNotAllowed(
            f"{name} may only be tightened: {value} is above {allowed.max_cycles}.", param=param
        )
    return replace(allowed, max_cycles=value)


def _title(name: str) -> str:
    return "-".join(part.capitalize() for part in name.split("-"))
