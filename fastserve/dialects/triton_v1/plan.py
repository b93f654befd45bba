"""What this API needs to know of a loaded version, worked out once: tensors as its clients see them.

Clients see `dims` without the batch axis; where the configuration reshapes (spec 3.1), the worker does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fastserve.repository.version import Version
from fastserve.tensor import MOST_AXES, DType, TensorSpec

Dims = tuple[int, ...]


@dataclass(frozen=True)
class TensorPlan:
    """One input or output. `dims` of None takes any rank."""

    name: str
    dtype: DType
    dims: Dims | None

    def fits(self, dims: Dims) -> bool:
        """True when a client may send these axes."""
        if self.dims is None:
            return len(dims) <= MOST_AXES and all(n >= 0 for n in dims)
        pairs = zip(dims, self.dims, strict=False)
        return len(dims) == len(self.dims) and all(n >= 0 and wanted in (-1, n) for n, wanted in pairs)


@dataclass(frozen=True)
class Plan:
    """One version."""

    version: Version
    max_batch_size: int
    inputs: Mapping[str, TensorPlan]
    outputs: Mapping[str, TensorPlan]

    @property
    def model(self) -> str:
        return self.version.model

    @property
    def batching(self) -> bool:
        return self.max_batch_size > 0


def make_plan(version: Version) -> Plan:
    """The plan of a loaded version."""
    config: Mapping[str, Any] | None = getattr(version.config, "triton", None)
    if config is None:
        inputs = {name: _native(spec) for name, spec in version.inputs.items()}
        outputs = {name: _native(spec) for name, spec in version.outputs.items()}
        return Plan(version, version.config.max_batch_size, inputs, outputs)
    inputs = {one["name"]: _configured(one, version.inputs) for one in config.get("input", ())}
    outputs = {one["name"]: _configured(one, version.outputs) for one in config.get("output", ())}
    return Plan(version, int(config.get("max_batch_size", 0)), inputs, outputs)


def _native(spec: TensorSpec) -> TensorPlan:
    return TensorPlan(spec.name, spec.dtype, spec.shape)


def _configured(one: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> TensorPlan:
    return TensorPlan(one["name"], specs[one["name"]].dtype, tuple(map(int, one.get("dims", ()))))


def count_bytes(shape: Dims, dtype: DType) -> int:
    """Bytes of a tensor of fixed-size elements."""
    return prod(shape) * dtype.item_bytes
