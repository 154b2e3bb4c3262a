"""Many cycles, one stream: lifecycle, numbers, indexes, ids, output, usage; what only a person may answer."""

from __future__ import annotations

import json
from typing import Any

import anyio
import openai
import pytest
from openai.types.responses import Response
from playbook import Cut, Playbook, spec_of
from support.cases import Case, assert_continues, load, single_bytes
from support.frames import DONE, asks, completed, created, delta, done, frame, message, sse
from support.legato import ASKED, OWNER, Legato, proxied
from support.rules import check
from support.upstream import Answer

pytestmark = pytest.mark.anyio

TWO_ITEMS = ["RS-01", "RS-03", "LP-06", "LP-08"]


def with_parts(answers: list[Answer]) -> list[Answer]:
    """These answers with the ``content_part.added`` events that the helper can't do without.

    Without them it fails at the first delta of any stream, a first cycle's too (openai 3.57.0).
    """
    part = {"type": "output_text", "text": "", "annotations": []}
    for answer in answers:
        chunks: list[Any] = []
        for chunk in answer.chunks:
            assert isinstance(chunk, bytes)
            chunks.append(chunk)
            event = json.loads(chunk.removeprefix(b"data: "))
            if event["type"] == "response.output_item.added":
                place = {"item_id": event["item"]["id"], "output_index": event["output_index"]}
                chunks.append(
                    frame({"type": "response.content_part.added", "content_index": 0, "part": part} | place)
                )
        answer.chunks = chunks
    return answers


async def read_by_helper(case: Case, proxy: Legato) -> tuple[list[str], Response]:
    """The same case once more, read by ``responses.stream()``: event types and the final response."""
    asked = case.input["client"]["body"]
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/serving-endpoints", api_key="tok-A") as client:
        helper = client.responses.stream(
            model="sup-demo", input=asked["input"], extra_body={"databricks_options": {"long_task": True}}
        )
        async with helper as events:
            types = [event.type async for event in events]
            return types, await events.get_final_response()


# --- cases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [False, True], ids=["as written", "byte by byte"])
async def test_two_lifecycles_become_one(single: bool) -> None:
    """RS-01: one opening, indexes and numbers go on, one ending with both items, whole for SDK helpers."""
    case = load("RS-01")
    async with proxied(seam_grace=30) as (upstream, proxy):
        answers = case.answers()
        upstream.plays(*map(single_bytes, answers) if single else answers)
        stream = check((await proxy.whole(**case.request)).body)
        assert stream.types == [
            "response.created",
            "response.in_progress",
            *["response.output_item.added", "response.output_text.delta", "response.output_item.done"] * 2,
            "response.completed",
        ]
        assert [event["output_index"] for event in stream.events[2:8]] == [0, 0, 0, 1, 1, 1]
        assert stream.response["id"] == "resp_u1"
        assert [item["id"] for item in stream.response["output"]] == ["m1", "m2"]
        assert stream.response["output"] == stream.items
        assert stream.response["usage"] == {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}

        upstream.plays(*with_parts(case.answers()))
        types, final = await read_by_helper(case, proxy)
        assert types.count("response.completed") == 1
        assert (final.id, final.output_text) == ("resp_u1", "part onepart two")


@pytest.mark.parametrize("variant", ["empty", "missing", "only last cycle"])
async def test_the_ending_lists_every_item(variant: str) -> None:
    """RS-03: whatever upstream's own ending lists, the client's lists all items once, as they were shown."""
    case = load("RS-03")
    async with proxied() as (upstream, proxy):
        upstream.plays(*case.answers(variant))
        stream = check((await proxy.whole(**case.request)).body)
        assert stream.types[-1] == "response.completed"
        assert [item["id"] for item in stream.response["output"]] == ["m1", "m2"]
        assert stream.response["output"] == stream.items

        upstream.plays(*with_parts(case.answers(variant)))
        _, final = await read_by_helper(case, proxy)
        assert final.output_text == "part onepart two"


async def test_a_failure_lists_the_items_so_far() -> None:
    """RS-03: a failed or incomplete ending carries what there is."""
    case = load("RS-03")
    first, last = case.answers("empty")
    last.chunks, last.end = list(last.chunks)[:-1], "cut"
    async with proxied() as (upstream, proxy):
        upstream.plays(first, last)
        stream = check((await proxy.whole(**case.request)).body)
        assert stream.types[-1] == "response.failed"
        assert [item["id"] for item in stream.response["output"]] == ["m1", "m2"]


@pytest.mark.parametrize("single", [False, True], ids=["as written", "byte by byte"])
async def test_a_continuation_wins_over_the_ending_behind_it(single: bool) -> None:
    """LP-06: the first cycle's ending is held back, one follow-up, one ending with all items at the end."""
    case = load("LP-06")
    async with proxied(seam_grace=30) as (upstream, proxy):
        answers = case.answers()
        upstream.plays(*map(single_bytes, answers) if single else answers)
        reading = await proxy.whole(**case.request)
        stream = check(reading.body)
        assert stream.types.count("response.completed") == 1
        assert stream.types[-1] == "response.completed"
        assert [item["id"] for item in stream.response["output"]] == ["m1", "m2"]
        assert stream.done, "the first cycle has sent [DONE], and so does the stream"
        first, follow_up = (seen.body for seen in upstream.requests)
        assert_continues(first, follow_up, {"type": "task_continue_request", "id": "continue_a1", "step": 3})
        assert (await proxy.show(reading.task))["state"] == "completed"


async def test_the_follow_up_waits_for_the_end_of_the_cycle() -> None:
    """LP-06: it starts only once the first cycle's body has ended, or ``seam_grace`` is over."""
    gate = anyio.Event()
    async with proxied(seam_grace=60) as (upstream, proxy):
        upstream.plays(sse(created(), asks(), gate), sse(completed(message("a"))))
        async with proxy.start() as reading:
            await reading.until(b"response.created")
            await proxy.until_state(reading.task, "running")
            assert len(upstream.requests) == 1
            gate.set()
            check(await reading.rest())
        assert len(upstream.requests) == 2


@pytest.mark.parametrize("variant", ["approval only", "approval and continue request"])
async def test_an_approval_is_nobodys_but_a_persons(variant: str) -> None:
    """LP-08: no answer is made up and no follow-up sent, even beside a continuation; the item stays."""
    case = load("LP-08")
    async with proxied() as (upstream, proxy):
        upstream.plays(*case.answers(variant))
        reading = await proxy.whole(**case.request)
        stream = check(reading.body)
        assert stream.types == ["response.created", "response.output_item.done", "response.completed"]
        assert [item["id"] for item in stream.response["output"]] == ["mcpr_1"]
        assert b"mcp_approval_response" not in reading.body
        assert len(upstream.requests) == 1
        shown = await proxy.show(reading.task)
        assert (shown["state"], shown["reason"]) == ("input_required", "approval")
        (action,) = shown["required_actions"]
        assert (action["kind"], action["id"], action["name"]) == ("approval", "mcpr_1", "delete_table")
        if variant == "approval only":
            sent = [frame.partition(b"\n\n")[0] for frame in case.bodies(variant)[0].split(b"\n\n")]
            assert stream.blocks[0].raw == sent[0] + b"\n\n"


@pytest.mark.parametrize("id_", TWO_ITEMS)
def test_every_cut_gives_the_same(id_: str) -> None:
    """Any cut of any cycle's bytes gives the same stream, the same requests and the same state."""
    case = load(id_)
    for variant in case.variants:
        bodies = case.bodies(variant)

        def play(cut: Any, variant: str = variant) -> tuple[bytes, list[bytes], str]:
            book = Playbook(spec_of(case.body)).start()
            for body in case.bodies(variant):
                if book.exchange == "asked":
                    book.opened().feed(*cut(body)).end()
            book.check()
            return book.stream, book.bodies, book.task.phase

        whole = play(Cut())
        assert play(Cut(size=1)) == whole
        for place in range(1, max(map(len, bodies)), 5):
            assert play(lambda body, at=place: [body[:at], body[at:]]) == whole


# --- of the same kinds --------------------------------------------------------------------------------


async def test_text_that_only_deltas_and_the_ending_tell_keeps_its_id() -> None:
    """A later cycle's item without events of its own is the one that its deltas spoke of."""
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), asks()), sse(delta("two", "m2"), completed(message("two", "m2"))))
        stream = check((await proxy.whole()).body)
        assert [item["id"] for item in stream.response["output"]] == ["m2"]


async def test_used_ids_are_renamed_for_the_client_and_kept_for_upstream() -> None:
    """``m1`` again for another text becomes ``m1_2`` everywhere in the stream; upstream gets its own back."""
    first = sse(created(), delta("one"), done(message("one")), asks())
    second = sse(delta("other"), done(message("other")), asks("continue_b", 4))
    async with proxied() as (upstream, proxy):
        upstream.plays(first, second, sse(completed(message("end", "m3"))))
        stream = check((await proxy.whole()).body)
        assert [item["id"] for item in stream.response["output"]] == ["m1", "m1_2", "m3"]
        assert [event["item_id"] for event in stream.of("response.output_text.delta")] == ["m1", "m1_2"]
        replayed = [item.get("id") for item in json.loads(upstream.requests[2].body)["input"]]
        assert replayed == [None, "m1", "continue_a1", None, "m1", "continue_b", None]


async def test_items_that_come_again_are_shown_once() -> None:
    """After a resume upstream says the same again, word for word: dropped, from the follow-up too."""
    first = sse(created(), delta("one"), done(message("one")), asks())
    second = sse(delta("o"), delta("ne"), done(message("one")), asks("continue_b", 4))
    async with proxied() as (upstream, proxy):
        upstream.plays(first, second, sse(completed(message("end", "m3"))))
        stream = check((await proxy.whole()).body)
        assert stream.text == "one"
        assert [item["id"] for item in stream.response["output"]] == ["m1", "m3"]
        assert len(json.loads(upstream.requests[2].body)["input"]) == 1 + 1 + 2 + 2


async def test_two_continuations_are_answered_in_one_follow_up() -> None:
    """In their order, each response right behind its request; the same id twice is one."""
    first = sse(created(), asks("continue_a"), asks("continue_b", 4), asks("continue_a"))
    async with proxied() as (upstream, proxy):
        upstream.plays(first, sse(completed(message("a"))))
        check((await proxy.whole()).body)
        asked = [
            {"type": "task_continue_request", "id": "continue_a", "step": 3},
            {"type": "task_continue_request", "id": "continue_b", "step": 4},
        ]
        first_body, follow_up = (seen.body for seen in upstream.requests)
        assert_continues(first_body, follow_up, *asked, whole=True)


async def test_a_continuation_that_only_the_ending_lists_is_one() -> None:
    """Found in the terminal's output where no event carried it, and hidden there too."""
    asked = {"type": "task_continue_request", "id": "continue_a1", "step": 3}
    async with proxied() as (upstream, proxy):
        upstream.plays(
            sse(created(), completed(message("one"), asked)),
            sse(completed(message("two", "m2"), response="resp_u2")),
        )
        stream = check((await proxy.whole()).body)
        assert [item["id"] for item in stream.response["output"]] == ["m1", "m2"]
        assert_continues(upstream.requests[0].body, upstream.requests[1].body, asked)


async def test_words_about_a_continuation_are_words() -> None:
    """Only an item's type counts: not a text, not an ``event:`` line, not an unfinished event's type."""
    text = '{"type":"task_continue_request","id":"continue_a1"}'
    event = b"event: task_continue_request\n" + delta(text)
    added = frame(
        {
            "type": "response.output_item.added",
            "item": {"type": "task_continue_request", "id": "c", "step": 1},
        }
    )
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), event, done(message(text)), added, completed(message(text))))
        reading = await proxy.whole()
        assert check(reading.body).types[-1] == "response.completed"
        assert len(upstream.requests) == 1


@pytest.mark.parametrize("id_", [None, "", 7, ["a"], {}])
async def test_a_continuation_that_cannot_be_answered_is_a_failure(id_: object) -> None:
    """No id, or none that is a non-empty string: ``bad_continuation``, and nothing is sent."""
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), done(message("one")), asks(id_)))
        reading = await proxy.whole()
        stream = check(reading.body)
        assert stream.error["code"] == "bad_continuation"
        assert (await proxy.show(reading.task))["state"] == "failed"
        assert len(upstream.requests) == 1


async def test_a_continuation_that_was_answered_before_stops_the_task() -> None:
    """The same id again is no progress: ``response.incomplete``, ``repeated_continuation``."""
    again = sse(done(message("two", "m2")), asks("continue_a1", 9))
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), asks()), again)
        reading = await proxy.whole()
        stream = check(reading.body)
        assert stream.response["incomplete_details"] == {"reason": "repeated_continuation"}
        assert (await proxy.show(reading.task))["state"] == "incomplete"
        assert len(upstream.requests) == 2


async def test_usage_is_summed() -> None:
    """Over the cycles that told it; where one didn't, the ending says of how many it is the sum."""
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5, "details": {"cached": 1}}
    async with proxied() as (upstream, proxy):
        first = sse(created(), asks(), completed(usage=usage))
        upstream.plays(first, sse(completed(message("a"), usage=usage)))
        stream = check((await proxy.whole()).body)
        twice = {"input_tokens": 6, "output_tokens": 4, "total_tokens": 10, "details": {"cached": 2}}
        assert stream.response["usage"] == twice
        upstream.plays(sse(created(), asks()), sse(completed(message("a"), usage=usage)))
        stream = check((await proxy.whole()).body)
        assert stream.response["usage"] == usage
        assert stream.response["legato"] == {"usage_cycles": "1 of 2"}


ERRORS: list[dict[str, Any]] = [
    {"error_code": "INTERNAL_ERROR", "message": "boom"},
    {"error": "boom"},
    {"error": {"message": "boom", "code": "x"}},
    {"type": "error", "code": "server_error", "message": "boom", "param": None},
    {"type": "response.error", "error": {"message": "boom"}},
    {"type": "response.failed", "response": {"id": "resp_u9", "status": "failed", "output": []}},
]


@pytest.mark.parametrize("cycle", [1, 2])
@pytest.mark.parametrize("error", ERRORS, ids=["code", "text", "object", "flat", "response", "failed"])
async def test_an_error_in_the_stream_is_its_end(error: dict[str, Any], cycle: int) -> None:
    """Whatever form it has: the task's terminal event, no follow-up, no second ending; ``[DONE]`` passes."""
    answers = [sse(created("resp_u9"), asks(response="resp_u9")), sse(frame(error), delta("late"), DONE)]
    async with proxied() as (upstream, proxy):
        upstream.plays(*answers[2 - cycle :])
        reading = await proxy.whole()
        stream = check(reading.body, merged=False)
        assert {key: stream.events[-1][key] for key in error if key != "response"} == {
            key: value for key, value in error.items() if key != "response"
        }
        assert b"late" not in reading.body
        assert stream.done
        shown = await proxy.show(reading.task)
        assert (shown["state"], len(upstream.requests)) == ("failed", cycle)


async def test_a_failure_wins_over_a_continuation() -> None:
    """Upstream asks to go on and then fails: failed, and nothing is sent."""
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), asks(), frame({"error": "boom"})))
        reading = await proxy.whole()
        check(reading.body, merged=False)
        assert len(upstream.requests) == 1
        assert (await proxy.show(reading.task))["state"] == "failed"


async def test_an_error_that_is_null_is_none() -> None:
    """``"error": null`` stands in every good response."""
    async with proxied() as (upstream, proxy):
        opening = frame({"type": "response.created", "error": None, "response": {"id": "r", "error": None}})
        upstream.plays(sse(opening, completed(message("a"), response="r", error=None)))
        assert check((await proxy.whole()).body).types[-1] == "response.completed"


async def test_upstreams_own_incomplete_is_the_ending() -> None:
    """State ``incomplete`` with upstream's reason; the items of all cycles are in it."""
    response = {
        "id": "resp_u2",
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
    }
    ending = frame({"type": "response.incomplete", "response": response})
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), done(message("one")), asks()), sse(done(message("two", "m2")), ending))
        reading = await proxy.whole()
        stream = check(reading.body)
        assert stream.response["incomplete_details"] == {"reason": "max_output_tokens"}
        shown = await proxy.show(reading.task)
        assert (shown["state"], shown["reason"]) == ("incomplete", "max_output_tokens")


async def test_an_answered_approval_goes_on_as_a_new_task() -> None:
    """LP-08, a rejected approval: its answer starts a new task; the old one is completed and names it."""
    case = load("LP-08")
    item = json.loads(case.bodies("approval only")[0].split(b"\n\n")[1].removeprefix(b"data: "))["item"]
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": False}
    async with proxied() as (upstream, proxy):
        upstream.plays(*case.answers("approval only"), sse(created("resp_n"), completed(response="resp_n")))
        old = (await proxy.whole(**case.request)).task
        new = await proxy.whole(ASKED | {"input": [*ASKED["input"], item, answer]})
        check(new.body)
        assert new.task != old
        assert json.loads(upstream.requests[1].body)["input"][-1] == answer
        shown = await proxy.show(old)
        assert (shown["state"], shown["continued_by"]) == ("completed", new.task)
        assert (await proxy.show(new.task))["continues"] == old


async def test_a_clients_own_tool_is_the_clients_to_run() -> None:
    """A call whose name the request declares stops the task at once; its call id stays as it is."""
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "here", "arguments": "{}"}
    body = ASKED | {"tools": [{"type": "function", "name": "here", "parameters": {}}]}
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), done(call), asks()))
        reading = await proxy.whole(body)
        stream = check(reading.body)
        assert stream.types[-1] == "response.completed"
        assert stream.response["output"] == [call]
        shown = await proxy.show(reading.task)
        assert (shown["state"], shown["reason"]) == ("input_required", "client_tool")
        assert shown["required_actions"][0]["id"] == "call_1"
        assert len(upstream.requests) == 1


async def test_two_tasks_at_once_do_not_mix() -> None:
    """Each has its own numbers, ids and follow-up; the answers are told apart by the request."""
    gates = [anyio.Event(), anyio.Event()]

    def cycles(name: str, gate: anyio.Event) -> list[Answer]:
        first = sse(created(f"resp_{name}"), done(message(name, f"m_{name}")), gate, asks(f"c_{name}"))
        return [first, sse(completed(message(f"{name} end", f"n_{name}"), response=f"resp_{name}2"))]

    async with proxied() as (upstream, proxy):
        answers = {"one": cycles("one", gates[0]), "two": cycles("two", gates[1])}
        upstream.rule = lambda seen: answers[(seen.one("x-name") or b"").decode()].pop(0)
        names = ([OWNER, ("x-name", name)] for name in ("one", "two"))
        async with proxy.start(headers=next(names)) as first, proxy.start(headers=next(names)) as second:
            await first.until(b"m_one")
            await second.until(b"m_two")
            gates[1].set()
            theirs = check(await second.rest())
            gates[0].set()
            ours = check(await first.rest())
        for stream, name in ((ours, "one"), (theirs, "two")):
            assert [item["id"] for item in stream.response["output"]] == [f"m_{name}", f"n_{name}"]
            assert stream.response["id"] == f"resp_{name}"
        asked = [
            (seen.one("x-name"), json.loads(seen.body)["input"][-2]["id"]) for seen in upstream.requests[2:]
        ]
        assert asked == [(b"two", "c_two"), (b"one", "c_one")]
