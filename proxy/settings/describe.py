"""What ``--help``, the docs and the error messages say of each setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from .forms import Form, MiB
from .model import Settings

PREFIX = "LEGATO_"


@dataclass(frozen=True)
class Setting:
    """One setting as ``--help`` and the docs show it."""

    name: str
    group: str
    description: str
    form: Form
    default: str
    switch: bool

    @property
    def flag(self) -> str:
        """``--max-cycles``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """``LEGATO_MAX_CYCLES``."""
        return PREFIX + self.name.upper()

    def problem(self, text: str) -> str:
        """One line that names flag, variable and TOML key."""
        return f"{self.flag} / {self.variable} / {self.name}: {text}"


def describe() -> dict[str, Setting]:
    """Every setting by its name, in the order of the groups."""
    return dict(_described())


def _described() -> Iterator[tuple[str, Setting]]:
    for name, field in Settings.model_fields.items():
        form = next((mark for mark in field.metadata if isinstance(mark, Form)), None)
        choices = [str(choice) for choice in get_args(field.annotation)]
        extra = field.json_schema_extra
        yield (
            name,
            Setting(
                name=name,
                group=str(extra["group"]) if isinstance(extra, dict) else "",
                description=field.description or "",
                form=form or Form("one of " + ", ".join(choices), f"[{'|'.join(choices)}]"),
                default=_shown(name, field.default),
                switch=field.annotation is bool,
            ),
        )


def _shown(name: str, default: object) -> str:
    if default is None:
        return "off" if name == "upstream_body_limit" else "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(default) or "none"
    if isinstance(default, int) and default >= MiB:
        return f"{default // MiB}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)
