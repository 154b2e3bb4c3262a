"""Which headers go through a proxy, for both directions and all routes."""

from __future__ import annotations

from collections.abc import Iterable

Header = tuple[bytes, bytes]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """Without those that speak of one connection only, and those that ``Connection`` names as such."""
    headers = list(headers)
    dropped = HOP_BY_HOP
    for name, value in headers:
        if name.lower() == b"connection":
            dropped = dropped.union(token.strip().lower() for token in value.split(b","))
    return [pair for pair in headers if pair[0].lower() not in dropped]


def without_legato(headers: Iterable[Header]) -> list[Header]:
    """Without ``Legato-*``: those are between a client and legato, in both directions."""
    return [pair for pair in headers if not pair[0].lower().startswith(b"legato-")]
