"""Which of the server's variables go on to backend processes, by their names and values."""

from __future__ import annotations

import pytest

from headrace.instances.memory_limit import memory_limit
from headrace.instances.variables import INHERIT, MINIMAL, VariablePolicy, is_secret
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.errors import InferError


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "GITHUB_TOKEN", "AWS_PROFILE", "AZURE_STORAGE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS", "API_KEY",
     "OPENAI_API_KEY", "TRITONCACHE_REDIS_PASSWORD", "MY_SECRET_THING", "DB_PASS", "DB_PASSWD", "TLS_KEY_FILE", "KEY",
     "HEADRACE_ACCESS_FILE", "OTEL_EXPORTER_OTLP_HEADERS", "SSH_PRIVATE_KEY_DATA", "SSH_AUTH_SOCK", "WANDB_APIKEY"],
)  # fmt: skip
def test_names_that_say_secret_are_secret(name):
    assert is_secret(name, "x")


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "VLLM_MAX_TOKENS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "COMPASS",
     "MONKEY", "KEYBOARD", "PYTHONPATH", "OTEL_EXPORTER_OTLP_ENDPOINT", "LD_LIBRARY_PATH", "HF_HOME"],
)  # fmt: skip
def test_names_that_only_look_a_little_like_it_are_not(name):
    assert not is_secret(name, "/usr:/bin@home")


def test_a_url_with_a_password_is_secret_and_one_without_is_not():
    assert is_secret("REDIS", "redis://:pw@host:6379")
    assert is_secret("PROXY", "http://joe:pw@proxy:3128")
    assert not is_secret("PROXY", "http://proxy:3128/a:b@c")
    assert not is_secret("REMOTE", "ssh://git@host:22/x")


def test_exceptions_are_patterns_in_the_case_of_the_name():
    policy = VariablePolicy(always=("AWS_*", "HF_TOKE?"))
    given = {"AWS_REGION": "1", "HF_TOKEN": "2", "hf_token": "3", "OTHER_TOKEN": "4", "A": "5"}
    assert policy.select(given) == {"AWS_REGION": "1", "HF_TOKEN": "2", "A": "5"}
    assert VariablePolicy(INHERIT).select(given) == given
    assert VariablePolicy(MINIMAL, ("OTHER_TOKEN",)).select({**given, "PATH": "p"}) == {"OTHER_TOKEN": "4", "PATH": "p"}


@pytest.mark.parametrize("text", ["", "0", "1048575", "1e9", "-1", "1 GiB", "9" * 30, "١٢٣٤٥٦٧٨"])
def test_a_memory_limit_that_is_no_number_of_bytes_is_refused_with_its_name(text):
    proto = pb.ModelConfig()
    proto.parameters["memory_limit_bytes"].string_value = text
    with pytest.raises(InferError, match=r"parameters\.memory_limit_bytes"):
        memory_limit(proto, 0)


def test_the_smaller_limit_counts():
    proto = pb.ModelConfig()
    assert memory_limit(proto, 0) == 0
    assert memory_limit(proto, 5 << 20) == 5 << 20
    proto.parameters["memory_limit_bytes"].string_value = str(8 << 20)
    assert [memory_limit(proto, server) for server in (0, 5 << 20, 9 << 20)] == [8 << 20, 5 << 20, 8 << 20]
