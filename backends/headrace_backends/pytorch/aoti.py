"""Packages that AOTInductor compiled: `.pt2` files with machine code for one kind of device, and names but no shapes."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from headrace_backends.api import ModelContext, ModelDescription
from headrace_backends.pytorch.exported import argument_paths, result_name, result_paths
from headrace_backends.pytorch.naming import check_optional, configured_inputs, configured_outputs, place_by_path
from headrace_backends.pytorch.options import TorchOptions
from headrace_backends.pytorch.program import Input
from headrace_protocol.errors import invalid, unsupported

_UNPACKED: Final = re.compile(r"(/\S*/aotinductor_\w+)/")
_DEFAULT_NAME: Final = "model"
_TOO_FEW_ROWS: Final = "dim value is too small at 0, expected it to be >= 2, but got: 1"


class CompiledPackage:
    """A package of AOTInductor. It holds the interpreter while it runs, so every instance gets a process."""

    exclusive: Final = True
    keeps_state: Final = False

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        model: ModelContext,
        options: TorchOptions,
        device: torch.device | None,
    ) -> None:
        """Load model `model`, or the only one, of the package. Raises InferError where that cannot be done here."""
        if options.compiling is not None:
            raise invalid(f"model '{model.name}': {path} is compiled already, torch.compile cannot do it again")
        if _DEFAULT_NAME not in names and len(names) != 1:
            raise invalid(f"model '{model.name}': {path} holds {', '.join(names)}; expected '{_DEFAULT_NAME}', or one")
        name = _DEFAULT_NAME if _DEFAULT_NAME in names else names[0]
        index = device.index if device is not None and device.type == "cuda" else -1
        _check_device(path, name, model, device)
        try:
            self._loader: Final = torch._C._aoti.AOTIModelPackageLoader(str(path), name, False, 1, index)
            in_spec, out_spec = map(pytree.treespec_loads, self._loader.get_call_spec())
        except Exception as error:
            raise invalid(f"model '{model.name}': PyTorch cannot load {path}: {error}") from error
        check_optional(model.config, (), "a compiled package")
        if index < 0:
            _remove_unpacked()
        inputs, outputs = configured_inputs(model.config), configured_outputs(model.config)
        arguments, results = argument_paths(in_spec), result_paths(out_spec)
        keys = [_key(path) for path in arguments]
        names_of_results = [result_name(path, position) for position, path in enumerate(results)]
        self._order: Final = _in_order(place_by_path(tuple(inputs), arguments, keys, "the package's inputs"))
        self._results: Final = place_by_path(tuple(outputs), results, names_of_results, "the package's outputs")
        self._count: Final = len(results)
        self._batches: Final = int(model.config.get("max_batch_size", 0)) > 0
        self._refuses_one_row = False
        self.inputs: Final = {name: Input(element) for name, element in inputs.items()}
        self.outputs: Final = outputs
        self.written: Final = frozenset(inputs)
        self.description: Final = ModelDescription()

    def run(self, values: Mapping[str, Any], wanted: Sequence[str]) -> Mapping[str, Any]:
        tensors = [values[name].contiguous() for name in self._order]
        results = self._run_row(tensors) if self._batches and tensors[0].shape[0] == 1 else self._run(tensors)
        return {name: results[self._results[name]] for name in wanted}

    def _run(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        results: Sequence[torch.Tensor] = self._loader.boxed_run(list(tensors))  # it empties the list
        if len(results) != self._count:
            raise RuntimeError(f"the package gave {len(results)} tensors, and declares {self._count}")
        return results

    def _run_row(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a batch of one row; as two rows where the package was compiled to refuse one, as AOTInductor does."""
        if not self._refuses_one_row:
            try:
                return self._run(tensors)
            except RuntimeError as error:
                if _TOO_FEW_ROWS not in str(error):
                    raise
            self._refuses_one_row = True
        return [result[:1] for result in self._run([torch.cat((tensor, tensor)) for tensor in tensors])]


def _check_device(path: Path, name: str, model: ModelContext, device: torch.device | None) -> None:
    """Raise UNSUPPORTED where the package was compiled for another kind of device: running it would crash."""
    try:
        metadata = torch._C._aoti.AOTIModelPackageLoader.load_metadata_from_package(str(path), name)
    except Exception as error:
        raise invalid(f"model '{model.name}': PyTorch cannot load {path}: {error}") from error
    compiled_for = metadata.get("AOTI_DEVICE_KEY", "")
    wanted = "cpu" if device is None else device.type
    if compiled_for and compiled_for != wanted:
        raise unsupported(
            f"model '{model.name}': {path} was compiled for '{compiled_for}', the instances are on '{wanted}'"
        )


def _remove_unpacked() -> None:
    """Remove what the loader unpacked: it is mapped, and a process that is killed would leave it behind."""
    with contextlib.suppress(OSError):
        mapped = Path("/proc/self/maps").read_text()
        for folder in {found[1] for found in _UNPACKED.finditer(mapped)}:
            shutil.rmtree(folder, ignore_errors=True)


def _key(path: str) -> str:
    """Return the keyword of an argument given by name, so that `KWARGS[x]` may be called `x`; otherwise the path."""
    found = re.fullmatch(r"KWARGS\[(\w+)\]", path)
    return path if found is None else found[1]


def _in_order(placed: Mapping[str, int]) -> list[str]:
    return sorted(placed, key=lambda name: placed[name])
