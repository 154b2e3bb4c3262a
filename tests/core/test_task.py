"""The machine: refusals, what is never sent again, pauses, cancels, and the table itself."""

from __future__ import annotations

import json
from email.utils import formatdate
from typing import Any, get_args

import pytest
from playbook import NOW, Playbook, spec_of

from proxy.core import messages as m
from proxy.core.task import TABLE, Task
from proxy.errors import IllegalMove

REQUEST = (
    b'{"input":[{"role":"user","content":"count the red boxes"}],'
    b'"databricks_options":{"long_task":true},"stream":true}'
)
CREATED = b'data: {"type":"response.created","response":{"id":"resp_u1","output":[]}}\n\n'
CALL = (
    b'data: {"type":"response.output_item.done","item":'
    b'{"type":"function_call","id":"fc_1","call_id":"call_1","name":"lookup","arguments":"{}"}}\n\n'
)
ASK = (
    b'data: {"type":"response.output_item.done","item":'
    b'{"type":"task_continue_request","id":"continue_a1","step":3},"id":"resp_u1"}\n\n'
)
PAIR = (
    b'{"type":"task_continue_request","id":"continue_a1","step":3},'
    b'{"type":"task_continue_response","continue_request_id":"continue_a1"}'
)
COMPLETED = b'data: {"type":"response.completed","response":{"id":"resp_u2","output":[]}}\n\n'
APPROVAL = (
    b'data: {"type":"response.output_item.done","item":'
    b'{"type":"mcp_approval_request","id":"mcpr_1","name":"drop","arguments":"{}"}}\n\n'
)


def running(**spec: Any) -> Playbook:
    """A task in its first cycle, an event on."""
    return Playbook(spec_of(REQUEST, **spec)).start().opened().feed(CREATED)


def continuing(request: bytes = REQUEST, **spec: Any) -> Playbook:
    """A task whose first cycle has asked to continue; the follow-up is on its way."""
    play = Playbook(spec_of(request, **spec)).start().opened().feed(CREATED, CALL, ASK).end()
    assert (play.task.phase, play.exchange) == ("continuing", "asked")
    return play


def completes(play: Playbook) -> None:
    """The follow-up on its way is accepted, and the task comes to its end."""
    play.opened().feed(COMPLETED).end().check()
    assert (play.task.phase, play.finished) == ("completed", True)


def ends(play: Playbook, state: str, code: str) -> dict[str, Any]:
    """The task has ended or rests with a response.failed of this code; its error."""
    play.check()
    assert (play.task.phase, play.task.reason, play.finished) == (state, code, True)
    assert play.last["type"] == "response.failed"
    error: dict[str, Any] = play.last["response"]["error"]
    assert error["code"] == code
    return error


# --- refused clearly: wait ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [
        "30",
        formatdate(NOW + 30, usegmt=True),
        "Thu Oct  9 08:53:50 2025",
        "Thursday, 09-Oct-25 08:53:50 GMT",
    ],
)
def test_a_rate_limit_is_waited_for_as_told(told: str) -> None:
    """A 429 waits for its Retry-After, in seconds or as a date of any form, then the same body goes out."""
    play = continuing().refused(429, '{"error_code":"REQUEST_LIMIT_EXCEEDED"}', Retry_After=told)
    assert play.timers == {"retry": m.SetTimer("retry", 30.0)}
    assert play.task.open
    assert len(play.events) == 2
    play.fire("retry")
    assert play.bodies[1] == play.bodies[2]
    completes(play)


def test_an_accepted_follow_up_forgets_the_refusals_before_it() -> None:
    """What upstream once refused says nothing of a later failure, nor shortens a later wait."""
    play = continuing().refused(429, Retry_After="100").fire("retry").opened()
    play.feed(ASK.replace(b"continue_a1", b"continue_b2").replace(b":3", b":6")).end()
    play.refused(429, Retry_After="100").fire("retry").broke()
    assert "upstream" not in ends(play, "needs_review", "continuation_unknown")


def test_a_rate_limit_without_a_time_is_waited_for_with_back_off() -> None:
    """Waits double from one second to half a minute, with jitter, until the budget would be passed."""
    play, waits = continuing(retry_budget=120), []
    while not play.finished:
        play.refused(429, '{"error_code":"REQUEST_LIMIT_EXCEEDED","message":"slow down"}')
        for timer in list(play.timers.values()):
            assert timer.jitter == timer.seconds / 2
            waits.append(timer.seconds)
            play.fire("retry")
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    error = ends(play, "failed", "upstream_refused")
    assert error["upstream"]["status"] == 429
    assert error["upstream"]["message"] == "slow down"


def test_a_wait_beyond_the_budget_is_not_begun() -> None:
    """A Retry-After that passes the budget fails at once; it and nothing accepted are said."""
    play = continuing(retry_budget=120).refused(429, Retry_After="121")
    assert ends(play, "failed", "upstream_refused")["upstream"]["retry_after"] == 121
    assert not play.timers


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ("", {"retry_after": "2"}),
        ('{"error_code":"REQUEST_LIMIT_EXCEEDED","message":"busy"}', {}),
    ],
)
def test_a_503_that_says_so_is_a_clear_refusal(body: str, headers: dict[str, str]) -> None:
    """A 503 with Retry-After or a rate limit's code was not accepted: it is waited for."""
    play = continuing().refused(503, body, **headers)
    assert play.timers["retry"].seconds == (2 if headers else 1)
    completes(play.fire("retry"))


# --- refused for good, or another form ------------------------------------------------------------------


def test_a_plain_400_is_final() -> None:
    """Upstream's status, code, message and request id reach the client (DB-04)."""
    body = '{"error_code":"BAD_REQUEST","message":"tool call without result"}'
    play = continuing().refused(400, body, X_Request_Id="dbx-77")
    error = ends(play, "failed", "upstream_refused")
    assert error["upstream"] == {
        "status": 400,
        "code": "BAD_REQUEST",
        "message": "tool call without result",
        "request_id": "dbx-77",
    }
    for said in ("400", "BAD_REQUEST", "tool call without result", "dbx-77"):
        assert said in error["message"]
    assert len(play.bodies) == 2


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ('{"error":{"code":"bad","message":"no"}}', "bad", "no"),
        ('{"detail":"no"}', None, "no"),
        ('{"error":"no"}', None, "no"),
        ("<html>no</html>", None, "an HTML page"),
        (b"\xff no", None, "\ufffd no"),
        ("[1]", None, "[1]"),
        ("", None, ""),
    ],
)
def test_a_refusal_in_any_form_is_read(body: str | bytes, code: str | None, message: str) -> None:
    """Databricks, OpenAI, FastAPI, plain text, HTML and nothing: the code and the words are found."""
    told = ends(continuing().refused(404, body), "failed", "upstream_refused")["upstream"]
    assert (told["code"], told["message"]) == (code, message)


@pytest.mark.parametrize("status", [302, 402, 404, 405, 409, 410, 415, 422, 451])
def test_other_refusals_are_final(status: int) -> None:
    """Any other 4xx, and a redirect, which is not followed, ends the task; nothing was accepted."""
    play = continuing().refused(status, '{"message":"Invalid message sequence."}')
    ends(play, "failed", "upstream_refused")
    assert len(play.bodies) == 2


@pytest.mark.parametrize(
    "text",
    [
        "Invalid message sequence.",
        "items of type function_call are not supported here",
        "Invalid type 'task_continue_request' for OutputItem",
        "unknown item type: function_call_output",
    ],
)
def test_a_400_that_names_the_form_tries_the_next_policy(text: str) -> None:
    """all_items, all_pairs, last_pair: until one is accepted, which is then known for the endpoint."""
    play = continuing().refused(400, json.dumps({"message": text}))
    assert play.bodies[2] == REQUEST.replace(b"}],", b"}," + PAIR + b"],")
    assert play.notes("intent")[-1]["form"] == ["all_pairs", "input"]
    play.refused(400, json.dumps({"message": text}))
    assert play.notes("intent")[-1]["form"] == ["last_pair", "input"]
    completes(play)
    assert play.learned == [m.Learned("last_pair", "input")]


def test_no_policy_is_left() -> None:
    """Where every policy is refused the task fails with the last refusal."""
    play = continuing()
    for _ in range(3):
        play.refused(400, '{"message":"Invalid message sequence."}')
    assert ends(play, "failed", "upstream_refused")["upstream"]["status"] == 400
    assert len(play.bodies) == 4
    assert play.learned == []


def test_a_form_that_has_worked_is_not_doubted() -> None:
    """Once a policy has worked for the endpoint, in this task or before, a 400 that names it is final."""
    ends(continuing(proven=True).refused(400, '{"message":"not supported"}'), "failed", "upstream_refused")
    play = continuing().opened()
    play.feed(ASK.replace(b"continue_a1", b"continue_b2")).end()
    ends(play.refused(400, '{"message":"not supported"}'), "failed", "upstream_refused")
    assert play.learned == [m.Learned("all_items", "input")]


def test_a_body_that_fits_every_policy_proves_none() -> None:
    """Where there was nothing but the pair to send, upstream has not said which policy it wants."""
    play = running().feed(ASK).end().opened()
    assert play.learned == []
    play.feed(CALL, ASK.replace(b"continue_a1", b"continue_b2")).end().opened()
    assert play.learned == [m.Learned("all_items", "input")]


def test_a_form_that_the_settings_fix_is_kept() -> None:
    """Without auto no other form is tried."""
    play = continuing(auto=False, replay="all_pairs").refused(400, '{"message":"Invalid message sequence."}')
    ends(play, "failed", "upstream_refused")
    play = continuing(auto=False, replay="all_pairs").refused(413)
    ends(play, "failed", "follow_up_too_large")


NOT_MESSAGES = "Invalid request: 'messages' field is not supported. Please use 'input' field instead."


def test_a_400_that_names_the_other_key_tries_it_once() -> None:
    """The same policy goes out under the other key; a second text of the kind is final."""
    request = REQUEST.replace(b'"input"', b'"messages"')
    play = continuing(request).refused(400, json.dumps({"message": NOT_MESSAGES}))
    moved = json.loads(play.bodies[2])
    assert "messages" not in moved
    assert moved["input"] == json.loads(play.bodies[1])["messages"]
    play.refused(400, '{"message":"use \'messages\'"}')
    ends(play, "failed", "upstream_refused")
    assert len(play.bodies) == 3


def test_the_other_key_is_learned() -> None:
    """The key that was accepted is known for the endpoint's next tasks."""
    play = continuing(REQUEST.replace(b'"input"', b'"messages"'))
    completes(play.refused(400, json.dumps({"message": NOT_MESSAGES})))
    assert play.learned == [m.Learned("all_items", "input")]


@pytest.mark.parametrize("proven", [False, True])
def test_a_413_always_takes_the_next_smaller_policy(*, proven: bool) -> None:
    """Also where the policy had worked; with none left the task fails."""
    play = continuing(proven=proven).refused(413).refused(413)
    assert [note["form"][0] for note in play.notes("intent")[1:]] == ["all_items", "all_pairs", "last_pair"]
    ends(play.refused(413), "failed", "follow_up_too_large")


def test_a_body_over_the_limit_is_not_sent() -> None:
    """upstream_body_limit takes a smaller policy without asking; with none left nothing goes out."""
    smaller = len(REQUEST) + len(PAIR) + 1
    play = continuing(body_limit=smaller)
    assert play.notes("intent")[-1]["form"] == ["all_pairs", "input"]
    assert len(play.bodies[1]) == smaller
    completes(play)
    play = Playbook(spec_of(REQUEST, body_limit=smaller - 1)).start().opened().feed(CREATED, ASK).end()
    error = ends(play, "failed", "follow_up_too_large")
    assert str(smaller - 1) in error["message"]
    assert len(play.bodies) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_credential_holds_the_task(status: int) -> None:
    """401 and 403: held until a fresh credential comes; attached streams end and say so."""
    play = continuing().refused(status, '{"error_code":"PERMISSION_DENIED","message":"token expired"}')
    error = ends(play, "held", "credential_expired")
    assert error["upstream"]["status"] == status
    assert play.task.ledger.operation is None, "nothing was accepted, so no mark stands"


# --- unknown: never sent again --------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 204, 408, 500, 502, 503, 504, 529, 599])
def test_an_answer_of_unknown_outcome_needs_a_review(status: int) -> None:
    """408, other 5xx and a 2xx that is no event stream: something may have happened, so nothing is sent."""
    play = continuing().refused(status, "upstream request timeout")
    error = ends(play, "needs_review", "continuation_unknown")
    assert error["upstream"]["status"] == status
    assert "lookup (call_1) is unknown, nothing was sent again" in error["message"]
    assert len(play.bodies) == 2
    assert play.task.ledger.operation == play.operations[-1], "its mark stands"


def test_a_request_that_was_never_sent_is_retried() -> None:
    """Connection refused twice: back-off, then one accepted follow-up (RT-03)."""
    play = continuing().broke(sent=False, message="connection refused")
    assert play.timers["retry"].seconds == 1
    play.fire("retry").broke(sent=False, message="connection refused")
    assert play.timers["retry"].seconds == 2
    completes(play.fire("retry"))
    assert len(set(play.bodies[1:])) == 1
    assert len(set(play.operations)) == 4


def test_an_unreachable_upstream_uses_up_the_budget() -> None:
    """Never sent until the budget is gone: failed, unreachable, and an older 429 isn't blamed."""
    play = continuing(retry_budget=5).refused(429, Retry_After="1").fire("retry")
    while not play.finished:
        play.broke(sent=False, message="connection refused")
        if play.timers:
            play.fire("retry")
    error = ends(play, "failed", "upstream_unreachable")
    assert "upstream" not in error
    assert "connection refused" in error["message"]


@pytest.mark.parametrize("message", ["the connection was reset", "no byte for 600 s"])
def test_a_follow_up_that_was_sent_is_not_sent_again(message: str) -> None:
    """A reset behind the request: outcome unknown, one response.failed that says so (RT-03)."""
    error = ends(continuing().broke(message=message), "needs_review", "continuation_unknown")
    assert error["message"].startswith(f"Continuation state unknown: {message}.")
    assert "upstream" not in error


def test_a_first_request_that_was_never_sent() -> None:
    """legato never retries a first cycle: unreachable."""
    play = Playbook(spec_of(REQUEST)).start().broke(sent=False, message="connection refused")
    ends(play, "failed", "upstream_unreachable")
    assert len(play.bodies) == 1


def test_a_first_request_of_unknown_outcome() -> None:
    """A reset before the first head fails the task: going on means starting again."""
    ends(Playbook(spec_of(REQUEST)).start().broke(), "failed", "upstream_incomplete")


# --- bounds and timers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
def test_a_frame_that_is_too_large(*, later: bool) -> None:
    """One explicit failure that names the limit; what came before the frame stays; the exchange is closed."""
    play = continuing(max_frame=300).opened() if later else running(max_frame=300)
    play.feed(b"data: " + b"x" * 200 + b"\n\ndata: " + b"x" * 200, b"x" * 200)
    assert "300" in ends(play, "failed", "frame_too_large")["message"]
    assert b"x" * 200 in play.events[-2]
    assert b"x" * 201 not in play.stream


def test_a_full_log() -> None:
    """A task whose log has passed its bound fails, with its ending written."""
    play = running(max_log=1000).feed(*[b'data: {"x":"%b"}\n\n' % (b"x" * 500)] * 5)
    assert play.stream.count(b"data: ") <= 5
    ends(play, "failed", "log_full")


def test_the_grace_is_counted_from_the_last_frame() -> None:
    """Every frame behind an ending begins the grace anew, a comment doesn't."""
    play = running().feed(CALL)
    assert not play.timers
    play.feed(ASK)
    assert play.timers == {"grace": m.SetTimer("grace", 0.5)}
    play.timers.clear()
    play.feed(b": still here\n\n", b"data: half")
    assert not play.timers
    play.feed(b'\n\ndata: {"trace_id":"tr-1"}\n\n')
    assert play.timers
    play.fire("grace")
    assert (play.task.phase, play.exchange) == ("continuing", "asked")


def test_an_inner_terminal_starts_no_clock() -> None:
    """A terminal that turns out to be an inner one waits for nothing: the cycle may be quiet for long."""
    play = running().feed(COMPLETED)
    assert "grace" in play.timers
    play.feed(b'data: {"type":"response.created","response":{"id":"resp_i2"}}\n\n')
    assert not play.timers
    play.feed(CALL, COMPLETED).end().check()
    assert play.task.phase == "completed"


def test_a_frame_at_the_cut() -> None:
    """A frame whose blank line was read up to its CR is whole, whether the body then ends or breaks."""
    for how in ("fin", "cut"):
        play = running().feed(COMPLETED.replace(b"\n", b"\r\n").removesuffix(b"\n")).end(how)
        assert play.task.phase == "completed"


def test_a_cut_behind_an_ending_changes_nothing() -> None:
    """What stood before the connection broke counts: a terminal event ends, a continuation goes on."""
    play = running().feed(COMPLETED).broke()
    play.check()
    assert (play.task.phase, play.finished) == ("completed", True)
    completes(running().feed(CALL, ASK).broke())


def test_frames_that_are_not_json_are_told_of_once() -> None:
    """However many there are, the program's log has one line for a cycle."""
    play = running().feed(b"data: x\n\n" * 3, COMPLETED).end()
    assert [told.facts for told in play.told if "not JSON" in told.event] == [{"cycle": 1, "frames": 3}]


def test_every_sending_has_its_reason() -> None:
    """The marks say why each request went out, and name what it answers."""
    play = continuing().refused(429, '{"error_code":"BUSY"}', Retry_After="1").fire("retry")
    first, second, third = play.notes("intent")
    assert first["why"] == "started"
    assert second["why"] == "upstream asked to continue at step 3"
    assert third["why"] == "retry 1: 429 BUSY"
    assert (first["answers"], second["answers"], third["answers"]) == ([], ["continue_a1"], ["continue_a1"])


# --- required actions -----------------------------------------------------------------------------------


def test_every_open_action_is_listed() -> None:
    """Name, arguments and the event that it came with, in order; the summary has the ids."""
    tools = b'"tools":[{"type":"function","name":"lookup"}],"stream"'
    play = Playbook(spec_of(REQUEST.replace(b'"stream"', tools))).start().opened()
    play.feed(CREATED, CALL, APPROVAL, COMPLETED).end().check()
    assert (play.task.phase, play.task.reason) == ("input_required", "client_tool")
    assert [tuple(action) for action in play.task.actions] == [
        ("client_tool", "call_1", "lookup", "{}", 1),
        ("approval", "mcpr_1", "drop", "{}", 2),
    ]
    assert play.summary
    assert play.summary.required == ("call_1", "mcpr_1")
    assert not play.summary.open


def test_further_types_of_authorization() -> None:
    """A type that the settings name rests the task, and its id is never changed."""
    ask = (
        b'data: {"type":"response.output_item.done","item":'
        b'{"type":"vault_request","id":"fc_1","name":"vault"}}\n\n'
    )
    play = continuing(authorization=frozenset({"vault_request"})).opened().feed(ask, COMPLETED).end()
    play.check()
    assert (play.task.phase, play.task.reason) == ("input_required", "authorization")
    assert [action.id for action in play.task.actions] == ["fc_1"]
    assert [item["id"] for item in play.last["response"]["output"]] == ["fc_1", "fc_1"]


# --- pause ----------------------------------------------------------------------------------------------


def test_a_pause_withholds_the_follow_up() -> None:
    """The cycle in flight streams to its end; the follow-up and its mark wait for the resume, and go once."""
    play = running().pause("wrong table").feed(CALL, ASK).end()
    assert (play.task.phase, play.task.reason, play.exchange) == ("paused", "wrong table", "none")
    assert play.task.open
    assert len(play.events) == 2
    assert len(play.notes("intent")) == 1
    assert play.notes("withheld")
    play.resume()
    assert (play.task.phase, len(play.bodies)) == ("continuing", 2)
    assert play.notes("intent")[-1]["why"] == "resumed by owner"
    completes(play)
    assert len(play.bodies) == 2


def test_a_pause_that_is_lifted_in_time_changes_nothing() -> None:
    """A pause within one cycle withholds nothing, and twice is once."""
    play = running().pause("first").pause("second")
    assert play.task.reason == "first"
    assert len(play.notes("state")) == 1
    play.resume()
    assert (play.task.phase, play.task.reason) == ("running", None)
    play.feed(CALL, ASK).end()
    completes(play)


def test_a_pause_while_the_follow_up_is_on_its_way() -> None:
    """What is sent is sent: its cycle streams on, and only the next follow-up is withheld."""
    play = continuing().pause().opened().feed(ASK.replace(b"continue_a1", b"continue_b2")).end()
    assert (play.task.phase, len(play.bodies)) == ("paused", 2)
    completes(play.resume())
    assert len(play.bodies) == 3


def test_a_pause_while_a_retry_waits() -> None:
    """The time runs out, nothing goes out; the resume sends it, once."""
    play = continuing().refused(429, Retry_After="5").pause().fire("retry")
    assert (play.task.phase, len(play.bodies)) == ("paused", 2)
    completes(play.resume())
    assert len(play.bodies) == 3


def test_a_resume_while_a_retry_still_waits() -> None:
    """The retry keeps its time."""
    play = continuing().refused(429, Retry_After="5").pause().resume()
    assert (play.task.phase, len(play.bodies)) == ("continuing", 2)
    completes(play.fire("retry"))


def test_another_form_is_withheld_too() -> None:
    """A refusal under a pause chooses the next form; it goes out with the resume."""
    play = continuing().pause().refused(400, '{"message":"Invalid message sequence."}')
    assert (play.task.phase, len(play.bodies)) == ("paused", 2)
    play.resume()
    assert play.notes("intent")[-1]["form"] == ["all_pairs", "input"]
    completes(play)


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (COMPLETED, "completed"),
        (b'data: {"error":"boom"}\n\n', "failed"),
        (b'data: {"type":"response.incomplete","response":{}}\n\n', "incomplete"),
    ],
)
def test_work_that_ends_under_a_pause_has_ended(frames: bytes, phase: str) -> None:
    """A pause holds follow-ups, not endings."""
    play = running().pause("look").feed(frames).end()
    play.check()
    assert (play.task.phase, play.finished) == (phase, True)
    assert not play.task.open


def test_a_pause_covers_the_state_beneath() -> None:
    """needs_review, input_required and held under a pause come back with their reasons; no stream reopens."""
    for play, phase, reason in (
        (continuing().pause().broke(), "needs_review", "continuation_unknown"),
        (running().pause().feed(APPROVAL, COMPLETED).end(), "input_required", "approval"),
        (continuing().pause().refused(401), "held", "credential_expired"),
        (continuing().broke().pause("look"), "needs_review", "continuation_unknown"),
        (continuing().refused(403).pause("look"), "held", "credential_expired"),
    ):
        assert not play.task.open
        assert play.finished
        play.check()
        assert play.task.phase == "paused"
        play.finished = False
        play.resume().check()
        assert (play.task.phase, play.task.reason) == (phase, reason)
        assert not play.task.open
        assert len(play.bodies) <= 2


# --- cancel ---------------------------------------------------------------------------------------------

CANCELLED = {
    "queued": lambda: Playbook(spec_of(REQUEST)),
    "running, not answered": lambda: Playbook(spec_of(REQUEST)).start(),
    "running": running,
    "at an ending": lambda: running().feed(ASK, COMPLETED),
    "continuing": continuing,
    "waiting to retry": lambda: continuing().refused(429, Retry_After="9"),
    "a later cycle": lambda: continuing().opened().feed(CREATED),
    "paused": lambda: running().pause(),
    "withheld": lambda: running().pause().feed(ASK).end(),
}
CANCELLED_AT_REST = {
    "held": lambda: continuing().refused(401),
    "input_required": lambda: running().feed(APPROVAL, COMPLETED).end(),
    "needs_review": lambda: continuing().broke(),
    "paused above needs_review": lambda: continuing().broke().pause(),
}


@pytest.mark.parametrize("name", CANCELLED)
def test_cancel(name: str) -> None:
    """The stream ends with response.incomplete, cancelled; what runs is closed, nothing goes out any more."""
    play = CANCELLED[name]()
    sent = len(play.bodies)
    play.cancel().check()
    assert play.last["type"] == "response.incomplete"
    assert play.last["response"]["incomplete_details"] == {"reason": "cancelled"}
    assert (play.task.phase, play.exchange, len(play.bodies)) == ("cancelled", "none", sent)
    assert any(isinstance(effect, m.Finish) for effect in play.effects)


@pytest.mark.parametrize("name", CANCELLED_AT_REST)
def test_cancel_at_rest(name: str) -> None:
    """A task whose stream is over is cancelled without another ending."""
    play = CANCELLED_AT_REST[name]()
    stream = play.stream
    play.cancel().check()
    assert (play.task.phase, play.stream) == ("cancelled", stream)


# --- the table ------------------------------------------------------------------------------------------

INPUTS: dict[type, m.Input] = {
    m.Started: m.Started(NOW),
    m.Opened: m.Opened(NOW),
    m.Refused: m.Refused(NOW, 500, (), b""),
    m.BytesReceived: m.BytesReceived(b"", NOW),
    m.BodyEnded: m.BodyEnded(NOW),
    m.ExchangeFailed: m.ExchangeFailed(NOW, sent=True, message="reset"),
    m.TimerFired: m.TimerFired(NOW, "retry"),
    m.CancelRequested: m.CancelRequested(NOW),
    m.PauseRequested: m.PauseRequested(NOW),
    m.ResumeRequested: m.ResumeRequested(NOW),
}


def test_the_table_knows_every_phase_and_no_other() -> None:
    """Rows and targets are phases; what has ended for good takes nothing."""
    phases = set(get_args(m.Phase))
    assert set(TABLE) == phases
    for row in TABLE.values():
        assert set(row) <= set(get_args(m.Input))
        assert all(targets and targets <= phases for targets in row.values())
    assert not any(TABLE[phase] for phase in ("completed", "incomplete", "cancelled", "declined"))


@pytest.mark.parametrize("phase", get_args(m.Phase))
def test_what_is_not_in_the_table_is_an_error(phase: m.Phase) -> None:
    """A pair of phase and input that the table doesn't have raises, and changes nothing."""
    for kind in get_args(m.Input):
        if kind in TABLE[phase] or kind not in INPUTS:
            continue
        task = Task(spec_of(REQUEST))
        task.phase = phase
        with pytest.raises(IllegalMove, match=f"{phase} takes no {kind.__name__}"):
            task.handle(INPUTS[kind])
        assert task.phase == phase
        assert task.ledger.cursor == -1


def test_a_target_that_is_not_in_the_table_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that would take the task elsewhere is caught."""
    monkeypatch.setitem(TABLE, "queued", {m.Started: frozenset({"failed"})})
    with pytest.raises(IllegalMove, match="queued may not become running by Started"):
        Task(spec_of(REQUEST)).handle(m.Started(NOW))


@pytest.mark.parametrize("kind", [m.BytesReceived, m.BodyEnded])
def test_bytes_without_an_exchange_are_an_error(kind: type) -> None:
    """Nothing is read from an exchange that was never opened, or is closed."""
    with pytest.raises(IllegalMove):
        Playbook(spec_of(REQUEST)).start().tell(INPUTS[kind])
    with pytest.raises(IllegalMove):
        running().pause().feed(ASK).end().tell(INPUTS[kind])


def test_the_request_is_the_first_record() -> None:
    """The log begins with what is needed to read the rest."""
    play = Playbook(spec_of(REQUEST, request_note=b'{"path":"/x"}')).start()
    assert play.records[0] == m.Note("request", b'{"path":"/x"}')
