"""What is loaded from a folder or a GGUF file, and what is said where there is nothing to load."""

import json
import struct

import pytest
import torch
import transformers

from headrace_backends.llm import loading
from headrace_backends.llm.gguf_header import read_numbers
from headrace_protocol.errors import ErrorCode, InferError
from language_models import GREEDY, Engine, request, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as models are published: configuration, safetensors, tokenizer, and what its makers recommend."""
    path = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(path)
    _tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.6, "top_k": 20}))
    return path


def _tokenizer():
    import tokenizers

    words = {f"w{i}": i for i in range(510)} | {"<unk>": 510, "<end>": 511}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="<end>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def test_a_folder_is_loaded_whole(folder):
    loaded = loading.load(folder, "float32")
    assert loaded.dtype is torch.float32
    assert loaded.eos_token_ids == {1, 7, 511}, "of generation_config.json and of the tokenizer"
    assert (loaded.max_model_len, loaded.vocab_size) == (512, 512)
    assert loaded.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "w3 w4"}], tokenize=False) == "w3 w4"
    assert Engine(loaded.model).run([request("a", [3, 4, 5])]) == Engine(tiny()).run([request("a", [3, 4, 5])])


def test_random_weights_are_the_same_each_time(folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(InferError, match=f"cannot load the language model at {tmp_path}"):
        loading.load(tmp_path, "float32")
    first, second = (
        Engine(loading.load(tmp_path, "float32", dummy=True).model).run([request("a", [3, 4], GREEDY)])
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [
        ("nothing", ErrorCode.NOT_FOUND, "there is neither a folder nor a file of that name"),
        ("empty", ErrorCode.NOT_FOUND, "it has neither config.json nor a GGUF file"),
        ("two", ErrorCode.NOT_FOUND, "it has 2 GGUF files; name one file"),
        ("weights.bin", ErrorCode.INVALID_ARG, "expected a folder with config.json or a file *.gguf"),
        ("broken", ErrorCode.INVALID_ARG, "cannot load the language model at"),
        ("unknown", ErrorCode.INVALID_ARG, "cannot load the language model at"),
        ("code", ErrorCode.INVALID_ARG, "cannot load the language model at"),
        ("text.gguf", ErrorCode.INVALID_ARG, "not a GGUF file of version 2 or 3"),
        ("cut.gguf", ErrorCode.INVALID_ARG, "the header of this GGUF file is damaged"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path, path, code, text):
    for name in ("empty", "two", "broken", "unknown", "code"):
        (tmp_path / name).mkdir()
    (tmp_path / "two" / "a.gguf").touch()
    (tmp_path / "two" / "b.gguf").touch()
    (tmp_path / "weights.bin").touch()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "no such architecture"}')
    (tmp_path / "code" / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoConfig": "own.Config"}}')
    (tmp_path / "code" / "own.py").write_text("raise SystemExit('the code of a model was run')")
    (tmp_path / "text.gguf").write_text("this is no model, but a text of some length")
    (tmp_path / "cut.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 5) + b"\x04")
    with pytest.raises(InferError) as failed:
        loading.load(tmp_path / path)
    assert failed.value.code is code
    assert text in failed.value.message
    assert str(tmp_path / path) in failed.value.message


def test_pickled_weights_are_not_read(folder, tmp_path):
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(tiny().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InferError, match="safetensors"):
        loading.load(tmp_path)


def test_an_unknown_dtype_is_refused(folder):
    with pytest.raises(InferError, match="dtype: expected auto, float32, bfloat16, float16, got 'int3'"):
        loading.load(folder, "int3")


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ({"fpu", "avx512_bf16"}, torch.bfloat16),
        ({"amx_bf16"}, torch.bfloat16),
        ({"bf16", "asimd"}, torch.bfloat16),
        ({"avx2", "avx512f"}, torch.float32),
        (set(), torch.float32),
    ],
)
def test_bf16_is_chosen_where_the_processor_multiplies_in_it(monkeypatch, cpuinfo, dtype):
    monkeypatch.setattr(loading, "_cpu_flags", lambda: frozenset(cpuinfo))
    assert loading.chosen_dtype("auto") is dtype
    assert loading.chosen_dtype("auto", "cuda") is torch.bfloat16
    assert loading.chosen_dtype("float16") is torch.float16


def test_the_numbers_of_a_gguf_header_are_read_past_all_else(tmp_path):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    entries = [
        text("name") + struct.pack("<I", 8) + text("a model"),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("one") + text("two"),
        text("scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5),
        text("nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ3B", 0, 3, 1, 2, 3),
        text("end") + struct.pack("<II", 4, 106),
        text("rate") + struct.pack("<Id", 12, 0.25),
        text("adds") + struct.pack("<I?", 7, True),
    ]
    path = tmp_path / "a.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(entries)) + b"".join(entries))
    assert read_numbers(path) == {"end": 106, "rate": 0.25, "adds": True}
