"""The ``responses`` dialect: supervisor endpoints and everything else shaped like OpenAI's Responses API.

Protocol facts and where they come from:

- The pause is an item ``{"type": "task_continue_request", "id", "step"}`` in ``response.output_item.done``;
  the answer is ``{"type": "task_continue_response", "continue_request_id"}`` (vendor documentation).
- Supervisors may send no ``response.created``, no numbers, and end with ``[DONE]`` alone (public clients).
- Errors come inside a 200 in five forms, one of them with neither ``type`` nor ``error`` (public clients).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NamedTuple

from proxy.core.splice import loads
from proxy.core.sse import Frame

CONTINUE_REQUEST = "task_continue_request"
CONTINUE_RESPONSE = "task_continue_response"
APPROVAL = "mcp_approval_request"
AUTHORIZATION = "oauth_consent_request"
CALL = "function_call"
CALL_OUTPUT = "function_call_output"


class Kind(Enum):
    """What a frame is to the stitcher."""

    OPENING = auto()
    ADDED = auto()
    ITEM = auto()
    PART = auto()
    TERMINAL = auto()
    FAILURE = auto()
    UNTYPED = auto()
    OPAQUE = auto()
    DONE = auto()


_KINDS = {
    "response.created": Kind.OPENING,
    "response.queued": Kind.OPENING,
    "response.in_progress": Kind.OPENING,
    "response.output_item.added": Kind.ADDED,
    "response.output_item.done": Kind.ITEM,
    "response.completed": Kind.TERMINAL,
    "response.incomplete": Kind.TERMINAL,
    "response.cancelled": Kind.TERMINAL,
    "response.failed": Kind.FAILURE,
    "response.error": Kind.FAILURE,
    "error": Kind.FAILURE,
}

_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE).fullmatch


class Seen(NamedTuple):
    """A frame, understood as far as it can be. ``body`` is its JSON object, if it is one."""

    kind: Kind
    type: str | None
    body: dict[str, Any]

    @property
    def item(self) -> dict[str, Any] | None:
        """The item of an added or done event."""
        item = self.body.get("item")
        return item if isinstance(item, dict) else None

    @property
    def response(self) -> dict[str, Any] | None:
        """The response object that openings and endings carry."""
        response = self.body.get("response")
        return response if isinstance(response, dict) else None


_NOTHING: dict[str, Any] = {}


def classify(frame: Frame) -> Seen:
    """By the data's own ``type``, never by the ``event:`` line."""
    data = frame.data
    if data[:6] == b"[DONE]" and data.strip() == b"[DONE]":
        return Seen(Kind.DONE, None, _NOTHING)
    try:
        body = loads(data)
    except ValueError:
        kind = Kind.DONE if data.strip() == b"[DONE]" else Kind.OPAQUE
        return Seen(kind, None, _NOTHING)
    if type(body) is not dict:
        return Seen(Kind.OPAQUE, None, _NOTHING)
    type_ = body.get("type")
    if type(type_) is not str:
        type_ = None
    if body.get("error") is not None or body.get("error_code") is not None:
        return Seen(Kind.FAILURE, type_, body)
    if type_ is None:
        return Seen(Kind.UNTYPED, None, body)
    kind = _KINDS.get(type_, Kind.PART)
    if kind in (Kind.ADDED, Kind.ITEM) and type(body.get("item")) is not dict:
        kind = Kind.PART
    return Seen(kind, type_, body)


def starts_response(seen: Seen) -> bool:
    """A second one of these means that another response has begun, whether or not the first ended."""
    return seen.type == "response.created"


def ends_held_terminal(seen: Seen) -> bool:
    """A frame of this kind behind a terminal event says that the terminal was an inner one."""
    return seen.type is not None and seen.type.startswith("response.")


def ending_of(seen: Seen) -> tuple[str, str | None]:
    """``("completed", None)``, or ``("incomplete", upstream's reason)``, for a terminal event."""
    if seen.type == "response.completed":
        return "completed", None
    details = (seen.response or {}).get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    if seen.type == "response.cancelled":
        reason = reason or "cancelled"
    return "incomplete", str(reason) if reason else None


def response_id(seen: Seen) -> tuple[str | None, bool]:
    """The response id that an event names, and whether it stands where nothing else can (``response.id``).

    A tool output's event may carry a bare UUID of its own at the top (raw capture in a public client):
    that is no response id.
    """
    inner = (seen.response or {}).get("id")
    if isinstance(inner, str) and inner:
        return inner, True
    outer = seen.body.get("id")
    if not isinstance(outer, str) or not outer:
        return None, False
    item = seen.item
    kind = seen.type if item is None else item.get("type")
    if isinstance(kind, str) and kind.endswith("_output") and _UUID(outer):
        return None, False
    return outer, False


def tells_of_ids(seen: Seen) -> bool:
    """Whether the ledger learns more from an event than its step and that its item's id is used."""
    return seen.kind is not Kind.PART or seen.type == CALL_OUTPUT


def step_of(seen: Seen) -> int | None:
    """``step`` on the event, else on its item: tool-call steps done so far (vendor documentation)."""
    step = seen.body.get("step")
    if step is None and seen.item is not None:
        step = seen.item.get("step")
    return step if type(step) is int and step >= 0 else None


def time_of(created: object) -> str | None:
    """``created_at`` as JSON text, if it is a number that has one."""
    if type(created) is float and abs(created) < float("inf"):
        return repr(created)
    return str(created) if type(created) is int else None


def is_continuation(item: dict[str, Any]) -> bool:
    """Whether an item asks to go on."""
    return item.get("type") == CONTINUE_REQUEST


def type_of(item: dict[str, Any]) -> str | None:
    """An item's type, if it says one."""
    type_ = item.get("type")
    return type_ if isinstance(type_, str) else None


def answered_type(type_: str | None) -> str | None:
    """The type of the calls that an output of this type answers."""
    return type_.removesuffix("_output") if type_ is not None and type_.endswith("_output") else None


def same_family(one: str | None, other: str | None) -> bool:
    """Whether two item types may share an id: a call and its output do, and mean no collision."""
    if one is None or other is None or one == other:
        return False
    return one == f"{other}_output" or other == f"{one}_output"


# Where in a finished item the text of a delta stands: member, index key on the event, member of the part.
_DELTAS: dict[str, tuple[str, str | None, str | None]] = {
    "response.output_text": ("content", "content_index", "text"),
    "response.refusal": ("content", "content_index", "refusal"),
    "response.reasoning_text": ("content", "content_index", "text"),
    "response.reasoning_summary_text": ("summary", "summary_index", "text"),
    "response.function_call_arguments": ("arguments", None, None),
    "response.mcp_call_arguments": ("arguments", None, None),
    "response.custom_tool_call_input": ("input", None, None),
}


class Said(NamedTuple):
    """What a part event says of its item: a piece of text at a place, or the whole text of that place."""

    place: tuple[str, int]
    text: str
    whole: bool


def said_by(seen: Seen) -> Said | None:
    """What a part event says, where it is of a kind that can be compared."""
    base, _, last = (seen.type or "").rpartition(".")
    where = _DELTAS.get(base)
    if where is None or last not in ("delta", "done"):
        return None
    member, index_key, part = where
    text = seen.body.get("delta" if last == "delta" else part or member)
    index = seen.body.get(index_key, 0) if index_key else 0
    if not isinstance(text, str) or type(index) is not int:
        return None
    return Said((base, index), text, last == "done")


def adds_text(seen: Seen) -> bool:
    """Whether a part event is a piece of text, which no finished item gets any more of."""
    return (seen.type or "").endswith(".delta") and said_by(seen) is not None


def text_at(item: dict[str, Any], place: tuple[str, int]) -> str | None:
    """The text that a finished item has at a place; None where it has none to compare."""
    member, index_key, part = _DELTAS[place[0]]
    value = item.get(member)
    if index_key is not None and part is not None:
        if not isinstance(value, list) or not 0 <= place[1] < len(value):
            return None
        value = value[place[1]].get(part) if isinstance(value[place[1]], dict) else None
    return value if isinstance(value, str) else None


def may_leave_out(item: dict[str, Any], place: tuple[str, int]) -> bool:
    """Whether a finished item that has no text at a place can have had deltas there: reasoning can."""
    return item.get("type") == "reasoning" and place[0].startswith("response.reasoning")


def same_item(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Word for word the same, but for the id and a status."""
    return {k: v for k, v in one.items() if k not in ("id", "status")} == {
        k: v for k, v in other.items() if k not in ("id", "status")
    }


def begins_like(begun: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether an item that was only begun can still become the known one."""
    return all(begun.get(key) == known.get(key) for key in ("type", "name", "role", "call_id"))


class Action(NamedTuple):
    """Something only a person or the client can give."""

    kind: str
    id: str
    name: str | None
    arguments: str | None
    cursor: int | None


def action_of(
    item: Callable[[], dict[str, Any]],
    type_: str | None,
    cursor: int | None,
    declared: frozenset[str],
    authorization: frozenset[str],
) -> Action | None:
    """The action that an item asks for; None for one that nobody must answer.

    A hosted tool's call also appears as ``function_call``; only names that the request declared are the
    client's to run (vendor documentation). ``item`` is asked only where its type may need an answer.
    """
    if type_ == APPROVAL:
        kind, id_key = "approval", "id"
    elif type_ == AUTHORIZATION or type_ in authorization:
        kind, id_key = "authorization", "id"
    elif type_ == CALL and declared:
        kind, id_key = "client_tool", "call_id"
    else:
        return None
    body = item()
    name, id_, arguments = body.get("name"), body.get(id_key), body.get("arguments")
    if kind == "client_tool" and not (isinstance(name, str) and name in declared):
        return None
    return Action(
        kind,
        id_ if isinstance(id_, str) else "",
        name if isinstance(name, str) else None,
        arguments if isinstance(arguments, str) else None,
        cursor,
    )


def answers(item: dict[str, Any]) -> str | None:
    """The id of the action that an item answers: an approval's, or a call's output."""
    type_ = item.get("type")
    if type_ == "mcp_approval_response":
        value = item.get("approval_request_id")
    elif isinstance(type_, str) and type_.endswith("_output"):
        value = item.get("call_id")
    else:
        # Some tools report on the approved call itself.
        value = item.get("approval_request_id") if type_ == "mcp_call" else None
    return value if isinstance(value, str) else None
