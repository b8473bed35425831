"""Bodies that the document shows. They are for the sample models of the project, and work as they stand."""

from __future__ import annotations

from typing import Any, Final

INFER: Final[dict[str, Any]] = {
    "inputs": [
        {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": list(range(16))},
        {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16},
    ]
}
INFER_ANSWER: Final[dict[str, Any]] = {
    "model_name": "simple",
    "model_version": "1",
    "outputs": [
        {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(1, 17))},
        {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 16], "data": list(range(-1, 15))},
    ],
}
INFER_ONE_OUTPUT: Final[dict[str, Any]] = {
    **INFER,
    "id": "42",
    "parameters": {"priority": 1, "timeout": 5_000_000},
    "outputs": [{"name": "OUTPUT1", "parameters": {"binary_data": True}}],
}
GENERATE: Final[dict[str, Any]] = {"id": "42", "INPUT0": list(range(16)), "INPUT1": [1] * 16}
GENERATE_ANSWER: Final[dict[str, Any]] = {
    "id": "42",
    "model_name": "simple",
    "model_version": "1",
    "OUTPUT0": list(range(1, 17)),
    "OUTPUT1": list(range(-1, 15)),
}
REGISTER_SYSTEM: Final[dict[str, Any]] = {"key": "/inputs", "offset": 0, "byte_size": 4096}
REGISTER_CUDA: Final[dict[str, Any]] = {"raw_handle": {"b64": "A" * 85 + "Q=="}, "device_id": 0, "byte_size": 4096}
"""The handle is 64 bytes, as a cudaIpcMemHandle_t is."""
TRACE: Final[dict[str, Any]] = {"trace_level": ["TIMESTAMPS"], "trace_rate": "100", "trace_count": "-1"}
LOGGING: Final[dict[str, Any]] = {"log_verbose_level": 1, "log_format": "ISO8601"}
