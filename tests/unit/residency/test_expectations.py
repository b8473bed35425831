"""What is known of models before they are loaded: options, folders, costs, failures."""

import pytest

from ensembles import add_ensemble, ident
from headrace.config import load_config
from headrace.options import UsageError
from headrace.repository.layout import scan_directory
from headrace.residency.catalogue import study
from headrace.residency.costs import FIRST_GUESS, Costs
from headrace.residency.failures import FIRST_PAUSE_NS, LONGEST_PAUSE_NS, Failures
from headrace.residency.options import ResidencyOptions, byte_size
from repositories import add_identity

REPOSITORY = "--model-repository=/tmp"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0", 0), ("123", 123), ("8G", 8 << 30), ("8 GiB", 8 << 30), ("512m", 512 << 20), ("1kb", 1024), ("2T", 2 << 40)],
)
def test_a_size_is_written_in_bytes_or_powers_of_1024(text, wanted):
    assert byte_size(text) == wanted


@pytest.mark.parametrize("text", ["", "G", "-1", "1.5G", "8X", "٣G"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a number of bytes like 8G or 512M"):
        byte_size(text)


def test_without_a_budget_there_is_no_residency():
    assert load_config([REPOSITORY], {}).residency is None


def test_the_options_of_residency():
    argv = [REPOSITORY, "--model-memory-budget=1G", "--pin-model=a", "--pin-model=b*", "--model-wait-secs=2.5"]
    assert load_config(argv, {}).residency == ResidencyOptions(1 << 30, ("a", "b*"), 2.5, 1.0)


def test_a_wrong_budget_is_named():
    with pytest.raises(UsageError, match="--model-memory-budget: expected a number of bytes"):
        load_config([REPOSITORY, "--model-memory-budget=lots"], {})


def told_by(folder, *pins):
    return study(scan_directory(folder.name, folder), None, None, pins)


def test_a_folder_tells_what_its_model_needs(tmp_path):
    batching = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 5000 } }"
    folder = add_identity(tmp_path, "one", extra=batching, memory_bytes="77", pinned="true")
    (folder / "1" / "weights").write_bytes(bytes(1000))
    entry = told_by(folder)
    assert (entry.backend, entry.file_bytes, entry.memory_bytes, entry.pinned) == ("identity", 1000, 77, True)
    assert (entry.timeout_ns, entry.members, entry.problem) == (5_000_000, frozenset(), "")


def test_only_chosen_versions_count(tmp_path):
    folder = add_identity(tmp_path, "two")
    (folder / "1" / "weights").write_bytes(bytes(1000))
    (folder / "2").mkdir()
    (folder / "2" / "weights").write_bytes(bytes(30))
    assert told_by(folder).file_bytes == 30


def test_names_are_pinned_by_patterns(tmp_path):
    folder = add_identity(tmp_path, "chat-7")
    assert told_by(folder, "x", "chat-*").pinned
    assert not told_by(folder, "chat").pinned


def test_an_ensemble_tells_its_members(tmp_path):
    folder = add_ensemble(tmp_path, "both", [ident("a", "INPUT0", "x"), ident("b", "x", "OUTPUT0")])
    entry = told_by(folder)
    assert (entry.members, entry.backend) == (frozenset("ab"), "")


@pytest.mark.parametrize(
    ("parameter", "problem"),
    [
        ({"pinned": "often"}, "parameters.pinned: expected true or false, got 'often'"),
        ({"memory_bytes": "-3"}, "parameters.memory_bytes: expected a number of bytes, got '-3'"),
    ],
)
def test_a_parameter_that_says_nothing_is_a_problem(tmp_path, parameter, problem):
    assert told_by(add_identity(tmp_path, "odd", **parameter)).problem == problem


def test_a_configuration_that_cannot_be_read_is_a_problem(tmp_path):
    folder = add_identity(tmp_path, "torn")
    (folder / "config.pbtxt").write_text("max_batch_size: {")
    assert "config.pbtxt" in told_by(folder).problem or "1:" in told_by(folder).problem


def test_a_guess_gets_better_with_what_is_measured():
    costs = Costs(1 << 40)
    assert costs.guess("onnx", 1000) == FIRST_GUESS + 1500
    costs.learn("onnx", 1000, 5_001_500)
    assert costs.guess("onnx", 2000) == 5_003_000
    assert costs.guess("torch", 0) == FIRST_GUESS, "of another backend nothing is known"
    costs.learn("onnx", 0, 1_000_000)
    assert 1_000_000 < costs.guess("onnx", 0) < 5_000_000, "one that takes less brings it down slowly"
    costs.learn("onnx", 0, 8_000_000)
    assert costs.guess("onnx", 0) == 8_000_000


def test_a_first_guess_alone_keeps_no_model_away():
    assert Costs(40 << 20).guess("onnx", 100) == (10 << 20) + 150


def test_a_model_that_failed_is_let_alone_for_longer_each_time():
    failures = Failures()
    now = 0
    for pause in (FIRST_PAUSE_NS, 2 * FIRST_PAUSE_NS, 4 * FIRST_PAUSE_NS):
        failures.note("m", "torn", now)
        assert failures.reason("m", now + pause - 1) == "torn"
        assert failures.reason("m", now + pause) == ""
        now += pause
    for _ in range(10):
        failures.note("m", "torn", now)
    assert failures.reason("m", now + LONGEST_PAUSE_NS) == ""
    failures.forget("m")
    failures.note("m", "torn again", now)
    assert failures.reason("m", now + FIRST_PAUSE_NS) == ""
