"""Warm-up records: requests as TensorFlow Serving logs them, in a file of the version's folder (spec 6.4).

    VERSION/assets.extra/tf_serving_warmup_requests     a TFRecord file of PredictionLog

They are read by the rules of the calls they are logs of, whatever the model's format; the model they name is
not looked at. All must be right and all must run, or the version does not load. One of them is in memory at
a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from google.protobuf.message import DecodeError

from fastserve.codec.byte_formats import read_records
from fastserve.dialects.tfserving.classify import feed, plan_results
from fastserve.dialects.tfserving.grpc_predict import decode_all, plan_predict, read_sent
from fastserve.dialects.tfserving.rpcs import check_tasks, read_input
from fastserve.dialects.tfserving.service import find_signature
from fastserve.errors import Kind, ServeError, invalid
from fastserve.protos import load
from fastserve.repository.model_config import Signature
from fastserve.repository.version import Version
from fastserve.request import InferRequest, Recorded
from fastserve.settings import Settings
from fastserve.settings.confined_file import open_confined

FILE = "assets.extra/tf_serving_warmup_requests"
FILE_BYTES = 1 << 28
MOST_RECORDS = 1000
_ADVICE = ". Please verify your warmup data is in TFRecord format."


def read_recorded(settings: Settings, version: Version) -> Iterator[Recorded]:
    """The requests of a version's file, read as they are asked for; none without one. Raises ServeError,
    ConfigError."""
    options = settings.tfserving
    if not (options.warmup_records and os.path.lexists(version.folder / FILE)):
        return
    reader = _LogReader(version, settings)
    with open_confined(version.folder, FILE, FILE_BYTES) as file:
        for number, record in enumerate(_records(file)):
            if number == MOST_RECORDS:
                raise invalid(f"Number of warmup records exceeds the maximum ({MOST_RECORDS}) at {FILE}")
            origin = f"{FILE}: record {number}"
            try:
                for request in reader.read(record):
                    yield Recorded(request, origin, options.warmup_times)
            except ServeError as fault:
                raise ServeError(fault.kind, f"{origin}: {fault.message}") from None


def _records(file: BinaryIO) -> Iterator[bytes]:
    try:
        yield from read_records(file)
    except ServeError as fault:
        raise ServeError(fault.kind, f"{FILE}: {fault.message}{_ADVICE}") from None


class _LogReader:
    """Logs -> requests for one version."""

    def __init__(self, version: Version, settings: Settings) -> None:
        self._version = version
        self._by_method = settings.tfserving.check_methods
        self._message_bytes = settings.grpc_options.message_bytes

    def read(self, record: bytes) -> Iterator[InferRequest]:
        """Of one record; several for a MultiInference. Raises ServeError."""
        try:
            log = load("tfserving").PredictionLog.FromString(record)
        except DecodeError:
            raise invalid("Failed to parse warmup record") from None
        kind = log.WhichOneof("log_type") or "LOG_TYPE_NOT_SET"
        if kind == "predict_log":
            yield self._predict(log.predict_log.request.SerializeToString())
        elif kind in ("classify_log", "regress_log"):
            request = getattr(log, kind).request
            signature = find_signature(self._version, request.model_spec.signature_name)
            yield self._examples(signature, kind.removesuffix("_log"), request.input)
        elif kind == "multi_inference_log":
            request = log.multi_inference_log.request
            for signature, verb in check_tasks(self._version, request.tasks):
                yield self._examples(signature, verb, request.input)
        else:
            raise ServeError(Kind.UNIMPLEMENTED, f"Unsupported log_type for warmup: {kind}")

    def _predict(self, data: bytes) -> InferRequest:
        message = read_sent(data)
        planned = plan_predict(self._version, message, self._message_bytes)
        inputs = decode_all(message, planned.sizes, planned.signature, self._version.batching)
        return InferRequest(inputs, tuple(planned.outputs.values()))

    def _examples(self, signature: Signature, verb: str, given: Any) -> InferRequest:
        batching = self._version.batching
        plan = plan_results(verb, signature, batching=batching, by_method=self._by_method)
        inputs = feed(read_input(given), signature, batching=batching)
        return InferRequest(inputs, tuple(plan.outputs.values()))
