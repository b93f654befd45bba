"""What the server and its models say of themselves (spec 2): metadata, and a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastserve import __version__
from fastserve.repository.triton_config import config_json
from fastserve.repository.version import Version
from fastserve.serving.model_view import ModelView, TensorView
from fastserve.tensor import KSERVE_NAME, DType

SERVER_NAME = "triton"
"""What clients of the original look for; `version` says which server this is."""
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


def server_metadata() -> dict[str, Any]:
    return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(plan: ModelView, versions: list[int]) -> dict[str, Any]:
    """`versions` are the ready ones, or the one that was asked for."""
    return {
        "name": plan.model,
        "versions": [str(number) for number in versions],
        "platform": _platform(plan),
        "inputs": [_describe(plan, side) for side in plan.inputs.values()],
        "outputs": [_describe(plan, side) for side in plan.outputs.values()],
    }


def _platform(plan: ModelView) -> str:
    config = plan.version.config
    triton = config.triton or {}
    return str(triton.get("platform") or triton.get("backend") or config.backend)


def datatype_of(dtype: DType) -> str:
    """This API's name of an element type."""
    return KSERVE_NAME.get(dtype.name, "INVALID")


def _describe(plan: ModelView, side: TensorView) -> dict[str, Any]:
    return {"name": side.name, "datatype": datatype_of(side.dtype), "shape": list(plan.full_dims(side))}


def model_config(version: Version) -> Mapping[str, Any]:
    """The configuration as the original's ModelConfig message in JSON, defaults and all."""
    shown = config_json(version.config, version)
    scheduling = shown.get("ensemble_scheduling", {})
    if not scheduling.get("max_inflight_requests"):  # 24.10 does not know it yet
        scheduling.pop("max_inflight_requests", None)
    if scheduling:
        shown.setdefault("model_transaction_policy", {"decoupled": False})
    return shown
