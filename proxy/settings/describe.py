"""What ``--help``, the docs and the error messages say of each setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import SecretStr

from .endpoints import EndpointTable
from .forms import Form, MiB, form_of
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
        extra = field.json_schema_extra
        yield (
            name,
            Setting(
                name=name,
                group=str(extra["group"]) if isinstance(extra, dict) else "",
                description=field.description or "",
                form=form_of(field),
                default=shown(name, field.default),
                switch=field.annotation is bool,
            ),
        )


def shown(name: str, value: object) -> str:
    """A setting's value as it would be written; secrets are masked."""
    if value is None:
        return "off" if name == "upstream_body_limit" else "none"
    if isinstance(value, SecretStr):
        return "***"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(shown(name, each) for each in value) or "none"
    if isinstance(value, EndpointTable):
        pairs = value.model_dump().items()
        return "{" + " ".join(f"{key}={shown(key, each)}" for key, each in pairs) + "}"
    if isinstance(value, int) and value >= MiB and not value % MiB:
        return f"{value // MiB}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)
