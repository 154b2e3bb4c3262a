"""What is measured: each scenario plays one load through one proxy and gives the figures it is about.

A figure is only given for a run that was whole: every stream answered, every event there and in order. All
else raises ``Failed``.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import machine
from peers import KEY, Absent, Failed, Place, Proxy

PATH = "/v1/responses"
RATE = 20
KEPT_UP = 0.95  # of the events that were due in the window; below it, a proxy lags behind
SHORT = "paced-100000-1"  # one delta, at once
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
CANCEL = {"Legato-On-Disconnect": "cancel"}

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Bench:
    """How long to look. Times in milliseconds."""

    place: Place
    settle: int
    window: int
    burst: int
    requests: int

    def load(self, proxy: Proxy, play: str, *, whole: bool = True, **options: Any) -> dict[str, Any]:
        """Run the load client to its end; with ``whole`` anything less than every event is a failure."""
        with self.client(proxy, play, **options) as client:
            told = finish(client)
        return sound(told) if whole else told

    def client(
        self, proxy: Proxy, play: str, *, headers: Mapping[str, str] = HEADERS, **options: Any
    ) -> subprocess.Popen[str]:
        """Start the load client."""
        command = [str(self.place.build / "load"), "--port", str(proxy.port), "--path", PATH]
        command += ["--body", body(play)]
        for name, value in headers.items():
            if name != "Content-Type":
                command += ["--header", f"{name}: {value}"]
        for pid in proxy.pids:
            command += ["--process", str(pid)]
        for name, value in options.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=machine.on_core(self.place.others),
        )


def body(play: str) -> str:
    """The request that asks the upstream for this."""
    asked = {
        "model": "gpt-4o",  # LiteLLM streams only from models that it knows
        "user": play,
        "input": [{"role": "user", "content": "Why did sales fall in the second quarter?"}],
        "stream": True,
        "databricks_options": {"long_task": True},
    }
    return json.dumps(asked)


def finish(client: subprocess.Popen[str]) -> dict[str, Any]:
    """Let the client leave, if it holds its streams; what it counted."""
    out, _ = client.communicate("go\n")
    try:
        return dict(json.loads(out.splitlines()[-1]))
    except (IndexError, ValueError):
        raise Failed(f"the load client ended with {client.returncode}") from None


def sound(told: dict[str, Any]) -> dict[str, Any]:
    """The same, if every stream was whole and in order."""
    if told["failed"]:
        raise Failed(f"{told['failed']} of {told['streams']} streams failed: {told['failure']}")
    if told["incomplete"]:
        raise Failed(f"{told['incomplete']} streams ended without all of their events")
    if told["out_of_order"] or told["unnumbered"]:
        raise Failed(f"{told['out_of_order']} events out of order, {told['unnumbered']} without a number")
    return told


def stats(upstream: int) -> dict[str, Any]:
    """What upstream has counted."""
    connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=10)
    try:
        connection.request("GET", "/stats")
        return dict(json.loads(connection.getresponse().read()))
    finally:
        connection.close()


def warm_up(bench: Bench, proxy: Proxy) -> None:
    """What is done only once must not be in a figure."""
    bench.load(proxy, SHORT, requests=20, deadline=30)


# --- scenarios: (bench, proxy, upstream's port) -> figures -----------------------------------------------


def paced(streams: int, play: str = "paced") -> Callable[[Bench, Proxy, int], Figures]:
    """Token streams at their usual pace: CPU for each event, and latency from stamp to client."""

    def measure(bench: Bench, proxy: Proxy, upstream: int) -> Figures:
        ramp = 2 * streams
        events = RATE * (ramp + bench.settle + bench.window + 1000) // 1000
        told = bench.load(
            proxy,
            f"{play}-{RATE}-{events}",
            streams=streams,
            ramp=ramp,
            settle=bench.settle,
            window=bench.window,
            deadline=(ramp + bench.settle + bench.window) // 1000 + 16,
        )
        seconds, count = told["window_ns"] / 1e9, told["window_events"]
        if count < KEPT_UP * streams * RATE * seconds:
            raise Failed(f"delivered {100 * count / (streams * RATE * seconds):.0f} % of the rate")
        latency = {"p50": told["latency"]["p50"] / 1e6, "p99": told["latency"]["p99"] / 1e6}
        if not proxy.pids:
            return latency
        cpu = told["window_cpu_ns"]
        if not cpu:
            raise Failed("no CPU time was measured: another process has its number")
        return {"cpu": cpu / 1000 / count, "share": cpu / told["window_ns"] * 100, **latency}

    return measure


def saturated(streams: int) -> Callable[[Bench, Proxy, int], Figures]:
    """As much as goes through, many events to a read: an upper bound, no workload."""

    def measure(bench: Bench, proxy: Proxy, upstream: int) -> Figures:
        told = bench.load(proxy, f"burst-{bench.burst}", streams=streams, deadline=60)
        return {
            "cpu": told["whole_cpu_ns"] / 1000 / told["events"],
            "rate": told["events"] / told["whole_ns"] * 1e6,
        }

    return measure


def requests(bench: Bench, proxy: Proxy, upstream: int) -> Figures:
    """Short streams one after another on one connection: what a request costs."""
    told = bench.load(proxy, SHORT, requests=bench.requests, deadline=60)
    return {"cpu": told["whole_cpu_ns"] / 1000 / bench.requests, "ttfb": told["ttfb"]["p50"] / 1e6}


def idle(streams: int) -> Callable[[Bench, Proxy, int], Figures]:
    """Open streams that say nothing: memory, and what opening them one after another costs."""

    def measure(bench: Bench, proxy: Proxy, upstream: int) -> Figures:
        before = machine.resident(proxy.pids)
        with bench.client(
            proxy, "idle-60", streams=streams, ramp=2 * streams, hold=True, deadline=30
        ) as client:
            opened = client.stdout is not None and client.stdout.readline() == "open\n"
            time.sleep(0.5)
            memory = machine.resident(proxy.pids) - before
            told = finish(client)
        if not opened:
            raise Failed(f"{told['opened']} of {streams} streams opened: {told['failure']}")
        return {
            "memory": memory / 1024 / streams,
            "cpu": told["open_cpu_ns"] / 1000 / streams,
            "p50": told["ttfb"]["p50"] / 1e6,
            "p99": told["ttfb"]["p99"] / 1e6,
        }

    return measure


def seam(split: int) -> Callable[[Bench, Proxy, int], Figures]:
    """From the last byte of a cycle to the whole follow-up at upstream."""

    def measure(bench: Bench, proxy: Proxy, upstream: int) -> Figures:
        # The first follow-ups of a process are its slowest, and few: many tasks of some cycles each.
        bench.load(proxy, f"cycles-10-8-500-{split}", requests=12, deadline=60)
        counted = stats(upstream)
        if counted["wrong_follow_ups"] or not counted["seam"]:
            raise Failed(f"{counted['wrong_follow_ups']} follow-ups answered nothing")
        return {"p50": counted["seam"]["p50"] / 1e6, "p99": counted["seam"]["p99"] / 1e6}

    return measure


def abandoned(streams: int) -> Callable[[Bench, Proxy, int], Figures]:
    """Clients leave streams on which upstream is silent: until all are closed upstream."""

    def measure(bench: Bench, proxy: Proxy, upstream: int) -> Figures:
        headers = HEADERS
        if proxy.name.startswith("legato"):
            headers = {**HEADERS, **CANCEL}
            accepts_cancel(proxy)
        with bench.client(
            proxy, "idle-30", headers=headers, streams=streams, ramp=streams, hold=True, deadline=30
        ) as client:
            opened = client.stdout is not None and client.stdout.readline() == "open\n"
            time.sleep(0.5)
            told = finish(client)
        if not opened:
            raise Failed(f"{told['opened']} of {streams} streams opened: {told['failure']}")
        end = time.monotonic() + 5
        while (counted := stats(upstream))["streams"] and time.monotonic() < end:
            time.sleep(0.05)
        if counted["abandoned"] < streams:
            raise Failed(f"{counted['streams']} of {streams} still open upstream after 5 s")
        return {"closed": (counted["last_abandoned_at"] - told["left_at"]) / 1e6}

    return measure


def accepts_cancel(proxy: Proxy) -> None:
    """``Absent`` if legato can't yet be asked to cancel what its client leaves."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    try:
        connection.request("POST", PATH, body(SHORT), {**HEADERS, **CANCEL})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status == 400:
        error = json.loads(text)["error"]
        if error["code"] == "not_available":
            raise Absent(f"{next(iter(CANCEL))}: cancel answers 400 not_available")
    if answer.status != 200:
        raise Failed(f"{next(iter(CANCEL))}: cancel answers {answer.status}")


# --- the list -------------------------------------------------------------------------------------------

ALL = ("nginx", "the usual loop", "legato memory:", "legato sqlite:")
STITCHING = ALL[1:]


@dataclass(frozen=True)
class Scenario:
    """One load, for these columns; ``repeat``: again in every round."""

    key: str
    title: str
    measure: Callable[[Bench, Proxy, int], Figures]
    columns: Sequence[str] = ALL
    repeat: bool = True


SCENARIOS = (
    Scenario("paced-50", "50 streams × 20/s", paced(50), ("direct", *ALL)),
    Scenario("paced-200", "200 streams × 20/s", paced(200)),
    Scenario("paced-500", "500 streams × 20/s", paced(500)),
    Scenario("paced-1000", "1,000 streams × 20/s", paced(1000), ("nginx", *ALL[2:])),
    Scenario("later-200", "200 × 20/s in a later cycle", paced(200, "later"), STITCHING),
    Scenario("burst-1", "saturation, 1 stream", saturated(1)),
    Scenario("burst-50", "saturation, 50 streams", saturated(50)),
    Scenario("requests", "requests one after another", requests),
    Scenario("idle", "1,000 idle streams", idle(1000), repeat=False),
    Scenario("seam", "the seam", seam(0), STITCHING),
    Scenario("seam-split", "the seam, body ends 1 ms later", seam(1), STITCHING),
    Scenario("abandoned", "200 abandoned streams", abandoned(200), repeat=False),
)

GATEWAYS = ("nginx", "legato memory:", "LiteLLM")
GATEWAY_SCENARIOS = (
    Scenario("paced-50", "50 streams × 20/s", paced(50), ("direct", *GATEWAYS)),
    Scenario("burst-1", "saturation, 1 stream", saturated(1), GATEWAYS),
    Scenario("burst-50", "saturation, 50 streams", saturated(50), GATEWAYS),
    Scenario("requests", "requests one after another", requests, GATEWAYS),
)
