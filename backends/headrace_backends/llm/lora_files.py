"""Reads a LoRA adapter as PEFT writes it: adapter_config.json beside adapter_model.safetensors. Knows no model.

Nothing is run to read it: weights in a pickle (adapter_model.bin) are refused. What would change a model's output and is not
computed here (DoRA, trained biases, whole modules saved beside) is refused by its name, never left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from headrace_protocol.errors import invalid, not_found, unsupported

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_NOT_COMPUTED: Final = (
    "alora_invocation_tokens", "arrow_config", "fan_in_fan_out", "kasa_config", "layer_replication", "lora_bias",
    "modules_to_save", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
_PREFIX: Final = "base_model.model."
_TENSOR: Final = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What an adapter adds to one linear layer: x a^T b^T."""

    a: torch.Tensor
    """[rank, in]."""
    b: torch.Tensor
    """[out, rank], times the adapter's scale; fp32 as `a`."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFile:
    """One adapter as it lies on the disk."""

    rank: int
    """The highest of its layers."""
    updates: Mapping[str, Update]
    """By the module's path in the model."""


def read_adapter(name: str, path: Path) -> AdapterFile:
    """Read the adapter that lies in the folder `path`.

    Raises NOT_FOUND where there is none, UNSUPPORTED for a kind that is not computed here, INVALID_ARG where it contradicts
    itself; each with the adapter's name.
    """
    config = _config(name, path)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in _tensors(name, path):
        match = _TENSOR.fullmatch(key.removeprefix(_PREFIX))
        if match is None:
            raise unsupported(f"LoRA adapter '{name}': it has a tensor {key}, which is not of a linear layer's update")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise invalid(f"LoRA adapter '{name}': {path / WEIGHTS_FILE} is empty")
    updates = {module: _update(name, module, found, config) for module, found in sides.items()}
    return AdapterFile(max(update.a.shape[0] for update in updates.values()), updates)


def _config(name: str, path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG_FILE).read_bytes())
    except FileNotFoundError:
        raise not_found(f"LoRA adapter '{name}': there is no {CONFIG_FILE} in {path}") from None
    except (OSError, ValueError) as error:
        raise invalid(f"LoRA adapter '{name}': {path / CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise unsupported(f"LoRA adapter '{name}': expected peft_type LORA, got {kind}")
    wrong = [key for key in _NOT_COMPUTED if config.get(key)]
    if config.get("bias", "none") != "none":
        wrong.append("bias")
    if wrong:
        raise unsupported(f"LoRA adapter '{name}': it was made with {', '.join(wrong)}, which is not supported")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise invalid(f"LoRA adapter '{name}': {key}: expected an object, got {config[key]!r}")
    return config


def _tensors(name: str, path: Path) -> Iterable[tuple[str, torch.Tensor]]:
    file = path / WEIGHTS_FILE
    if not file.is_file():
        pickled = (path / "adapter_model.bin").is_file()
        hint = "; adapter_model.bin is a pickle, which can run code: save it as safetensors" if pickled else ""
        raise not_found(f"LoRA adapter '{name}': there is no {WEIGHTS_FILE} in {path}{hint}")
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                yield key, opened.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise invalid(f"LoRA adapter '{name}': {file}: {error}") from error


def _update(name: str, module: str, found: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Update:
    if set(found) != {"A", "B"}:
        raise invalid(f"LoRA adapter '{name}': {module} has lora_{next(iter(found))} alone")
    a, b = found["A"], found["B"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise invalid(
            f"LoRA adapter '{name}': {module}: shapes {list(a.shape)} and {list(b.shape)} do not fit together"
        )
    rank = a.shape[0]
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", 8))
    told = _by_pattern(config.get("rank_pattern") or {}, module, config.get("r", rank))
    if told != rank:
        raise invalid(f"LoRA adapter '{name}': {module}: r is {told} in {CONFIG_FILE} and {rank} in the weights")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise invalid(f"LoRA adapter '{name}': lora_alpha: expected a number, got {alpha!r}")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return Update(a.float(), b.float() * scale)


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that a module's path ends with, as PEFT looks it up."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
