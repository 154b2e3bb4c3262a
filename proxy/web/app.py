"""The whole proxy as one ASGI app: three ways that a request can go, and the lifespan that they share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.core.rules import Limits
from proxy.endpoints import EndpointConfig, Endpoints, Rule
from proxy.errors import LegatoError
from proxy.log import open_log
from proxy.settings import Settings
from proxy.tasks import TaskConfig, Tasks
from proxy.upstream import Upstream, UpstreamConfig
from proxy.web import auth
from proxy.web.answers import quiet_cuts
from proxy.web.control import Control, error_response, no_route
from proxy.web.cors import Cors
from proxy.web.passthrough import passthrough
from proxy.web.root import UnderRoot
from proxy.web.start import StartConfig, Starter


def create_app(settings: Settings) -> App:
    """legato, ready for a server that runs its lifespan. What that can't open, it raises."""
    quiet_cuts()
    return App(settings)


class App:
    """Under the prefix: legato's own routes. A POST on a task route: perhaps a task. All else: upstream."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._prefix = settings.prefix
        self._under = f"{settings.prefix}/"
        self._control = Starlette(
            lifespan=self._lifespan,
            exception_handlers={LegatoError: error_response, HTTPException: no_route},
        )
        # A redirect would have to know the scheme, host and path that the client sees.
        self._control.router.redirect_slashes = False
        self._upstream: Upstream
        self._starter: Starter
        self._tasks: Tasks | None = None
        self._entry = around(self._serve, settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan."""
        await self._entry(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or f"{scope['path']}/".startswith(self._under):
            await self._control(scope, receive, send)
        elif self._starter.takes(scope):
            await self._starter(scope, receive, send)
        else:
            await passthrough(scope, receive, send, self._upstream)

    async def drain(self) -> None:
        """To be awaited before the server closes its sockets."""
        if self._tasks is not None:
            await self._tasks.drain(self._settings.drain)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        settings = self._settings
        log = open_log(settings.log, durability=settings.durability)
        await log.open()
        try:
            async with Upstream(upstream_config(settings)) as upstream, anyio.create_task_group() as group:
                key = auth.owner_key(
                    settings.secret.get_secret_value() if settings.secret else None, settings.log
                )
                owners = auth.Owners(key, settings.owner_header, settings.trusted_proxies)
                tasks = self._tasks = Tasks(log, upstream, group, task_config(settings))
                await tasks.settle()
                control = Control(tasks=tasks, log=log, owners=owners)
                app.router.routes[:] = control.routes(self._prefix)
                self._upstream = upstream
                self._starter = Starter(
                    start_config(settings), tasks=tasks, log=log, upstream=upstream, owners=owners
                )
                group.start_soon(tasks.sweep)
                yield
                group.cancel_scope.cancel()
        finally:
            await log.close()


def around(app: ASGIApp, settings: Settings) -> ASGIApp:
    """The app with what stands before its routes: by default nothing."""
    if settings.root_path is not None:
        app = UnderRoot(app, settings.root_path)
    if settings.cors_origins:
        app = Cors(app, settings.cors_origins)
    return app


def upstream_config(settings: Settings) -> UpstreamConfig:
    """What the upstream seam needs of the settings."""
    return UpstreamConfig(
        base_url=str(settings.upstream),
        connect_timeout=settings.connect_timeout,
        max_silence=settings.max_silence,
        proxy=settings.upstream_proxy.get_secret_value() if settings.upstream_proxy else None,
        ca_file=str(settings.upstream_ca) if settings.upstream_ca else None,
    )


def task_config(settings: Settings) -> TaskConfig:
    """What tasks need of the settings."""
    return TaskConfig(
        seam_grace=settings.seam_grace,
        retry_budget=settings.retry_budget,
        max_frame=settings.max_frame,
        max_log=settings.max_log,
        max_tasks=settings.max_tasks,
        partial_answers=settings.partial_answers == "forward",
        retain=settings.retain,
        authorization=frozenset(settings.authorization_items),
        tell_upstream=settings.tell_upstream,
    )


def start_config(settings: Settings) -> StartConfig:
    """What starting needs of the settings."""
    return StartConfig(
        routes=settings.task_routes,
        endpoints=endpoints(settings),
        write_timeout=settings.write_timeout,
        max_body=settings.max_body,
        on_disconnect=settings.on_disconnect,
    )


def endpoints(settings: Settings) -> Endpoints:
    """What holds for each endpoint: a table's own values over the general ones."""
    rules = (
        Rule(table.match, table.model, endpoint_config(settings.model_copy(update=table.differs)))
        for table in settings.endpoint
    )
    return Endpoints(endpoint_config(settings), rules)


def endpoint_config(settings: Settings) -> EndpointConfig:
    """What may differ from endpoint to endpoint."""
    return EndpointConfig(
        engage=settings.engage,
        replay=settings.replay,
        followup_key=settings.followup_key,
        upstream_body_limit=settings.upstream_body_limit,
        limits=Limits(max_cycles=settings.max_cycles),
        heartbeat=settings.heartbeat,
    )
