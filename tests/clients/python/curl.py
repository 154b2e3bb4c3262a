"""curl, whose output is read as an event stream."""

from __future__ import annotations

import json
import subprocess

from report import ASKED, Seen, report


def read(url: str, seen: Seen, call: str) -> None:
    """One stream to its end; ``[DONE]`` is an ending here."""
    command = [call, "-sSN", "--fail-with-body", "--max-time", "20"]
    command += [f"{url}/serving-endpoints/sup-demo/invocations"]
    command += ["-H", "Authorization: Bearer tok-A", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps(ASKED | {"stream": True})]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    for line in done.stdout.split("\n"):
        name, _, value = line.partition(": ")
        if line == "data: [DONE]":
            seen.ending = f"{seen.ending}, [DONE]" if seen.ending else "[DONE]"
        elif name == "data":
            seen.note(json.loads(value))
    seen.heartbeats = done.stdout.count("\n: legato\n")


report(read)
