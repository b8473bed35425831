"""What a run found: medians, ratios against each peer, goals; as text, Markdown, JSON and a plot."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from load import Sample

OURS = "headrace"
_BEGIN, _END = "<!-- bench: begin -->", "<!-- bench: end -->"


@dataclass(frozen=True)
class Machine:
    """Where and when."""

    when: datetime
    cpu: str
    cores: int
    kernel: str
    python: str
    commit: str
    background: float
    """Cores busy with something else before the run began."""

    @property
    def file_stamp(self) -> str:
        return self.when.strftime("%Y-%m-%d-%H%M%S")

    @property
    def summary(self) -> str:
        return (
            f"{self.when:%Y-%m-%d %H:%M} UTC, {self.cores} cores of {self.cpu}, Linux {self.kernel}, "
            f"Python {self.python}, commit {self.commit}; before the run {self.background:.2f} cores were busy"
        )


@dataclass
class Row:
    """The measurements of one server at one point, a round each; None where one failed."""

    name: str
    samples: list[Sample | None] = field(default_factory=list)

    def median(self, value: Callable[[Sample], float]) -> float:
        found = [value(sample) for sample in self.samples if sample is not None]
        return median(found) if found else math.nan


@dataclass
class Cell:
    """One case, door and concurrency. The first row is headrace's."""

    case: str
    door: str
    concurrency: int
    rows: list[Row]

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


@dataclass
class Run:
    """Everything that was measured."""

    machine: Machine
    client: str
    seconds: float
    rounds: int
    versions: dict[str, str]
    cells: list[Cell] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return all(len(row.samples) == self.rounds and None not in row.samples for c in self.cells for row in c.rows)


_VALUES: dict[str, Callable[[Sample], float]] = {
    "throughput": lambda sample: sample.throughput,
    "p50": lambda sample: sample.p50_us,
    "p99": lambda sample: sample.p99_us,
    "CPU": lambda sample: sample.cpu_us,
}


def ratio(cell: Cell, peer: str, name: str) -> float:
    """Return headrace's value over the peer's, round by round, and of those the median; NaN without a pair."""
    value, other = _VALUES[name], cell.row(peer)
    if other is None:
        return math.nan
    pairs = zip(cell.rows[0].samples, other.samples, strict=False)
    found = [value(ours) / value(theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    return median(found) if found else math.nan


@dataclass(frozen=True)
class Goal:
    """A demand on one ratio at some points."""

    case: str
    peer: str
    value: str
    at_least: float | None
    at_most: float | None
    concurrency: tuple[int, ...] | None

    def points(self, run: Run) -> Iterator[tuple[Cell, float, bool]]:
        for cell in run.cells:
            wanted = cell.case == self.case and (self.concurrency is None or cell.concurrency in self.concurrency)
            found = ratio(cell, self.peer, self.value) if wanted else math.nan
            if not math.isnan(found):
                yield cell, found, self.met(found)

    def met(self, found: float) -> bool:
        return (self.at_least is None or found >= self.at_least) and (self.at_most is None or found <= self.at_most)

    @property
    def bound(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


GOALS = (
    Goal("add_sub", "triton", "throughput", 1.3, None, (8, 32)),
    Goal("add_sub", "triton", "p99", None, 1.0, (8, 32)),
    Goal("add_sub", "triton", "p50", None, 1.2, (1,)),
    Goal("add_sub", "mlserver", "throughput", 5.0, None, (8, 32)),
    Goal("identity", "triton", "throughput", 1.0, None, None),
)


def describe_machine(root: Path, background: float) -> Machine:
    """Return what is known of this machine. `root` is the working tree."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", text)
    return Machine(
        datetime.now(UTC),
        model[1] if model else platform.processor() or "an unknown processor",
        len(os.sched_getaffinity(0)),
        platform.release(),
        platform.python_version(),
        _commit(root),
        background,
    )


def _commit(root: Path) -> str:
    try:
        short = subprocess.run(
            ["git", "-C", root, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return short.stdout.strip()


# --- tables -----------------------------------------------------------------------------------------------------------


def _peers(run: Run) -> list[str]:
    return [name for name in run.versions if name != OURS]


def measured_table(run: Run) -> list[list[str]]:
    """Return the medians: a line for each server at each point."""
    lines = [["case", "door", "concurrency", "server", "infer/s", "p50 ms", "p99 ms", "server CPU us/request"]]
    for cell in run.cells:
        for row in cell.rows:
            throughput, p50, p99, cpu = (row.median(value) for value in _VALUES.values())
            lines.append(
                [
                    *(cell.case, cell.door, str(cell.concurrency), row.name),
                    *(_number(throughput, 0), _number(p50 / 1000, 2), _number(p99 / 1000, 2), _number(cpu, 0)),
                ]
            )
    return lines


def ratio_table(run: Run) -> list[list[str]]:
    """Return headrace over each peer."""
    lines = [["case", "door", "concurrency", "against", *(f"{name} ratio" for name in _VALUES)]]
    for cell in run.cells:
        for peer in _peers(run):
            ratios = [_number(ratio(cell, peer, name), 2) for name in _VALUES]
            lines.append([cell.case, cell.door, str(cell.concurrency), peer, *ratios])
    return lines


def goal_table(run: Run) -> list[list[str]]:
    """Return each goal with what was found; only those that this run has points for."""
    lines = [["goal", "wanted", "found", ""]]
    for goal in GOALS:
        points = list(goal.points(run))
        if not points:
            continue
        name = f"{goal.case}: {goal.value} of {goal.peer}"
        found = ", ".join(f"{cell.door} {cell.concurrency}: {value:.2f}" for cell, value, _ in points)
        missed = sum(not met for _, _, met in points)
        lines.append([name, goal.bound, found, f"{missed} of {len(points)} missed" if missed else "met"])
    return lines


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def cell_line(cell: Cell) -> str:
    """Return one line on a point just measured."""
    found = ", ".join(f"{row.name} {_number(row.median(_VALUES['throughput']), 0)}" for row in cell.rows)
    return f"{cell.case} {cell.door} {cell.concurrency}: {found} infer/s"


def text(run: Run) -> str:
    """Return the whole report as plain text."""
    return "\n\n".join(
        [
            f"{run.machine.summary}\n{_method(run)}",
            *(_aligned(table(run)) for table in (measured_table, ratio_table, goal_table)),
            "",
        ]
    )


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def _method(run: Run) -> str:
    versions = ", ".join(f"{name} is {version}" for name, version in run.versions.items())
    return (
        f"Client: {run.client}, {run.seconds:g} s a measurement, medians of {run.rounds} rounds. {versions}. "
        "headrace runs add_sub and mlp with ONNX Runtime."
    )


def markdown(run: Run) -> str:
    """Return the tables as Markdown."""
    parts = [f"{run.machine.summary}.\n\n{_method(run)}", "### Medians", _pipes(measured_table(run))]
    if _peers(run):
        parts += ["### headrace over the peer", _pipes(ratio_table(run)), "### Goals", _pipes(goal_table(run))]
    return "\n\n".join(parts)


def _pipes(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def rewrite(path: Path, run: Run) -> None:
    """Replace what is between the two marks in the file."""
    before, begin, rest = path.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"{path}: the lines {_BEGIN} and {_END} are missing")
    path.write_text(f"{before}{_BEGIN}\n\n{markdown(run)}\n\n{_END}{after}")


# --- files ------------------------------------------------------------------------------------------------------------


def as_json(run: Run) -> str:
    """Return every sample of the run."""
    machine = run.machine
    results = [
        {
            "case": cell.case,
            "door": cell.door,
            "concurrency": cell.concurrency,
            "server": row.name,
            "samples": [None if sample is None else sample.as_dict() for sample in row.samples],
        }
        for cell in run.cells
        for row in cell.rows
    ]
    about = {**vars(machine), "when": machine.when.isoformat()}
    settings = {"client": run.client, "seconds": run.seconds, "rounds": run.rounds, "versions": run.versions}
    return json.dumps({"machine": about, **settings, "results": results}, indent=1) + "\n"


def plot(run: Run, path: Path) -> None:
    """Draw throughput and p99 of every server, a column for each case and door."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    columns = list(dict.fromkeys((cell.case, cell.door) for cell in run.cells))
    figure, axes = plt.subplots(2, len(columns), figsize=(3.2 * len(columns) + 1, 6.4), squeeze=False)
    names = sorted({row.name for cell in run.cells for row in cell.rows}, key=lambda name: (OURS not in name, name))
    colours = {name: f"C{index}" for index, name in enumerate(names)}
    for column, (case, door) in enumerate(columns):
        cells = [cell for cell in run.cells if (cell.case, cell.door) == (case, door)]
        for axis, value, scale in ((axes[0][column], "throughput", 1), (axes[1][column], "p99", 1000)):
            for index, row in enumerate(cells[0].rows):
                width = 0.8 / len(cells[0].rows)
                places = [place + index * width - 0.4 + width / 2 for place in range(len(cells))]
                heights = [cell.rows[index].median(_VALUES[value]) / scale for cell in cells]
                axis.bar(places, heights, width, color=colours[row.name])
            axis.set_xticks(range(len(cells)), [str(cell.concurrency) for cell in cells])
        axes[0][column].set_title(f"{case}, {door}")
        axes[1][column].set_xlabel("concurrency")
    axes[0][0].set_ylabel("infer/s")
    axes[1][0].set_ylabel("p99 ms")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    figure.legend(handles, names, loc="lower center", ncols=len(names))
    figure.suptitle(run.machine.summary, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
