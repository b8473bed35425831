"""Measures requests of unlike length, as texts are: each length apart, padded to one batch, and padded to fixed sizes.

    python tests/bench/padding.py

The model is an encoder of a few layers over token ids, with a mask, in ONNX; its lengths are drawn once, most of them
short, and the same for every way. Each way is served by a server of its own, and measured in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import RunningServer, running
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_onnx

_VOCABULARY = 1000
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_CONFIG = """
backend: "onnxruntime" max_batch_size: 32 dynamic_batching { }
instance_group { count: 1 kind: KIND_CPU }
"""
_PAD = 'parameters { key: "pad_batch" value { string_value: "ids, mask" } }'
_TO = 'parameters {{ key: "pad_batch_to" value {{ string_value: "{}" }} }}'
WAYS = {
    "each length apart": "",
    "padded": _PAD,
    "padded to 16, 32, 64 or 128": _PAD + _TO.format("16, 32, 64, 128"),
    "padded, any lengths together": _PAD + _TO.format("any"),
}


@dataclass(frozen=True)
class Found:
    """What one measurement found."""

    rate: float
    p50_ms: float
    p99_ms: float
    batch: float


def encoder(path: Path, layers: int, width: int) -> Path:
    """Write the model: INT64 ids and FP32 mask [batch, n] -> FP32 vector [batch, width]."""
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32), name)

    weights = [weight("table", _VOCABULARY, width)]
    constants = {"one": np.float32(1), "far": np.float32(-1e9), "scale": np.float32(width**-0.5)}
    weights += [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    weights += [numpy_helper.from_array(np.array([axis]), f"axis{axis}") for axis in (1, 2)]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x0"]),
        helper.make_node("Sub", ["one", "mask"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "far"], ["bias_row"]),
        helper.make_node("Unsqueeze", ["bias_row", "axis1"], ["bias"]),
    ]
    for layer in range(layers):
        x, n = f"x{layer}", f"l{layer}_"
        weights += [weight(n + "in", width, 4 * width), weight(n + "out", 4 * width, width)]
        weights += [weight(n + name, width, width) for name in ("q", "v")]
        nodes += [
            helper.make_node("MatMul", [x, n + "q"], [n + "query"]),
            helper.make_node("MatMul", [x, n + "v"], [n + "value"]),
            helper.make_node("Transpose", [x], [n + "key"], perm=[0, 2, 1]),
            helper.make_node("MatMul", [n + "query", n + "key"], [n + "raw"]),
            helper.make_node("Mul", [n + "raw", "scale"], [n + "scaled"]),
            helper.make_node("Add", [n + "scaled", "bias"], [n + "masked"]),
            helper.make_node("Softmax", [n + "masked"], [n + "shares"], axis=-1),
            helper.make_node("MatMul", [n + "shares", n + "value"], [n + "seen"]),
            helper.make_node("Add", [x, n + "seen"], [n + "mixed"]),
            helper.make_node("MatMul", [n + "mixed", n + "in"], [n + "wide"]),
            helper.make_node("Relu", [n + "wide"], [n + "kept"]),
            helper.make_node("MatMul", [n + "kept", n + "out"], [f"x{layer + 1}"]),
        ]
    nodes += [
        helper.make_node("Unsqueeze", ["mask", "axis2"], ["rows"]),
        helper.make_node("Mul", [f"x{layers}", "rows"], ["own"]),
        helper.make_node("ReduceSum", ["own", "axis1"], ["vector"], keepdims=0),
    ]
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "n"]),
        helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", "n"]),
    ]
    outputs = [helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["batch", width])]
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, weights)
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def requests(count: int) -> list[bytes]:
    """Return requests of drawn lengths: half of them below 20, one in ten above 64, none above 128."""
    random = np.random.default_rng(1)
    made = []
    for length in np.clip(random.lognormal(3.0, 0.8, count), 3, 128).astype(int):
        ids, mask = random.integers(0, _VOCABULARY, (1, length)), np.ones((1, length), np.float32)
        message = pb.ModelInferRequest(model_name="encoder", raw_input_contents=[ids.tobytes(), mask.tobytes()])
        message.inputs.add(name="ids", datatype="INT64", shape=ids.shape)
        message.inputs.add(name="mask", datatype="FP32", shape=mask.shape)
        made.append(message.SerializeToString())
    return made


async def load(server: RunningServer, messages: list[bytes], callers: int, seconds: float) -> tuple[float, list[float]]:
    """Ask for so long with so many requests at once; return answers a second and what each took."""
    took: list[float] = []
    until = time.monotonic() + seconds
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(_INFER)

        async def ask(first: int) -> None:
            at = first
            while (started := time.monotonic()) < until:
                await call(messages[at % len(messages)])
                took.append(time.monotonic() - started)
                at += callers

        await asyncio.gather(*(ask(number) for number in range(callers)))
    return len(took) / seconds, took


def measure(server: RunningServer, messages: list[bytes], callers: int, seconds: float) -> Found:
    """Measure one way, after as long a time to get warm."""
    from figures import figures

    asyncio.run(load(server, messages, callers, seconds / 3))
    before = figures(server, "encoder")
    rate, took = asyncio.run(load(server, messages, callers, seconds))
    done = figures(server, "encoder").since(before)
    ordered = sorted(took)
    p99 = ordered[int(len(ordered) * 0.99)]
    return Found(rate, 1e3 * statistics.median(took), 1e3 * p99, done.rows / max(1, done.executions))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6, help="of each measurement (default 6)")
    parser.add_argument("--rounds", type=int, default=3, help="of all ways (default 3)")
    parser.add_argument("--callers", type=int, default=32, help="requests at once (default 32)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    messages = requests(4096)
    found: dict[str, list[Found]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        path = encoder(Path(folder) / "encoder.onnx", options.layers, options.width)
        for number, extra in enumerate(WAYS.values()):
            config = _CONFIG + extra
            add_onnx(Path(folder) / str(number), "encoder", lambda to: to.write_bytes(path.read_bytes()), config=config)
        for _ in range(options.rounds):
            for number, way in enumerate(WAYS):
                with running(Path(folder) / str(number)) as server:
                    found[way].append(measure(server, messages, options.callers, options.seconds))
    base = statistics.median(one.rate for one in found["each length apart"])
    print(f"{'':36}{'requests/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'batch':>7}{'gain':>7}")
    for way, rounds in found.items():
        rate, p50, p99, batch = (
            statistics.median(getattr(one, name) for one in rounds) for name in ("rate", "p50_ms", "p99_ms", "batch")
        )
        print(f"{way:36}{rate:11.0f}{p50:9.1f}{p99:9.1f}{batch:7.1f}{rate / base:7.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
