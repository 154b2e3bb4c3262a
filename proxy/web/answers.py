"""Answers that legato makes itself: errors, and a stream that is cut because upstream's was."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from starlette.responses import Response
from starlette.types import Send

from proxy.core.splice import dumps
from proxy.errors import LegatoError, UpgradeRefused

_cut: ContextVar[bool] = ContextVar("legato_cut", default=False)


class Json(Response):
    """A JSON answer. Ids and reasons are upstream's, so a lone surrogate may stand in them."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """As UTF-8; a lone surrogate as an escape."""
        return dumps(content).encode()


async def send_error(send: Send, error: LegatoError) -> None:
    """One JSON error with what a client must know of trying again; ends the response."""
    body = dumps(error.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-should-retry", b"true" if error.should_retry else b"false"),
    ]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if isinstance(error, UpgradeRefused):
        headers.append((b"connection", b"close"))  # the parser won't read HTTP after an upgrade request
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def cut_short() -> None:
    """Say that this request's app is about to return without ending its response, on purpose.

    uvicorn then closes the connection, which is the only way to let a client see that a body was cut. It
    also logs an error, since it takes that for a bug: see ``CutFilter``. Call it in the request's own task.
    """
    _cut.set(True)


class CutFilter(logging.Filter):
    """Keeps out uvicorn's complaint about a response that was cut on purpose, and nothing else."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for the one line."""
        return not (_cut.get() and record.msg == "ASGI callable returned without completing response.")


def quiet_cuts() -> None:
    """Install the filter; wherever uvicorn is configured, before it serves. Twice is once."""
    logger = logging.getLogger("uvicorn.error")
    if not any(isinstance(known, CutFilter) for known in logger.filters):
        logger.addFilter(CutFilter())
