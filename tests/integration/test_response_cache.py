"""The response cache through a real server and both doors: each answer is right, whoever asked before and for what."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from clients import DOORS, ask, call, infer
from ensembles import Step, add_ensemble
from harness import RunningServer, running
from redis_servers import impostor, running_redis
from repositories import add_decoupled, add_identity, add_onnx, add_sample, identity_config
from sequence_models import accumulator, accumulator_config

CACHED = "response_cache { enable: true }"
PAIR = """
backend: "identity" max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
SIZE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "flat", dims="-1", max_batch_size=0, extra=CACHED)
    add_identity(repository, "square", dims="-1, -1", max_batch_size=0, extra=CACHED)
    add_identity(repository, "texts", datatype="STRING", extra=CACHED)
    add_identity(repository, "echo", extra=CACHED, echo_parameters="true")
    add_identity(repository, "uncached")
    ordered = "dynamic_batching { preserve_ordering: true }"
    add_identity(repository, "ordered", extra=f"{CACHED} {ordered} instance_group {{ count: 2 }}")
    digits = add_sample(repository, "digits")
    with (digits / "config.pbtxt").open("a") as config:
        config.write(CACHED)
    (repository / "pair" / "1").mkdir(parents=True)
    (repository / "pair" / "config.pbtxt").write_text(PAIR + CACHED)
    with running(repository, f"--cache-config=local,size={SIZE}", "--metrics-config=summary_latencies=true") as started:
        yield started


def stats(server: RunningServer, model: str) -> dict[str, int]:
    status, body = call(server, f"/v2/models/{model}/stats")
    assert status == 200
    (entry,) = body["model_stats"]
    counts = {name: value["count"] for name, value in entry["inference_stats"].items()}
    return {**counts, "executions": entry["execution_count"], "inferences": entry["inference_count"]}


def metric(server: RunningServer, name: str) -> float:
    (line,) = [line for line in server.metrics().splitlines() if line.startswith(f"{name} ")]
    return float(line.rsplit(" ", 1)[1])


def row(*values: float, name: str = "INPUT0") -> tuple[str, str, list[int], list[float]]:
    return name, "FP32", [len(values)], list(values)


@pytest.mark.parametrize("door", DOORS)
def test_the_second_answer_is_the_first_and_costs_no_execution(server, door):
    before = stats(server, "square")
    array = np.arange(6, dtype=np.float32).reshape(2, 3) + DOORS.index(door)
    first, second = (ask(server, door, "square", {"INPUT0": array})["OUTPUT0"] for _ in range(2))
    np.testing.assert_array_equal(first, array)
    np.testing.assert_array_equal(second, array)
    after = stats(server, "square")
    grown = {name: after[name] - before[name] for name in after}
    assert grown == {
        "success": 2,
        "fail": 0,
        "queue": 2,
        "compute_input": 1,
        "compute_infer": 1,
        "compute_output": 1,
        "cache_hit": 1,
        "cache_miss": 1,
        "executions": 1,
        "inferences": 1,
    }


@pytest.mark.parametrize("door", DOORS)
def test_the_same_bytes_in_another_shape_are_another_request(server, door):
    array = np.arange(6, dtype=np.float32).reshape(2, 3) + 100
    for shape in ([2, 3], [3, 2], [6, 1], [2, 3]):
        answer = ask(server, door, "square", {"INPUT0": array}, shapes={"INPUT0": shape})
        assert list(answer["OUTPUT0"].shape) == shape


def test_all_outputs_one_of_them_and_another_are_each_right(server):
    inputs = [row(1, 2), row(3, 4, 5, name="INPUT1")]
    expected = {"OUTPUT0": [1, 2], "OUTPUT1": [3, 4, 5]}
    for wanted in (None, ["OUTPUT0"], ["OUTPUT1"], ["OUTPUT1", "OUTPUT0"], None):
        fields = {"outputs": [{"name": name} for name in wanted]} if wanted else {}
        _, body = infer(server, "pair", *inputs, **fields)
        assert {output["name"]: output["data"] for output in body["outputs"]} == {
            name: expected[name] for name in wanted or expected
        }


def test_inputs_in_another_order_are_the_same_request(server):
    before = stats(server, "pair")["cache_hit"]
    inputs = [row(10, 20), row(30, name="INPUT1")]
    bodies = [infer(server, "pair", *order)[1] for order in (inputs, inputs[::-1])]
    assert bodies[0]["outputs"] == bodies[1]["outputs"]
    assert stats(server, "pair")["cache_hit"] == before + 1


def test_doors_share_what_is_kept(server):
    array = np.array([[7.0, 8.0]], np.float32)
    before = stats(server, "square")
    for door in DOORS:
        np.testing.assert_array_equal(ask(server, door, "square", {"INPUT0": array})["OUTPUT0"], array)
    after = stats(server, "square")
    assert (after["cache_hit"] - before["cache_hit"], after["executions"] - before["executions"]) == (2, 1)


def test_strings_come_back_whole(server):
    array = np.array([["", "zwölf".encode(), b"\x00\xff"]], object)
    for door in ("http binary", "grpc", "grpc"):
        answer = ask(server, door, "texts", {"INPUT0": array})["OUTPUT0"]
        assert answer.tolist() == [[b"", "zwölf".encode(), b"\x00\xff"]]


def test_classes_are_made_anew_of_a_kept_answer(server):
    image = np.zeros((1, 64), np.float32)
    image[0, 20:40] = 16
    (name,) = [tensor["name"] for tensor in call(server, "/v2/models/digits")[1]["inputs"]]
    before = stats(server, "digits")
    scores = [ask(server, "http binary", "digits", {name: image}, scores=count)["scores"] for count in (1, 3, 10)]
    assert [len(found.reshape(-1)) for found in scores] == [1, 3, 10]
    assert scores[2].reshape(-1)[0] == scores[0].reshape(-1)[0]
    plain = ask(server, "grpc", "digits", {name: image})["scores"]
    assert plain.shape == (1, 10)
    assert plain.dtype == np.float32
    after = stats(server, "digits")
    assert after["cache_hit"] - before["cache_hit"] >= 2


def test_parameters_reach_the_backend_and_its_answer_comes_back_with_them(server):
    tensor = ("INPUT0", "FP32", [1, 1], [1])
    for parameters in ({"a": 1}, {"a": 2}, {"a": 1}, {"a": 1, "priority": 3}, {"a": 1, "timeout": 1_000_000}):
        _, body = infer(server, "echo", tensor, parameters=parameters)
        assert body["parameters"] == {"a": parameters["a"]}
    assert stats(server, "echo")["executions"] == 2


def test_ids_are_those_of_the_requests(server):
    for name in ("one", "two", "", "three"):
        fields = {"id": name} if name else {}
        assert infer(server, "flat", row(5), **fields)[1].get("id", "") == name


def test_errors_are_not_kept(server):
    tensor = ("INPUT0", "FP32", [1, 1], [77])
    before = stats(server, "echo")
    for _ in range(2):
        status, body = infer(server, "echo", tensor, parameters={"fail": "broken"})
        assert (status, body["error"]) == (500, "broken")
    after = stats(server, "echo")
    assert (after["fail"] - before["fail"], after["cache_hit"] - before["cache_hit"]) == (2, 0)


def test_a_model_without_the_cache_is_executed_each_time(server):
    for _ in range(3):
        infer(server, "uncached", ("INPUT0", "FP32", [1, 1], [1]))
    found = stats(server, "uncached")
    assert (found["executions"], found["cache_hit"], found["cache_miss"]) == (3, 0, 0)
    assert 'nv_cache_num_hits_per_model{model="uncached"' not in server.metrics()


def test_an_answer_larger_than_the_cache_is_given_and_not_kept(server):
    array = np.arange(SIZE // 4 + 100, dtype=np.float32)
    before = metric(server, "headrace_cache_skipped_total")
    for _ in range(2):
        np.testing.assert_array_equal(ask(server, "http binary", "flat", {"INPUT0": array})["OUTPUT0"], array)
    assert metric(server, "headrace_cache_skipped_total") == before + 2


def test_a_large_answer_is_kept_too(server):
    array = np.arange(100_000, dtype=np.float32)
    before = stats(server, "flat")["cache_hit"]
    for door in ("http binary", "grpc"):
        np.testing.assert_array_equal(ask(server, door, "flat", {"INPUT0": array})["OUTPUT0"], array)
    assert stats(server, "flat")["cache_hit"] == before + 1


def test_random_inputs_fill_the_cache_and_slow_nothing_down(server):
    client = httpclient.InferenceServerClient(server.http)
    random = np.random.default_rng(1)

    def once() -> None:
        array = random.random(256, np.float32)
        tensor = httpclient.InferInput("INPUT0", [256], "FP32")
        tensor.set_data_from_numpy(array)
        np.testing.assert_array_equal(client.infer("flat", [tensor]).as_numpy("OUTPUT0"), array)

    times = []
    for _ in range(2000):
        started = time.perf_counter()
        once()
        times.append(time.perf_counter() - started)
    client.close()
    assert metric(server, "nv_cache_num_evictions") > 500
    assert metric(server, "nv_cache_util") <= 1
    assert np.median(times[-500:]) < 5 * np.median(times[:500])


def test_answers_keep_the_order_of_a_stream_where_it_is_preserved(server):
    """One stream, of requests some of which the cache answers at once."""
    answers: list = []
    done = []
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: done.append(error) if error else answers.append(result))
        for index in range(40):
            array = np.full((1, 2), index % 5, np.float32)
            tensor = grpcclient.InferInput("INPUT0", [1, 2], "FP32")
            tensor.set_data_from_numpy(array)
            client.async_stream_infer("ordered", [tensor], request_id=str(index))
        client.stop_stream()
    assert done == []
    assert [answer.get_response().id for answer in answers] == [str(index) for index in range(40)]
    assert [answer.as_numpy("OUTPUT0")[0, 0] for answer in answers] == [index % 5 for index in range(40)]


def test_equal_requests_at_once_are_each_answered(server):
    with ThreadPoolExecutor(16) as pool:
        bodies = list(pool.map(lambda index: infer(server, "flat", row(index % 3, 42))[1]["outputs"], range(200)))
    assert [body[0]["data"] for body in bodies] == [[index % 3, 42] for index in range(200)]


def test_metrics_tell_of_the_cache_and_of_each_model_that_uses_it(server):
    infer(server, "flat", row(1234))
    infer(server, "flat", row(1234))
    found = stats(server, "flat")
    text = server.metrics()
    assert f'nv_cache_num_hits_per_model{{model="flat",version="1"}} {float(found["cache_hit"])}' in text
    assert f'nv_cache_num_misses_per_model{{model="flat",version="1"}} {float(found["cache_miss"])}' in text
    assert 'nv_cache_hit_summary_per_model{model="flat",quantile="0.5",version="1"}' in text
    assert 'nv_inference_request_summary_us{model="flat"' not in text
    assert 'nv_inference_request_summary_us{model="uncached"' in text
    lookups, hits = metric(server, "nv_cache_num_lookups"), metric(server, "nv_cache_num_hits")
    assert lookups == hits + metric(server, "nv_cache_num_misses")
    assert metric(server, "nv_cache_lookup_duration") > 0
    assert metric(server, "nv_cache_insertion_duration") > 0


def test_a_decoupled_model_whose_answers_should_be_kept_is_refused_at_load(tmp_path):
    folder = add_decoupled(tmp_path, "m")
    with (folder / "config.pbtxt").open("a") as config:
        config.write(f"\n{CACHED}\n")
    with running(
        tmp_path, "--model-control-mode=explicit", f"--cache-config=local,size={SIZE}", "--exit-on-error=false"
    ) as server:
        status, body = call(server, "/v2/repository/models/m/load", {})
        assert status == 400
        assert "the answers of a decoupled model cannot be kept" in body["error"]


def test_a_new_version_and_a_reloaded_one_answer_for_themselves(tmp_path):
    """The answer of a version that is gone is nobody's answer, though it was kept under the same name and number."""
    add_identity(tmp_path, "m", extra=CACHED, wrong_shape="false")
    with running(
        tmp_path, "--model-control-mode=explicit", "--load-model=m", "--cache-config=local,size=100000"
    ) as server:
        tensor = ("INPUT0", "FP32", [1, 1], [1])
        for _ in range(2):
            assert infer(server, "m", tensor)[0] == 200
        config = identity_config("m", extra=CACHED, fail="the new one")
        (tmp_path / "m" / "config.pbtxt").write_text(config)
        assert call(server, "/v2/repository/models/m/load", {})[0] == 200
        assert infer(server, "m", tensor)[1]["error"] == "the new one"


def test_servers_that_share_a_redis_share_answers_of_equal_models_only(tmp_path):
    """A second server, or the same after a restart, finds what the first kept, unless the model's content differs."""
    same, changed = tmp_path / "same", tmp_path / "changed"
    add_identity(same, "m", extra=CACHED)
    add_identity(changed, "m", extra=f"{CACHED} metric_tags {{ key: 'a' value: 'b' }}")
    tensor = ("INPUT0", "FP32", [1, 2], [1, 2])
    with running_redis() as redis:
        flag = f"--cache-config=redis,host=127.0.0.1,port={redis.port}"
        hits = []
        for repository in (same, same, changed):
            with running(repository, flag) as server:
                bodies = [infer(server, "m", tensor)[1]["outputs"][0]["data"] for _ in range(2)]
                assert bodies == [[1, 2]] * 2
                hits.append(stats(server, "m")["cache_hit"])
        assert hits[1:] == [2, 1]
        assert hits[0] <= 1, "the insertion may still have been under way"


@pytest.mark.parametrize("what", ["silent", "dies", "garbage in the entries"])
def test_a_redis_that_fails_hurts_no_request(tmp_path, what):
    add_identity(tmp_path, "m", extra=CACHED)
    with impostor(None) as silent, running_redis() as redis:
        port = silent if what == "silent" else redis.port
        flags = f"--cache-config=redis,host=127.0.0.1,port={port},socket_timeout=100"
        with running(tmp_path, flags) as server:
            assert infer(server, "m", ("INPUT0", "FP32", [1, 1], [0]))[0] == 200
            if what == "dies":
                redis.stop()
            elif what == "garbage in the entries":
                keys = _keys(redis)
                for key in keys:
                    redis.cli("SET", f'"{key}"', "garbage")
            started = time.monotonic()
            for index in range(50):
                status, body = infer(server, "m", ("INPUT0", "FP32", [1, 1], [index % 2]))
                assert (status, body["outputs"][0]["data"]) == (200, [index % 2])
            assert time.monotonic() - started < 5
            errors = metric(server, "headrace_cache_errors_total")
            assert errors == 0 if what == "garbage in the entries" else errors >= 1


def _keys(redis) -> list[str]:
    reply = redis.cli("KEYS", "headrace*")
    lines = reply.split(b"\r\n")
    assert lines[0].startswith(b"*"), reply
    return ["".join(f"\\x{byte:02x}" for byte in line) for line in lines[2::2] if line]


def test_a_model_that_wants_the_cache_serves_without_one_and_the_log_says_so(tmp_path: Path):
    add_identity(tmp_path, "m", extra=CACHED)
    with running(tmp_path) as server:
        for _ in range(2):
            assert infer(server, "m", ("INPUT0", "FP32", [1, 1], [1]))[0] == 200
        assert stats(server, "m")["executions"] == 2
        server.wait_for_log("response_cache.enable is not used")
        assert call(server, "/v2/models/m/config")[1]["response_cache"] == {"enable": True}


def test_what_depends_on_earlier_requests_is_not_kept(tmp_path):
    add_onnx(tmp_path, "sums", accumulator, config=accumulator_config())
    add_onnx(tmp_path, "kept", accumulator, config=accumulator_config(extra=CACHED))
    steps = [Step("sums", {"INPUT0": "IN"}, {"OUTPUT0": "OUT"})]
    add_ensemble(tmp_path, "ens", steps, {"IN": "INT32 1"}, {"OUT": "INT32 1"}, extra=f"max_batch_size: 1 {CACHED}")
    with running(tmp_path, "--model-control-mode=explicit", f"--cache-config=local,size={SIZE}") as server:
        for name, text in (
            ("kept", "the answers of a model with sequence_batching depend on what came before"),
            ("ens", "answers of an ensemble with a member that takes sequences depend on what came before"),
        ):
            status, body = call(server, f"/v2/repository/models/{name}/load", {})
            assert status == 400
            assert text in body["error"]


def test_a_hit_is_traced_without_an_execution(tmp_path):
    add_identity(tmp_path / "models", "m", extra=CACHED)
    traces = tmp_path / "traces"
    flags = ("--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", f"--trace-config=triton,file={traces}")
    with running(tmp_path / "models", f"--cache-config=local,size={SIZE}", *flags) as server:
        for name in ("miss", "hit"):
            assert infer(server, "m", ("INPUT0", "FP32", [1, 1], [1]), id=name)[0] == 200
    moments: dict[str, set[str]] = {}
    ids: dict[int, str] = {}
    for entry in json.loads(traces.read_text()):
        if "request_id" in entry:
            ids[entry["id"]] = entry["request_id"]
        for moment in entry.get("timestamps", ()):
            moments.setdefault(ids[entry["id"]], set()).add(moment["name"])
    assert moments["miss"] - moments["hit"] == {
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
    }
    assert {"REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END"} <= moments["hit"]
