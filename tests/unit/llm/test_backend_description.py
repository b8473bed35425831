"""What a language model makes of its configuration, whatever its author wrote of it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_backends.llm.description import completed
from headrace_backends.llm.v2_tensors import INPUTS, OUTPUTS
from headrace_protocol.errors import InferError
from headrace_protocol.generation import CARD_DECODER, ModelCard

CARD = ModelCard(100, 50, tool_format="hermes")


def test_an_empty_configuration_gets_all_tensors_many_answers_and_the_card() -> None:
    config = completed({"parameters": {"mine": {"string_value": "kept"}}}, CARD)
    assert config["input"] == [*INPUTS]
    assert config["output"] == [*OUTPUTS]
    assert all(tensor["optional"] for tensor in config["input"])
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["parameters"]["mine"] == {"string_value": "kept"}
    assert CARD_DECODER.decode(config["parameters"]["language_model"]["string_value"]) == CARD


def test_what_the_author_wrote_stays_in_its_place_and_the_rest_follows() -> None:
    written = [
        {"name": "stream", "data_type": "TYPE_BOOL", "dims": ["1"]},
        {"name": "text_input", "data_type": "TYPE_STRING", "dims": ["1"]},
    ]
    config = completed(
        {
            "input": written,
            "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": ["-1"], "label_filename": "x"}],
            "model_transaction_policy": {"decoupled": False},
        },
        CARD,
    )
    names = [tensor["name"] for tensor in config["input"]]
    assert names[:2] == ["stream", "text_input"]
    assert sorted(names) == sorted(tensor["name"] for tensor in INPUTS)
    assert config["input"][0]["optional"]
    assert config["output"][0]["label_filename"] == "x"
    assert config["model_transaction_policy"] == {"decoupled": False}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"max_batch_size": 4}, "max_batch_size"),
        ({"dynamic_batching": {}}, "dynamic_batching"),
        ({"sequence_batching": {}}, "sequence_batching"),
        ({"input": [{"name": "prompt", "data_type": "TYPE_STRING", "dims": ["1"]}]}, "input 'prompt'"),
        ({"input": [{"name": "text_input", "data_type": "TYPE_INT32", "dims": ["1"]}]}, "input 'text_input'"),
        ({"input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": ["2"]}]}, "input 'text_input'"),
        ({"output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": ["1", "1"]}]}, "output 'text_output'"),
    ],
)
def test_what_no_language_model_can_keep_to_is_named(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InferError) as raised:
        completed(config, CARD)
    assert raised.value.message.startswith(field)
