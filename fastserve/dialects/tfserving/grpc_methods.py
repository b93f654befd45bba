"""The methods of TensorFlow Serving's two services, as the gRPC listener takes them (spec 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fastserve.dialects.tfserving.classify import EXAMPLES_BYTES
from fastserve.dialects.tfserving.grpc_examples import ByExamples, MultiInference
from fastserve.dialects.tfserving.grpc_models import Models, answering
from fastserve.dialects.tfserving.grpc_predict import Predict
from fastserve.dialects.tfserving.routes import MODEL_SERVICE, PREDICTION_SERVICE, RPCS
from fastserve.dialects.tfserving.service import Service
from fastserve.errors import invalid
from fastserve.protos import load
from fastserve.serving.rpc import parse_message, serialize
from fastserve.wire.grpc import Method

Run = Callable[[Any, Any], Any]
PLAIN_BYTES = 1 << 20
"""Largest message about models: two bytes of it may become an object of sixty."""


def make_methods(service: Service) -> list[Method]:
    """Every RPC, over bytes."""
    models, predict = Models(service), Predict(service)
    examples: dict[str, tuple[str, Run]] = {
        "Classify": ("ClassificationRequest", ByExamples(service, "classify")),
        "Regress": ("RegressionRequest", ByExamples(service, "regress")),
        "MultiInference": ("MultiInferenceRequest", MultiInference(service)),
    }
    about: dict[str, tuple[str, Run]] = {
        PREDICTION_SERVICE + "GetModelMetadata": (
            "GetModelMetadataRequest",
            answering(models.get_model_metadata),
        ),
        MODEL_SERVICE + "GetModelStatus": ("GetModelStatusRequest", answering(models.get_model_status)),
        MODEL_SERVICE + "HandleReloadConfigRequest": ("ReloadConfigRequest", answering(models.reload_config)),
    }
    methods = [replace(_method(PREDICTION_SERVICE + "Predict", bytes, predict, bytes), start=predict.start)]
    for name, (request, run) in examples.items():
        methods.append(_method(PREDICTION_SERVICE + name, _reader(request, EXAMPLES_BYTES), run, bytes))
    for path, (request, run) in about.items():
        methods.append(_method(path, _reader(request, PLAIN_BYTES), run, serialize))
    return methods


def _method(path: str, read: Callable[[bytes], Any], run: Run, write: Callable[[Any], bytes]) -> Method:
    return Method(path, read, run, write, scope=RPCS[path])


def _reader(name: str, most_bytes: int) -> Callable[[bytes], Any]:
    return partial(_read, name, getattr(load("tfserving"), name), most_bytes)


def _read(name: str, kind: Any, most_bytes: int, data: bytes) -> Any:
    """A message of at most so many bytes. Raises ServeError."""
    if len(data) > most_bytes:
        raise invalid(f"a {name} of {len(data)} bytes, allowed: up to {most_bytes}")
    return parse_message(kind, invalid, data)
