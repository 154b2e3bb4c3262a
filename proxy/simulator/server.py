"""The simulator as an ASGI app, on the paths that the real API has."""

from __future__ import annotations

import math
import socket
import struct
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from . import orders
from .followups import RefusalError
from .orders import Order
from .scenario import MAX_BODY_BYTES, Scenario, load_scenario
from .script import Performance
from .supervisor import Call, Supervisor, Turn
from .tickets import Tickets

ROUTES = (
    "/serving-endpoints/{endpoint}/invocations",
    "/serving-endpoints/responses",
    "/invocations",
    "/responses",
    "/v1/responses",
    "/mlflow/v1/responses",
    "/ai-gateway/mlflow/v1/responses",
)


def simulator_app(
    default: str | Path | Scenario = "default", speed: float = 1.0, scenarios: Iterable[Scenario] = ()
) -> Starlette:
    """A scripted supervisor.

    ``default`` is a scenario, or the name or path of one, played where a request names none (by
    ``custom_inputs.scenario`` or the header ``X-Simulate``); ``scenarios`` adds to the names that a request
    may give. ``speed`` 1 is as written, 2 twice as fast, 0 doesn't wait at all.
    """
    if not speed >= 0:
        raise ValueError(f"speed must be 0 or more, not {speed}")
    scenario = default if isinstance(default, Scenario) else load_scenario(default)
    supervisor = Supervisor(scenario, scenarios)
    endpoint = SimulatorEndpoint(supervisor, speed)
    app = Starlette(
        routes=[
            Route("/", partial(_index, supervisor, speed)),
            Route("/simulator/requests", endpoint.requests),
            *(Route(path, endpoint, methods=["POST"]) for path in ROUTES),
        ],
        exception_handlers={HTTPException: _no_route},
    )
    app.router.redirect_slashes = False
    return app


class SimulatorEndpoint:
    """The app on the paths of the real API."""

    def __init__(self, supervisor: Supervisor, speed: float) -> None:
        self._supervisor = supervisor
        self._speed = speed
        self._open = 0
        self._left = 0

    async def requests(self, request: Request) -> Response:
        """What was accepted so far, for tests that must prove that something was sent once."""
        facts = self._supervisor.tickets.facts()
        return JSONResponse({**facts, "open": self._open, "left": self._left})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        request = Request(scope, receive)
        try:
            turn = self._supervisor.take(
                Call(
                    body=await _read_body(receive),
                    endpoint=request.path_params.get("endpoint"),
                    scenario=request.headers.get("x-simulate"),
                    authorization=request.headers.get("authorization", ""),
                )
            )
        except RefusalError as refusal:
            await _refused(refusal)(scope, receive, send)
            return
        answer = Answer(turn, self._supervisor.tickets, self._speed, receive, send)
        self._open += 1
        try:
            await answer.play(scope)
        finally:
            self._open -= 1
            self._left += not answer.over


class Answer:
    """Carries out the orders of one performance. ``over``: nothing of it is missing, cuts aside."""

    def __init__(self, turn: Turn, tickets: Tickets, speed: float, receive: Receive, send: Send) -> None:
        self.over = False
        self._turn = turn
        self._tickets = tickets
        self._speed = speed
        self._receive = receive
        self._send = send

    async def play(self, scope: Scope) -> None:
        """Until it is over, or the client leaves: then it ends at once."""
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, self._receive, group.cancel_scope)
            await self._wait(self._turn.head_seconds)
            performance = Performance(self._turn.part)
            with closing(performance.orders()) as script:
                if self._turn.stream:
                    await self._stream(script)
                else:
                    await self._whole(script, performance, scope)
            group.cancel_scope.cancel()

    async def _stream(self, script: Iterator[Order]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _sse_headers()})
        for order in script:
            match order:
                case orders.Send(data):
                    await _write(self._send, data)
                case orders.Fail(frames):
                    for frame in frames:
                        await _write(self._send, frame)
                    break
                case orders.Cut(how):
                    await self._drop(how)
                    return
                case _:
                    await self._carry_out(order)
        self.over = True
        await self._send({"type": "http.response.body", "body": b""})

    async def _whole(self, script: Iterator[Order], performance: Performance, scope: Scope) -> None:
        """The answer where no stream was asked for; it takes as long."""
        response: Response | None = None
        for order in script:
            match order:
                case orders.Fail(frames):
                    # Seen live: the error comes as an event stream even here.
                    response = Response(b"".join(frames), media_type="text/event-stream")
                    break
                case orders.Cut(how="limit"):
                    message = "The request took longer than the limit allows."
                    response = _error(504, "DEADLINE_EXCEEDED", message)
                    break
                case orders.Cut(how):
                    await self._drop(how)
                    return
                case _:
                    await self._carry_out(order)
        self.over = True
        await (response or JSONResponse(performance.body()))(scope, self._receive, self._send)

    async def _carry_out(self, order: Order) -> None:
        match order:
            case orders.Offer():
                self._tickets.offer(self._turn.task, order)
            case orders.Wait(seconds):
                await self._wait(seconds)
            case orders.Hold():
                await anyio.sleep_forever()

    async def _wait(self, seconds: float) -> None:
        if math.isinf(seconds):
            await anyio.sleep_forever()
        elif seconds and self._speed:
            await anyio.sleep(seconds / self._speed)

    async def _drop(self, how: str) -> None:
        """Break the connection.

        ASGI has no word for that, so the transport is looked for behind uvicorn's ``receive``; under another
        server the app just returns too early, which servers take as a broken answer.
        """
        self.over = True
        transport = getattr(getattr(self._receive, "__self__", None), "transport", None)
        if transport is None:
            return
        if how == "reset":
            # Closed with a linger time of zero, a socket says RST instead of FIN.
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            transport.abort()
        else:
            transport.close()
        await anyio.sleep_forever()  # until the server tells that the connection is gone


async def _write(send: Send, data: bytes) -> None:
    """One write for each event: the checkpoint keeps the loop from joining two."""
    await send({"type": "http.response.body", "body": data, "more_body": True})
    await anyio.lowlevel.checkpoint()


async def _read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise RefusalError("Request is larger than 16 MB", status=413, code="REQUEST_TOO_LARGE")
        if not message.get("more_body", False):
            return bytes(body)


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _sse_headers() -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-cache"),
        (b"x-request-id", str(uuid.uuid4()).encode()),
    ]


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """Vendor documentation: an error's body is ``{"error_code", "message"}``."""
    return JSONResponse({"error_code": code, "message": message}, status, headers)


def _refused(refusal: RefusalError) -> Response:
    if refusal.text:
        return Response(refusal.text, refusal.status, refusal.headers, media_type="text/html")
    return _error(refusal.status, refusal.code, refusal.message, refusal.headers)


async def _no_route(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    if status == 405:
        return _error(405, "METHOD_NOT_ALLOWED", f"{request.method} is not allowed here.")
    return _error(
        status, "RESOURCE_DOES_NOT_EXIST", f"No API found for '{request.method} {request.url.path}'."
    )


async def _index(supervisor: Supervisor, speed: float, request: Request) -> Response:
    return JSONResponse(
        {
            "simulator": "a scripted supervisor; not a real one",
            "default": supervisor.default.name,
            "speed": speed,
            "routes": ["GET /", "GET /simulator/requests", *(f"POST {path}" for path in ROUTES)],
            "scenarios": {
                name: scenario.description for name, scenario in sorted(supervisor.scenarios.items())
            },
        }
    )
