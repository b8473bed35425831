"""Language models in a real server, under stock clients: answers, streams, cancels, crashes, reloads, figures."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import scripted_engine
from figures import backend_pid, wait_until
from harness import RunningServer, running
from headrace_protocol.generation import CARD_DECODER
from llm_doors import events, figure, generate, post, tensors
from scripted_engine import SAYS, script
from stock_streams import Stream, inputs, streaming

CHAIN = """
platform: "ensemble"
input [ { name: "ASK" data_type: TYPE_STRING dims: [ 1 ] }, { name: "LIVE" data_type: TYPE_BOOL dims: [ 1 ] } ]
output [ { name: "SAID" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "echoer" model_version: -1
  input_map { key: "text_input" value: "ASK" }
  input_map { key: "stream" value: "LIVE" }
  output_map { key: "text_output" value: "SAID" }
} ] }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    for name in ("echoer", "fragile", "changing"):
        scripted_engine.add_model(repository, name, aliases=["parrot"])
    scripted_engine.add_model(
        repository, "single", "model_transaction_policy { decoupled: false } instance_group { count: 4 }"
    )
    (repository / "chain" / "1").mkdir(parents=True)
    (repository / "chain" / "config.pbtxt").write_text(CHAIN)
    env = scripted_engine.installed(tmp_path_factory.mktemp("site"))
    flags = ("--model-control-mode=explicit", "--load-model=*", "--metrics-compat=vllm", "--backend-restart-limit=20")
    with running(repository, *flags, env=env) as server:
        server.repository = repository  # type: ignore[attr-defined]
        yield server


def test_a_model_tells_its_card_and_its_tensors_in_its_configuration(server: RunningServer) -> None:
    with urllib.request.urlopen(f"http://{server.http}/v2/models/echoer/config", timeout=10) as answer:
        config = json.load(answer)
    card = CARD_DECODER.decode(config["parameters"]["language_model"]["string_value"])
    assert (card.engine, card.aliases) == ("scripted", ("parrot",))
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert {"text_input", "generation_call"} <= {tensor["name"] for tensor in config["input"]}


def test_generate_answers_at_once_and_generate_stream_token_by_token(server: RunningServer) -> None:
    assert generate(server, "hi")[1]["text_output"] == SAYS
    told = events(server, chat={"messages": [{"role": "user", "content": "hi"}]})
    assert "".join(choice.text for event in told for choice in event.choices) == SAYS
    assert len(told) == len(SAYS) + 1, "an event for each token, and one for the end"


def test_a_stock_clients_stream_gets_new_text_in_each_response(server: RunningServer) -> None:
    with streaming(server) as stream:
        stream.send("echoer", tensors("hi", stream=True, return_num_output_tokens=True))
        results = stream.to_final()
    assert "".join(result.as_numpy("text_output")[0].decode() for result in results) == SAYS
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == len(SAYS) + 1


def test_one_answer_to_one_request_takes_a_model_that_is_not_decoupled(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="decoupled"):
            client.infer("echoer", inputs(tensors("hi")))
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: client.infer("single", inputs(tensors("hi"))), range(12)))
    assert [answer.as_numpy("text_output")[0] for answer in answers] == [b"hi" + SAYS.encode()] * 12


def test_an_ensemble_streams_what_a_language_model_says(server: RunningServer) -> None:
    with streaming(server) as stream:
        stream.send("chain", {"ASK": np.array([b"hi"], np.object_), "LIVE": np.array([True])})
        parts = [result.as_numpy("SAID") for result in stream.to_final()]
    assert b"".join(part[0] for part in parts if part is not None) == SAYS.encode()
    assert len(parts) > len(SAYS)


def test_what_is_wrong_is_an_error_that_names_it(server: RunningServer) -> None:
    assert generate(server, "hi", parameters={"temperature": 9})[0] == 400
    status, body = post(server, "/v2/models/echoer/generate_stream", {"text_input": "hi", "max_tokens": -4})
    assert (status, "max_tokens" in body) == (400, True)
    status, body = post(server, "/v2/models/echoer/generate_stream", {"text_input": "x" + script(fail_after=0)})
    assert (status, "the script says so" in body) == (500, True)
    assert post(server, "/v2/models/echoer/generate", {"text_input": "x" + script(refuse="busy")})[0] == 503
    told = events(server, prompts=["x" + script(fail_after=3)])
    assert [isinstance(event, str) for event in told] == [False] * 3 + [True]


def test_hundreds_of_streams_are_open_at_once_in_one_instance(server: RunningServer) -> None:
    each = 150
    said: dict[str, str] = {}

    def take(stream: Stream) -> None:
        ends = 0
        while ends < each:
            result = stream.next()
            response, part = result.get_response(), result.as_numpy("text_output")
            said[response.id] = said.get(response.id, "") + ("" if part is None else part[0].decode())
            ends += response.parameters["triton_final_response"].bool_param

    with streaming(server) as one, streaming(server) as two:
        for number in range(2 * each):
            text = "x" + script(hold="crowd", say=f"<{number}>")
            (one, two)[number % 2].send("echoer", tensors(text, stream=True), request_id=str(number))
        waiting = "headrace_llm_num_requests_waiting"
        wait_until("all wait in the engine", lambda: figure(server, waiting) == 2 * each, 20)
        assert generate(server, "x" + script(release="crowd"))[0] == 200
        take(one)
        take(two)
    assert said == {str(number): f"<{number}>" for number in range(2 * each)}


def test_a_client_that_goes_away_frees_its_place_in_the_engine(server: RunningServer) -> None:
    held = "x" + script(hold="for ever", at=2)

    def running_now() -> float:
        return figure(server, "headrace_llm_num_requests_running")

    aborted = figure(server, "headrace_llm_request_success_total", finished_reason="abort")
    with streaming(server) as stream:
        stream.send("echoer", tensors(held, stream=True))
        stream.next()
        assert running_now() == 1
    wait_until("the stream's request has left", lambda: running_now() == 0)
    host, port = server.http.rsplit(":", 1)
    body = json.dumps({"text_input": held, "stream": True}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v2/models/echoer/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert connection.recv(1000)
        wait_until("it runs", lambda: running_now() == 1)
    wait_until("the connection's request has left", lambda: running_now() == 0)
    assert figure(server, "headrace_llm_request_success_total", finished_reason="abort") == aborted + 2


def test_a_slow_reader_gets_everything_and_holds_nobody_up(server: RunningServer) -> None:
    call = {"prompts": ["x" + script(say="y" * 1000, repeat=500, per_step=500)], "sampling": {"max_tokens": 2_000_000}}
    body = json.dumps({"generation_call": json.dumps({"stream": True, **call})}).encode()
    host, port = server.http.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        head = f"POST /v2/models/long/generate_stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        scripted_engine.add_model(server.repository, "long", max_model_len=3_000_000)  # type: ignore[attr-defined]
        assert post(server, "/v2/repository/models/long/load", {})[0] == 200
        connection.sendall(head.encode() + body)
        wait_until(
            "the engine is done", lambda: figure(server, "headrace_llm_generation_tokens_total", "long") > 499_000, 30
        )
        assert generate(server, "hi", "long")[1]["text_output"] == SAYS
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert received.partition(b"\r\n\r\n")[2].count(b"y") == 500_000


@pytest.mark.parametrize("misbehaviour", ["die_after", "break_after", "killed"])
def test_requests_in_a_process_that_ends_fail_and_the_next_one_serves(server: RunningServer, misbehaviour: str) -> None:
    before = backend_pid(server, "fragile")
    with streaming(server) as stream:
        stream.send("fragile", tensors("x" + script(hold="for ever", at=1), stream=True))
        stream.next()
        if misbehaviour == "killed":
            psutil.Process(before).kill()
        else:
            stream.send("fragile", tensors("x" + script(**{misbehaviour: 2}), stream=True))
        with pytest.raises(InferenceServerException) as raised:
            while True:
                stream.next()
    assert "Traceback" not in str(raised.value)
    wait_until("another process serves", lambda: backend_pid(server, "fragile") != before, 30)
    assert generate(server, "hi", "fragile")[1]["text_output"] == SAYS


def test_a_model_whose_engine_is_not_well_is_not_ready(server: RunningServer) -> None:
    scripted_engine.add_model(server.repository, "sick")  # type: ignore[attr-defined]
    assert post(server, "/v2/repository/models/sick/load", {})[0] == 200
    assert server.status("/v2/models/sick/ready") == 200
    assert generate(server, "x" + script(sick_after=1), "sick")[0] == 200
    server.wait_status("/v2/models/sick/ready", 503, 30)


def test_a_model_is_replaced_under_load_without_losing_a_request(server: RunningServer) -> None:
    done = threading.Event()

    def ask() -> int:
        count = 0
        while not done.is_set():
            told = events(
                server, "changing", prompts=["x" + script(say="word ", repeat=20)], sampling={"max_tokens": 500}
            )
            assert "".join(choice.text for event in told for choice in event.choices) == "word " * 20
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            for generation in range(3):
                path = server.repository / "changing" / "1" / "model.json"  # type: ignore[attr-defined]
                path.write_text(json.dumps({"dtype": f"generation {generation}"}))
                assert post(server, "/v2/repository/models/changing/load", {})[0] == 200
        finally:
            done.set()
        assert all(each.result(30) for each in asking)
    with urllib.request.urlopen(f"http://{server.http}/v2/models/changing/config", timeout=10) as answer:
        assert b"generation 2" in answer.read()


def test_figures_are_there_under_vllms_names_too(server: RunningServer) -> None:
    generate(server, "hi")
    page = server.metrics()
    ours = {
        line.partition("{")[0].removeprefix("headrace_llm_")
        for line in page.splitlines()
        if line.startswith("headrace_llm_")
    }
    theirs = {line.partition("{")[0].removeprefix("vllm:") for line in page.splitlines() if line.startswith("vllm:")}
    assert ours == theirs
    assert len(ours) > 40
    found = re.search(r'^vllm:generation_tokens_total\{(.*model_name="echoer".*)\} (\S+)$', page, re.MULTILINE)
    assert found is not None
    assert 'engine="0"' in found[1]
    assert float(found[2]) == figure(server, "headrace_llm_generation_tokens_total") > 0
