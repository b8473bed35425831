"""The server's configuration: sources and their order, values, conflicts, and all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import ControlMode, ServerConfig, load_config
from headrace.flags import FLAGS, REFUSED, SERVED, Status
from headrace.options import UsageError


@pytest.fixture
def repository(tmp_path: Path) -> str:
    path = tmp_path / "models"
    path.mkdir()
    return str(path)


def load(repository: str, *argv: str, environ: dict[str, str] | None = None) -> ServerConfig:
    return load_config([f"--model-repository={repository}", *argv], environ or {})


def problems(repository: str, *argv: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load(repository, *argv, environ=environ)
    return caught.value.problems


def test_defaults_are_those_of_triton(repository):
    config = load(repository)
    assert (config.http.port, config.grpc.port, config.metrics.port) == (8000, 8001, 8002)
    assert config.control_mode is ControlMode.NONE
    assert config.exit_on_error
    assert config.strict_readiness
    assert config.auto_complete_config
    assert config.http.max_input_size == 67108864
    assert config.metrics.interval_ms == 2000
    assert config.metrics.counter_latencies
    assert not config.metrics.histogram_latencies
    assert config.metrics.summary_quantiles == (0.5, 0.9, 0.95, 0.99, 0.999)
    assert config.arena_byte_size == 8 << 30
    assert config.warnings == ()


def test_every_default_of_the_table_parses():
    for flag in SERVED:
        if flag.default is not None:
            flag.parse(flag.default)


def test_both_ways_of_writing_a_value_mean_the_same(repository):
    assert load(repository, "--http-port=9000").http.port == 9000
    assert load(repository, "--http-port", "9000").http.port == 9000


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("FALSE", False), ("1", True), ("0", False), ("True", True)]
)
def test_booleans_come_in_any_case_and_as_digits(repository, text, value):
    assert load(repository, f"--strict-readiness={text}").strict_readiness is value


def test_a_switch_may_stand_alone(repository):
    config = load(repository, "--disable-auto-complete-config", "--http-port=9000")
    assert not config.auto_complete_config


def test_repeatable_options_keep_all_their_values_in_order(repository, tmp_path):
    config = load(
        repository, "--model-store", str(tmp_path), "--model-control-mode=explicit", "--load-model=b", "--load-model=a"
    )
    assert config.load_models == ("b", "a")


def test_model_store_is_another_name_of_model_repository(repository):
    assert load_config(["--model-store", repository], {}).model_repositories == (repository,)


def test_argv_goes_before_environment_before_file_before_default(repository, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("http-port: 1001\ngrpc_port: 1002\nmetrics-port: 1003\n")
    environ = {"HEADRACE_CONFIG": str(file), "HEADRACE_HTTP_PORT": "2001", "HEADRACE_GRPC_PORT": "2002"}
    config = load(repository, "--http-port=3001", environ=environ)
    assert (config.http.port, config.grpc.port, config.metrics.port) == (3001, 2002, 1003)
    assert config.exit_timeout_secs == 30


def test_a_file_gives_lists_booleans_and_numbers(repository, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("model_control_mode: explicit\nload-model: [a, b]\nallow-grpc: no\nmodel-load-timeout-secs: 1.5\n")
    config = load(repository, f"--config={file}")
    assert config.load_models == ("a", "b")
    assert not config.allow_grpc
    assert config.model_load_timeout_secs == 1.5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http-prot: 1", "unknown option; did you mean http-port?"),
        ("http-port: [1, 2]", "expected one value, got a list"),
        ("http-port: {a: 1}", "expected a text, number or boolean, got dict"),
        ("http-port: 1\nhttp_port: 2", "is given twice"),
        ("config: other.yaml", "cannot name another one"),
        ("- a\n- b", "must hold `option: value` lines, got list"),
        ("a: [", "is no YAML"),
        ("http-port: 99999", "http-port: expected an integer from 0 to 65535, got '99999'"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_name(repository, tmp_path, text, problem):
    file = tmp_path / "server.yaml"
    file.write_text(text)
    (only,) = problems(repository, f"--config={file}")
    assert str(file) in only
    assert problem in only


def test_a_missing_file_is_a_problem(repository):
    (only,) = problems(repository, "--config=/does/not/exist.yaml")
    assert only.startswith("--config: cannot read /does/not/exist.yaml")


def test_a_repeatable_option_takes_several_values_from_one_variable(repository):
    environ = {"HEADRACE_MODEL_CONTROL_MODE": "explicit", "HEADRACE_LOAD_MODEL": "a;b"}
    assert load(repository, environ=environ).load_models == ("a", "b")


def test_an_unknown_variable_is_warned_of_with_a_suggestion(repository):
    (warning,) = load(repository, environ={"HEADRACE_HTTP_PROT": "1"}).warnings
    assert "HEADRACE_HTTP_PROT is no option; did you mean HEADRACE_HTTP_PORT?" in warning


def test_the_variables_that_kubernetes_makes_of_a_service_are_passed_over(repository):
    environ = {
        "HEADRACE_HTTP_PORT": "tcp://10.0.0.1:80",
        "HEADRACE_SERVICE_HOST": "10.0.0.1",
        "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    config = load(repository, environ=environ)
    assert config.http.port == 8000
    assert config.warnings == ()


def test_all_problems_are_told_together():
    with pytest.raises(UsageError) as caught:
        load_config(["--http-prot=1", "stray", "--grpc-port=x", "--log-format=xml"], {})
    text = "\n".join(caught.value.problems)
    assert "unknown option --http-prot; did you mean --http-port?" in text
    assert "unexpected argument 'stray'" in text
    assert "--grpc-port: expected an integer from 0 to 65535, got 'x'" in text
    assert "--log-format: expected default, ISO8601 or json, got 'xml'" in text
    assert "--model-repository: give at least one" in text
    assert len(caught.value.problems) == 5


def test_a_missing_value_is_a_problem(repository):
    assert problems(repository, "--http-port") == ["--http-port: a value is missing"]
    assert problems(repository, "--http-port", "--allow-grpc=true") == ["--http-port: a value is missing"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("http-port", "-1"),
        ("http-port", "65536"),
        ("http-port", "1.5"),
        ("strict-readiness", "yes"),
        ("model-load-thread-count", "0"),
        ("arena-byte-size", "10"),
        ("model-load-timeout-secs", "nan"),
        ("model-config-name", ""),
        ("model-config-name", "a b"),
        ("http-header-forward-pattern", "("),
        ("backend-config", "onnxruntime"),
        ("metrics-interval-ms", "99999999999"),
    ],
)
def test_a_value_outside_its_range_is_refused_and_named(repository, option, value):
    (only,) = problems(repository, f"--{option}={value}")
    assert only.startswith(f"--{option}: expected ")
    assert "got " in only


def test_load_model_needs_explicit_mode(repository):
    (only,) = problems(repository, "--load-model=a", "--model-control-mode=poll")
    assert only == "--load-model: needs --model-control-mode=explicit; in mode poll every model is loaded"


def test_two_services_cannot_have_one_port(repository):
    (only,) = problems(repository, "--grpc-port=8000")
    assert only == "--grpc-port: grpc cannot listen on port 8000, which is --http-port already"


def test_one_port_on_two_addresses_or_of_a_service_that_is_off_is_no_conflict(repository):
    load(repository, "--grpc-port=8000", "--http-address=127.0.0.1", "--grpc-address=127.0.0.2")
    load(repository, "--grpc-port=8000", "--allow-grpc=false")
    load(repository, "--http-port=0", "--grpc-port=0", "--metrics-port=0")


def test_a_repository_must_be_there_and_be_given_once(repository):
    assert problems(repository, "--model-repository=/does/not/exist") == [
        "--model-repository: '/does/not/exist' is no directory"
    ]
    assert problems(repository, f"--model-repository={repository}/.") == [
        "--model-repository: the same directory is given twice"
    ]


def test_metrics_listen_where_http_does_unless_told(repository):
    assert load(repository, "--http-address=127.0.0.1").metrics.address == "127.0.0.1"
    assert load(repository, "--http-address=127.0.0.1", "--metrics-address=::1").metrics.address == "::1"


def test_metrics_config_is_read(repository):
    metrics = load(
        repository,
        "--metrics-config=counter_latencies=false",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles=0.99:0.001,0.5:0.05",
    ).metrics
    assert not metrics.counter_latencies
    assert metrics.summary_latencies
    assert metrics.summary_quantiles == (0.5, 0.99)


@pytest.mark.parametrize("setting", ["nope=1", "summary_quantiles=1.5:0.1", "histogram_latencies=maybe"])
def test_a_wrong_metrics_config_is_refused(repository, setting):
    (only,) = problems(repository, f"--metrics-config={setting}")
    assert only.startswith("--metrics-config: ")


def test_backend_settings_join_those_for_all_with_a_backends_own(repository):
    config = load(
        repository,
        "--backend-config=default-max-batch-size=8",
        "--backend-config=onnxruntime,default-max-batch-size=16",
        "--backend-config=onnxruntime,threads=2",
    )
    assert config.backend_settings("onnxruntime") == {"default-max-batch-size": "16", "threads": "2"}
    assert config.backend_settings("identity") == {"default-max-batch-size": "8"}


def test_a_tuning_option_of_triton_is_accepted_with_a_warning(repository):
    (warning,) = load(repository, "--pinned-memory-pool-byte-size=1", "--pinned-memory-pool-byte-size=2").warnings
    assert warning.startswith("--pinned-memory-pool-byte-size has no effect: ")


@pytest.mark.parametrize("flag", REFUSED, ids=lambda flag: flag.name)
def test_an_option_of_triton_that_is_not_served_is_refused_unless_it_asks_for_nothing(repository, flag):
    (only,) = problems(repository, f"--{flag.name}=something")
    assert only.startswith(f"--{flag.name} is not served: ")
    assert load(repository, f"--{flag.name}={flag.default}").warnings == ()


def test_an_option_is_in_one_table_only():
    assert len(FLAGS) == len(SERVED) + sum(flag.status is not Status.SERVED for flag in FLAGS.values())
