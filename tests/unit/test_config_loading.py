"""From a model's directory to its frozen configuration."""

import pytest

from headrace.repository.config_loading import Completion, backend_values, draft_config, finish_config, read_config
from headrace.repository.config_text import MAX_CONFIG_BYTES, ParsedConfig, parse_text
from headrace.repository.labels import load_labels
from headrace.repository.model_config import ConfigError, QueuePolicy, TimeoutAction, VersionPolicy
from headrace.repository.unsupported import ignored
from headrace_protocol.messages import Ready
from headrace_protocol.tensor import TensorSpec

READY = Ready(inputs=(TensorSpec("X", "FP32", (-1, 3)),), outputs=(TensorSpec("Y", "FP32", (-1, 4)),), batching=True)
FULL = """
backend: "identity"
input { name: "X" data_type: TYPE_FP32 dims: 3 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    return tmp_path / "m"


def draft(model, parsed, **completion):
    return draft_config(
        parsed,
        model_name="m",
        model_directory=model,
        version_directory=model / "1",
        completion=Completion(**completion),
    )


def finish(model, parsed, ready=READY, **completion):
    return finish_config(
        parsed,
        ready,
        model_name="m",
        model_directory=model,
        version_directory=model / "1",
        completion=Completion(**completion),
    )


def problems_of(function, *arguments, **keywords):
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **keywords)
    return [str(problem) for problem in caught.value.problems]


def test_a_directory_without_a_configuration_gives_an_empty_one(model):
    assert read_config(model) == ParsedConfig()


def test_a_named_configuration_goes_first_where_it_exists(model):
    (model / "config.pbtxt").write_text('backend: "a"')
    (model / "configs").mkdir()
    (model / "configs" / "x.pbtxt").write_text('backend: "b"')
    assert read_config(model, "x").proto.backend == "b"
    assert read_config(model, "y").proto.backend == "a"
    assert read_config(model).proto.backend == "a"


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "/etc/passwd", "a\0b"])
def test_the_name_of_a_configuration_cannot_leave_the_directory(model, name):
    (model.parent / "x.pbtxt").write_text('backend: "a"')
    assert "one path component" in problems_of(read_config, model, name)[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'name: "m"\nnope: 1', "config.pbtxt:2:1: "),
        (b'name: "\xff"', "config.pbtxt: is not UTF-8 text"),
        (b" " * (MAX_CONFIG_BYTES + 1), "config.pbtxt: has more than"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_named(model, content, message):
    (model / "config.pbtxt").write_bytes(content)
    (problem,) = problems_of(read_config, model)
    assert problem.startswith(message)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(model):
    (model / "config.pbtxt").write_bytes(b'\xef\xbb\xbfbackend: "a"\r\nmax_batch_size: 2\r\n')
    assert read_config(model).proto.max_batch_size == 2


def test_a_model_without_configuration_is_completed_and_the_notes_say_how(model):
    (model / "1" / "model.onnx").touch()
    config, notes = finish(model, ParsedConfig())
    assert (config.backend, config.platform, config.max_batch_size) == ("onnxruntime", "onnxruntime_onnx", 4)
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_sizes == (4,)
    assert config.inputs[0].dims == (3,)
    assert [note.split()[0] for note in notes] == [
        "backend", "platform", "default_model_filename", "max_batch_size", "dynamic_batching", "input", "output",
    ]  # fmt: skip


def test_the_default_max_batch_size_counts_before_preferred_sizes_are_checked(model):
    parsed = parse_text('backend: "onnxruntime" dynamic_batching { preferred_batch_size: [ 16 ] }')
    assert finish(model, parsed, default_max_batch_size=128)[0].max_batch_size == 128
    (problem,) = problems_of(finish, model, parsed, default_max_batch_size=4)
    assert problem.startswith("dynamic_batching.preferred_batch_size[0]: expected at most max_batch_size = 4")


def test_batching_without_the_dynamic_batcher_is_max_batch_size_alone(model):
    config, _ = finish(model, parse_text('backend: "onnxruntime" max_batch_size: 8'))
    assert config.max_batch_size == 8
    assert config.dynamic_batching is None


def test_a_draft_has_instances_and_backend_before_the_model_is_loaded(model):
    (model / "1" / "model.onnx").touch()
    config = draft(model, ParsedConfig())
    assert (config.backend, config.default_model_filename) == ("onnxruntime", "model.onnx")
    assert [(group.name, group.kind, group.count) for group in config.instance_groups] == [("m", "KIND_CPU", 2)]
    assert config.inputs == ()


def test_a_draft_with_a_mistake_is_refused_before_anything_is_loaded(model):
    parsed = parse_text(
        'backend: "python" instance_group { count: -1 } sequence_batching { oldest { max_candidate_sequences: -1 } }'
    )
    paths = [problem.partition(":")[0] for problem in problems_of(draft, model, parsed)]
    assert paths == ["sequence_batching.oldest.max_candidate_sequences", "instance_group[0].count"]


def test_without_auto_completion_nothing_is_taken_from_the_model(model):
    (model / "1" / "model.onnx").touch()
    assert "there is no config.pbtxt" in problems_of(draft, model, ParsedConfig(), auto_complete=False)[0]
    parsed = parse_text('backend: "onnxruntime"')
    assert "names no inputs and outputs" in problems_of(draft, model, parsed, auto_complete=False)[0]
    config, _ = finish(model, parse_text(FULL), Ready(), auto_complete=False)
    assert config.max_batch_size == 0


def test_the_same_parsed_configuration_can_be_finished_twice(model):
    parsed = parse_text('backend: "onnxruntime"')
    before = parsed.proto.SerializeToString(deterministic=True)
    assert finish(model, parsed)[0].proto == finish(model, parsed)[0].proto
    assert parsed.proto.SerializeToString(deterministic=True) == before


def test_fields_that_a_backend_proposes_fill_gaps_only(model):
    proposed = {
        "max_batch_size": 16,
        "input": [{"name": "A", "data_type": "TYPE_INT32", "dims": [2]}],
        "output": [{"name": "B", "data_type": "TYPE_INT32", "dims": [2]}],
        "dynamic_batching": {},
        "backend": "other",
    }
    config, _ = finish(model, parse_text('backend: "python"'), Ready(config=proposed))
    assert (config.backend, config.max_batch_size, config.inputs[0].name) == ("python", 16, "A")
    assert config.dynamic_batching is not None
    kept, _ = finish(
        model, parse_text(FULL.replace("identity", "python") + "max_batch_size: 0"), Ready(config=proposed)
    )
    assert (kept.max_batch_size, kept.inputs[0].name) == (0, "X")


def test_a_scheduler_that_was_written_is_not_replaced_by_a_proposal(model):
    text = FULL + "max_batch_size: 2 dynamic_batching { max_queue_delay_microseconds: 5 }"
    config, _ = finish(model, parse_text(text), Ready(config={"sequence_batching": {}}))
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.max_queue_delay_us == 5


def test_a_backends_proposal_that_makes_no_sense_is_a_problem(model):
    problems = problems_of(finish, model, parse_text(FULL), Ready(config={"max_batch_size": "many"}))
    assert any(problem.startswith("max_batch_size: expected an integer") for problem in problems)


def test_the_model_has_the_last_word_on_its_tensors(model):
    parsed = parse_text(FULL.replace("dims: 3", "dims: 5") + "max_batch_size: 2")
    (problem,) = problems_of(finish, model, parsed)
    assert problem.startswith("input[0].dims: the model's 'X' is [-1, 3]")


def test_hints_that_are_not_used_are_noted(model):
    _, notes = finish(model, parse_text(FULL + "optimization { cuda { graphs: true } }"), Ready())
    assert notes == ["optimization.cuda is not used"]


@pytest.mark.parametrize(("backend", "told"), [("onnxruntime", True), ("pytorch", False)])
def test_a_hint_that_the_backend_uses_is_not_told_to_be_ignored(backend: str, told: bool) -> None:
    proto = parse_text(f'backend: "{backend}" runtime: "model.py"').proto
    assert any("runtime" in note for note in ignored(proto)) is told


def test_frozen_values_say_what_the_text_said(model):
    text = (
        FULL.replace("dims: 3", "dims: 3 reshape { shape: [ 3, 1 ] } optional: true")
        + """
        max_batch_size: 8
        version_policy { specific { versions: [ 3, 1 ] } }
        dynamic_batching {
          preferred_batch_size: [ 8, 2 ] max_queue_delay_microseconds: 7 preserve_ordering: false
          priority_levels: 2 default_priority_level: 1
          default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 9 max_queue_size: 4 }
          priority_queue_policy { key: 2 value { allow_timeout_override: true } }
        }
        parameters { key: "A" value { string_value: "$$TRITON_MODEL_DIRECTORY/x" } }
        metric_tags { key: "team" value: "red" }
    """
    )
    config, _ = finish(model, parse_text(text), Ready())
    assert (config.inputs[0].reshape, config.inputs[0].optional) == ((3, 1), True)
    assert config.version_policy == VersionPolicy(specific=(3, 1))
    batching = config.dynamic_batching
    assert batching is not None
    assert (batching.preferred_batch_sizes, batching.max_queue_delay_us, batching.priority_levels) == ((2, 8), 7, 2)
    assert batching.default_queue_policy == QueuePolicy(TimeoutAction.DELAY, 9, max_queue_size=4)
    assert batching.priority_queue_policies == {2: QueuePolicy(allow_timeout_override=True)}
    assert config.metric_tags == {"team": "red"}
    assert config.parameters == {"A": f"{model}/x"}
    assert backend_values(config)["parameters"] == {"A": {"string_value": f"{model}/x"}}


def test_all_versions_are_frozen_as_no_limit(model):
    config, _ = finish(model, parse_text(FULL + "version_policy { all { } }"), Ready())
    assert config.version_policy == VersionPolicy(latest=0)


LABELLED = FULL.replace("dims: 4", 'dims: 4 label_filename: "{}"')


@pytest.mark.parametrize("name", ["../l.txt", "/etc/passwd", "a/../../l.txt", ".", "link.txt", "a\\000b"])
def test_a_label_file_outside_the_model_is_refused(model, name):
    (model.parent / "l.txt").write_text("x")
    (model / "link.txt").symlink_to(model.parent / "l.txt")
    (problem,) = problems_of(draft, model, parse_text(LABELLED.replace("{}", name)))
    assert problem.startswith("output[0].label_filename: ")
    assert "outside the model's directory" in problem


def test_a_missing_label_file_is_a_problem(model):
    (problem,) = problems_of(draft, model, parse_text(LABELLED.replace("{}", "l.txt")))
    assert problem == "output[0].label_filename: there is no file 'l.txt' in the model's directory"


def test_a_label_file_in_the_model_is_fine(model):
    (model / "l.txt").write_text("x")
    assert draft(model, parse_text(LABELLED.replace("{}", "l.txt"))).outputs[0].label_filename == "l.txt"


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (b"a\r\nb b\r\n\r\n", ("a", "b b", "")),
        (b"a\nb b\n\nd", ("a", "b b", "", "d")),
        ("é\u2028x\n".encode(), ("é\u2028x",)),
        (b"", ()),
    ],
)
def test_labels_are_the_lines_of_the_file_empty_ones_included(tmp_path, content, labels):
    (tmp_path / "l.txt").write_bytes(content)
    assert load_labels(tmp_path / "l.txt") == labels


def test_a_label_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "l.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_labels(tmp_path / "l.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_labels(tmp_path / "missing.txt")
