"""legato's own routes: what there is, how it is doing, and the caller's tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from proxy import __version__
from proxy.core import messages as m
from proxy.core.dialects.responses import Action
from proxy.core.splice import loads
from proxy.errors import ClientFault, IllegalMove, InvalidRequest, LegatoError, TaskEnded, TaskNotFound
from proxy.log.base import Log, TaskRow
from proxy.tasks import Tasks
from proxy.web import auth
from proxy.web.answers import Json

ROUTES = {
    "GET /": "this index",
    "GET /health": "200 while the process is up",
    "GET /ready": "200 while tasks can be started, 503 while draining or without a log",
    "GET /tasks": "your tasks, newest first (?limit=, ?after=, ?state=, ?conversation=)",
    "GET /tasks/{id}": "one task: state, reason, cycles, step, cursor, required actions",
    "POST /tasks/{id}/cancel": "stop a task for good",
}
MAX_PAGE = 1000


class Control:
    """The routes under the prefix; an unknown one is 404, never upstream's."""

    def __init__(self, *, tasks: Tasks, log: Log, owners: auth.Owners) -> None:
        self._tasks = tasks
        self._log = log
        self._owners = owners
        self._prefix = ""

    def routes(self, prefix: str) -> list[BaseRoute]:
        """Starlette routes."""
        self._prefix = prefix
        return [
            Route(prefix, self.index),
            Route(f"{prefix}/", self.index),
            Route(f"{prefix}/health", self.health),
            Route(f"{prefix}/ready", self.ready),
            Route(f"{prefix}/tasks", self.list),
            Route(f"{prefix}/tasks/{{id}}", self.show),
            Route(f"{prefix}/tasks/{{id}}/cancel", self.cancel, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """What legato answers itself."""
        routes = {route.replace(" ", f" {self._prefix}", 1): what for route, what in ROUTES.items()}
        return Json({"legato": __version__, "routes": routes})

    async def health(self, request: Request) -> Response:
        """The process is up."""
        return Json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether new tasks are taken."""
        failed = await self._log.probe()
        if failed is not None or self._tasks.draining:
            return Json({"status": failed or "draining"}, status_code=503)
        return Json({"status": "ok", "running": len(self._tasks.live)})

    async def list(self, request: Request) -> Response:
        """The caller's tasks."""
        query = request.query_params
        limit = query.get("limit", "100")
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_PAGE:
            raise InvalidRequest(f"limit must be a whole number from 1 to {MAX_PAGE}.", param="limit")
        rows = await self._log.list(
            owner=self._owner(request),
            conversation=query.get("conversation"),
            states=query.getlist("state") or None,
            after=query.get("after"),
            limit=int(limit) + 1,
        )
        page = rows[: int(limit)]
        return Json({"data": [brief(row) for row in page], "has_more": len(rows) > len(page)})

    async def show(self, request: Request) -> Response:
        """One task."""
        return Json(await self._whole(await self._own(request)))

    async def cancel(self, request: Request) -> Response:
        """Stop a task: its upstream exchange is closed, no request of it leaves any more."""
        row = await self._own(request)
        runner = self._tasks.live.get(row.id)
        if row.summary.state != "cancelled":
            if runner is None or not row.summary.open:
                raise TaskEnded(f"The task has ended: {row.summary.state}.")
            try:
                await runner.take(m.CancelRequested(time.time()))
            except IllegalMove:
                raise TaskEnded("The task has just ended.") from None
        return Json(await self._whole(await self._log.get(row.id) or row))

    def _owner(self, request: Request) -> str:
        return self._owners.of(auth.client_of(request.scope), request.headers)

    async def _own(self, request: Request) -> TaskRow:
        row = await self._log.get(request.path_params["id"])
        if row is None or row.owner != self._owner(request):
            raise TaskNotFound("There is no such task, or it isn't yours.")
        return row

    async def _whole(self, row: TaskRow) -> dict[str, Any]:
        actions: list[Any] = []
        if row.summary.state == "input_required":
            async for record in self._log.records(row.id):
                if isinstance(record, m.Note) and record.kind == "actions":
                    actions = loads(record.data)
        return {**brief(row), "required_actions": [Action(*facts)._asdict() for facts in actions]}


def brief(row: TaskRow) -> dict[str, Any]:
    """A task as lists show it."""
    summary = row.summary
    return {
        "id": row.id,
        "state": summary.state,
        "reason": summary.reason,
        "response_id": summary.response_id,
        "conversation": row.conversation,
        "route": row.route,
        "cycles": summary.cycles,
        "step": summary.step,
        "continues": summary.continues,
        "continued_by": summary.continued_by,
        "cursor": row.cursor,
        "size": row.size,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    }


async def error_response(request: Request, error: Exception) -> Response:
    """A LegatoError as its JSON answer."""
    if not isinstance(error, LegatoError):
        raise error
    headers: Mapping[str, str] = {"x-should-retry": "true" if error.should_retry else "false"}
    if error.retry_after is not None:
        headers = {**headers, "retry-after": str(error.retry_after)}
    return Json(error.body(), status_code=error.status, headers=dict(headers))


async def no_route(request: Request, error: Exception) -> Response:
    """404 and 405 under the prefix: never upstream's."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    fault = ClientFault(f"legato has no route {request.method} {request.url.path}; its index lists them all.")
    fault.status, fault.code = status, "not_found" if status == 404 else "method_not_allowed"
    return await error_response(request, fault)
