"""An ensemble held against its members: every way in which they do not fit, and the plan where they do."""

from __future__ import annotations

import pytest

from configs import model, repeat, tensor
from ensembles import Step, ident
from headrace.repository.ensemble_config import Ensemble, EnsembleStep
from headrace.repository.model_config import ModelConfig
from headrace.scheduling.ensemble_members import MAX_DEPTH, Member, as_member, check_members, model_as_member
from headrace.scheduling.ensemble_plan import ROOT
from headrace_protocol.errors import ErrorCode, InferError


def ident_model(name: str, datatype: str = "FP32", *dims: int, batch: int = 0, decoupled: bool = False) -> ModelConfig:
    shape = dims or (-1,)
    tensors = [tensor("INPUT0", datatype, *shape)], [tensor("OUTPUT0", datatype, *shape)]
    return model(*tensors, batch, name=name, decoupled=decoupled)


def check(steps: list[Step], members: list, inputs=None, outputs=None, batch: int = 0):
    config = model(
        inputs or [tensor("INPUT0", "FP32", -1)], outputs or [tensor("OUTPUT0", "FP32", -1)], batch, name="e"
    )
    known = {m.config.name: m for m in (m if isinstance(m, Member) else model_as_member(m) for m in members)}
    ensemble = Ensemble(tuple(EnsembleStep(s.model, s.version, s.inputs, s.outputs) for s in steps))
    plan, problems = check_members(config, ensemble, [known[step.model] for step in steps])
    return plan, [str(problem) for problem in problems]


CHAIN = [ident("A", "INPUT0", "x"), ident("B", "x", "OUTPUT0")]


def test_steps_are_planned_in_the_order_in_which_they_can_run() -> None:
    plan, problems = check([CHAIN[1], CHAIN[0]], [ident_model("A"), ident_model("B")])
    assert problems == []
    assert [step.model for step in plan.steps] == ["A", "B"]
    assert [step.number for step in plan.steps] == [1, 0], "they keep the number they have in the configuration"


@pytest.mark.parametrize(
    ("b", "told"),
    [
        (ident_model("B", "INT32"), "inconsistent datatype of tensor 'x': model 'A' says FP32, model 'B' says INT32"),
        (
            ident_model("B", "FP32", 3, 3),
            "inconsistent shape of tensor 'x': model 'A' says [-1], model 'B' says [3, 3]",
        ),
        (
            ident_model("B", "FP32", 3, batch=4),
            "model 'A' says [-1], model 'B' says [-1, 3] (batch dimension included)",
        ),
        (
            model([tensor("IN", "FP32", -1)], [tensor("OUTPUT0", "FP32", -1)], name="B"),
            "model 'B' has no input 'INPUT0'",
        ),
        (
            model([tensor("INPUT0", "FP32", -1)], [tensor("OUT", "FP32", -1)], name="B"),
            "model 'B' has no output 'OUTPUT0'",
        ),
        (
            model([tensor("INPUT0", "FP32", -1), tensor("I1", "FP32", 1)], [tensor("OUTPUT0", "FP32", -1)], name="B"),
            "input 'I1', which model 'B' needs, is mapped to no tensor",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(b: ModelConfig, told: str) -> None:
    _, problems = check(CHAIN, [ident_model("A"), b])
    assert any(told in problem for problem in problems), problems
    assert all(problem.startswith(("ensemble_scheduling.step[1]", "output[0]")) for problem in problems)


def test_an_optional_input_need_not_be_mapped() -> None:
    optional = [tensor("INPUT0", "FP32", -1), tensor("MAYBE", "FP32", 1, optional=True)]
    _, problems = check(CHAIN, [ident_model("A"), model(optional, [tensor("OUTPUT0", "FP32", -1)], name="B")])
    assert problems == []


def test_shapes_of_three_places_are_all_compared() -> None:
    steps = [ident("A", "INPUT0", "x"), ident("B", "x", "OUTPUT0"), ident("C", "x", "y")]
    outputs = [tensor("OUTPUT0", "FP32", -1), tensor("y", "FP32", -1)]
    members = [ident_model("A"), ident_model("B", "FP32", 3), ident_model("C", "FP32", 4)]
    _, problems = check(steps, members, outputs=outputs)
    assert any("model 'B' says [3], model 'C' says [4]" in problem for problem in problems)


def test_models_that_batch_and_models_that_do_not_may_share_an_ensemble_where_whole_shapes_agree() -> None:
    members = [ident_model("A", "FP32", 3, batch=8), ident_model("B", "FP32", -1, 3)]
    inputs, outputs = [tensor("INPUT0", "FP32", 3)], [tensor("OUTPUT0", "FP32", 3)]
    assert check(CHAIN, members, inputs, outputs, batch=4)[1] == []
    _, problems = check(CHAIN, [members[0], ident_model("B", "FP32", 3)], inputs, outputs, batch=4)
    assert any("inconsistent shape of tensor 'x'" in problem for problem in problems)


def test_a_reshape_of_the_ensemble_is_what_its_members_see() -> None:
    inputs = [tensor("INPUT0", "FP32", 4, reshape=(2, 2))]
    outputs = [tensor("OUTPUT0", "FP32", 4, reshape=(2, 2))]
    members = [ident_model("A", "FP32", 2, 2), ident_model("B", "FP32", 2, 2)]
    assert check(CHAIN, members, inputs, outputs)[1] == []


def test_batches_larger_than_a_member_takes_are_refused() -> None:
    members = [ident_model("A", batch=8), ident_model("B", batch=2)]
    _, problems = check(CHAIN, members, batch=4)
    assert problems == ["max_batch_size: the ensemble allows batches of 4, and model 'B' only of 2 (step 1)"]


def test_every_response_of_a_decoupled_step_has_what_follows_from_it_in_a_scope_of_its_own() -> None:
    steps = [ident("A", "INPUT0", "x"), ident("D", "x", "s"), Step("J", {"I0": "s", "I1": "x"}, {"OUTPUT0": "OUTPUT0"})]
    joins = model([tensor("I0", "FP32", -1), tensor("I1", "FP32", -1)], [tensor("OUTPUT0", "FP32", -1)], name="J")
    plan, problems = check(steps, [ident_model("A"), ident_model("D", decoupled=True), joins])
    assert problems == []
    assert [(step.scope == ROOT, step.decoupled) for step in plan.steps] == [
        (True, False),
        (True, True),
        (False, False),
    ]
    assert plan.steps[2].scope == plan.steps[1].child


def test_tensors_of_different_decoupled_models_are_not_combined() -> None:
    steps = [
        ident("D", "INPUT0", "s"),
        ident("E", "INPUT0", "t"),
        Step("J", {"I0": "s", "I1": "t"}, {"OUTPUT0": "OUTPUT0"}),
    ]
    joins = model([tensor("I0", "FP32", -1), tensor("I1", "FP32", -1)], [tensor("OUTPUT0", "FP32", -1)], name="J")
    members = [ident_model("D", decoupled=True), ident_model("E", decoupled=True), joins]
    (problem,) = check(steps, members)[1]
    assert "model 'J' would combine 's' and 't', which come from different decoupled models" in problem


def test_responses_do_not_come_back_to_the_decoupled_model_that_gave_them() -> None:
    steps = [ident("D", "INPUT0", "s"), ident("D", "s", "OUTPUT0")]
    (problem,) = check(steps, [ident_model("D", decoupled=True)])[1]
    assert "decoupled model 'D' come back to it" in problem
    inner = as_member(ident_model("inner", decoupled=True), [model_as_member(ident_model("D", decoupled=True))])
    steps = [ident("D", "INPUT0", "s"), ident("inner", "s", "OUTPUT0")]
    (problem,) = check(steps, [ident_model("D", decoupled=True), inner])[1]
    assert "decoupled model 'D' come back to it" in problem


def test_ensembles_nest_only_so_deep() -> None:
    member = model_as_member(ident_model("A"))
    for _ in range(MAX_DEPTH - 1):
        member = as_member(ident_model("A"), [member])
    assert check([ident("A", "INPUT0", "OUTPUT0")], [member])[1] == []
    (problem,) = check([ident("A", "INPUT0", "OUTPUT0")], [as_member(ident_model("A"), [member])])[1]
    assert "16 deep at most, got 17" in problem


def test_the_sample_that_repeats_fits() -> None:
    steps = [Step("repeat", {"IN": "IN"}, {"OUT": "OUT", "IDX": "IDX"})]
    _, problems = check(
        steps, [repeat()], [tensor("IN", "INT32", -1)], [tensor("OUT", "INT32", 1), tensor("IDX", "UINT32", 1)]
    )
    assert problems == []


# --- What one request needs ---------------------------------------------------------------------------------------


def branching():
    steps = [ident("P", "INPUT0", "x"), ident("A", "x", "a"), ident("B", "MAYBE", "b"), ident("C", "b", "c")]
    inputs = [tensor("INPUT0", "FP32", -1), tensor("MAYBE", "FP32", -1, optional=True)]
    outputs = [tensor("a", "FP32", -1), tensor("b", "FP32", -1), tensor("c", "FP32", -1)]
    plan, problems = check(steps, [ident_model(name) for name in "PABC"], inputs, outputs)
    assert problems == []
    return plan


@pytest.mark.parametrize(
    ("wanted", "given", "steps"),
    [
        (None, ("INPUT0", "MAYBE"), "PBAC"),
        (None, ("INPUT0",), "PA"),
        (("a",), ("INPUT0", "MAYBE"), "PA"),
        (("b",), ("INPUT0", "MAYBE"), "B"),
        (("c", "a"), ("INPUT0", "MAYBE"), "PBAC"),
    ],
)
def test_only_what_the_outputs_depend_on_runs(wanted, given, steps: str) -> None:
    selection = branching().select(wanted, given)
    assert "".join(step.model for step in selection.steps) == steps
    assert [output.name for output in selection.outputs] == [
        n for n in "abc" if n in (wanted or ("abc" if "MAYBE" in given else "a"))
    ]


def test_an_output_of_which_an_input_is_left_out_is_refused() -> None:
    with pytest.raises(
        InferError, match=r"cannot give its output 'b' without some of the inputs \['MAYBE'\]"
    ) as raised:
        branching().select(("a", "b"), ("INPUT0",))
    assert raised.value.code is ErrorCode.INVALID_ARG


def test_a_selection_is_made_once_for_requests_alike() -> None:
    plan = branching()
    assert plan.select(("a",), ("INPUT0",)) is plan.select(("a",), ("INPUT0",))
    for number in range(200):
        plan.select(("a",), ("INPUT0", f"{number}"))
    assert len(plan._selections) <= 64
