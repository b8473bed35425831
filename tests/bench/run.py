"""Measures headrace, and peers where they are installed, side by side: `make bench ARGS='--peers DIR'`.

Servers take turns at each case, door and concurrency, round after round, so that what else happens on the machine
meets all alike. docs/performance.md says what is measured and holds the last table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import models
import psutil
import report
from load import Client, PerfAnalyzer, PythonClient, Target, measure
from report import Cell, Row, Run
from servers import PEERS, Headrace, PeerServer, Server

_ROOT = Path(__file__).resolve().parents[2]
_IDLE_S = 2.0
_IDLE_LIMIT = 0.02
"""Cores that a server may use while nobody asks it anything, to stay up while others are measured."""


@dataclass(frozen=True)
class Case:
    """A model as every server has it. `rows` name what headrace runs it with, by its name in our repository."""

    name: str
    is_float: bool
    model: str
    rows: dict[str, str]
    concurrency: tuple[int, ...] | None = None
    """None: that of the command line."""
    large: bool = False
    """perf_analyzer keeps every tensor of a run and ends for want of memory: measured with the client of this folder."""


CASES = {
    "add_sub": Case("add_sub", False, "add_sub", {"headrace": "add_sub", "headrace (python)": "add_sub_python"}),
    "mlp": Case("mlp", True, "mlp_onnx", {"headrace": "mlp_onnx", "headrace (pytorch)": "mlp_torch"}),
    "identity": Case(
        "identity",
        True,
        "identity_img",
        {"headrace": "identity_img", "headrace (onnx)": "identity_onnx", "headrace (python)": "identity_python"},
        (4,),
        large=True,
    ),
}


def main() -> int:
    options = _options()
    client = _client(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        repository = Path(folder)
        models.build(repository)
        flags = [f"--grpc-transport={options.transport}"] if options.transport else []
        headrace = Headrace(repository, *flags)
        servers: list[Server] = [headrace, *_peers(options)]
        for server in servers:
            stack.callback(server.stop)
            server.start()
        machine = report.describe_machine(_ROOT, _background())
        print(f"{machine.summary}; client {client.name}", flush=True)
        for server in servers:
            _check_idle(server)
        run = Run(machine, client.name, options.seconds, options.rounds, {s.name: s.version() for s in servers})
        for server in servers:
            if not server.resident:
                server.stop()
        try:
            for case in [CASES[name] for name in options.cases]:
                for door in options.doors:
                    for concurrency in case.concurrency or options.concurrency:
                        _measure_cell(run, client, servers, case, door, concurrency)
        finally:
            if run.cells:
                _write(run, options)
    return 0 if run.complete else 1


def _measure_cell(run: Run, client: Client, servers: Sequence[Server], case: Case, door: str, concurrency: int) -> None:
    """Let every server take its turn, in every round."""
    rows = [(server.name, server, case.model) for server in servers[1:]]
    rows = [*((name, servers[0], model) for name, model in case.rows.items()), *rows]
    cell = Cell(case.name, door, concurrency, [Row(name) for name, _, _ in rows])
    run.cells.append(cell)
    if case.large:
        client = PythonClient()
    for _ in range(run.rounds):
        for row, (_, server, model) in zip(cell.rows, rows, strict=True):
            with contextlib.ExitStack() as stack:
                if not server.running:
                    stack.callback(server.stop)
                    server.start()
                target = Target(door, model, concurrency, case.is_float)
                try:
                    row.samples.append(measure(client, server, target, run.seconds))
                except RuntimeError as error:
                    row.samples.append(None)
                    print(f"{row.name}: {error}", file=sys.stderr)
    print(report.cell_line(cell), flush=True)


def _background() -> float:
    """Return how many cores are busy with something else, now that all servers are idle."""
    psutil.cpu_percent()
    time.sleep(_IDLE_S)
    return psutil.cpu_percent() / 100 * (os.cpu_count() or 1)


def _check_idle(server: Server) -> None:
    before = server.cpu_seconds()
    time.sleep(_IDLE_S)
    used = (server.cpu_seconds() - before) / _IDLE_S
    if used > _IDLE_LIMIT:
        server.resident = False
        print(f"{server.name} uses {used:.2f} cores while idle: it runs only while it is measured itself", flush=True)


def _peers(options: argparse.Namespace) -> list[Server]:
    if options.peers is None:
        return []
    found = [PeerServer(peer, options.peers) for peer in PEERS if not options.only or peer.name in options.only]
    installed: list[Server] = [server for server in found if server.installed]
    if not installed:
        sys.exit(f"{options.peers} has none of the scripts {', '.join(f'{peer.name}.sh' for peer in PEERS)}")
    return installed


def _client(options: argparse.Namespace) -> Client:
    program = options.peers / "perf_analyzer" if options.peers else None
    if program is not None and program.is_file() and options.client != "python":
        return PerfAnalyzer(program)
    if options.client == "perf_analyzer":
        sys.exit("--client perf_analyzer: needs --peers DIR with a program of that name")
    return PythonClient()


def _write(run: Run, options: argparse.Namespace) -> None:
    folder = options.out or _ROOT / "results" / run.machine.file_stamp
    folder.mkdir(parents=True, exist_ok=True)
    text = report.text(run)
    (folder / "bench.txt").write_text(text)
    (folder / "bench.json").write_text(report.as_json(run))
    report.plot(run, folder / "bench.png")
    print(f"\n{text}\n{folder}/bench.txt, bench.json, bench.png")
    if options.markdown is not None:
        report.rewrite(options.markdown, run)
        print(f"{options.markdown}: the tables are rewritten")


def _options() -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return [item for item in text.split(",") if item]

    def numbers(text: str) -> list[int]:
        return [int(item) for item in listed(text)]

    environment = os.environ.get("HEADRACE_PEERS")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--peers", type=Path, default=Path(environment) if environment else None, metavar="DIR")
    add("--only", type=listed, default=[], metavar="PEER,...", help="of the peers installed, those (default all)")
    add("--client", choices=["perf_analyzer", "python"], help="default: perf_analyzer where --peers has it")
    add("--cases", type=listed, default=list(CASES), metavar="CASE,...", help=f"of {','.join(CASES)} (default all)")
    add("--doors", type=listed, default=["http", "grpc"], metavar="DOOR,...", help="default http,grpc")
    add("--concurrency", type=numbers, default=[1, 8, 32], metavar="N,...", help="default 1,8,32; identity: 4")
    add("--seconds", type=float, default=4.5, help="of each measurement (default 4.5)")
    add("--rounds", type=int, default=3, help="of all servers at each point (default 3)")
    add("--out", type=Path, metavar="DIR", help="default results/<date and time>")
    add("--markdown", type=Path, metavar="FILE", help="rewrite the tables in this file too")
    add("--transport", help="headrace's --grpc-transport")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"--cases: unknown {', '.join(unknown)}; there are {', '.join(CASES)}")
    if unknown := set(options.doors) - {"http", "grpc"}:
        parser.error(f"--doors: unknown {', '.join(unknown)}; there are http and grpc")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
