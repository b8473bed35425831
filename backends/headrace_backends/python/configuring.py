"""ModelConfig: the configuration as `auto_complete_config` of a model sees and completes it.

What the author of the configuration wrote is kept: setting it to something else is an error, which fails the load.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, Final

from headrace_backends.python.failures import describe
from headrace_protocol.datatype import ALL
from headrace_protocol.errors import internal

_DATATYPES: Final = frozenset(datatype.config_name for datatype in ALL)
_SCHEDULERS: Final = ("sequence_batching", "ensemble_scheduling")


class ModelConfig:
    """A model's configuration, to be completed."""

    def __init__(self, model_config: str) -> None:
        """`model_config` is JSON text."""
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as it is now; field names as in config.pbtxt."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch. Raises ValueError where the configuration has a larger one."""
        if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int) or max_batch_size < 0:
            raise ValueError(f"{self._where}: max_batch_size is an integer >= 0, got {max_batch_size!r}")
        written = int(self._config.get("max_batch_size", 0))
        if written > max_batch_size:
            raise ValueError(
                f"{self._where}: max_batch_size is set to {max_batch_size}, but the configuration specifies {written}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Have the model's requests batched. Raises ValueError where the configuration has another scheduler."""
        for other in _SCHEDULERS:
            if other in self._config:
                raise ValueError(
                    f"{self._where}: the scheduler is set to 'dynamic_batching', but the configuration specifies '{other}'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set whether the model is decoupled: `{"decoupled": True}`. Raises ValueError for anything else."""
        unknown = [key for key in transaction_policy_dict if key != "decoupled"]
        if unknown:
            raise ValueError(
                f"{self._where}: a model transaction policy has the property 'decoupled' alone, got {unknown[0]!r}"
            )
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if not isinstance(decoupled, bool):
            raise TypeError(f"{self._where}: 'decoupled' is a bool, got {decoupled!r}")
        written = self._config.get("model_transaction_policy")
        if written is not None and written.get("decoupled", False) != decoupled:
            raise ValueError(
                f"{self._where}: 'decoupled' is set to {decoupled}, but the configuration specifies {not decoupled}"
            )
        self._config["model_transaction_policy"] = {"decoupled": decoupled}

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - models may name it
        """Add an input: 'name', 'data_type', 'dims' and maybe 'optional'. Raises ValueError where it cannot be added."""
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output: 'name', 'data_type' and 'dims'. Raises ValueError where it cannot be added."""
        self._add("output", output, ("name", "data_type", "dims"))

    @property
    def _where(self) -> str:
        return f"auto_complete_config of model '{self._config.get('name', '')}'"

    def _add(self, kind: str, tensor: Mapping[str, Any], known: tuple[str, ...]) -> None:
        self._check(kind, tensor, known)
        name = tensor["name"]
        written: list[dict[str, Any]] = self._config.setdefault(kind, [])
        found = next((entry for entry in written if entry["name"] == name), None)
        if found is None:
            written.append({key: copy.deepcopy(value) for key, value in tensor.items()})
            return
        datatype = found.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"{self._where}: {kind} '{name}' is {tensor['data_type']}, but the configuration specifies {datatype}"
            )
        dims = [int(dim) for dim in found.get("dims", ())]
        if dims and dims != list(tensor["dims"]):
            raise ValueError(
                f"{self._where}: {kind} '{name}' has dims {list(tensor['dims'])}, but the configuration specifies {dims}"
            )
        if found.get("optional") and tensor.get("optional") is False:
            raise ValueError(f"{self._where}: {kind} '{name}' is not optional, but the configuration specifies it is")
        found.update(tensor)

    def _check(self, kind: str, tensor: Mapping[str, Any], known: tuple[str, ...]) -> None:
        if not isinstance(tensor, Mapping):
            raise TypeError(f"{self._where}: expected an {kind} as dict, got {type(tensor).__name__}")
        name = tensor.get("name")
        if name is None:
            raise ValueError(f"{self._where}: an {kind} is missing the property 'name'")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{self._where}: {kind} '{name}' is missing the property '{key}'")
        unknown = [key for key in tensor if key not in known]
        if unknown:
            allowed = ", ".join(f"'{key}'" for key in known)
            raise ValueError(f"{self._where}: {kind} '{name}' has the property {unknown[0]!r}; it may have {allowed}")
        if tensor["data_type"] not in _DATATYPES:
            raise ValueError(f"{self._where}: {kind} '{name}' has the unknown data_type {tensor['data_type']!r}")
        dims = tensor["dims"]
        if not isinstance(dims, (list, tuple)) or not all(type(dim) is int and (dim >= 1 or dim == -1) for dim in dims):
            raise ValueError(f"{self._where}: {kind} '{name}' has dims {dims!r}, expected integers >= 1, or -1")


def completed(model_class: type[Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the model's `auto_complete_config` changes; none where it has no such method.

    Raises INTERNAL with what it raised, or where it does not return the configuration.
    """
    complete = getattr(model_class, "auto_complete_config", None)
    if complete is None:
        return {}
    name = config.get("name", "")
    before = json.dumps(config)
    try:
        result = complete(ModelConfig(before))
    except BaseException as error:
        raise internal(f"model '{name}': auto_complete_config failed: {describe(error)}") from error
    if not isinstance(result, ModelConfig):
        raise internal(
            f"model '{name}': auto_complete_config has to return the ModelConfig that it was given, "
            f"it returned {type(result).__name__}"
        )
    original = json.loads(before)
    return {key: value for key, value in result.as_dict().items() if key not in original or original[key] != value}
