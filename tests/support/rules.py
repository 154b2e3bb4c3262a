"""What every stream that legato sends must obey, whatever upstream did; and a reader to look at it with.

::

    stream = check(answer.body)                     # asserts, and gives back what it saw
    assert stream.types == ["response.created", "response.completed"]

The reader follows the specification ("Parsing an event stream") and shares no code with the product.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

TERMINALS = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled", "response.error"}
)
OPENINGS = ("response.created", "response.queued", "response.in_progress")
HIDDEN = ("task_continue_request", "task_continue_response")
BOM = b"\xef\xbb\xbf"

_line = re.compile(rb"([^\r\n]*)(\r\n|\r|\n)")
_heartbeat = re.compile(rb": legato( paused: .{0,200})?").fullmatch


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two blank lines. ``data`` is None where there is no data line.

    ``comments``: those in front; ``inside``: those behind a field.
    """

    raw: bytes
    data: bytes | None
    event: str | None
    id: str | None
    comments: tuple[bytes, ...]
    inside: tuple[bytes, ...]

    @property
    def is_done(self) -> bool:
        """Whether this is ``[DONE]``."""
        return self.data is not None and self.data.strip() == b"[DONE]"

    @property
    def body(self) -> dict[str, Any] | None:
        """The data's JSON object, if it is one."""
        try:
            found = json.loads(self.data or b"")
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def read(body: bytes) -> tuple[list[Block], bytes]:
    """The blocks of a stream, and what stands behind the last blank line."""
    blocks: list[Block] = []
    start = at = 0
    fields: list[tuple[bytes, bytes]] = []
    front: list[bytes] = []
    inside: list[bytes] = []
    while found := _line.match(body, at):
        at = found.end()
        line = found[1]
        if line.startswith(b":"):
            (inside if fields else front).append(line)
        elif line:
            name, _, value = line.partition(b":")
            fields.append((name, value.removeprefix(b" ")))
        else:
            if fields or front:
                blocks.append(_block(body[start:at], fields, front, inside))
            start, fields, front, inside = at, [], [], []
    return blocks, body[start:]


def _block(raw: bytes, fields: list[tuple[bytes, bytes]], front: list[bytes], inside: list[bytes]) -> Block:
    data = [value for name, value in fields if name == b"data"]
    last = dict(fields)
    return Block(
        raw,
        b"\n".join(data) if data else None,
        last[b"event"].decode() if b"event" in last else None,
        last[b"id"].decode() if b"id" in last else None,
        tuple(front),
        tuple(inside),
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream that has passed the check. ``events`` are the JSON objects in their order."""

    body: bytes
    blocks: list[Block]
    events: list[dict[str, Any]]
    heartbeats: int

    @property
    def types(self) -> list[str | None]:
        """The events' types."""
        return [event.get("type") for event in self.events]

    @property
    def items(self) -> list[dict[str, Any]]:
        """The finished items, in their order."""
        return [event["item"] for event in self.of("response.output_item.done") if _has_item(event)]

    @property
    def text(self) -> str:
        """All deltas, joined."""
        return "".join(e["delta"] for e in self.events if e.get("type") == "response.output_text.delta")

    @property
    def terminal(self) -> dict[str, Any] | None:
        """The terminal event, if there is one."""
        return next((event for event in self.events if is_terminal(event)), None)

    @property
    def response(self) -> dict[str, Any]:
        """The response of the terminal event."""
        assert self.terminal is not None, "no terminal event"
        found = self.terminal["response"]
        assert isinstance(found, dict)
        return found

    @property
    def error(self) -> dict[str, Any]:
        """The error of ``response.failed``."""
        assert self.types[-1] == "response.failed"
        found = self.response["error"]
        assert isinstance(found, dict)
        return found

    @property
    def done(self) -> bool:
        """Whether ``[DONE]`` stands at the end."""
        return bool(self.blocks) and self.blocks[-1].is_done

    def of(self, type_: str) -> list[dict[str, Any]]:
        """The events of this type."""
        return [event for event in self.events if event.get("type") == type_]


def is_terminal(event: dict[str, Any]) -> bool:
    """An event behind which nothing typed may come: an ending, or an error in one of its forms."""
    return (
        event.get("type") in TERMINALS
        or event.get("type") == "error"
        or event.get("error") is not None
        or event.get("error_code") is not None
    )


def _has_item(event: dict[str, Any]) -> bool:
    return isinstance(event.get("item"), dict)


def check(
    body: bytes,
    *,
    event_ids: bool = False,
    ended: bool = True,
    merged: bool = True,
    distinct: bool = True,
    first: int = 0,
) -> Stream:
    """Assert what holds for every stream, and give back what was seen.

    ``event_ids``: the client asked for ``id:`` lines. ``ended``: this is the whole stream. ``merged``: the
    ending's output lists exactly the finished items. ``distinct``: upstream itself gave no item the id of
    another. ``first``: the first number, for what a resume gives.
    """
    blocks, rest = read(body)
    if ended:
        assert rest == b"", f"the stream ends inside a block: {rest!r}"
    assert BOM not in body[:3], "a byte order mark is passed on"
    framing(blocks, event_ids=event_ids, first=first)
    stream = Stream(
        body,
        blocks,
        [event for block in blocks if (event := block.body) is not None],
        sum(len(block.comments) for block in blocks),
    )
    numbers(blocks, first=first)
    lifecycle(stream, ended=ended)
    identity(stream)
    items(stream, distinct=distinct)
    if merged and ended and stream.terminal is not None and stream.terminal.get("type") in TERMINALS:
        output(stream)
    return stream


def framing(blocks: list[Block], *, event_ids: bool, first: int = 0) -> None:
    """Only frames with data; comments are heartbeats and stand between frames; ids are the cursors."""
    for number, block in enumerate(blocks, first):
        assert block.data is not None, f"a block without data: {block.raw!r}"
        assert not block.inside, f"a comment inside a frame: {block.raw!r}"
        assert all(_heartbeat(line) for line in block.comments), f"a foreign comment: {block.comments!r}"
        names = [line.partition(b":")[0] for line in block.raw.splitlines() if line and line[:1] != b":"]
        assert set(names) <= {b"data", b"event", b"id"}, f"a foreign field: {block.raw!r}"
        assert names.count(b"id") <= 1
        expected = str(number) if event_ids and not block.is_done else None
        assert block.id == expected, f"id: {block.id}, not {expected}"


def numbers(blocks: list[Block], *, first: int = 0) -> None:
    """The n-th event has the number n; ``[DONE]`` has none and comes last."""
    for number, block in enumerate(blocks, first):
        if block.is_done:
            assert block is blocks[-1], "something stands behind [DONE]"
        elif (event := block.body) is not None:
            assert event.get("sequence_number") == number, f"event {number}: {block.raw!r}"


def lifecycle(stream: Stream, *, ended: bool = True) -> None:
    """Openings once and in front, one terminal event at most, nothing typed behind it."""
    types = stream.types
    for opening in OPENINGS:
        assert types.count(opening) <= 1, f"{opening} came twice"
        if opening in types:
            assert set(types[: types.index(opening)]) <= set(OPENINGS), f"{opening} came late"
    places = [place for place, event in enumerate(stream.events) if is_terminal(event)]
    assert len(places) <= 1, f"{len(places)} terminal events"
    if places:
        behind = types[places[0] + 1 :]
        assert set(behind) <= {None}, f"{behind} behind the terminal event"
    if ended:
        assert places or stream.done, "neither a terminal event nor [DONE]"


def identity(stream: Stream) -> None:
    """One response id, wherever one stands."""
    inner = [e["response"] for e in stream.events if isinstance(e.get("response"), dict)]
    found = {response["id"] for response in inner if "id" in response}
    assert len(found) <= 1, f"several response ids: {found}"
    outer = {e["id"] for e in stream.events if str(e.get("id", "")).startswith("resp_")}
    assert len(found | outer) <= 1, f"several response ids: {found | outer}"


def items(stream: Stream, *, distinct: bool = True) -> None:
    """No continuation is shown; indexes have no holes; no id belongs to two finished items."""
    done = [event for event in stream.of("response.output_item.done") if _has_item(event)]
    added = [event for event in stream.of("response.output_item.added") if _has_item(event)]
    shown = [event["item"].get("type") for event in done + added]
    assert not any(type_ in HIDDEN for type_ in shown), "a continuation is shown"
    indexes = [event["output_index"] for event in done if "output_index" in event]
    begun = [event["output_index"] for event in added if "output_index" in event]
    assert len(indexes) == len(set(indexes)), f"an index twice: {indexes}"
    every = sorted({*indexes, *begun})
    assert every == list(range(len(every))), f"indexes have holes: {every}"
    for event in stream.events:
        if "output_index" in event:
            assert event["output_index"] in every or event["output_index"] == len(every)
    if distinct:
        keys = [(e["item"].get("type"), e["item"]["id"]) for e in done if e["item"].get("id")]
        assert len(keys) == len(set(keys)), f"an id twice: {keys}"


def output(stream: Stream) -> None:
    """The ending lists every finished item once, as it was shown, and nothing hidden."""
    listed = stream.response.get("output")
    assert isinstance(listed, list), "the ending has no output"
    assert not {item.get("type") for item in listed}.intersection(HIDDEN), "a continuation is listed"
    places = [listed.index(item) for item in stream.items]
    assert places == sorted(set(places)), "the ending's output has another order"
