"""The PyTorch backend with TorchScript models: arguments and results of every kind, strings, state, failures."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_models as models
from headrace_backends.conformance import Answer, Case, Inputs, loaded
from headrace_backends.pytorch.backend import PARALLEL_BYTES, PyTorchBackend
from headrace_protocol.errors import ErrorCode, InferError

TOTAL, DIFFERENCE = [5, 7, 9], [-3, -3, -3]
A, B = np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the model belongs."""
    return tmp_path / "1" / "model.pt"


def io(name: str, config_type: str = "FP32", *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{config_type}", "dims": list(dims or (-1,)), **more}


def case(
    file: Path, inputs: list[dict], outputs: list[dict], example: Inputs | None = None, rows: int = 0, **parameters: str
) -> Case:
    config = {
        "name": "m",
        "max_batch_size": rows,
        "input": inputs,
        "output": outputs,
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    return Case(file.parent.parent, config, example or {})


def answer(case: Case) -> Answer:
    with loaded(PyTorchBackend, case) as model:
        (only,) = model.run(model.batch([case.inputs]))
    return only


def refused(case: Case) -> InferError:
    with pytest.raises(InferError) as caught, loaded(PyTorchBackend, case):
        pass
    return caught.value


def two(names: tuple[str, str], outputs: tuple[str, str]) -> tuple[list[dict], list[dict], Inputs]:
    return [io(name) for name in names], [io(name) for name in outputs], dict(zip(names, (A, B), strict=True))


@pytest.mark.parametrize("module", [models.AddSub, models.NamedResults])
@pytest.mark.parametrize("outputs", [("OUTPUT__0", "OUTPUT__1"), ("sum", "rest")])
@pytest.mark.parametrize("inputs", [("INPUT__0", "INPUT__1"), ("first", "second")])
def test_inputs_and_outputs_go_by_index_or_in_order(file: Path, module: type, inputs: tuple, outputs: tuple) -> None:
    models.save_script(file, module())
    got = answer(case(file, *two(inputs, outputs)))
    assert [got.outputs[name].tolist() for name in outputs] == [TOTAL, DIFFERENCE]


def test_inputs_go_by_the_names_of_the_arguments_whatever_their_order(file: Path) -> None:
    models.save_script(file, models.AddSub())
    got = answer(case(file, *two(("INPUT1", "INPUT0"), ("o__0", "o__1"))))
    assert got.outputs["o__1"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("module", [models.DictResults, models.NamedResults])
def test_results_with_names_go_by_them_whatever_their_order(file: Path, module: type) -> None:
    models.save_script(file, module())
    got = answer(case(file, *two(("a", "b"), ("total", "difference"))))
    assert [got.outputs[name].tolist() for name in ("total", "difference")] == [TOTAL, DIFFERENCE]


def test_results_with_names_may_go_by_index_too(file: Path) -> None:
    models.save_script(file, models.DictResults())
    got = answer(case(file, *two(("a", "b"), ("o__0", "o__1"))))
    assert got.outputs["o__0"].tolist() == DIFFERENCE


def test_a_dictionary_gets_the_inputs_by_their_names(file: Path) -> None:
    models.save_script(file, models.DictArgument())
    got = answer(case(file, [io("b"), io("a")], [io("y")], {"b": B, "a": A}))
    assert got.outputs["y"].tolist() == DIFFERENCE


def test_a_traced_model_goes_in_order(file: Path) -> None:
    models.save_script(file, models.traced(models.AddSub(), torch.ones(3), torch.ones(3)))
    got = answer(case(file, *two(("p", "q"), ("r", "s"))))
    assert got.outputs["r"].tolist() == TOTAL


def test_a_list_of_tensors_goes_by_index(file: Path) -> None:
    models.save_script(file, models.ListResults())
    got = answer(case(file, [io("a", "FP32", -1, 2)], [io("o__1", "FP32", 2)], {"a": np.eye(2, dtype=np.float32)}))
    assert got.outputs["o__1"].tolist() == [0, 1]


def test_a_result_that_the_model_did_not_give_is_named(file: Path) -> None:
    models.save_script(file, models.ListResults())
    got = answer(case(file, [io("a", "FP32", -1, 2)], [io("o__3", "FP32", 2)], {"a": np.eye(2, dtype=np.float32)}))
    assert (got.code, got.message) == ("INTERNAL", "output 'o__3' is result 3 of the model, which gave 2")


def test_an_output_that_the_declaration_rules_out_is_refused_at_load(file: Path) -> None:
    models.save_script(file, models.AddSub())
    error = refused(case(file, *two(("a", "b"), ("o__0", "o__2"))))
    assert error.message == "output 'o__2' would be result 2 of forward(), which gives 2"


def test_an_input_for_which_there_is_no_argument_is_refused_at_load(file: Path) -> None:
    models.save_script(file, models.Identity())
    error = refused(case(file, *two(("a", "b"), ("o__0", "o__1"))))
    assert "input 'b' would be argument 1 of forward(), which takes argument 'INPUT0' (Tensor)" in error.message


def test_only_the_wanted_outputs_are_given(file: Path) -> None:
    models.save_script(file, models.AddSub())
    of_model = case(file, *two(("a", "b"), ("o__0", "o__1")))
    with loaded(PyTorchBackend, of_model) as model:
        (got,) = model.run(model.batch([of_model.inputs], wanted=("o__1",)))
    assert got.outputs.keys() == {"o__1"}


def test_numbers_are_arguments_too_and_may_have_defaults(file: Path) -> None:
    models.save_script(file, models.Numbers())
    inputs = [io("x"), io("times", "INT64", 1), io("plus", "FP64", 1)]
    example = {"x": A, "times": np.array([3]), "plus": np.array([0.5])}
    got = answer(case(file, inputs, [io("y")], example))
    assert got.outputs["y"].tolist() == [3.5, 6.5, 9.5]


def test_a_number_of_several_elements_is_refused(file: Path) -> None:
    models.save_script(file, models.Numbers())
    inputs = [io("x"), io("times", "INT64", -1), io("plus", "FP64", 1)]
    got = answer(case(file, inputs, [io("y")], {"x": A, "times": np.array([3, 4]), "plus": np.array([0.5])}))
    assert (got.code, got.message) == ("INVALID_ARG", "input 'times' is one value for the model, got 2 elements")


@pytest.mark.parametrize(("given", "expected"), [({"x": A}, [1, 2, 3]), ({"x": A, "bias": B}, TOTAL)])
def test_an_argument_that_may_be_none_may_be_left_out(file: Path, given: Inputs, expected: list) -> None:
    models.save_script(file, models.MaybeBias())
    got = answer(case(file, [io("x"), io("bias", optional=True)], [io("y")], given))
    assert got.outputs["y"].tolist() == expected


def test_an_input_may_not_be_optional_where_the_model_needs_it(file: Path) -> None:
    models.save_script(file, models.Identity())
    error = refused(case(file, [io("INPUT0", optional=True)], [io("y")]))
    assert "optional in the configuration, but forward() needs it" in error.message


def strings(*elements: str | bytes) -> np.ndarray:
    array = np.empty(len(elements), object)
    array[:] = [element.encode() if isinstance(element, str) else element for element in elements]
    return array


def test_strings_go_in_and_come_out(file: Path) -> None:
    models.save_script(file, models.Exclaim())
    outputs = [io("loud", "STRING"), io("lengths", "INT64")]
    got = answer(case(file, [io("texts", "STRING")], outputs, {"texts": strings("né", "", "日本")}))
    assert got.outputs["loud"].tolist() == ["né!".encode(), b"!", "日本!".encode()]
    assert got.outputs["lengths"].tolist() == [3, 0, 6]  # bytes, for TorchScript


def test_no_strings_at_all_go_in_and_come_out(file: Path) -> None:
    models.save_script(file, models.Exclaim())
    got = answer(case(file, [io("texts", "STRING")], [io("loud", "STRING")], {"texts": strings()}))
    assert got.outputs["loud"].shape == (0,)


def test_a_string_that_is_not_utf8_fails_alone_with_the_input_named(file: Path) -> None:
    models.save_script(file, models.Exclaim())
    scalar = {"dims": [1], "reshape": {"shape": []}, "data_type": "TYPE_STRING"}
    of_model = case(file, [{"name": "texts", **scalar}], [{"name": "loud", **scalar}], rows=8)
    with loaded(PyTorchBackend, of_model) as model:
        good, bad = model.run(model.batch([{"texts": strings("a", "b")}, {"texts": strings(b"\xff")}]))
    assert good.outputs["loud"].tolist() == [b"a!", b"b!"]
    assert (bad.code, bad.message) == (
        "INVALID_ARG",
        "input 'texts' has an element that is not UTF-8, as PyTorch's strings must be",
    )


def test_strings_of_two_dimensions_are_refused_at_load(file: Path) -> None:
    models.save_script(file, models.Exclaim())
    assert "strings are a list for PyTorch" in refused(case(file, [io("texts", "STRING", -1, -1)], [])).message


def test_strings_for_a_tensor_are_refused_at_load(file: Path) -> None:
    models.save_script(file, models.Identity())
    error = refused(case(file, [io("INPUT0", "STRING")], [io("y")]))
    assert error.message == "input 'INPUT0' is argument 'INPUT0' (Tensor) of forward(), got TYPE_STRING"


def test_a_request_whose_values_the_model_refuses_fails_alone(file: Path) -> None:
    models.save_script(file, models.Lookup())
    of_model = case(file, [io("ids", "INT64", 1)], [io("rows", "FP32", 1, 2)], rows=8)
    with loaded(PyTorchBackend, of_model) as model:
        answers = model.run(model.batch([{"ids": np.array([[n]])} for n in (1, 99, 2)]))
    assert [got.code for got in answers] == ["", "INTERNAL", ""]
    assert answers[1].message == "PyTorch failed: RuntimeError: index out of range in self"


def test_the_requests_of_a_batch_that_failed_keep_apart_what_they_ask_for(file: Path) -> None:
    models.save_script(file, models.Lookup())
    of_model = case(file, [io("ids", "INT64", 1)], [io("rows", "FP32", 1, 2)], rows=8)
    with loaded(PyTorchBackend, of_model) as model:
        alone = [model.run(model.batch([{"ids": np.array([[n]])}]))[0] for n in (1, 2)]
        together = model.run(model.batch([{"ids": np.array([[n]])} for n in (1, 99, 2)]))
    assert [got.outputs["rows"].tolist() for got in together if not got.code] == [
        got.outputs["rows"].tolist() for got in alone
    ]


def test_a_wrong_shape_is_told_as_pytorch_does(file: Path) -> None:
    models.save_script(file, models.Perceptron())
    got = answer(case(file, [io("x", "FP32", -1)], [io("y", "FP32", 4)], {"x": np.ones((1, 5), np.float32)}, rows=4))
    assert got.code == "INTERNAL"
    assert "mat1 and mat2 shapes cannot be multiplied (1x5 and 8x32)" in got.message
    assert "Traceback" not in got.message


def test_a_model_that_counts_is_known_to_keep_a_state(file: Path) -> None:
    models.save_script(file, models.Counter())
    with loaded(PyTorchBackend, case(file, [io("x")], [io("y")], {"x": A})) as model:
        assert model.description.concurrency == 1
        got = [model.run(model.batch([{"x": A}]))[0].outputs["y"].tolist() for _ in range(2)]
    assert got == [[2, 3, 4], [3, 4, 5]]


def test_instances_share_a_model_that_keeps_a_state_where_that_is_asked_for(file: Path) -> None:
    models.save_script(file, models.Counter())
    with loaded(PyTorchBackend, case(file, [io("x")], [io("y")], ENABLE_WEIGHT_SHARING="true")) as model:
        assert model.description.concurrency is None


@pytest.mark.parametrize("module", [models.Perceptron, models.AddSub, models.DictArgument])
def test_a_model_that_keeps_no_state_is_shared_by_all_instances(file: Path, module: type) -> None:
    models.save_script(file, module())
    names = {"Perceptron": ["x"], "AddSub": ["a", "b"], "DictArgument": ["a", "b"]}[module.__name__]
    with loaded(PyTorchBackend, case(file, [io(name) for name in names], [io("y")])) as model:
        assert model.description.concurrency is None


def test_an_input_that_the_model_overwrites_is_its_own_copy_where_others_see_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.save_script(file, models.WritesInput())
    of_model = case(file, [io("INPUT0")], [io("y")], {"INPUT0": A})
    with loaded(PyTorchBackend, of_model) as model:
        for shared, left in ((True, [1, 2, 3]), (False, [0, 0, 0])):
            batch = model.batch([of_model.inputs])
            monkeypatch.setattr(type(batch), "owns", lambda *_, shared=shared: not shared)
            (got,) = model.run(batch)
            assert got.outputs["y"].tolist() == [2, 4, 6]
            assert batch.inputs["INPUT0"].tolist() == left


def test_an_input_is_read_where_it_lies(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.save_script(file, models.Identity())
    seen: list[int] = []
    of_model = case(file, [io("INPUT0")], [io("y")], {"INPUT0": A})
    with loaded(PyTorchBackend, of_model) as model:
        run = model.backend._program.run

        def watched(values: dict, wanted: tuple) -> dict:
            seen.append(values["INPUT0"].data_ptr())
            return run(values, wanted)

        monkeypatch.setattr(model.backend._program, "run", watched)
        batch = model.batch([of_model.inputs])
        model.run(batch)
        assert seen == [batch.inputs["INPUT0"].ctypes.data]


def test_a_large_output_is_copied_by_pytorch_to_where_the_server_reads_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.save_script(file, models.AddSub())
    example = {name: np.full((1, PARALLEL_BYTES // 4), value, np.float32) for name, value in (("a", 2), ("b", 3))}
    of_model = case(file, [io("a"), io("b")], [io("o__0"), io("o__1")], example, 4, INTRA_OP_THREAD_COUNT="2")
    with loaded(PyTorchBackend, of_model) as model:

        def no_copy(*_: object) -> None:
            raise AssertionError("the output was copied once more")

        monkeypatch.setattr("headrace_backends.pytorch.backend.to_array", no_copy)
        (got,) = model.run(model.batch([example], space=16 << 20))
    assert not got.code, got.message
    assert np.unique(got.outputs["o__1"]).tolist() == [-1]


class GradientMode(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([float((x + 1).is_inference()), float(torch.is_grad_enabled())])


@pytest.mark.parametrize(("mode", "expected"), [("true", [1, 0]), ("false", [0, 0])])
def test_inference_mode_can_be_switched_off(file: Path, mode: str, expected: list) -> None:
    models.save_script(file, GradientMode())
    got = answer(case(file, [io("x")], [io("y")], {"x": A}, INFERENCE_MODE=mode))
    assert got.outputs["y"].tolist() == expected


def test_optimized_execution_can_be_switched_off(file: Path) -> None:
    models.save_script(file, models.AddSub())
    got = answer(case(file, *two(("a", "b"), ("o__0", "o__1")), DISABLE_OPTIMIZED_EXECUTION="true"))
    assert got.outputs["o__0"].tolist() == TOTAL


def test_a_torchscript_model_cannot_be_compiled(file: Path) -> None:
    models.save_script(file, models.Identity())
    error = refused(case(file, [io("INPUT0")], [io("y")], TORCH_COMPILE_OPTIONAL_PARAMETERS="{}"))
    assert error.message == "model 'm': a TorchScript model cannot be compiled by torch.compile"


def test_a_missing_file_is_named(file: Path) -> None:
    error = refused(case(file, [], []))
    assert (error.code, error.message) == (ErrorCode.INVALID_ARG, f"model 'm': there is no file {file}")


def test_weights_alone_are_refused_with_what_they_need(file: Path) -> None:
    models.save_weights(file, models.Perceptron())
    assert refused(case(file, [], [])).message == (
        f"model 'm': {file} is weights, or a pickled model, and no model that can be run by itself; "
        "weights need a model.py with the model's class beside them"
    )


@pytest.mark.parametrize("content", [b"", b"no model", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_model_is_refused(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    assert "is no file of PyTorch's" in refused(case(file, [], [])).message


def test_a_model_that_was_cut_off_is_refused(file: Path) -> None:
    models.save_script(file, models.Perceptron())
    file.write_bytes(file.read_bytes()[:-100])
    assert "is no file of PyTorch's" in refused(case(file, [io("x")], [io("y")])).message


def test_a_damaged_model_is_refused_with_what_pytorch_says(file: Path) -> None:
    models.save_script(file, models.Perceptron())
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part.replace(b"def forward", b"def for ard"))
    assert f"PyTorch cannot load {file}: " in refused(case(file, [io("x")], [io("y")])).message


def test_a_gpu_that_this_pytorch_cannot_use_is_refused(file: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch has CUDA")
    models.save_script(file, models.Identity())
    from headrace_backends import execution
    from headrace_backends.api import ModelContext

    folder = file.parent.parent
    context = ModelContext("m", 1, folder, folder / "1", {}, {}, ("m_0",), "KIND_GPU", 0, auto_complete=True, threads=1)
    with pytest.raises(InferError, match="on KIND_GPU needs a PyTorch with CUDA") as caught:
        execution.initialize(PyTorchBackend, context)
    assert caught.value.code is ErrorCode.UNSUPPORTED
