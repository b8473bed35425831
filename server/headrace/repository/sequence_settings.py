"""`sequence_batching` of a normalised, valid message, as the server decides by it."""

from __future__ import annotations

from headrace.repository.model_config import SequenceBatching
from headrace.repository.sequence_validation import QUEUE_SIZE_PARAMETER, made_inputs, state_outputs
from headrace_protocol import datatype
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.datatype import DataType

MAX_QUEUE_SIZE = 65536
"""Requests of sequences that may wait where the configuration says nothing."""
_LARGEST_IDS = {datatype.INT64: 2**63 - 1, datatype.UINT32: 2**32 - 1, datatype.INT32: 2**31 - 1}
"""Correlation ids that fit into the model's control input."""


def sequence_settings(proto: pb.ModelConfig) -> SequenceBatching | None:
    """Return the settings of the sequence batcher; None where the model does not take sequences."""
    if not proto.HasField("sequence_batching"):
        return None
    batching = proto.sequence_batching
    oldest = batching.oldest
    is_oldest = batching.HasField("oldest")
    correlation = _correlation(batching)
    given = QUEUE_SIZE_PARAMETER in proto.parameters
    return SequenceBatching(
        oldest=is_oldest,
        max_idle_us=batching.max_sequence_idle_microseconds,
        max_queue_delay_us=(oldest if is_oldest else batching.direct).max_queue_delay_microseconds,
        minimum_slot_utilization=batching.direct.minimum_slot_utilization,
        max_candidate_sequences=oldest.max_candidate_sequences,
        preferred_batch_sizes=tuple(sorted(set(oldest.preferred_batch_size))),
        preserve_ordering=oldest.preserve_ordering,
        iterative=batching.iterative_sequence,
        correlation=correlation,
        largest_id=2**64 - 1 if correlation is None else _LARGEST_IDS.get(correlation, 2**64 - 1),
        max_queue_size=int(proto.parameters[QUEUE_SIZE_PARAMETER].string_value) if given else MAX_QUEUE_SIZE,
        inputs=made_inputs(proto),
        outputs=state_outputs(proto),
    )


def _correlation(batching: pb.ModelSequenceBatching) -> DataType | None:
    for given in batching.control_input:
        for control in given.control:
            if control.kind == pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
                return datatype.BY_NUMBER[control.data_type]
    return None
