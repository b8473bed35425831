"""The PyTorch backend with plain modules: a model.py, and model.pt with weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_models as models
from headrace_backends.conformance import Answer, Case, Inputs, loaded
from headrace_backends.pytorch.backend import PyTorchBackend
from headrace_protocol.errors import ErrorCode, InferError

A, B = np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32)
PERCEPTRON = (
    "class Perceptron(torch.nn.Module):",
    "    def __init__(self):",
    "        super().__init__()",
    "        self.hidden = torch.nn.Linear(8, 32)",
    "        self.last = torch.nn.Linear(32, 4)",
    "    def forward(self, x):",
    "        return torch.softmax(self.last(torch.relu(self.hidden(x))), 1)",
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The model's version; what running its code leaves behind is removed, for a process serves but one model."""
    (tmp_path / "1").mkdir()
    path = list(sys.path)
    yield tmp_path / "1"
    sys.path[:] = path
    for name in ("headrace_model", "beside"):
        sys.modules.pop(name, None)


def io(name: str, config_type: str = "FP32", *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{config_type}", "dims": list(dims or (-1,)), **more}


def case(
    folder: Path, *lines: str, example: Inputs, outputs: tuple[str, ...] = ("y",), rows: int = 0, **parameters: str
) -> Case:
    """Write model.py and return a case for it: FP32 inputs like those of the example, FP32 outputs."""
    (folder / "model.py").write_text(models.source(*lines))
    config = {
        "name": "m",
        "max_batch_size": rows,
        "input": [io(name, "FP32", *[-1] * array.ndim) for name, array in example.items()],
        "output": [io(name, "FP32", -1, -1) for name in outputs],
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    return Case(folder.parent, config, example)


def function(*body: str, arguments: str = "x") -> tuple[str, ...]:
    """Return the lines of a module with this body of forward()."""
    return "class Net(torch.nn.Module):", f"    def forward(self, {arguments}):", *(f"        {line}" for line in body)


def answer(case: Case) -> Answer:
    with loaded(PyTorchBackend, case) as model:
        (only,) = model.run(model.batch([case.inputs]))
    return only


def refused(case: Case) -> InferError:
    with pytest.raises(InferError) as caught, loaded(PyTorchBackend, case):
        pass
    return caught.value


def test_a_module_without_weights_runs(folder: Path) -> None:
    lines = function("return a + b, a - b", arguments="a, b")
    got = answer(case(folder, *lines, example={"b": B, "a": A}, outputs=("o__0", "o__1")))
    assert got.outputs["o__1"].tolist() == [-3, -3, -3]


def test_weights_beside_it_are_loaded(folder: Path) -> None:
    original = models.Perceptron()
    models.save_weights(folder / "model.pt", original)
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    got = answer(case(folder, *PERCEPTRON, example={"x": x}, rows=4))
    np.testing.assert_allclose(got.outputs["y"], original(torch.from_numpy(x)).detach().numpy(), rtol=1e-5)


def test_the_runtime_of_the_configuration_chooses_model_py(folder: Path) -> None:
    models.save_weights(folder / "weights.pt", models.Perceptron())
    of_model = case(folder, *PERCEPTRON, example={"x": np.ones((1, 8), np.float32)}, rows=4)
    of_model.config.update(runtime="model.py", default_model_filename="weights.pt")
    assert answer(of_model).outputs["y"].shape == (1, 4)


def test_the_file_may_have_another_name(folder: Path) -> None:
    of_model = case(folder, *function("return x + 1"), example={"x": A})
    (folder / "model.py").rename(folder / "net.py")
    of_model.config["default_model_filename"] = "net.py"
    assert answer(of_model).outputs["y"].tolist() == [2, 3, 4]


def test_weights_that_do_not_fit_are_told(folder: Path) -> None:
    models.save_weights(folder / "model.pt", models.Lookup())
    error = refused(case(folder, *PERCEPTRON, example={"x": np.ones((1, 8), np.float32)}))
    assert error.code is ErrorCode.INVALID_ARG
    assert "do not fit Perceptron: " in error.message
    assert 'Unexpected key(s) in state_dict: "table.weight"' in error.message


class Reading:
    """Reads a file when it is unpickled."""

    def __reduce__(self) -> tuple:
        return (open, (__file__,))


def test_weights_that_would_run_code_are_not_loaded(folder: Path) -> None:
    torch.save(Reading(), folder / "model.pt")
    error = refused(case(folder, *PERCEPTRON, example={"x": np.ones((1, 8), np.float32)}))
    assert error.code is ErrorCode.INVALID_ARG
    assert "does not hold the weights of a model: " in error.message


def test_modules_beside_it_can_be_imported(folder: Path) -> None:
    (folder / "beside.py").write_text("FACTOR = 3\n")
    lines = ("from beside import FACTOR", *function("return x * FACTOR"))
    assert answer(case(folder, *lines, example={"x": A})).outputs["y"].tolist() == [3, 6, 9]


def test_of_several_classes_the_first_by_name_is_taken_and_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = (
        *function("return x + 1"),
        "class Block(torch.nn.Module):",
        "    def forward(self, x):",
        "        return x",
    )
    assert answer(case(folder, *lines, example={"x": A})).outputs["y"].tolist() == [1, 2, 3]
    assert "Block was taken of the classes 'Block', 'Net'; parameter MODEL_CLASS chooses another" in caplog.text


def test_a_class_can_be_chosen(folder: Path) -> None:
    lines = (*function("return x + 1"), "class Block(torch.nn.Module):", "    pass")
    assert answer(case(folder, *lines, example={"x": A}, MODEL_CLASS="Net")).outputs["y"].tolist() == [2, 3, 4]


def test_a_class_that_is_not_there_is_refused_with_those_that_are(folder: Path) -> None:
    error = refused(case(folder, *function("return x"), example={"x": A}, MODEL_CLASS="Nut"))
    assert "has no torch.nn.Module 'Nut', it has 'Net'" in error.message


def test_code_without_a_class_is_refused(folder: Path) -> None:
    assert "has no class that is a torch.nn.Module" in refused(case(folder, "x = 1", example={"x": A})).message


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("import nothing_like_it",), "ModuleNotFoundError: No module named 'nothing_like_it'"),
        (("def f(:",), "SyntaxError"),
        (("raise SystemExit(3)",), "SystemExit: 3"),
        (
            ("class Net(torch.nn.Module):", "    def __init__(self, size):", "        super().__init__()"),
            "Net() failed: TypeError: ",
        ),
    ],
)
def test_code_that_fails_is_told_with_its_error(folder: Path, lines: tuple, said: str) -> None:
    error = refused(case(folder, *lines, example={"x": A}))
    assert error.code is ErrorCode.INTERNAL
    assert said in error.message


def test_an_annotated_dictionary_gets_the_inputs_by_their_names(folder: Path) -> None:
    lines = function("return given['a'] - given['b']", arguments="given: dict[str, torch.Tensor]")
    assert answer(case(folder, *lines, example={"b": B, "a": A})).outputs["y"].tolist() == [-3, -3, -3]


def test_annotated_numbers_and_defaults_are_respected(folder: Path) -> None:
    lines = function(
        "return x * times - (0 if y is None else y)", arguments="x, times: int, y: torch.Tensor | None = None"
    )
    of_model = case(folder, *lines, example={"x": A, "times": np.array([2.0], np.float32)})
    assert answer(of_model).outputs["y"].tolist() == [2, 4, 6]


def test_a_dictionary_of_results_goes_by_its_keys(folder: Path) -> None:
    lines = function("return {'p': x, 'q': (x + 1, x + 2)}")
    got = answer(case(folder, *lines, example={"x": A}, outputs=("q__2", "p__0")))
    assert got.outputs["q__2"].tolist() == [3, 4, 5]
    got = answer(case(folder, *function("return {'p': x, 'q': x + 1}"), example={"x": A}, outputs=("q", "p")))
    assert got.outputs["q"].tolist() == [2, 3, 4]


def test_a_number_is_a_result_of_the_configured_type(folder: Path) -> None:
    got = answer(case(folder, *function("return float(x.sum()), 3, True"), example={"x": A}, outputs=("a", "b", "c")))
    assert [(array.dtype, array.shape, array.item()) for array in got.outputs.values()] == [
        (np.float32, (), 6),
        (np.float32, (), 3),
        (np.float32, (), 1),
    ]


def test_something_that_is_no_tensor_is_named(folder: Path) -> None:
    got = answer(case(folder, *function("return object()"), example={"x": A}))
    assert (got.code, got.message) == ("INTERNAL", "output 'y' of the model is of type object, which is no tensor")


ODD = {
    "transposed": ("x.reshape(3, 1).expand(3, 2).t()", [[1, 2, 3], [1, 2, 3]]),
    "negated lazily": ("torch.imag(torch.conj(torch.complex(x, x)))", [-1, -2, -3]),
    "needs a gradient": ("x * torch.ones(1, requires_grad=True)", [1, 2, 3]),
    "a parameter": ("torch.nn.Parameter(x)", [1, 2, 3]),
    "without elements": ("x[:0].reshape(0, 4)", []),
    "a scalar": ("x.sum()", 6),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("mode", ["true", "false"])
def test_results_that_lie_oddly_in_memory_come_as_they_are(folder: Path, kind: str, mode: str) -> None:
    expression, expected = ODD[kind]
    got = answer(case(folder, *function(f"return {expression}"), example={"x": A}, INFERENCE_MODE=mode))
    assert got.outputs["y"].tolist() == expected


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("x.to(torch.complex64)", "is of torch.complex64, which is no tensor datatype"),
        ("x.to(torch.float8_e4m3fn)", "is of torch.float8_e4m3fn, which is no tensor datatype"),
        ("x.to_sparse()", "is a tensor of layout torch.sparse_coo, expected a dense one"),
        ("None", "is of type NoneType, which is no tensor"),
    ],
)
def test_results_that_no_protocol_can_carry_are_named(folder: Path, expression: str, said: str) -> None:
    got = answer(case(folder, *function(f"return {expression}"), example={"x": A}))
    assert (got.code, got.message) == ("INTERNAL", f"output 'y' of the model {said}")


def test_a_model_whose_rows_are_not_those_of_its_input_is_told(folder: Path) -> None:
    example = {"x": np.ones((2, 3), np.float32)}
    got = answer(case(folder, *function("return x[:1]"), example=example, rows=4))
    assert (got.code, got.message) == ("INTERNAL", "output 'y' has shape [1, 3], expected a first dimension of 2")


def test_every_instance_gets_a_copy_of_its_own_unless_sharing_is_asked_for(folder: Path) -> None:
    of_model = case(folder, *function("return x"), example={"x": A})
    with loaded(PyTorchBackend, of_model) as model:
        assert model.description.concurrency == 1
    with loaded(
        PyTorchBackend, case(folder, *function("return x"), example={"x": A}, ENABLE_WEIGHT_SHARING="1")
    ) as model:
        assert model.description.concurrency is None


def test_a_request_fails_alone_unless_the_model_has_changed_the_inputs(folder: Path) -> None:
    rows = [{"x": np.array([[value]], np.float32)} for value in (1, -1, 2)]
    for first, codes in (("pass", ["", "INTERNAL", ""]), ("x += 1", ["INTERNAL"] * 3)):
        lines = function(first, "assert (x > 0).all(), 'below 0'", "return x")
        with loaded(PyTorchBackend, case(folder, *lines, example=rows[0], rows=8)) as model:
            answers = model.run(model.batch(rows))
        assert [got.code for got in answers] == codes
        assert answers[1].message == "PyTorch failed: AssertionError: below 0"


def test_a_model_runs_in_evaluation_mode_with_its_share_of_threads(folder: Path) -> None:
    lines = function("return torch.tensor([float(self.training), float(torch.get_num_threads())])")
    assert answer(case(folder, *lines, example={"x": A}, NUM_THREADS="3")).outputs["y"].tolist() == [0, 3]


def test_a_compiled_model_is_compiled_at_load_for_every_number_of_rows(folder: Path) -> None:
    lines = (
        "COMPILATIONS = []",
        "def backend(graph, inputs):",
        "    COMPILATIONS.append(1)",
        "    return graph",
        "torch._dynamo.register_backend(backend, name='counting')",
        *function("return x.sin() + x.cos()"),
    )
    example = {"x": np.ones((1, 3), np.float32)}
    of_model = case(
        folder, *lines, example=example, rows=8, TORCH_COMPILE_OPTIONAL_PARAMETERS='{"backend": "counting"}'
    )
    of_model.config["input"] = [io("x", "FP32", 3)]
    with loaded(PyTorchBackend, of_model) as model:
        compiled = len(sys.modules["headrace_model"].COMPILATIONS)
        assert compiled
        for rows in (1, 2, 3, 8):
            (got,) = model.run(model.batch([{"x": np.ones((rows, 3), np.float32)}]))
            assert got.outputs["y"].shape == (rows, 3)
        assert len(sys.modules["headrace_model"].COMPILATIONS) == compiled


def test_a_model_whose_shapes_vary_is_compiled_later_and_that_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager"}'}
    assert answer(case(folder, *function("return x + 1"), example={"x": A}, **parameters)).outputs["y"].tolist() == [
        2,
        3,
        4,
    ]
    assert "is compiled by its first requests: the dims of its inputs are not all fixed" in caplog.text


def test_a_model_that_cannot_be_compiled_is_refused_with_the_reason(folder: Path) -> None:
    lines = function("torch._dynamo.graph_break()", "return x")
    parameters = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager", "fullgraph": true}'}
    of_model = case(folder, *lines, example={"x": A}, **parameters)
    of_model.config["input"] = [io("x", "FP32", 3)]
    error = refused(of_model)
    assert error.code is ErrorCode.INVALID_ARG
    assert "cannot be compiled: " in error.message
