"""What a session's inputs and outputs are: types, shapes, and which dimensions are tied to which.

Pure: it works on what ONNX Runtime says of the model, and does not import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from headrace_protocol import datatype
from headrace_protocol.datatype import Array, DataType
from headrace_protocol.errors import unsupported
from headrace_protocol.tensor import TensorSpec

ONNX_ELEMENT_TYPES: Final = {
    datatype.FP32: 1,
    datatype.UINT8: 2,
    datatype.INT8: 3,
    datatype.UINT16: 4,
    datatype.INT16: 5,
    datatype.INT32: 6,
    datatype.INT64: 7,
    datatype.BYTES: 8,
    datatype.BOOL: 9,
    datatype.FP16: 10,
    datatype.FP64: 11,
    datatype.UINT32: 12,
    datatype.UINT64: 13,
    datatype.BF16: 16,
}
"""Numbers of onnx.TensorProto.DataType."""

_BY_ORT_NAME: Final = {
    "tensor(bool)": datatype.BOOL,
    "tensor(uint8)": datatype.UINT8,
    "tensor(uint16)": datatype.UINT16,
    "tensor(uint32)": datatype.UINT32,
    "tensor(uint64)": datatype.UINT64,
    "tensor(int8)": datatype.INT8,
    "tensor(int16)": datatype.INT16,
    "tensor(int32)": datatype.INT32,
    "tensor(int64)": datatype.INT64,
    "tensor(float16)": datatype.FP16,
    "tensor(float)": datatype.FP32,
    "tensor(double)": datatype.FP64,
    "tensor(string)": datatype.BYTES,
    "tensor(bfloat16)": datatype.BF16,
}


class NodeArg(Protocol):
    """onnxruntime.NodeArg: an int dimension is fixed, a str is a symbol, None is neither."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> list[int | str | None]: ...


class OnnxTensor:
    """One input or output of a model."""

    def __init__(self, arg: NodeArg, *, optional: bool = False) -> None:
        found = _BY_ORT_NAME.get(arg.type)
        if found is None:
            raise unsupported(f"{_described(arg)}, which has no datatype")
        self.name: Final = arg.name
        self.datatype: Final[DataType] = found
        self.onnx_type: Final = ONNX_ELEMENT_TYPES[found]
        self.optional: Final = optional
        self.symbols: Final[tuple[int | str | None, ...]] = tuple(arg.shape)
        self.shape: tuple[int, ...] = tuple(dim if isinstance(dim, int) and dim > 0 else -1 for dim in arg.shape)

    def spec(self) -> TensorSpec:
        """Return it as the server is told it."""
        return TensorSpec(self.name, self.datatype.name, self.shape, self.optional)


class OnnxSignature:
    """The tensors of a session that a model configuration can name."""

    def __init__(
        self,
        inputs: Sequence[NodeArg],
        overridable: Sequence[NodeArg],
        outputs: Sequence[NodeArg],
        config: Mapping[str, Any],
    ) -> None:
        configured_inputs = {tensor["name"]: tensor for tensor in config.get("input", ())}
        configured_outputs = {tensor["name"]: tensor for tensor in config.get("output", ())}
        states = {tensor["output_name"]: tensor for tensor in config.get("sequence_batching", {}).get("state", ())}
        if configured_outputs:
            configured_outputs = {**states, **configured_outputs}
        self.inputs: Final = {arg.name: OnnxTensor(arg) for arg in inputs}
        # Old models list every weight as an input with a default: such inputs exist only where the user names them.
        self.inputs.update(
            (arg.name, OnnxTensor(arg, optional=True)) for arg in overridable if arg.name in configured_inputs
        )
        if configured_outputs:
            served = [arg for arg in outputs if arg.name in configured_outputs]
        else:
            # A classifier from scikit-learn has a sequence of maps beside its tensors, which should not cost it those.
            served = [arg for arg in outputs if arg.type in _BY_ORT_NAME] or list(outputs)
        self.outputs: Final = {arg.name: OnnxTensor(arg) for arg in served}
        self.left_out: Final = tuple(
            _described(arg) for arg in outputs if not configured_outputs and arg.name not in self.outputs
        )
        """What is to be said of outputs that no protocol can carry and that the user did not name."""
        for name, tensor in self.outputs.items():
            if not tensor.symbols:
                tensor.shape = _configured_shape(configured_outputs.get(name), config)
        self._sources = {name: self._dimension_sources(tensor) for name, tensor in self.outputs.items()}
        self.has_bf16: Final = any(
            tensor.datatype is datatype.BF16 for tensor in (*self.inputs.values(), *self.outputs.values())
        )
        self.string_inputs: Final = tuple(t.name for t in self.inputs.values() if t.datatype is datatype.BYTES)

    @property
    def batching(self) -> bool:
        """Whether the first dimension of every tensor varies."""
        required = [tensor for tensor in self.inputs.values() if not tensor.optional]
        return all(tensor.shape[:1] == (-1,) for tensor in (*required, *self.outputs.values()))

    def output_shape(self, name: str, inputs: Mapping[str, Array]) -> tuple[int, ...] | None:
        """Return the shape that the model promises for an output, or None where it depends on the data."""
        sources = self._sources.get(name)
        if sources is None:
            return None
        shape = []
        for source in sources:
            if isinstance(source, int):
                shape.append(source)
            elif source[0] in inputs:
                shape.append(inputs[source[0]].shape[source[1]])
            else:
                return None
        return tuple(shape)

    def _dimension_sources(self, output: OnnxTensor) -> list[int | tuple[str, int]] | None:
        """Return for each dimension its size or the (input, axis) that has the same symbol; None if one has neither.

        A shape of no dimensions may also stand for an unknown rank, so it promises nothing.
        """
        if not output.symbols or output.datatype is datatype.BYTES:
            return None
        axes = {
            symbol: (tensor.name, axis)
            for tensor in self.inputs.values()
            if not tensor.optional
            for axis, symbol in enumerate(tensor.symbols)
            if isinstance(symbol, str)
        }
        sources: list[int | tuple[str, int]] = []
        for symbol in output.symbols:
            if isinstance(symbol, int) and symbol > 0:
                sources.append(symbol)
            elif isinstance(symbol, str) and symbol in axes:
                sources.append(axes[symbol])
            else:
                return None
        return sources


def _described(arg: NodeArg) -> str:
    return f"tensor '{arg.name}' of the model has the ONNX type {arg.type}"


def _configured_shape(tensor: Mapping[str, Any] | None, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape that the user gives an output of which the model tells no dimension.

    ONNX Runtime says the same of a scalar and of an unknown rank; an explicit reshape to nothing means a scalar.
    """
    if tensor is None:
        return ()
    reshape = tensor.get("reshape")
    dims = tensor.get("dims", ()) if reshape is None else reshape.get("shape", ())
    batch = (-1,) if config.get("max_batch_size", 0) > 0 else ()
    return (*batch, *dims)
