"""TensorFlow Serving's text files: protobuf's text form, as values of our settings (spec 6.2, 6.3).

    read_models("/etc/models.config")  ->  ([{"name": "m", "base_path": "/m"}], ["model_platform of model m"])
    read_file(path, batching_defaults) ->  ({"max_batch_size": 128, ...}, ["num_batch_threads"])

Which file is asked for is not here; that is `tensorflow`, for the flags, and the repository, for what lies in
a version's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fastserve.config.fields import fault_text
from fastserve.config.text_proto import TextField, parse_text
from fastserve.config.tls import PEM
from fastserve.config.yaml_text import read_text
from fastserve.errors import ConfigError

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
    """A text file that is not of its message."""


class StartFault(ConfigError):
    """Why the server cannot start: the original's code and text, and what it logs before, if anything."""

    def __init__(self, code: str, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.detail = detail


def read_models(path: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The models of a ModelServerConfig's file, checked as the original does. Raises ConfigError, OSError."""
    entries, ignored = read_file(path, model_entries)
    check_paths(entries)
    return entries, ignored


def check_paths(entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError unless every model is in a folder of this machine, from its root on."""
    for entry in entries:
        name, path = entry["name"], entry["base_path"]
        if "://" in path:
            raise ConfigError(fault_text(f"base_path of model {name}", path, "a folder of this machine"))
        if not path.startswith("/"):
            raise ConfigError(
                f"Expected model {name} to have an absolute path or URI; got base_path()={path}"
            )


def read_file(path: str, read: Callable[[str, str], Read]) -> Read:
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
    """What the original's scheduler refuses, in its words. Raises ConfigError."""
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
