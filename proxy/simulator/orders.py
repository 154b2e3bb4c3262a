"""What a performance asks the server to do, and the two things that can come between.

A performance decides and can't act: it is an iterator of orders, and time is a number in them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from .scenario import CutFault, ErrorFault, SilenceFault, Step

Item = dict[str, Any]
BodyFault = ErrorFault | CutFault | SilenceFault


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing on the wire for so many scripted seconds; ``inf``: until the client leaves."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the body open until the client leaves."""


@dataclass(frozen=True, slots=True)
class Send:
    """One event, in one write."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Offer:
    """Write down what is about to be handed out: a request may come back with its answer.

    ``before`` are the cycle's finished items so far, as sent.
    """

    kind: Literal["continuation", "approval", "client_tool", "authorization"]
    id: str
    item: Item
    before: tuple[Item, ...]
    cycle: int
    step: Step | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The stream ends in these frames; where no stream was asked for, they are the whole answer."""

    frames: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection breaks. ``limit``: because the response took longer than upstream allows."""

    how: Literal["fin", "reset", "limit"]


Order = Wait | Hold | Send | Offer | Fail | Cut
Script = Generator[Order, None, None]


def limited(orders: Iterable[Order], limit: float) -> Script:
    """The orders until the scripted clock passes the limit on one response."""
    clock = 0.0
    for order in orders:
        if isinstance(order, Wait):
            if clock + order.seconds > limit:
                yield Wait(limit - clock)
                yield Cut("limit")
                return
            clock += order.seconds
        yield order


def faulty(orders: Iterable[Order], fault: BodyFault, failure: Callable[[ErrorFault], Fail]) -> Script:
    """The orders until the fault strikes, after ``fault.after`` events; ``failure`` makes its frames."""
    sent = 0
    for order in orders:
        if isinstance(order, Send):
            if sent == fault.after:
                match fault:
                    case ErrorFault():
                        yield failure(fault)
                        return
                    case CutFault(how="end"):
                        return
                    case CutFault(how="reset"):
                        yield Cut("reset")
                        return
                    case CutFault():
                        yield Cut("fin")
                        return
                    case SilenceFault():
                        yield Wait(fault.seconds)
            sent += 1
        yield order
