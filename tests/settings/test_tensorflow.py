"""TensorFlow Serving's flags and files, with the vectors of kinds flag_parse, startup_error and batch_*."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ConfigError
from fastserve.repository.model_config import parse_model_config, round_up
from fastserve.repository.version import version_number, wanted_versions
from fastserve.settings import GrpcOptions, Settings, load_settings
from fastserve.settings.tensorflow import (
    _IDLE_FLAGS,
    _UNBUILT_FLAGS,
    batching_defaults,
    model_entries,
    monitoring_settings,
    read_tensorflow_flags,
    tensorflow_overrides,
)
from tests.repository.folders import BASE

VECTORS = [
    json.loads(line)
    for line in (Path(__file__).parent.parent / "vectors/tfserving_config.jsonl").read_text().splitlines()
]


def of_kind(kind: str) -> Any:
    chosen = [vector for vector in VECTORS if vector["kind"] == kind]
    return pytest.mark.parametrize("vector", chosen, ids=[vector["id"] for vector in chosen])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--port=2147483647", 2147483647),
        ("--port=2147483648", None),
        ("--num_load_threads=-2147483649", None),
        ("--load_retry_interval_micros=3600000000", 3_600_000_000),
        ("--load_retry_interval_micros=1e6", None),
        ("--port=", None),
        ("--port=1.0", None),
    ],
)
def test_numbers_in_flags(argument: str, value: int | None) -> None:
    flags = read_tensorflow_flags([argument])
    name, _, text = argument[2:].partition("=")
    assert flags.values == ({} if value is None else {name: value})
    assert [fault.partition(", allowed: a whole number")[0] for fault in flags.faults] == (
        [f'--{name}: given "{text}"'] if value is None else []
    )


@of_kind("flag_parse")
def test_flag_vectors(vector: dict[str, Any]) -> None:
    flags = read_tensorflow_flags(shlex.split(vector["input"]["argv"]))
    expected = vector["expected"]
    if "unrecognised" in expected:
        assert flags.unrecognised == expected["unrecognised"]
    elif "message" in expected:
        assert f"unknown argument: {flags.unrecognised[0]} (then usage)" == expected["message"]
    elif expected.get("exit"):
        assert flags.faults == ['--port: given "12x", allowed: a whole number']
    else:
        assert flags.values == expected
        assert flags.unrecognised == flags.faults == []


@of_kind("startup_error")
def test_startup_vectors(vector: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as fault:
        tensorflow_overrides({})
    assert vector["expected"]["stdout"].endswith(f"INVALID_ARGUMENT: {fault.value}")


@of_kind("version_policy")
def test_policy_vectors(vector: dict[str, Any]) -> None:
    written = vector["input"]["policy"]
    more = {} if written == "(unset)" else {"model_version_policy": written}
    config = " ".join(f"{name} {{ {value} }}" for name, value in more.items())
    entries, _ = model_entries(
        f'model_config_list {{ config {{ name: "m" base_path: "/m" {config} }} }}', "models.config"
    )
    raw = {**BASE, **{k: v for k, v in entries[0].items() if k == "version_policy"}}
    numbers = [n for name in vector["input"]["subdirectories"] if (n := version_number(name)) is not None]
    wanted = wanted_versions(parse_model_config(raw).version_policy, numbers)
    assert wanted == vector["expected"]["aspired_versions"]


@of_kind("batch_round_up")
def test_round_up_vectors(vector: dict[str, Any]) -> None:
    given = vector["input"]
    assert round_up(given["batch_size"], given["allowed_batch_sizes"]) == vector["expected"]["padded_size"]


@of_kind("batch_config")
def test_batch_config_vectors(vector: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as fault:
        parse_model_config({**BASE, **vector["input"]})
    assert str(fault.value) == f"model.yaml: {vector['expected']['error']}"


def test_a_whole_command_line(tmp_path: Path) -> None:
    (tmp_path / "models.config").write_text(
        """
        # two models
        model_config_list {
          config { name: 'a' base_path: '/models/a' model_platform: "tensorflow"
                   model_version_policy { specific { versions: 1 versions: 3 } }
                   version_labels { key: 'stable' value: 1 } version_labels { key: 'canary' value: 3 } }
          config: { name: "b", base_path: "/models/b", model_version_policy: { all: {} } },
        }
        """
    )
    (tmp_path / "batching.config").write_text(
        "max_batch_size { value: 128 } batch_timeout_micros { value: 500 } allowed_batch_sizes: 64\n"
        "allowed_batch_sizes: 128 pad_variable_length_inputs: true num_batch_threads { value: 4 }"
        "max_enqueued_batches { value: 3 } enable_large_batch_splitting { value: true }"
    )
    (tmp_path / "monitoring.config").write_text('prometheus_config { enable: true, path: "/metrics/tf" }')
    argv = ["--port=0", "--rest_api_port=8501", f"--model_config_file={tmp_path / 'models.config'}"]
    argv += ["--enable_batching", f"--batching_parameters_file={tmp_path / 'batching.config'}"]
    argv += [f"--monitoring_config_file={tmp_path / 'monitoring.config'}", "--rest_api_timeout_in_ms=5"]
    argv += ["--enable_model_warmup=false"]
    flags = read_tensorflow_flags(argv)
    assert flags.unrecognised == flags.faults == []
    overrides, ignored = tensorflow_overrides(flags.values)
    settings = load_settings(None, overrides)
    assert ignored == ["model_platform of model a", "num_batch_threads"]
    assert settings.grpc == ()
    assert [(o.host, o.port, o.dialects) for o in settings.http] == [("::", 8501, ("tfserving",))]
    assert settings.tfserving.monitoring_path == "/metrics/tf"
    assert settings.tfserving.rest_timeout_ms == 5
    assert [(m.name, m.labels) for m in settings.models] == [("a", {"stable": 1, "canary": 3}), ("b", None)]
    assert settings.models[1].version_policy == "all"
    config = parse_model_config(BASE, defaults=settings.model_defaults)
    assert config.allowed_batch_sizes == [64, 128]
    assert (config.max_batch_size, config.max_queue_delay_us, config.max_queue_rows) == (128, 500, 384)
    assert (config.mixed_shapes, config.split_large_requests, config.warmup) == ("pad", True, "off")
    own = parse_model_config({**BASE, "max_batch_size": 0}, defaults=settings.model_defaults)
    assert (own.max_batch_size, own.allowed_batch_sizes) == (0, None)


def taken(*argv: str) -> tuple[Settings, list[str]]:
    flags = read_tensorflow_flags(argv)
    assert flags.unrecognised == flags.faults == []
    overrides, ignored = tensorflow_overrides(flags.values)
    return load_settings(None, overrides), flags.ignored + ignored


def test_a_socket_beside_the_port_and_channel_arguments() -> None:
    arguments = (
        "grpc.max_concurrent_streams=7,grpc.max_connection_age_ms=90000,grpc.keepalive_time_ms=1500,"
        "grpc.max_connection_idle_ms=2147483647,grpc.max_receive_message_length=-1,grpc.lb_policy_name=x"
    )
    settings, ignored = taken(
        "--model_base_path=/m", "--grpc_socket_path=/run/tf.sock", f"--grpc_channel_arguments={arguments}"
    )
    assert [one.address for one in settings.grpc] == ["0.0.0.0:8500", "unix:/run/tf.sock"]
    options = settings.grpc_options
    assert (options.concurrent_streams, options.max_connection_age_s, options.keepalive_s) == (7, 90, 1.5)
    assert (options.max_connection_idle_s, options.message_bytes) == (0, GrpcOptions().message_bytes)
    assert ignored == ["grpc.lb_policy_name of --grpc_channel_arguments: it is of the original's own library"]
    with pytest.raises(ConfigError, match=r"grpc\.keepalive_time_ms"):
        taken("--model_base_path=/m", "--grpc_channel_arguments=grpc.keepalive_time_ms=soon")


def test_a_list_that_is_looked_at_again(tmp_path: Path) -> None:
    file = tmp_path / "models.config"
    file.write_text('model_config_list { config { name: "a" base_path: "/a" } }')
    poll = "--model_config_file_poll_wait_seconds=5"
    settings, _ = taken(f"--model_config_file={file}", poll)
    assert (settings.tfserving.models_file, settings.tfserving.models_file_poll_s) == (str(file), 5)
    settings, _ = taken(f"--model_config_file={file}")
    assert settings.tfserving.models_file == ""
    _, ignored = taken("--model_base_path=/m", poll)
    assert ignored == ["--model_config_file_poll_wait_seconds: there is no --model_config_file"]


def test_batching_of_each_version(tmp_path: Path) -> None:
    each, file = "--enable_per_model_batching_parameters", tmp_path / "b"
    file.write_text("max_batch_size { value: 7 }")
    settings, ignored = taken("--model_base_path=/m", each)
    assert not settings.version_batching
    assert ignored == [f"{each}: there is no --enable_batching"]
    settings, ignored = taken(
        "--model_base_path=/m", each, "--enable_batching", f"--batching_parameters_file={file}"
    )
    assert settings.version_batching
    assert settings.model_defaults == {}
    assert len(ignored) == 1


def test_warm_up_and_methods() -> None:
    settings, _ = taken("--model_base_path=/m", "--num_request_iterations_for_warmup=3")
    assert (settings.tfserving.warmup_records, settings.tfserving.warmup_times) == (True, 3)
    assert not settings.tfserving.check_methods
    settings, _ = taken(
        "--model_base_path=/m", "--enable_model_warmup=false", "--enable_signature_method_name_check"
    )
    assert (settings.tfserving.warmup_records, settings.tfserving.warmup_times) == (False, 1)
    assert settings.model_defaults == {"warmup": "off"}
    assert settings.tfserving.check_methods


def test_flags_that_do_nothing_say_why() -> None:
    flags = read_tensorflow_flags([f"--{name}=1" for name in (*_IDLE_FLAGS, *_UNBUILT_FLAGS)])
    assert [told.partition(": ")[2] for told in flags.ignored] == list(_IDLE_FLAGS.values())
    reasons = [why for _, why in _UNBUILT_FLAGS.values()]
    assert [told.rpartition(": ")[2] for told in flags.faults] == reasons
    assert all(reasons)


def test_batching_defaults_of_an_empty_file() -> None:
    defaults, ignored = batching_defaults("", "b")
    assert defaults["max_batch_size"] == 1000
    assert defaults["max_queue_rows"] == 10_000
    assert ignored == []
    assert parse_model_config(BASE, defaults=defaults).max_batch_size == 1000


def test_what_is_split_is_bounded_by_the_batch_size_of_the_original() -> None:
    text = "max_batch_size { value: 8 } enable_large_batch_splitting { value: true }"
    defaults, _ = batching_defaults(text + "max_execution_batch_size { value: 4 }", "b")
    config = parse_model_config(BASE, defaults=defaults)
    assert (config.max_batch_size, config.max_request_rows, config.most_rows) == (4, 8, 8)
    assert parse_model_config(BASE, defaults=batching_defaults(text, "b")[0]).most_rows == 8
    whole, _ = batching_defaults("max_batch_size { value: 8 } max_enqueued_batches { value: 0 }", "b")
    config = parse_model_config(BASE, defaults=whole)
    assert (config.max_batch_size, config.most_rows, config.max_queue_rows) == (8, 8, 8)
    with pytest.raises(ConfigError, match="max_request_rows: given 3, allowed: 0 or a whole number from"):
        parse_model_config({**BASE, "max_batch_size": 4, "max_request_rows": 3})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("max_batch_size { value: 0 }", "input_batch_size_limit must be positive; was 0"),
        ("max_batch_size {}", "input_batch_size_limit must be positive; was 0"),
        ("batch_timeout_micros { value: -1 }", "batch_timeout_micros must be non-negative; was -1"),
        (
            "enable_large_batch_splitting { value: true } max_enqueued_batches { value: 0 }",
            "max_enqueued_batches must be positive; was 0",
        ),
        (
            "enable_large_batch_splitting { value: true } max_execution_batch_size { value: 1001 }",
            "input_batch_size_limit must be greater than or equal to max_execution_batch_size",
        ),
    ],
)
def test_batching_parameters_that_the_original_refuses(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^b: .*{fault}"):
        batching_defaults(text, "b")


def test_the_ports_must_differ() -> None:
    overrides, ignored = tensorflow_overrides({"port": 9, "rest_api_port": 9, "model_base_path": "/m"})
    assert overrides["http"] == []
    assert ignored == ["rest_api_port, which must differ from port"]
    assert overrides["models"] == [{"name": "default", "base_path": "/m"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "model_config_list { config { name: 1 } }",
            "Error parsing text-format tensorflow.serving.ModelServerConfig",
        ),
        ("custom_model_config {}", "unknown field 'custom_model_config', allowed: model_config_list"),
        ("model_config_list { config { name: 'a' } }", "model_config_list.config[0].base_path: missing"),
        (
            "model_config_list { config { name: 'a' base_path: 'b' logging_config {} } }",
            "model_config_list.config[0].logging_config: allowed: nothing",
        ),
    ],
)
def test_faults_of_a_model_config_file(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as fault:
        model_entries(text, "f")
    assert words in str(fault.value)


def test_batching_parameters_need_batching(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("")
    with pytest.raises(ConfigError, match="is set without setting"):
        tensorflow_overrides({"model_base_path": "/m", "batching_parameters_file": str(tmp_path / "b")})


def test_monitoring_is_off_unless_enabled() -> None:
    assert monitoring_settings("prometheus_config {}", "m") == {"tfserving.monitoring": False}


def test_a_server_that_nobody_could_reach_is_not_started() -> None:
    """In the original's words."""
    with pytest.raises(ConfigError) as caught:
        tensorflow_overrides({"port": 0, "model_base_path": "/m"})
    words = "At least one of server_options.grpc_port or server_options.grpc_socket_path must be set."
    assert str(caught.value) == words
    for reached in ({"rest_api_port": 8501}, {"grpc_socket_path": "/tmp/s"}):
        tensorflow_overrides({"port": 0, "model_base_path": "/m", **reached})
