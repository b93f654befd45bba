"""Model views: a loaded version as clients see it: tensors, batch axis, limits, labels, classes.

    view = views.of(version)
    view.inputs["x"].dims       without the batch axis; None for any rank

Dialects turn it into words of their own. A view holds no memory of a version's, and ends with it. Where a
config reshapes, the worker does; what is left is a tensor without axes, which such a config cannot name: its
clients see one axis of one element (`to_model`, `to_client`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import prod
from typing import NamedTuple

from fastserve.errors import Kind, ServeError, invalid
from fastserve.repository.catalog import Catalog, labels_of
from fastserve.repository.model_config import TensorConfig
from fastserve.repository.version import Attachment, Version
from fastserve.tensor import ARRAY_CODE, MOST_AXES, DType, Tensor, TensorSpec, fits_shape

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorView:
    """One input or output. `dims` are the client's, without the batch axis, -1 for any length; None for any
    rank."""

    name: str
    dtype: DType
    dims: Dims | None
    model_dims: Dims | None
    optional: bool = False

    def fits(self, dims: Dims) -> bool:
        """True when a client may send these axes."""
        if self.dims is None:
            return len(dims) <= MOST_AXES and all(size >= 0 for size in dims)
        return fits_shape(dims, self.dims) and all(size >= 0 for size in dims)

    def to_model(self, shape: Dims, *, batching: bool) -> Dims:
        """A client's full shape as the model takes it."""
        return (
            shape if self.dims == self.model_dims else _reshaped(shape, self.dims, self.model_dims, batching)
        )

    def to_client(self, shape: Dims, *, batching: bool) -> Dims:
        """A full shape the model gave as clients see it."""
        return (
            shape if self.dims == self.model_dims else _reshaped(shape, self.model_dims, self.dims, batching)
        )


@dataclass(frozen=True, slots=True)
class ModelView:
    """One version. `max_batch_size` 0: tensors have no batch axis. `row_limit`: most rows of a request, 0 for
    any number."""

    version: Version
    catalog: Catalog
    inputs: Mapping[str, TensorView]
    outputs: Mapping[str, TensorView]
    required: tuple[str, ...]
    max_batch_size: int
    row_limit: int
    decoupled: bool
    whole: bool
    """A request may ask for its one answer, also of a model that is decoupled."""
    ensemble: bool

    @property
    def model(self) -> str:
        return self.version.model

    @property
    def batching(self) -> bool:
        return self.max_batch_size > 0

    def full_dims(self, tensor: TensorView) -> Dims:
        """As metadata shows them: with the batch axis as -1 when there is one."""
        dims = (-1,) if tensor.dims is None else tensor.dims
        return (-1, *dims) if self.batching else dims

    def client_shape(self, output: str, shape: Dims) -> Dims:
        """The full shape clients see of an output; one that nobody declared is shown as it is."""
        tensor = self.outputs.get(output)
        return shape if tensor is None else tensor.to_client(shape, batching=self.batching)

    def labels(self, output: str) -> Sequence[str]:
        """Names of an output's classes, by index; empty for none."""
        return labels_of(self.version, output, self.catalog)


_VIEW: Attachment[ModelView] = Attachment()


class ModelViews:
    """The views of a catalog's versions."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def of(self, version: Version) -> ModelView:
        """Return the view of an available version, the same one for every dialect."""
        return _VIEW.get(version) or _VIEW.put(version, _view(version, self._catalog))


def _view(version: Version, catalog: Catalog) -> ModelView:
    config, options = version.config, version.config.options
    # A native config repeats what the model says; that of a config.pbtxt goes before it.
    shown_in, shown_out = ({}, {}) if config.triton is None else (config.inputs, config.outputs)
    inputs = _tensors(version.inputs, shown_in, options.optional_inputs)
    return ModelView(
        version,
        catalog,
        inputs,
        _tensors(version.outputs, shown_out),
        required=tuple(name for name, tensor in inputs.items() if not tensor.optional),
        max_batch_size=config.max_batch_size,
        row_limit=0 if config.split_large_requests else config.max_batch_size,
        decoupled=options.decoupled,
        whole=not options.decoupled or version.text is not None,
        ensemble=options.ensemble is not None,
    )


def _tensors(
    specs: Mapping[str, TensorSpec], shown: Mapping[str, TensorConfig], optional: Sequence[str] = ()
) -> dict[str, TensorView]:
    """The config's own order is the one replies and metadata keep; its axes may be narrower than the
    model's."""
    ordered = [name for name in shown if name in specs] + [name for name in specs if name not in shown]
    found = {}
    for name in ordered:
        spec, dims = specs[name], shown[name].shape if name in shown else None
        own = spec.shape if dims is None else tuple(dims)
        found[name] = TensorView(name, spec.dtype, own, spec.shape, name in optional)
    return found


def _reshaped(shape: Dims, have: Dims | None, want: Dims | None, batching: bool) -> Dims:
    """`shape` is of the form `have`: in the form `want`, or as it is where the two do not go together."""
    if have is None or want is None or len(shape) - batching != len(have):
        return shape
    free = [size for size, fixed in zip(shape[batching:], have, strict=True) if fixed == -1]
    if len(free) != want.count(-1):
        return shape
    variable = iter(free)
    return (*shape[:batching], *(next(variable) if size == -1 else size for size in want))


def find_version(catalog: Catalog, name: str, number: int | None) -> Version:
    """The available version, the highest for None. Raises ServeError NOT_FOUND, or UNAVAILABLE for
    one that is known and not ready, in the words of Triton's APIs."""
    version = catalog.available(name, number)
    if version is not None:
        return version
    catalog.explain_absence(name)
    model = catalog.models.get(name)
    if model is None:
        raise _unknown(name, "is not found")
    if number is None:
        raise _unknown(name, "has no available versions")
    if number in model.versions:
        raise _unknown(name, f"version {number} is not at ready state", Kind.UNAVAILABLE)
    raise _unknown(name, f"version {number} is not found")


def _unknown(name: str, why: str, kind: Kind = Kind.NOT_FOUND) -> ServeError:
    return ServeError(kind, f"Request for unknown model: '{name}' {why}")


class Class(NamedTuple):
    """One of the largest values. `label` is "" for none."""

    idx: int
    value: float
    label: str


def classify(tensor: Tensor, most: int, labels: Sequence[str], *, batching: bool) -> list[list[Class]]:
    """At most `most` classes of each row, largest first; equal values by index, NaN last.

    The dtype has been looked at (`check_order`)."""
    values = array(ARRAY_CODE[tensor.dtype.name])
    values.frombytes(tensor.data)
    rows = tensor.shape[0] if batching and tensor.shape else 1
    items = prod(tensor.shape[batching:])
    return [_rank(values[row * items : (row + 1) * items], most, labels) for row in range(rows)]


def check_order(tensor: Tensor, what: str, datatype: str) -> None:
    """Raises ServeError INVALID_ARGUMENT for a type whose values have no order. `what` and `datatype` are the
    dialect's words for the output and its type."""
    if tensor.dtype.name not in ARRAY_CODE:
        text = f"class result not available for {what} due to unsupported type '{datatype}'"
        raise invalid(text)


def _rank(row: Sequence[float], most: int, labels: Sequence[str]) -> list[Class]:
    def key(index: int) -> tuple[bool, float, int]:
        value = row[index]
        return (True, value, -index) if value == value else (False, 0, -index)

    best = nlargest(most, range(len(row)), key=key)
    return [Class(index, row[index], labels[index] if index < len(labels) else "") for index in best]
