"""The module that a model imports as `triton_python_backend_utils`, in the worker.

    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * pb_utils.get_input_tensor_by_name(
                r, "IN").as_numpy())]) for r in requests]

The names are Triton's, so that models written for it run unchanged.

A model may have metrics of its own:

    family = pb_utils.MetricFamily(name="seen", description="...", kind=pb_utils.MetricFamily.COUNTER)
    family.Metric(labels={"model": "m"}).increment(1)

The server keeps these (metrics/custom.py). Changes of a batch are sent in one message when it has run,
changes of other threads at once.
"""

from __future__ import annotations

import base64
import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastserve._ext.flatten import pack_bytes, unpack_bytes
from fastserve._ext.triton_requests import get_input_tensor_by_name
from fastserve.backends import model_callbacks
from fastserve.backends.triton_api.requests import (
    COMPLETE_FINAL,
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    REQUEST_SEQUENCE_END,
    REQUEST_SEQUENCE_START,
    InferenceRequest,
    InferenceResponse,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    ResponseSender,
    TritonError,
)
from fastserve.backends.triton_api.tensor import (
    BY_CONFIG_NAME,
    BY_NUMBER,
    BY_NUMPY,
    TRITON_TYPES,
    Tensor,
    TritonModelException,
)
from fastserve.errors import ServeError

_NEEDED = ("name", "data_type", "dims")
_ALLOWED = {"input": (*_NEEDED, "optional"), "output": _NEEDED}
_UNSAID: tuple[Any, ...] = (None, "", "TYPE_INVALID", [])


class ModelConfig:
    """The configuration that auto_complete_config() is given and returns.

    A model fills in what its config.pbtxt leaves open, and may not contradict it: every method raises
    ValueError where it would, as Triton's does.
    """

    def __init__(self, model_config: str | Mapping[str, Any]) -> None:
        given = json.loads(model_config) if isinstance(model_config, str) else model_config
        self._config: dict[str, Any] = json.loads(json.dumps(given))

    def as_dict(self) -> dict[str, Any]:
        """Return the whole configuration as it stands."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set max_batch_size, not below what the configuration says."""
        said = int(self._config.get("max_batch_size") or 0)
        if said > max_batch_size:
            self._contradicts(f"max_batch_size is {said}, not {max_batch_size}")
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Add dynamic_batching where it is missing; not beside another scheduler."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if self._config.get(other) is not None:
                self._contradicts(f"{other} and dynamic_batching exclude each other")
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set the policy, {"decoupled": True} or False."""
        wanted = dict(transaction_policy_dict)
        if set(wanted) - {"decoupled"}:
            self._contradicts(f"model_transaction_policy has 'decoupled' alone, not {sorted(wanted)}")
        policy = self._config.setdefault("model_transaction_policy", {})
        for field, value in wanted.items():
            if policy.get(field, value) != value:
                self._contradicts(f"model_transaction_policy: {field} is {policy[field]}, not {value}")
            policy[field] = value

    def add_input(self, input: Mapping[str, Any]) -> None:  # its name there, which a model may say
        """Add an input {name, data_type, dims, optional}."""
        self._add("input", input)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output {name, data_type, dims}."""
        self._add("output", output)

    def _add(self, side: str, entry: Mapping[str, Any]) -> None:
        name = entry.get("name", "")
        for field in entry:
            if field not in _ALLOWED[side]:
                self._contradicts(f"{side} '{name}': {field} is none of {', '.join(_ALLOWED[side])}")
        for field in _NEEDED:
            if field not in entry:
                self._contradicts(f"{side} '{name}': {field} is missing")
        if entry["data_type"] not in BY_CONFIG_NAME:
            self._contradicts(f"{side} '{name}': data_type {entry['data_type']!r} is not known")
        known = self._config.setdefault(side, [])
        said = next((one for one in known if one["name"] == name), None)
        if said is None:
            known.append(dict(entry))
            return
        for field, value in entry.items():
            wanted = list(value) if field == "dims" else value
            if field != "optional" and said.get(field) not in _UNSAID and said[field] != wanted:
                self._contradicts(f"{side} '{name}': {field} is {said[field]}, not {wanted}")
            said[field] = wanted

    def _contradicts(self, what: str) -> None:
        raise ValueError(f"auto_complete_config of model '{self._config.get('name', '')}': {what}")


MODULE = "triton_python_backend_utils"
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = REQUEST_SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = REQUEST_SEQUENCE_END
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_RESPONSE_COMPLETE_FINAL = COMPLETE_FINAL
TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU = MemoryType.CPU, MemoryType.GPU

TRITON_STRING_TO_NUMPY = {
    **{row.config_name: row.numpy for row in TRITON_TYPES if row.name != "BF16"},
    "TYPE_BOOL": bool,  # there Python's own, not numpy's
}

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseSender",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "get_input_tensor_by_name",
]


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the response's output of that name, None when it has none."""
    return next((t for t in inference_response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration's `input` entry of that name, None when there is none."""
    return _entry(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration's `output` entry of that name, None when there is none."""
    return _entry(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether the configuration's transaction policy is decoupled."""
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> Any:
    """Return numpy's type for a datatype's number, None for unknown ones and BF16."""
    row = BY_NUMBER.get(data_type)
    return None if row is None or row.name == "BF16" else row.numpy


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number of the datatype of a numpy type, None when there is none."""
    return BY_NUMPY.get(np.dtype(object) if np.dtype(data_type).kind in "SU" else np.dtype(data_type))


# Names of older releases.
triton_to_np_type, np_to_triton_type, np_to_triton_dtype = (
    triton_to_numpy_type,
    numpy_to_triton_type,
    numpy_to_triton_type,
)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return numpy's type for a name like TYPE_FP32. Raises KeyError for an unknown one."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | tuple[()] | None:
    """Return strings one after the other, each behind its length (4 bytes, little-endian); () for no elements
    and None for an array of numbers."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OSU":
        return None
    items = [x if isinstance(x, bytes | str) else str(x) for x in input_tensor.reshape(-1).tolist()]
    return bytes(pack_bytes(items))


serialize_bytes_tensor = serialize_byte_tensor


def deserialize_bytes_tensor(encoded_tensor: Any) -> NDArray[Any]:
    """Read serialized strings into an array [elements] of bytes. Raises ValueError when a length leads past
    the end."""
    data = memoryview(encoded_tensor).cast("B")
    at = count = 0
    while at + 4 <= len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    strings = np.empty(count, object)
    strings[:] = unpack_bytes(data, count)
    return strings


class LogLevel(IntEnum):
    """The level of a log line."""

    INFO, WARNING, ERROR, VERBOSE = 0, 1, 2, 3


class Logger:
    """Writes to the server's log."""

    INFO, WARNING, ERROR, VERBOSE = LogLevel
    _LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
    _log = logging.getLogger("model")

    @classmethod
    def log(cls, message: str, level: LogLevel = LogLevel.INFO) -> None:
        """Write a line of one of the levels above."""
        cls._log.log(cls._LEVELS[level], "%s", message)

    @classmethod
    def log_info(cls, message: str) -> None:
        """Write a line of level INFO."""
        cls.log(message, LogLevel.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        """Write a line of level WARNING."""
        cls.log(message, LogLevel.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        """Write a line of level ERROR."""
        cls.log(message, LogLevel.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Write a line of level DEBUG."""
        cls.log(message, LogLevel.VERBOSE)


Logger.LogLevel = LogLevel  # type: ignore[attr-defined]  # a name in the class would hide the type from it


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load another model, or load it anew, under explicit model control; `config` and `files`
    ("file:1/model.py") take the place of its folder. Raises TritonModelException."""
    brought = {}
    for path, data in (files or {}).items():
        if not path.startswith("file:"):
            raise TritonModelException(f"load_model: files are named file:PATH, not {path!r}")
        brought[path.removeprefix("file:")] = base64.b64encode(data).decode()
    _ask("Failed to load model", "load", name=model_name, config=config, files=brought)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload another model, and with `unload_dependents` those of an ensemble's steps. Raises
    TritonModelException."""
    _ask("Failed to unload model", "unload", name=model_name, dependents=unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a model can be called, "" for any version. Raises TritonModelException for a version
    that is no number."""
    told = _ask("Failed to check model readiness", "ready", name=model_name, version=model_version)
    return bool(told["ready"])


def _ask(failed: str, do: str, **fields: Any) -> Mapping[str, Any]:
    try:
        return model_callbacks.call(do, **fields)
    except ServeError as error:
        raise TritonModelException(f"{failed}: {error.message}") from None


def get_model_dir() -> str:
    """Return the folder of the model's version."""
    return place.folder


class place:
    """Holds the folder of this process's model, as its backend says."""

    folder = ""


def install(folder: str) -> None:
    """Let the model of this process, which lies in `folder`, import this module under Triton's name."""
    place.folder = folder
    sys.modules[MODULE] = sys.modules[__name__]


def _entry(config: Mapping[str, Any], side: str, name: str) -> dict[str, Any] | None:
    return next((entry for entry in config.get(side) or () if entry["name"] == name), None)


MOST_CHANGES = 400  # of one message
_FAILED = "Failed to {} metric value: {}"


class MetricKind(IntEnum):
    """The kind of a metric family."""

    COUNTER, GAUGE, HISTOGRAM = 0, 1, 2


class MetricFamily:
    """Metrics of one name, distinguished by labels."""

    COUNTER, GAUGE, HISTOGRAM = MetricKind

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Declare the family. Raises TritonModelException for an invalid name, or one that another kind
        has."""
        self._name, self._kind = name, MetricKind(kind)
        try:
            model_callbacks.call("family", name=name, help=description, kind=self._kind.name.lower())
        except ServeError as error:
            raise TritonModelException(f"Error when creating MetricFamily: {error.message}") from None

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric with these labels, one for all callers. Raises TritonModelException."""
        if self._kind is MetricKind.HISTOGRAM and buckets is None:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        made = dict(labels or {})
        if not all(isinstance(text, str) for pair in made.items() for text in pair):
            raise TritonModelException("Failed to create metric. Labels must be text.")
        try:
            told = model_callbacks.call(
                "metric", family=self._name, labels=made, buckets=[float(b) for b in buckets or ()]
            )
        except ServeError as error:
            raise TritonModelException(f"Error when creating Metric: {error.message}") from None
        return Metric(self._kind, told["number"])


class Metric:
    """One metric. Methods raise TritonModelException where its kind has no such operation."""

    def __init__(self, kind: MetricKind, number: int) -> None:
        self._kind, self._number = kind, number

    def increment(self, value: float) -> None:
        """Add to a counter (nothing below 0) or a gauge."""
        if self._kind is MetricKind.HISTOGRAM or (self._kind is MetricKind.COUNTER and value < 0):
            self._refuse("increment", value)
        changes.put(self._number, "increment", float(value))

    def set(self, value: float) -> None:
        """Set a gauge."""
        if self._kind is not MetricKind.GAUGE:
            self._refuse("set", value)
        changes.put(self._number, "set", float(value))

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        if self._kind is not MetricKind.HISTOGRAM:
            self._refuse("observe", value)
        changes.put(self._number, "observe", float(value))

    def value(self) -> float:
        """Return the value of a counter or a gauge, over all instances."""
        if self._kind is MetricKind.HISTOGRAM:
            self._refuse("get", "of a histogram")
        changes.flush()
        try:
            return float(model_callbacks.call("value", number=self._number)["value"])
        except ServeError as error:
            raise TritonModelException(_FAILED.format("get", error.message)) from None

    def _refuse(self, what: str, value: Any) -> None:
        text = f"a {self._kind.name.lower()} cannot {what} {value}"
        raise TritonModelException(_FAILED.format(what, text))


class Changes:
    """Changes of metrics that have not been sent yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, str, float]] = []
        self.gathering = False  # a batch runs, and will flush

    def put(self, number: int, how: str, value: float) -> None:
        """Add a change; consecutive ones of one counter are added up."""
        with self._lock:
            last = self._waiting[-1] if self._waiting else (0, "", 0.0)
            if last[:2] == (number, "increment") == (number, how):
                self._waiting[-1] = (number, how, last[2] + value)
            else:
                self._waiting.append((number, how, value))
            if self.gathering and len(self._waiting) < MOST_CHANGES:
                return
        self.flush()

    def flush(self) -> None:
        """Send all changes."""
        with self._lock:
            found, self._waiting = self._waiting, []
            if found:  # under the lock: a gauge shows what was set last
                model_callbacks.notify("change", changes=found)


changes = Changes()
