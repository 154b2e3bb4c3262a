"""The machine under the benchmark: cores, processes, memory, and who else is at work on it."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
PR_SET_PDEATHSIG = 1
CPUCLOCK_SCHED = 2  # clock_getcpuclockid(3), which Python has for threads only
LOOK = 1.0
CALM = 0.1  # of a core, taken by others
OPEN_FILES = 20_000
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
LIBRARIES = ("legato", "aiohttp", "uvicorn", "uvloop", "httptools", "orjson", "starlette", "httpx")


def cores() -> tuple[int, int]:
    """The core for everything else and the core for the proxy; the same one where there is only one."""
    mine = sorted(os.sched_getaffinity(0))
    return mine[0], mine[-1]


def raise_open_files() -> int:
    """As many open files as we may have; a thousand streams need two thousand in the proxy."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (max(hard, OPEN_FILES), hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            break
        except (ValueError, OSError):
            continue
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def on_core(core: int) -> Callable[[], None]:
    """What a child does before it becomes its program: take its core, and not outlive us."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return prepare


def clean_environment() -> dict[str, str]:
    """Without what would lead a peer to an HTTP proxy or change legato's settings."""
    unwanted = ("LEGATO_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(unwanted)}


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_port(port: int, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process takes connections before the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
        except OSError:
            time.sleep(0.05)
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that we started; ``kill`` where it doesn't listen."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tree(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def resident(pids: Sequence[int]) -> int:
    """Bytes of memory in use by these processes."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE for pid in pids)


def busy(core: int) -> float:
    """Seconds that a core has worked since it was started, for whomever, the hypervisor's share included."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
            return (user + nice + system + irq + softirq + steal) / TICKS
    return 0.0


def cpu(pids: Sequence[int]) -> float:
    """CPU seconds of these processes: what their stat file says, in nanoseconds rather than ticks."""
    clocks = (~pid << 3 | CPUCLOCK_SCHED for pid in pids)
    return sum(time.clock_gettime_ns(clock) for clock in clocks) / 1e9


def await_calm(watched: Sequence[int], seconds: float) -> None:
    """Wait until these cores have hardly anything else to do, but no longer than this."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = [busy(core) for core in watched]
        time.sleep(LOOK)
        if all(busy(core) - was < CALM * LOOK for core, was in zip(watched, before, strict=True)):
            return


def describe() -> list[str]:
    """Machine and versions, one line each."""
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if "MemTotal" in line), 0)
    others, proxy = cores()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES)
    return [
        f"machine   {model}, {os.cpu_count()} cores, {memory / 2**20:.0f} GiB, Linux {platform.release()}",
        f"cores     proxy on {proxy}, upstream and load client on {others}; load average "
        + " ".join(f"{load:.1f}" for load in os.getloadavg()),
        f"versions  Python {platform.python_version()}, {versions}; commit {_commit()}",
    ]


def _commit() -> str:
    """The state of the code under test, if git knows it."""
    asked = ["git", "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told.stdout.strip()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
