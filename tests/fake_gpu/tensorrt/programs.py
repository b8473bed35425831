"""What the stand-in's engines compute, and the shapes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .cudart import ILLEGAL_ADDRESS, Fault

Shapes = dict[str, tuple[int, ...]]


@dataclass
class Computed:
    inputs: dict[str, np.ndarray]
    values: dict[str, list[int]]
    shapes: Shapes


@dataclass
class Program:
    shapes: Callable[[Shapes, dict[str, list[int]]], Shapes]
    """From the shapes of inputs and the values of shape tensors; -1 = it depends on the data."""
    compute: Callable[[Computed], dict[str, np.ndarray]]


def _add_sub(call: Computed) -> dict[str, np.ndarray]:
    first, second = call.inputs["INPUT0"], call.inputs["INPUT1"]
    return {"OUTPUT0": first + second, "OUTPUT1": first - second}


def _same(call: Computed) -> dict[str, np.ndarray]:
    return {name.replace("INPUT", "OUTPUT"): array for name, array in call.inputs.items()}


def _same_shapes(shapes: Shapes, values: dict[str, list[int]]) -> Shapes:
    return {name.replace("INPUT", "OUTPUT"): shape for name, shape in shapes.items() if name not in values}


def _fault(call: Computed) -> dict[str, np.ndarray]:
    if (call.inputs["INPUT0"] < 0).any():
        raise Fault(ILLEGAL_ADDRESS)
    return _same(call)


def _device(call: Computed) -> dict[str, np.ndarray]:
    from . import cuda

    return {"OUTPUT0": np.full(call.shapes["OUTPUT0"], 1000 * cuda.device + os.getpid() * 10000, np.int64)}


PROGRAMS = {
    "add_sub": Program(lambda s, v: {"OUTPUT0": s["INPUT0"], "OUTPUT1": s["INPUT0"]}, _add_sub),
    "same": Program(_same_shapes, _same),
    "fault": Program(_same_shapes, _fault),
    "sum_all": Program(
        # of all rows, so that rows that nobody gave would be seen
        lambda s, v: {"OUTPUT0": (s["INPUT0"][0], 1)},
        lambda c: {"OUTPUT0": np.full(c.shapes["OUTPUT0"], c.inputs["INPUT0"].shape[0])},
    ),
    "nonzero": Program(
        lambda s, v: {"OUTPUT0": (-1, len(s["INPUT0"])), "OUTPUT1": s["INPUT0"]},
        lambda c: {"OUTPUT0": np.argwhere(c.inputs["INPUT0"]), "OUTPUT1": c.inputs["INPUT0"]},
    ),
    "fill": Program(
        lambda s, v: {"OUTPUT0": tuple(v["SHAPE"])},
        lambda c: {"OUTPUT0": np.full(c.shapes["OUTPUT0"], c.inputs["INPUT0"].reshape(-1)[0])},
    ),
    "shape_of": Program(
        lambda s, v: {"OUTPUT0": (len(s["INPUT0"]),)}, lambda c: {"OUTPUT0": np.array(c.inputs["INPUT0"].shape)}
    ),
    "device": Program(lambda s, v: {"OUTPUT0": (s["INPUT0"][0], 1)}, _device),
}
