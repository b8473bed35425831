"""What the backend calls and the stand-ins imitate, against NVIDIA's own packages: TensorRT's dispatch runtime, libcudart.

The dispatch runtime has the Python API of the full one in a megabyte. Neither needs a GPU to be looked at, and both
tell what they do without one.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_backends.cuda_library import load_cudart
from headrace_backends.tensorrt.cuda import _PROTOTYPES, Cuda, CudaError
from headrace_protocol.errors import ErrorCode
from tensorrt_engines import add_sub

CLASSES = ["ICudaEngine", "IExecutionContext", "Runtime", "ILogger"]
ENUMS = ["DataType", "TensorIOMode", "TensorLocation", "ExecutionContextAllocationStrategy"]
NO_GPU = not any(Path("/dev").glob("nvidia[0-9]*"))


@pytest.fixture(scope="module")
def real() -> Any:
    return pytest.importorskip("tensorrt_dispatch_bindings", reason="has no wheel for this machine")


def methods(kind: type) -> dict[str, inspect.Signature]:
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {name: inspect.signature(function) for name, function in functions if not name.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_methods_and_the_names_of_their_arguments_are_those_of_the_real_class(trt, real, name: str) -> None:
    there = getattr(real, name)
    for method, signature in methods(getattr(trt, name)).items():
        text = getattr(there, method).__doc__
        for argument in list(signature.parameters)[1:]:
            if (name, method) != ("ILogger", "log"):  # its text names no arguments, for it is the user's to write
                assert re.search(rf"\b{argument}\b: ", text), (method, argument, text)


@pytest.mark.parametrize("name", ["ICudaEngine", "Runtime"])
def test_attributes_are_those_of_the_real_class(trt, real, name: str) -> None:
    made = trt.ICudaEngine({"tensors": [], "program": "same"}, None) if name == "ICudaEngine" else None
    attributes = [a for a in vars(made) if not a.startswith("_")] if made else []
    for attribute in attributes or ["DLA_core", "num_DLA_cores", "engine_host_code_allowed"]:
        assert isinstance(getattr(getattr(real, name), attribute), property), attribute


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_members_that_are_used(trt, real, name: str) -> None:
    assert {member.name for member in getattr(trt, name)} <= set(getattr(real, name).__members__)


def test_the_number_of_a_profile_goes_first_where_its_values_are_asked_for(real) -> None:
    text = real.ICudaEngine.get_tensor_profile_values.__doc__
    assert re.search(r"name: typing\.SupportsInt, profile_index: str", text), text


def test_an_output_allocator_and_a_logger_of_ours_can_be_made(real) -> None:
    from headrace_backends.tensorrt.contexts import _new_allocator
    from headrace_backends.tensorrt.cuda import DeviceBuffer
    from headrace_backends.tensorrt.engine import EngineLog

    _new_allocator(real, DeviceBuffer(None))  # type: ignore[arg-type]
    log = EngineLog(real)
    log.logger.log(real.ILogger.ERROR, "one")
    log.logger.log(real.ILogger.Severity.INFO, "two")
    assert log.take() == "one"


LOADING = """
import gc, os, sys
from pathlib import Path
import tensorrt_dispatch_bindings
from headrace_backends.tensorrt.engine import EngineLoader
from headrace_protocol.errors import InferError
try:
    EngineLoader(tensorrt_dispatch_bindings, "8.9", version_compatible=False, plugins=()).load(Path(sys.argv[1]), None, ())
except InferError as error:
    print(error.code.value, error.message)
gc.collect()
sys.stdout.flush()
os._exit(0)  # as a backend process ends
"""


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_the_real_runtime_without_a_gpu_is_not_asked_to_load_nor_freed(real, tmp_path) -> None:
    (tmp_path / "model.plan").write_bytes(add_sub(8))
    argv = [sys.executable, "-c", LOADING, str(tmp_path / "model.plan")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "UNAVAILABLE"), ended
    assert "CUDA initialization failure" in ended.stdout


@pytest.fixture(scope="module")
def cudart() -> Any:
    pytest.importorskip("nvidia.cuda_runtime", reason="has no wheel for this machine")
    library = load_cudart()
    assert library is not None
    return library


def test_the_real_cuda_runtime_has_every_function(trt, cudart) -> None:
    for name in _PROTOTYPES:
        assert hasattr(cudart, name)
        assert hasattr(trt.cuda, name), "the stand-in lacks it"


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_the_real_cuda_runtime_without_a_gpu_says_so(cudart) -> None:
    cuda = Cuda(cudart)
    for call in (cuda.device_count, lambda: cuda.select(0), lambda: cuda.stream(0), lambda: cuda.allocate(1)):
        with pytest.raises(CudaError, match=r"driver|no CUDA-capable device") as caught:
            if call() == 0:
                raise CudaError(100, "looking", "no CUDA-capable device")
        assert caught.value.as_infer_error("here").code is ErrorCode.UNAVAILABLE
