"""Rows of the table: decoupled models where one answer is due, and on the streams of gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from conformance.table.arrays import PAIR
from conformance.table.cases import Case, Refused, equal, gives
from conformance.table.tensors import Infer, Output, Region, Tensor, grpc_message

ONLY_GRPC = {"only": "grpc", "because": "HTTP has generate_stream instead"}
ONE = Tensor("INPUT0", "FP32", (1,), np.ones(1, np.float32))
FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"


def repeat(*elements: int, name: str = "", delay_ms: int = 0, **more: Any) -> Infer:
    """Return a request for a response an element."""
    inputs = [Tensor("IN", "INT32", (len(elements),), np.array(elements, np.int32))]
    if delay_ms:
        inputs.append(Tensor("DELAY", "UINT32", (1,), np.array([delay_ms], np.uint32)))
    return Infer("repeat", inputs, id=name, **more)


def drip(responses: int, name: str = "", **parameters: Any) -> Infer:
    return Infer("drip", [ONE], id=name, parameters={"responses": responses, **parameters})


# --- gRPC -------------------------------------------------------------------------------------------------------------


def streamed(*requests: Infer, empty_final: bool = False) -> Callable[[Any], Any]:
    """Return the sending of requests over one stream of the stock client, whose responses are told as a list."""
    return lambda ask: ask.stream(requests, enable_empty_final_response=empty_final)


def by_hand(*requests: Infer, status: bool = False) -> Callable[[Any], Any]:
    """Return the sending of messages over one stream; `status`: a failure is to end it with a status of gRPC."""
    metadata = [("triton_grpc_error", "true")] if status else []
    return lambda ask: ask.stream_messages([grpc_message(one) for one in requests], metadata)


def _outs(answers: Sequence[Any], name: str = "") -> list[int]:
    return [int(one.arrays["OUT"][0]) for one in answers if "OUT" in one.arrays and (not name or one.id == name)]


def _finals(answers: Sequence[Any]) -> list[bool]:
    return [bool(one.parameters[FINAL]) for one in answers]


def _repeats(*elements: int, finals: Sequence[bool] | None = None) -> Callable[[Any], None]:
    def check(answers: Any) -> None:
        assert _outs(answers) == list(elements)
        assert [int(one.arrays["IDX"][0]) for one in answers if one.arrays] == list(range(len(elements)))
        assert all(one.model == "repeat" and one.version == "1" for one in answers if one.arrays)
        if finals is not None:
            assert _finals(answers) == list(finals)

    return check


def _errors(answers: Any, *words: str) -> None:
    """Assert that each word is in the refusal at its place."""
    refused = [one.text for one in answers if isinstance(one, Refused)]
    assert len(refused) == len(words), answers
    for text, word in zip(refused, words, strict=True):
        assert word in text, text


def _streams() -> Iterator[Case]:
    why = ONLY_GRPC
    yield Case(
        "a stream of a model with one response", streamed(Infer("simple", PAIR, id="a")), check=_one_of_simple, **why
    )
    yield Case(
        "a stream of three elements", streamed(repeat(4, 5, 6)), check=_repeats(4, 5, 6, finals=[False] * 3), **why
    )
    yield Case(
        "a stream of three elements and its end",
        streamed(repeat(4, 5, 6, name="x"), empty_final=True),
        check=lambda answers: (
            _repeats(4, 5, 6, finals=[False, False, False, True])(answers),
            _is_end(answers[-1], "x"),
        ),
        **why,
    )
    yield Case("a stream of no element", streamed(repeat()), check=lambda answers: equal(answers, []), **why)
    yield Case(
        "a stream of no element and its end",
        streamed(repeat(name="x"), empty_final=True),
        check=lambda answers: _is_end(answers[0], "x"),
        **why,
    )
    yield Case(
        "a last response that is final",
        streamed(drip(3)),
        check=lambda answers: equal(_finals(answers), [False, False, True]),
        **why,
    )
    yield Case(
        "a last response that is final, where the end is asked for",
        streamed(drip(3), empty_final=True),
        check=lambda answers: equal(_finals(answers), [False, False, True]),
        **why,
    )
    yield Case("1000 responses in their order", streamed(repeat(*range(1000))), check=_repeats(*range(1000)), **why)
    yield Case("a stream without a request", streamed(), check=lambda answers: equal(answers, []), **why)
    yield Case("a stream by hand without a request", by_hand(), check=lambda answers: equal(answers, []), **why)
    yield Case(
        "50 requests of a model with one response come back in order",
        streamed(*[Infer("simple", PAIR, id=str(index)) for index in range(50)]),
        check=lambda answers: equal([one.id for one in answers], [str(index) for index in range(50)]),
        **why,
    )
    yield Case(
        "requests of two models on one stream",
        streamed(repeat(1, 2, name="r"), Infer("simple", PAIR, id="s"), repeat(3, name="q")),
        check=lambda answers: equal(
            (_outs(answers, "r"), _outs(answers, "q"), sum(one.model == "simple" for one in answers)), ([1, 2], [3], 1)
        ),
        **why,
    )
    yield Case(
        "decoupled requests at once do not wait for each other",
        streamed(repeat(1, 2, name="slow", delay_ms=100), drip(1, name="fast")),
        check=lambda answers: equal((len(answers), answers[-1].id), (3, "slow")),
        **why,
    )
    yield Case(
        "one output of a stream",
        streamed(repeat(4, 5, outputs=[Output("OUT")])),
        check=lambda answers: equal([one.order for one in answers], [["OUT"], ["OUT"]]),
        **why,
    )
    yield Case(
        "classes of a stream",
        streamed(repeat(4, outputs=[Output("OUT", classes=1)])),
        check=lambda answers: equal(answers[0].arrays["OUT"].tolist(), [b"4:0"]),
        **why,
    )
    yield Case(
        "typed contents on a stream",
        by_hand(Infer("repeat", [Tensor("IN", "INT32", (2,), [8, 9], text=True)])),
        check=lambda answers: equal(
            [one.infer_response.raw_output_contents[0] for one in answers], [b"\x08\0\0\0", b"\x09\0\0\0"]
        ),
        **why,
    )


def _one_of_simple(answers: Any) -> None:
    (answer,) = answers
    np.testing.assert_array_equal(answer.arrays["OUTPUT0"], PAIR[0].data * 3)
    assert (answer.id, dict(answer.parameters)) == ("a", {FINAL: True})


def _is_end(answer: Any, name: str) -> None:
    assert (answer.order, answer.id, answer.model, answer.parameters[FINAL]) == ([], name, "repeat", True)


def _bad_streams() -> Iterator[Case]:
    """On a stream a refusal is a message that names its request, and the stream goes on."""
    short = Tensor("IN", "INT32", (2,), bytes(4))
    bad: dict[str, tuple[Infer, str]] = {
        "an unknown model": (Infer("nobody", [ONE], id="b"), "nobody"),
        "an unknown version": (repeat(1, name="b", version="9"), "9"),
        "a version that is no number": (repeat(1, name="b", version="x"), "x"),
        "a model that failed to load": (Infer("broken", [ONE], id="b"), "broken"),
        "a missing input": (Infer("repeat", [], id="b"), "IN"),
        "an unknown input": (Infer("repeat", [ONE], id="b"), "INPUT0"),
        "an unknown output": (repeat(1, name="b", outputs=[Output("NOPE")]), "NOPE"),
        "a wrong datatype": (Infer("repeat", [Tensor("IN", "FP32", (1,), np.ones(1, np.float32))], id="b"), "INT32"),
        "a wrong size": (Infer("repeat", [short], id="b"), "IN"),
        "a negative dimension": (Infer("repeat", [Tensor("IN", "INT32", (-1,), bytes(4))], id="b"), "-1"),
        "a reserved parameter": (repeat(1, name="b", parameters={"triton_x": True}), "triton_x"),
        "an ill-typed flag": (repeat(1, name="b", parameters={EMPTY_FINAL: 1}), EMPTY_FINAL),
        "a region that is not registered": (
            Infer("repeat", [Tensor("IN", "INT32", (1,), region=Region("r", 4))], id="b"),
            "r",
        ),
        "more delays than elements": (
            Infer("repeat", [repeat(1).inputs[0], Tensor("DELAY", "UINT32", (2,), np.ones(2, np.uint32))], id="b"),
            "DELAY",
        ),
        "a failure of the model": (drip(2, name="b", fail="planned"), "planned"),
    }
    for name, (request, word) in bad.items():
        good = Infer("simple", PAIR, id="after")
        yield Case(
            f"{name} on a stream",
            by_hand(request, good),
            check=_refusal_then_good(word, 2 if word == "planned" else 0),
            **ONLY_GRPC,
        )
    for name, code in [
        ("an unknown model", "NOT_FOUND"),
        ("a missing input", "INVALID_ARG"),
        ("a model that failed to load", "UNAVAILABLE"),
        ("a failure of the model", "INTERNAL"),
    ]:
        request, word = bad[name]
        yield Case(f"{name} on a stream that asks for status", by_hand(request, status=True), code, word, **ONLY_GRPC)
    yield Case(
        "a good request on a stream that asks for status",
        by_hand(repeat(1, 2), status=True),
        check=lambda answers: equal(len(answers), 2),
        **ONLY_GRPC,
    )
    yield Case(
        "the stock client is told of a refusal and goes on",
        streamed(Infer("nobody", [ONE]), Infer("simple", PAIR)),
        check=lambda answers: (_errors(answers, "nobody"), _one_good(answers)),
        **ONLY_GRPC,
    )
    yield Case(
        "a hundred refusals on a stream",
        by_hand(*[Infer("nobody", [ONE], id=str(index)) for index in range(100)]),
        check=lambda answers: equal([one.infer_response.id for one in answers], [str(index) for index in range(100)]),
        **ONLY_GRPC,
    )


def _one_good(answers: Any) -> None:
    assert [one.model for one in answers if not isinstance(one, Refused)] == ["simple"]


def _refusal_then_good(word: str, before: int) -> Callable[[Any], None]:
    def check(answers: Any) -> None:
        mine = [one for one in answers if one.infer_response.id == "b"]
        *good, refusal = mine
        assert len(good) == before
        assert not any(one.error_message for one in good)
        assert word in refusal.error_message, refusal
        assert not refusal.infer_response.outputs
        (after,) = [one for one in answers if one.infer_response.id == "after"]
        assert not after.error_message
        assert after.infer_response.parameters[FINAL].bool_param

    return check


# --- where one answer is due ------------------------------------------------------------------------------------------


def _unary() -> Iterator[Case]:
    for model, request in [
        ("repeat", repeat(1)),
        ("drip", drip(1)),
        ("repeat with a bad input", Infer("repeat", [ONE])),
    ]:
        yield Case(f"infer of the decoupled model {model}", request, "UNSUPPORTED", f"{request.model} decoupled")
    yield Case("infer of a version of a decoupled model", repeat(1, version="1"), "UNSUPPORTED", "repeat decoupled")


# --- what is counted --------------------------------------------------------------------------------------------------


def counted(*elements: int) -> Callable[[Any], Any]:
    """Return the sending of a stream over either door, and by how much the successes of each response then grew."""

    def numbers(ask: Any) -> dict[str, int]:
        (told,) = ask.stock(lambda client: client.get_inference_statistics("repeat", **_as_json(ask)))["model_stats"]
        stats = told.get("response_stats", {})
        return {key: int(one["success"].get("count", 0)) for key, one in stats.items() if one.get("success")}

    def send(ask: Any) -> dict[str, int]:
        before = numbers(ask)
        if ask.door == "http":
            ask.events("/v2/models/repeat/generate_stream", {"IN": list(elements)})
        else:
            ask.stream([repeat(*elements)])
        after = numbers(ask)
        grown = {key: count - before.get(key, 0) for key, count in after.items()}
        return {key: count for key, count in grown.items() if count}

    return send


def _as_json(ask: Any) -> dict[str, bool]:
    return {} if ask.door == "http" else {"as_json": True}


def _counts() -> Iterator[Case]:
    for elements in ((4,), (4, 5, 6)):
        wanted = dict.fromkeys(map(str, range(len(elements))), 1)
        yield Case(f"statistics of a stream of {len(elements)}", counted(*elements), check=gives(wanted))


CASES = [*_unary(), *_streams(), *_bad_streams(), *_counts()]
