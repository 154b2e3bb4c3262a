"""One finding, and the words that checks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it is, and what to do where it isn't well."""

    name: str
    status: Status
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        """Text and advice."""
        return f"{self.text}; {self.advice}" if self.advice else self.text


def ok(name: str, text: str) -> Check:
    """All is well."""
    return Check(name, "ok", text)


def warn(name: str, text: str, advice: str) -> Check:
    """It will run, but."""
    return Check(name, "warn", text, advice)


def fail(name: str, text: str, advice: str) -> Check:
    """It won't run, or not do its work."""
    return Check(name, "fail", text, advice)


def size(count: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}"
