"""Small PyTorch models for tests: modules, and functions that write them into files of every kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

BATCH = torch.export.Dim("batch")
N = torch.export.Dim("n")


class Identity(torch.nn.Module):
    """Gives its argument back."""

    def forward(self, INPUT0: torch.Tensor) -> torch.Tensor:
        return INPUT0


class AddSub(torch.nn.Module):
    """INPUT0 + INPUT1 and INPUT0 - INPUT1."""

    def forward(self, INPUT0: torch.Tensor, INPUT1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return INPUT0 + INPUT1, INPUT0 - INPUT1


class Perceptron(torch.nn.Module):
    """x [batch, 8] -> [batch, 4]; weights drawn from a fixed seed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = torch.nn.Linear(8, 32)
        self.last = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.last(torch.relu(self.hidden(x))), 1)


class Lookup(torch.nn.Module):
    """Row `ids` [batch, n] of a table of eight rows; other ids are an error."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class RaggedSums(torch.nn.Module):
    """INPUT0 [n] of many requests, doubled, and what each request's elements add up to; ENDS (0 first) tells them apart.

    A negative element is an error.
    """

    def forward(self, INPUT0: torch.Tensor, ENDS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if bool((INPUT0 < 0).any()):
            raise ValueError("a negative element")
        running = torch.nn.functional.pad(torch.cumsum(INPUT0, 0), (1, 0))
        at = running[ENDS.to(torch.int64)]
        return INPUT0 * 2, (at[1:] - at[:-1]).reshape(-1, 1)


class Named(NamedTuple):
    total: torch.Tensor
    difference: torch.Tensor


class NamedResults(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Named:
        return Named(a + b, a - b)


class DictResults(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"difference": a - b, "total": a + b}


class ListResults(torch.nn.Module):
    """As many results as its input has rows."""

    def forward(self, a: torch.Tensor) -> list[torch.Tensor]:
        return list(a.unbind())


class DictArgument(torch.nn.Module):
    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return given["a"] - given["b"]


class Numbers(torch.nn.Module):
    """Numbers of Python's as arguments."""

    def forward(self, x: torch.Tensor, times: int, plus: float, negate: bool = False) -> torch.Tensor:
        y = x * times + plus
        return -y if negate else y


class MaybeBias(torch.nn.Module):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x if bias is None else x + bias


class Exclaim(torch.nn.Module):
    """Strings in and out, with their number."""

    def forward(self, texts: list[str]) -> tuple[list[str], torch.Tensor]:
        return [text + "!" for text in texts], torch.tensor([len(text) for text in texts], dtype=torch.int64)


class Counter(torch.nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


class WritesInput(torch.nn.Module):
    """Overwrites its input, and gives back twice what it was."""

    def forward(self, INPUT0: torch.Tensor) -> torch.Tensor:
        doubled = INPUT0 * 2
        INPUT0.zero_()
        return doubled


def scripted(module: torch.nn.Module) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module.eval())


def traced(module: torch.nn.Module, *example: torch.Tensor) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module.eval(), example)


def loaded_script(path: Path) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(path))


def save_script(path: Path, module: torch.nn.Module) -> Path:
    """Write a module as TorchScript."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (module if isinstance(module, torch.jit.ScriptModule) else scripted(module)).save(str(path))
    return path


def exported(module: torch.nn.Module, *args: Any, dynamic: Any = None, **kwargs: Any) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), args, kwargs, dynamic_shapes=dynamic)


def save_exported(path: Path, module: torch.nn.Module, *args: Any, dynamic: Any = None, **kwargs: Any) -> Path:
    """Export a module with these examples of its arguments, and write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(exported(module, *args, dynamic=dynamic, **kwargs), path)
    return path


def save_compiled(path: Path, module: torch.nn.Module, *args: Any, dynamic: Any = None, **kwargs: Any) -> Path:
    """Compile a module by AOTInductor for this machine, and write the package. Takes a C++ compiler and seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._inductor

        program = exported(module, *args, dynamic=dynamic, **kwargs)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


def save_weights(path: Path, module: torch.nn.Module) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), path)
    return path


def source(*lines: str) -> str:
    """Return the text of a model.py."""
    return "\n".join(["import torch", "", *lines, ""])


ADD_SUB_SOURCE = source(
    "class AddSub(torch.nn.Module):",
    "    def forward(self, INPUT0, INPUT1):",
    "        return INPUT0 + INPUT1, INPUT0 - INPUT1",
)


def add_torch(
    repository: Path, name: str, write: Callable[[Path], object], config: str = "", filename: str = "model.pt"
) -> Path:
    """Write a model with `write(path of its file)` and its configuration, if any. Returns its folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    write(folder / "1" / filename)
    if config:
        (folder / "config.pbtxt").write_text(config)
    return folder
