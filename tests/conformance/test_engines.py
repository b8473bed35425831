"""Every engine does what the backend relies on: our own, llama.cpp's, vLLM's, one behind a process, and the tests' script."""

import contextlib
import importlib.util
import os

import pytest
import torch

from engine_contract import EngineContract, Heard
from headrace_backends.llm.adapters.vllm import VARIABLE, VllmEngine
from headrace_backends.llm.native import NativeEngine
from hosted_engines import hosted_script
from scripted_engine import ScriptedEngine


@contextlib.contextmanager
def opened(engine):
    heard = Heard()
    threads = torch.get_num_threads()
    engine.open(heard)
    try:
        yield engine, heard
        assert engine.healthy()
    finally:
        engine.close()
        torch.set_num_threads(threads)
    assert heard.broken is None


class Scripted(EngineContract):
    """The script says the same whatever it is asked."""

    echoes_prompt_logprobs = False

    test_of_several_prompts_one_that_is_refused_refuses_all = None
    test_a_token_that_there_is_not_is_refused = None
    test_a_prompt_that_leaves_no_room_is_refused_as_that = None


class TestScripted(Scripted):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls):
        with opened(ScriptedEngine()) as both:
            yield both


class TestHosted(Scripted):
    """The script again, in a process of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls):
        with opened(hosted_script()) as both:
            yield both


class TestNative(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory):
        from language_models import tiny_folder

        folder = tiny_folder(tmp_path_factory.mktemp("native"))
        settings = {"dtype": "float32", "num_gpu_blocks_override": 100}
        with opened(NativeEngine(folder, settings, threads=1, device="cpu")) as both:
            yield both


class TestLlamaCpp(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory):
        if importlib.util.find_spec("llama_cpp") is None:
            pytest.skip("llama-cpp-python is not installed (pip install headrace[llama-cpp] compiles it for minutes)")
        from gguf_models import tiny_gguf
        from headrace_backends.llm.adapters.llama_cpp import LlamaCppEngine

        folder = tmp_path_factory.mktemp("llama_cpp")
        tiny_gguf(folder / "tiny.gguf")
        with opened(LlamaCppEngine(folder, {"num_gpu_blocks_override": 100}, threads=1, device="cpu")) as both:
            yield both


class TestVllm(EngineContract):
    embeds = False

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request):
        if VARIABLE not in os.environ:
            pytest.skip(f"{VARIABLE} names no environment that has vLLM")
        smollm2 = request.getfixturevalue("smollm2")
        settings = {
            "model": str(smollm2),
            "max_model_len": 256,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 28,
        }
        with opened(VllmEngine(smollm2, settings, threads=1, device="cpu")) as both:
            yield both
