"""Rewrite headrace_protocol/_generated from the .proto files: `make protos`.

The stubs must load under protobuf 5, 6 and 7 alike, and beside another copy of the same schema in one process
(tritonclient carries one). So they come from protoc 25, whose output does not demand a runtime of its own major
version, and they are registered in a descriptor pool of their own. The comparison in CI runs this with --check.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OUT = ROOT / "headrace_protocol" / "_generated"
NAMES = ("model_config", "grpc_service", "health", "reflection")


def generate(into: Path) -> None:
    """Run protoc on NAMES and write the adapted stubs below `into`."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as scratch:
        sources = [f"{name}.proto" for name in NAMES]
        code = protoc.main(["protoc", f"-I{ROOT}", f"--python_out={scratch}", f"--pyi_out={scratch}", *sources])
        if code:
            raise SystemExit(code)
        for name in NAMES:
            for suffix in (".py", ".pyi"):
                text = (Path(scratch) / f"{name}_pb2{suffix}").read_text()
                text = text.replace(
                    "import model_config_pb2 as", "from headrace_protocol._generated import model_config_pb2 as"
                )
                text = text.replace(
                    "from model_config_pb2 import", "from headrace_protocol._generated.model_config_pb2 import"
                )
                text = text.replace(
                    "from google.protobuf import descriptor_pool as _descriptor_pool",
                    "from headrace_protocol._generated import pool as _descriptor_pool",
                )
                (into / f"{name}_pb2{suffix}").write_text(text)


def main() -> None:
    if "--check" not in sys.argv:
        generate(OUT)
        return
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        stale = [
            path.name for path in sorted(Path(fresh).iterdir()) if path.read_text() != (OUT / path.name).read_text()
        ]
    if stale:
        raise SystemExit(f"stale stubs, run `make protos`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
