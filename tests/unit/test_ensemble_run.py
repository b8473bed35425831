"""EnsembleRun: errors in their place, retries, time limits and back-pressure, one event after the other."""

from __future__ import annotations

from headrace.scheduling.ensemble_decisions import CancelStep, Deliver, Fail, HoldStep, Release, StartStep
from headrace.scheduling.ensemble_plan import ROOT, EnsembleOutput, EnsemblePlan, PlannedStep, StepInput, StepOutput
from headrace.scheduling.ensemble_run import MAX_LIVE, MAX_LIVE_BYTES, EnsembleRun
from headrace_protocol.errors import ErrorCode, InferError, invalid, unavailable

MS = 1_000_000


def step(
    number: int, reads: list[int], writes: int, scope: int = ROOT, child: int | None = None, **more
) -> PlannedStep:
    inputs = tuple(StepInput(f"i{tensor}", tensor, required=True) for tensor in reads)
    outputs = (StepOutput("o", writes),)
    return PlannedStep(number, f"m{number}", inputs, outputs, scope, scope if child is None else child, **more)


def chain(**more) -> EnsemblePlan:
    """Return in -> m0 -> m1 -> out."""
    steps = [step(0, [0], 1), step(1, [1], 2, **more)]
    return EnsemblePlan("e", [("in", 0)], [EnsembleOutput("out", 2)], steps, [ROOT] * 3)


def stream(max_inflight: int = 0, **more) -> EnsemblePlan:
    """Return in -> m0, decoupled -> m1 -> out."""
    steps = [step(0, [0], 1, child=1), step(1, [1], 2, scope=1, **more)]
    return EnsemblePlan("e", [("in", 0)], [EnsembleOutput("out", 2)], steps, [ROOT, 1, 1], max_inflight)


class Running:
    """A run with what it decided since it was asked last."""

    def __init__(self, plan: EnsemblePlan) -> None:
        self.run = EnsembleRun(plan, plan.select(None, ("in",)))
        self.decisions = self.run.start("request", 0, 0)

    def take(self, kind: type) -> list:
        found = [decision for decision in self.decisions if isinstance(decision, kind)]
        self.decisions = [decision for decision in self.decisions if not isinstance(decision, kind)]
        return found

    def respond(self, run: int, source: str, nbytes: int = 1, *, final: bool = True, now: int = 0) -> None:
        self.decisions += self.run.responded(run, source, {"o"}, nbytes, now, final=final)
        self.run.check_integrity()

    def fail(self, run: int, error: InferError, now: int = 0) -> None:
        self.decisions += self.run.failed(run, error, now)
        self.run.check_integrity()


def test_what_a_step_read_is_let_go_of_as_soon_as_the_step_is_over() -> None:
    running = Running(chain())
    assert not running.take(Release)
    running.respond(1, "first")
    assert running.take(Release) == [Release("request")]
    running.respond(2, "second")
    assert running.take(Release) == [Release("first"), Release("second")]
    (delivered,) = running.take(Deliver)
    assert (delivered.outputs[0].source, delivered.final) == ("second", True)


def test_a_failure_that_may_pass_is_tried_again_with_the_same_tensors() -> None:
    running = Running(chain(retries=2))
    running.respond(1, "first")
    starts = running.take(StartStep)
    for attempt in range(2):
        running.fail(starts[-1].run, unavailable("busy"))
        (start,) = running.take(StartStep)
        assert start.inputs == starts[-1].inputs, attempt
        starts.append(start)
    running.fail(starts[-1].run, unavailable("busy"))
    (failed,) = running.take(Fail)
    assert failed.error.message == "in ensemble 'e', step model 'm1': busy"
    assert failed.error.code is ErrorCode.UNAVAILABLE


def test_a_failure_that_would_come_again_is_not_tried_again() -> None:
    running = Running(chain(retries=2))
    running.respond(1, "first")
    running.fail(2, invalid("never"))
    assert running.take(Fail)


def test_a_stream_that_has_begun_is_not_tried_again() -> None:
    steps = [step(0, [0], 1, child=1, retries=5)]
    running = Running(EnsemblePlan("e", [("in", 0)], [EnsembleOutput("out", 1)], steps, [ROOT, 1]))
    running.fail(1, unavailable("busy"))
    assert [start.run for start in running.take(StartStep)] == [1, 2]
    running.respond(2, "one", final=False)
    running.fail(2, unavailable("busy"))
    assert running.take(Fail)


def test_a_step_whose_time_is_over_is_cancelled_and_fails_or_is_tried_again() -> None:
    running = Running(chain(timeout_ns=100 * MS, retries=1))
    assert running.run.next_expiry_ns() is None
    running.respond(1, "first", now=50 * MS)
    assert running.run.next_expiry_ns() == 150 * MS
    assert running.run.expire(149 * MS) == []
    running.decisions += running.run.expire(150 * MS)
    assert [cancel.run for cancel in running.take(CancelStep)] == [2]
    assert running.run.next_expiry_ns() == 250 * MS
    running.decisions += running.run.expire(300 * MS)
    (failed,) = running.take(Fail)
    assert failed.error.message.endswith("no answer within the 100 ms that the step has")
    assert failed.error.code is ErrorCode.UNAVAILABLE


def test_every_response_gives_a_stream_its_time_anew() -> None:
    steps = [step(0, [0], 1, child=1, timeout_ns=100 * MS)]
    running = Running(EnsemblePlan("e", [("in", 0)], [EnsembleOutput("out", 1)], steps, [ROOT, 1]))
    running.respond(1, "one", final=False, now=80 * MS)
    assert running.run.next_expiry_ns() == 180 * MS


def test_the_error_of_a_stream_comes_after_what_it_gave_before() -> None:
    running = Running(stream())
    for name in ("a", "b"):
        running.respond(1, name, final=False)
    running.fail(1, unavailable("torn"))
    assert not running.take(Fail), "two responses are on their way still"
    running.respond(3, "B")
    assert not running.take(Deliver)
    running.respond(2, "A")
    assert [deliver.outputs[0].source for deliver in running.take(Deliver)] == ["A", "B"]
    assert running.take(Fail)


def test_a_step_that_fails_for_one_response_ends_the_request_after_those_before_it() -> None:
    running = Running(stream())
    for name in ("a", "b", "c"):
        running.respond(1, name, final=False)
    running.fail(3, invalid("no b"))
    assert {cancel.run for cancel in running.take(CancelStep)} == {1, 4}, "what comes behind it is of no use"
    running.respond(2, "A")
    assert [deliver.outputs[0].source for deliver in running.take(Deliver)] == ["A"]
    (failed,) = running.take(Fail)
    assert failed.error.message == "in ensemble 'e', step model 'm1': no b"


def test_a_failure_waits_for_what_earlier_responses_need_of_the_beginning() -> None:
    """Step 2 joins each response of step 0 with the one tensor of step 1."""
    steps = [step(0, [0], 1, child=1), step(1, [0], 2), step(2, [1, 2], 3, scope=1), step(3, [1], 4, scope=1)]
    outputs = [EnsembleOutput("out", 3), EnsembleOutput("other", 4)]
    running = Running(EnsemblePlan("e", [("in", 0)], outputs, steps, [ROOT, 1, ROOT, 1, 1]))
    running.respond(1, "a", final=False)
    running.respond(1, "b", final=False)
    first, second = (start.run for start in running.take(StartStep) if start.step.number == 3)
    running.fail(second, invalid("no b"))
    assert [cancel.run for cancel in running.take(CancelStep)] == [1]
    running.respond(first, "A3")
    running.respond(2, "once")
    (joined,) = running.take(StartStep)
    assert not running.take(Fail)
    running.respond(joined.run, "A2")
    assert len(running.take(Deliver)) == 1
    assert running.take(Fail)


def test_a_stream_is_held_back_at_the_limit_and_goes_on_at_half_of_it() -> None:
    running = Running(stream())
    for number in range(MAX_LIVE):
        assert not running.take(HoldStep)
        running.respond(1, f"s{number}", final=False)
    assert running.take(HoldStep) == [HoldStep(1, paused=True)]
    for run in range(2, 2 + MAX_LIVE // 2):
        assert not running.take(HoldStep)
        running.respond(run, f"t{run}")
    running.respond(2 + MAX_LIVE // 2, "one more")
    assert running.take(HoldStep) == [HoldStep(1, paused=False)]


def test_a_stream_of_large_tensors_is_held_back_by_their_size() -> None:
    running = Running(stream())
    running.respond(1, "large", MAX_LIVE_BYTES, final=False)
    assert running.take(HoldStep) == [HoldStep(1, paused=True)]


def test_max_inflight_requests_bounds_a_step_and_holds_the_stream_back() -> None:
    running = Running(stream(max_inflight=2))
    for number in range(4):
        running.respond(1, f"s{number}", final=False)
    assert [start.run for start in running.take(StartStep)] == [1, 2, 3]
    assert running.take(HoldStep) == [HoldStep(1, paused=True)]
    running.respond(2, "t0")
    assert [start.run for start in running.take(StartStep)] == [4]
    assert not running.take(HoldStep)
    running.respond(3, "t1")
    assert running.take(HoldStep) == [HoldStep(1, paused=False)]


def test_a_client_that_reads_too_slowly_holds_the_stream_back_until_it_has_caught_up() -> None:
    running = Running(stream())
    running.decisions += running.run.flow(0, paused=True)
    assert running.take(HoldStep) == [HoldStep(1, paused=True)]
    running.respond(1, "on its way", final=False)
    running.decisions += running.run.flow(0, paused=True)
    assert not running.take(HoldStep)
    running.decisions += running.run.flow(0, paused=False)
    assert running.take(HoldStep) == [HoldStep(1, paused=False)]


def test_a_member_that_has_become_decoupled_meanwhile_fails_the_request() -> None:
    running = Running(chain())
    running.respond(1, "first", final=False)
    assert [cancel.run for cancel in running.take(CancelStep)] == [1]
    (failed,) = running.take(Fail)
    assert "decoupled meanwhile" in failed.error.message
    assert {release.source for release in running.take(Release)} == {"request", "first"}


def test_a_response_that_lacks_what_a_step_needs_leaves_that_step_out() -> None:
    running = Running(stream())
    running.decisions += running.run.responded(1, "nothing in it", (), 0, 0, final=False)
    assert [start.run for start in running.take(StartStep)] == [1]
    assert running.take(Release) == [Release("nothing in it")]
    running.respond(1, "last")
    assert [start.run for start in running.take(StartStep)] == [2]
    running.respond(2, "out")
    (delivered,) = running.take(Deliver)
    assert delivered.final


def test_a_tensor_whose_reader_was_left_out_meanwhile_is_let_go_of_when_it_comes() -> None:
    outputs = (StepOutput("o", 1), StepOutput("p", 2))
    streams = PlannedStep(0, "m0", (StepInput("i0", 0, required=True),), outputs, ROOT, 1)
    steps = [streams, step(1, [2], 3, scope=1), step(2, [1, 3], 4, scope=1)]
    running = Running(EnsemblePlan("e", [("in", 0)], [EnsembleOutput("out", 4)], steps, [ROOT, 1, 1, 1, 1]))
    running.decisions += running.run.responded(1, "half", {"p"}, 1, 0, final=False)
    assert [start.step.number for start in running.take(StartStep)] == [0, 1]
    running.respond(2, "for nobody")
    assert running.take(Release) == [Release("for nobody"), Release("half")]
