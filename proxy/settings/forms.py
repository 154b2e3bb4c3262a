"""How the values of settings are written: the checks, and the words for what a value must be.

A check raises ``ValueError`` where the form's own words will do (``Form.expects``), and ``told("must …")``
where there is more to say. Values that may hold a credential are never quoted.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, FilePath, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

MiB = 2**20


@dataclass(frozen=True)
class Form:
    """``expects`` completes "must be …"; ``metavar`` stands in ``--help``; ``echo``: errors may quote it."""

    expects: str
    metavar: str
    echo: bool = True


def form_of(field: FieldInfo) -> Form:
    """The field's own form, or its choices."""
    choices = [str(choice) for choice in get_args(field.annotation)]
    own = next((mark for mark in field.metadata if isinstance(mark, Form)), None)
    return own or Form("one of " + ", ".join(choices), f"[{'|'.join(choices)}]")


def told(text: str) -> PydanticCustomError:
    """A problem that says more than its form's ``expects``; ``text`` begins with "must"."""
    return PydanticCustomError("told", "{text}", {"text": text})


def _number(value: object) -> object:
    if isinstance(value, bool):  # TOML's true would pass for 1
        raise ValueError
    return value


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": MiB, "gib": 2**30}


def _size(value: object) -> object:
    if not isinstance(value, str):
        return _number(value)
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", value.lower(), re.ASCII)
    if not found or found[2] not in _UNITS:
        raise ValueError
    return int(found[1]) * _UNITS[found[2]]


def _size_or_off(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() == "off" else _size(value)


def _items(value: object) -> object:
    """A list in one string: JSON where it begins with a bracket, else separated by commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)  # its error is a ValueError, and so "must be a list of …"
    return [part.strip() for part in value.split(",") if part.strip()]


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _origin(value: str, example: str) -> None:
    """Refuse what isn't an absolute http(s) URL. The value is never quoted: it may hold a credential."""
    try:
        url = urlsplit(value)
        usable = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        usable = False
    if not usable or re.search(r"[\s\\\x00-\x1f\x7f]", value):
        raise told(f"must be an http:// or https:// URL with a host, such as {example}")
    if "?" in value or "#" in value:
        raise told(f"must be a URL without query and fragment, such as {example}")


def _upstream(value: str) -> str:
    example = "https://dbc-12345.cloud.databricks.com"
    _origin(value, example)
    if "@" in urlsplit(value).netloc:
        raise told("must be a URL without credentials: legato passes on those of each request")
    return value.rstrip("/")


def _proxy(value: SecretStr) -> SecretStr:
    example = "http://proxy.example:3128"
    _origin(value.get_secret_value(), example)
    if urlsplit(value.get_secret_value()).path.strip("/"):
        raise told(f"must be a URL without a path, such as {example}")
    return value


def _log(value: str) -> str:
    if value.startswith(("redis:", "rediss:")):
        raise told("must be sqlite:PATH or memory: (not_available: redis logs come in a later version)")
    if value != "memory:" and not re.fullmatch(r"sqlite:\s*\S.*", value):
        raise ValueError
    return value


def _header_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", value):
        raise ValueError
    return value


def _network(value: str) -> str:
    ip_network(value)
    return value


def _prefix(value: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", value) or {".", ".."} & set(value.split("/")):
        raise ValueError
    return value


def one_path(value: str) -> str:
    """A path, or a pattern of one."""
    if not value.startswith("/") or re.search(r"[\s?#]", value):
        raise ValueError
    return value


_WEB_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._~-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?/?")
_OWN_PORT = {"http": ":80", "https": ":443"}


def _web_origin(value: str) -> str:
    """An origin as browsers write it: small letters, no slash at its end, the usual port left out."""
    if value in ("*", "null"):
        raise told(f"must be exact origins such as https://app.example, not {value}")
    found = _WEB_ORIGIN.fullmatch(value.lower())
    if not found:
        raise ValueError
    scheme, host, port = found[1], found[2], found[3] or ""
    return f"{scheme}://{host}{'' if port == _OWN_PORT.get(scheme) else port}"


def _host(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", value):
        raise ValueError
    return value


def _long_enough(value: SecretStr) -> SecretStr:
    if len(value) < 16:
        raise ValueError
    return value


Count = Annotated[int, BeforeValidator(_number), Field(gt=0), Form("a whole number above 0", "N")]
Port = Annotated[
    int, BeforeValidator(_number), Field(ge=0, le=65535), Form("a whole number from 0 to 65535", "N")
]
Seconds = Annotated[
    float,
    BeforeValidator(_number),
    Field(gt=0, allow_inf_nan=False),
    Form("a number of seconds above 0", "SECONDS"),
]
SecondsOrNone = Annotated[
    float,
    BeforeValidator(_number),
    Field(ge=0, allow_inf_nan=False),
    Form("a number of seconds, 0 or more", "SECONDS"),
]
_SIZE = "a size above 0, such as 16MiB or 16777216"
Size = Annotated[int, BeforeValidator(_size), Field(gt=0), Form(_SIZE, "SIZE")]
SizeOrOff = Annotated[
    Annotated[int, Field(gt=0)] | None, BeforeValidator(_size_or_off), Form(f"off, or {_SIZE}", "SIZE")
]
Switch = Annotated[bool, Form("true or false", "")]
Host = Annotated[str, AfterValidator(_host), Form("a host name or an IP address", "HOST")]
Prefix = Annotated[
    str, AfterValidator(_prefix), Form("a path such as /legato, without a slash at its end", "PATH")
]
RootPath = Annotated[
    Annotated[str, AfterValidator(_prefix)] | None,
    Form("a path such as /agents, without a slash at its end", "PATH"),
]
LogUrl = Annotated[str, AfterValidator(_log), Form("sqlite:PATH or memory:", "LOG", echo=False)]
Upstream = Annotated[
    Annotated[str, AfterValidator(_upstream)] | None, Form("an http:// or https:// URL", "URL", echo=False)
]
Proxy = Annotated[
    Annotated[SecretStr, AfterValidator(_proxy)] | None, Form("an http:// or https:// URL", "URL", echo=False)
]
CaFile = Annotated[FilePath | None, Form("an existing file in PEM form", "FILE")]
Secret = Annotated[
    Annotated[SecretStr, AfterValidator(_long_enough)] | None,
    Form("text of at least 16 characters", "TEXT", echo=False),
]
Routes = Annotated[
    tuple[Annotated[str, AfterValidator(one_path)], ...],
    BeforeValidator(_items),
    Form("a list of paths such as /responses, separated by commas or as JSON", "PATHS"),
]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_web_origin)], ...],
    BeforeValidator(_items),
    Form("a list of origins such as https://app.example, separated by commas or as JSON", "ORIGINS"),
]
Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_items),
    Form("a list of names, separated by commas or as JSON", "NAMES"),
]
HeaderName = Annotated[
    Annotated[str, AfterValidator(_header_name)] | None,
    Form("the name of a header such as X-Forwarded-User", "NAME"),
]
Networks = Annotated[
    tuple[Annotated[str, AfterValidator(_network)], ...],
    BeforeValidator(_items),
    Form("a list of addresses or networks such as 10.0.0.0/8, separated by commas or as JSON", "NETWORKS"),
]
Level = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]


Durability = Literal["process", "power"]
Engage = Literal["long_task", "stream", "force", "off"]
OnDisconnect = Literal["continue", "cancel"]
PartialAnswers = Literal["forward", "refuse"]
Replay = Literal["auto", "all_items", "all_pairs", "last_pair"]
FollowupKey = Literal["same", "input", "messages"]
LogFormat = Literal["auto", "console", "json"]
