"""The module that models import as `triton_python_backend_utils`: names only, what they do is in the other modules.

Installed under that name, and as `c_python_backend_utils`, in processes that serve a model and nowhere else.
"""

from __future__ import annotations

import sys
from typing import Final

from headrace_backends.python.calling import ResponseIterator
from headrace_backends.python.configuring import ModelConfig
from headrace_backends.python.control import is_model_ready, load_model, unload_model
from headrace_backends.python.conversions import (
    TRITON_STRING_TO_NUMPY,
    deserialize_bytes_tensor,
    get_input_config_by_name,
    get_input_tensor_by_name,
    get_output_config_by_name,
    get_output_tensor_by_name,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
    using_decoupled_model_transaction_policy,
)
from headrace_backends.python.errors import TritonError, TritonModelException
from headrace_backends.python.logger import Logger
from headrace_backends.python.metrics import Metric, MetricFamily
from headrace_backends.python.process import get_model_dir
from headrace_backends.python.request import (
    FLAG_SEQUENCE_END,
    FLAG_SEQUENCE_START,
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from headrace_backends.python.response import InferenceResponse
from headrace_backends.python.sender import COMPLETE_FINAL, InferenceResponseSender
from headrace_backends.python.tensor import Tensor

TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL: Final = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = RELEASE_RESCHEDULE
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = FLAG_SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = FLAG_SEQUENCE_END
TRITONSERVER_MEMORY_CPU: Final = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU: Final = MemoryType.TRITONSERVER_MEMORY_GPU

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]
_NAMES: Final = ("triton_python_backend_utils", "c_python_backend_utils")


def install() -> None:
    """Have `import triton_python_backend_utils` find this module from now on."""
    for name in _NAMES:
        sys.modules[name] = sys.modules[__name__]
