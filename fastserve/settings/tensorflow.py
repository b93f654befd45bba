"""TensorFlow Serving's flags and text files (protobuf's text form) as settings of this server (spec 6).

    read_models("/etc/models.config")  ->  ([{"name": "m", "base_path": "/m"}], ["model_platform of model m"])
    read_file(path, batching_defaults) ->  ({"max_batch_size": 128, ...}, ["num_batch_threads"])

Which file is asked for is not here; that is `tensorflow`, for the flags, and the repository, for what lies in
a version's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastserve.errors import ConfigError
from fastserve.settings.config_files import read_text
from fastserve.settings.fields import BOOLS, fault_text, unbuilt_fault
from fastserve.settings.server_settings import PEM
from fastserve.settings.text_proto import TextField, parse_text

Overrides = dict[str, Any]  # dotted path of a setting -> value
Read = TypeVar("Read")
VERSION_BATCHING_FILE = "batching_params.pbtxt"
"""In a version's folder: a BatchingParameters of that version alone."""

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


class Unparsable(ConfigError):
    """A text file that does not match its message."""


class StartFault(ConfigError):
    """A failed start: the original's code and text, and the line it logs before, if any."""

    def __init__(self, code: str, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.detail = detail


def read_models(path: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the models of a ModelServerConfig's file, checked as the original does.

    Raises ConfigError, OSError.
    """
    entries, ignored = read_file(path, model_entries)
    check_paths(entries)
    return entries, ignored


def check_paths(entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless every model has an absolute path on this machine."""
    for entry in entries:
        name, path = entry["name"], entry["base_path"]
        if "://" in path:
            raise ConfigError(fault_text(f"base_path of model {name}", path, "a folder of this machine"))
        if not path.startswith("/"):
            raise ConfigError(
                f"Expected model {name} to have an absolute path or URI; got base_path()={path}"
            )


def read_file(path: str, read: Callable[[str, str], Read]) -> Read:
    """Return the result of `read` for a file. Raises StartFault in the original's words (spec 6.2)."""
    name = Path(path).name
    if not Path(path).exists():
        raise StartFault("NOT_FOUND", f"{path}; No such file or directory")
    try:
        return read(read_text(Path(path), name), name)
    except Unparsable as fault:
        raise StartFault("INVALID_ARGUMENT", f"Invalid protobuf file: '{path}'", str(fault)) from None


def model_entries(text: str, origin: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a text-format ModelServerConfig as values of the `models` setting, and the ignored fields.

    Raises ConfigError beginning with TensorFlow Serving's words for a file that cannot be parsed (spec 6.2).
    """
    tree = _parse(text, MODEL_SERVER_CONFIG, "tensorflow.serving.ModelServerConfig", origin)
    entries, ignored = [], []
    for number, config in enumerate(tree.get("model_config_list", {}).get("config", [])):
        entry = {"name": config.get("name", ""), "base_path": config.get("base_path", "")}
        for key in ("name", "base_path"):
            if not entry[key]:
                raise ConfigError(
                    f"{origin}: model_config_list.config[{number}].{key}: missing, write {key}: TEXT"
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
    """Return a text-format BatchingParameters as fields of model.yaml (spec 6.3), and the ignored fields."""
    tree = _parse(text, BATCHING_PARAMETERS, "tensorflow.serving.BatchingParameters", origin)
    given = {k: v.get("value", 0) if isinstance(v, dict) else v for k, v in tree.items()}
    splits = bool(given.get("enable_large_batch_splitting"))
    most = given.get("max_batch_size", 1000)
    size = given.get("max_execution_batch_size", most) if splits else most
    _check_batching(given, most, size, origin)
    batches = given.get("max_enqueued_batches", 10) or 1  # as there
    defaults: dict[str, Any] = {
        "max_batch_size": size,
        "max_queue_delay_us": given.get("batch_timeout_micros", 0),
        "max_queue_rows": batches * size,
        "split_large_requests": splits,
        "max_request_rows": most if splits else 0,
        "mixed_shapes": "pad" if given.get("pad_variable_length_inputs") else "error",
    }
    if given.get("allowed_batch_sizes"):
        defaults["allowed_batch_sizes"] = given["allowed_batch_sizes"]
    return defaults, [name for name in ("num_batch_threads", "thread_pool_name") if name in given]


def _check_batching(given: Mapping[str, Any], most: int, size: int, origin: str) -> None:
    """Check parameters as the original's scheduler does, in its words. Raises ConfigError."""
    delay, batches = given.get("batch_timeout_micros", 0), given.get("max_enqueued_batches", 10)
    splits = bool(given.get("enable_large_batch_splitting"))
    faults = {
        f"input_batch_size_limit must be positive; was {most}": most < 1,
        f"max_execution_batch_size must be positive; was {size}": size < 1,
        f"batch_timeout_micros must be non-negative; was {delay}": delay < 0,
        f"max_enqueued_batches must be positive; was {batches}": batches < splits,
        "When enable_large_batch_splitting is true, input_batch_size_limit must be greater than or equal to "
        f"max_execution_batch_size; {most} and {size}": size > most,
    }
    for text, is_one in faults.items():
        if is_one:
            raise ConfigError(f"{origin}: {text}")


def monitoring_settings(text: str, origin: str) -> Overrides:
    """Return a text-format MonitoringConfig as overrides."""
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


_WIDE_FLAGS = {"load_retry_interval_micros"}  # of 64 bits there

_INT_FLAGS = {
    "port": 8500,
    "rest_api_port": 0,
    "rest_api_timeout_in_ms": 30000,
    "max_num_load_retries": 5,
    "load_retry_interval_micros": 60_000_000,
    "num_load_threads": 0,
    "file_system_poll_wait_seconds": 1,
    "model_config_file_poll_wait_seconds": 0,
    "num_request_iterations_for_warmup": 0,
}

_TEXT_FLAGS = (
    "grpc_channel_arguments",
    "grpc_socket_path",
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
    "enable_per_model_batching_parameters",
    "enable_serialization_as_tensor_content",
    "enable_signature_method_name_check",
    "version",
    "rest_api_enable_cors_support",
    "allow_version_labels_for_unavailable_models",
)

_NO_TENSORFLOW = "no model here is run by TensorFlow Lite or compiled by XLA"
_THREADS = "calls take no thread of their own; processes that serve are `frontends`"
_SESSION_THREADS = "a worker's threads are `threads` of model.yaml"

# Flags of its own machinery, and why no answer depends on them.
_IDLE_FLAGS = {
    "enable_grpc_healthcheck_service": "grpc.health.v1 is always there",
    "enable_profiler": "there is no profiler's service",
    "flush_filesystem_caches": "what the system keeps of files is left to it",
    "grpc_max_threads": _THREADS,
    "num_tflite_interpreters_per_pool": _NO_TENSORFLOW,
    "num_tflite_pools": _NO_TENSORFLOW,
    "num_unload_threads": "versions unload as soon as their requests have ended",
    "per_process_gpu_memory_fraction": "a worker's share of its GPU is `device_memory_mb` of model.yaml",
    "remove_unused_fields_from_bundle_metagraph": _NO_TENSORFLOW,
    "rest_api_num_threads": _THREADS,
    "skip_initialize_tpu": "there are no TPUs",
    "tensorflow_inter_op_parallelism": _SESSION_THREADS,
    "tensorflow_intra_op_parallelism": _SESSION_THREADS,
    "tensorflow_session_parallelism": _SESSION_THREADS,
    "xla_cpu_compilation_enabled": _NO_TENSORFLOW,
    "xla_gpu_compilation_enabled": _NO_TENSORFLOW,
}

# Flags that are not built: the values under which they ask for nothing, and why they may not ask for more.
_UNBUILT_FLAGS = {
    "mixed_precision": ("", "the precision is the model's own"),
    "platform_config_file": ("", "models here are of no platform of TensorFlow's"),
    "prefer_tflite_model": ("false", "TensorFlow Lite's models are converted to ONNX"),
    "saved_model_tags": ("serve", "graphs with other tags are not served"),
    "tensorflow_session_config_file": ("", "there is no session of TensorFlow's"),
    "thread_pool_factory_config_file": ("", "there is no session of TensorFlow's"),
    "use_alts_credentials": ("false", "ALTS is of Google's own machines; --ssl_config_file is TLS"),
}

# Arguments of a gRPC channel that say what `grpc_options` can say, and what is divided by for its unit.
_CHANNEL_ARGUMENTS = {
    "grpc.keepalive_time_ms": ("keepalive_s", 1000),
    "grpc.keepalive_timeout_ms": ("keepalive_timeout_s", 1000),
    "grpc.max_concurrent_streams": ("concurrent_streams", 1),
    "grpc.max_connection_age_grace_ms": ("max_connection_age_grace_s", 1000),
    "grpc.max_connection_age_ms": ("max_connection_age_s", 1000),
    "grpc.max_connection_idle_ms": ("max_connection_idle_s", 1000),
    "grpc.max_metadata_size": ("metadata_bytes", 1),
    "grpc.max_receive_message_length": ("message_bytes", 1),
}

_NEVER_MS = (1 << 31) - 1  # gRPC's word for it


@dataclass(slots=True)
class TensorFlowFlags:
    """A command line read as TensorFlow Serving reads it."""

    values: dict[str, int | bool | str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unrecognised: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_tensorflow_flags(argv: Sequence[str]) -> TensorFlowFlags:
    """Read `--name=value`, and `--name` for booleans; all else is unrecognised (spec 6.1)."""
    flags = TensorFlowFlags()
    for argument in argv:
        name, equals, text = argument[2:].partition("=")
        if not argument.startswith("--") or not _take_flag(flags, name, text if equals else None):
            flags.unrecognised.append(argument)
    return flags


def _take_flag(flags: TensorFlowFlags, name: str, text: str | None) -> bool:
    """Read one flag. Return False when it is not known in this form."""
    if name in _BOOL_FLAGS:
        value = True if text is None else BOOLS.get(text.lower())
        if value is None:
            flags.faults.append(fault_text(f"--{name}", text, "true or false or 1 or 0"))
        else:
            flags.values[name] = value
        return True
    if name in _IDLE_FLAGS:
        flags.ignored.append(f"--{name}: {_IDLE_FLAGS[name]}")
        return True
    if name in _UNBUILT_FLAGS:
        idle, why = _UNBUILT_FLAGS[name]
        fault = unbuilt_fault(name, "true" if text is None else text, idle)
        flags.faults += [f"{fault}: {why}"] if fault else []
        return True
    if text is None:
        return False
    if name in _TEXT_FLAGS:
        flags.values[name] = text
        return True
    if name not in _INT_FLAGS:
        return False
    number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
    if number is None:
        flags.faults.append(fault_text(f"--{name}", text, "a whole number"))
    elif name not in _WIDE_FLAGS and not -(1 << 31) <= number < 1 << 31:
        flags.faults.append(fault_text(f"--{name}", text, "a whole number of 32 bits"))
    else:
        flags.values[name] = number
    return True


def tensorflow_overrides(values: Mapping[str, int | bool | str]) -> tuple[Overrides, list[str]]:
    """Return overrides for `load_settings`, and the ignored flags. Raises ConfigError, also for files."""
    given: dict[str, Any] = {
        **_INT_FLAGS,
        **dict.fromkeys(_TEXT_FLAGS, ""),
        **dict.fromkeys(_BOOL_FLAGS, False),
        "enable_model_warmup": True,
        **values,
    }
    out, ignored = _listeners(given)
    out["tfserving.rest_timeout_ms"] = given["rest_api_timeout_in_ms"]
    out["kserve_replies"] = False
    out["tfserving.result_keys"] = ("results",)
    out["wait_for_folders"] = True  # spec 5: a base_path that is not there blocks the start, and no more
    out["tfserving.cors"] = given["rest_api_enable_cors_support"]
    out["tfserving.tensor_content"] = given["enable_serialization_as_tensor_content"]
    out["tfserving.check_methods"] = given["enable_signature_method_name_check"]
    out["admin.reload_saved"] = True  # as there; what else a folder may hold would run as code
    out["load_retries"] = given["max_num_load_retries"]
    out["load_retry_s"] = given["load_retry_interval_micros"] / 1e6
    out["parallel_loads"] = max(1, given["num_load_threads"])
    out["allow_labels_for_unavailable"] = given["allow_version_labels_for_unavailable_models"]
    seconds = given["file_system_poll_wait_seconds"]
    out |= {"model_control": "poll", "poll_s": seconds} if seconds else {"model_control": "none"}
    for more, words in (_models(given), _batching(given), _channel_arguments(given), _warmup(given)):
        out |= more
        ignored += words
    if not given["enable_model_warmup"]:
        out["model_defaults"] = {**out.get("model_defaults", {}), "warmup": "off"}
    if given["monitoring_config_file"]:
        out |= read_file(given["monitoring_config_file"], monitoring_settings)
    if given["ssl_config_file"]:
        out |= read_file(given["ssl_config_file"], ssl_settings)
    return out, ignored


def _listeners(given: Mapping[str, Any]) -> tuple[Overrides, list[str]]:
    port, rest_port, path = given["port"], given["rest_api_port"], given["grpc_socket_path"]
    if not (port or path or rest_port):  # with REST alone the original ends too; here that may be had
        raise ConfigError(
            "At least one of server_options.grpc_port or server_options.grpc_socket_path must be set."
        )
    clash = rest_port != 0 and rest_port == port  # REST goes off then, as it does there
    http = [f"tcp://[::]:{rest_port}=tfserving"] if rest_port and not clash else []  # ssl is for gRPC alone
    grpc = [f"0.0.0.0:{port}=tfserving"] if port else []
    if path:
        grpc.append(f"unix:{path.removeprefix('unix:')}=tfserving")
    return {"grpc": grpc, "http": http}, ["rest_api_port, which must differ from port"] if clash else []


def _models(given: Mapping[str, Any]) -> tuple[Overrides, list[str]]:
    seconds, path = given["model_config_file_poll_wait_seconds"], given["model_config_file"]
    if path:
        entries, ignored = read_models(path)
        watch = {"tfserving.models_file": path, "tfserving.models_file_poll_s": max(0, seconds)}
        return {"models": entries, **(watch if seconds > 0 else {})}, ignored
    if not given["model_base_path"]:
        raise ConfigError(
            "Both server_options.model_base_path and server_options.model_config_file are empty!"
        )
    entries = [{"name": given["model_name"] or "default", "base_path": given["model_base_path"]}]
    check_paths(entries)
    unasked = "--model_config_file_poll_wait_seconds: there is no --model_config_file"
    return {"models": entries}, [unasked] if seconds > 0 else []


def _batching(given: Mapping[str, Any]) -> tuple[Overrides, list[str]]:
    path, batching = given["batching_parameters_file"], given["enable_batching"]
    each = given["enable_per_model_batching_parameters"]
    if path and not batching:
        raise ConfigError(
            "server_options.batching_parameters_file is set without setting "
            "server_options.enable_batching to true."
        )
    if each and not batching:
        return {}, ["--enable_per_model_batching_parameters: there is no --enable_batching"]
    defaults, ignored = read_file(path, batching_defaults) if path else ({}, [])  # unreadable is a fault
    if not each:
        return {"model_defaults": defaults}, ignored
    unread = [
        "--batching_parameters_file: with --enable_per_model_batching_parameters versions have their own"
    ]
    return {"version_batching": True}, unread if path else []


def _warmup(given: Mapping[str, Any]) -> tuple[Overrides, list[str]]:
    times = max(1, given["num_request_iterations_for_warmup"])
    out: Overrides = {"tfserving.warmup_times": times}
    if not given["enable_model_warmup"]:
        out["tfserving.warmup_records"] = False
    return out, []


def _channel_arguments(given: Mapping[str, Any]) -> tuple[Overrides, list[str]]:
    """Return the overrides of `key=value,key=value` for connections. Raises ConfigError."""
    out: Overrides = {}
    ignored = []
    for part in filter(None, given["grpc_channel_arguments"].split(",")):
        key, _, text = part.partition("=")
        if key not in _CHANNEL_ARGUMENTS:
            ignored.append(f"{key} of --grpc_channel_arguments: it is of the original's own library")
            continue
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise ConfigError(fault_text(f"--grpc_channel_arguments: {key}", text, "a whole number"))
        name, unit = _CHANNEL_ARGUMENTS[key]
        value = int(text)
        if unit > 1:
            out[f"grpc_options.{name}"] = (
                0.0 if value == _NEVER_MS and name.startswith("max_") else value / unit
            )
        elif value >= 0:  # -1 is any size, and there is always a limit here
            out[f"grpc_options.{name}"] = value
    return out, ignored


def tensorflow_usage() -> str:
    """Return the flags that are built, with their defaults, as the original lists its own."""
    lines = [f"\t--{name}={default}\tint" for name, default in _INT_FLAGS.items()]
    lines += [f'\t--{name}=""\tstring' for name in _TEXT_FLAGS]
    lines += [f"\t--{name}\tbool" for name in _BOOL_FLAGS]
    return "\n".join(["usage: tensorflow_model_server", "Flags:", *sorted(lines)])
