"""Is a later cycle's item the same one again, or another one under a used id?

After a resume an upstream may send items again that the client already has, and it may use ids again for
something else; nothing on the wire tells which. So such an item is held back as long as it says word for
word what a finished one said. Equal to the end, it is a repeat and dropped; at the first difference it is
let go under a new id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from proxy.core.dialects import responses as dialect
from proxy.core.dialects.responses import Kind, Seen
from proxy.core.ledger import Item, Ledger
from proxy.core.sse import Frame

# What may be held of one item before it is let go unjudged: as much as one frame may hold.
MAX_HELD = 8 * 1024 * 1024


class Verdict(Enum):
    """What a held item turned out to be."""

    SAME_SO_FAR = auto()
    REPEAT = auto()
    DIFFERENT = auto()


@dataclass(slots=True)
class Slot:
    """One item of the cycle in flight, from its first event on.

    ``against``: the finished items that it may still be a repeat of; empty once it is shown.
    """

    index: int | None = None
    renames: dict[str, str] = field(default_factory=dict)
    against: list[Item] = field(default_factory=list)
    held: list[tuple[Frame, Seen]] = field(default_factory=list)
    held_bytes: int = 0
    heard: dict[tuple[str, int], int] = field(default_factory=dict)
    dropped: bool = False
    closed: bool = False

    def hold(self, frame: Frame, seen: Seen) -> Verdict:
        """Keep one more event back, and say what the item is, as far as that can be told."""
        self.held.append((frame, seen))
        self.held_bytes += len(frame.raw)
        said = dialect.said_by(seen) if seen.kind is Kind.PART else None
        offset = 0
        if said is not None and not said.whole:
            offset = self.heard.get(said.place, 0)
            self.heard[said.place] = offset + len(said.text)
        self.against = [item for item in self.against if _agrees(item, seen, said, offset)]
        if not self.against or self.held_bytes > MAX_HELD:
            return Verdict.DIFFERENT
        return Verdict.REPEAT if seen.kind is Kind.ITEM else Verdict.SAME_SO_FAR


def _agrees(item: Item, seen: Seen, said: dialect.Said | None, offset: int) -> bool:
    known = item.body()
    if seen.kind is Kind.ITEM:
        return dialect.same_item(known, seen.body["item"])
    if seen.kind is Kind.ADDED:
        return dialect.begins_like(seen.body["item"], known)
    if said is None:
        return True
    text = dialect.text_at(known, said.place)
    if text is None:
        return dialect.may_leave_out(known, said.place)
    return text == said.text if said.whole else text.startswith(said.text, offset)


def namesakes(ledger: Ledger, id_: str | None, call_id: str | None, type_: str | None) -> list[Item]:
    """The finished items that this id, or this call id under the same type, belonged to."""
    found = [
        item
        for item in ledger.by_id.get(id_ or "", ())
        if type_ is None or not dialect.same_family(item.type, type_)
    ]
    if call_id is not None:
        found += [item for item in ledger.by_call.get((type_, call_id), ()) if item not in found]
    return found
