"""The PyTorch backend with `.pt2` files: programs of torch.export, and packages that AOTInductor compiled of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_models as models
from headrace_backends.api import ModelDescription
from headrace_backends.conformance import Answer, Case, Inputs, check_backend, loaded
from headrace_backends.pytorch.backend import PyTorchBackend
from headrace_backends.pytorch.content import Content, content_of
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.tensor import TensorSpec

ONES = torch.ones(2, 4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the model belongs."""
    return tmp_path / "1" / "model.pt2"


def io(name: str, config_type: str = "FP32", *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{config_type}", "dims": list(dims or (-1,)), **more}


def case(
    file: Path,
    inputs: list[dict] | None = None,
    outputs: list[dict] | None = None,
    example: Inputs | None = None,
    rows: int = 0,
    **config: Any,
) -> Case:
    values = {
        "name": "m",
        "max_batch_size": rows,
        "default_model_filename": file.name,
        "input": inputs or [],
        "output": outputs or [],
        **config,
    }
    return Case(file.parent.parent, values, example or {})


def described(file: Path, **config: Any) -> ModelDescription:
    with loaded(PyTorchBackend, case(file, **config)) as model:
        return model.description


def answer(case: Case) -> Answer:
    with loaded(PyTorchBackend, case) as model:
        (only,) = model.run(model.batch([case.inputs]))
    return only


def refused(case: Case) -> InferError:
    with pytest.raises(InferError) as caught, loaded(PyTorchBackend, case):
        pass
    return caught.value


class Nested(torch.nn.Module):
    """Arguments and results in containers, with a keyword and a constant."""

    def forward(self, X: torch.Tensor, pair: dict, scale: int, *, plus: torch.Tensor) -> dict:
        y = X * scale + plus[:, None]
        return {"y": y, "parts": (y.sum(-1), pair["b"] - pair["a"])}


def nested(file: Path) -> Path:
    pair = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    rows = {0: models.BATCH}
    dynamic = {"X": rows, "pair": {"a": rows, "b": rows}, "scale": None, "plus": rows}
    return models.save_exported(file, Nested(), ONES, pair, 3, plus=torch.ones(2), dynamic=dynamic)


NESTED = {
    "X": np.array([[1, 2, 3, 4]], np.float32),
    "pair_a": np.ones((1, 3), np.float32),
    "pair_b": np.full((1, 3), 5, np.float32),
    "plus": np.array([10], np.float32),
}


def test_a_program_tells_its_inputs_and_outputs(file: Path) -> None:
    nested(file)
    found = described(file)
    assert found.inputs == (
        TensorSpec("X", "FP32", (-1, 4)),
        TensorSpec("pair_a", "FP32", (-1, 3)),
        TensorSpec("pair_b", "FP32", (-1, 3)),
        TensorSpec("plus", "FP32", (-1,)),
    )
    assert found.outputs == (
        TensorSpec("y", "FP32", (-1, 4)),
        TensorSpec("OUTPUT__1", "FP32", (-1,)),
        TensorSpec("OUTPUT__2", "FP32", (-1, 3)),
    )
    assert found.batching is True
    assert found.concurrency is None


NAMES = {
    "own": (["X", "pair_a", "pair_b", "plus"], ["y", "OUTPUT__1", "OUTPUT__2"]),
    "paths": (
        ["ARGS[0]", "ARGS[1][a]", "ARGS[1]['b']", "KWARGS[plus]"],
        ["RESULT[y]", "RESULT[parts][0]", "RESULT['parts'][1]"],
    ),
    "indices": ([f"INPUT__{i}" for i in range(4)], [f"OUTPUT__{i}" for i in range(3)]),
    "order": (["p", "q", "r", "s"], ["t", "u", "v"]),
}


@pytest.mark.parametrize("kind", NAMES)
def test_inputs_and_outputs_may_be_called_in_several_ways(file: Path, kind: str) -> None:
    nested(file)
    inputs, outputs = NAMES[kind]
    scalar = {"dims": [1], "reshape": {"shape": []}}
    tensors = [io(inputs[0], "FP32", 4), io(inputs[1], "FP32", 3), io(inputs[2], "FP32", 3), io(inputs[3]) | scalar]
    results = [io(outputs[0], "FP32", 4), io(outputs[1]) | scalar, io(outputs[2], "FP32", 3)]
    example = dict(zip(inputs, NESTED.values(), strict=True))
    of_model = case(file, tensors[::-1] if kind != "order" else tensors, results, example, rows=8)
    with loaded(PyTorchBackend, of_model) as model:
        assert {spec.name for spec in model.description.inputs} == set(inputs)
        assert {spec.name for spec in model.description.outputs} == set(outputs)
    got = answer(of_model).outputs
    assert [got[name].tolist() for name in outputs] == [[[13, 16, 19, 22]], [70], [[4, 4, 4]]]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (["X", "INPUT__9"], "'INPUT__9' would be number 9 of the program's inputs, which are: X, pair_a, pair_b, plus"),
        (["X", "INPUT__0"], "'X' and 'INPUT__0' are both X of the program's inputs"),
    ],
)
def test_names_that_fit_no_input_are_refused(file: Path, inputs: list[str], said: str) -> None:
    nested(file)
    assert refused(case(file, [io(name) for name in inputs])).message == said


def test_a_program_may_have_fixed_shapes_and_then_does_not_batch(file: Path) -> None:
    models.save_exported(file, models.AddSub(), ONES, ONES)
    found = described(file)
    assert found.inputs[0] == TensorSpec("INPUT0", "FP32", (2, 4))
    assert found.batching is False


def test_first_dimensions_that_vary_apart_are_no_batch(file: Path) -> None:
    class Outer(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a[:, None] * b[None, :]

    dynamic = {"a": {0: torch.export.Dim("p")}, "b": {0: torch.export.Dim("q")}}
    models.save_exported(file, Outer(), torch.ones(2), torch.ones(3), dynamic=dynamic)
    assert described(file).batching is False


def at_most(rows: int, file: Path) -> Path:
    dim = torch.export.Dim("b", max=rows)
    return models.save_exported(file, models.Identity(), ONES, dynamic={"INPUT0": {0: dim}})


@pytest.mark.parametrize(
    ("default", "proposed"), [({}, {"max_batch_size": 3}), ({"default-max-batch-size": "2"}, None)]
)
def test_a_program_for_fewer_rows_than_usual_says_how_many(file: Path, default: dict, proposed: dict | None) -> None:
    of_model = case(at_most(3, file))
    with loaded(PyTorchBackend, Case(of_model.model_directory, of_model.config, {}, backend_config=default)) as model:
        assert model.description.batching is True
        assert model.description.config == proposed


def test_more_rows_than_a_program_takes_are_refused_at_load(file: Path) -> None:
    error = refused(case(at_most(3, file), rows=8))
    assert error.message == "model 'm': the program takes up to 3 rows, max_batch_size is 8"


def test_what_a_program_does_not_take_is_told_in_its_own_terms(file: Path) -> None:
    models.save_exported(file, models.Identity(), ONES, dynamic={"INPUT0": {0: models.BATCH}})
    got = answer(case(file, [io("x", "FP32", -1, -1)], [io("y", "FP32", -1, -1)], {"x": np.ones((2, 5), np.float32)}))
    assert got.code == "INTERNAL"
    assert "INPUT0.size()[1] == 4" in got.message


def test_a_number_may_be_an_input_and_an_output(file: Path) -> None:
    class Repeated(torch.nn.Module):
        def forward(self, x: torch.Tensor, times: int) -> tuple:
            return x * times, times + 1

    dynamic = {"x": None, "times": torch.export.Dim.DYNAMIC}
    models.save_exported(file, Repeated(), torch.ones(2), 3, dynamic=dynamic)
    found = described(file)
    assert found.inputs[1] == TensorSpec("times", "INT64", ())
    scalar = {"dims": [1], "reshape": {"shape": []}}
    example = {"x": np.array([1, 2], np.float32), "times": np.array(5)}
    of_model = case(
        file, [io("x", "FP32", 2), io("times", "INT64") | scalar], [io("y"), io("n", "INT64") | scalar], example
    )
    got = answer(of_model).outputs
    assert (got["y"].tolist(), got["n"].tolist()) == ([5, 10], 6)


def test_a_program_with_a_state_gets_a_process_for_each_instance(file: Path) -> None:
    models.save_exported(file, models.Counter(), torch.ones(2))
    of_model = case(file, [io("x", "FP32", 2)], [io("y", "FP32", 2)], {"x": np.zeros(2, np.float32)})
    with loaded(PyTorchBackend, of_model) as model:
        assert model.description.concurrency == 1
        got = [model.run(model.batch([of_model.inputs]))[0].outputs["y"].tolist() for _ in range(2)]
    assert got == [[1, 1], [2, 2]]


def test_a_program_that_writes_to_its_own_results_keeps_no_state(file: Path) -> None:
    class InPlace(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.relu(self.linear(x), inplace=True)[:, :2].add_(1)

    models.save_exported(file, InPlace(), ONES)
    with loaded(PyTorchBackend, case(file)) as model:
        assert model.description.concurrency is None
        assert not model.backend._program.written


def test_a_program_that_writes_through_a_view_of_its_input_is_found_out(file: Path) -> None:
    class Through(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.reshape(-1)[:2].zero_()
            return x + 1

    models.save_exported(file, Through(), ONES)
    with loaded(PyTorchBackend, case(file)) as model:
        assert model.backend._program.written == ["x"]


def test_an_input_that_the_program_overwrites_is_its_own_copy_where_others_see_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.save_exported(file, models.WritesInput(), torch.ones(2))
    of_model = case(file, [io("INPUT0", "FP32", 2)], [io("y", "FP32", 2)], {"INPUT0": np.ones(2, np.float32)})
    with loaded(PyTorchBackend, of_model) as model:
        batch = model.batch([of_model.inputs])
        monkeypatch.setattr(type(batch), "owns", lambda *_: False)
        (got,) = model.run(batch)
        assert got.outputs["y"].tolist() == [2, 2]
        assert batch.inputs["INPUT0"].tolist() == [1, 1]


def test_a_program_may_be_compiled_when_it_is_loaded(file: Path) -> None:
    models.save_exported(file, models.Perceptron(), torch.ones(2, 8), dynamic={"x": {0: models.BATCH}})
    compiling = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": {"string_value": '{"backend": "aot_eager"}'}}
    x = np.ones((1, 8), np.float32)
    plain = answer(case(file, [io("x", "FP32", 8)], [io("y", "FP32", 4)], {"x": x}, rows=4))
    compiled = answer(case(file, [io("x", "FP32", 8)], [io("y", "FP32", 4)], {"x": x}, rows=4, parameters=compiling))
    np.testing.assert_allclose(compiled.outputs["y"], plain.outputs["y"], rtol=1e-6)


def test_an_optional_input_is_refused(file: Path) -> None:
    models.save_exported(file, models.Identity(), ONES)
    error = refused(case(file, [io("INPUT0", "FP32", 2, 4, optional=True)]))
    assert error.message == "input 'INPUT0' is optional in the configuration, but a program of torch.export needs it"


# --- Compiled packages: machine code for this machine, made once for all tests ---------------------------------------


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> dict:
        return {"y": x * by[:, None], "n": by + 1}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs g++ to compile a package")
    path = tmp_path_factory.mktemp("package") / "scaled.pt2"
    rows = {0: models.BATCH}
    return models.save_compiled(path, Scaled(), ONES, by=torch.ones(2), dynamic={"x": rows, "by": rows})


@pytest.fixture
def compiled(package: Path, file: Path) -> Path:
    file.parent.mkdir()
    shutil.copyfile(package, file)
    return file


def of_package(file: Path, inputs: tuple[str, str], outputs: tuple[str, str], rows: int = 8) -> Case:
    number = {"dims": [1], "reshape": {"shape": []}} if rows else {"dims": [-1]}
    dims = (4,) if rows else (-1, 4)
    example = dict(zip(inputs, (np.ones((1, 4), np.float32), np.array([3], np.float32)), strict=True))
    tensors = [io(inputs[0], "FP32", *dims), io(inputs[1]) | number]
    return case(file, tensors, [io(outputs[0], "FP32", *dims), io(outputs[1]) | number], example, rows)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (("ARGS[0]", "KWARGS[by]"), ("RESULT[y]", "RESULT['n']")),
        (("INPUT__0", "INPUT__1"), ("OUTPUT__0", "OUTPUT__1")),
        (("ARGS[0]", "by"), ("y", "n")),
        (("p", "q"), ("r", "s")),
    ],
)
def test_a_compiled_package_passes_under_every_way_to_name(compiled: Path, inputs: tuple, outputs: tuple) -> None:
    of_model = of_package(compiled, inputs, outputs)
    check_backend(PyTorchBackend, of_model)
    got = answer(of_model).outputs
    assert [got[name].tolist() for name in outputs] == [[[3] * 4], [4]]


def test_a_compiled_package_gets_a_process_for_each_instance(compiled: Path) -> None:
    with loaded(PyTorchBackend, of_package(compiled, ("a", "b"), ("c", "d"))) as model:
        assert model.description.concurrency == 1
        assert model.description.inputs == ()


def test_a_compiled_package_looks_at_the_shapes_of_what_it_is_given(compiled: Path) -> None:
    of_model = of_package(compiled, ("a", "b"), ("c", "d"), rows=0)
    example = {"a": np.ones((2, 5), np.float32), "b": np.ones(2, np.float32)}
    got = answer(Case(of_model.model_directory, of_model.config, example))
    assert got.code == "INTERNAL"
    assert "unmatched dim value at 1, expected: 4, but got: 5" in got.message


def test_a_compiled_package_leaves_no_files_while_it_is_loaded(compiled: Path) -> None:
    before = set(Path("/tmp").glob("aotinductor_*"))
    with loaded(PyTorchBackend, of_package(compiled, ("a", "b"), ("c", "d"))):
        assert set(Path("/tmp").glob("aotinductor_*")) <= before


def test_a_compiled_package_cannot_be_compiled_again(compiled: Path) -> None:
    of_model = of_package(compiled, ("a", "b"), ("c", "d"))
    of_model.config["parameters"] = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": {"string_value": "{}"}}
    assert "is compiled already" in refused(of_model).message


def test_a_package_for_another_device_is_refused(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = torch._C._aoti.AOTIModelPackageLoader
    monkeypatch.setattr(loader, "load_metadata_from_package", lambda *_: {"AOTI_DEVICE_KEY": "cuda"})
    error = refused(of_package(compiled, ("a", "b"), ("c", "d")))
    assert error.code is ErrorCode.UNSUPPORTED
    assert "was compiled for 'cuda', the instances are on 'cpu'" in error.message


def test_files_are_told_apart_by_what_is_in_them(tmp_path: Path, package: Path) -> None:
    script = models.save_script(tmp_path / "a", models.Identity())
    program = models.save_exported(tmp_path / "b", models.Identity(), ONES)
    weights = models.save_weights(tmp_path / "c", models.Perceptron())
    torch.save({}, tmp_path / "d", _use_new_zipfile_serialization=False)
    assert content_of(script) == (Content.TORCHSCRIPT, ())
    assert content_of(program) == (Content.EXPORTED, ())
    assert content_of(weights) == (Content.WEIGHTS, ())
    assert content_of(tmp_path / "d") == (Content.WEIGHTS, ())
    assert content_of(package) == (Content.COMPILED, ("model",))
