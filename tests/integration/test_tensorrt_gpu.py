"""The TensorRT backend with the real TensorRT on a real GPU: engines are built here, for the GPU that there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorrt_models import loading, pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not any(Path("/dev").glob("nvidia[0-9]*")), reason="there is no GPU"),
]


@pytest.fixture(scope="module")
def real() -> Any:
    return pytest.importorskip("tensorrt", reason="tensorrt is not installed")


def build(trt: Any, fill: Any, *profiles: dict[str, tuple[Any, Any, Any]]) -> bytes:
    """Return an engine of the network that `fill(network)` makes."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network()
    fill(network)
    config = builder.create_builder_config()
    for ranges in profiles:
        made = builder.create_optimization_profile()
        for name, (least, best, most) in ranges.items():
            made.set_shape(name, least, best, most)
        config.add_optimization_profile(made)
    return bytes(builder.build_serialized_network(network, config))


def sums(trt: Any) -> Any:
    def fill(network: Any) -> None:
        first, second = (network.add_input(f"INPUT{i}", trt.float32, (-1, 4)) for i in range(2))
        for number, operation in enumerate((trt.ElementWiseOperation.SUM, trt.ElementWiseOperation.SUB)):
            output = network.add_elementwise(first, second, operation).get_output(0)
            output.name = f"OUTPUT{number}"
            network.mark_output(output)

    return fill


@pytest.mark.parametrize("graphs", [False, True])
def test_batches_run_on_a_real_gpu_captured_or_not(real, tmp_path, graphs: bool) -> None:
    ranges = [{f"INPUT{i}": ((1, 4), (size, 4), (size, 4)) for i in range(2)} for size in (2, 8)]
    content = build(real, sums(real), *ranges)
    with loading(tmp_path, content, {"optimization": {"cuda": {"graphs": graphs}}}, stand_in=False) as model:
        assert model.description.config == {"max_batch_size": 8, "dynamic_batching": {}}
        for turn in range(4):
            for rows in (1, 2, 8):
                inputs = pair(rows, start=turn)
                outputs = model.run(inputs, requests=(1,) * rows)
                assert np.array_equal(outputs["OUTPUT0"], inputs["INPUT0"] + 2)
                assert np.array_equal(outputs["OUTPUT1"], inputs["INPUT0"] - 2)
        assert len(model.backend._slots[0]._graphs) == (3 if graphs else 0)


def test_an_output_of_a_real_engine_takes_the_shape_that_the_data_gives_it(real, tmp_path) -> None:
    def fill(network: Any) -> None:
        output = network.add_non_zero(network.add_input("INPUT0", real.float32, (4,))).get_output(0)
        output.name = "OUTPUT0"
        network.mark_output(output)

    with loading(tmp_path, build(real, fill), stand_in=False) as model:
        for values in ([0, 3, 0, 1], [1, 1, 1, 1], [0, 0, 0, 5]):
            found = model.run({"INPUT0": np.array(values, np.float32)})["OUTPUT0"]
            assert found.reshape(-1).tolist() == np.flatnonzero(values).tolist()


def test_an_engine_cut_short_is_refused_by_the_real_tensorrt(real, tmp_path) -> None:
    content = build(real, sums(real), {f"INPUT{i}": ((1, 4), (2, 4), (2, 4)) for i in range(2)})
    with (
        pytest.raises(Exception, match="cannot be loaded by TensorRT"),
        loading(tmp_path, content[: len(content) // 2], stand_in=False),
    ):
        pass
