"""Spans of a real server in a real OTLP receiver: one connected trace a request, through queue, batch and models."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import grpc
import pytest
import tritonclient.http
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

import scripted_engine
from ensembles import add_ensemble, ident
from harness import running
from headrace_protocol._generated import grpc_service_pb2 as pb
from otlp import Collector
from repositories import add_decoupled, add_identity
from victims import add_caller, add_echo

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
BODY = json.dumps({"id": "mine", "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]})
FAST = "--trace-config=opentelemetry,bsp_schedule_delay=50"
OF_A_MODEL = ("queue", "batch", "compute")


@pytest.fixture(scope="module")
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(tmp_path_factory, collector):
    folder = tmp_path_factory.mktemp("otel")
    repository = folder / "models"
    for name in ("first", "second"):
        add_identity(repository, name, extra="dynamic_batching { }", execute_delay_ms="5")
    add_ensemble(
        repository, "pair", [ident("first", "INPUT0", "between"), ident("second", "between", "OUTPUT0")],
        extra="max_batch_size: 8",
    )  # fmt: skip
    add_decoupled(repository, "stream", responses="3")
    add_echo(repository, "callee", "python")
    add_caller(repository, "caller", "callee")
    scripted_engine.add_model(repository, "writer")
    flags = (
        "--trace-config=mode=opentelemetry", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1000000", FAST,
        f"--trace-config=opentelemetry,url={collector.url}", "--trace-config=opentelemetry,resource=service.name=tested",
        "--trace-config=opentelemetry,resource=deployment.environment.name=ci",
    )  # fmt: skip
    with running(repository, *flags, env=scripted_engine.installed(folder / "site")) as server:
        yield server


@pytest.fixture
def context(request):
    """A caller's context of this test alone."""
    trace = f"{abs(hash(request.node.nodeid)) | 1:032x}"[-32:]
    return trace, f"00-{trace}-{PARENT}-01"


def post(server, path, body, **headers):
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{server.http}{path}", body.encode(), fields)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


def test_a_request_is_one_trace_below_its_callers_span(server, collector, context):
    trace, parent = context
    post(server, "/v2/models/first/infer", BODY, traceparent=parent)
    root = collector.tree(trace, 5)
    assert root.path() == ("InferRequest", "first", *OF_A_MODEL)
    assert root.parent == PARENT
    assert root.kind == 2  # SERVER
    assert root.resource["service.name"] == "tested"
    assert root.resource["deployment.environment.name"] == "ci"
    assert {"HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "INFER_RESPONSE_COMPLETE"} <= set(root.events)
    model = root.child("first")
    assert model.attributes["triton.model_name"] == "first"
    assert model.attributes["triton.model_version"] == 1
    assert model.attributes["triton.request_id"] == "mine"
    batch = model.child("batch")
    assert batch.attributes["headrace.batch.rows"] == 1
    compute = batch.child("compute")
    assert compute.events == ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    assert compute.end - compute.start >= 5_000_000
    for span in (model, batch, compute, model.child("queue")):
        assert root.start <= span.start <= span.end <= root.end


def test_an_ensemble_hangs_together_with_its_members(server, collector, context):
    trace, parent = context
    post(server, "/v2/models/pair/infer", BODY, traceparent=parent)
    root = collector.tree(trace, 10)
    assert root.path() == ("InferRequest", "pair", "first", *OF_A_MODEL, "second", *OF_A_MODEL)
    ensemble = root.child("pair")
    first, second = ensemble.child("first"), ensemble.child("second")
    assert first.end <= second.start
    assert first.attributes["triton.trace_parent_id"] == ensemble.attributes["triton.trace_id"]


def test_a_call_of_a_model_is_below_the_model_that_asks(server, collector, context):
    trace, parent = context
    asked = tritonclient.http.InferenceServerClient(server.http).get_model_metadata("caller")["inputs"]
    inputs = [{**each, "shape": [1, 1], "data": [3]} for each in asked]
    post(server, "/v2/models/caller/infer", json.dumps({"inputs": inputs}), traceparent=parent)
    root = collector.tree(trace, 9)
    caller = root.child("caller")
    assert caller.child("callee").path() == ("callee", *OF_A_MODEL)
    assert caller.child("batch").start <= caller.child("callee").start


def test_a_streams_responses_are_events_of_one_trace(server, collector, context):
    trace, parent = context
    post(server, "/v2/models/stream/generate_stream", json.dumps({"INPUT0": [1.5]}), traceparent=parent)
    root = collector.tree(trace, 5)
    assert root.events.count("INFER_RESPONSE_COMPLETE") == 3


def test_a_call_over_grpc_is_a_trace_too(server, collector, context):
    trace, parent = context
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", pb.ModelInferRequest.SerializeToString
        )
        request = pb.ModelInferRequest(model_name="first")
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1)
        infer(request, metadata=(("traceparent", parent),), timeout=20)
    root = collector.tree(trace, 5)
    assert root.path() == ("InferRequest", "first", *OF_A_MODEL)
    assert {"GRPC_WAITREAD_START", "GRPC_SEND_END"} <= set(root.events)


@pytest.mark.parametrize(("model", "path"), [("first", "infer"), ("pair", "infer"), ("stream", "generate_stream")])
def test_the_histograms_name_the_trace_of_a_request_that_they_counted(server, context, model, path):
    trace, parent = context
    post(server, f"/v2/models/{model}/{path}", BODY if path == "infer" else '{"INPUT0": [1.5]}', traceparent=parent)
    request = urllib.request.Request(
        server.metrics_url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        families = {family.name: family for family in parse_openmetrics(answer.read().decode())}
    found = {}
    for what in ("request", "queue", "compute"):
        family = families[f"headrace_{what}_duration_seconds"]
        of_model = [sample for sample in family.samples if sample.labels["model"] == model and sample.exemplar]
        (sample,) = [sample for sample in of_model if sample.exemplar.labels["trace_id"] == trace]
        assert sample.exemplar.value <= float(sample.labels["le"])
        assert abs(float(sample.exemplar.timestamp) - time.time()) < 60
        found[what] = sample.exemplar.value
    assert found["request"] >= found["compute"] > 0
    assert trace not in server.metrics(), "the text format knows no exemplars"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_tells_its_queue_prefill_decode_and_tokens(server, collector, context, stream):
    trace, parent = context
    chat = {"model": "writer", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    post(server, "/v1/chat/completions", json.dumps(chat), traceparent=parent, Content_Type="application/json")
    root = collector.tree(trace, 8)
    assert root.path() == ("InferRequest", "writer", *OF_A_MODEL, "llm.queue", "llm.prefill", "llm.decode")
    found = root.child("writer").attributes
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "writer"
    assert found["gen_ai.usage.output_tokens"] == len(scripted_engine.SAYS) + 1
    assert found["gen_ai.usage.input_tokens"] > 0
    assert found["gen_ai.response.finish_reasons"] == ["stop"]


def test_a_failure_is_the_status_of_its_span(server, collector, context):
    trace, parent = context
    wrong = json.loads(BODY) | {"parameters": {"fail": "on purpose"}}
    with pytest.raises(urllib.error.HTTPError):
        post(server, "/v2/models/first/infer", json.dumps(wrong), traceparent=parent)
    root = collector.tree(trace, 5)
    assert "on purpose" in root.error
    assert "on purpose" in root.child("first").error


@pytest.mark.parametrize(
    "header",
    [None, f"00-{TRACE}-{PARENT}-00", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "00-" * 500],
)
def test_who_is_not_traced_by_the_caller_is_counted_as_the_rate_says(server, collector, context, header):
    trace, parent = context
    before = len(collector.spans)
    post(server, "/v2/models/first/infer", BODY, **({} if header is None else {"traceparent": header}))
    post(server, "/v2/models/first/infer", BODY, traceparent=parent)
    collector.tree(trace, 5)
    assert {span.trace for span in collector.spans[before:]} == {trace}


def test_settings_are_told_and_changed_by_calls_in_this_mode_too(server, collector):
    told = json.loads(urllib.request.urlopen(f"http://{server.http}/v2/trace/setting").read())
    assert told["trace_mode"] == "opentelemetry"
    before = len(collector.spans)
    post(server, "/v2/trace/setting", json.dumps({"trace_rate": "1", "trace_count": "2"}))
    try:
        for _ in range(4):
            post(server, "/v2/models/first/infer", BODY)
        collector.wait(lambda spans: len(spans) >= before + 10)
        assert len({span.trace for span in collector.spans[before:]}) == 2
    finally:
        post(server, "/v2/trace/setting", json.dumps({"trace_rate": None, "trace_count": None}))


def test_what_is_on_its_way_is_sent_at_the_stop(tmp_path, collector, context):
    trace, parent = context
    add_identity(tmp_path / "models", "first")
    flags = ("--trace-config=mode=opentelemetry", "--trace-config=level=TIMESTAMPS")
    with running(tmp_path / "models", *flags, f"--trace-config=opentelemetry,url={collector.url}") as server:
        post(server, "/v2/models/first/infer", BODY, traceparent=parent)
    assert collector.tree(trace, 5).name == "InferRequest"


def test_a_collector_that_is_not_there_harms_no_request(tmp_path):
    add_identity(tmp_path / "models", "first")
    flags = ("--trace-config=mode=opentelemetry", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", FAST)
    with running(
        tmp_path / "models", *flags, "--trace-config=opentelemetry,url=http://127.0.0.1:9/v1/traces"
    ) as server:
        for _ in range(50):
            assert json.loads(post(server, "/v2/models/first/infer", BODY))["outputs"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["mode=jaeger"], "mode: expected triton or opentelemetry, got 'jaeger'"),
        (["opentelemetry,url=http://x"], "opentelemetry,url: has no effect without mode=opentelemetry"),
        (["mode=opentelemetry", "opentelemetry,url=x"], "url: expected http://host:port/path, got 'x'"),
        (["mode=opentelemetry", "opentelemetry,resource=x"], "resource: expected key=value, got 'x'"),
        (["mode=opentelemetry", "opentelemetry,bsp_schedule_delay=x"], "bsp_schedule_delay: expected an integer"),
        (["mode=opentelemetry", "triton,file=/tmp/x"], "triton,file: has no effect with mode=opentelemetry"),
    ],
)
def test_wrong_settings_are_named(tmp_path, flags, sentence):
    argv = [f"--trace-config={flag}" for flag in flags]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", f"--model-repository={tmp_path}", *argv],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert sentence in done.stderr
