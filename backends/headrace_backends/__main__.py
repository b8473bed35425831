"""The backend process: `run --fd N` serves one model, `zygote --backend NAME --fd N` forks processes that do.

`--fd` is an inherited SEQPACKET socket. Started by the server with an argument vector, never by hand.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Parse the arguments and serve; does not return."""
    parser = argparse.ArgumentParser(prog="headrace_backends", description="Backend process of headrace.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="serve one model")
    run.add_argument("--fd", type=int, required=True, help="the channel")
    zygote = commands.add_parser("zygote", help="fork processes that serve models")
    zygote.add_argument("--fd", type=int, required=True, help="the control channel")
    zygote.add_argument("--backend", required=True, help="the backend whose module is imported beforehand")
    arguments = parser.parse_args()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the server, which then stops us in order
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)  # a model that prints must not disturb whoever reads the server's stdout

    if arguments.command == "run":
        from headrace_backends import runner

        runner.serve(arguments.fd)
    for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(pool, "1")  # libraries that start threads at import would not survive a fork
    from headrace_backends import zygote as forking

    forking.serve(arguments.fd, arguments.backend)


if __name__ == "__main__":
    main()
