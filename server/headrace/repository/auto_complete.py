"""What a configuration leaves out, completed from the model's files and from what its backend found in them.

What the user wrote wins, always: a list that was given, however short, is left alone, and so is every scalar.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path, PurePath
from typing import Final, cast

from headrace.repository.batch_tensors import made_inputs
from headrace.repository.model_config import ConfigError, Problem
from headrace.repository.platforms import BY_PLATFORM, ENSEMBLE, KINDS, ModelKind
from headrace_protocol import datatype
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.tensor import TensorSpec

DEFAULT_MAX_BATCH_SIZE: Final = 4


def backend_of(proto: pb.ModelConfig, version_directory: Path | None, model_name: str) -> ModelKind:
    """Return backend, platform and default file name; what `proto` gives of them is kept.

    Tried in this order: `backend`, `platform`, `default_model_filename`, the files of the version's directory, a model
    name that ends in `.<backend>`. Raises ConfigError where nothing tells the backend.
    """
    if proto.platform == ENSEMBLE or proto.HasField("ensemble_scheduling"):
        return ModelKind(proto.backend, proto.platform or ENSEMBLE, proto.default_model_filename)
    files = _files(version_directory)
    kind = _guess(proto, files, model_name)
    return ModelKind(kind.backend, proto.platform or kind.platform, proto.default_model_filename or kind.filename)


def _files(directory: Path | None) -> frozenset[str]:
    try:
        return frozenset() if directory is None else frozenset(entry.name for entry in directory.iterdir())
    except OSError:
        return frozenset()  # a directory that cannot be read tells nothing; loading it will say why


def _guess(proto: pb.ModelConfig, files: Collection[str], model_name: str) -> ModelKind:
    given, filename = proto.backend, proto.default_model_filename
    known = BY_PLATFORM.get(proto.platform)
    if given:
        if known is not None and known.backend == given:
            return known
        kinds = [kind for kind in KINDS if kind.backend == given]
        present = _by_filename(filename, kinds) if filename else _by_files(files, kinds)
        custom = f"model.{given}"
        return present or (kinds[0] if kinds else ModelKind(given, "", custom if custom in files else ""))
    if known is not None:
        return known
    if proto.platform:
        raise ConfigError([Problem("platform", f"expected one of {', '.join(BY_PLATFORM)}, got {proto.platform!r}")])
    found = (_by_filename(filename, KINDS) if filename else None) or _by_files(files, KINDS)
    if found is not None:
        return found
    backend = model_name.partition(".")[2]
    if backend:
        return ModelKind(backend, "", f"model.{backend}")
    names = ", ".join(sorted({kind.filename for kind in KINDS}))
    text = f"nothing tells which backend runs the model: set `backend`, or name the model's file one of {names}"
    raise ConfigError([Problem("backend", text)])


def _by_filename(filename: str, kinds: Sequence[ModelKind]) -> ModelKind | None:
    """Return the kind whose default file name has the same ending; JSON is too common to tell by its ending."""
    suffix = PurePath(filename).suffix
    for kind in kinds:
        if filename == kind.filename or (suffix == PurePath(kind.filename).suffix != ".json"):
            return kind
    return None


def _by_files(files: Collection[str], kinds: Sequence[ModelKind]) -> ModelKind | None:
    return next((kind for kind in kinds if kind.filename in files), None)


def complete(
    proto: pb.ModelConfig,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    batching: bool | None,
    *,
    default_max_batch_size: int,
    max_batch_size_given: bool,
) -> list[Problem]:
    """Fill in batching, inputs and outputs from what the model declares; return what contradicts it.

    - `max_batch_size` is set, to the default, only where the model can batch and the user gave no inputs, no outputs
      and no max_batch_size. An explicit 0 stays 0, and dims then keep their first dimension.
    - A dynamic batcher is added only together with a max_batch_size > 1 set here. So to batch without it (each request
      a batch of its own), write `max_batch_size: N` and no `dynamic_batching`.
    - Each of inputs and outputs is filled only where it is wholly absent.
    """
    problems = []
    made = made_inputs(proto)
    inputs = tuple(spec for spec in inputs if spec.name not in made)
    derived = (() if proto.input else inputs) + (() if proto.output else outputs)
    if derived and proto.max_batch_size > 0 and not _batches(derived, batching, proto.max_batch_size):
        text = (
            f"the model cannot batch, got {proto.max_batch_size}: batching needs a first dimension that varies in "
            f"every tensor, and the model has {_tensors(inputs + outputs)}"
        )
        problems.append(Problem("max_batch_size", text))
    if batching and not (max_batch_size_given or proto.input or proto.batch_input or proto.output):
        proto.max_batch_size = default_max_batch_size
        if default_max_batch_size > 1 and proto.WhichOneof("scheduling_choice") is None:
            proto.dynamic_batching.SetInParent()
    batches = proto.max_batch_size > 0
    if not proto.input:
        for spec in inputs:
            tensor = proto.input.add(optional=spec.optional)
            problems += _describe(tensor, spec, "input", batches=batches)
    if not proto.output:
        for spec in outputs:
            problems += _describe(proto.output.add(), spec, "output", batches=batches)
    return problems


def _batches(specs: Sequence[TensorSpec], batching: bool | None, max_batch_size: int) -> bool:
    """Whether batches of up to `max_batch_size` fit: of one row, also where the first dimension is fixed at 1."""
    single = max_batch_size == 1 and all(spec.shape[:1] in ((1,), (-1,)) for spec in specs)
    return batching is not False or single


def _describe(tensor: pb.ModelInput | pb.ModelOutput, spec: TensorSpec, kind: str, *, batches: bool) -> list[Problem]:
    """Write `spec` into `tensor`. Dims cannot be empty: a scalar is one element, reshaped to none."""
    tensor.name = spec.name
    known = datatype.BY_NAME.get(spec.datatype)
    if known is None:
        return [Problem(kind, f"the model's {spec.name!r} has the type {spec.datatype!r}, which the protocol lacks")]
    tensor.data_type = cast("pb.DataType", known.number)  # the stub has no way from a number to an enum
    dims = _shape_tensor_dims(spec, batches=batches) if spec.is_shape_tensor else spec.shape[1 if batches else 0 :]
    tensor.is_shape_tensor = spec.is_shape_tensor
    tensor.dims.extend(dims or (1,))
    if not dims:
        tensor.reshape.SetInParent()
    return []


def _shape_tensor_dims(spec: TensorSpec, *, batches: bool) -> tuple[int, ...]:
    """Return what requests have of a shape tensor: where it batches, all values but the first, which is the rows."""
    return (spec.shape[0] - 1,) if batches and spec.shape and spec.shape[0] > 1 else spec.shape


def check_against_model(
    proto: pb.ModelConfig, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> list[Problem]:
    """Return where a configuration and the model's own declaration differ. Nothing declared = nothing to check."""
    problems = []
    if inputs:
        declared = {spec.name: spec for spec in inputs}
        for index, tensor in enumerate(proto.input):
            problems += _compare(tensor, declared, f"input[{index}]", proto.max_batch_size)
        made = made_inputs(proto)
        problems += _compare_made(made, declared)
        written = {tensor.name for tensor in proto.input} | made.keys()
        problems += [
            Problem("input", f"the model needs {_tensors([spec])}, which the configuration lacks")
            for spec in inputs
            if spec.name not in written and not spec.optional
        ]
    if outputs:
        declared = {spec.name: spec for spec in outputs}
        scattered = {name for scattered in proto.batch_output for name in scattered.target_name}
        for index, output in enumerate(proto.output):
            path = f"output[{index}]"
            problems += _compare(output, declared, path, proto.max_batch_size, any_shape=output.name in scattered)
    return problems


def _compare_made(made: dict[str, tuple[pb.DataType, int]], declared: dict[str, TensorSpec]) -> list[Problem]:
    """Compare the inputs that are made for each batch with those that the model has."""
    problems = []
    for name, (data_type, rank) in made.items():
        spec = declared.get(name)
        if spec is None:
            text = f"the model has no {name!r}, it has {_tensors(list(declared.values()))}"
        elif datatype.BY_NUMBER[data_type].name != spec.datatype:
            text = f"the model's {name!r} is {spec.datatype}, got {pb.DataType.Name(data_type)}"
        elif len(spec.shape) != rank:
            text = f"the model's {name!r} has {len(spec.shape)} dimensions {list(spec.shape)}, what is made has {rank}"
        else:
            continue
        problems.append(Problem("batch_input", text))
    return problems


def _compare(
    tensor: pb.ModelInput | pb.ModelOutput,
    declared: dict[str, TensorSpec],
    path: str,
    max_batch_size: int,
    *,
    any_shape: bool = False,
) -> list[Problem]:
    spec = declared.get(tensor.name)
    if spec is None:
        return [
            Problem(f"{path}.name", f"the model has no {tensor.name!r}, it has {_tensors(list(declared.values()))}")
        ]
    problems = []
    known = datatype.BY_NUMBER.get(tensor.data_type)
    if known is None or known.name != spec.datatype:
        got = pb.DataType.Name(tensor.data_type)
        expected = datatype.BY_NAME[spec.datatype].config_name if spec.datatype in datatype.BY_NAME else spec.datatype
        problems.append(Problem(f"{path}.data_type", f"the model's {tensor.name!r} is {expected}, got {got}"))
    if any_shape:
        return problems
    if spec.is_shape_tensor:
        return problems + _compare_shape_tensor(tensor, spec, path, max_batch_size)
    if tensor.is_shape_tensor:
        text = f"the values of the model's {tensor.name!r} tell no shapes"
        return [*problems, Problem(f"{path}.is_shape_tensor", text)]
    if isinstance(tensor, pb.ModelInput) and tensor.allow_ragged_batch:
        if spec.shape != (-1,):
            text = f"a ragged input reaches the model as [-1], the model's {tensor.name!r} has {list(spec.shape)}"
            problems.append(Problem(f"{path}.allow_ragged_batch", text))
        return problems
    reshaped = tensor.HasField("reshape")
    dims = list(tensor.reshape.shape if reshaped else tensor.dims)
    where = f"{path}.reshape.shape" if reshaped else f"{path}.dims"
    shape, model = ([-1, *dims] if max_batch_size > 0 else dims), list(spec.shape)
    if len(shape) != len(model):
        text = (
            f"the model's {tensor.name!r} has {len(model)} dimensions {model}, "
            f"the configuration has {len(shape)}: {_made_of(dims, max_batch_size)}"
        )
        return [*problems, Problem(where, text + _scalar_hint(model, max_batch_size))]
    if max_batch_size > 0 and model[0] != -1 and (model[0], max_batch_size) != (1, 1):
        text = f"the first dimension of the model's {tensor.name!r} {model} is fixed: it cannot batch up to {max_batch_size}"
        problems.append(Problem("max_batch_size", text))
    first = 1 if max_batch_size > 0 else 0
    if any(
        ours not in (theirs, -1) and theirs != -1 for ours, theirs in zip(shape[first:], model[first:], strict=True)
    ):
        text = f"the model's {tensor.name!r} is {model}, the configuration has {_made_of(dims, max_batch_size)}"
        problems.append(Problem(where, text))
    return problems


def _compare_shape_tensor(
    tensor: pb.ModelInput | pb.ModelOutput, spec: TensorSpec, path: str, max_batch_size: int
) -> list[Problem]:
    """Compare a shape tensor: of a batch it may lack the first value, which is the number of rows."""
    if not tensor.is_shape_tensor:
        text = f"the values of the model's {tensor.name!r} tell shapes: set is_shape_tensor"
        return [Problem(f"{path}.is_shape_tensor", text)]
    dims = tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
    allowed = {spec.shape, _shape_tensor_dims(spec, batches=max_batch_size > 0)}
    if dims in allowed:
        return []
    expected = " or ".join(str(list(shape)) for shape in sorted(allowed))
    return [
        Problem(f"{path}.dims", f"the model's {tensor.name!r} is a shape tensor, expected {expected}, got {list(dims)}")
    ]


def _made_of(dims: list[int], max_batch_size: int) -> str:
    if max_batch_size == 0:
        return f"{dims} (max_batch_size is 0, so the dims are all there is)"
    return f"{[-1, *dims]} (the batch dimension, because max_batch_size is {max_batch_size}, then {dims})"


def _scalar_hint(model: list[int], max_batch_size: int) -> str:
    scalar = len(model) == (1 if max_batch_size > 0 else 0)
    return "; one element without a dimension is written dims: [ 1 ] reshape: { shape: [ ] }" if scalar else ""


def _tensors(specs: Sequence[TensorSpec]) -> str:
    shown = [f"{spec.name!r} ({spec.datatype} {list(spec.shape)})" for spec in specs[:16]]
    return ", ".join(shown) + (", ..." if len(specs) > 16 else "") if shown else "none"
