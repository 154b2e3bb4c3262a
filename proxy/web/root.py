"""A path prefix under which a proxy in front publishes legato, without taking it off its requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class UnderRoot:
    """Takes the prefix off, once, so that nothing behind it knows of it: not a route, not upstream.

    A request without it is served as it is: health checks come past the proxy in front. uvicorn's own
    ``root_path`` is of no use here: it means a prefix that has been taken off already, and puts it back.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan."""
        if scope["type"] == "http" and (scope["raw_path"] + b"/").startswith(self._root + b"/"):
            cut = len(self._root)  # the prefix has no escapes, so it is as long in both
            raw, path = scope["raw_path"][cut:], scope["path"][cut:]
            scope = {**scope, "raw_path": raw or b"/", "path": path or "/"}
        await self._app(scope, receive, send)
