"""Reading GGUF files once, and quickly, gives what the package's own reader gives."""

import gguf
import numpy as np
import pytest

from headrace_backends.llm.gguf_reading import read_once


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_string("tokenizer.chat_template", "{{ messages }} ü")
    writer.add_array("tokenizer.ggml.tokens", ["a", "Ġb", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 3.25])
    writer.add_bool("tokenizer.ggml.add_bos_token", val=True)
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def contents(reader):
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, [(tensor.name, tensor.tensor_type, tensor.data.tolist()) for tensor in reader.tensors]


def test_all_that_the_package_reads_is_read(path):
    expected = contents(gguf.GGUFReader(path))
    with read_once():
        found = contents(gguf.GGUFReader(path))
    assert found == expected
    assert len(found[0]) > 5
    assert found[1][0][2][1][31] == 63


def test_a_file_is_read_once_while_it_is_open_and_anew_afterwards(path):
    with read_once():
        first, second = gguf.GGUFReader(path), gguf.GGUFReader(str(path))
        assert first is second
    assert gguf.GGUFReader(path) is not first


def test_the_table_of_names_is_made_once(path):
    with read_once():
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3) is not gguf.get_tensor_name_map(
            gguf.MODEL_ARCH.LLAMA, 2
        )


def test_the_package_is_as_it_was_after_a_failure(path):
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    path.write_bytes(b"no such file")
    with pytest.raises(ValueError, match="magic"), read_once():
        gguf.GGUFReader(path)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
