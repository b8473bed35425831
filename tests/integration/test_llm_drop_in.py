"""A model folder as it was made for Triton's vLLM backend, served by our own engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from figures import wait_until
from harness import RunningServer, running
from language_models import byte_tokenizer, tiny_folder
from llm_doors import events, figure, generate, tensors
from stock_streams import streaming


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny") / "model", tokenizer=byte_tokenizer(), vocab_size=512)
    repository = tmp_path_factory.mktemp("models")
    (repository / "vllm_model" / "1").mkdir(parents=True)
    settings = {
        "model": str(folder),
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "disable_log_requests": True,
    }
    settings |= {"num_gpu_blocks_override": 64, "max_model_len": 256}
    (repository / "vllm_model" / "1" / "model.json").write_text(json.dumps(settings))
    config = 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
    (repository / "vllm_model" / "config.pbtxt").write_text(config)
    with running(repository) as server:
        yield server


def test_the_folder_serves_as_it_is(server: RunningServer) -> None:
    status, answer = generate(
        server, "hi", "vllm_model", parameters={"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    )
    assert status == 200
    assert answer["text_output"]
    call = {"prompts": [[1, 2, 3]], "sampling": {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 2}}
    told = events(server, "vllm_model", **call, return_token_ids=True)
    tokens = [token for event in told for choice in event.choices for token in choice.token_ids]
    entries = [entry for event in told for choice in event.choices for entry in choice.logprobs]
    assert [entry.chosen.id for entry in entries] == tokens
    assert len(tokens) == 6
    assert told[-1].timing.prefill_ns > 0


def test_leaving_a_real_model_gives_its_blocks_back(server: RunningServer) -> None:
    with streaming(server) as stream:
        parameters = {"max_tokens": 250, "ignore_eos": True, "temperature": 0}
        stream.send("vllm_model", tensors("a", stream=True), parameters=parameters)
        stream.next()
    wait_until("its blocks are free", lambda: figure(server, "headrace_llm_kv_cache_usage_perc", "vllm_model") == 0)
