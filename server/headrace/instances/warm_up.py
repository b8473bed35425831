"""Warm-up: requests of the configuration's own, run by every instance before the model serves.

They travel as any batch does, so that what they warm is what requests will meet; no statistics and no scheduler know of
them. An instance that is started again is warmed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from headrace.instances.model_process import ModelProcess, ProcessGoneError, Results
from headrace.instances.payload import Payload, UnreadableInputError
from headrace.instances.signature import ModelSignature, PreparedRequest, SequencePlace
from headrace.repository.model_config import ModelConfig
from headrace.repository.warm_up_validation import warm_up_file
from headrace.types import SEQUENCE_END, SEQUENCE_START, InferenceRequest, InferenceResponse, InputTensor
from headrace_protocol import datatype
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.arena import ArenaFullError
from headrace_protocol.datatype import BYTES, DataType, decode_bytes, element_count, fp32_to_bf16
from headrace_protocol.errors import ErrorCode, InferError, invalid, unavailable
from headrace_protocol.messages import BatchDone

_log = logging.getLogger("headrace.instances")

_SEED: Final = 20_231_117
"""Random data are the same at every load, so that a load that failed can be tried again as it was."""
_Control = pb.ModelSequenceBatching.Control


@dataclass(frozen=True, slots=True)
class Sample:
    """One entry of model_warmup: a batch that is run `count` times."""

    name: str
    requests: tuple[PreparedRequest, ...]
    count: int


def make_samples(config: ModelConfig, directory: Path, signature: ModelSignature, max_bytes: int) -> list[Sample]:
    """Return the samples of a configuration that has been validated; those of batch size 0 are left out. Blocking.

    `max_bytes`: of the inputs of one sample. Raises INVALID_ARG that names the sample, and the input.
    """
    samples = []
    for entry in config.proto.model_warmup:
        if not entry.batch_size:
            continue
        try:
            request = _request(config, entry, directory, max_bytes // entry.batch_size)
            prepared = signature.prepare(request)
        except InferError as error:
            raise invalid(f"warm-up sample '{entry.name}': {error.message}") from None
        rows = [prepared, *(signature.prepare(request) for _ in range(1, entry.batch_size))]
        samples.append(Sample(entry.name, tuple(rows), max(1, entry.count)))
    return samples


class WarmUp:
    """Runs samples in the instances of a model's processes. Not bound to any of them."""

    def __init__(
        self, signature: ModelSignature, samples: Sequence[Sample], *, decoupled: bool, sequences: bool = False
    ) -> None:
        """`sequences`: the model takes sequences, each request of a sample being one of its own."""
        self._signature = signature
        self._samples = samples
        self._decoupled = decoupled
        self._sequences = sequences
        self._last_sequence = 0

    async def run(self, process: ModelProcess, instances: Sequence[str], timeout_s: float) -> None:
        """Run every sample in every instance of a process that has loaded its model and does nothing yet.

        Raises InferError that names the sample and the instance; the process may then be running it still.
        """
        if not self._samples:
            return
        started = time.monotonic()
        sample: Sample | None = None
        name = ""
        try:
            async with asyncio.timeout(timeout_s):
                for instance in sorted(process.free):
                    name = instances[instance]
                    for sample in self._samples:
                        for _ in range(sample.count):
                            await self._once(process, instance, name, sample)
        except TimeoutError:
            what = f"warm-up sample '{sample.name}'" if sample is not None else "the warm-up"
            raise unavailable(f"{what} was not over in instance '{name}' within {timeout_s:.0f} s") from None
        _log.debug("model %s: warmed up in %.2f s", self._signature.name, time.monotonic() - started)

    async def _once(self, process: ModelProcess, instance: int, name: str, sample: Sample) -> None:
        numbers = self._begin_sequences(sample.requests) if self._sequences else []
        errors = await _Execution(len(sample.requests), decoupled=self._decoupled).run(
            process, instance, Payload(self._signature, sample.requests)
        )
        if numbers:
            process.end_sequences(numbers)
        if errors:
            told = "; ".join(dict.fromkeys(errors))
            message = f"warm-up sample '{sample.name}' failed in instance '{name}': {told}"
            raise InferError(ErrorCode.INTERNAL, message)

    def _begin_sequences(self, requests: Sequence[PreparedRequest]) -> list[int]:
        """Give each request a sequence, and return their numbers: below 0, which those of clients never are."""
        numbers = []
        for slot, prepared in enumerate(requests):
            self._last_sequence -= 1
            numbers.append(self._last_sequence)
            request = prepared.request
            prepared.sequence = SequencePlace(self._last_sequence, slot, request.correlation_id, request.flags)
        return numbers


class _Execution:
    """One batch on its way: what it is waited for, and the errors in it."""

    def __init__(self, requests: int, *, decoupled: bool) -> None:
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = requests if decoupled else 0
        self._executed = False
        self._decoupled = decoupled
        self.errors: list[str] = []

    async def run(self, process: ModelProcess, instance: int, payload: Payload) -> list[str]:
        """Return the errors of the requests of a batch, once nothing of it is left."""
        on_response = self._responded if self._decoupled else None
        try:
            process.execute(payload, self._done, on_response, instance)
        except ArenaFullError as error:
            return [f"the tensors do not fit into the model's arena: {error}"]
        except ProcessGoneError:
            return ["the backend process has ended"]
        except UnreadableInputError as error:
            return [error.error.message]
        except InferError as error:
            return [error.message]
        await self._over
        return self.errors

    def _done(self, _payload: Payload, results: Results, _timings: BatchDone | None) -> None:
        for result in results:
            self._take(result)
        self._executed = True
        self._look()

    def _responded(self, _payload: Payload, _index: int, outcome: InferenceResponse | InferError) -> None:
        self._open -= isinstance(outcome, InferError) or outcome.final
        self._take(outcome)
        self._look()

    def _take(self, outcome: InferenceResponse | InferError | None) -> None:
        if isinstance(outcome, InferenceResponse):
            outcome.release()
        else:
            self.errors.append("the model gave no answer" if outcome is None else outcome.message)

    def _look(self) -> None:
        if self._executed and self._open <= 0 and not self._over.done():
            self._over.set_result(None)


# --- what the samples hold ------------------------------------------------------------------------------------------


def _request(config: ModelConfig, sample: pb.ModelWarmup, directory: Path, max_bytes: int) -> InferenceRequest:
    request = InferenceRequest(config.name)
    controls = _controls(config.proto.sequence_batching)
    if config.proto.HasField("sequence_batching"):
        request.correlation_id = 1
        request.flags = SEQUENCE_START | SEQUENCE_END
    random = np.random.default_rng(_SEED)
    for name, given in sorted(sample.inputs.items()):
        kind = datatype.BY_NUMBER[given.data_type]
        try:
            data = _data(given, kind, directory, max_bytes, random)
            if name in controls:
                _apply(request, controls[name], kind, data)
                continue
        except InferError as error:
            raise invalid(f"input '{name}': {error.message}") from None
        shape = (1, *given.dims) if config.max_batch_size > 0 else tuple(given.dims)
        request.inputs.append(InputTensor(name, kind, shape, data))
    return request


def _data(
    given: pb.ModelWarmup.Input, kind: DataType, directory: Path, max_bytes: int, random: np.random.Generator
) -> bytes:
    """Return the wire form of one row."""
    count = element_count(given.dims)
    nbytes = count * (4 if kind is BYTES else kind.itemsize)
    if nbytes > max_bytes:
        raise invalid(f"{nbytes} bytes are more than the {max_bytes} that there is room for")
    choice = given.WhichOneof("input_data_type")
    if choice == "input_data_file":
        return _read(given.input_data_file, directory, max_bytes if kind is BYTES else nbytes, exact=kind is not BYTES)
    if choice == "random_data" and kind is not BYTES:
        return _random(kind, count, random)
    return bytes(nbytes)  # of strings: the length of each


def _read(filename: str, directory: Path, nbytes: int, *, exact: bool) -> bytes:
    path = warm_up_file(directory, filename)
    try:
        if path is None:
            raise invalid(f"{filename!r} lies outside the model's folder for warm-up data")
        with path.open("rb") as file:
            data = file.read(nbytes if exact else nbytes + 1)
    except OSError as error:
        raise invalid(f"{filename!r} cannot be read: {error.strerror}") from None
    if exact and len(data) < nbytes:
        raise invalid(f"{nbytes} bytes are needed, the file {filename!r} has {len(data)}")
    if len(data) > nbytes:
        raise invalid(f"the file {filename!r} has more than the {nbytes} bytes that there is room for")
    return data


def _random(kind: DataType, count: int, random: np.random.Generator) -> bytes:
    """Return numbers from 0 to 1, or any integers."""
    if kind is datatype.BOOL:
        return random.integers(0, 2, count, np.uint8).tobytes()
    if kind is datatype.BF16:
        return fp32_to_bf16(random.random(count, np.float32)).tobytes()
    if kind in {datatype.FP16, datatype.FP32, datatype.FP64}:
        return random.random(count).astype(kind.numpy).tobytes()
    return random.bytes(count * kind.itemsize)


# --- sequences: controls are given as inputs, and told to the backend as those of a request are -----------------------


def _controls(batching: pb.ModelSequenceBatching) -> dict[str, pb.ModelSequenceBatching.Control]:
    return {entry.name: entry.control[0] for entry in batching.control_input if entry.control}


def _apply(request: InferenceRequest, control: pb.ModelSequenceBatching.Control, kind: DataType, data: bytes) -> None:
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        request.correlation_id = _correlation_id(kind, data)
        return
    flag = {_Control.CONTROL_SEQUENCE_START: SEQUENCE_START, _Control.CONTROL_SEQUENCE_END: SEQUENCE_END}.get(
        control.kind, 0
    )
    meanings = control.int32_false_true or control.fp32_false_true or control.bool_false_true
    value = np.frombuffer(data, kind.numpy)[:1].tolist() if kind is not BYTES else []
    if value and value[0] == meanings[0] != meanings[1]:
        request.flags &= ~flag


def _correlation_id(kind: DataType, data: bytes) -> int | str:
    if kind is BYTES:
        elements = decode_bytes(data, 1)
        return elements[0].decode("utf-8", "replace") or 1
    return int.from_bytes(data[: kind.itemsize], "little") or 1
