"""Frozen model configurations built by hand, for unit tests of what works on them."""

from __future__ import annotations

from typing import Any

from headrace.repository.model_config import InstanceGroup, ModelConfig, TensorConfig, VersionPolicy
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.datatype import BY_NAME


def tensor(name: str, datatype: str, *dims: int, **more: Any) -> TensorConfig:
    """Return an input or output."""
    return TensorConfig(name=name, datatype=BY_NAME[datatype], dims=tuple(dims), **more)


def model(inputs: list[TensorConfig], outputs: list[TensorConfig], max_batch_size: int = 0, **more: Any) -> ModelConfig:
    """Return a model named m with one CPU instance."""
    fields: dict[str, Any] = {
        "name": "m",
        "backend": "identity",
        "platform": "",
        "max_batch_size": max_batch_size,
        "inputs": tuple(inputs),
        "outputs": tuple(outputs),
        "instance_groups": (InstanceGroup("m", "KIND_CPU", 1),),
        "version_policy": VersionPolicy(),
        "dynamic_batching": None,
        "decoupled": False,
        "default_model_filename": "",
        "parameters": {},
        "metric_tags": {},
        "proto": pb.ModelConfig(name="m"),
        **more,
    }
    return ModelConfig(**fields)


def repeat() -> ModelConfig:
    """Return the sample model `repeat`: decoupled, a response for each element of IN, then an end without one."""
    inputs = [tensor("IN", "INT32", -1), tensor("DELAY", "UINT32", -1, optional=True)]
    inputs.append(tensor("WAIT", "UINT32", 1, optional=True))
    outputs = [tensor("OUT", "INT32", 1), tensor("IDX", "UINT32", 1)]
    return model(inputs, outputs, name="repeat", decoupled=True)
