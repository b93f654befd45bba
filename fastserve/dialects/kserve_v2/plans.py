"""What clients see of a version's tensors, worked out once: dims, batch axis, optional inputs.

A model of the native form tells it all in its specs. A Triton model's config says more: `dims` may differ
from what the model takes (`reshape`), inputs may be optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastserve.repository.catalog import Catalog
from fastserve.repository.labels import labels_of
from fastserve.repository.version import Version
from fastserve.tensor import KSERVE_NAME, DType, TensorSpec

NO_DATATYPE = "INVALID"

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One input or output. `dims` are the client's, without the batch axis; None for any rank."""

    name: str
    dtype: DType
    dims: Dims | None
    model_dims: Dims | None
    optional: bool = False

    @property
    def datatype(self) -> str:
        return KSERVE_NAME.get(self.dtype.name, NO_DATATYPE)


@dataclass(slots=True)
class Plan:
    """One version as this dialect serves it. `max_batch_size` 0: tensors have no batch axis."""

    version: Version
    catalog: Catalog
    inputs: dict[str, Side]
    outputs: dict[str, Side]
    max_batch_size: int
    batch_limit: int  # most rows of a request; 0 for no limit
    platform: str
    decoupled: bool = False
    ensemble: bool = False

    @property
    def model(self) -> str:
        return self.version.model

    @property
    def required(self) -> list[str]:
        return [name for name, side in self.inputs.items() if not side.optional]

    def labels(self, output: str) -> Sequence[str]:
        """Names of an output's classes."""
        return labels_of(self.version, output, self.catalog)


class Plans:
    """The plans of the versions last asked for, one per model and number."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._made: dict[tuple[str, int], Plan] = {}

    def of(self, version: Version) -> Plan:
        key = (version.model, version.number)
        plan = self._made.get(key)
        if plan is None or plan.version is not version:
            plan = self._made[key] = make_plan(version, self._catalog)
        return plan


def triton_config(version: Version) -> Mapping[str, Any]:
    """The version's config.pbtxt as JSON prints it, {} for a model of the native form."""
    found: Mapping[str, Any] | None = getattr(version.config, "triton", None)
    return found or {}


def make_plan(version: Version, catalog: Catalog) -> Plan:
    """The plan of one version."""
    config, triton = version.config, triton_config(version)
    splits = not triton and config.split_large_requests
    platform = triton.get("platform") or triton.get("backend") or config.backend
    return Plan(
        version,
        catalog,
        _sides(version.inputs, triton.get("input", ())),
        _sides(version.outputs, triton.get("output", ())),
        max_batch_size=config.max_batch_size,
        batch_limit=0 if splits else config.max_batch_size,
        platform=platform,
        decoupled=bool(triton.get("model_transaction_policy", {}).get("decoupled", False)),
        ensemble=platform == "ensemble",
    )


def _sides(specs: Mapping[str, TensorSpec], configured: Any) -> dict[str, Side]:
    known = {entry["name"]: entry for entry in configured}
    # The config's own order is the one replies and metadata keep.
    ordered = [name for name in known if name in specs] + [name for name in specs if name not in known]
    return {name: _side(specs[name], known.get(name, {})) for name in ordered}


def _side(spec: TensorSpec, configured: Mapping[str, Any]) -> Side:
    dims = tuple(int(size) for size in configured["dims"]) if configured.get("dims") else spec.shape
    return Side(
        spec.name,
        spec.dtype,
        dims,
        spec.shape,
        optional=bool(configured.get("optional", False)),
    )


def full_dims(plan: Plan, side: Side) -> Dims:
    """As metadata shows them: with the batch axis as -1 when there is one."""
    dims = side.dims if side.dims is not None else (-1,)
    return (-1, *dims) if plan.max_batch_size else dims


def to_model_shape(side: Side, shape: Dims, batching: bool) -> Dims:
    """A client's shape as the model takes it; only `reshape` makes a difference."""
    return _reshaped(shape, side.dims, side.model_dims, batching)


def to_client_shape(side: Side, shape: Dims, batching: bool) -> Dims:
    """A shape the model gave as clients see it."""
    return _reshaped(shape, side.model_dims, side.dims, batching)


def _reshaped(shape: Dims, have: Dims | None, want: Dims | None, batching: bool) -> Dims:
    if have == want or have is None or want is None or len(shape) - batching != len(have):
        return shape
    free = [size for size, fixed in zip(shape[batching:], have, strict=True) if fixed == -1]
    if len(free) != want.count(-1):
        return shape
    variable = iter(free)
    return (*shape[:batching], *(next(variable) if size == -1 else size for size in want))
