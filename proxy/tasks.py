"""The live tasks of this process: start one, find one, tell one something."""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio
import structlog
from anyio.abc import TaskGroup

from proxy.core import restart
from proxy.core.dialects import followup
from proxy.core.dialects.responses import Action
from proxy.core.ledger import Ledger
from proxy.core.messages import Note
from proxy.core.rules import Limits
from proxy.core.spec import Carried, Spec
from proxy.core.splice import dumps, loads
from proxy.core.task import Task
from proxy.endpoints import EndpointConfig
from proxy.errors import Draining, InvalidRequest, LogUnavailable, StaleWriter, TaskNotFound, TooManyTasks
from proxy.log.base import Log, NewTask
from proxy.runner import Runner, is_event_stream
from proxy.upstream import Exchange, Request, Upstream

logger = structlog.stdlib.get_logger(__name__)

# Waiting tasks of one owner among which an answer's is looked for, newest first.
MAX_WAITING = 1000
# The states in which somebody runs a task.
_RUNNING = ("queued", "running", "continuing", "paused")
# Seconds between two looks for tasks that may be forgotten.
SWEEP = 60.0
# Endpoints whose accepted form of follow-up is remembered; a deployment has a handful.
MAX_LEARNED = 1000


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """The settings that a task needs, as plain values. Times in seconds, sizes in bytes."""

    seam_grace: float = 0.5
    retry_budget: float = 120.0
    max_frame: int = 8 * 1024 * 1024
    max_log: int = 256 * 1024 * 1024
    max_tasks: int = 5000
    partial_answers: bool = True
    retain: float = 86400.0
    authorization: frozenset[str] = frozenset()
    tell_upstream: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """A request that asks for a task. ``body`` is plain JSON; ``endpoint`` names what learned it.

    ``config`` is what holds for its endpoint, ``limits`` what the request has made of its limits.
    """

    owner: str
    conversation_key: str | None
    endpoint: str
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    conversation: followup.Conversation
    force: bool
    limits: Limits
    config: EndpointConfig
    secrets: Sequence[str]
    first: Request | None = None


class Tasks:
    """Starts runners in a task group that lives as long as the server."""

    def __init__(self, log: Log, upstream: Upstream, group: TaskGroup, config: TaskConfig) -> None:
        self.live: dict[str, Runner] = {}
        self.draining = False
        self._quiet = anyio.Event()
        self._running: Counter[str] = Counter()
        self._log = log
        self._upstream = upstream
        self._group = group
        self._config = config
        self._learned: OrderedDict[str, tuple[str, str]] = OrderedDict()

    async def start(self, asked: Start) -> tuple[Runner | None, Exchange | None]:
        """A running task, or upstream's answer that made none: handed on as it is, nothing remains.

        ``UpstreamFault`` where there was no answer.
        """
        if self.draining:
            raise Draining("legato is shutting down; the request was not sent. Try again in a moment.")
        carried, body = await self._carried(asked)
        running = self._running[asked.owner]
        if running >= self._config.max_tasks:
            raise TooManyTasks(f"You have {running} running tasks; max_tasks is {self._config.max_tasks}.")
        runner = self._runner(asked, carried, body)
        task_id = runner.row.id
        try:
            exchange = await runner.begin()
            if is_event_stream(exchange):
                await runner.accept(exchange)
                self.live[task_id] = runner
                self._running[asked.owner] += 1
                self._group.start_soon(self._run, runner, carried)
                return runner, None
        except BaseException:
            with anyio.CancelScope(shield=True):
                await runner.abandon()
            raise
        with anyio.CancelScope(shield=True):  # the client may leave meanwhile
            await self._log.delete(task_id)
        return None, exchange

    async def settle(self) -> None:
        """No task stays running with nobody running it: end those that another process left behind."""
        while rows := await self._log.list(states=_RUNNING, limit=MAX_WAITING):
            for row in rows:
                ledger = Ledger()
                async for record in self._log.records(row.id):
                    ledger.fold(record)
                own_id = row.id.replace("task_", "resp_", 1)
                records, summary = restart.settle(ledger, row.summary, response_id=own_id, now=time.time())
                epoch = await self._log.take(row.id)
                await self._log.append(row.id, epoch, row.cursor, records, summary, sync=True)
                logger.warning("a task was left behind", task=row.id, state=summary.state, cycle=ledger.cycle)

    async def drain(self, seconds: float) -> None:
        """Start nothing more, and let what runs come to its end for so long; then end it as it stands."""
        self.draining = True
        self._quiet = anyio.Event()
        with anyio.move_on_after(seconds):
            while self.live:
                await self._quiet.wait()
        for runner in tuple(self.live.values()):
            await runner.interrupt(restart.GONE)

    async def sweep(self) -> None:
        """Forget, for ever, what has been over for ``retain`` seconds."""
        while True:
            try:
                await self._log.expire(time.time() - self._config.retain)
            except LogUnavailable as exc:
                logger.error("ended tasks can't be removed", error=exc.message)
            await anyio.sleep(SWEEP)

    async def _run(self, runner: Runner, carried: Carried) -> None:
        owner = runner.row.owner
        try:
            await self._hand_over(carried, runner.row.id)
            await runner.run()
        finally:
            del self.live[runner.row.id]
            if not self.live:
                self._quiet.set()
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]

    # --- an answer goes on where another task waited ------------------------------------------------

    async def _carried(self, asked: Start) -> tuple[Carried, bytes]:
        """What this request takes over, if it answers what one of the owner's tasks waits for."""
        given = asked.conversation.answered
        if not given:
            return Carried(), asked.body
        waiting = await self._log.list(owner=asked.owner, states=["input_required"], limit=MAX_WAITING)
        row = next((row for row in waiting if given.intersection(row.summary.required)), None)
        if row is None:
            return Carried(), asked.body
        ledger = Ledger()
        actions: tuple[Action, ...] = ()
        async for record in self._log.records(row.id):
            ledger.fold(record)
            if isinstance(record, Note) and record.kind == "actions":
                actions = tuple(Action(*facts) for facts in loads(record.data))
        left = tuple(action for action in actions if action.id not in given)
        if left and not self._config.partial_answers:
            names = ", ".join(action.id for action in left)
            raise InvalidRequest(
                f"Task {row.id} also waits for {names}; partial_answers is refuse.", param="input"
            )
        asks = [
            item
            for item in ledger.items
            if item.is_continuation and item.id and item.id not in ledger.answered
        ]
        missing = [item for item in asks if item.id not in asked.conversation.continued]
        body = followup.with_pairs(asked.body, asked.conversation, missing) if missing else asked.body
        cycles = ledger.cycles_before + ledger.cycle
        return Carried(row.id, tuple(item.id or "" for item in asks), left, cycles), body

    async def _hand_over(self, carried: Carried, task_id: str) -> None:
        """The old task is done: what it waited for has come, and another goes on."""
        row = await self._log.get(carried.continues) if carried.continues is not None else None
        if row is None or row.summary.state != "input_required":
            return
        facts = {"state": "completed", "reason": "answered", "continued_by": task_id, "at": time.time()}
        summary = row.summary._replace(
            state="completed", reason="answered", required=(), continued_by=task_id
        )
        note = Note("state", dumps(facts).encode())
        try:
            epoch = await self._log.take(row.id)
            await self._log.append(row.id, epoch, row.cursor, [note], summary)
        except (LogUnavailable, StaleWriter, TaskNotFound) as exc:
            logger.warning("a task that was answered could not be closed", task=row.id, error=str(exc))

    def _runner(self, asked: Start, carried: Carried, body: bytes) -> Runner:
        task_id = f"task_{secrets.token_hex(16)}"
        config, conversation = self._config, asked.conversation
        learned = self._learned.get(asked.endpoint)
        replay, key = asked.config.replay, asked.config.followup_key
        auto = replay == "auto"
        key = conversation.key if key == "same" else key
        form = learned if auto and learned else ("all_items" if auto else replay, key)
        told = [(b"legato-task", task_id.encode())] if config.tell_upstream else []
        first = asked.first if body is asked.body else None
        if first is not None:
            first = replace(first, headers=(*first.headers, *told))
        now = time.time()
        route = asked.target.split(b"?")[0].decode("latin-1")
        spec = Spec(
            task_id=task_id,
            body=body,
            conversation=conversation,
            request_note=dumps(
                {
                    "route": route,
                    "at": now,
                    "continues": carried.continues,
                    "cycles_before": carried.cycles,
                }
            ).encode(),
            force=asked.force,
            auto=auto,
            form=form,
            proven=auto and learned is not None,
            limits=asked.limits,
            seam_grace=config.seam_grace,
            retry_budget=config.retry_budget,
            body_limit=asked.config.upstream_body_limit,
            max_frame=config.max_frame,
            max_log=config.max_log,
            authorization=config.authorization,
            carried=carried,
        )
        task = Task(spec)
        return Runner(
            task,
            NewTask(task_id, asked.owner, asked.conversation_key, route, now, task.summary()),
            Request("POST", asked.target, (*asked.headers, *told), b"", decode=True, fresh=True),
            log=self._log,
            upstream=self._upstream,
            secrets=asked.secrets,
            learned=lambda replay, key: self._learn(asked.endpoint, replay, key),
            first=first,
        )

    def _learn(self, endpoint: str, replay: str, key: str) -> None:
        self._learned[endpoint] = (replay, key)
        self._learned.move_to_end(endpoint)
        if len(self._learned) > MAX_LEARNED:
            self._learned.popitem(last=False)
