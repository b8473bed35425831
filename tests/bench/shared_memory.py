"""Measures tensors in system shared memory: 3x224x224 FP32 there and back over gRPC, headrace beside Triton.

    python tests/bench/shared_memory.py --peers DIR

DIR is that of `make bench`; without triton.sh in it headrace is measured alone. Each round also measures headrace with
the same tensors on the wire, so that the gain is told too. Needs perf_analyzer: the client must not be what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import models
import report
from load import PerfAnalyzer, Target, measure
from report import Cell, Row, Run
from servers import PEERS, Headrace, PeerServer, Server

_ROOT = Path(__file__).resolve().parents[2]
_MODEL = "identity_img"
_WIRE = "headrace (wire)"


class RegionAnalyzer(PerfAnalyzer):
    """perf_analyzer, with every tensor in system shared memory."""

    def command(self, server: Server, target: Target, seconds: float, output: Path) -> list[str]:
        nbytes = sum(tensor.array().nbytes for tensor in models.IDENTITY.outputs)
        argv = super().command(server, target, seconds, output)
        return [*argv, "--shared-memory", "system", "--output-shared-memory-size", str(nbytes)]


def main() -> int:
    options = _options()
    program = options.peers / "perf_analyzer"
    if not program.is_file():
        sys.exit(f"{program} is not there")
    regions, wire = RegionAnalyzer(program), PerfAnalyzer(program)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        repository = Path(folder)
        models.build(repository)
        headrace = Headrace(repository, "--allow-client-shm=true")
        triton = next(PeerServer(peer, options.peers) for peer in PEERS if peer.name == "triton")
        servers: list[Server] = [headrace, *([triton] if triton.installed else [])]
        for server in servers:
            stack.callback(server.stop)
            server.start()
        machine = report.describe_machine(_ROOT, 0.0)
        run = Run(machine, regions.name, options.seconds, options.rounds, {s.name: s.version() for s in servers})
        clients = [(server.name, server, regions) for server in servers]
        if options.wire:
            clients.append((_WIRE, headrace, wire))
        for concurrency in options.concurrency:
            cell = Cell("identity in shared memory", options.door, concurrency, [Row(name) for name, _, _ in clients])
            run.cells.append(cell)
            target = Target(options.door, _MODEL, concurrency, is_float=True)
            for _ in range(options.rounds):
                for row, (_, server, client) in zip(cell.rows, clients, strict=True):
                    try:
                        row.samples.append(measure(client, server, target, options.seconds))
                    except RuntimeError as error:
                        row.samples.append(None)
                        print(f"{row.name}: {error}", file=sys.stderr)
            print(report.cell_line(cell), flush=True)
        print(f"\n{report.text(run)}")
    return 0 if run.complete else 1


def _options() -> argparse.Namespace:
    environment = os.environ.get("HEADRACE_PEERS")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--peers", type=Path, default=Path(environment) if environment else Path(), metavar="DIR")
    add("--door", choices=["http", "grpc"], default="grpc")
    add("--concurrency", type=int, nargs="+", default=[4], metavar="N")
    add("--seconds", type=float, default=4.5, help="of each measurement (default 4.5)")
    add("--rounds", type=int, default=3, help="of all servers (default 3)")
    add("--wire", action="store_true", help="measure headrace with the tensors on the wire too")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
