"""Whether a request goes on with a task, and whether it does so in the right form.

How a follow-up must look is what vendor documentation shows (the request item, as it came, and directly
after it the response that names it), and what was seen live of approvals: the supervisor keeps nothing, so
the conversation must be all there. A real one may be more patient; this one is not, so that a client's
mistake shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .conversation import Answer, Conversation, Digest, digest, is_subsequence, is_type, is_user
from .tickets import SentCycle, Task, Ticket, Tickets, original_forms

SEQUENCE = "Invalid message sequence."  # seen live


class RefusalError(Exception):
    """An answer with a status other than 200; ``text`` is a body in place of the JSON one."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "INVALID_PARAMETER_VALUE",
        task: Task | None = None,
        headers: Mapping[str, str] | None = None,
        text: str = "",
    ) -> None:
        super().__init__(message)
        # It may quote half a character that a client had escaped, which can't be written again.
        self.message = message.encode("utf-8", "replace").decode()
        self.status = status
        self.code = code
        self.task = task
        self.headers = dict(headers or {})
        self.text = text


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A request that goes on with a task: what it answers, all of the newest answer's cycle."""

    conversation: Conversation
    newest: Ticket
    answers: tuple[tuple[Answer, Ticket], ...]

    @property
    def asked(self) -> tuple[tuple[Answer, Ticket], ...]:
        """The answers of a person or a client among them."""
        return tuple(pair for pair in self.answers if pair[1].kind != "continuation")


def find_follow_up(conversation: Conversation, tickets: Tickets) -> FollowUp | None:
    """What this request goes on with; ``None`` for the first request of a new task."""
    newest = _newest(conversation, tickets)
    if newest is None:
        return None
    found = [(answer, tickets.find(answer)) for answer in conversation.answers()]
    same = tuple(
        (answer, ticket)
        for answer, ticket in found
        if ticket and ticket.task is newest.task and ticket.cycle == newest.cycle
    )
    # An approval that was answered in an earlier request is only history by now.
    fresh = tuple(pair for pair in same if pair[1].kind == "continuation" or _may_answer(pair[1]))
    return FollowUp(conversation, newest, fresh)


def _newest(conversation: Conversation, tickets: Tickets) -> Ticket | None:
    for answer in reversed(list(conversation.answers())):
        ticket = tickets.find(answer)
        history = conversation.user_after(answer.index)
        if ticket:
            if ticket.answered and history:
                return None
            return ticket
        if answer.kind == "continuation":
            raise RefusalError(f"Unknown continue_request_id: {answer.id}")
        if answer.kind == "approval" and not history:
            raise RefusalError(f"Unknown approval_request_id: {answer.id}")
    return None


def check_follow_up(follow_up: FollowUp, *, long_task: bool) -> None:
    """Raise a refusal unless the form is right."""
    task = follow_up.newest.task
    try:
        _check_answered(follow_up)
        start = 0 if follow_up.asked else _check_original(follow_up.conversation, task)
        _check_pairs(follow_up, start)
        _check_asked(follow_up)
        if follow_up.newest.kind == "continuation" and not long_task:
            raise RefusalError("databricks_options.long_task must be true in a request that continues a task")
        if not follow_up.asked:
            _check_replay(follow_up, start)
    except RefusalError as refusal:
        refusal.task = task
        raise


def take_over(follow_up: FollowUp) -> None:
    """Note that the client wrote the whole conversation itself, as whoever answers an approval does."""
    task, conversation = follow_up.newest.task, follow_up.conversation
    items = list(conversation.items)
    while len(items) > 1 and is_type(items[-1], "task_continue_response"):
        del items[-2:]
    task.original = original_forms(Conversation(conversation.key, tuple(items), plain=False))
    task.base = follow_up.newest.cycle


def _may_answer(ticket: Ticket) -> bool:
    return not ticket.answered or ticket.task.scenario.resend == "accept"


def _check_answered(follow_up: FollowUp) -> None:
    if not _may_answer(follow_up.newest):
        raise RefusalError(f"{follow_up.newest.id} was answered before, and can be answered once only")


def _check_original(conversation: Conversation, task: Task) -> int:
    """The number of items that the original conversation has."""
    found = conversation.digests[: len(task.original)]
    if len(found) < len(task.original) or any(
        mark not in forms for mark, forms in zip(found, task.original, strict=True)
    ):
        raise RefusalError("The request must begin with the original conversation, unchanged")
    return len(task.original)


def _check_pairs(follow_up: FollowUp, start: int) -> None:
    """Each response has its request directly before it, and each request its response behind it."""
    conversation, task = follow_up.conversation, follow_up.newest.task
    items, marks = conversation.items, conversation.digests
    answered = set()
    for index in range(start, len(items)):
        if is_type(items[index], "task_continue_response"):
            ticket_id = str(items[index].get("continue_request_id"))
            request = task.continuation(ticket_id)
            if request is None and follow_up.asked:
                continue  # history of the client's, from another task
            if request is None:
                raise RefusalError(f"{ticket_id} belongs to no cycle of this task")
            if index == start or marks[index - 1] != request:
                raise RefusalError(
                    f"The task_continue_request of {ticket_id} must stand, as sent, before its response"
                )
            answered.add(ticket_id)
    for index in range(start, len(items)):
        if is_type(items[index], "task_continue_request") and items[index].get("id") not in answered:
            raise RefusalError(f"No task_continue_response for {items[index].get('id')}")
    for ticket_id in task.sent[follow_up.newest.cycle].continuations:
        if ticket_id not in answered:
            raise RefusalError(f"No task_continue_response for {ticket_id}")


def _check_asked(follow_up: FollowUp) -> None:
    """An answer without what it answers is refused; seen live for approvals."""
    items = follow_up.conversation.items
    for answer, ticket in follow_up.asked:
        kind, key = {
            "approval": ("mcp_approval_request", "id"),
            "client_tool": ("function_call", "call_id"),
            "authorization": ("oauth_consent_request", "id"),
        }[ticket.kind]
        if not any(is_type(item, kind) and item.get(key) == answer.id for item in items):
            raise RefusalError(SEQUENCE)


def _check_replay(follow_up: FollowUp, start: int) -> None:
    """The form that this scenario wants of what follows the original conversation."""
    task = follow_up.newest.task
    marks = [
        mark
        for mark, item in zip(follow_up.conversation.digests, follow_up.conversation.items, strict=True)
        if not is_user(item)
    ]
    # People may add messages anywhere, so what is left of the original is counted without them too.
    original = sum(not is_user(item) for item in follow_up.conversation.items[:start])
    added = marks[original:]
    match task.scenario.replay:
        case "last_pair":
            right = added == _pairs([task.sent[follow_up.newest.cycle]])
        case "all_pairs":
            right = added == _pairs(task.shown())
        case "all_items":
            wanted = dict.fromkeys(mark for cycle in task.shown() for mark in cycle.items)
            right = is_subsequence(wanted, added)
        case "any":
            right = True
    if not right:
        raise RefusalError(SEQUENCE)


def _pairs(cycles: Iterable[SentCycle]) -> Sequence[Digest]:
    pairs: list[Digest] = []
    for cycle in cycles:
        for ticket_id, request in cycle.continuations.items():
            response = {"type": "task_continue_response", "continue_request_id": ticket_id}
            pairs += (request, digest(response))
    return pairs
