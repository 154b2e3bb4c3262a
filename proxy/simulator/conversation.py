"""The conversation of a request: its items, what they answer, and when two are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .orders import Item

Key = Literal["input", "messages"]
Digest = bytes

# Where an answer stands in the item that answers, by that item's type.
_ANSWERS = {
    "task_continue_response": ("continuation", "continue_request_id"),
    "mcp_approval_response": ("approval", "approval_request_id"),
    "function_call_output": ("client_tool", "call_id"),
    # Nobody writes an answer to a consent request: the user consents elsewhere, and the item comes back.
    "oauth_consent_request": ("authorization", "id"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An item that answers something, and where it stands."""

    index: int
    kind: str
    id: str
    approved: bool


@dataclass(frozen=True)
class Conversation:
    """The items of one request, in order; ``plain`` if it came as one string."""

    key: Key
    items: tuple[Any, ...]
    plain: bool

    @cached_property
    def digests(self) -> tuple[Digest, ...]:
        """One for each item, equal where the items are equal as JSON."""
        return tuple(digest(item) for item in self.items)

    def answers(self) -> Iterator[Answer]:
        """Everything that looks like an answer, in order."""
        for index, item in enumerate(self.items):
            type_ = item.get("type") if isinstance(item, dict) else None
            if isinstance(type_, str) and type_ in _ANSWERS:
                kind, field = _ANSWERS[type_]
                yield Answer(index, kind, str(item.get(field)), item.get("approve") is not False)

    def user_after(self, index: int) -> bool:
        """Whether a user message stands somewhere after this place."""
        return any(is_user(item) for item in self.items[index + 1 :])


def read_conversation(body: Item, key: Key) -> Conversation | None:
    """The conversation under this key; ``None`` if there is none that could be one."""
    value = body.get(key)
    if isinstance(value, str):
        return Conversation(key, ({"role": "user", "content": value},), plain=True)
    if isinstance(value, list) and value:
        return Conversation(key, tuple(value), plain=False)
    return None


def is_user(item: Any) -> bool:
    """Whether a person said it."""
    return isinstance(item, dict) and item.get("role") == "user"


def is_type(item: Any, kind: str) -> bool:
    """Whether it is an item of this type."""
    return isinstance(item, dict) and item.get("type") == kind


def digest(value: Any) -> Digest:
    """Equal for values that are equal as JSON, whatever the order of their members."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()[:16]


def plain_forms(text: Any) -> tuple[Digest, ...]:
    """The items that a conversation given as one string may become in a follow-up."""
    contents = (text, [{"type": "input_text", "text": text}])
    return tuple(
        digest({**start, "role": "user", "content": content})
        for content in contents
        for start in ({}, {"type": "message"})
    )


def is_subsequence(wanted: Iterable[Digest], found: Sequence[Digest]) -> bool:
    """Whether all that is wanted was found, in this order."""
    rest = iter(found)
    return all(item in rest for item in wanted)
