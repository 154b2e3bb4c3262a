"""What browsers are told of other origins: the pages of the listed ones may call legato, and no others.

Wraps the whole app, and only where the setting ``cors_origins`` names an origin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.web.headers import Header

# Named even where a preflight doesn't ask for them; what it does ask for is allowed besides.
ALLOWED = ("Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID")
# What a page may read of an answer, besides what upstream exposes.
EXPOSED = (
    "Legato-Task",
    "Legato-Resume-Token",
    "Legato-Cursor",
    "Legato-After",
    "Idempotency-Replayed",
    "Retry-After",
    "X-Should-Retry",
    "X-Request-Id",
)
# Seconds for which a browser may remember a preflight's answer.
MAX_AGE = 600

_PREFIX = b"access-control-"
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class Cors(CORSMiddleware):
    """Starlette answers the preflights; in all other answers legato's word replaces upstream's.

    Cookies aren't for other origins (there is no ``Access-Control-Allow-Credentials``); ``Authorization``
    needs no such leave.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        super().__init__(
            app,
            allow_origins=frozenset(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
            max_age=MAX_AGE,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Allow the listed headers and those asked for: what they mean is upstream's to judge."""
        response = super().preflight_response(request_headers)
        asked = _names(request_headers.getlist("access-control-request-headers"))
        known = {name.lower() for name in ALLOWED}
        more = [name for name in asked if name.lower() not in known and _NAME.fullmatch(name)]
        response.headers["access-control-allow-headers"] = ", ".join([*ALLOWED, *more])
        return response

    async def simple_response(
        self, scope: Scope, receive: Receive, send: Send, request_headers: Headers
    ) -> None:
        """Any request but a preflight."""
        origin = request_headers.get("origin")
        allowed = origin if origin is not None and self.is_allowed_origin(origin) else None

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": answer_headers(message["headers"], allowed)}
            await send(message)

        await self.app(scope, receive, told)


def answer_headers(headers: Iterable[Header], origin: str | None) -> list[Header]:
    """An answer's headers with one word on origins: ``origin`` may read it, or, if None, nobody may."""
    kept: list[Header] = []
    vary: list[str] = []
    exposed: list[str] = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"vary":
            vary += _names([value.decode("latin-1")])
        elif lower == b"access-control-expose-headers":
            exposed += _names([value.decode("latin-1")])
        elif not lower.startswith(_PREFIX):
            kept.append((name, value))
    if "*" not in vary:
        vary = [*(each for each in vary if each.lower() != "origin"), "Origin"]
    kept.append((b"vary", ", ".join(vary).encode("latin-1")))
    if origin is not None:
        known = {name.lower() for name in EXPOSED}
        more = [name for name in exposed if name.lower() not in known]
        kept.append((b"access-control-allow-origin", origin.encode("latin-1")))
        kept.append((b"access-control-expose-headers", ", ".join([*EXPOSED, *more]).encode("latin-1")))
    return kept


def _names(values: Iterable[str]) -> list[str]:
    return [name for value in values for part in value.split(",") if (name := part.strip())]
