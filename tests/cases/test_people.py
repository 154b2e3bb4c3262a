"""Clients that leave, owners who cancel, strangers who ask, and what nobody may ever read."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from support.client import connect
from support.frames import asks, completed, created, delta, done, message, sse, two_cycles
from support.legato import ASKED, OWNER, Legato, legato, proxied, released, request
from support.rules import check
from support.upstream import Answer, ScriptedUpstream

pytestmark = pytest.mark.anyio

STRANGER = ("authorization", "Bearer tok-B")


def limited(retry_after: int) -> Answer:
    """Not now."""
    return Answer(status=429, headers={"retry-after": str(retry_after)}, chunks=[b"{}"], framing="length")


# --- clients that leave -------------------------------------------------------------------------------


async def test_a_client_that_leaves_before_the_head_takes_everything_with_it() -> None:
    """DC-01 for a task: nobody could find it, so upstream is closed and no task is left."""
    async with proxied() as (upstream, proxy):
        upstream.plays(Answer(gate=anyio.Event()))
        async with proxy.start():
            await upstream.until(lambda: any(seen.complete for seen in upstream.requests))
        await released(upstream, proxy)
        await proxy.idle()
        assert await proxy.tasks() == []
        assert upstream.left == 1


async def test_a_client_that_leaves_in_the_middle_of_its_body_starts_nothing() -> None:
    """Half a body is no request: upstream hears nothing."""
    async with proxied() as (upstream, proxy):
        async with connect(proxy.port) as client:
            await client.send(request(headers=[OWNER, ("content-length", "999")]) + b'{"input":')
            await client.send(b'"x')
        await proxy.idle()
        assert upstream.requests == []
        assert await proxy.tasks() == []


@pytest.mark.parametrize("log", ["memory:", "sqlite:"])
async def test_a_client_that_leaves_later_leaves_its_task_running(tmp_path: Path, log: str) -> None:
    """DC-02: the follow-up is sent all the same, and the log says completed; nothing stays open."""
    gate = anyio.Event()
    path = log if log == "memory:" else f"{log}{tmp_path / 'log.db'}"
    async with proxied(log=path) as (upstream, proxy):
        first = sse(created(), done(message("one")), gate, delta("more"), asks())
        upstream.plays(first, sse(delta("two", "m2"), completed(message("two", "m2"))))
        async with proxy.start() as reading:
            await reading.until(b"output_item.done")
        await proxy.idle()
        assert (await proxy.show(reading.task))["state"] == "running"
        gate.set()
        shown = await proxy.until_state(reading.task, "completed")
        assert (shown["cycles"], shown["cursor"]) == (2, 4)
        assert len(upstream.requests) == 2


async def test_a_client_that_leaves_while_a_retry_waits_leaves_its_task_running() -> None:
    """The wait goes on without it."""
    async with proxied(heartbeat=0.05) as (upstream, proxy):
        upstream.plays(sse(created(), asks()), limited(1), sse(completed(message("a"))))
        async with proxy.start() as reading:
            await upstream.until(lambda: len(upstream.requests) == 2 and upstream.busy == 0)
            await reading.until(b": legato\n")
        assert (await proxy.until_state(reading.task, "completed"))["cycles"] == 2


@pytest.mark.parametrize("log", ["memory:", "sqlite:"])
async def test_a_client_may_leave_at_any_moment(tmp_path: Path, log: str) -> None:
    """Before the head nothing remains; later the task runs to its end. Nothing is half of either."""
    path = log if log == "memory:" else f"{log}{tmp_path / 'log.db'}"
    size = b"%d" % len(json.dumps(ASKED))
    async with proxied(log=path) as (upstream, proxy):
        upstream.rule = lambda seen: two_cycles()[seen.one("content-length") != size]
        for turns in range(0, 80, 2):
            async with connect(proxy.port) as client:
                await client.send(request(ASKED))
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
        async with proxy.start() as reading:
            await reading.head()
        await proxy.idle()
        for task in await proxy.tasks():
            await proxy.until_state(task["id"], "completed")
        ready = await proxy.ask(request(method="GET", path="/legato/ready"))
        assert json.loads(ready.body) == {"status": "ok", "running": 0}
        await upstream.until(lambda: upstream.busy == 0)
        assert 1 <= len(await proxy.tasks()) <= 41


# --- cancelling ---------------------------------------------------------------------------------------


async def test_cancel_ends_the_stream_and_closes_upstream() -> None:
    """In the middle of a cycle: ``response.incomplete``, reason ``cancelled``, upstream closed within 2 s."""
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), done(message("one")), end="hang"))
        async with proxy.start() as reading:
            await reading.until(b"output_item.done")
            answer = await proxy.cancel(reading.task)
            assert (answer.status, json.loads(answer.body)["state"]) == (200, "cancelled")
            stream = check(await reading.rest())
        assert stream.types[-1] == "response.incomplete"
        assert stream.response["incomplete_details"] == {"reason": "cancelled"}
        assert [item["id"] for item in stream.response["output"]] == ["m1"]
        await released(upstream, proxy)
        assert len(upstream.requests) == 1
        again = await proxy.cancel(reading.task)
        assert (again.status, json.loads(again.body)["state"]) == (200, "cancelled")


async def test_cancel_while_a_follow_up_waits_for_its_head() -> None:
    """The follow-up is out and unanswered: it is closed, and its late answer changes nothing."""
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), asks()), Answer(gate=anyio.Event()))
        async with proxy.start() as reading:
            await reading.until(b"response.created")
            await upstream.until(lambda: sum(seen.complete for seen in upstream.requests) == 2)
            assert (await proxy.cancel(reading.task)).status == 200
            assert check(await reading.rest()).types[-1] == "response.incomplete"
        await released(upstream, proxy)
        assert len(upstream.requests) == 2


async def test_cancel_while_a_retry_waits() -> None:
    """No request follows: another task's retry, begun later, has gone out and this one's has not."""
    async with proxied(heartbeat=0.05) as (upstream, proxy):
        upstream.rule = lambda seen: answers[(seen.one("x-name") or b"").decode()].pop(0)
        answers = {
            "cancelled": [sse(created(), asks()), limited(1)],
            "other": [sse(created(), asks()), limited(1), sse(completed(message("a")))],
        }
        async with proxy.start(headers=[OWNER, ("x-name", "cancelled")]) as reading:
            await upstream.until(lambda: len(upstream.requests) == 2 and upstream.busy == 0)
            await reading.until(b": legato\n")
            assert (await proxy.cancel(reading.task)).status == 200
            assert check(await reading.rest()).types[-1] == "response.incomplete"
        check((await proxy.whole(headers=[OWNER, ("x-name", "other")])).body)
        names = [seen.one("x-name") for seen in upstream.requests]
        assert names == [b"cancelled"] * 2 + [b"other"] * 3


async def test_cancel_of_an_ended_task_is_refused() -> None:
    """409 ``task_ended``, and it stays what it was."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        task = (await proxy.whole()).task
        answer = await proxy.cancel(task)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (409, "task_ended")
        assert answer.one("x-should-retry") == b"false"
        assert (await proxy.show(task))["state"] == "completed"


async def test_cancel_at_any_moment_of_a_task() -> None:
    """However the cancel falls, the stream obeys the rules and nothing of it is left open."""
    async with proxied(heartbeat=0.01) as (upstream, proxy):
        for turns in range(0, 60, 3):
            upstream.plays(*two_cycles())
            async with proxy.start() as reading:
                await reading.head()
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                answer = await proxy.cancel(reading.task)
                stream = check(await reading.rest())
                state = (await proxy.show(reading.task))["state"]
            assert answer.status == (200 if state == "cancelled" else 409)
            assert state in ("cancelled", "completed")
            assert stream.types[-1] == f"response.{'incomplete' if state == 'cancelled' else 'completed'}"
        await upstream.until(lambda: upstream.busy == 0)


# --- owners -------------------------------------------------------------------------------------------


async def test_another_owners_task_is_not_there() -> None:
    """404 for reading and cancelling, an empty list; the owner still has it. Upstream hears nothing of it."""
    async with proxied() as (upstream, proxy):
        upstream.plays(sse(created(), end="hang"))
        async with proxy.start() as reading:
            await reading.until(b"response.created")
            for who in (STRANGER, ("x-a", "no credential at all")):
                path = f"/legato/tasks/{reading.task}"
                shown = await proxy.ask(request(method="GET", path=path, headers=[who]))
                assert (shown.status, json.loads(shown.body)["error"]["code"]) == (404, "task_not_found")
                assert (await proxy.cancel(reading.task, who)).body == shown.body
                assert await proxy.tasks(who) == []
            assert [task["id"] for task in await proxy.tasks()] == [reading.task]
            assert (await proxy.show(reading.task))["state"] == "running"
        assert len(upstream.requests) == 1


async def test_an_unknown_task_looks_like_another_owners() -> None:
    """The same bytes, so that nobody can find out which ids exist."""
    async with proxied() as (upstream, proxy):
        upstream.plays(*two_cycles())
        task = (await proxy.whole()).task
        unknown = f"task_{'0' * 32}"
        answers = [
            await proxy.ask(request(method="GET", path=f"/legato/tasks/{id_}", headers=[STRANGER]))
            for id_ in (task, unknown)
        ]
        assert answers[0] == answers[1]
        assert len(upstream.requests) == 2, "no path under the prefix goes upstream"


# --- secrets ------------------------------------------------------------------------------------------

SECRETS = {
    "authorization": "Bearer tok-4f1c9d7e2b",
    "cookie": "session=c00kie-8d2f6a",
    "x-api-key": "key-77aa31bb90",
    "x-forwarded-access-token": "fwd-5512cdd0ee",
    "x-my-password": "pw-99e0c1d2f3",
}
VALUES = [value.rpartition(" ")[2].rpartition("=")[2].encode() for value in SECRETS.values()]
QUERY = "q-secret-13579bdf"


@contextlib.contextmanager
def serving(upstream: str, folder: Path) -> Iterator[int]:
    """``legato serve`` with its log and its stderr in this folder; its port."""
    program = Path(sys.executable).with_name("legato")
    command = [program, "serve", "--upstream", upstream, "--port", "0"]
    command += ["--log", f"sqlite:{folder / 'legato.db'}", "--log-level", "debug", "--retry-budget", "0"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("LEGATO_")}
    with (folder / "stderr").open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=file)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().rpartition(b":")[2])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        process.stdout.close()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder; the log's own are nobody else's to read."""
    for file in folder.glob("legato.db*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_no_secret_is_kept_or_told(tmp_path: Path) -> None:
    """Not in the log's files, not on stderr, not in an error: credentials, cookies, tokens in the query."""
    echo = json.dumps({"error_code": "BAD", "message": f"{SECRETS}"}).encode()
    refusals = [Answer(status=status, chunks=[echo], framing="length") for status in (400, 500, 401, 429)]
    path = f"/serving-endpoints/a/invocations?access_token={QUERY}&x=1"
    bodies: list[bytes] = []
    async with ScriptedUpstream() as upstream:
        with serving(upstream.url, tmp_path) as port:
            proxy = Legato(port)
            for refusal in refusals:
                upstream.plays(sse(created(), done(message("one")), asks()), refusal)
                bodies.append((await proxy.whole(path=path, headers=list(SECRETS.items()))).body)
            upstream.plays(sse(created(), delta("cut"), end="reset"))
            bodies.append((await proxy.whole(path=path, headers=list(SECRETS.items()))).body)
            upstream.plays(*two_cycles())
            bodies.append((await proxy.whole(path=path, headers=list(SECRETS.items()))).body)
            upstream.shut()
            answer = await proxy.ask(request(ASKED, path=path, headers=list(SECRETS.items())))
            bodies.append(answer.body)
            files = contents(tmp_path)
        files |= {f"{name} at the end": content for name, content in contents(tmp_path).items()}
    assert any("wal" in name for name in files)
    assert b"task ended" in files["stderr"]
    for name, content in [*files.items(), *((f"answer {n}", body) for n, body in enumerate(bodies))]:
        for secret in [*VALUES, QUERY.encode()]:
            assert secret not in content, f"{secret!r} in {name}"
    assert bodies[0].count(b"***") >= 5


async def test_the_log_is_the_owners_only(tmp_path: Path) -> None:
    """Owners are known by a hash whose key stays beside the log: a restart knows them again."""
    path = f"sqlite:{tmp_path / 'legato.db'}"
    async with ScriptedUpstream() as upstream:
        async with legato(upstream, log=path) as proxy:
            upstream.plays(*two_cycles())
            task = (await proxy.whole()).task
        async with legato(upstream, log=path) as proxy:
            assert (await proxy.show(task))["state"] == "completed"
            assert await proxy.tasks(STRANGER) == []
    assert b"tok-A" not in b"".join(contents(tmp_path).values())
