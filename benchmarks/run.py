"""``make bench``: what legato costs, beside peers measured in the same run.

The proxy under test has a core of its own, as far as the machine has two; its upstream and its clients share
another. Each figure is the best of its rounds, because other work on the machine only ever adds; in a round
the columns follow one another at once, so that they meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import machine
from peers import Absent, Failed, Place, running, upstream
from scenarios import ALL, GATEWAY_SCENARIOS, GATEWAYS, SCENARIOS, Bench, Scenario, warm_up
from table import Cell, Table, noise

BUILD = Path(__file__).parent.parent / "build/bench"
ROUNDS = 3
DISTURBED = 0.15  # of the proxy's core, taken by others in one measurement
EXTRA = 2  # rounds at most to make up for disturbed ones
TRIES = 2  # a cell that has failed this often is not tried again


def main() -> int:
    """Measure, print, and keep the raw figures beside the built programs."""
    options = read_options()
    scenarios = [
        one
        for one in (GATEWAY_SCENARIOS if options.gateways else SCENARIOS)
        if not options.only or any(one.key.startswith(key) for key in options.only)
    ]
    columns = GATEWAYS if options.gateways else ALL
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    files = machine.raise_open_files()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    print("\n".join(machine.describe()))
    print(f"command   {shlex.join(['python', *sys.argv])}; best of {rounds} round(s), {files} open files\n")
    others, proxy = machine.cores()
    if others == proxy:
        print("There is one core only: proxy, upstream and load client disturb each other.\n")
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=BUILD))
    place = Place(BUILD, folder, others, proxy)
    bench = Bench(place, **(QUICK if options.quick else FULL))
    began = time.monotonic()
    try:
        results = measure_all(bench, scenarios, rounds, options.calm)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    raw = {f"{scenario} / {column}": vars(cell) for (scenario, column), cell in results.items()}
    (BUILD / "results.json").write_text(json.dumps(raw, indent=1))
    table = Table(results, columns)
    print("", *table.lines(), sep="\n")
    print(f"noise     {noise(results)}")
    print(f"took      {(time.monotonic() - began) / 60:.0f} min\n")
    verdicts = table.verdicts()
    for verdict, text in verdicts:
        print(f"{verdict:<8} {text}")
    missed = any(verdict in ("MISS", "FAILED") for verdict, _ in verdicts)
    return 1 if missed and options.strict else 0


FULL = {"settle": 500, "window": 4000, "burst": 2000, "requests": 2000}
QUICK = {"settle": 300, "window": 2000, "burst": 1000, "requests": 500}


def measure_all(
    bench: Bench, scenarios: Sequence[Scenario], rounds: int, calm: float
) -> dict[tuple[str, str], Cell]:
    """Every scenario in every round for every column; a round that others disturbed is made up for."""
    results: dict[tuple[str, str], Cell] = {}
    for place, scenario in enumerate(scenarios, 1):
        quiet = number = 0
        wanted = rounds if scenario.repeat else 1
        while quiet < wanted and number < wanted + EXTRA:
            number += 1
            disturbed = False
            for column in scenario.columns:
                cell = results.setdefault((scenario.key, column), Cell())
                if cell.skipped or len(cell.failures) >= TRIES:
                    continue
                machine.await_calm((bench.place.others, bench.place.proxy), calm)
                told = measure(bench, scenario, column, cell, number)
                disturbed |= cell.foreign.get(number, 0) > DISTURBED
                at = f"[{place}/{len(scenarios)}] {scenario.title}"
                print(f"{at}, round {number}: {column.removesuffix(':')}: {told}", flush=True)
            quiet += not disturbed
    return results


def measure(bench: Bench, scenario: Scenario, column: str, cell: Cell, number: int) -> str:
    """One proxy, one load; what came of it, in a few words."""
    try:
        with upstream(bench.place) as port, running(column, bench.place, port) as proxy:
            warm_up(bench, proxy)
            core, pids = bench.place.proxy, proxy.pids
            before = time.monotonic(), machine.busy(core) - machine.cpu(pids)
            try:
                figures = scenario.measure(bench, proxy, port)
            finally:
                took, others = time.monotonic() - before[0], machine.busy(core) - machine.cpu(pids)
                share = max(0.0, (others - before[1]) / took) if pids else 0.0
                cell.foreign[number] = share
    except Absent as exc:
        cell.skipped = str(exc)
        return f"skipped: {exc}"
    except Failed as exc:
        cell.failures.append(f"{exc}{_blame(cell.foreign.get(number, 0))}")
        return f"FAILED: {cell.failures[-1]}"
    cell.rounds[number] = figures
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items()) + _blame(share)


def _blame(share: float) -> str:
    return f" (other work took {100 * share:.0f} % of the core)" if share > DISTURBED else ""


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round with short windows: about 3 minutes")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {ROUNDS}")
    parser.add_argument(
        "--calm", type=float, default=10, metavar="S", help="wait at most so long for quiet cores, default 10"
    )
    parser.add_argument("--only", nargs="+", metavar="KEY", help="scenarios whose key begins like this")
    parser.add_argument("--gateways", action="store_true", help="beside LiteLLM (make bench-gateways)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a bar is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
