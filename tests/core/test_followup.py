"""What legato sends: the client's own bytes, and no change but the ones that are named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.dialects import followup
from proxy.core.ledger import Item, make_item
from proxy.core.splice import loads

ASK = '{"type":"task_continue_request", "id":"continue_a1","step":3}'
REPLY = '{"type":"task_continue_response","continue_request_id":"continue_a1"}'
MESSAGE = '{"id":"m1", "type":"message","content":[]}'


def item(raw: str, cycle: int = 1) -> Item:
    """A finished item as the ledger has it."""
    return make_item(raw, raw, loads(raw.encode()), cycle, None)


ITEMS = [item(MESSAGE), item(ASK)]
ADDED = f"{MESSAGE},{ASK},{REPLY}"


def follow_up(raw: str, *, key: str | None = None, replay: str = "all_items", long_task: bool = True) -> str:
    """The follow-up to a request, with one message and one pair."""
    conversation = followup.read(loads(raw.encode())).key
    body = followup.follow_up(
        raw.encode(), conversation, key or conversation, ITEMS, replay, long_task=long_task
    )
    return body.decode()


# --- byte for byte --------------------------------------------------------------------------------------

LONG = '"databricks_options":{"long_task":true}'


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(
            '{ "z" : 1, "input":[ {"b":1,"a":2} ] ,\n\t"stream" : true, ' + LONG + "}\n",
            '{ "z" : 1, "input":[ {"b":1,"a":2} ,@] ,\n\t"stream" : true, ' + LONG + "}\n",
            id="order and spaces",
        ),
        pytest.param(
            '{"a":1,"a":2,"input":[7],"input":[{"k":1,"k":2}],"stream":true,' + LONG + "}",
            '{"a":1,"a":2,"input":[7],"input":[{"k":1,"k":2},@],"stream":true,' + LONG + "}",
            id="equal keys: the last one is the conversation",
        ),
        pytest.param(
            '{"t":1.10,"e":1E5,"n":12345678901234567890123,"input":[-0.0],"stream":true,' + LONG + "}",
            '{"t":1.10,"e":1E5,"n":12345678901234567890123,"input":[-0.0,@],"stream":true,' + LONG + "}",
            id="numbers as written",
        ),
        pytest.param(
            r'{"s":"\ud83d \u00e9 \/ é","input":["\udc00"],"stream":true,' + LONG + "}",
            r'{"s":"\ud83d \u00e9 \/ é","input":["\udc00",@],"stream":true,' + LONG + "}",
            id="escapes as written",
        ),
        pytest.param(
            r'{"\u0069nput":["]\"]"],"stream":true,' + LONG + "}",
            r'{"\u0069nput":["]\"]",@],"stream":true,' + LONG + "}",
            id="an escaped key and brackets in a string",
        ),
        pytest.param(
            '{"legato":{"max_cycles":5},"input":[],"background":true,"x":{"legato":1,"background":2},'
            '"stream":true,' + LONG + "}",
            '{"input":[@],"x":{"legato":1,"background":2},"stream":true,' + LONG + "}",
            id="legato first, background in the middle, both kept inside",
        ),
        pytest.param(
            '{"input":[],"stream":true,' + LONG + ', "background":false , "legato":{} }',
            '{"input":[@],"stream":true,' + LONG + " }",
            id="both at the end",
        ),
        pytest.param(
            '{"input":[],"stream":false,"databricks_options":{"long_task" : false,"x":[]}}',
            '{"input":[@],"stream":true,"databricks_options":{"long_task" : true,"x":[]}}',
            id="set in place",
        ),
        pytest.param(
            '{"input":[]}', '{"input":[@],"stream":true,"databricks_options":{"long_task":true}}', id="added"
        ),
        pytest.param(
            '{"input":[],"databricks_options":{ },"stream":"true"}',
            '{"input":[@],"databricks_options":{ "long_task":true},"stream":true}',
            id="added to an empty object; a string is no true",
        ),
        pytest.param(
            '{"input":[],"stream":true,"databricks_options":null}',
            '{"input":[@],"stream":true,"databricks_options":{"long_task":true}}',
            id="null is no object",
        ),
        pytest.param(
            r'{"input":"a \"b\" \ud83d","stream":true,' + LONG + "}",
            r'{"input":[{"role":"user","content":"a \"b\" \ud83d"},@],"stream":true,' + LONG + "}",
            id="a string becomes one user message",
        ),
        pytest.param(
            '{"input":{"role":"user","content":"x"},"stream":true,' + LONG + "}",
            '{"input":[{"role":"user","content":"x"},@],"stream":true,' + LONG + "}",
            id="one object becomes a list",
        ),
        pytest.param(
            '{"input":null,"stream":true,' + LONG + "}", '{"input":[@],"stream":true,' + LONG + "}", id="null"
        ),
        pytest.param('{"stream":true,' + LONG + "}", '{"stream":true,' + LONG + ',"input":[@]}', id="none"),
        pytest.param(
            '{"messages":[1],"stream":true,' + LONG + "}",
            '{"messages":[1,@],"stream":true,' + LONG + "}",
            id="under messages",
        ),
        pytest.param(
            '{"input":[1],"messages":[2],"stream":true,' + LONG + "}",
            '{"input":[1,@],"messages":[2],"stream":true,' + LONG + "}",
            id="input wins over messages",
        ),
    ],
)
def test_byte_for_byte(request_: str, expected: str) -> None:
    """The conversation grows, stream and long_task are on, legato and background are gone; all else stays."""
    assert follow_up(request_) == expected.replace("@", ADDED)


def test_long_task_is_not_invented() -> None:
    """A task that never asked for long_task doesn't ask for it in its follow-ups."""
    assert follow_up('{"input":[],"stream":true}', long_task=False) == f'{{"input":[{ADDED}],"stream":true}}'


@pytest.mark.parametrize(("key", "other"), [("input", "messages"), ("messages", "input")])
def test_the_other_key(key: str, other: str) -> None:
    """The whole conversation moves, and nothing is left under the old key."""
    raw = f'{{"{key}":[1],"stream":true,{LONG}}}'
    assert follow_up(raw, key=other) == f'{{"stream":true,{LONG},"{other}":[1,{ADDED}]}}'
    assert follow_up(f'{{"{key}":[1]}}', key=other, long_task=False) == (
        f'{{"{other}":[1,{ADDED}],"stream":true}}'
    )


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.none(), max_size=5),
    st.data(),
)
def test_any_other_member_stays_where_it_is(others: dict[str, object], data: st.DataObject) -> None:
    """Whatever else the client sends goes along, in its order."""
    own = {"input": ["x"], "stream": True, "databricks_options": {"long_task": True}}
    members = data.draw(st.permutations([*{**others, **own}.items()]))
    raw = json.dumps(
        dict(members), ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
    )
    if "legato" in others or "background" in others:
        return
    before, after = json.loads(raw), json.loads(follow_up(raw))
    assert list(after) == list(before)
    after["input"] = after["input"][:1]
    assert after == before


# --- what is replayed -----------------------------------------------------------------------------------

SECOND = ASK.replace("a1", "b2")
HISTORY = [item(MESSAGE), item(ASK), item(MESSAGE, 2), item(SECOND, 2), item(SECOND.replace("b2", "b3"), 2)]


@pytest.mark.parametrize(
    ("replay", "expected"),
    [
        ("all_items", ["m1", "?a1", "!a1", "m1", "?b2", "!b2", "?b3", "!b3"]),
        ("all_pairs", ["?a1", "!a1", "?b2", "!b2", "?b3", "!b3"]),
        ("last_pair", ["?b2", "!b2", "?b3", "!b3"]),
    ],
)
def test_replay_policies(replay: str, expected: list[str]) -> None:
    """Each response item stands right behind its request, also where the last cycle had several."""
    body = json.loads(followup.follow_up(b'{"input":[]}', "input", "input", HISTORY, replay, long_task=True))
    told = []
    for one in body["input"]:
        mark = {"task_continue_request": "?", "task_continue_response": "!"}.get(one["type"], "")
        told.append(mark + one.get("continue_request_id", one.get("id")).removeprefix("continue_"))
    assert told == expected


def test_an_answer_keeps_the_bytes_of_the_id() -> None:
    """An id with escapes is repeated as it was written; the response item holds nothing else."""
    raw = r'{"type":"task_continue_request","id":"continue_\u0061\ud83d\/"}'
    assert followup.answer(item(raw)) == (
        r'{"type":"task_continue_response","continue_request_id":"continue_\u0061\ud83d\/"}'
    )


# --- the first request ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "force", "expected"),
    [
        ('{"input":[1.10],"stream":true}', False, '{"input":[1.10],"stream":true}'),
        ('{"input":"x","stream":true,"legato":{"a":1}}', False, '{"input":"x","stream":true}'),
        ('{"background":false,"stream":true}', False, '{"background":false,"stream":true}'),
        ('{"background":true,"stream":true}', False, '{"stream":true}'),
        ('{"stream":false}', False, '{"stream":true}'),
        ('{"stream":true}', True, '{"stream":true,"databricks_options":{"long_task":true}}'),
        (f'{{"stream":true,{LONG}}}', True, f'{{"stream":true,{LONG}}}'),
    ],
)
def test_first_body(request_: str, force: bool, expected: str) -> None:
    """The client's bytes, without what is legato's own, streaming, and with long_task where it is forced."""
    assert followup.first_body(request_.encode(), force=force).decode() == expected


# --- what a request says --------------------------------------------------------------------------------


def test_read() -> None:
    """Declared function tools in both forms, ids that the input answers, the key, and what was asked for."""
    found = followup.read(
        {
            "input": [
                "odd",
                {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": False},
                {"type": "function_call_output", "call_id": "call_1", "output": ""},
                {"type": "function_call", "call_id": "call_2"},
                {"type": "mcp_approval_response", "approval_request_id": 7},
            ],
            "tools": [
                {"type": "function", "name": "a"},
                {"type": "function", "function": {"name": "b"}},
                {"type": "function", "function": {}},
                {"type": "web_search", "name": "c"},
                "odd",
            ],
            "stream": True,
            "databricks_options": {"long_task": True},
        }
    )
    assert (found.key, found.declared, found.answered) == ("input", {"a", "b"}, {"mcpr_1", "call_1"})
    assert (found.streams, found.long_task) == (True, True)


@pytest.mark.parametrize(
    "body",
    [{}, {"input": "x"}, {"input": {}, "tools": {}}, {"tools": 7, "databricks_options": []}, {"stream": 1}],
)
def test_read_anything(body: dict[str, object]) -> None:
    """A body of any shape is looked at, and says nothing that isn't there."""
    found = followup.read(body)
    assert (found.key, found.declared, found.answered) == ("input", set(), set())
    assert (found.streams, found.long_task) == (False, None)


# --- another form ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (("all_items", "input"), "Invalid message sequence.", ("all_pairs", "input")),
        (("all_pairs", "input"), "INVALID MESSAGE SEQUENCE", ("last_pair", "input")),
        (("last_pair", "input"), "Invalid message sequence.", None),
        (("all_items", "input"), "tool call without result", None),
        (("all_items", "messages"), "Please use 'input' field instead.", ("all_items", "input")),
        (("all_pairs", "input"), 'use "messages"', ("all_pairs", "messages")),
        (("all_items", "input"), "your input is not supported", ("all_pairs", "input")),
        (("all_items", "input"), "", None),
    ],
)
def test_next_form(form: tuple[str, str], text: str, expected: tuple[str, str] | None) -> None:
    """A text about the form takes the next policy, one that names the other key that key, any other none."""
    assert followup.next_form(*form, text, key_tried=False) == expected


def test_the_other_key_is_tried_once() -> None:
    """A second text that names the other key is final."""
    assert followup.next_form("all_items", "input", "use 'messages'", key_tried=True) is None
