"""The program's own log: structlog over the standard library's logging, written to stderr.

Modules say ``log = structlog.stdlib.get_logger(__name__)`` and tell facts as keywords
(``log.info("task started", task=task_id)``), never in the text. Nothing here is called for single events
of a stream.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

MASK = "***"

# What a credential looks like; the groups around it are kept.
_CREDENTIALS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(\bbearer\s+)[\w.~+/=-]+",
        r"(\bbasic\s+)[\w.~+/=-]{8,}",
        r"()\bdapi[0-9a-f-]{8,}",
        r"()\bsk-[\w-]{8,}",
        r"()\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?",  # a JSON web token
        r"(://)[^/\s@\"']+(?=@)",
        r"([?&](?:[\w-]*token|[\w-]*key|[\w-]*secret|password|code)=)[^&\s\"'#]+",
    )
)
_SECRET_NAMES = re.compile(
    r"(?:proxy[-_])?authorization|(?:set[-_])?cookie|password|.*(?:secret|token|api[-_]?key)", re.IGNORECASE
)

# Lines of uvicorn that legato doesn't want. The first is how a cut is passed on to a client; the other two
# are told by whoever started the server, with the reason.
_UNWANTED = {
    "ASGI callable returned without completing response.",
    "Application startup failed. Exiting.",
    "Application shutdown failed. Exiting.",
}


def configure(level: str, format: Literal["auto", "console", "json"], *, secrets: Iterable[str] = ()) -> None:
    """Set up logging for the process; calling it again replaces the first set-up.

    Args:
        level: The least level that legato's own loggers write. Libraries write warnings and above (at
            ``debug`` also their infos), since some of them tell of every request.
        format: ``auto`` writes for people when stderr is a terminal, else JSON.
        secrets: Values that never appear, whatever they look like.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.name = "legato"
    handler.addFilter(lambda record: record.name != "uvicorn.error" or record.msg not in _UNWANTED)
    handler.setFormatter(_formatter(format, frozenset(filter(None, secrets))))
    root = logging.getLogger()
    for old in [old for old in root.handlers if old.name == handler.name]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO if level == "debug" else logging.WARNING)
    logging.getLogger("proxy").setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_facts(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _facts() -> list[Processor]:
    return [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _formatter(format: str, secrets: frozenset[str]) -> logging.Formatter:
    terminal = sys.stderr.isatty()
    for_people = format == "console" or (format == "auto" and terminal)
    renderer: Processor = structlog.processors.JSONRenderer()
    if for_people:
        # The plain traceback shows no local variables: they may hold a credential.
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=plain)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_facts(),
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            Masker(secrets),
            renderer,
        ],
    )


class Masker:
    """A processor that takes out what looks like a credential, what is named like one, and ``secrets``."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        # The longest first, so that no rest of one is left where another is a part of it.
        known = "|".join(re.escape(secret) for secret in sorted(secrets, key=len, reverse=True))
        self._known = re.compile(known) if known else None

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Mask every value of ``event``, at any depth."""
        return {name: self._masked(value, name) for name, value in event.items()}

    def text(self, text: str) -> str:
        """``text`` without its credentials."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        for pattern in _CREDENTIALS:
            text = pattern.sub(rf"\g<1>{MASK}", text)
        return text

    def _masked(self, value: object, name: object = "") -> object:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(name, str) and _SECRET_NAMES.fullmatch(name):
            return MASK
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._masked(key): self._masked(each, key) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._masked(each) for each in value]
        return self.text(repr(value))
