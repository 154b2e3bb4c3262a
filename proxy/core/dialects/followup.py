"""What legato sends: the client's own body, spliced, and nothing else changed.

Which earlier items a supervisor wants to see again is not documented; three forms are in use by public
clients, so there are three policies, and ``auto`` finds out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proxy.core.dialects import responses as dialect
from proxy.core.ledger import Item
from proxy.core.splice import Editor, extend

Replay = Literal["all_items", "all_pairs", "last_pair"]
POLICIES: tuple[Replay, ...] = ("all_items", "all_pairs", "last_pair")
KEYS = ("input", "messages")

# Upstream texts that name the follow-up's form as what is wrong with it (seen live, or in public code).
_FORM = ("invalid message sequence", "not supported", "invalid type", "unknown item type", "unknown type")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the client's body says that the task must know.

    ``declared``: tools the client runs itself; ``answered``: actions that its items answer; ``continued``:
    continuations that they answer.
    """

    key: str
    declared: frozenset[str]
    answered: frozenset[str]
    continued: frozenset[str]
    streams: bool
    long_task: object


def read(body: dict[str, Any]) -> Conversation:
    """Look at a request's body, already parsed."""
    key = "messages" if "input" not in body and "messages" in body else "input"
    given = body.get(key)
    items = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
    options = body.get("databricks_options")
    return Conversation(
        key=key,
        declared=frozenset(_declared(body.get("tools"))),
        answered=frozenset(id_ for item in items if (id_ := dialect.answers(item)) is not None),
        continued=frozenset(
            id_
            for item in items
            if item.get("type") == dialect.CONTINUE_RESPONSE
            and isinstance(id_ := item.get("continue_request_id"), str)
        ),
        streams=body.get("stream") is True,
        long_task=options.get("long_task") if isinstance(options, dict) else None,
    )


def _declared(tools: object) -> Iterable[str]:
    """Names of function tools, in the flat form and in the one nested under ``function``."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type") == "function":
            inner = tool.get("function")
            name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
            if isinstance(name, str):
                yield name


def first_body(raw: bytes, *, force: bool = False) -> bytes:
    """The first request: the client's bytes, without what is legato's own; upstream always streams."""
    editor = Editor(raw.decode())
    editor.remove("legato")
    if editor.raw("background") == "true":
        editor.remove("background")
    if editor.raw("stream") != "true":
        editor.set(("stream",), "true")
    if force:
        _set_long_task(editor)
    return editor.result().encode()


def with_pairs(raw: bytes, conversation: Conversation, items: Sequence[Item]) -> bytes:
    """The client's body with these continuations and their answers at the end of its conversation."""
    editor = Editor(raw.decode())
    pairs = [text for item in items for text in (item.raw, answer(item))]
    editor.set((conversation.key,), extend(_as_array(editor.raw(conversation.key)), pairs))
    return editor.result().encode()


def follow_up(
    raw: bytes, conversation: str, key: str, items: Sequence[Item], replay: str, *, long_task: bool
) -> bytes:
    """The body that answers the newest cycle's continuations.

    ``conversation`` is the key that the client used, ``key`` the one to send it under; ``items`` are the
    finished items of all cycles in order, continuations among them.
    """
    editor = Editor(raw.decode())
    editor.remove("legato")
    editor.remove("background")
    whole = extend(_as_array(editor.raw(conversation)), _added(items, replay))
    if key != conversation and editor.raw(conversation) is not None:
        editor.remove(conversation)
    editor.set((key,), whole)
    if editor.raw("stream") != "true":
        editor.set(("stream",), "true")
    if long_task and editor.raw("databricks_options", "long_task") != "true":
        _set_long_task(editor)
    return editor.result().encode()


def answer(item: Item) -> str:
    """The response item for a continuation; its id keeps the bytes in which it came."""
    id_ = Editor(item.raw).raw("id")
    return f'{{"type":"{dialect.CONTINUE_RESPONSE}","continue_request_id":{id_}}}'


def _added(items: Sequence[Item], replay: str) -> list[str]:
    newest = max((item.cycle for item in items if item.is_continuation), default=0)
    added: list[str] = []
    for item in items:
        if item.is_continuation:
            if replay != "last_pair" or item.cycle == newest:
                added += (item.raw, answer(item))
        elif replay == "all_items":
            added.append(item.raw)
    return added


def _as_array(conversation: str | None) -> str:
    """The conversation as a list: a plain string is one user message, anything else its one element."""
    if conversation is None or conversation == "null":
        return "[]"
    if conversation.startswith('"'):
        return f'[{{"role":"user","content":{conversation}}}]'
    return conversation if conversation.startswith("[") else f"[{conversation}]"


def _set_long_task(editor: Editor) -> None:
    if editor.raw("databricks_options", "long_task") == "true":
        return
    options = editor.raw("databricks_options")
    if options is not None and options.startswith("{"):
        editor.set(("databricks_options", "long_task"), "true")
    else:
        editor.set(("databricks_options",), '{"long_task":true}')


def proves(items: Sequence[Item], replay: str) -> bool:
    """Whether a follow-up that upstream took says that this policy is right, and not a smaller one too.

    With one continuation so far all pairs are the last pair; with no other items they are all items.
    """
    rest = POLICIES[POLICIES.index(replay) + 1 :] if replay in POLICIES else ()
    added = _added(items, replay)
    return all(_added(items, smaller) != added for smaller in rest)


def next_form(replay: str, key: str, text: str, *, key_tried: bool) -> tuple[str, str] | None:
    """Another replay policy or key to try after a 400 whose text is ``text``; None if it is final.

    The vendor's own page shows ``messages`` where live endpoints answer 'field is not supported. Please use
    'input' field instead'; so a text that names the other key is about the key, not about the policy.
    """
    lowered = text.lower()
    other = KEYS[1 - KEYS.index(key)]
    if f"'{other}'" in lowered or f'"{other}"' in lowered or f"`{other}`" in lowered:
        return None if key_tried else (replay, other)
    if not any(phrase in lowered for phrase in _FORM):
        return None
    return smaller(replay, key)


def smaller(replay: str, key: str) -> tuple[str, str] | None:
    """The next smaller policy, if there is one."""
    at = POLICIES.index(replay) + 1 if replay in POLICIES else len(POLICIES)
    return (POLICIES[at], key) if at < len(POLICIES) else None
