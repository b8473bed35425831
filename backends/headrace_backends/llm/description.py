"""What a language model adds to its configuration: tensors, one answer or many to a request, and its ModelCard. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_backends.llm.v2_tensors import INPUTS, OUTPUTS
from headrace_protocol.errors import invalid
from headrace_protocol.generation import CARD_PARAMETER, ENCODER, ModelCard


def completed(config: Mapping[str, Any], card: ModelCard) -> dict[str, Any]:
    """Return the fields of a model's configuration as they are to be, with what its author wrote.

    Raises INVALID_ARG where the author wrote what no language model can keep to.
    """
    if int(config.get("max_batch_size", 0)):
        raise invalid("max_batch_size: a language model batches by itself, step by step; leave it out, or 0")
    for field in ("dynamic_batching", "sequence_batching"):
        if field in config:
            raise invalid(f"{field}: a language model schedules by itself; leave it out")
    policy = config.get("model_transaction_policy", {})
    parameters = {**config.get("parameters", {}), CARD_PARAMETER: {"string_value": ENCODER.encode(card).decode()}}
    return {
        "input": _with(config.get("input", ()), INPUTS, "input"),
        "output": _with(config.get("output", ()), OUTPUTS, "output"),
        "model_transaction_policy": {"decoupled": bool(policy.get("decoupled", True)) if policy else True},
        "parameters": parameters,
    }


def _with(written: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the tensors that the author wrote and those that he left out; all inputs are optional."""
    known = {tensor["name"]: tensor for tensor in ours}
    told = {}
    for tensor in written:
        name = tensor["name"]
        if name not in known:
            raise invalid(f"{kind} '{name}': a language model has none of that name; it has {', '.join(known)}")
        if tensor.get("data_type") not in (None, "TYPE_INVALID", known[name]["data_type"]):
            raise invalid(f"{kind} '{name}': expected {known[name]['data_type']}, got {tensor['data_type']}")
        told[name] = {**tensor, **known[name], "dims": _dims(tensor, known[name], kind)}
    return [*told.values(), *(dict(tensor) for tensor in ours if tensor["name"] not in told)]


def _dims(tensor: Mapping[str, Any], known: Mapping[str, Any], kind: str) -> list[int]:
    dims = [int(dim) for dim in tensor.get("dims", ())]
    ours: list[int] = known["dims"]
    if dims and (
        len(dims) != len(ours) or any(want not in (-1, dim) and dim != -1 for want, dim in zip(ours, dims, strict=True))
    ):
        raise invalid(f"{kind} '{tensor['name']}': expected dims {ours}, got {dims}")
    return dims or ours
