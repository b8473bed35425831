"""Engines that fit, engines that do not and why, and what an engine completes of its model's configuration."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from headrace_backends.tensorrt.backend import TensorRtBackend
from headrace_backends.tensorrt.plan_file import read_header, same_version
from headrace_protocol.errors import ErrorCode, InferError
from tensorrt_engines import INSTALLED, add_sub, engine, profile, tensor
from tensorrt_models import context, loading, pair, refusal

OTHER = "10.3.0.26"


# --- the file


@pytest.mark.parametrize("prefix", [b"", (22).to_bytes(4, "little") + b'{"task": "detect"}    '])
def test_the_version_that_built_an_engine_is_in_its_first_bytes(prefix: bytes) -> None:
    header = read_header(memoryview(add_sub(8, version=OTHER, prefix=prefix)))
    assert header is not None
    assert (header.start, header.version) == (len(prefix), OTHER)


@pytest.mark.parametrize(
    "content", [b"", b"ftr", b"PK\3\4" + bytes(64), bytes(64), (8).to_bytes(4, "little") + b"{" * 60]
)
def test_what_does_not_begin_as_an_engine_is_none(content: bytes) -> None:
    assert read_header(memoryview(content)) is None


@pytest.mark.parametrize("content", [b"ftrt", b"ftrt\1\0\0\0" + bytes(40)])
def test_a_header_of_another_form_tells_no_version(content: bytes) -> None:
    header = read_header(memoryview(content))
    assert header is not None
    assert header.version == ""


@pytest.mark.parametrize(
    ("built", "installed", "same"),
    [
        ("10.3.0.26", "10.3.0.26", True),
        ("10.3.0.26", "10.3.0", True),
        ("10.3.0.26", "10.3.0.27", False),
        ("10.3.0.26", "10.16.1.11.post1", False),
        ("10.16.1.11", "10.16.1.11.post1", True),
    ],
)
def test_versions_are_compared_number_by_number(built: str, installed: str, same: bool) -> None:
    assert same_version(built, installed) is same


# --- what is refused


def test_an_engine_of_another_version_is_refused_with_both(trt, tmp_path) -> None:
    error = refusal(tmp_path, add_sub(8, version=OTHER))
    assert error.code is ErrorCode.UNSUPPORTED
    assert f"was built by TensorRT {OTHER}" in error.message
    assert f"this is {INSTALLED}" in error.message
    assert "version-compatible=true" in error.message
    assert "expecting library version" in error.message


def test_a_version_compatible_engine_is_loaded_where_that_is_allowed(trt, tmp_path) -> None:
    content = add_sub(8, version=OTHER, compatible=True)
    with loading(tmp_path, content, backend_config={"version-compatible": "true"}) as model:
        assert model.run(pair(1))["OUTPUT0"].shape == (1, 4)
    assert "version-compatible=true" in refusal(tmp_path, content).message


def test_an_engine_for_another_gpu_is_refused_with_both(trt, tmp_path) -> None:
    error = refusal(tmp_path, add_sub(8, capability="8.6"))
    assert error.code is ErrorCode.UNSUPPORTED
    assert "compute capability 8.6" in error.message
    assert "this one has 8.9" in error.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty file"),
        (b"onnx" * 100, "it does not begin as one"),
        (add_sub(8)[:60], "Serialization assertion"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(trt, tmp_path, content: bytes, words: str) -> None:
    error = refusal(tmp_path, content)
    assert (error.code, words in error.message, "model.plan" in error.message) == (ErrorCode.INVALID_ARG, True, True)


def test_an_engine_behind_metadata_of_its_exporter_is_loaded(trt, tmp_path) -> None:
    with loading(tmp_path, add_sub(8, prefix=(20).to_bytes(4, "little") + b'{"task": "detect"}  ')) as model:
        assert model.run(pair(1))["OUTPUT0"].shape == (1, 4)


def test_a_missing_file_is_named(trt, tmp_path) -> None:
    with pytest.raises(InferError, match=r"there is no file .*/1/other\.plan"):
        TensorRtBackend().initialize(context(tmp_path, {"default_model_filename": "other.plan"}))


def test_a_file_for_the_gpus_capability_goes_before_the_default_one(trt, tmp_path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "ada.plan").write_bytes(add_sub(3))
    config = {"cc_model_filenames": {"8.9": "ada.plan", "7.5": "turing.plan"}}
    with loading(tmp_path, b"not this one", config) as model:
        assert model.description.config == {"max_batch_size": 3, "dynamic_batching": {}}


@pytest.mark.parametrize("kind", ["KIND_CPU", "KIND_MODEL"])
def test_only_gpus_run_engines_and_the_refusal_tells_what_is_known_of_the_engine(trt, tmp_path, kind: str) -> None:
    error = refusal(tmp_path, add_sub(8, version=OTHER), kind=kind)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "run on GPUs alone" in error.message
    assert kind in error.message
    assert f"built by TensorRT {OTHER}" in error.message


def test_a_gpu_that_cuda_does_not_see_is_refused(trt, tmp_path) -> None:
    error = refusal(tmp_path, add_sub(8), device=2)
    assert (error.code, "CUDA sees 2" in error.message) == (ErrorCode.UNAVAILABLE, True)


def test_an_old_driver_is_told_in_cudas_words(trt, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_GPU_DRIVER", "old")
    error = refusal(tmp_path, add_sub(8))
    assert (error.code, "driver version is insufficient" in error.message) == (ErrorCode.UNAVAILABLE, True)


def test_a_tensorrt_that_finds_no_gpu_is_not_asked_for_more(trt, tmp_path, monkeypatch) -> None:
    """The real one hands out a runtime that crashes the process when it is used."""

    def runtime(logger: Any) -> None:
        logger.log(trt.ILogger.ERROR, "CUDA initialization failure with error: 35")

    monkeypatch.setattr(trt, "Runtime", runtime)
    error = refusal(tmp_path, add_sub(8))
    assert (error.code, "CUDA initialization failure" in error.message) == (ErrorCode.UNAVAILABLE, True)


def test_without_tensorrt_the_refusal_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    error = refusal(tmp_path, add_sub(8))
    assert (error.code, "pip install 'headrace[tensorrt]'" in error.message) == (ErrorCode.UNAVAILABLE, True)


def test_an_old_tensorrt_is_refused(trt, tmp_path, monkeypatch) -> None:
    monkeypatch.delattr(trt.IExecutionContext, "set_device_memory")
    error = refusal(tmp_path, add_sub(8))
    assert (error.code, "10.1" in error.message) == (ErrorCode.UNAVAILABLE, True)


def test_a_plugin_library_that_is_not_there_is_named(trt, tmp_path) -> None:
    error = refusal(tmp_path, add_sub(8), backend_config={"plugins": "/nowhere/a.so;/nowhere/b.so"})
    assert (error.code, "/nowhere/a.so" in error.message) == (ErrorCode.INVALID_ARG, True)


def test_instances_run_on_the_dla_cores_that_their_groups_name(trt, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_DLA_CORES", "2")
    groups = [
        {"name": f"m{core}", "count": 1, "gpus": [0], "secondary_devices": [{"kind": "KIND_NVDLA", "device_id": core}]}
        for core in range(2)
    ]
    with loading(tmp_path, add_sub(8), {"instance_group": groups}) as model:
        cores = [slot._engine._engine._spec["dla_core"] for slot in model.backend._slots]
        assert cores == [0, 1]
    groups[1]["secondary_devices"][0]["device_id"] = 2
    error = refusal(tmp_path, add_sub(8), {"instance_group": groups})
    assert (error.code, "no DLA core 2" in error.message) == (ErrorCode.INVALID_ARG, True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"parameters": {"execution_context_allocation_strategy": {"string_value": "MINE"}}},
            "STATIC or ON_PROFILE_CHANGE",
        ),
        ({"instance_group": [{"name": "m", "count": 1, "profile": ["first"]}]}, "profile[0]: expected the number"),
        (
            {"instance_group": [{"name": "m", "count": 1, "secondary_devices": [{"kind": "KIND_NVDLA"}] * 2}]},
            "secondary_devices: expected one",
        ),
        (
            {"max_batch_size": 4, "optimization": {"cuda": {"graph_spec": [{"batch_size": 5, "input": {}}]}}},
            "graph_spec[0].batch_size: expected 1 to max_batch_size = 4, got 5",
        ),
        (
            {
                "max_batch_size": 4,
                "optimization": {"cuda": {"graph_spec": [{"batch_size": 2, "graph_lower_bound": {"batch_size": 3}}]}},
            },
            "graph_lower_bound.batch_size: expected 1 to 2, got 3",
        ),
        (
            {
                "max_batch_size": 4,
                "optimization": {
                    "cuda": {
                        "graph_spec": [
                            {
                                "batch_size": 2,
                                "input": {"A": {"dim": [4]}},
                                "graph_lower_bound": {"batch_size": 1, "input": {"A": {"dim": [2]}}},
                            }
                        ]
                    }
                },
            },
            "only the batch may be smaller",
        ),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_its_place(trt, tmp_path, config, words: str) -> None:
    error = refusal(tmp_path, add_sub(8), config)
    assert error.code is ErrorCode.INVALID_ARG
    assert words in error.message


# --- what is completed


def config_of(content: bytes, tmp_path, config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any] | None:
    with loading(tmp_path, content, config, **more) as model:
        found: dict[str, Any] | None = model.description.config
        return found


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        ((8,), {"max_batch_size": 8, "dynamic_batching": {}}),
        ((1,), {"max_batch_size": 1}),
        ((2, 16), {"max_batch_size": 16, "dynamic_batching": {}}),
    ],
)
def test_the_largest_batch_is_that_of_the_profiles(
    trt, tmp_path, most: tuple[int, ...], expected: dict[str, Any]
) -> None:
    assert config_of(add_sub(*most), tmp_path) == expected


def test_an_engine_whose_first_dimension_is_fixed_does_not_batch(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (8, 4)), tensor("OUTPUT0", (8, 4))]
    with loading(tmp_path, engine("same", tensors)) as model:
        assert (model.description.config, model.description.batching) == (None, False)
        assert [spec.shape for spec in model.description.inputs] == [(8, 4)]


def test_dims_that_are_written_tell_whether_there_is_a_batch_dimension(trt, tmp_path) -> None:
    def written(dims: list[int]) -> dict[str, Any]:
        return {"input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": dims}], "output": []}

    assert config_of(add_sub(8), tmp_path, written([4])) == {"max_batch_size": 8, "dynamic_batching": {}}
    assert config_of(add_sub(8), tmp_path, written([-1, 4])) is None
    fixed = engine("same", [tensor("INPUT0", (8, 4)), tensor("OUTPUT0", (8, 4))])
    error = refusal(tmp_path, fixed, written([4]))
    assert (error.code, "cannot batch" in error.message) == (ErrorCode.INVALID_ARG, True)


def test_a_larger_batch_than_the_engine_takes_is_refused_with_both_numbers(trt, tmp_path) -> None:
    error = refusal(tmp_path, add_sub(8), {"max_batch_size": 16})
    assert error.code is ErrorCode.INVALID_ARG
    assert re.search(r"max_batch_size is 16.* 8 at most", error.message)
    assert config_of(add_sub(8), tmp_path, {"max_batch_size": 4}) is None


def test_ragged_inputs_and_what_is_made_of_them_do_not_limit_the_batch(trt, tmp_path) -> None:
    tensors = [tensor("INPUT0", (-1,)), tensor("COUNT", (-1,)), tensor("OUTPUT0", (-1,))]
    content = engine("same", tensors, profile(INPUT0=((1,), (64,), (4096,)), COUNT=((1,), (8,), (16,))))
    config = {
        "max_batch_size": 16,
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}],
    }
    assert config_of(content, tmp_path, config) is None
    assert refusal(tmp_path, content, {**config, "max_batch_size": 17}).code is ErrorCode.INVALID_ARG


def test_nothing_is_completed_where_that_is_switched_off(trt, tmp_path) -> None:
    assert config_of(add_sub(8), tmp_path, auto_complete=False) is None
