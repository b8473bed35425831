"""model.json: what it may say, what is told where it is wrong."""

import json

import pytest

from headrace_backends.llm.engines import make_engine, maker
from headrace_backends.llm.settings import Speculation, parse, read_model_json
from headrace_protocol.errors import ErrorCode, InferError


@pytest.fixture
def version(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    return tmp_path


def wrong(given, source) -> str:
    with pytest.raises(InferError) as caught:
        parse(given, source)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_the_folder_of_tritons_vllm_example_is_read_as_it_is(version):
    given = {"model": "weights", "disable_log_requests": True, "gpu_memory_utilization": 0.5, "enforce_eager": True}
    settings = parse(given, version)
    assert settings.model == version / "weights"
    assert settings.gpu_memory_utilization == 0.5
    assert settings.ignored == ("disable_log_requests", "enforce_eager")


def test_a_model_is_found_from_the_version_directory_or_absolutely(version):
    assert parse({"model": "./weights"}, version).model.samefile(version / "weights")
    assert parse({"model": str(version / "weights")}, version / "elsewhere").model == version / "weights"


def test_everything_that_is_wrong_is_told_at_once_with_its_field(version):
    told = wrong(
        {
            "model": "weights",
            "max_num_seq": 4,
            "max_num_seqs": 0,
            "gpu_memory_utilization": 2,
            "dtype": ["half"],
            "enable_prefix_caching": "yes",
            "speculative_config": {"method": "medusa", "tokens": 3},
        },
        version,
    )
    for part in (
        "max_num_seq: no such setting; is max_num_seqs meant?",
        "max_num_seqs: expected a whole number of 1 at least, got 0",
        "gpu_memory_utilization: expected a part above 0, 1 at most, got 2",
        "dtype: expected one of auto, float32, bfloat16, float16, got ['half']",
        "enable_prefix_caching: expected true or false, got 'yes'",
        "speculative_config.method: expected one of ngram, draft_model, got 'medusa'",
        "speculative_config.tokens: no such setting",
    ):
        assert part in told


@pytest.mark.parametrize("name", ["org/model", "HuggingFaceTB/SmolLM2-135M"])
def test_the_name_of_a_model_on_a_hub_is_refused_with_a_reason(version, name):
    assert "nothing is fetched" in wrong({"model": name}, version)


@pytest.mark.parametrize("name", ["gone", "./gone/away", "/gone/away", "a/b.gguf"])
def test_a_path_where_nothing_lies_is_named(version, name):
    told = wrong({"model": name}, version)
    assert "nothing lies at" in told
    assert "fetched" not in told


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-that-name/x", "a\0b"])
def test_a_path_that_can_be_none_is_refused(version, name):
    assert "model: " in wrong({"model": name}, version)


def test_without_a_model_the_weights_beside_are_it(version):
    (version / "config.json").write_text("{}")
    assert parse({}, version).model == version


def test_without_a_model_anywhere_it_is_said(version):
    assert "model: not given" in wrong({}, version)


def test_a_null_is_a_setting_that_was_not_given(version):
    settings = parse({"model": "weights", "max_model_len": None, "block_size": None}, version)
    assert (settings.max_model_len, settings.block_size) == (None, 16)


@pytest.mark.parametrize("word", [-1, "auto"])
def test_the_length_may_be_left_to_the_model(version, word):
    assert parse({"model": "weights", "max_model_len": word}, version).max_model_len is None


def test_other_spellings_of_vllm_are_understood(version):
    given = {
        "model": "weights",
        "dtype": "half",
        "load_format": "safetensors",
        "tool_call_parser": "qwen25",
        "reasoning_parser": "deepseek_r1",
        "served_model_name": "one",
    }
    settings = parse(given, version)
    assert (settings.dtype, settings.load_format) == ("float16", "auto")
    assert (settings.tool_call_parser, settings.reasoning_parser) == ("hermes", "think_tags")
    assert settings.served_model_name == ("one",)


def test_speculation_is_ngram_unless_a_model_is_named(version):
    def read(**given):
        return parse({"model": "weights", "speculative_config": given}, version).speculative_config

    assert read(num_speculative_tokens=5) == Speculation("ngram", None, 5)
    assert read(model="weights") == Speculation("draft_model", version / "weights")
    assert read(prompt_lookup_min=6).prompt_lookup_max == 6
    assert read(prompt_lookup_max=1).prompt_lookup_min == 1


def test_vllms_short_forms_are_spelled_out(version):
    given = {"model": "weights", "spec_method": "ngram", "spec_tokens": 7, "runner": "pooling", "convert": "embed"}
    settings = parse(given | {"pooler_config": {"pooling_type": "MEAN", "normalize": True}}, version)
    assert settings.speculative_config == Speculation("ngram", None, 7)
    assert (settings.task, settings.pooling) == ("embed", "mean")


def test_what_would_change_answers_and_is_not_here_is_refused_but_for_its_default(version):
    given = {"model": "weights", "rope_scaling": {}, "pipeline_parallel_size": 1, "skip_tokenizer_init": False}
    assert parse(given, version).ignored == ()
    told = wrong({"model": "weights", "hf_overrides": {"rope_theta": 3}, "pipeline_parallel_size": 2}, version)
    for name in ("hf_overrides", "pipeline_parallel_size"):
        assert f"{name}: this engine does not have it" in told


def test_a_draft_model_without_its_path_is_refused(version):
    told = wrong({"model": "weights", "speculative_config": {"method": "draft_model"}}, version)
    assert "speculative_config.model: the method draft_model needs the path of a model" in told


@pytest.mark.parametrize(
    "modules", [{"a": "weights"}, ["a=weights"], [{"name": "a", "path": "weights", "base_model_name": "b"}]]
)
def test_adapters_come_in_any_of_vllms_forms(version, modules):
    assert parse({"model": "weights", "lora_modules": modules}, version).lora_modules == {"a": version / "weights"}


def test_adapters_come_from_the_file_beside_too(version):
    (version / "multi_lora.json").write_text(json.dumps({"b": "weights"}))
    settings = parse({"model": "weights", "lora_modules": {"a": "weights"}}, version)
    assert set(settings.lora_modules) == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "multi_lora.json:"),
        ('{"b": "gone"}', "multi_lora.json.b: nothing lies at"),
        ("[3]", "multi_lora.json: expected"),
    ],
)
def test_a_file_of_adapters_that_is_wrong_is_named(version, text, part):
    (version / "multi_lora.json").write_text(text)
    assert part in wrong({"model": "weights"}, version)


def test_a_chat_template_is_a_file_or_itself(version):
    (version / "chat.jinja").write_text("{{ messages }}!")
    assert parse({"model": "weights", "chat_template": "chat.jinja"}, version).chat_template == "{{ messages }}!"
    assert parse({"model": "weights", "chat_template": "{{ x }}"}, version).chat_template == "{{ x }}"


@pytest.mark.parametrize("text", ["[]", "{", '"model"', "\xff"])
def test_a_model_json_that_is_no_object_is_refused(version, text):
    (version / "model.json").write_text(text, encoding="latin-1")
    with pytest.raises(InferError) as caught:
        read_model_json(version)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert "model.json" in caught.value.message


def test_a_folder_needs_no_model_json_if_it_is_a_model(version):
    assert read_model_json(version / "weights") == {}
    with pytest.raises(InferError) as caught:
        read_model_json(version)
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_an_engine_that_there_is_not_is_refused_with_a_near_name():
    with pytest.raises(InferError, match="is vllm meant") as caught:
        maker("vlm")
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_the_engine_of_model_json_is_ours_by_default(version):
    (version / "model.json").write_text('{"model": "weights"}')
    assert type(make_engine(version, threads=1, device="cpu")).__name__ == "NativeEngine"
    (version / "model.json").write_text('{"model": "weights", "engine": 3}')
    with pytest.raises(InferError, match="engine: expected one of headrace, vllm, llama_cpp"):
        make_engine(version, threads=1, device="cpu")
