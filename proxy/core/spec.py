"""What a task's request and the settings fix once and for all."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.core.dialects import followup
from proxy.core.dialects.responses import Action
from proxy.core.rules import Limits


@dataclass(frozen=True, slots=True)
class Carried:
    """What a task takes over from the one that waited for its answer.

    ``continued``: ids of the continuations that its first request answers; ``actions``: those of the old
    task's that are still open; ``cycles``: how many were used before.
    """

    continues: str | None = None
    continued: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    cycles: int = 0


@dataclass(frozen=True, slots=True)
class Spec:
    """What a task's request and the settings fix once and for all.

    ``form``: replay policy and conversation key to begin with; ``proven``: whether this form is known to
    work for the endpoint; ``auto``: whether another one may be tried. Times in seconds, sizes in bytes.
    """

    task_id: str
    body: bytes = field(repr=False)
    conversation: followup.Conversation
    request_note: bytes = field(default=b"{}", repr=False)
    force: bool = False
    auto: bool = True
    form: tuple[str, str] = ("all_items", "input")
    proven: bool = False
    limits: Limits = field(default_factory=Limits)
    seam_grace: float = 0.5
    retry_budget: float = 120.0
    body_limit: int | None = None
    max_frame: int = 8 * 1024 * 1024
    max_log: int = 256 * 1024 * 1024
    authorization: frozenset[str] = frozenset()
    carried: Carried = Carried()

    @property
    def own_response_id(self) -> str:
        """The id of legato's own events where upstream gave none."""
        return "resp_" + self.task_id.removeprefix("task_")
