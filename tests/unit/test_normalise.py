"""Defaults that every configuration gets."""

import pytest

from headrace.repository.config_text import parse_text
from headrace.repository.normalise import NormaliseSettings, normalise
from headrace_protocol._generated import model_config_pb2 as pb


def normalised(text, gpu_count=0):
    proto = parse_text(text).proto
    normalise(proto, model_name="m", server=NormaliseSettings(gpu_count))
    return proto


def groups(proto):
    kind = pb.ModelInstanceGroup.Kind.Name
    return [(group.name, kind(group.kind), group.count, list(group.gpus)) for group in proto.instance_group]


def test_the_name_is_the_directorys_unless_given():
    assert normalised("").name == "m"
    assert normalised('name: "other"').name == "other"


@pytest.mark.parametrize("text", ["", "version_policy { }", "version_policy { latest { } }"])
def test_the_latest_version_serves_by_default(text):
    assert normalised(text).version_policy.latest.num_versions == 1


def test_a_given_version_policy_stays():
    assert normalised("version_policy { all { } }").version_policy.HasField("all")
    assert normalised("version_policy { latest { num_versions: 3 } }").version_policy.latest.num_versions == 3
    specific = normalised("version_policy { specific { versions: [ 2, 5 ] } }").version_policy.specific
    assert list(specific.versions) == [2, 5]


def test_the_preferred_batch_size_is_the_largest_unless_given():
    assert list(normalised("max_batch_size: 8 dynamic_batching { }").dynamic_batching.preferred_batch_size) == [8]
    given = normalised("max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 4 ] }")
    assert list(given.dynamic_batching.preferred_batch_size) == [2, 4]


def test_a_dynamic_batcher_without_batching_prefers_no_size():
    assert list(normalised("dynamic_batching { }").dynamic_batching.preferred_batch_size) == []


def test_no_scheduler_is_added():
    assert normalised("max_batch_size: 8").WhichOneof("scheduling_choice") is None


def test_sequences_are_idle_for_a_second_and_the_oldest_prefer_full_batches():
    sequences = normalised("max_batch_size: 4 sequence_batching { oldest { } }").sequence_batching
    assert sequences.max_sequence_idle_microseconds == 1_000_000
    assert list(sequences.oldest.preferred_batch_size) == [4]


def test_pinned_memory_is_on_unless_switched_off():
    optimization = normalised("optimization { input_pinned_memory { enable: false } }").optimization
    assert not optimization.input_pinned_memory.enable
    assert optimization.output_pinned_memory.enable


GROUPS = [
    ("", 0, [("m", "KIND_CPU", 1, [])]),
    ('backend: "onnxruntime"', 0, [("m", "KIND_CPU", 2, [])]),
    ('backend: "onnxruntime"', 2, [("m", "KIND_GPU", 1, [0, 1])]),
    ('backend: "onnxruntime" instance_group { count: 1 }', 0, [("m_0", "KIND_CPU", 1, [])]),
    ("instance_group [ { }, { name: 'x' count: 3 }, { } ]", 0, [
        ("m_0", "KIND_CPU", 1, []), ("x", "KIND_CPU", 3, []), ("m_2", "KIND_CPU", 1, [])]),
    ("instance_group { gpus: [ 1 ] }", 2, [("m_0", "KIND_GPU", 1, [1])]),
    ("instance_group { gpus: [ 2 ] }", 2, [("m_0", "KIND_CPU", 1, [2])]),
    ("instance_group { kind: KIND_GPU }", 0, [("m_0", "KIND_GPU", 1, [])]),
    ("instance_group { kind: KIND_CPU }", 2, [("m_0", "KIND_CPU", 1, [])]),
    ("backend: 'tensorflow' instance_group { kind: KIND_MODEL }", 2, [("m_0", "KIND_MODEL", 1, [])]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "gpu_count", "expected"), GROUPS)
def test_instance_groups_get_name_kind_count_and_devices(text, gpu_count, expected):
    assert groups(normalised(text, gpu_count)) == expected


def test_an_ensemble_gets_neither_instances_nor_optimization():
    proto = normalised('platform: "ensemble" ensemble_scheduling { }')
    assert not proto.instance_group
    assert not proto.HasField("optimization")


def test_normalising_twice_changes_nothing_more():
    once = normalised("max_batch_size: 8 dynamic_batching { } instance_group [ { }, { } ]", 2)
    twice = pb.ModelConfig()
    twice.CopyFrom(once)
    normalise(twice, model_name="m", server=NormaliseSettings(2))
    assert once == twice
