"""Scalars, completion, labels and configurations given with a load call, through a real server and its doors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

import onnx_models
from clients import DOORS, ask, call, infer
from harness import RunningServer, running
from repositories import add_identity, add_onnx

PAIR = [("INPUT0", "input"), ("OUTPUT0", "output")]
SCALAR = "dims: [ 1 ] reshape: { shape: [ ] }"


def tensors(dims: str, output_dims: str = "") -> str:
    return "\n".join(
        f'{kind} [ {{ name: "{name}" data_type: TYPE_FP32 {dims if kind == "input" else output_dims or dims} }} ]'
        for name, kind in PAIR
    )


def give_labels(folder: Path, filename: str) -> None:
    config = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(config.replace("output [ {", f'output [ {{ label_filename: "{filename}"'))


def item_plus_one(path: Path) -> object:
    """OUTPUT0 [batch] = INPUT0 [batch] + 1: one number an item in, one out."""
    return onnx_models.save(
        path,
        [onnx.helper.make_node("Add", ["INPUT0", "one"], ["OUTPUT0"])],
        [onnx_models.tensor("INPUT0", ("batch",))],
        [onnx_models.tensor("OUTPUT0", ("batch",))],
        [onnx.numpy_helper.from_array(np.array([1], np.float32), "one")],
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_onnx(repository, "scalar", onnx_models.scalar)
    add_onnx(repository, "scalar_written", onnx_models.scalar, config=tensors(SCALAR))
    add_onnx(
        repository,
        "item_mean",
        onnx_models.item_mean,
        config="max_batch_size: 4 dynamic_batching { } " + tensors("dims: [ -1 ]", SCALAR),
    )
    add_onnx(repository, "item_mean_bare", onnx_models.item_mean)
    add_onnx(
        repository, "item_scalar", item_plus_one, config="max_batch_size: 4 dynamic_batching { } " + tensors(SCALAR)
    )
    add_onnx(repository, "bare", onnx_models.identity)
    add_onnx(repository, "sized", onnx_models.identity, config="max_batch_size: 8")
    add_onnx(repository, "preferring", onnx_models.identity, config="dynamic_batching { preferred_batch_size: [ 2 ] }")
    add_onnx(repository, "full_rank", onnx_models.identity, config="max_batch_size: 0 " + tensors("dims: [ -1, -1 ]"))
    add_onnx(repository, "zero_alone", onnx_models.identity, config="max_batch_size: 0")
    for name, batch in (("labelled", 0), ("labelled_rows", 4)):
        folder = add_identity(repository, name, dims="4", max_batch_size=batch)
        give_labels(folder, "l.txt")
        (folder / "l.txt").write_bytes(b"a\r\nb b\r\n\r\n")
    add_identity(repository, "texts", datatype="STRING", max_batch_size=0)
    with running(repository, "--backend-config=default-max-batch-size=128") as started:
        yield started


# --- Scalars ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["scalar", "scalar_written"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_element_of_rank_0(server: RunningServer, door: str, name: str, shape: tuple[int, ...]) -> None:
    outputs = ask(server, door, name, {"INPUT0": np.full(shape, 4.5, np.float32)})
    np.testing.assert_array_equal(outputs["OUTPUT0"], np.array([5.5], np.float32))


def test_a_scalar_of_two_elements_is_refused_with_what_fits(server: RunningServer) -> None:
    status, answer = infer(server, "scalar", ("INPUT0", "FP32", [2], [1, 2]))
    assert (status, answer["error"]) == (400, "input 'INPUT0' has the shape [2], model 'scalar' expects [1]")


@pytest.mark.parametrize("door", DOORS)
def test_one_number_an_item_out_of_a_batch(server: RunningServer, door: str) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    outputs = ask(server, door, "item_mean", {"INPUT0": values})
    np.testing.assert_array_equal(outputs["OUTPUT0"], values.mean(axis=1, keepdims=True))


def test_one_number_an_item_is_found_without_a_configuration(server: RunningServer) -> None:
    _, config = call(server, "/v2/models/item_mean_bare/config")
    assert (config["output"][0]["dims"], config["output"][0]["reshape"]) == ([1], {"shape": []})
    outputs = ask(server, "grpc", "item_mean_bare", {"INPUT0": np.array([[1, 3], [5, 7]], np.float32)})
    np.testing.assert_array_equal(outputs["OUTPUT0"], np.array([[2], [6]], np.float32))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dims", [(), (1,)])
def test_one_number_an_item_into_a_batch(server: RunningServer, door: str, dims: tuple[int, ...]) -> None:
    values = np.array([1, 2, 3], np.float32).reshape(3, *dims)
    outputs = ask(server, door, "item_scalar", {"INPUT0": values})
    np.testing.assert_array_equal(outputs["OUTPUT0"], np.array([[2], [3], [4]], np.float32))


def test_no_dims_at_all_are_refused_with_the_way_to_write_a_scalar(tmp_path: Path) -> None:
    add_onnx(tmp_path, "m", onnx_models.scalar, config=tensors("dims: [ ]"))
    with running(tmp_path, "--exit-on-error=false", ready=False) as server:
        server.wait_for_log("a scalar is written dims: [ 1 ] reshape: { shape: [ ] }")
        assert server.status("/v2/models/m/ready") == 503


# --- What completion switches on ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "max_batch_size", "batcher", "dims"),
    [
        ("bare", 128, {"preferred_batch_size": [128]}, [-1]),
        ("sized", 8, None, [-1]),
        ("preferring", 128, {"preferred_batch_size": [2]}, [-1]),
        ("full_rank", 0, None, [-1, -1]),
        ("zero_alone", 0, None, [-1, -1]),
    ],
)
def test_what_the_user_wrote_wins(
    server: RunningServer, name: str, max_batch_size: int, batcher: dict | None, dims: list[int]
) -> None:
    _, config = call(server, f"/v2/models/{name}/config")
    assert config["max_batch_size"] == max_batch_size
    assert config["input"][0]["dims"] == config["output"][0]["dims"] == dims
    found = config.get("dynamic_batching")
    assert (found if batcher is None else {key: found[key] for key in batcher}) == batcher


# --- Labels -------------------------------------------------------------------------------------------------------


def classes(server: RunningServer, model: str, k: object, shape: list[int], data: list) -> tuple[int, dict]:
    outputs = [{"name": "OUTPUT0", "parameters": {"classification": k}}]
    datatype = "BYTES" if model == "texts" else "FP32"
    return infer(server, model, ("INPUT0", datatype, shape, data), outputs=outputs)


ROW = [0.1, 0.9, 0.2, 0.9]
RANKED = ["0.900000:1:b b", "0.900000:3", "0.200000:2", "0.100000:0:a"]


@pytest.mark.parametrize(("k", "count"), [(1, 1), (3, 3), (4, 4), (100, 4)])
def test_the_top_classes_have_their_labels_and_ties_go_by_index(server: RunningServer, k: int, count: int) -> None:
    status, answer = classes(server, "labelled", k, [4], ROW)
    assert status == 200, answer
    assert answer["outputs"] == [{"name": "OUTPUT0", "datatype": "BYTES", "shape": [count], "data": RANKED[:count]}]


def test_each_row_of_a_batch_has_its_top_classes(server: RunningServer) -> None:
    _, answer = classes(server, "labelled_rows", 3, [2, 4], [*ROW, 4, 3, 2, 1])
    assert answer["outputs"][0]["shape"] == [2, 3]
    assert answer["outputs"][0]["data"] == [*RANKED[:3], "4.000000:0:a", "3.000000:1:b b", "2.000000:2"]


def test_the_top_classes_over_grpc(server: RunningServer) -> None:
    outputs = ask(server, "grpc", "labelled_rows", {"INPUT0": np.array([ROW], np.float32)}, OUTPUT0=2)
    assert outputs["OUTPUT0"].tolist() == [[text.encode() for text in RANKED[:2]]]


@pytest.mark.parametrize("k", [0, -1, 1.5, "3", True, None, 2**63])
def test_a_count_of_classes_that_is_none_is_refused(server: RunningServer, k: object) -> None:
    status, answer = classes(server, "labelled", k, [4], ROW)
    assert status == 400
    assert "classification" in answer["error"]


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_of_classes_below_one_is_refused_over_grpc(server: RunningServer, count: int) -> None:
    tensor = grpcclient.InferInput("INPUT0", [4], "FP32")
    tensor.set_data_from_numpy(np.array(ROW, np.float32))
    output = grpcclient.InferRequestedOutput("OUTPUT0")
    output._output.parameters["classification"].int64_param = count
    with grpcclient.InferenceServerClient(server.grpc) as client, pytest.raises(Exception, match="classification"):
        client.infer("labelled", [tensor], outputs=[output])


def test_strings_cannot_be_classified(server: RunningServer) -> None:
    status, answer = classes(server, "texts", 3, [2], ["a", "b"])
    assert (status, answer["error"]) == (400, "output 'OUTPUT0' of datatype BYTES cannot be classified")


def test_a_missing_label_file_is_an_error_of_the_load(tmp_path: Path) -> None:
    folder = add_identity(tmp_path, "m")
    give_labels(folder, "none.txt")
    with running(tmp_path, "--exit-on-error=false", ready=False) as server:
        server.wait_for_log("output[0].label_filename: there is no file 'none.txt'")


def test_a_folder_without_a_version_is_told_what_a_version_is(tmp_path: Path) -> None:
    (tmp_path / "m" / "v1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "identity"')
    with running(tmp_path, "--exit-on-error=false", ready=False) as server:
        server.wait_for_log("the model's folder holds no version, which is a folder named by a number")


# --- A configuration in a load call -------------------------------------------------------------------------------

VERSIONS = {1: 1.0, 2: 2.0}


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("explicit")
    for version in VERSIONS:
        add_onnx(repository, "m", lambda path: onnx_models.mlp(path, 4, 8, 3, seed=version), version)  # noqa: B023
    with running(repository, "--model-control-mode=explicit", "--load-model=m") as started:
        yield started


def load(server: RunningServer, config: object) -> tuple[int, dict]:
    return call(server, "/v2/repository/models/m/load", {"parameters": {"config": config}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (json.dumps({"parameters": {"key": "A", "value": {"string_value": "b"}}}), "parameters."),
        (json.dumps({"input": [{"name": "x", "data_type": "FP32", "dims": [4]}]}), "input[0].data_type"),
        (json.dumps({"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": "3"}]}), "input[0].dims"),
        (json.dumps({"parameter": {"A": {"string_value": "b"}}}), "parameter"),
        (json.dumps({"max_batch_size": 1.5}), "max_batch_size"),
        (json.dumps({"version_policy": {"specific": {"versions": [9]}}}), "version"),
        ({"backend": "onnxruntime"}, "config"),
        ("{", "config"),
        ("[]", "config"),
        ("", "config"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named_and_harms_nothing(
    explicit: RunningServer, config: object, words: str
) -> None:
    before = infer(explicit, "m", ("x", "FP32", [1, 4], [1, 2, 3, 4]))
    status, answer = load(explicit, config)
    assert status == 400
    assert words in answer["error"]
    assert infer(explicit, "m", ("x", "FP32", [1, 4], [1, 2, 3, 4])) == before
    assert before[0] == 200
    assert explicit.status("/v2/models/m/ready") == 200


def test_the_error_of_a_map_written_as_key_and_value_tells_how_it_is_written(explicit: RunningServer) -> None:
    _, answer = load(explicit, json.dumps({"parameters": {"key": "A", "value": {"string_value": "b"}}}))
    assert "parameters.A.string_value" in answer["error"]


def test_a_version_policy_alone_picks_the_version_and_the_rest_is_completed(explicit: RunningServer) -> None:
    latest = infer(explicit, "m", ("x", "FP32", [1, 4], [1, 2, 3, 4]))[1]
    assert latest["model_version"] == "2"
    status, answer = load(explicit, json.dumps({"version_policy": {"specific": {"versions": [1]}}}))
    assert (status, answer) == (200, None)
    first = infer(explicit, "m", ("x", "FP32", [1, 4], [1, 2, 3, 4]))[1]
    assert first["model_version"] == "1"
    assert first["outputs"] != latest["outputs"]
    _, config = call(explicit, "/v2/models/m/config")
    assert (config["backend"], config["input"][0]["name"]) == ("onnxruntime", "x")
    assert call(explicit, "/v2/repository/models/m/load", {})[0] == 200
    assert infer(explicit, "m", ("x", "FP32", [1, 4], [1, 2, 3, 4]))[1] == latest


def test_a_stock_client_loads_with_a_configuration(explicit: RunningServer) -> None:
    config = json.dumps({"version_policy": {"all": {}}})
    with (
        httpclient.InferenceServerClient(explicit.http) as http,
        grpcclient.InferenceServerClient(explicit.grpc) as grpc,
    ):
        grpc.load_model("m", config=config)
        assert http.get_model_metadata("m")["versions"] == ["1", "2"]
        http.load_model("m")
        assert http.get_model_metadata("m")["versions"] == ["2"]
