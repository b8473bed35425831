"""Rows of the table that only HTTP has: generate and generate_stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from conformance.table.cases import Case, equal

ONLY_HTTP = {"only": "http", "because": "gRPC has ModelStreamInfer instead"}


def generate(model: str, body: Any, version: str = "", verb: str = "generate") -> Callable[[Any], Any]:
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + f"/{verb}"
    return lambda ask: ask.post(path, body)


def events(model: str, body: Any) -> Callable[[Any], Any]:
    return lambda ask: ask.events(f"/v2/models/{model}/generate_stream", body)


def _is(**wanted: Any) -> Callable[[Any], None]:
    def check(answer: Any) -> None:
        assert answer == wanted

    return check


def _generated() -> Iterator[Case]:
    four = {"INPUT0": [1.5, 2, 3, 4]}
    whole = {"model_name": "four", "model_version": "1", "OUTPUT0": [1.5, 2, 3, 4]}
    why = ONLY_HTTP
    yield Case("generate with numbers", generate("four", four), check=_is(**whole), **why)
    yield Case(
        "generate with a version",
        generate("versions", four, "1"),
        check=_is(**whole | {"model_name": "versions"}),
        **why,
    )
    yield Case(
        "generate with nested numbers", generate("four", {"INPUT0": [[1.5, 2], [3, 4]]}), check=_is(**whole), **why
    )
    yield Case("generate with an id", generate("four", four | {"id": "é"}), check=_is(id="é", **whole), **why)
    yield Case(
        "generate with a text",
        generate("text", {"INPUT0": "é"}),
        check=lambda told: equal(told["OUTPUT0"], "é"),
        **why,
    )
    yield Case(
        "generate with texts",
        generate("text", {"INPUT0": ["a", "b"]}),
        check=lambda told: equal(told["OUTPUT0"], ["a", "b"]),
        **why,
    )
    yield Case(
        "generate with one number",
        generate("echo", {"INPUT0": 5}),
        check=lambda told: equal(told["OUTPUT0"], 5),
        **why,
    )
    yield Case(
        "generate with a batch of one",
        generate("rows", {"INPUT_INT32": 5}),
        check=lambda told: equal(told["OUTPUT_INT32"], 5),
        **why,
    )
    yield Case(
        "generate with two inputs",
        generate("simple", {"INPUT0": list(range(16)), "INPUT1": [1] * 16}),
        check=lambda told: equal(told["OUTPUT1"], list(range(-1, 15))),
        **why,
    )
    yield Case(
        "generate with parameters",
        generate("echo", {"INPUT0": 5, "a": "x", "parameters": {"b": 1, "c": True, "d": 0.5}}),
        check=lambda told: equal([told[key] for key in "abcd"], ["x", 1, True, 0.5]),
        **why,
    )
    yield Case(
        "generate with an input among the parameters", generate("four", {"parameters": four}), check=_is(**whole), **why
    )
    yield Case(
        "generate of a decoupled model with one response",
        generate("drip", {"INPUT0": 5, "responses": 1}),
        check=lambda told: equal(told["OUTPUT0"], 5),
        **why,
    )
    yield Case(
        "generate of one element",
        generate("repeat", {"IN": [5]}),
        check=lambda told: equal((told["OUT"], told["IDX"]), (5, 0)),
        **why,
    )
    yield Case(
        "generate_stream of three elements",
        events("repeat", {"IN": [4, 5, 6]}),
        check=lambda told: equal([(one["OUT"], one["IDX"]) for one in told], [(4, 0), (5, 1), (6, 2)]),
        **why,
    )
    yield Case(
        "generate_stream of a model with one response",
        events("four", four),
        check=lambda told: equal(told, [whole]),
        **why,
    )
    yield Case("generate_stream of no element", events("repeat", {"IN": []}), check=lambda told: equal(told, []), **why)
    yield Case(
        "generate_stream with an id",
        events("repeat", {"IN": [4, 5], "id": "x"}),
        check=lambda told: equal([one["id"] for one in told], ["x", "x"]),
        **why,
    )
    yield Case(
        "generate_stream of 1000 elements",
        events("repeat", {"IN": list(range(1000))}),
        check=lambda told: equal([one["OUT"] for one in told], list(range(1000))),
        **why,
    )
    yield Case(
        "an error after two responses",
        events("drip", {"INPUT0": 1, "responses": 2, "fail": "planned"}),
        check=_two_and_an_error,
        **why,
    )


def _not_one() -> Iterator[Case]:
    for elements in ([], [4, 5], list(range(500))):
        yield Case(
            f"generate of {len(elements)} elements",
            generate("repeat", {"IN": elements}),
            "INVALID_ARG",
            "repeat generate_stream",
            **ONLY_HTTP,
        )


def _two_and_an_error(told: Any) -> None:
    assert [set(one) for one in told] == [{"model_name", "model_version", "OUTPUT0"}] * 2 + [{"error"}]
    assert "planned" in told[-1]["error"]


def _bad_generated() -> Iterator[Case]:
    bodies: list[tuple[str, Any, str]] = [
        *[
            (model, body, "")
            for model in ("four", "repeat")
            for body in (b"", b"[]", b"null", b"5", b"{", b"\xff", b"{" * 200)
        ],
        *[
            ("four", {"INPUT0": value}, "INPUT0")
            for value in ("a", [True] * 4, [1], [1] * 5, {}, None, [[1], {}], [None] * 4, "1")
        ],
        *[("echo", {"INPUT0": 1, "custom": value}, "custom") for value in (None, [], {}, [1], {"a": 1})],
        *[("echo", {"INPUT0": 1, "parameters": value}, "parameters") for value in (5, "x", [], True)],
        *[("echo", {"INPUT0": 1, "id": value}, "id") for value in (5, [], True)],
        ("simple", {"INPUT0": list(range(16))}, "INPUT1"),
        ("identity", {}, "identity"),
        ("identity", {"INPUT_FP16": [0.5]}, "INPUT_FP16"),
        ("identity", {"INPUT_UINT8": [257]}, "INPUT_UINT8"),
        ("text", {"INPUT0": 5}, "INPUT0"),
        ("echo", {"INPUT0": 1, "triton_x": 1}, "triton_x"),
        ("echo", {"INPUT0": 1, "priority": -1}, "priority"),
    ]
    for verb in ("generate", "generate_stream"):
        for model, body, says in bodies:
            shown = body if isinstance(body, bytes) else str(body)
            yield Case(
                f"{verb} of {model} with {shown[:60]!r}",
                generate(model, body, verb=verb),
                "INVALID_ARG",
                says,
                **ONLY_HTTP,
            )
        yield Case(f"{verb} of an unknown model", generate("nobody", {}, verb=verb), "NOT_FOUND", "nobody", **ONLY_HTTP)
        yield Case(f"{verb} of an unknown version", generate("four", {}, "9", verb), "NOT_FOUND", "four 9", **ONLY_HTTP)
        yield Case(
            f"{verb} of a model whose load failed",
            generate("broken", {}, verb=verb),
            "UNAVAILABLE",
            "broken",
            **ONLY_HTTP,
        )
        yield Case(
            f"{verb} of a failure before the first response",
            generate("drip", {"INPUT0": 1, "responses": 0, "fail": "planned"}, verb=verb),
            "INTERNAL",
            "planned",
            **ONLY_HTTP,
        )
        yield Case(
            f"{verb} with 500000 arrays",
            generate("four", b'{"INPUT0":' + b"[" * 500_000, verb=verb),
            "INVALID_ARG",
            "nested",
            **ONLY_HTTP,
        )
        yield Case(
            f"GET {verb}",
            lambda ask, verb=verb: ask.get(f"/v2/models/four/{verb}"),
            "NO_SUCH_METHOD",
            "POST",
            **ONLY_HTTP,
        )


CASES = [*_generated(), *_not_one(), *_bad_generated()]
