"""The TensorRT backend on a stand-in for TensorRT and CUDA that is stricter than they are (tests/fake_gpu)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from headrace_backends.conformance import Case, check_backend
from headrace_backends.tensorrt import graphs
from headrace_backends.tensorrt.backend import TensorRtBackend
from headrace_protocol.arena import Arena
from headrace_protocol.errors import ErrorCode
from tensorrt_engines import add_sub, engine, profile, tensor
from tensorrt_models import Loaded, context, loading, pair, refusal

# --- running


def test_the_backend_keeps_to_the_contract_of_backends(trt, tmp_path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.plan").write_bytes(add_sub(8))
    names = [{"name": f"INPUT{i}", "data_type": "TYPE_FP32", "dims": [4]} for i in range(2)]
    outputs = [{"name": f"OUTPUT{i}", "data_type": "TYPE_FP32", "dims": [4]} for i in range(2)]
    config = {"name": "m", "max_batch_size": 8, "input": names, "output": outputs, "default_model_filename": ""}

    class OnGpu(TensorRtBackend):
        def initialize(self, model):
            return super().initialize(context(tmp_path, config, backend_config=model.backend_config))

    check_backend(OnGpu, Case(tmp_path, config, inputs=pair(1)))


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("copies", [True, False])
def test_a_batch_is_run_as_a_whole_whatever_way_it_is_copied(trt, tmp_path, pinned: bool, copies: bool) -> None:
    memory = {"enable": pinned}
    config = {
        "optimization": {
            "input_pinned_memory": memory,
            "output_pinned_memory": memory,
            "cuda": {"output_copy_stream": copies, "busy_wait_events": True},
        }
    }
    with loading(tmp_path, add_sub(8), config) as model:
        for rows in (1, 8, 3):
            inputs = pair(rows, start=rows)
            outputs = model.run(inputs, requests=(1,) * rows)
            assert np.array_equal(outputs["OUTPUT0"], inputs["INPUT0"] + 2)
            assert np.array_equal(outputs["OUTPUT1"], inputs["INPUT0"] - 2)


def test_only_the_outputs_that_are_wanted_are_copied_back(trt, tmp_path) -> None:
    with loading(tmp_path, add_sub(8)) as model:
        trt.cuda.calls.clear()
        assert list(model.run(pair(2), requests=(2,), outputs=("OUTPUT1",))) == ["OUTPUT1"]
        assert trt.cuda.calls.count("cudaMemcpyAsync") == 2  # all inputs at once, and this one


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("HALF", np.array([[1.5, -2]], np.float16)),
        ("BF16", np.array([[0x3F80, 0xC000]], np.uint16)),
        ("INT8", np.array([[-128, 127]], np.int8)),
        ("UINT8", np.array([[0, 255]], np.uint8)),
        ("INT32", np.array([[-(2**31), 7]], np.int32)),
        ("INT64", np.array([[-(2**63), 7]], np.int64)),
        ("BOOL", np.array([[True, False]])),
        ("FLOAT", np.array([[1.5, -2]], np.float32)),
    ],
)
def test_every_type_that_clients_can_send_goes_through(trt, tmp_path, kind: str, values: np.ndarray) -> None:
    tensors = [tensor("INPUT0", (-1, 2), kind), tensor("OUTPUT0", (-1, 2), kind)]
    content = engine("same", tensors, profile(INPUT0=((1, 2), (4, 2), (4, 2))))
    with loading(tmp_path, content) as model:
        got = model.run({"INPUT0": values}, bf16=kind == "BF16")["OUTPUT0"]
        assert (got.dtype, got.tolist()) == (values.dtype, values.tolist())


@pytest.mark.parametrize("kind", ["FP8", "INT4"])
def test_a_type_that_no_client_can_send_is_refused_by_name(trt, tmp_path, kind: str) -> None:
    tensors = [tensor("INPUT0", (-1, 2), kind), tensor("OUTPUT0", (-1, 2))]
    error = refusal(tmp_path, engine("same", tensors, profile(INPUT0=((1, 2), (4, 2), (4, 2)))))
    assert (error.code, "'INPUT0'" in error.message, kind in error.message) == (ErrorCode.UNSUPPORTED, True, True)


@pytest.mark.parametrize("layout", ["CHW2", "HWC"])
def test_a_tensor_that_is_not_row_major_is_refused_with_its_format(trt, tmp_path, layout: str) -> None:
    tensors = [tensor("INPUT0", (-1, 2), format=layout), tensor("OUTPUT0", (-1, 2))]
    error = refusal(tmp_path, engine("same", tensors, profile(INPUT0=((1, 2), (4, 2), (4, 2)))))
    assert (error.code, "Channel major FP16" in error.message) == (ErrorCode.UNSUPPORTED, True)


def test_empty_tensors_are_run(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1, -1)), tensor("OUTPUT0", (-1, -1))]
    content = engine("same", tensors, profile(INPUT0=((1, 0), (1, 4), (4, 8))))
    with loading(tmp_path, content) as model:
        assert model.run({"INPUT0": np.empty((2, 0), np.float32)}, requests=(2,))["OUTPUT0"].shape == (2, 0)


def test_a_cancelled_batch_is_not_run(trt, tmp_path) -> None:
    with loading(tmp_path, add_sub(8)) as model:
        trt.cuda.calls.clear()
        assert model.fails(pair(1), cancel=True)[0] == "CANCELLED"
        assert "cudaMemcpyAsync" not in trt.cuda.calls


def test_instances_run_at_the_same_time_each_in_its_own_stream_and_memory(trt, tmp_path) -> None:
    config = {"instance_group": [{"name": "m", "count": 4, "kind": "KIND_GPU", "gpus": [0]}]}
    with loading(tmp_path, add_sub(8), config) as model:
        assert len({stream.device for stream in trt.cuda.streams.values()}) == 1
        assert len(trt.cuda.streams) == 4
        wrong = []

        def work(instance: int) -> None:
            backend, memory = model.backend, model.memory
            for turn in range(20):
                rows = 1 + (turn + instance) % 8
                inputs = pair(rows, start=100 * instance + turn)
                arena = Arena.create(1 << 16)
                own = Loaded(backend, model.description, {"max_batch_size": 8})
                own.memory = type(memory)(own.arena, memory.datatypes, batching=True)
                outputs = own.run(inputs, requests=(rows,), instance=instance)
                if not np.array_equal(outputs["OUTPUT0"], inputs["INPUT0"] + 2):
                    wrong.append((instance, turn))
                arena.close()

        threads = [threading.Thread(target=work, args=(instance,)) for instance in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.mark.parametrize(("name", "priority"), [("PRIORITY_MAX", -5), ("PRIORITY_MIN", 0), ("PRIORITY_DEFAULT", 0)])
def test_the_priority_of_the_model_is_its_streams(trt, tmp_path, name: str, priority: int) -> None:
    with loading(tmp_path, add_sub(8), {"optimization": {"priority": name}}):
        assert [stream.priority for stream in trt.cuda.streams.values()] == [priority]


def test_the_model_is_loaded_on_the_gpu_of_its_process(trt, tmp_path) -> None:
    with loading(tmp_path, add_sub(8), device=1) as model:
        model.run(pair(1))
        assert {device for _, _, device in trt.cuda.device_memory.values()} == {1}


# --- profiles and shapes


def test_a_batch_runs_in_the_profile_that_it_fits_best(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1, -1)), tensor("OUTPUT0", (-1, -1))]
    small, large = profile(INPUT0=((1, 1), (1, 8), (4, 8))), profile(INPUT0=((1, 1), (16, 64), (16, 64)))
    with loading(tmp_path, engine("same", tensors, small, large)) as model:
        used = []
        for shape in ((1, 8), (16, 64), (4, 8), (5, 1)):
            array = np.ones(shape, np.float32)
            assert np.array_equal(model.run({"INPUT0": array}, requests=(shape[0],))["OUTPUT0"], array)
            (slot,) = model.backend._slots
            used.append(slot._choose(slot._last[0], shape[0])[0])
        assert used == [0, 1, 0, 1]


def test_an_instance_uses_the_profiles_that_its_group_names(trt, tmp_path) -> None:
    groups = [
        {"name": "small", "count": 1, "kind": "KIND_GPU", "gpus": [0], "profile": ["0"]},
        {"name": "large", "count": 1, "kind": "KIND_GPU", "gpus": [0], "profile": ["1"]},
    ]
    with loading(tmp_path, add_sub(2, 8), {"instance_group": groups}) as model:
        assert model.description.config == {"max_batch_size": 2, "dynamic_batching": {}}
        assert model.run(pair(8), requests=(8,), instance=1)["OUTPUT0"].shape == (8, 4)
        code, message = model.fails(pair(8), requests=(8,), instance=0)
        assert code == "INVALID_ARG"
        assert "'INPUT0'" in message and "[8, 4]" in message and "[1, 4] to [2, 4]" in message
        assert model.run(pair(2), requests=(2,), instance=0)["OUTPUT0"].shape == (2, 4)


def test_a_profile_that_the_engine_lacks_is_refused(trt, tmp_path) -> None:
    groups = [{"name": "m", "count": 1, "kind": "KIND_GPU", "gpus": [0], "profile": ["2"]}]
    error = refusal(tmp_path, add_sub(2, 8), {"instance_group": groups})
    assert (error.code, "profile 2" in error.message, "0 to 1" in error.message) == (ErrorCode.INVALID_ARG, True, True)


def test_a_shape_that_no_profile_takes_fails_alone_and_names_what_each_takes(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1, -1)), tensor("OUTPUT0", (-1, -1))]
    content = engine("same", tensors, *(profile(INPUT0=((1, 1), (2, n), (8, n))) for n in (4, 6)))
    with loading(tmp_path, content) as model:
        before = model.backend._slots[0]._buffers.generation
        code, message = model.fails({"INPUT0": np.ones((1, 7), np.float32)})
        assert code == "INVALID_ARG"
        assert "profile 0" in message and "[1, 1] to [8, 4]" in message and "[1, 1] to [8, 6]" in message
        assert model.backend._slots[0]._buffers.generation == before, "it cost the next request something"
        assert model.run({"INPUT0": np.ones((1, 6), np.float32)})["OUTPUT0"].shape == (1, 6)


def test_a_batch_smaller_than_the_profile_takes_is_filled_up_and_cut_back(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1, 2)), tensor("OUTPUT0", (-1, 1))]
    content = engine("sum_all", tensors, profile(INPUT0=((4, 2), (8, 2), (8, 2))))
    with loading(tmp_path, content) as model:
        outputs = model.run({"INPUT0": np.ones((3, 2), np.float32)}, requests=(1, 2))
        assert outputs["OUTPUT0"].tolist() == [[4]] * 3


def test_memory_grows_with_what_comes_and_is_not_taken_before(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1, -1)), tensor("OUTPUT0", (-1, -1))]
    content = engine("same", tensors, profile(INPUT0=((1, 1), (1, 1), (64, 1 << 16))))
    with loading(tmp_path, content) as model:
        taken = []
        for columns in (1, 1 << 16, 8):
            array = np.full((1, columns), columns, np.float32)
            assert np.array_equal(model.run({"INPUT0": array})["OUTPUT0"], array)
            taken.append(sum(size for _, size, _ in trt.cuda.device_memory.values()))
        assert taken[0] < 1 << 16 <= taken[1] == taken[2] < 1 << 21


def test_every_profile_follows_memory_that_another_moved(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1, -1)), tensor("OUTPUT0", (-1, -1))]
    few, many = (profile(INPUT0=((1, low), (1, low), (8, high))) for low, high in ((1, 8), (9, 1 << 16)))
    with loading(tmp_path, engine("same", tensors, few, many)) as model:
        for columns in (8, 1 << 16, 8, 1 << 16):
            array = np.full((1, columns), columns, np.float32)
            assert np.array_equal(model.run({"INPUT0": array})["OUTPUT0"], array)


def test_memory_for_the_work_of_profiles_is_taken_at_once_or_as_they_are_used(trt, tmp_path) -> None:
    content = add_sub(2, 8, memory=[1 << 12, 1 << 20])
    for strategy, expected in (("STATIC", [1 << 20, 1 << 20]), ("ON_PROFILE_CHANGE", [1 << 12, 1 << 20])):
        config = {"parameters": {"execution_context_allocation_strategy": {"string_value": strategy}}}
        with loading(tmp_path, content, config) as model:
            activations = []
            for rows in (2, 8):
                assert model.run(pair(rows), requests=(rows,))["OUTPUT0"].shape == (rows, 4)
                activations.append(model.backend._slots[0]._buffers.activations._capacity)
            assert activations == expected


# --- shape tensors and outputs that depend on the data


def resize(*tensors: dict[str, Any], values: tuple[Any, ...] = ([1, 1], [4, 4], [8, 8])) -> bytes:
    names = [tensor("INPUT0", (-1, -1)), tensor("SHAPE", (2,), "INT32", shape_tensor=True), tensor("OUTPUT0", (-1, -1))]
    return engine(
        "fill", names, profile(INPUT0=((1, 1), (2, 2), (8, 8)), SHAPE=((2,), (2,), (2,)), SHAPE_values=values)
    )


def test_values_of_a_shape_tensor_decide_the_shape_of_the_output(trt, tmp_path) -> None:
    with loading(tmp_path, resize()) as model:
        for shape in ((2, 5), (2, 3)):
            inputs = {"INPUT0": np.full((2, 2), 7, np.float32), "SHAPE": np.array(shape, np.int32)}
            assert model.run(inputs, requests=(2,))["OUTPUT0"].shape == shape


def test_the_number_of_rows_is_put_before_the_values_of_a_batch(trt, tmp_path) -> None:
    with loading(tmp_path, resize()) as model:
        inputs = {"INPUT0": np.full((3, 2), 7, np.float32), "SHAPE": np.array([5], np.int32)}
        assert model.run(inputs, requests=(1, 2))["OUTPUT0"].shape == (3, 5)


def test_values_beyond_the_profile_are_the_clients_mistake(trt, tmp_path) -> None:
    with loading(tmp_path, resize()) as model:
        inputs = {"INPUT0": np.full((2, 2), 7, np.float32), "SHAPE": np.array([2, 9], np.int32)}
        code, message = model.fails(inputs, requests=(2,))
        assert code == "INVALID_ARG"
        assert "'SHAPE' has the values [2, 9], expected [1, 1] to [8, 8]" in message


def test_a_shape_tensor_among_the_outputs_gives_each_row_its_values(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1, -1)), tensor("OUTPUT0", (2,), "INT64", shape_tensor=True)]
    content = engine("shape_of", tensors, profile(INPUT0=((1, 1), (2, 2), (8, 8))))
    with loading(tmp_path, content) as model:
        outputs = model.run({"INPUT0": np.ones((3, 5), np.float32)}, requests=(1, 2))
        assert outputs["OUTPUT0"].tolist() == [[5]] * 3


def test_an_output_takes_the_shape_that_the_data_gives_it(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (4,)), tensor("OUTPUT0", (-1, 1), "INT64"), tensor("OUTPUT1", (4,))]
    config = {"optimization": {"cuda": {"graphs": True}}}
    with loading(tmp_path, engine("nonzero", tensors), config) as model:
        for values in ([0, 3, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 5]):
            outputs = model.run({"INPUT0": np.array(values, np.float32)})
            assert outputs["OUTPUT0"].tolist() == np.argwhere(values).tolist()
            assert outputs["OUTPUT1"].tolist() == values


def test_a_gpu_without_room_for_such_an_output_fails_that_batch_alone(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (4,)), tensor("OUTPUT0", (-1, 1), "INT64"), tensor("OUTPUT1", (4,))]
    with loading(tmp_path, engine("nonzero", tensors)) as model:
        model.backend._slots[0]._buffers.ensure_activations(1)
        model.run({"INPUT0": np.zeros(4, np.float32)})
        model.backend._slots[0]._buffers.varying["OUTPUT0"].close()
        trt.cuda.failing["cudaMalloc"] = 2
        code, message = model.fails({"INPUT0": np.ones(4, np.float32)})
        assert (code, "GPU 0" in message, "out of memory" in message) == ("UNAVAILABLE", True, True)
        assert model.run({"INPUT0": np.ones(4, np.float32)})["OUTPUT0"].shape == (4, 1)


# --- graphs

GRAPHS = {"optimization": {"cuda": {"graphs": True}}}


def test_a_shape_that_comes_again_is_captured_and_then_replayed(trt, tmp_path) -> None:
    with loading(tmp_path, add_sub(8), GRAPHS) as model:
        for turn in range(5):
            for rows in (1, 8):
                inputs = pair(rows, start=10 * turn)
                assert np.array_equal(model.run(inputs, requests=(rows,))["OUTPUT0"], inputs["INPUT0"] + 2)
        assert trt.cuda.launched == 2 * 3  # run, run and captured, then launched
        assert trt.cuda.calls.count("cudaStreamBeginCapture") == 2


def test_graphs_are_dropped_when_the_memory_that_they_know_moves(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1, -1)), tensor("OUTPUT0", (-1, -1))]
    content = engine("same", tensors, profile(INPUT0=((1, 1), (1, 1), (8, 1 << 16))))
    with loading(tmp_path, content, GRAPHS) as model:
        for columns in (4, 4, 4, 1 << 16, 4, 4, 4, 4):
            array = np.full((1, columns), columns, np.float32)
            assert np.array_equal(model.run({"INPUT0": array})["OUTPUT0"], array)
        assert trt.cuda.launched >= 2


def test_graphs_of_values_are_for_those_values(trt, tmp_path) -> None:
    with loading(tmp_path, resize(), GRAPHS) as model:
        for _ in range(3):
            for shape in ((2, 5), (2, 3)):
                inputs = {"INPUT0": np.full((2, 2), 7, np.float32), "SHAPE": np.array(shape, np.int32)}
                assert model.run(inputs, requests=(2,))["OUTPUT0"].shape == shape
        assert trt.cuda.launched == 2


def test_no_more_graphs_are_kept_than_the_limit(trt, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    with loading(tmp_path, add_sub(8), GRAPHS) as model:
        for rows in (1, 2, 3, 4) * 3:
            model.run(pair(rows), requests=(rows,))
        assert len(model.backend._slots[0]._graphs) == 2
        assert len(trt.cuda.graphs) == 2


def test_an_engine_that_cannot_be_captured_runs_without_graphs_and_says_so_once(trt, tmp_path, caplog) -> None:
    with loading(tmp_path, add_sub(8, no_capture=True), GRAPHS) as model:
        for turn in range(6):
            inputs = pair(2, start=turn)
            assert np.array_equal(model.run(inputs, requests=(2,))["OUTPUT0"], inputs["INPUT0"] + 2)
    assert [record.message for record in caplog.records if "without CUDA graphs" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


def spec(batch: int, lower: int | None = None, **dims: list[int]) -> dict[str, Any]:
    shapes = {name: {"dim": dim} for name, dim in dims.items()}
    bound = {} if lower is None else {"graph_lower_bound": {"batch_size": lower, "input": {}}}
    return {"batch_size": batch, "input": shapes, **bound}


def test_graphs_of_the_configuration_are_captured_when_the_model_is_loaded(trt, tmp_path) -> None:
    config = {"max_batch_size": 8, "optimization": {"cuda": {"graphs": True, "graph_spec": [spec(1), spec(8, 5)]}}}
    with loading(tmp_path, add_sub(8), config) as model:
        assert trt.cuda.calls.count("cudaStreamBeginCapture") == 2
        launched = []
        for rows in (1, 2, 5, 8, 2):
            inputs = pair(rows, start=rows)
            outputs = model.run(inputs, requests=(1,) * rows)
            assert np.array_equal(outputs["OUTPUT0"], inputs["INPUT0"] + 2)
            launched.append(trt.cuda.launched)
        assert launched == [1, 1, 2, 3, 3]
        assert trt.cuda.calls.count("cudaStreamBeginCapture") == 2


def test_a_graph_that_cannot_be_captured_at_load_costs_a_warning(trt, tmp_path, caplog) -> None:
    config = {"max_batch_size": 8, "optimization": {"cuda": {"graphs": True, "graph_spec": [spec(8)]}}}
    with loading(tmp_path, add_sub(8, no_capture=True), config) as model:
        assert np.array_equal(model.run(pair(8), requests=(8,))["OUTPUT1"], pair(8)["INPUT0"] - 2)
    assert "graph_spec[0]" in caplog.text


def test_a_graph_that_cannot_be_captured_does_not_cost_every_batch_the_others(trt, tmp_path, caplog) -> None:
    tensors = [tensor("INPUT0", (-1, -1)), tensor("OUTPUT0", (-1, -1))]
    content = engine("same", tensors, profile(INPUT0=((1, 1), (1, 8), (8, 8))))
    specs = [spec(8, INPUT0=[8]), spec(1, INPUT0=[9])]
    config = {"max_batch_size": 8, "optimization": {"cuda": {"graphs": True, "graph_spec": specs}}}
    with loading(tmp_path, content, config) as model:
        for _ in range(4):
            assert model.run({"INPUT0": np.ones((8, 8), np.float32)}, requests=(8,))["OUTPUT0"].shape == (8, 8)
        assert (trt.cuda.calls.count("cudaStreamBeginCapture"), trt.cuda.launched) == (1, 4)
        trt.cuda.failing["cudaMemcpyAsync"] = 1
        model.fails({"INPUT0": np.ones((8, 8), np.float32)}, requests=(8,))
        for _ in range(4):
            model.run({"INPUT0": np.ones((8, 8), np.float32)}, requests=(8,))
        assert (trt.cuda.calls.count("cudaStreamBeginCapture"), trt.cuda.launched) == (2, 8)
    assert "graph_spec[1]" in caplog.text
    assert "[1, 9]" in caplog.text


# --- failures


def test_an_engine_that_fails_to_run_fails_its_batch_in_tensorrts_words(trt, tmp_path) -> None:
    with loading(tmp_path, add_sub(8, enqueue_fails=True)) as model:
        code, message = model.fails(pair(1))
        assert (code, "Cask convolution" in message) == ("INTERNAL", True)


def test_shapes_that_disagree_fail_their_batch_in_tensorrts_words(trt, tmp_path) -> None:
    with loading(tmp_path, add_sub(8, infer_fails=True)) as model:
        code, message = model.fails(pair(1))
        assert (code, "shapes do not agree" in message) == ("INTERNAL", True)


def test_a_failed_copy_fails_its_batch_and_the_next_one_is_run(trt, tmp_path) -> None:
    with loading(tmp_path, add_sub(8), GRAPHS) as model:
        for _ in range(3):
            model.run(pair(2), requests=(2,))
        trt.cuda.failing["cudaMemcpyAsync"] = 1
        assert model.fails(pair(2), requests=(2,))[0] == "INTERNAL"
        for _ in range(3):
            assert np.array_equal(model.run(pair(2), requests=(2,))["OUTPUT0"], pair(2)["INPUT0"] + 2)


def test_a_gpu_without_memory_left_fails_the_batch_as_unavailable(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1, -1)), tensor("OUTPUT0", (-1, -1))]
    content = engine("same", tensors, profile(INPUT0=((1, 1), (1, 1), (8, 1 << 20))))
    small = {"INPUT0": np.ones((1, 4), np.float32)}
    with loading(tmp_path, content, GRAPHS) as model:
        for _ in range(3):
            model.run(small)
        trt.cuda.memory = 1 << 20
        code, message = model.fails({"INPUT0": np.ones((1, 1 << 20), np.float32)})
        assert (code, "out of memory" in message) == ("UNAVAILABLE", True)
        for _ in range(3):
            assert model.run(small)["OUTPUT0"].tolist() == [[1] * 4]


def test_a_context_that_cannot_be_made_is_told_when_the_model_is_loaded(trt, tmp_path) -> None:
    error = refusal(tmp_path, add_sub(8, no_context=True))
    assert (error.code, "no memory for a context" in error.message) == (ErrorCode.INTERNAL, True)
