"""TensorFlow Serving's API, as the server knows it."""

from __future__ import annotations

from fastserve.config import TFServingOptions
from fastserve.dialects.tfserving.dialect import TFServing
from fastserve.dialects.tfserving.routes import ROUTES, RPCS
from fastserve.protos import load
from fastserve.serving.dialect import DialectSpec

SPEC = DialectSpec(
    name="tfserving",
    options=TFServingOptions,
    section="tfserving",
    build=TFServing,
    routes=ROUTES,
    rpcs=RPCS,
    health_names=("PredictionService", "ModelService"),  # spec 4
    descriptors=lambda: [load("tfserving").descriptor_set],
)
