"""Plays the cases of ``tests/cases/inputs``: a case's ``input`` becomes a request and scripted answers.

::

    case = load("SSE-01")
    for name in case.variants:
        upstream.plays(*case.answers(name))
        async with proxy.start(**case.request) as reading: ...

Pauses become gates, in their order: ``case.answers(name, gates)`` puts them into the list ``gates``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from support.upstream import Answer, Chunk

INPUTS = Path(__file__).parent.parent / "cases" / "inputs"


@dataclass(frozen=True, slots=True)
class Case:
    """One case as it was handed out."""

    id: str
    input: dict[str, Any]

    @property
    def variants(self) -> list[str]:
        """The names of the variants; one without a name where there are none."""
        upstream = self.input["upstream"]
        return list(upstream["variants"]) if "variants" in upstream else [""]

    def entries(self, variant: str = "") -> list[Any]:
        """What upstream answers, one for each request."""
        upstream = self.input["upstream"]
        if isinstance(upstream, list):
            return upstream
        found = upstream["variants"][variant] if "variants" in upstream else upstream["cycles"]
        assert isinstance(found, list)
        return found

    def answers(self, variant: str = "", gates: list[anyio.Event] | None = None) -> list[Answer]:
        """The scripted answers; an entry that is a sentence is the test's own business and left out."""
        waits: list[anyio.Event] = [] if gates is None else gates
        return [_answer(entry, waits) for entry in self.entries(variant) if isinstance(entry, dict)]

    def bodies(self, variant: str = "") -> list[bytes]:
        """Each cycle's bytes, pauses left out."""
        entries = [entry for entry in self.entries(variant) if isinstance(entry, dict)]
        return [b"".join(_bytes(c) for c in entry["chunks"] if not _is_pause(c)) for entry in entries]

    @property
    def body(self) -> bytes:
        """The client's body."""
        client = self.input["client"]
        return client["body_raw"].encode() if "body_raw" in client else json.dumps(client["body"]).encode()

    @property
    def request(self) -> dict[str, Any]:
        """For ``Legato.start``."""
        client = self.input["client"]
        return {"raw": self.body, "path": client["path"], "headers": list(client["headers"].items())}


def load(id_: str) -> Case:
    """One case."""
    return Case(id_, json.loads((INPUTS / f"{id_}.json").read_text())["input"])


def _answer(entry: dict[str, Any], gates: list[anyio.Event]) -> Answer:
    return Answer(
        status=entry["status"],
        headers=entry["headers"],
        chunks=list(_chunks(entry["chunks"], gates)),
        end=entry["end"],
    )


def _chunks(chunks: list[Any], gates: list[anyio.Event]) -> Iterator[Chunk]:
    for chunk in chunks:
        if _is_pause(chunk):
            gates.append(anyio.Event())
            yield gates[-1]
        else:
            yield _bytes(chunk)


def _is_pause(chunk: Any) -> bool:
    return isinstance(chunk, dict) and "pause_s" in chunk


def _bytes(chunk: Any) -> bytes:
    match chunk:
        case str():
            return chunk.encode()
        case {"hex": digits}:
            return bytes.fromhex(digits)
        case {"fill": text, "n": times}:
            return text.encode() * int(times)
        case {"join": parts}:
            return b"".join(map(_bytes, parts))
        case {"gzip_of": part}:
            return gzip.compress(_bytes(part))
    raise AssertionError(f"no chunk: {chunk}")


def single_bytes(answer: Answer) -> Answer:
    """The same answer with one byte for each write."""
    singles: list[Chunk] = []
    for chunk in answer.chunks:
        singles += [bytes([byte]) for byte in chunk] if isinstance(chunk, bytes) else [chunk]
    return Answer(status=answer.status, headers=answer.headers, chunks=singles, end=answer.end)


def assert_continues(first: bytes, follow_up: bytes, *asked: dict[str, Any], whole: bool = False) -> None:
    """The follow-up is the first body, whose conversation ends with these requests, each answered.

    ``whole``: nothing else was added to it.
    """
    before, after = json.loads(first), json.loads(follow_up)
    answered: list[Any] = []
    for item in asked:
        answered += (item, {"type": "task_continue_response", "continue_request_id": item["id"]})
    conversation = after.pop("input")
    original = before.pop("input")
    assert conversation[: len(original)] == original
    assert conversation[-len(answered) :] == answered
    assert not whole or conversation == original + answered
    assert list(after) == list(before), "the other fields are the same, in the same order"
    assert after == before
    assert after["stream"] is True
    assert after["databricks_options"]["long_task"] is True
