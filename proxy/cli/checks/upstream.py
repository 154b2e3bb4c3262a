"""Upstream: can it be reached as ``legato serve`` would, is its certificate good, what time is it there."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from urllib.parse import urlsplit

import anyio
from anyio import to_thread

from proxy import __version__
from proxy.errors import LegatoError
from proxy.settings import Settings
from proxy.upstream import Request, Upstream
from proxy.web.app import upstream_config

from .base import Check, fail, ok, warn

ANSWER_SECONDS = 10.0
SKEW_SECONDS = 5.0
CERTIFICATE_DAYS = 14
PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
HEADERS = ((b"User-Agent", f"legato-doctor/{__version__}".encode()), (b"Accept", b"*/*"))


@dataclass(frozen=True, slots=True)
class Answer:
    """Upstream's answer to ``GET /``; times in seconds."""

    status: int
    headers: Mapping[str, str]
    took: float
    at: float


async def check_upstream(settings: Settings, environ: Mapping[str, str]) -> AsyncIterator[Check]:
    """``environ`` is only looked at for a proxy that somebody may think is used."""
    if settings.upstream is None:
        yield fail("upstream", "none is set", "set --upstream / LEGATO_UPSTREAM / upstream")
        return
    try:
        answer = await _ask(settings)
    except ssl.SSLError:
        yield fail(
            "upstream", f"{settings.upstream_ca} holds no certificate", "set upstream_ca to a PEM file"
        )
    except TimeoutError:
        text = f"{settings.upstream} took the request, but didn't answer within {ANSWER_SECONDS:g} s"
        yield fail("upstream", text, "look what stands there")
    except LegatoError as exc:
        text, _, advice = exc.message.rpartition("; ")
        yield fail("upstream", text, _advice(exc.message, settings, environ) or advice)
    else:
        yield _answered(settings, answer)
        yield await to_thread.run_sync(_tls, settings)
        yield _clock(answer)


async def _ask(settings: Settings) -> Answer:
    begun = time.perf_counter()
    async with Upstream(upstream_config(settings)) as seam:
        with anyio.fail_after(ANSWER_SECONDS):
            exchange = await seam.open(Request("GET", b"/", HEADERS))
        took, at = time.perf_counter() - begun, time.time()
        await exchange.close()
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in exchange.headers}
    return Answer(exchange.status, headers, took, at)


def _advice(message: str, settings: Settings, environ: Mapping[str, str]) -> str:
    if "is not trusted" in message:
        return "name the PEM file of the authority that signed it with upstream_ca"
    if "WRONG_VERSION_NUMBER" in message:
        return "something plain answers there: is it http:// (upstream)?"
    if settings.upstream_proxy is not None:
        return "check upstream and upstream_proxy"
    proxy = next((name for name in PROXY_VARIABLES if environ.get(name)), None)
    return f"{proxy} is set but not looked at: set upstream_proxy if it is needed" if proxy else ""


def _answered(settings: Settings, answer: Answer) -> Check:
    way = " through upstream_proxy" if settings.upstream_proxy is not None else ""
    text = f"{settings.upstream} answers {answer.status} to GET / in {answer.took * 1000:.0f} ms{way}"
    if answer.status >= 500:
        return warn("upstream", text, "it is in trouble, or a proxy before it is")
    target = answer.headers.get("location", "")
    if answer.status in range(300, 400) and _only_tls_differs(str(settings.upstream), target):
        return warn("upstream", f"{text} and sends on to https://", "set upstream to that")
    return ok("upstream", text)


def _only_tls_differs(base: str, target: str) -> bool:
    before, after = urlsplit(base), urlsplit(target)
    return (before.scheme, after.scheme) == ("http", "https") and before.hostname == after.hostname


# --- the certificate ----------------------------------------------------------------------------------


def _tls(settings: Settings) -> Check:
    """Once more by hand, since only then the certificate can be seen. It has just been trusted."""
    url = urlsplit(str(settings.upstream))
    host = url.hostname or ""
    if url.scheme == "http":
        return _plain(host)
    if settings.upstream_proxy is not None:
        return ok("tls", "the certificate is trusted")
    context = ssl.create_default_context(cafile=str(settings.upstream_ca) if settings.upstream_ca else None)
    try:
        with (
            socket.create_connection((host, url.port or 443), settings.connect_timeout) as plain,
            context.wrap_socket(plain, server_hostname=host) as sock,
        ):
            certificate, version = sock.getpeercert() or {}, sock.version()
    except OSError as exc:
        return warn("tls", f"the certificate could not be looked at: {exc}", "try again")
    days = (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / 86400
    text = f"{version}, trusted, issued by {_issuer(certificate)}, good for {days:.0f} days"
    if days < CERTIFICATE_DAYS:
        return warn("tls", text, "upstream's certificate must be renewed")
    return ok("tls", text)


def _issuer(certificate: Mapping[str, object]) -> str:
    issuer = certificate.get("issuer")
    parts = dict(pair for group in issuer for pair in group) if isinstance(issuer, tuple) else {}
    return str(parts.get("organizationName") or parts.get("commonName") or "an authority without a name")


def _plain(host: str) -> Check:
    try:
        near = ip_address(host).is_loopback
    except ValueError:
        near = host == "localhost"
    if near:
        return ok("tls", "none, and none is needed: upstream is on this machine")
    return warn("tls", f"none: credentials go to {host} for all to read", "set upstream to an https:// URL")


# --- the clock ----------------------------------------------------------------------------------------


def _clock(answer: Answer) -> Check:
    date = answer.headers.get("date")
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return ok("clock", "not compared: upstream's answer has no Date")
    # A Date has whole seconds, cut off; it was made somewhere between asking and hearing.
    skew = answer.at - answer.took / 2 - (theirs + 0.5)
    if abs(skew) <= SKEW_SECONDS:
        return ok("clock", "within a few seconds of upstream's")
    side = "ahead of" if skew > 0 else "behind"
    return warn(
        "clock",
        f"{abs(skew):.0f} s {side} upstream's",
        "set this machine's clock: waits that upstream asks for by date depend on it",
    )
