"""What a client may ask of legato in one request: ``Legato-*`` headers and the body's ``legato`` object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from proxy.core.rules import Limits
from proxy.errors import InvalidRequest, LimitNotAllowed, NotAvailable

# No limit has more digits; longer ones would be slow to read.
_DIGITS = 18
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
    "legato-on-disconnect": {"hold"},
}


# Headers that make sense for a task only: with a body that can't be one they are a mistake.
_ASK = (
    "legato-engage",
    "legato-limits",
    "legato-event-ids",
    "legato-on-disconnect",
    "legato-session",
    "legato-parent",
)


_LATER_HEADERS = ("legato-session", "legato-parent")
_KNOWN = frozenset({*_CHOICES, "legato-limits", *_LATER_HEADERS})


@dataclass(frozen=True, slots=True)
class Options:
    """One task's choices."""

    heartbeat: bool = True
    event_ids: bool = False
    on_disconnect: str | None = None


def engage(headers: Mapping[str, str]) -> str | None:
    """The choice that ``Legato-Engage`` makes, if it makes one."""
    return _choice(headers, "legato-engage")


def read(headers: Mapping[str, str]) -> Options:
    """The choices of a request that becomes a task; an error names the header."""
    chosen = {name: _choice(headers, name) for name in _CHOICES}
    for name in headers:
        if name.startswith("legato-") and name not in _KNOWN:
            # A slip of the pen would silently drop a limit; what is like none of ours is for somebody else.
            for near in get_close_matches(name, _KNOWN, 1, cutoff=0.9):
                raise InvalidRequest(
                    f"legato knows no header {_title(name)}; did you mean {_title(near)}?", param=_title(name)
                )
    for name, values in _LATER.items():
        if chosen[name] in values:
            raise NotAvailable(f"{_title(name)}: {chosen[name]} is not available yet.", param=_title(name))
    for name in _LATER_HEADERS:
        if name in headers:
            raise NotAvailable(f"{_title(name)} is not available yet.", param=_title(name))
    return Options(
        heartbeat=chosen["legato-heartbeat"] != "off",
        event_ids=chosen["legato-event-ids"] == "on",
        on_disconnect=chosen["legato-on-disconnect"],
    )


def refuse_without_body(headers: Mapping[str, str]) -> None:
    """A body that is no JSON object passes through, unless a header asks for what only a task can give."""
    for name in _ASK:
        if name in headers and engage(headers) != "off":
            raise InvalidRequest(
                f"{_title(name)} asks for a task, but the body is not a JSON object.", param="body"
            )


def _choice(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name)
    if value is None:
        return None
    value, allowed = value.strip().lower(), _CHOICES[name]
    if value not in allowed:
        raise InvalidRequest(f"{_title(name)} must be one of {', '.join(allowed)}.", param=_title(name))
    return value


def limits(headers: Mapping[str, str], body: Mapping[str, Any], allowed: Limits) -> Limits:
    """The operator's limits, tightened by ``Legato-Limits: max_cycles=5`` or the body's ``legato`` object.

    Where both name a limit, the tighter one holds.
    """
    given = body.get("legato")
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest('legato must be an object such as {"max_cycles": 5}.', param="legato")
    asked: list[tuple[str, object, str]] = [
        (name, value, f"legato.{name}") for name, value in (given or {}).items()
    ]
    for part in filter(None, (part.strip() for part in headers.get("legato-limits", "").split(","))):
        name, _, text = part.partition("=")
        number = int(text) if text.strip().isdecimal() and len(text) < _DIGITS else text
        asked.append((name.strip(), number, "Legato-Limits"))
    chosen = allowed
    for name, value, param in asked:
        tighter = _tighten(allowed, name, value, param)
        chosen = replace(chosen, max_cycles=min(chosen.max_cycles, tighter.max_cycles))
    return chosen


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
