"""TensorFlow Serving's API, as the server knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastserve.config import Settings, TFServingOptions
from fastserve.dialects.tfserving.dialect import TFServing
from fastserve.dialects.tfserving.routes import ROUTES, RPC_RESOURCES, RPCS
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.request import Recorded
from fastserve.serving.dialect import DialectSpec


def exposes(settings: Settings) -> Sequence[str]:
    """A list of models says where their code lies."""
    return ("replace the models, and so run code of its own",) if settings.admin.reload_config else ()


def recorded(settings: Settings, version: Version) -> Iterator[Recorded]:
    """Yield the requests of a version's warm-up file."""
    from fastserve.dialects.tfserving.warmup import read_recorded  # messages of protobuf cost some MB

    return read_recorded(settings, version)


SPEC = DialectSpec(
    name="tfserving",
    options=TFServingOptions,
    section="tfserving",
    build=TFServing,
    routes=ROUTES,
    rpcs=RPCS,
    rpc_resources=RPC_RESOURCES,
    health_names=("PredictionService", "ModelService"),  # spec 4
    descriptors=lambda: [load("tfserving").descriptor_set],
    exposes=exposes,
    recorded=recorded,
)
