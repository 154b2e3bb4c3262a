"""Every error that leaves legato, and whose fault it is.

::

    LegatoError                  status, code, message, param, x-should-retry
    ├── ClientFault              the request can't be served as it stands
    │   ├── InvalidRequest       400 invalid_request (names the field)
    │   ├── NotAvailable         400 not_available
    │   ├── LimitNotAllowed      400 limit_not_allowed
    │   ├── OwnerRequired        401 owner_required
    │   ├── TaskEnded            409 task_ended
    │   ├── TaskNotFound         404 task_not_found
    │   ├── BodyTooLarge         413 body_too_large
    │   ├── TooManyTasks         429 too_many_tasks
    │   └── UpgradeRefused       501 upgrade_refused
    ├── UpstreamFault            upstream did something, or nothing
    │   ├── UpstreamUnreachable  502 upstream_unreachable: the request was never sent
    │   ├── UpstreamTimeout      504 upstream_timeout: sent, then silence; outcome unknown
    │   └── UpstreamCut          502 upstream_incomplete: sent, then the connection broke; outcome unknown
    └── OurFault
        ├── Draining             503 draining
        └── LogUnavailable       503 log_unavailable
            └── LogFull          503 log_full
    StaleWriter                  a writer with an old epoch or cursor; never shown to a client
    IllegalMove                  a bug of ours: an input that the state doesn't take

A class exists only where a caller branches on it.
"""

from __future__ import annotations


class LegatoError(Exception):
    """An error with a place in the table of errors.

    ``should_retry`` becomes ``x-should-retry``: official SDKs repeat 409, 503 and 504 by themselves
    unless it says ``false``, so it is true only for a request that was never sent.
    """

    status = 500
    code = "internal_error"
    type = "server_error"
    should_retry = False
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, object]:
        """The JSON body: ``{"error": {"message", "type", "code", "param"}}``."""
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}}


class ClientFault(LegatoError):
    """The caller can mend it."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class InvalidRequest(ClientFault):
    """400; ``param`` names the field."""


class NotAvailable(ClientFault):
    """400: a feature that this version doesn't have yet."""

    code = "not_available"


class LimitNotAllowed(ClientFault):
    """400: a request may tighten a limit, never loosen it."""

    code = "limit_not_allowed"


class OwnerRequired(ClientFault):
    """401: a trusted proxy has named no user."""

    status = 401
    code = "owner_required"


class TaskEnded(ClientFault):
    """409."""

    status = 409
    code = "task_ended"


class TaskNotFound(ClientFault):
    """404: unknown, or another owner's; the answer is the same on purpose."""

    status = 404
    code = "task_not_found"


class BodyTooLarge(ClientFault):
    """413."""

    status = 413
    code = "body_too_large"


class TooManyTasks(ClientFault):
    """429."""

    status = 429
    code = "too_many_tasks"


class UpgradeRefused(ClientFault):
    """501: legato carries HTTP, not WebSocket."""

    status = 501
    code = "upgrade_refused"


class UpstreamFault(LegatoError):
    """Upstream's doing. The message never holds a header's value."""

    status = 502
    type = "upstream_error"


class UpstreamUnreachable(UpstreamFault):
    """No connection was made (refused, DNS, TLS, time-out of the connect): nothing was sent."""

    code = "upstream_unreachable"
    should_retry = True
    retry_after = 1


class UpstreamTimeout(UpstreamFault):
    """Upstream has sent no byte for ``max_silence`` seconds; what it did is unknown."""

    status = 504
    code = "upstream_timeout"


class UpstreamCut(UpstreamFault):
    """The connection broke after the request was sent; what upstream did is unknown."""

    code = "upstream_incomplete"


class OurFault(LegatoError):
    """legato's own trouble."""

    status = 503


class Draining(OurFault):
    """503 while legato shuts down: this request was never sent."""

    code = "draining"
    should_retry = True
    retry_after = 5


class LogUnavailable(OurFault):
    """The log can't be written or read."""

    code = "log_unavailable"


class LogFull(LogUnavailable):
    """The disk, or one task's share of the log, is full."""

    code = "log_full"


class StaleWriter(Exception):
    """Compare-and-append refused: an older epoch, or a cursor that isn't the next one."""


class IllegalMove(Exception):
    """The state machine was given an input that its state doesn't take: a bug."""
