"""Asks a language model thousands of hostile things, and a good one after each: llm_fuzz.py [--requests 5000] [--seed 1]

The model is a tiny one of random weights, or by --model a folder or GGUF file. Prints how often each answer was seen and what
was at fault; the exit status is 1 if anything was: a status that is none of a refusal's, a good request whose answer changed,
an engine that ended, or blocks that did not come back.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import running
from language_models import tiny_folder
from llm_hostility import Hostility
from llm_hostility_server import idle, repository_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or tiny_folder(Path(folder) / "model", vocab_size=512)
        repository = repository_of(Path(folder) / "models", model)
        with running(repository) as server:
            hostility = Hostility(server, arguments.seed)
            start = time.monotonic()
            hostility.run(arguments.requests)
            took = time.monotonic() - start
            hostility.close()
            if (left := idle(server)) is not None:
                hostility.faults.append(left)
    print(json.dumps({"requests": arguments.requests, "seconds": round(took, 1), **dict(hostility.seen.most_common())}))
    print(*hostility.faults, sep="\n")
    print(f"{len(hostility.faults)} faults")
    return int(bool(hostility.faults))


if __name__ == "__main__":
    sys.exit(main())
