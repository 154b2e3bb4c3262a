"""The table: what was measured, beside nginx, and whether legato keeps its bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Cell:
    """What one column came to in one scenario: its figures of each round, or why there are none.

    ``foreign``: how much of the proxy's core others took in each round.
    """

    rounds: dict[int, Mapping[str, float]] = field(default_factory=dict)
    foreign: dict[int, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skipped: str | None = None

    def best(self, figure: str) -> float | None:
        """The least of all rounds: other work on the machine only ever adds."""
        values = [found[figure] for found in self.rounds.values() if figure in found]
        return (max if figure == "rate" else min)(values, default=None)


Results = Mapping[tuple[str, str], Cell]


@dataclass(frozen=True)
class Row:
    """One line: a figure of a scenario. ``added``: what ``direct`` took is subtracted, round by round."""

    scenario: str
    figure: str
    title: str
    form: str
    ratio: bool = False
    added: bool = False


ROWS = (
    Row("paced-50", "cpu", "CPU µs/event, 50 × 20/s", "{:.1f}", ratio=True),
    Row("paced-200", "cpu", "CPU µs/event, 200 × 20/s", "{:.1f}", ratio=True),
    Row("paced-500", "cpu", "CPU µs/event, 500 × 20/s", "{:.1f}", ratio=True),
    Row("paced-1000", "cpu", "CPU µs/event, 1,000 × 20/s", "{:.1f}", ratio=True),
    Row("paced-1000", "share", "… share of the core, all in order", "{:.0f} %"),
    Row("later-200", "cpu", "CPU µs/event, 200 × 20/s, 2nd cycle", "{:.1f}"),
    Row("paced-50", "p50", "added latency p50, 50 × 20/s, ms", "{:.3f}", added=True),
    Row("paced-50", "p99", "added latency p99, 50 × 20/s, ms", "{:.3f}", added=True),
    Row("burst-1", "rate", "saturated, 1 stream, 1,000 events/s", "{:.0f}"),
    Row("burst-1", "cpu", "… CPU µs/event", "{:.2f}", ratio=True),
    Row("burst-50", "rate", "saturated, 50 streams, 1,000 events/s", "{:.0f}"),
    Row("burst-50", "cpu", "… CPU µs/event", "{:.2f}", ratio=True),
    Row("requests", "cpu", "CPU µs/request, 1 connection", "{:.0f}", ratio=True),
    Row("idle", "cpu", "CPU µs/request, 1,000 staying open", "{:.0f}", ratio=True),
    Row("idle", "p50", "… first byte p50, ms", "{:.2f}"),
    Row("idle", "p99", "… first byte p99, ms", "{:.2f}"),
    Row("idle", "memory", "KB per idle stream, 1,000 open", "{:.1f}"),
    Row("seam", "p50", "seam p50, ms", "{:.3f}"),
    Row("seam", "p99", "seam p99, ms", "{:.3f}"),
    Row("seam-split", "p50", "seam p50, body ends 1 ms later, ms", "{:.3f}"),
    Row("abandoned", "closed", "200 abandoned, closed upstream, ms", "{:.0f}"),
)


@dataclass(frozen=True)
class Bar:
    """What legato promises: a row's value in a column, at most ``limit``."""

    title: str
    row: tuple[str, str]
    column: str
    limit: float
    ratio: bool = False
    added: bool = False


def _bars() -> Sequence[Bar]:
    memory, sqlite = "legato memory:", "legato sqlite:"
    bars: list[Bar] = []
    for column, times, latency in ((memory, 3.0, 0.15), (sqlite, 4.0, 0.25)):
        for load in (200, 500):
            title = f"CPU per event at {load} × 20/s, times nginx"
            bars.append(Bar(title, (f"paced-{load}", "cpu"), column, times, ratio=True))
        title = "added latency p50 at 50 × 20/s, ms"
        bars.append(Bar(title, ("paced-50", "p50"), column, latency, added=True))
        bars.append(Bar("KB per idle stream", ("idle", "memory"), column, 30.0))
        bars.append(Bar("seam p50, ms", ("seam", "p50"), column, 0.4))
        bars.append(Bar("200 abandoned streams closed, ms", ("abandoned", "closed"), column, 50.0))
    bars.append(Bar("1,000 × 20/s all in order, % of one core", ("paced-1000", "share"), memory, 100.0))
    return sorted(bars, key=lambda bar: bar.column)


BARS = _bars()


class Table:
    """Puts results into lines of Markdown; notes say why a figure is missing."""

    def __init__(self, results: Results, columns: Sequence[str]) -> None:
        self._results = results
        self._columns = columns
        self._notes: list[str] = []

    def lines(self) -> Sequence[str]:
        """The table, then its notes."""
        head = ["", *self._columns]
        rows = [[row.title, *(self._text(row, column) for column in self._columns)] for row in self._rows()]
        widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
        rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
        table = [_line(head, widths), rule, *(_line(row, widths) for row in rows)]
        return [*table, "", *(f"[{i}] {note}" for i, note in enumerate(self._notes, 1))]

    def verdicts(self) -> Sequence[tuple[str, str]]:
        """For each bar ``pass``, ``MISS``, ``FAILED`` or ``skipped``, and a line that says more."""
        return [self._verdict(bar) for bar in BARS if (bar.row[0], bar.column) in self._results]

    def _rows(self) -> Sequence[Row]:
        known = {scenario for scenario, _ in self._results}
        return [row for row in ROWS if row.scenario in known]

    def _verdict(self, bar: Bar) -> tuple[str, str]:
        cell = self._results[bar.row[0], bar.column]
        value = self._added(*bar.row, bar.column) if bar.added else cell.best(bar.row[1])
        base = self._results.get((bar.row[0], "nginx"), Cell()).best(bar.row[1])
        said = f"{bar.column:<15} {bar.title}: "
        limit = f" (at most {bar.limit:g})"
        if value is None:
            why = cell.skipped or "; ".join(cell.failures[:1]) or "not measured"
            return "skipped" if cell.skipped else "FAILED", f"{said}{why}{limit}"
        if bar.ratio:
            if base is None:
                return "skipped", f"{said}nginx was not measured{limit}"
            value /= base
        return "pass" if value <= bar.limit else "MISS", f"{said}{value:.3g}{limit}"

    def _added(self, scenario: str, figure: str, column: str) -> float | None:
        """The least of what a round's proxy took above the same round's ``direct``."""
        cell, base = self._results[scenario, column], self._results.get((scenario, "direct"), Cell())
        both = cell.rounds.keys() & base.rounds.keys()
        return min((cell.rounds[n][figure] - base.rounds[n][figure] for n in both), default=None)

    def _text(self, row: Row, column: str) -> str:
        cell = self._results.get((row.scenario, column))
        if cell is None:
            return "–"
        value = self._added(row.scenario, row.figure, column) if row.added else cell.best(row.figure)
        if value is None:
            mark = self._note(column, cell.skipped or "; ".join(cell.failures[:1]) or "not measured")
            return f"– {mark}" if cell.skipped else f"failed {mark}"
        text = row.form.format(value)
        base = self._results.get((row.scenario, "nginx"), Cell()).best(row.figure)
        if row.ratio and base and column != "nginx":
            text += f" ({value / base:.1f}×)"
        if cell.failures:
            text += f" {self._note(column, f'{len(cell.failures)} round(s) failed: {cell.failures[0]}')}"
        return text

    def _note(self, column: str, why: str) -> str:
        note = f"{column}: {why}"
        if note not in self._notes:
            self._notes.append(note)
        return f"[{self._notes.index(note) + 1}]"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    align: Callable[[str, int], str] = str.rjust
    first = cells[0].ljust(widths[0])
    return "| " + " | ".join([first, *map(align, cells[1:], widths[1:])]) + " |"


def noise(results: Results) -> str:
    """How far the figures can be trusted: how the rounds differ, and who else was at work."""
    foreign = [share for cell in results.values() for share in cell.foreign.values()]
    told = f"other work took {_middle_and_most(foreign)} of the proxy's core"
    apart: list[float] = []
    for cell in results.values():
        values = [found["cpu"] for found in cell.rounds.values() if "cpu" in found]
        if len(values) > 1:
            apart.append(max(values) / min(values) - 1)
    if apart:
        told += f"; a cell's worst round took {_middle_and_most(apart)} more CPU than its best"
    return told


def _middle_and_most(shares: Sequence[float]) -> str:
    ordered = sorted(shares) or [0.0]
    return f"{100 * ordered[len(ordered) // 2]:.0f} % (median; at most {100 * ordered[-1]:.0f} %)"
