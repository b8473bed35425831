"""A forward as a list of operations that is made once and run for each step, by threads that need no interpreter.

Operations are kernels with their arguments. What differs from step to step (how many rows there are, where tensors lie) are
variables, put into the arguments of all operations that use them before they run. Between kernels there may be calls of
PyTorch's. Knows rows and addresses, no layers and no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_backends.llm.kernels.pool import Arguments, Kernel
from headrace_backends.llm.kernels.sequence import sched_yield, sequence

_MOST_ARGUMENTS: Final = 16
_LEAST_ROWS: Final = 64
"""That there is room for from the start."""


class Variable:
    """An integer among the arguments of operations, an address or a number, that is known when they run."""

    __slots__ = ("_offsets", "_places", "_uses")

    def __init__(self) -> None:
        self._uses: list[tuple[int, int]] = []
        self._places: NDArray[np.int64] | None = None
        self._offsets: NDArray[np.int64] | None = None

    def plus(self, offset: int) -> tuple[Variable, int]:
        """Return it as an argument that is so much more."""
        return self, offset

    def used(self, place: int, offset: int) -> None:
        """Take note that a program has it among its arguments, so far from their begin."""
        self._uses.append((place, offset))
        self._places = None

    def put(self, arguments: NDArray[np.int64], value: int) -> None:
        """Put its value where it is used."""
        if self._places is None or self._offsets is None:
            uses = np.array(self._uses, np.int64).reshape(-1, 2)
            self._places, self._offsets = uses[:, 0].copy(), uses[:, 1].copy()
        arguments[self._places] = self._offsets + value


class Rows(Variable):
    """The address of a tensor [rows, width] that operations write and read."""

    __slots__ = ("dtype", "tensor", "width")

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width: Final = width
        self.dtype: Final = dtype
        self.tensor = torch.empty(0, width, dtype=dtype)

    def make_room(self, count: int) -> bool:
        """See to it that there is room for so many rows; say whether the tensor is another one now."""
        if len(self.tensor) >= count:
            return False
        self.tensor = torch.empty(count, self.width, dtype=self.dtype)
        return True


Argument = int | Variable | tuple[Variable, int]
Call = Callable[["Program", int], None]
"""What is done between kernels, for so many rows."""


class _Run:
    """Kernels that follow each other."""

    __slots__ = ("arguments", "first", "wide")

    def __init__(self, first: int) -> None:
        self.first: Final = first
        self.wide = False
        """Whether it is worth all threads for a single row, too."""
        self.arguments: Arguments | None = None


class Program:
    """Operations in their order. Made by `run` and `call`, then executed; one thread's."""

    def __init__(self) -> None:
        self.count: Final = Variable()
        """How many rows there are."""
        self._rows: dict[tuple[str, int, torch.dtype], Rows] = {}
        self._foreign: dict[tuple[str, int, torch.dtype], Rows] = {}
        self._kernels: list[Kernel] = []
        self._values: list[int] = []
        self._items: list[_Run | Call] = []
        self._arguments: NDArray[np.int64] | None = None
        self._pairs: NDArray[np.int64] | None = None
        self._threads_at: NDArray[np.int64] | None = None
        self._room = 0

    def rows(self, name: str, width: int, dtype: torch.dtype) -> Rows:
        """Return the tensor of that name, width and dtype; the same for the same."""
        key = (name, width, dtype)
        if key not in self._rows:
            self._rows[key] = Rows(width, dtype)
            self._room = 0
        return self._rows[key]

    def foreign(self, name: str, width: int, dtype: torch.dtype) -> Rows:
        """Return rows of that name for which a call brings the tensor: see `replace`. Kernels do not write to them."""
        return self._foreign.setdefault((name, width, dtype), Rows(width, dtype))

    def run(self, kernel: Kernel, *arguments: Argument, wide: bool = False) -> None:
        """Add a kernel with its arguments but the first. `wide`: threads pay for a single row, too."""
        if not self._items or not isinstance(self._items[-1], _Run):
            self._items.append(_Run(len(self._kernels)))
        last = self._items[-1]
        assert isinstance(last, _Run)
        last.wide = last.wide or wide
        begin = len(self._kernels) * _MOST_ARGUMENTS
        values = [0] * _MOST_ARGUMENTS
        for at, argument in enumerate(arguments, 1):
            if isinstance(argument, int):
                values[at] = argument
            else:
                variable, offset = argument if isinstance(argument, tuple) else (argument, 0)
                variable.used(begin + at, offset)
        self._kernels.append(kernel)
        self._values.extend(values)
        self._arguments = None

    def call(self, function: Call) -> None:
        """Add what runs in the interpreter."""
        self._items.append(function)

    def put(self, variable: Variable, value: int) -> None:
        """Give a variable its value until it is given another."""
        variable.put(self._sealed(), value)

    def replace(self, rows: Rows, tensor: torch.Tensor) -> None:
        """Take a tensor of this run for foreign rows."""
        assert tensor.is_contiguous()
        assert tensor.dtype == rows.dtype
        rows.tensor = tensor
        self.put(rows, tensor.data_ptr())

    def execute(self, count: int, threads: int, worth: int) -> None:
        """Run it over `count` rows, of which `worth` are worth several threads where nothing is `wide`."""
        self.make_room(count)
        arguments = self._sealed()
        self.count.put(arguments, count)
        arguments[::_MOST_ARGUMENTS] = 0
        for item in self._items:
            if not isinstance(item, _Run):
                item(self, count)
            elif item.arguments is not None:
                sequence()(item.arguments, threads if item.wide or count >= worth else 1, long=True)

    def make_room(self, count: int) -> None:
        """See to it that all tensors have so many rows."""
        if count <= self._room:
            return
        self._room = max(_LEAST_ROWS, 1 << (count - 1).bit_length())
        for rows in self._rows.values():
            if rows.make_room(self._room):
                self.put(rows, rows.tensor.data_ptr())

    def _sealed(self) -> NDArray[np.int64]:
        if self._arguments is None:
            self._arguments = np.array(self._values, np.int64)
            for rows in self._rows.values():
                rows.put(self._arguments, rows.tensor.data_ptr())
            begin = self._arguments.ctypes.data
            self._pairs = np.array(
                [(kernel.address, begin + at * _MOST_ARGUMENTS * 8) for at, kernel in enumerate(self._kernels)],
                np.int64,
            )
            self._threads_at = np.zeros(len(self._kernels), np.int64)
            runs = [item for item in self._items if isinstance(item, _Run)]
            bounds = pairwise([*(run.first for run in runs), len(self._kernels)])
            for run, (first, after) in zip(runs, bounds, strict=True):
                run.arguments = Arguments(
                    self._pairs.ctypes.data + first * 16,
                    after - first,
                    self._threads_at.ctypes.data + first * 8,
                    sched_yield(),
                )
        return self._arguments
