"""Text to tokens and back, the bytes of a token, and prompts out of conversations."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace_backends.llm.chat_content import takes_parts
from headrace_backends.llm.text_codec import HfTextCodec
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.generation import ChatPrompt
from language_models import byte_tokenizer, sentencepiece_tokenizer

TEXT = "hello, wörld 🙂 \x00€\n"


def codec(**more) -> HfTextCodec:
    return HfTextCodec(byte_tokenizer(), 300, **more)


def refused(call, *arguments, **more) -> str:
    with pytest.raises(InferError) as caught:
        call(*arguments, **more)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, sentencepiece_tokenizer])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer):
    made = HfTextCodec(tokenizer(), 300)
    tokens = made.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(made.token_bytes, tokens)) == TEXT.encode()
    assert made.decode(tokens, skip_special_tokens=True) == TEXT


@pytest.mark.parametrize(("tokenizer", "special"), [(byte_tokenizer, 258), (sentencepiece_tokenizer, 2)])
def test_special_tokens_have_no_bytes(tokenizer, special):
    made = HfTextCodec(tokenizer(), 300)
    assert made.token_bytes(special) is None
    assert made.decode([special], skip_special_tokens=True) == ""
    assert made.decode([special], skip_special_tokens=False) in {"<|end|>", "</s>"}


@pytest.mark.parametrize("token", [-1, 264, 299, 300])
def test_tokens_that_are_not_there_have_no_bytes(token):
    assert codec().token_bytes(token) is None


def test_tokens_between_the_tokenizers_and_the_models_are_no_text():
    assert codec().decode([299], skip_special_tokens=True) == ""


@pytest.mark.parametrize("token", [-1, 300, 1 << 40])
def test_tokens_beyond_the_model_are_refused_by_name(token):
    assert f"token {token}" in refused(codec().decode, [0, token], skip_special_tokens=True)


def test_half_a_character_is_refused():
    assert "cannot be made tokens of" in refused(codec().encode, "\ud800", add_special_tokens=False)


def test_many_threads_encode_at_once():
    made = codec()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: made.encode(TEXT, add_special_tokens=True), range(200)))
    assert all(answer == answers[0] for answer in answers)


def test_a_conversation_becomes_a_prompt():
    chat = ChatPrompt([{"role": "user", "content": "hi"}])
    assert codec().render(chat) == "<|user|>hi<|end|><|assistant|>"
    assert codec().render(ChatPrompt(chat.messages, add_generation_prompt=False)) == "<|user|>hi<|end|>"


def test_an_answer_that_was_begun_is_gone_on_with():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    chat = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    assert codec().render(chat) == "<|user|>hi<|end|><|assistant|>Well"


def test_an_answer_is_not_both_begun_and_gone_on_with():
    chat = ChatPrompt([{"role": "user", "content": "hi"}], continue_final_message=True)
    assert "exclude each other" in refused(codec().render, chat)


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
WALKS = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"


def test_parts_are_joined_for_a_template_that_takes_texts():
    assert codec().render(ChatPrompt([{"role": "user", "content": PARTS}])) == "<|user|>one\ntwo<|end|><|assistant|>"


def test_texts_are_parted_for_a_template_that_takes_parts():
    made = codec(chat_template=WALKS)
    assert made.render(ChatPrompt([{"role": "user", "content": PARTS}])) == "[one][two]"
    assert made.render(ChatPrompt([{"role": "user", "content": "one"}])) == "[one]"


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (WALKS, True),
        (
            "{% for m in messages %}{% set c = m.content %}{% for p in c | reverse %}{{ p }}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}", True),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", False),
        ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% break %}{% endfor %}", False),
        ("{% for", False),
    ],
)
def test_what_a_template_takes_is_seen_in_it(template, parts):
    assert takes_parts(template) is parts


def test_a_part_that_is_no_text_is_refused_by_its_place():
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    message = refused(codec().render, ChatPrompt([{"role": "user", "content": content}]))
    assert "messages[0].content[1]" in message
    assert "image_url" in message


def test_tools_documents_and_arguments_reach_the_template():
    made = codec(chat_template="{{ tools[0].function.name }} {{ documents[0].title }} {{ enable_thinking }}")
    chat = ChatPrompt(
        [{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        documents=[{"title": "d", "text": "t"}],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert made.render(chat) == "f d False"


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "return_dict", "messages", "tokenizer_kwargs", "conversation"]
)
def test_arguments_of_the_template_cannot_be_transformers_own(name):
    chat = ChatPrompt([{"role": "user", "content": "hi"}], chat_template_kwargs={name: True})
    assert f"chat_template_kwargs: {name} cannot be set" in refused(codec().render, chat)


def test_a_template_of_a_clients_is_taken_only_where_clients_are_trusted():
    chat = ChatPrompt([{"role": "user", "content": "hi"}], chat_template="{{ messages[0].content }}!")
    assert "trust_request_chat_template" in refused(codec().render, chat)
    assert codec(trust_request_template=True).render(chat) == "hi!"


def test_what_the_template_refuses_is_the_callers_mistake():
    made = codec(chat_template="{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in refused(made.render, ChatPrompt([{"role": "user", "content": "hi"}]))


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}", "{{ messages.append(1) }}"],
)
def test_a_template_cannot_leave_its_sandbox(template):
    refused(codec(chat_template=template).render, ChatPrompt([{"role": "user", "content": "hi"}]))


def test_a_model_without_a_template_says_so():
    made = HfTextCodec(byte_tokenizer(chat_template=None), 300)
    assert "no chat template" in refused(made.render, ChatPrompt([{"role": "user", "content": "hi"}]))


def test_no_messages_are_refused():
    assert "messages: expected one" in refused(codec().render, ChatPrompt([]))


def test_a_model_with_a_template_for_tools_uses_it_for_those():
    made = HfTextCodec(byte_tokenizer(chat_template={"default": "d", "tool_use": "t"}), 300)
    messages = [{"role": "user", "content": "hi"}]
    assert made.render(ChatPrompt(messages)) == "d"
    assert made.render(ChatPrompt(messages, tools=[{"type": "function"}])) == "t"
