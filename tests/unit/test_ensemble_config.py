"""An ensemble's own configuration: what it says, and every problem that it shows by itself."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from ensembles import Step, ensemble_config, ident
from headrace.repository.ensemble_config import ensemble_of, validate_ensemble
from headrace.repository.normalise import NormaliseSettings, normalise
from headrace_protocol._generated import model_config_pb2 as pb

CHAIN = [ident("A", "INPUT0", "x"), ident("B", "x", "OUTPUT0")]


def parse(text: str) -> pb.ModelConfig:
    proto = text_format.Parse(text, pb.ModelConfig())
    normalise(proto, model_name="e", server=NormaliseSettings())
    return proto


def problems(text: str) -> list[str]:
    return [str(problem) for problem in validate_ensemble(parse(text))]


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def test_a_good_one_is_understood() -> None:
    extra = parameter("step.1.timeout_ms", "250") + parameter("step.0.retries", "2") + parameter("mine", "x")
    text = ensemble_config(CHAIN, extra=extra, max_inflight=3)
    assert problems(text) == []
    ensemble = ensemble_of(parse(text))
    assert ensemble.max_inflight_requests == 3
    assert [(s.model_name, s.model_version, s.timeout_ms, s.retries) for s in ensemble.steps] == [
        ("A", -1, 0, 2),
        ("B", -1, 250, 0),
    ]
    assert ensemble.steps[1].inputs == {"INPUT0": "x"}
    assert ensemble.steps[1].outputs == {"OUTPUT0": "OUTPUT0"}


def test_a_version_that_is_not_written_is_the_latest() -> None:
    proto = parse(ensemble_config([ident("A", "INPUT0", "OUTPUT0", version=0)]))
    assert proto.ensemble_scheduling.step[0].model_version == -1


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([], "ensemble_scheduling.step: an ensemble has at least one step"),
        ([ident("", "INPUT0", "OUTPUT0")], "ensemble_scheduling.step[0].model_name: missing"),
        ([Step("A", {}, {"OUTPUT0": "OUTPUT0"})], "ensemble_scheduling.step[0].input_map: missing"),
        ([Step("A", {"INPUT0": "INPUT0"}, {})], "ensemble_scheduling.step[0].output_map: missing"),
        ([ident("A", "INPUT0", "OUTPUT0", version=-2)], "step[0].model_version: expected the number of a version"),
        ([ident("A", "INPUT0", "")], "step[0].output_map: expected two names, got key 'OUTPUT0' and value ''"),
        ([*CHAIN, ident("C", "x", "OUTPUT0")], "step[2].output_map.OUTPUT0: tensor 'OUTPUT0' is written by step 1"),
        ([ident("A", "INPUT0", "INPUT0")], "tensor 'INPUT0' is an input of the ensemble, which no step writes"),
        ([*CHAIN, ident("C", "x", "y")], "step[2].output_map: tensor 'y' is read by no step"),
        ([ident("B", "x", "OUTPUT0")], "step[0].input_map.INPUT0: no step writes tensor 'x'"),
        ([ident("B", "x", "OUTPUT0")], "input[0]: 'INPUT0' is read by no step"),
        ([ident("A", "INPUT0", "x")], "output[0]: 'OUTPUT0' is written by no step"),
        ([ident("A", f"{n}", f"{n + 1}") for n in range(257)], "expected at most 256 steps, got 257"),
    ],
)
def test_what_is_wrong_with_steps_is_told_with_its_place(steps: list[Step], told: str) -> None:
    assert any(told in problem for problem in problems(ensemble_config(steps))), problems(ensemble_config(steps))


def test_every_problem_is_told_not_the_first() -> None:
    steps = [ident("A", "nowhere", "unused"), ident("", "INPUT0", "OUTPUT0", version=-3)]
    found = problems(ensemble_config(steps))
    assert len(found) == 2, found
    found = problems(ensemble_config([ident("A", "nowhere", "unused"), ident("B", "INPUT0", "OUTPUT0")]))
    assert len(found) == 2, found


def test_steps_in_a_circle_are_named() -> None:
    circle = [
        Step("A", {"INPUT0": "INPUT0", "INPUT1": "z"}, {"OUTPUT0": "x"}),
        ident("B", "x", "y"),
        ident("C", "y", "z"),
        ident("D", "y", "OUTPUT0"),
    ]
    (problem,) = problems(ensemble_config(circle))
    assert "circular" in problem
    assert "0 (A), 1 (B), 2 (C), 3 (D)" in problem


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("instance_group { count: 1 }", "instance_group: an ensemble has no instances"),
        ("optimization { graph { level: 1 } }", "optimization: an ensemble runs nothing itself"),
        ('model_warmup { name: "w" }', "model_warmup: an ensemble is not warmed up"),
        ("batch_input { kind: BATCH_ELEMENT_COUNT }", "batch_input: an ensemble forms no batches"),
        ("batch_output { }", "batch_output: an ensemble forms no batches"),
        ('model_operations { op_library_filename: "x" }', "model_operations: an ensemble runs nothing itself"),
        (parameter("step.2.retries", "1"), "parameters.step.2.retries: there is no step 2: the ensemble has 2"),
        (parameter("step.0.retries", "101"), "parameters.step.0.retries: expected an integer from 0 to 100, got '101'"),
        (parameter("step.0.retries", "-1"), "expected an integer from 0 to 100, got '-1'"),
        (parameter("step.0.retries", "²"), "expected an integer"),
        (parameter("step.0.timeout_ms", "9" * 30), "expected an integer from 0 to 604800000"),
        (parameter("step.0.timeout", "1"), "expected step.<number>.timeout_ms or step.<number>.retries"),
    ],
)
def test_what_has_no_place_in_an_ensemble_is_told(extra: str, told: str) -> None:
    assert any(told in problem for problem in problems(ensemble_config(CHAIN, extra=extra)))


def test_a_namespace_is_refused() -> None:
    text = ensemble_config(CHAIN).replace('model_name: "A"', 'model_name: "A" model_namespace: "n"')
    assert any("model_namespace" in problem for problem in problems(text))


def test_an_ensemble_without_inputs_is_refused() -> None:
    text = "\n".join(line for line in ensemble_config(CHAIN).split("\n") if not line.startswith("input ["))
    assert any("at least one" in problem for problem in problems(text))
