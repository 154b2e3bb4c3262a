"""One line for each problem: where it is, what would be right, what was found."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from pydantic_core import ErrorDetails

from .describe import Setting
from .endpoints import EndpointTable, tables
from .forms import Form, form_of


def unknown(place: str, name: str, names: Collection[str]) -> str:
    """A name that doesn't exist, with the one that may have been meant."""
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{one_line(place)}: there is no such setting{meant}"


def invalid(error: ErrorDetails, known: Mapping[str, Setting], values: Mapping[str, object]) -> str:
    """A value that can't be used. ``values`` are the settings as they came."""
    name = str(error["loc"][0])
    if name not in known:
        return unknown(name, name, known)
    if name == "endpoint" and len(error["loc"]) > 1:
        return _in_a_table(error, values["endpoint"])
    setting = known[name]
    return setting.problem(_wrong(error, setting.form))


def one_line(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())


def _wrong(error: ErrorDetails, form: Form) -> str:
    text = error["msg"] if error["type"] == "told" else f"must be {form.expects}"
    return f"{text}, got {_cut(repr(error['input']))}" if form.echo else text


def _in_a_table(error: ErrorDetails, given: object) -> str:
    """``error["loc"]`` is ``("endpoint", 1, "max_cycles", …)``."""
    number, *inside = error["loc"][1:]
    place = f"[[endpoint]] #{int(number) + 1}"
    table = list(tables(given))[int(number)]  # type: ignore[call-overload]
    if not isinstance(table, dict):
        return f"{place}: must be a table"
    named = (f"{key}={one_line(str(table[key]))}" for key in ("match", "model") if table.get(key))
    if not inside:
        return f"{place}: {error['msg']}"
    key = str(inside[0])
    if key not in ("match", "model"):
        place = " ".join([place, *named])
    if key not in EndpointTable.model_fields:
        return unknown(f"{place} {key}", key, EndpointTable.model_fields)
    return f"{place} {key}: {_wrong(error, form_of(EndpointTable.model_fields[key]))}"


def _cut(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[:most] + "…"
