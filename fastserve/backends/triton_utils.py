"""What a model imports as `triton_python_backend_utils`, in the worker.

    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * pb_utils.get_input_tensor_by_name(
                r, "IN").as_numpy())]) for r in requests]

The names are Triton's, so that models written for it run unchanged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastserve._ext.flatten import pack_bytes, unpack_bytes
from fastserve.backends.triton_model_config import ModelConfig
from fastserve.backends.triton_requests import (
    COMPLETE_FINAL,
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    REQUEST_SEQUENCE_END,
    REQUEST_SEQUENCE_START,
    InferenceRequest,
    InferenceResponse,
    PreferredMemory,
    ResponseSender,
    TritonError,
)
from fastserve.backends.triton_tensor import Tensor, TritonModelException
from fastserve.backends.triton_types import BY_NUMBER, BY_NUMPY, TRITON_TYPES

MODULE = "triton_python_backend_utils"

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = REQUEST_SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = REQUEST_SEQUENCE_END
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_RESPONSE_COMPLETE_FINAL = COMPLETE_FINAL
TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_CPU_PINNED, TRITONSERVER_MEMORY_GPU = 0, 1, 2
TRITON_STRING_TO_NUMPY = {row.config_name: row.numpy for row in TRITON_TYPES if row.name != "BF16"}

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "ModelConfig",
    "PreferredMemory",
    "ResponseSender",
    "Tensor",
    "TritonError",
    "TritonModelException",
]


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input of that name, None when it has none."""
    return inference_request.input_by_name(name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name, None when it has none."""
    return next((t for t in inference_response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The `input` entry of that name of the configuration, None when there is none."""
    return _entry(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The `output` entry of that name of the configuration, None when there is none."""
    return _entry(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the configuration says that answers are decoupled from requests."""
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled", False))


def triton_to_np_type(data_type: int) -> Any:
    """numpy's type for a datatype's number, None for unknown ones and BF16."""
    row = BY_NUMBER.get(data_type)
    return None if row is None or row.name == "BF16" else row.numpy


def np_to_triton_type(data_type: Any) -> int | None:
    """The number of the datatype of a numpy type, None when there is none."""
    return BY_NUMPY.get(np.dtype(object) if np.dtype(data_type).kind in "SU" else np.dtype(data_type))


np_to_triton_dtype = np_to_triton_type


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """numpy's type for a name like TYPE_FP32. Raises KeyError for an unknown one."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> NDArray[Any] | None:
    """Strings, each behind its length (4 bytes, little-endian), as an array [bytes] of uint8; None for no
    elements. Raises TritonModelException for an array of numbers."""
    if input_tensor.size == 0:
        return None
    if input_tensor.dtype.kind not in "OSU":
        raise TritonModelException("cannot serialize bytes tensor: invalid datatype")
    items = [x if isinstance(x, bytes | str) else str(x) for x in input_tensor.reshape(-1).tolist()]
    return np.frombuffer(pack_bytes(items), np.uint8)


serialize_bytes_tensor = serialize_byte_tensor


def deserialize_bytes_tensor(encoded_tensor: Any) -> NDArray[Any]:
    """The way back, as an array [elements] of bytes. Raises ValueError when a length leads past the end."""
    data = memoryview(encoded_tensor).cast("B")
    at = count = 0
    while at + 4 <= len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    strings = np.empty(count, object)
    strings[:] = unpack_bytes(data, count)
    return strings


class MetricFamily:
    """Metrics of a model's own: not here. Making one fails with a text that says so."""

    COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Raises TritonModelException."""
        raise TritonModelException("MetricFamily: a model cannot have metrics of its own on this server")


class Logger:
    """Lines in the server's log."""

    INFO, WARNING, ERROR, VERBOSE = 0, 1, 2, 3
    _LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
    _log = logging.getLogger("model")

    @classmethod
    def log(cls, message: str, level: int = INFO) -> None:
        """A line of one of the levels above."""
        cls._log.log(cls._LEVELS[level], "%s", message)

    @classmethod
    def log_info(cls, message: str) -> None:
        """A line of level INFO."""
        cls.log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        """A line of level WARNING."""
        cls.log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        """A line of level ERROR."""
        cls.log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """A line of level DEBUG."""
        cls.log(message, cls.VERBOSE)


LogLevel = Logger


def install() -> None:
    """Let models of this process import it under Triton's name."""
    sys.modules[MODULE] = sys.modules[__name__]


def _entry(config: Mapping[str, Any], side: str, name: str) -> dict[str, Any] | None:
    return next((entry for entry in config.get(side) or () if entry["name"] == name), None)
