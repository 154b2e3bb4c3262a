"""The settings themselves: name, form, default, and a description that gives the default's reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PrivateAttr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from .endpoints import EndpointTables
from .forms import (
    CaFile,
    Count,
    Durability,
    Engage,
    FollowupKey,
    HeaderName,
    Host,
    Level,
    LogFormat,
    LogUrl,
    MiB,
    Names,
    Networks,
    OnDisconnect,
    Origins,
    PartialAnswers,
    Port,
    Prefix,
    Proxy,
    Replay,
    RootPath,
    Routes,
    Seconds,
    SecondsOrNone,
    Secret,
    Size,
    SizeOrOff,
    Switch,
    Upstream,
)

Source = Literal["flag", "environment", "file", "default"]

TASK_ROUTES = (
    "/serving-endpoints/*/invocations",
    "/serving-endpoints/responses",
    "/invocations",
    "/responses",
    "/v1/responses",
    "/mlflow/v1/responses",
    "/ai-gateway/mlflow/v1/responses",
)


def _setting(group: str, default: object, description: str) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group})


class Settings(BaseSettings):
    """All settings, checked and frozen. ``sources`` says where each value came from."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    upstream: Upstream = _setting(
        "Upstream",
        None,
        "What legato stands in front of: an http:// or https:// URL, with upstream's base path if it has "
        "one. Needed by serve; there is nothing sensible to guess.",
    )
    connect_timeout: Seconds = _setting(
        "Upstream",
        1.8,
        "Seconds for reaching upstream: name, connection, TLS. Below 2, so that an upstream that is down "
        "is answered with 502 within 2 seconds.",
    )
    max_silence: Seconds = _setting(
        "Upstream",
        600.0,
        "Seconds without a byte from upstream after which an open response counts as broken. Longer than "
        "one tool call should take.",
    )
    retry_budget: SecondsOrNone = _setting(
        "Upstream",
        120.0,
        "Seconds over which a follow-up is tried again that was never sent or was clearly refused; 0 for "
        "one try only. Long enough for a limit per minute to pass.",
    )
    upstream_proxy: Proxy = _setting(
        "Upstream",
        None,
        "HTTP proxy on the way to upstream, http://[user:password@]host:port. None by default, and "
        "HTTPS_PROXY is not looked at: where requests go is decided here alone.",
    )
    upstream_ca: CaFile = _setting(
        "Upstream",
        None,
        "PEM file with the authorities that may have signed upstream's certificate. None: those of the "
        "system.",
    )
    upstream_body_limit: SizeOrOff = _setting(
        "Upstream",
        None,
        "Largest request body that upstream takes; a follow-up that would pass it carries less of the "
        "conversation. Off: upstream's 413 says so itself (4MiB is usual on Databricks).",
    )
    tell_upstream: Switch = _setting(
        "Upstream",
        False,
        "Send upstream the header Legato-Task, to find a task in its logs. Off, so that upstream sees what "
        "it would see without legato.",
    )

    host: Host = _setting(
        "Listening",
        "127.0.0.1",
        "Address to listen on. By default only this machine can connect; for any other address set a secret "
        "and put TLS in front.",
    )
    port: Port = _setting(
        "Listening", 8787, "Port to listen on; 0 takes any free one. The default is free as a rule."
    )
    prefix: Prefix = _setting(
        "Listening",
        "/legato",
        "Path under which legato's own routes live; everything else is upstream's. Named after legato, so "
        "as to hide no path of upstream's.",
    )
    root_path: RootPath = _setting(
        "Listening",
        None,
        "Path under which a proxy in front publishes legato without taking it off its requests; legato takes "
        "it off. None: a proxy that hands on a part of its paths usually takes it off itself.",
    )
    write_timeout: Seconds = _setting(
        "Listening",
        60.0,
        "Seconds that a client may leave bytes unread before its connection is cut. A minute outlasts a bad "
        "network, and a dead client isn't kept for long.",
    )
    drain: SecondsOrNone = _setting(
        "Listening",
        8.0,
        "Seconds that open cycles get to end after SIGTERM. Below the 10 seconds after which a container "
        "engine kills.",
    )

    log: LogUrl = _setting(
        "Log",
        "sqlite:legato.db",
        "Where tasks are kept: sqlite:PATH, or memory: to forget them at the end. On disk by default, so "
        "that what a task did can be read after a restart.",
    )
    durability: Durability = _setting(
        "Log",
        "process",
        "What an event survives before a client gets it: the end of the process, or a power cut too (a disk "
        "flush for each read). The cheaper one by default; what decides about repeating a call is flushed "
        "either way.",
    )
    retain: Seconds = _setting(
        "Log",
        86400.0,
        "Seconds that an ended task can still be read; for a waiting one from its last change. A day: time "
        "for a person to come back to it.",
    )
    max_log: Size = _setting(
        "Log",
        256 * MiB,
        "Size of one task's log; at its end the task fails with log_full. Far above what one task writes, "
        "far below a disk.",
    )

    engage: Engage = _setting(
        "Tasks",
        "long_task",
        "Which requests on task routes become tasks: those that ask with databricks_options.long_task, any "
        "streaming one, any streaming one with long_task added (force), or none. Nothing is taken over "
        "unasked by default.",
    )
    task_routes: Routes = _setting(
        "Tasks",
        TASK_ROUTES,
        "Paths on which a POST may start a task; * stands for one part of a path. By default those that "
        "speak the Responses API.",
    )
    replay: Replay = _setting(
        "Tasks",
        "auto",
        "What a follow-up carries besides the original request: all finished items, all continuation pairs, "
        "or the last pair. auto begins with all items and takes less where upstream refuses them.",
    )
    followup_key: FollowupKey = _setting(
        "Tasks",
        "same",
        "Body key under which a follow-up carries the conversation. The client's own by default, which "
        "upstream has just accepted.",
    )
    max_cycles: Count = _setting(
        "Tasks",
        100,
        "Cycles after which a task is stopped before its next follow-up. Far beyond a healthy task, so that "
        "it ends only runaways.",
    )
    seam_grace: Seconds = _setting(
        "Tasks",
        0.5,
        "Seconds to wait after a cycle's ending for anything that belongs behind it. Hardly felt by people, "
        "ample between two frames of one response.",
    )
    heartbeat: Seconds = _setting(
        "Tasks",
        15.0,
        "Seconds of silence after which a client gets a comment line. Half of 30, the shortest idle limit of "
        "common load balancers.",
    )
    on_disconnect: OnDisconnect = _setting(
        "Tasks",
        "continue",
        "What becomes of a task when its last reader leaves: it goes on, or it is cancelled. It goes on by "
        "default, since closing a tab shouldn't lose the work; max_cycles bounds it.",
    )
    partial_answers: PartialAnswers = _setting(
        "Tasks",
        "forward",
        "A request that answers only some of what a task waits for: forward it as it is, the rest stays open "
        "on the new task; or refuse it. Forward by default, since it is the client's to say.",
    )
    authorization_items: Names = _setting(
        "Tasks",
        (),
        "Further item types that ask a person to authorise something, besides oauth_consent_request, the "
        "one that is known.",
    )

    endpoint: EndpointTables = _setting(
        "Tasks",
        (),
        "Settings that differ for some endpoints, as [[endpoint]] tables of the file; the first that fits "
        "counts. None: all endpoints are treated alike.",
    )

    max_body: Size = _setting(
        "Limits",
        16 * MiB,
        "Largest body of a request that may start a task; it is kept in memory. Four times "
        "what Databricks takes.",
    )
    max_frame: Size = _setting(
        "Limits", 8 * MiB, "Largest single event from upstream. Holds a large tool output, and bounds memory."
    )
    max_tasks: Count = _setting(
        "Limits",
        5000,
        "Running tasks of one owner; further starts get 429. Far above one application, and still a bound.",
    )

    secret: Secret = _setting(
        "Access",
        None,
        "Key that turns credentials into owners; at least 16 characters. Better set by its variable or in "
        "the file, since flags can be seen by others. None: a key is made once and kept beside a log on "
        "disk.",
    )

    owner_header: HeaderName = _setting(
        "Access",
        None,
        "Header in which a proxy in front names the user that it has checked, such as X-Forwarded-User: then "
        "that is the owner, and not the credential. Believed only from trusted_proxies. None: the credential "
        "tells owners apart.",
    )
    trusted_proxies: Networks = _setting(
        "Access",
        (),
        "Addresses or networks of the proxies in front whose owner_header is believed. None by default, "
        "since any client can write a header.",
    )
    cors_origins: Origins = _setting(
        "Access",
        (),
        "Origins whose pages may call legato from a browser, such as https://app.example. None: legato says "
        "nothing of origins, and what upstream says goes through.",
    )

    log_level: Level = _setting(
        "Output",
        "info",
        "Least level that is written to stderr. info tells of starts, ends and trouble, never of single "
        "events.",
    )
    log_format: LogFormat = _setting(
        "Output",
        "auto",
        "How stderr is written: lines for people, or JSON. auto: for people at a terminal, else JSON.",
    )

    _sources: Mapping[str, Source] = PrivateAttr(default_factory=dict)

    @property
    def sources(self) -> dict[str, Source]:
        """Where each value came from."""
        return {name: self._sources.get(name, "default") for name in type(self).model_fields}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *args: PydanticBaseSettingsSource,
        **kwargs: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is handed in: ``load`` does the reading, since it has to know the source of each."""
        return (init_settings,)
