"""Many cycles, one stream: openings dropped, numbers and ids made one, exactly one ending.

The rules, in the order in which a frame meets them:

1. Behind a failure nothing typed is shown any more; untyped frames and ``[DONE]`` still pass.
2. A terminal event is held. What decides about it: another ``response.*`` frame (it was an inner one, and
   another *segment* begins), ``[DONE]``, the end of the body, or ``seam_grace``. Untyped frames wait behind.
3. The continuation's item is never shown.
4. The first segment goes out as it came but for its numbers. In later ones openings are dropped, the
   response id, ``output_index`` and ``event:`` lines follow the first, and items whose id was used before
   are held, dropped or renamed (``repeats.py``).
5. What is shown gets the next cursor as its ``sequence_number``, and is entered into the ledger; what the
   stream hides becomes a note, so that reading the log gives the same ledger.

A *segment* is one upstream response; a cycle has one, or several where upstream relays inner ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from proxy.core.dialects import responses as dialect
from proxy.core.dialects.responses import Kind, Seen
from proxy.core.ledger import Item, Ledger, make_item
from proxy.core.merge import merged
from proxy.core.messages import Event, Note, Record
from proxy.core.repeats import Slot, Verdict, namesakes
from proxy.core.splice import Editor, dumps, loads, raw_elements, set_number, set_string
from proxy.core.sse import Frame


@dataclass(frozen=True, slots=True)
class Ending:
    """How a cycle came out: ``none``, ``failed``, ``continue``, ``completed`` or ``incomplete``."""

    kind: str
    reason: str | None = None


@dataclass(slots=True)
class Segment:
    """One upstream response in flight."""

    first: bool
    ids: set[str] = field(default_factory=set)
    firm: bool = False
    openings: set[str] = field(default_factory=set)
    slots: dict[tuple[str, object], Slot] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)
    finished: list[Item] = field(default_factory=list)


class Stitch:
    """One cycle's frames, made part of the task's stream.

    ``feed`` appends records to ``out``, which the caller empties. ``protected`` are the names of tools that
    the client runs itself: their call ids never change; nor do the ids of items of the types that
    ``authorization`` adds to those that people answer.
    """

    def __init__(
        self,
        ledger: Ledger,
        out: list[Record],
        protected: frozenset[str] = frozenset(),
        authorization: frozenset[str] = frozenset(),
    ) -> None:
        self.ledger = ledger
        self.out = out
        self.protected = protected
        self.answered_by_id = authorization | {dialect.APPROVAL, dialect.AUTHORIZATION}
        self.segment = Segment(first=ledger.segments == 0)
        self.terminal: tuple[Frame, Seen] | None = None
        self.behind: list[tuple[Frame, Seen]] = []
        self.continuations: list[Item] = []
        self.failure: tuple[Frame, Seen] | None = None
        self.over = False
        self.settled = False
        self.opaque = 0

    @property
    def waiting(self) -> bool:
        """Whether there is an ending that only the rest of the body could still change."""
        return self.terminal is not None or bool(self.continuations) or self.failure is not None

    def feed(self, frame: Frame) -> None:
        """Take one frame."""
        if self.over:
            return
        seen = dialect.classify(frame)
        kind = seen.kind
        if kind is Kind.DONE:
            self._done(frame)
        elif self.failure is not None:
            if seen.type is None:
                self._show(frame, seen)
        elif kind is Kind.FAILURE:
            self._fail(frame, seen)
        else:
            if self.terminal is not None:
                if not dialect.ends_held_terminal(seen):
                    self.behind.append((frame, seen))
                    return
                self._next_segment()
            self._take(frame, seen)

    def _take(self, frame: Frame, seen: Seen) -> None:
        kind = seen.kind
        if kind is Kind.PART and self.segment.first and not self.segment.slots:
            self._show_plain(frame, seen)
        elif kind is Kind.OPENING:
            self._opening(frame, seen)
        elif kind is Kind.TERMINAL:
            self._note_ids(seen)
            self.terminal = (frame, seen)
        elif kind in (Kind.ADDED, Kind.ITEM) and dialect.is_continuation(seen.body["item"]):
            self._continuation(frame, seen)
        elif seen.type is None:
            self.opaque += kind is Kind.OPAQUE
            self._show(frame, seen)
        else:
            self._part(frame, seen)

    # --- openings, endings ------------------------------------------------------------------------

    def _opening(self, frame: Frame, seen: Seen) -> None:
        segment = self.segment
        if dialect.starts_response(seen) and seen.type in segment.openings:
            self._next_segment()
            segment = self.segment
        self._note_ids(seen)
        if segment.first and seen.type not in segment.openings:
            self._show(frame, seen)
        segment.openings.add(seen.type or "")

    def _next_segment(self) -> None:
        """The terminal that is held was an inner one."""
        self._settle()
        self._flush_behind()
        self.segment = Segment(first=False)
        self.terminal = None
        self.settled = False

    def _done(self, frame: Frame) -> None:
        if self.ledger.done is None:
            self._tell(Note("done", frame.raw))
        self.over = True

    def _fail(self, frame: Frame, seen: Seen) -> None:
        """An error is the task's terminal event; a held terminal before it no longer counts."""
        self._note_ids(seen)
        self.terminal = None
        self._flush_behind()
        self.failure = (frame, seen)
        if seen.response is not None and not self._alone:
            self._settle()
            self._show(frame, seen, merge=True)
        else:
            self._show(frame, seen)
            self._settle()

    def finish(self) -> Ending:
        """No frame will follow; says how the cycle came out. The terminal is still held."""
        self._settle()
        if self.failure is not None:
            return Ending("failed")
        if self.terminal is not None:
            kind, reason = dialect.ending_of(self.terminal[1])
            if kind != "completed":
                return Ending(kind, reason)
        if self.continuations:
            return Ending("continue")
        if self.terminal is not None or self.over:
            return Ending("completed")
        return Ending("none")

    def release(self, *, terminal: bool) -> bool:
        """Show the held terminal (or drop it), then what waited behind; whether one was shown."""
        shown = terminal and self.terminal is not None
        if shown and self.terminal is not None:
            self._show(*self.terminal, merge=not self._alone)
        self.terminal = None
        self._flush_behind()
        return shown

    @property
    def _alone(self) -> bool:
        """Whether the task has had this one segment, all of it shown: its terminal keeps its bytes."""
        return self.segment.first and not self.continuations

    def _flush_behind(self) -> None:
        for frame, seen in self.behind:
            self._show(frame, seen)
        self.behind = []

    def _settle(self) -> None:
        """This response is over: enter what only its terminal tells."""
        if self.settled:
            return
        self.settled = True
        last = self.failure or self.terminal
        response = (last[1].response if last is not None else None) or {}
        if last is not None and isinstance(response.get("output"), list):
            self._terminal_items(last[0])
        usage, created = response.get("usage"), response.get("created_at")
        facts = {
            "usage": usage if isinstance(usage, dict) else None,
            "response_id": response.get("id") if isinstance(response.get("id"), str) else None,
            "created_at": dialect.time_of(created),
            "model": response.get("model") if isinstance(response.get("model"), str) else None,
        }
        self._tell(Note("segment", dumps(facts).encode()))

    def _terminal_items(self, frame: Frame) -> None:
        """Items that only the terminal lists count too; of continuations those that no event carried."""
        unmatched = list(self.segment.finished)
        for raw in raw_elements(Editor(frame.data.decode()).raw("response", "output") or "[]"):
            body = loads(raw.encode())
            if not isinstance(body, dict):
                continue
            item = make_item(raw, raw, body, self.ledger.cycle, None)
            match = next((done for done in unmatched if _same(done, item)), None)
            if match is not None:
                unmatched.remove(match)
            elif item.is_continuation and item.id in self.ledger.answered:
                continue  # the history, told again; only an event can ask anew
            elif item.is_continuation or self.segment.first:
                self._hide(item, {})
            else:
                self._late_item(item, body)

    def _late_item(self, item: Item, body: dict[str, Any]) -> None:
        known = namesakes(self.ledger, item.id, item.call_id, item.type)
        if any(dialect.same_item(one.body(), body) for one in known):
            return
        slot = self.segment.slots.get(("id", item.id))
        if slot is None or slot.closed:
            slot = Slot()
        self._let_go(slot)
        self._rename(slot, body)
        shown = _renamed_item(item.raw, body, slot.renames)
        self._hide(item._replace(shown=shown), {"shown": shown} if shown != item.raw else {})

    # --- items ------------------------------------------------------------------------------------

    def _continuation(self, frame: Frame, seen: Seen) -> None:
        index = seen.body.get("output_index")
        if type(index) is int:
            self.segment.hidden.add(index)
            self.segment.slots[("index", index)] = Slot(dropped=True, closed=seen.kind is Kind.ITEM)
        self._note_ids(seen)
        if seen.kind is Kind.ADDED:
            return
        raw = Editor(frame.data.decode()).raw("item") or "{}"
        item = make_item(raw, raw, seen.body["item"], self.ledger.cycle, None)
        found, _ = dialect.response_id(seen)
        facts: dict[str, object] = {"event_line": frame.event is not None, "index": type(index) is int}
        if found is not None:
            facts["response_id"] = found
        self._hide(item, facts)

    def _hide(self, item: Item, facts: dict[str, object]) -> None:
        """Enter an item that no event shows; the same continuation told twice is one."""
        if item.is_continuation:
            if any(item.id is not None and item.id == other.id for other in self.continuations):
                return
            self.continuations.append(item)
        rest = dumps({key: value for key, value in facts.items() if key != "shown"})[1:]
        shown = f'"shown":{facts["shown"]},' if "shown" in facts else ""
        tail = shown + rest if rest != "}" else shown.rstrip(",") + rest
        self._tell(Note("hidden", f'{{"item":{item.raw}{"," if tail != "}" else ""}{tail}'.encode()))

    def _part(self, frame: Frame, seen: Seen) -> None:
        """An event of an item, where items may be hidden, held or renamed."""
        slot = self._slot(seen)
        if slot is None:
            self._show(frame, seen)
        elif slot.dropped:
            return
        elif slot.against:
            verdict = slot.hold(frame, seen)
            if verdict is Verdict.REPEAT:
                slot.dropped, slot.held = True, []
            elif verdict is Verdict.DIFFERENT:
                self._let_go(slot)
        else:
            self._show(frame, seen, slot=slot)
        if slot is not None and seen.kind is Kind.ITEM:
            slot.closed = True

    def _let_go(self, slot: Slot) -> None:
        """What was held back of an item is no repeat."""
        slot.against = []
        held, slot.held = slot.held, []
        for one in held:
            self._show(*one, slot=slot)

    def _slot(self, seen: Seen) -> Slot | None:
        """The item that an event belongs to; a new one where it begins."""
        slots, body = self.segment.slots, seen.body
        item = seen.item if seen.kind in (Kind.ADDED, Kind.ITEM) else None
        index = body.get("output_index")
        id_ = body.get("item_id") if item is None else item.get("id")
        call_id = item.get("call_id") if item is not None else None
        keys: list[tuple[str, object]] = [("index", index)] if type(index) is int else []
        keys += [("id", id_)] if isinstance(id_, str) and id_ else []
        slot = next((slots[key] for key in keys if key in slots), None)
        if slot is not None and slot.closed and (item is not None or dialect.adds_text(seen)):
            slot = None  # its item is finished: this is another one under the same id or index
        if slot is None:
            if self.segment.first or not (keys or item is not None):
                return None
            slot = self._begin(id_, call_id, item)
        for key in keys:
            slots[key] = slot
        return slot

    def _begin(self, id_: object, call_id: object, item: dict[str, Any] | None) -> Slot:
        id_ = id_ if isinstance(id_, str) and id_ else None
        call_id = call_id if isinstance(call_id, str) and call_id else None
        type_ = dialect.type_of(item) if item is not None else None
        if call_id is not None and self.ledger.open_call(type_, call_id) is not None:
            call_id = None  # the answer to an open call is no repeat, whatever another one's answer said
        return Slot(against=namesakes(self.ledger, id_, call_id, type_))

    def _rename(self, slot: Slot, item: dict[str, Any]) -> None:
        """Give an item that is about to be shown new ids where its own were used before."""
        id_, call_id, type_ = item.get("id"), item.get("call_id"), dialect.type_of(item)
        if isinstance(id_, str) and id_ and id_ not in slot.renames:
            related = [one for one in self.ledger.by_id.get(id_, ()) if dialect.same_family(one.type, type_)]
            taken = id_ in self.ledger.used and not related
            if taken and type_ not in self.answered_by_id:
                slot.renames[id_] = self.ledger.fresh(id_)
            else:
                slot.renames[id_] = id_
        if isinstance(call_id, str) and call_id and call_id not in slot.renames:
            slot.renames[call_id] = self._call_name(call_id, item)

    def _call_name(self, call_id: str, item: dict[str, Any]) -> str:
        """Another name for a call id that is taken; an output has its call's."""
        name, type_ = item.get("name"), dialect.type_of(item)
        call = self.ledger.open_call(type_, call_id)
        if call is not None:
            return str(loads(call.shown.encode())["call_id"])
        client_runs_it = isinstance(name, str) and name in self.protected
        if client_runs_it or not self.ledger.by_call.get((type_, call_id)):
            return call_id
        return self.ledger.fresh(call_id)

    # --- showing ----------------------------------------------------------------------------------

    def _show(self, frame: Frame, seen: Seen, *, slot: Slot | None = None, merge: bool = False) -> None:
        """One event goes out: edited as far as it must be, numbered, entered."""
        ledger = self.ledger
        cursor = ledger.cursor + 1
        data, body, raw_item = frame.data, seen.body, None
        if seen.kind is Kind.OPAQUE:
            self.out.append(Event(cursor, self._line(frame, seen, None)))
            ledger.event(cursor, seen, None, event_line=False)
            return
        if not self.segment.first:
            data = self._adapt(data, seen, slot)
        if merge:
            data = merged(data, seen, ledger)
        elif self.segment.hidden and type(body.get("output_index")) is int:
            shift = sum(1 for hidden in self.segment.hidden if hidden < body["output_index"])
            data = set_number(data, body, "output_index", body["output_index"] - shift)
        if data is not frame.data:
            if slot is None or dialect.tells_of_ids(seen):
                seen = seen._replace(body=loads(data))
            elif "output_index" in body:
                seen = seen._replace(body={**body, "output_index": slot.index})
        data = set_number(data, body, "sequence_number", cursor)
        if seen.kind is Kind.ITEM:
            raw_item = self._item_note(frame, data)
        self.out.append(Event(cursor, self._line(frame, seen, data)))
        ledger.event(cursor, seen, raw_item, event_line=frame.event is not None)
        if raw_item is not None:
            self.segment.finished.append(ledger.items[-1])

    def _show_plain(self, frame: Frame, seen: Seen) -> None:
        """``_show`` for what nearly every event is: a part of the first segment, where nothing is hidden."""
        ledger, data = self.ledger, frame.data
        cursor = ledger.cursor + 1
        numbered = set_number(data, seen.body, "sequence_number", cursor)
        raw = frame.raw if numbered is data else frame.with_data(numbered)
        self.out.append(Event(cursor, raw))
        ledger.event(cursor, seen, None, event_line=frame.event is not None)

    def _item_note(self, frame: Frame, data: bytes) -> str:
        """The item's text as shown; a note keeps upstream's own where the two differ."""
        shown = Editor(data.decode()).raw("item") or "{}"
        if data is not frame.data and not self.segment.first:
            sent = Editor(frame.data.decode()).raw("item") or "{}"
            if sent != shown:
                self._tell(Note("item", sent.encode()))
        return shown

    def _line(self, frame: Frame, seen: Seen, data: bytes | None) -> bytes:
        """The frame with its new data and, in later segments, with the first one's habit of event lines."""
        wanted = self.ledger.event_lines
        if not self.segment.first and wanted is not None and seen.kind is not Kind.FAILURE:
            if not wanted and frame.event is not None:
                return frame.with_event(None, data)
            if wanted and frame.event is None and seen.type is not None:
                return frame.with_event(seen.type.encode("utf-8", "replace"), data)
        return frame.raw if data is None or data is frame.data else frame.with_data(data)

    def _adapt(self, data: bytes, seen: Seen, slot: Slot | None) -> bytes:
        """A later segment's event, made to fit the first: its response id, and its item's ids and index."""
        self._note_ids(seen)
        body, ledger = seen.body, self.ledger
        own = body.get("id")
        if isinstance(own, str) and own in self.segment.ids and ledger.response_id not in (None, own):
            data = set_string(data, body, "id", ledger.response_id or "")
        if slot is not None:
            data = self._adapt_item(data, seen, slot)
        first, inner = ledger.response_id, seen.response
        if first is not None and inner is not None and inner.get("id", first) != first:
            editor = Editor(data.decode())
            editor.set(("response", "id"), dumps(first))
            data = editor.result().encode()
        return data

    def _adapt_item(self, data: bytes, seen: Seen, slot: Slot) -> bytes:
        body, item = seen.body, seen.item if seen.kind is not Kind.PART else None
        if item is not None:
            self._rename(slot, item)
        elif isinstance(body.get("item_id"), str):
            self._rename(slot, {"id": body["item_id"]})
        if slot.index is None and (type(body.get("output_index")) is int or self.ledger.has_index):
            slot.index = self.ledger.next_index
            self.ledger.next_index += 1
        if slot.index is not None and ("output_index" in body or self.ledger.has_index):
            data = set_number(data, body, "output_index", slot.index)
        for key in ("item_id", "call_id"):
            new = _renamed(body.get(key), slot.renames)
            if new is not None:
                data = set_string(data, body, key, new)
        if item is not None:
            editor = Editor(data.decode())
            raw = editor.raw("item") or "{}"
            shown = _renamed_item(raw, item, slot.renames)
            if shown != raw:
                editor.set(("item",), shown)
                data = editor.result().encode()
        return data

    def _note_ids(self, seen: Seen) -> None:
        """Learn this segment's response id: its first ``response.id``, else its first top-level id."""
        segment = self.segment
        if segment.firm:
            return
        found, firm = dialect.response_id(seen)
        if found is not None and (firm or not segment.ids):
            segment.ids.add(found)
            segment.firm = firm

    def _tell(self, note: Note) -> None:
        self.out.append(note)
        self.ledger.note(note)


def _same(done: Item, listed: Item) -> bool:
    """Whether a terminal's item is one that an event already carried."""
    if done.call_id is not None and done.call_id == listed.call_id:
        return done.type == listed.type
    if done.id is not None and listed.id is not None:
        return done.id == listed.id
    return done.type == listed.type and dialect.same_item(done.body(), listed.body())


def _renamed_item(raw: str, item: dict[str, Any], renames: dict[str, str]) -> str:
    """An item's text under its new ids."""
    editor = Editor(raw)
    for key in ("id", "call_id"):
        new = _renamed(item.get(key), renames)
        if new is not None:
            editor.set((key,), dumps(new))
    return editor.result()


def _renamed(id_: object, renames: dict[str, str]) -> str | None:
    """The new name of an id; None if it keeps its own."""
    new = renames.get(id_) if isinstance(id_, str) else None
    return None if new == id_ else new
