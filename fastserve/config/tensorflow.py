"""TensorFlow Serving's flags, as far as they say something our settings can say.

`read_flags` takes a command line as its parser does (spec 6.1: only --name=value); `flag_settings` turns
the result into overrides for `load_settings`. What would change an answer, an address or who may connect,
and is not built, is a fault, as is a flag nobody knows: the original goes on without it. What only tunes its
own machinery is named in `ignored`, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastserve.config.fields import fault_text
from fastserve.config.foreign_flags import BOOLS, unbuilt_fault
from fastserve.config.tensorflow_files import (
    Overrides,
    batching_defaults,
    check_paths,
    monitoring_settings,
    read_file,
    read_models,
    ssl_settings,
)
from fastserve.errors import ConfigError

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


def flag_settings(values: Mapping[str, int | bool | str]) -> tuple[Overrides, list[str]]:
    """Overrides for `load_settings` and what was ignored. Raises ConfigError, also for files it reads."""
    given: dict[str, Any] = {
        **_INT_FLAGS,
        **dict.fromkeys(_TEXT_FLAGS, ""),
        **dict.fromkeys(_BOOL_FLAGS, False),
        "enable_model_warmup": True,
        **values,
    }
    out, ignored = _listeners(given)
    out["tfserving.rest_timeout_ms"] = given["rest_api_timeout_in_ms"]
    out["tfserving.result_keys"] = ("results",)
    out["wait_for_folders"] = True  # spec 5: a base_path that is not there blocks the start, and no more
    out["tfserving.cors"] = given["rest_api_enable_cors_support"]
    out["tfserving.tensor_content"] = given["enable_serialization_as_tensor_content"]
    out["tfserving.check_methods"] = given["enable_signature_method_name_check"]
    out["admin.reload_config"] = True  # as there: clients may, unless nobody reaches the port
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
    """What `key=value,key=value` says of connections. Raises ConfigError."""
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


def usage() -> str:
    """The flags that are built, with their defaults, as the original lists its own."""
    lines = [f"\t--{name}={default}\tint" for name, default in _INT_FLAGS.items()]
    lines += [f'\t--{name}=""\tstring' for name in _TEXT_FLAGS]
    lines += [f"\t--{name}\tbool" for name in _BOOL_FLAGS]
    return "\n".join(["usage: tensorflow_model_server", "Flags:", *sorted(lines)])
