"""How a model writes calls and sets its reasoning apart is seen in its chat template."""

import pytest

from headrace_backends.llm.chat_formats import chosen_format, reasoning_format_of, tool_format_of

QWEN = "{% if tools %}# Tools ... return a json object within <tool_call></tool_call> XML tags{% endif %}"
LLAMA = """{% if tools %}Environment: ipython{% endif %} {"name": function name, "parameters": dictionary of argument name}"""
LLAMA4 = "{% if tools %}[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]{% endif %}"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS][{{ call }}]"
THINKS = "{% if tools %}<tool_call>{% endif %}{{ content.split('</think>')[-1] }}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN, "hermes", None),
        (LLAMA, "llama3_json", None),
        (LLAMA4, "pythonic", None),
        (MISTRAL, "mistral", None),
        (THINKS, "hermes", "think_tags"),
        ("{% for m in messages %}<tool_call>{{ m.content }}{% endfor %}", None, None),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", None, None),
        ("", None, None),
    ],
)
def test_formats_are_seen_in_templates(template, tools, reasoning):
    assert (tool_format_of(template), reasoning_format_of(template)) == (tools, reasoning)


def test_what_the_settings_say_goes_first():
    assert [chosen_format(given, "hermes") for given in (None, "none", "mistral")] == ["hermes", None, "mistral"]
