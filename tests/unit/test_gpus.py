"""Which GPUs count, and for which backends."""

import pytest

from headrace.instances.gpus import gpu_count, without_gpu
from headrace.repository.config_loading import Completion, draft_config
from headrace.repository.config_text import parse_text


@pytest.fixture
def devices(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("0,1,2", 3),
        ("2", 1),
        (" 1 , 0 ", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,7,1", 1),
        ("GPU-8f1d,MIG-22aa", 2),
        ("0,1,2,0", 3),
    ],
)
def test_gpus_are_those_there_as_far_as_the_environment_names_them(devices, visible, count):
    assert gpu_count(None, visible, devices) == count


def test_what_the_user_says_decides(devices):
    assert [gpu_count(given, "0", devices) for given in (0, 2, 5)] == [0, 2, 5]


def test_a_machine_without_gpus_has_none(tmp_path):
    assert gpu_count(None, "0,1", tmp_path) == 0


@pytest.mark.parametrize(
    ("installed", "cannot"),
    [
        ({}, {"onnxruntime", "pytorch", "tensorrt", "identity"}),
        ({"onnxruntime": "1.22"}, {"onnxruntime", "pytorch", "tensorrt", "identity"}),
        ({"onnxruntime-gpu": "1.22", "torch": "2.13.0+cpu"}, {"pytorch", "tensorrt", "identity"}),
        ({"torch": "2.13.0"}, {"onnxruntime", "tensorrt", "identity"}),
        ({"torch": "2.13.0+cu130", "tensorrt-cu12": "10.16.1.11"}, {"onnxruntime", "identity"}),
    ],
)
def test_a_backend_needs_a_package_that_can_use_a_gpu(installed, cannot):
    backends = {"onnxruntime", "pytorch", "tensorrt", "identity", "python", "somebody's"}
    assert without_gpu(backends, installed.get) == cannot


def test_language_models_run_on_gpus_where_torch_can():
    assert without_gpu({"llm", "vllm"}, {"torch": "2.13.0+cpu"}.get) == {"llm", "vllm"}
    assert not without_gpu({"llm", "vllm"}, {"torch": "2.13.0"}.get)


@pytest.mark.parametrize(("backend", "kind", "gpus"), [("python", "KIND_GPU", (0, 1)), ("pytorch", "KIND_CPU", ())])
def test_instances_are_placed_on_gpus_that_their_backend_can_use(tmp_path, backend, kind, gpus):
    completion = Completion(gpu_count=2, without_gpu=frozenset({"pytorch"}))
    parsed = parse_text(f'backend: "{backend}"')
    config = draft_config(
        parsed, model_name="m", model_directory=tmp_path, version_directory=None, completion=completion
    )
    (group,) = config.instance_groups
    assert (group.kind, group.gpus) == (kind, gpus)
