"""TensorFlow Serving's flags and text files, as far as they say something our settings can say.

`read_flags` takes a command line as its parser does (spec 6.1: only --name=value); `flag_settings` turns
the result into overrides for `load_settings`. What would change an answer, an address or who may connect,
and is not built, is a fault, as is a flag nobody knows: the original goes on without it. What only tunes its
own machinery is named in `ignored`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastserve.config.fields import fault_text
from fastserve.config.foreign_flags import BOOLS, unbuilt_fault
from fastserve.config.text_proto import TextField, parse_text
from fastserve.config.tls import PEM
from fastserve.config.yaml_text import read_text
from fastserve.errors import ConfigError

Overrides = dict[str, Any]  # dotted path of a setting -> value
Read = TypeVar("Read")

_INT64 = TextField("message", fields={"value": TextField("int64")})
_STRING = TextField("message", fields={"value": TextField("string")})
_BOOL = TextField("message", fields={"value": TextField("bool")})
_LABELS = TextField("message", entries=True, fields={"key": TextField("string"), "value": TextField("int64")})
_POLICY = {
    "latest": TextField("message", fields={"num_versions": TextField("uint32")}, oneof="policy_choice"),
    "all": TextField("message", oneof="policy_choice"),
    "specific": TextField(
        "message", fields={"versions": TextField("int64", repeated=True)}, oneof="policy_choice"
    ),
}
_LOGGING = {
    "log_collector_config": TextField(
        "message", fields={"type": TextField("string"), "filename_prefix": TextField("string")}
    ),
    "sampling_config": TextField(
        "message", fields={"sampling_rate": TextField("double"), "attributes": TextField("int32")}
    ),
}
_MODEL = {
    "name": TextField("string"),
    "base_path": TextField("string"),
    "model_type": TextField("enum", names={"MODEL_TYPE_UNSPECIFIED": 0, "TENSORFLOW": 1, "OTHER": 2}),
    "model_platform": TextField("string"),
    "logging_config": TextField("message", fields=_LOGGING),
    "model_version_policy": TextField("message", fields=_POLICY),
    "version_labels": _LABELS,
}
MODEL_SERVER_CONFIG = {
    "model_config_list": TextField(
        "message", fields={"config": TextField("message", repeated=True, fields=_MODEL)}
    )
}
BATCHING_PARAMETERS = {
    "max_batch_size": _INT64,
    "batch_timeout_micros": _INT64,
    "max_enqueued_batches": _INT64,
    "num_batch_threads": _INT64,
    "thread_pool_name": _STRING,
    "allowed_batch_sizes": TextField("int64", repeated=True),
    "pad_variable_length_inputs": TextField("bool"),
    "enable_large_batch_splitting": _BOOL,
    "max_execution_batch_size": _INT64,
}
MONITORING_CONFIG = {
    "prometheus_config": TextField(
        "message", fields={"enable": TextField("bool"), "path": TextField("string")}
    )
}

SSL_CONFIG = {
    "server_key": TextField("string"),
    "server_cert": TextField("string"),
    "custom_ca": TextField("string"),
    "client_verify": TextField("bool"),
}

_INT_FLAGS = {
    "port": 8500,
    "rest_api_port": 0,
    "rest_api_timeout_in_ms": 30000,
    "max_num_load_retries": 5,
    "load_retry_interval_micros": 60_000_000,
    "num_load_threads": 0,
    "file_system_poll_wait_seconds": 1,
}
_TEXT_FLAGS = (
    "model_name",
    "model_base_path",
    "model_config_file",
    "batching_parameters_file",
    "monitoring_config_file",
    "ssl_config_file",
)
_BOOL_FLAGS = (
    "enable_batching",
    "enable_model_warmup",
    "enable_serialization_as_tensor_content",
    "version",
    "rest_api_enable_cors_support",
    "allow_version_labels_for_unavailable_models",
)
# Flags of its own machinery: no answer depends on them.
_IDLE_FLAGS = frozenset(
    (
        "enable_grpc_healthcheck_service",  # always there
        "enable_profiler",
        "flush_filesystem_caches",
        "grpc_max_threads",
        "num_tflite_interpreters_per_pool",
        "num_tflite_pools",
        "num_unload_threads",
        "per_process_gpu_memory_fraction",
        "remove_unused_fields_from_bundle_metagraph",
        "rest_api_num_threads",
        "skip_initialize_tpu",
        "tensorflow_inter_op_parallelism",
        "tensorflow_intra_op_parallelism",
        "tensorflow_session_parallelism",
        "xla_cpu_compilation_enabled",
        "xla_gpu_compilation_enabled",
    )
)
# Flags that are not built, and the values under which they ask for nothing.
_UNBUILT_FLAGS = {
    "enable_per_model_batching_parameters": "false",
    "enable_signature_method_name_check": "false",
    "grpc_channel_arguments": "",
    "grpc_socket_path": "",
    "mixed_precision": "",
    "model_config_file_poll_wait_seconds": "0",
    "num_request_iterations_for_warmup": "0",
    "platform_config_file": "",
    "prefer_tflite_model": "false",
    "saved_model_tags": "serve",
    "tensorflow_session_config_file": "",
    "thread_pool_factory_config_file": "",
    "use_alts_credentials": "false",
}


class Unparsable(ConfigError):
    """A text file that is not of its message."""


class StartFault(ConfigError):
    """Why the server cannot start: the original's code and text, and what it logs before, if anything."""

    def __init__(self, code: str, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.detail = detail


@dataclass(slots=True)
class Flags:
    """A command line read as TensorFlow Serving reads it."""

    values: dict[str, int | bool | str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unrecognised: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_flags(argv: Sequence[str]) -> Flags:
    """Only `--name=value`, and `--name` for booleans; everything else is unrecognised (spec 6.1)."""
    flags = Flags()
    for argument in argv:
        name, equals, text = argument[2:].partition("=")
        if not argument.startswith("--") or not _take_flag(flags, name, text if equals else None):
            flags.unrecognised.append(argument)
    return flags


def _take_flag(flags: Flags, name: str, text: str | None) -> bool:
    """False when the flag is not known in this form."""
    if name in _BOOL_FLAGS:
        value = True if text is None else BOOLS.get(text.lower())
        if value is None:
            flags.faults.append(fault_text(f"--{name}", text, "true or false or 1 or 0"))
        else:
            flags.values[name] = value
        return True
    if name in _IDLE_FLAGS:
        flags.ignored.append(f"--{name}")
        return True
    if name in _UNBUILT_FLAGS:
        fault = unbuilt_fault(name, "true" if text is None else text, _UNBUILT_FLAGS[name])
        flags.faults += [fault] if fault else []
        return True
    if text is None:
        return False
    if name in _TEXT_FLAGS:
        flags.values[name] = text
        return True
    if name not in _INT_FLAGS:
        return False
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        flags.values[name] = int(text)
    else:
        flags.faults.append(fault_text(f"--{name}", text, "a whole number"))
    return True


def flag_settings(values: Mapping[str, int | bool | str]) -> tuple[Overrides, list[str]]:
    """Overrides for `load_settings` and what was ignored. Raises ConfigError, also for files it reads."""
    given: dict[str, Any] = {**_INT_FLAGS, **dict.fromkeys(_TEXT_FLAGS, ""), **values}
    out, ignored = _listeners(given["port"], given["rest_api_port"])
    out["tfserving.rest_timeout_ms"] = given["rest_api_timeout_in_ms"]
    out["tfserving.result_keys"] = ("results",)
    out["wait_for_folders"] = True  # spec 5: a base_path that is not there blocks the start, and no more
    out["tfserving.cors"] = bool(given.get("rest_api_enable_cors_support", False))
    out["tfserving.tensor_content"] = bool(given.get("enable_serialization_as_tensor_content", False))
    out["admin.reload_config"] = True  # as there: clients may, unless nobody reaches the port
    out["load_retries"] = given["max_num_load_retries"]
    out["load_retry_s"] = given["load_retry_interval_micros"] / 1e6
    out["parallel_loads"] = max(1, given["num_load_threads"])
    out["allow_labels_for_unavailable"] = bool(
        given.get("allow_version_labels_for_unavailable_models", False)
    )
    seconds = given["file_system_poll_wait_seconds"]
    out |= {"model_control": "poll", "poll_s": seconds} if seconds else {"model_control": "none"}
    out["models"], models_ignored = _models(given)
    out["model_defaults"], batching_ignored = _model_defaults(given)
    if given["monitoring_config_file"]:
        out |= _from_file(given["monitoring_config_file"], monitoring_settings)
    if given["ssl_config_file"]:
        out |= _from_file(given["ssl_config_file"], ssl_settings)
    return out, ignored + models_ignored + batching_ignored


def _listeners(port: int, rest_port: int) -> tuple[Overrides, list[str]]:
    clash = rest_port != 0 and rest_port == port  # REST goes off then, as it does there
    http = [f"tcp://[::]:{rest_port}=tfserving"] if rest_port and not clash else []  # ssl is for gRPC alone
    out: Overrides = {"grpc": [f"0.0.0.0:{port}=tfserving"] if port else [], "http": http}
    return out, ["rest_api_port, which must differ from port"] if clash else []


def _models(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    if given["model_config_file"]:
        entries, ignored = _from_file(given["model_config_file"], model_entries)
        _check_paths(entries)
        return entries, ignored
    if not given["model_base_path"]:
        raise ConfigError(
            "Both server_options.model_base_path and server_options.model_config_file are empty!"
        )
    entries = [{"name": given["model_name"] or "default", "base_path": given["model_base_path"]}]
    _check_paths(entries)
    return entries, []


def _check_paths(entries: Sequence[Mapping[str, Any]]) -> None:
    for entry in entries:
        name, path = entry["name"], entry["base_path"]
        if "://" in path:
            raise ConfigError(fault_text(f"base_path of model {name}", path, "a folder of this machine"))
        if not path.startswith("/"):
            raise ConfigError(
                f"Expected model {name} to have an absolute path or URI; got base_path()={path}"
            )


def _model_defaults(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    defaults: dict[str, Any] = {}
    ignored: list[str] = []
    if given["batching_parameters_file"]:
        if not given.get("enable_batching"):
            raise ConfigError(
                "server_options.batching_parameters_file is set without setting "
                "server_options.enable_batching to true."
            )
        defaults, ignored = _from_file(given["batching_parameters_file"], batching_defaults)
    if given.get("enable_model_warmup") is False:
        defaults["warmup"] = "off"
    return defaults, ignored


def _from_file(path: str, read: Callable[[str, str], Read]) -> Read:
    """What `read` makes of a file's text and name. Raises StartFault in the original's words (spec 6.2)."""
    name = Path(path).name
    if not Path(path).exists():
        raise StartFault("NOT_FOUND", f"{path}; No such file or directory")
    try:
        return read(read_text(Path(path), name), name)
    except Unparsable as fault:
        raise StartFault("INVALID_ARGUMENT", f"Invalid protobuf file: '{path}'", str(fault)) from None


def model_entries(text: str, origin: str) -> tuple[list[dict[str, Any]], list[str]]:
    """A text-format ModelServerConfig as the values of the `models` setting, and what was ignored.

    Raises ConfigError beginning with TensorFlow Serving's words for a file that cannot be parsed (spec 6.2).
    """
    tree = _parse(text, MODEL_SERVER_CONFIG, "tensorflow.serving.ModelServerConfig", origin)
    entries, ignored = [], []
    for number, config in enumerate(tree.get("model_config_list", {}).get("config", [])):
        entry = {"name": config.get("name", ""), "base_path": config.get("base_path", "")}
        for key in ("name", "base_path"):
            if not entry[key]:
                raise ConfigError(
                    f"{origin}: model_config_list.config[{number}].{key}: missing, allowed: text"
                )
        if "model_version_policy" in config:
            entry["version_policy"] = _policy(config["model_version_policy"])
        if "version_labels" in config:
            entry["labels"] = config["version_labels"]
        entries.append(entry)
        if "logging_config" in config:
            raise ConfigError(
                f"{origin}: model_config_list.config[{number}].logging_config: "
                "allowed: nothing: logs of requests are not built"
            )
        skipped = [key for key in ("model_platform", "model_type") if key in config]
        ignored += [f"{key} of model {entry['name']}" for key in skipped]
    return entries, ignored


def _policy(written: Mapping[str, Any]) -> object:
    if "all" in written:
        return "all"
    if "specific" in written:
        return {"specific": written["specific"].get("versions", [])}
    return {"latest": written.get("latest", {}).get("num_versions", 0) or 1}


def batching_defaults(text: str, origin: str) -> tuple[dict[str, Any], list[str]]:
    """A text-format BatchingParameters as fields of model.yaml (spec 6.3), and what was ignored."""
    tree = _parse(text, BATCHING_PARAMETERS, "tensorflow.serving.BatchingParameters", origin)
    given = {k: v.get("value") if isinstance(v, dict) else v for k, v in tree.items()}
    splits = bool(given.get("enable_large_batch_splitting"))
    size = given.get("max_batch_size") or 1000
    if splits and given.get("max_execution_batch_size"):
        size = given["max_execution_batch_size"]
    defaults: dict[str, Any] = {
        "max_batch_size": size,
        "max_queue_delay_us": given.get("batch_timeout_micros") or 0,
        "max_queue_rows": (given.get("max_enqueued_batches") or 10) * size,
        "split_large_requests": splits,
        "mixed_shapes": "pad" if given.get("pad_variable_length_inputs") else "error",
    }
    if given.get("allowed_batch_sizes"):
        defaults["allowed_batch_sizes"] = given["allowed_batch_sizes"]
    return defaults, [name for name in ("num_batch_threads", "thread_pool_name") if name in given]


def monitoring_settings(text: str, origin: str) -> Overrides:
    """A text-format MonitoringConfig as overrides."""
    tree = _parse(text, MONITORING_CONFIG, "tensorflow.serving.MonitoringConfig", origin)
    prometheus = tree.get("prometheus_config", {})
    out: Overrides = {"tfserving.monitoring": prometheus.get("enable", False)}
    if prometheus.get("path"):
        out["tfserving.monitoring_path"] = prometheus["path"]
    return out


def ssl_settings(text: str, origin: str) -> Overrides:
    """A text-format SSLConfig as overrides. It holds the PEM texts themselves; without client_verify clients
    are not asked for a certificate, whatever custom_ca says."""
    try:
        tree = _parse(text, SSL_CONFIG, "tensorflow.serving.SSLConfig", origin)
    except Unparsable:  # what it would show of the text may be of the key
        raise Unparsable("Error parsing text-format tensorflow.serving.SSLConfig") from None
    for name in ("server_key", "server_cert", *(["custom_ca"] if tree.get("client_verify") else [])):
        if not tree.get(name, "").lstrip().startswith(PEM):
            raise ConfigError(f"{origin}: {name}: not a PEM text, allowed: one")
    out: Overrides = {"tls.cert": tree["server_cert"], "tls.key": tree["server_key"]}
    return {**out, "tls.client_ca": tree["custom_ca"]} if tree.get("client_verify") else out


def _parse(text: str, schema: Mapping[str, TextField], message: str, origin: str) -> dict[str, Any]:
    try:
        return parse_text(text, schema, origin)
    except ConfigError as fault:
        raise Unparsable(f"Error parsing text-format {message}: {fault}") from None


def usage() -> str:
    """The flags that are built, with their defaults, as the original lists its own."""
    lines = [f"\t--{name}={default}\tint" for name, default in _INT_FLAGS.items()]
    lines += [f'\t--{name}=""\tstring' for name in _TEXT_FLAGS]
    lines += [f"\t--{name}\tbool" for name in _BOOL_FLAGS]
    return "\n".join(["usage: tensorflow_model_server", "Flags:", *sorted(lines)])
