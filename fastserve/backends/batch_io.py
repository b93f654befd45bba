"""Requests of different shapes in one run (ragged batching), and the reshape of a config.pbtxt.

    requests   x [1, 2], x [1, 4]                        ragged: concatenated, without any axes
    the model  x [6]                                     BATCH_ACCUMULATED_ELEMENT_COUNT of x: [2, 6]
               y [6]                                     BATCH_SCATTER_WITH_INPUT_SHAPE of x:
    responses  y [1, 2], y [1, 4]

`batch_input` and `batch_output` hold what Triton's hold (backend: BackendInputCollector,
BackendOutputResponder). A request's elements are counted over all of its rows.

    dims [ 4 ]       reshape [ 2, 2 ]       rows of 4 become rows of 2 x 2
    dims [ -1, 6 ]   reshape [ -1, 3, 2 ]   an axis of any length keeps its length

A reshape copies nothing: arrays are C-contiguous. `repository.triton_config.validation` has checked the
shapes.

OutputCheck holds what a model returned against what it declared. It makes one cast, and no other: float64 to
float32: numpy makes float64 out of a plain Python number, and a model that declares float32 means it.
Everything else would hide a mistake, so it is an error that names the output, what came and what was wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastserve.errors import Kind, Reason, ServeError
from fastserve.settings.model_options import MadeInput, Options
from fastserve.tensor import DType, TensorSpec, fits_shape

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays


Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # name -> what it is, what it becomes


def reshapes_of(options: Options) -> tuple[Shapes, Shapes]:
    """Return the reshapes of inputs, client to model, and of outputs, model to client."""
    given = options.reshaped_inputs, options.reshaped_outputs
    return (
        {name: (tuple(one.dims), tuple(one.shape)) for name, one in given[0].items()},
        {name: (tuple(one.shape), tuple(one.dims)) for name, one in given[1].items()},
    )


def reshape(arrays: Arrays, shapes: Shapes, *, batched: bool) -> Arrays:
    """Return the arrays with those named in `shapes` reshaped; rows stay rows. Raises ServeError INTERNAL for
    an output whose elements do not fit."""
    if not shapes:
        return arrays
    changed = dict(arrays)
    for name, (before, after) in shapes.items():
        if name in changed:
            array = changed[name]
            lead = array.shape[:1] if batched else ()
            row = array.shape[len(lead) :]
            free = iter(size for size, wanted in zip(row, before, strict=False) if wanted == -1)
            wanted = (*lead, *(next(free, -1) if size == -1 else size for size in after))
            try:
                changed[name] = array.reshape(wanted)
            except ValueError:
                text = f"{name!r} has shape {list(array.shape)}, which cannot become {list(wanted)}"
                raise ServeError(Kind.INTERNAL, text) from None
    return changed


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchInputRule:
    """A `batch_input`: the tensors `names` get what `make` computes from the shapes of `source`."""

    names: tuple[str, ...]
    source: str
    dtype: Any
    make: Callable[[Sequence[Shape]], Any]


@dataclass(frozen=True, slots=True)
class BatchOutputRule:
    """A `batch_output`: each request gets as many elements as `dims` say, with the lengths of its `source` in
    place of -1. `dims` include the batch axis."""

    source: str
    dims: Shape


class BatchIO:
    """Joins requests into the inputs of one run, and splits its outputs by request."""

    def __init__(self, options: Options) -> None:
        """Take the options of a model with a batch axis."""
        self.ragged = set(options.ragged_inputs)
        self.made = [_read_batch_input(one) for one in options.made_inputs]
        self.scattered = {
            name: BatchOutputRule(one.source, tuple(one.dims))
            for name, one in options.scattered_outputs.items()
        }

    def __bool__(self) -> bool:
        return bool(self.ragged or self.made or self.scattered)

    @property
    def names(self) -> set[str]:
        """Names of the inputs that no client sends."""
        return {name for made in self.made for name in made.names}

    def join(self, requests: Sequence[Arrays]) -> Arrays:
        """Return the model's inputs for these requests."""
        feed = {}
        for name in requests[0]:
            arrays = [request[name] for request in requests]
            if name in self.ragged:
                arrays = [array.reshape(-1) for array in arrays]
            feed[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        for made in self.made:
            values = made.make([request[made.source].shape for request in requests])
            for name in made.names:
                feed[name] = np.asarray(values, made.dtype)
        return feed

    def split(self, outputs: Arrays, requests: Sequence[Arrays]) -> Sequence[Arrays]:
        """Return each request's outputs. Raises ServeError INTERNAL when there are not enough rows or
        elements."""
        parts: list[dict[str, Any]] = [{} for _ in requests]
        for name, array in outputs.items():
            scattered, at = self.scattered.get(name), 0
            flat = array if scattered is None else array.reshape(-1)
            for part, request in zip(parts, requests, strict=True):
                shape = _rows_of(request) if scattered is None else _scattered_shape(scattered, request)
                mine = flat[at : at + prod(shape)]
                if mine.shape[0] < prod(shape):
                    text = f"output {name!r} has {flat.shape[0]} elements, its requests need more"
                    raise ServeError(Kind.INTERNAL, text)
                part[name] = mine if scattered is None else mine.reshape(shape)
                at += prod(shape)
        return parts


class JoinsRequests:
    """The part of SupportsRequestJoining that a backend's BatchIO decides."""

    batch_io: BatchIO

    @property
    def joins_requests(self) -> bool:
        """Whether the config.pbtxt has ragged inputs, a `batch_input` or a `batch_output`."""
        return bool(self.batch_io)

    @property
    def ragged_inputs(self) -> set[str]:
        """Inputs with `allow_ragged_batch`."""
        return self.batch_io.ragged


def _rows_of(request: Arrays) -> Shape:
    return next(iter(request.values())).shape[:1]


def _scattered_shape(scattered: BatchOutputRule, request: Arrays) -> Shape:
    shape = request[scattered.source].shape
    if len(shape) < len(scattered.dims):
        shape += (1,) * (len(scattered.dims) - len(shape))
    return tuple(have if want == -1 else want for want, have in zip(scattered.dims, shape, strict=False))


def _read_batch_input(given: MadeInput) -> BatchInputRule:
    return BatchInputRule(tuple(given.names), given.source, np.dtype(given.dtype), _KINDS[given.kind])


def _counts(shapes: Sequence[Shape]) -> list[int]:
    return [prod(shape) for shape in shapes]


def _accumulated(shapes: Sequence[Shape]) -> Any:
    return np.cumsum(_counts(shapes))


def _item_shapes(shapes: Sequence[Shape]) -> Any:
    return np.repeat([shape[1:] for shape in shapes], [shape[0] for shape in shapes], axis=0)


_KINDS: dict[str, Callable[[Sequence[Shape]], Any]] = {
    "element_count": _counts,
    "accumulated_element_count": _accumulated,
    "accumulated_element_count_with_zero": lambda shapes: np.concatenate([[0], _accumulated(shapes)]),
    "max_element_count_as_shape": lambda shapes: np.zeros(max(_counts(shapes))),
    "item_shape": _item_shapes,
    "item_shape_flatten": lambda shapes: _item_shapes(shapes).reshape(-1),
}


log = logging.getLogger(__name__)
_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_OBJECT = np.dtype(object)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy type that carries a dtype: bfloat16 as uint16 bits, strings as objects."""
    return np.dtype({"bytes": "object", "bfloat16": "uint16"}.get(dtype.name, dtype.name))


class OutputCheck:
    """Checks the outputs of every batch of one model against their specs. 0.7 us for one good output."""

    def __init__(self, specs: Mapping[str, TensorSpec], *, batched: bool) -> None:
        self._batched = batched
        self._wanted = [(name, numpy_dtype(spec.dtype), spec.shape) for name, spec in specs.items()]

    def __call__(self, inputs: Arrays, outputs: Any) -> Arrays:
        """Return the outputs, cast where that is allowed. Raises ServeError (INTERNAL)."""
        if type(outputs) is not dict and not isinstance(outputs, Mapping):
            raise output_fault(
                f"run must return a dict of arrays by output name, not {type(outputs).__name__}"
            )
        head: tuple[int, ...] = ()
        if self._batched:
            head = next(iter(inputs.values())).shape[:1] if inputs else (1,)
        recast: dict[str, NDArray[Any]] = {}
        for name, dtype, shape in self._wanted:
            array = outputs.get(name)
            # The fast way: exactly what was declared, fixed shape, numbers.
            if (
                type(array) is np.ndarray
                and array.dtype == dtype
                and shape is not None
                and array.shape == head + shape
                and dtype != _OBJECT
            ):
                continue
            recast[name] = self._check(name, array, dtype, shape, head)
        if len(outputs) != len(self._wanted):
            extra = ", ".join(repr(name) for name in outputs if name not in {w[0] for w in self._wanted})
            raise output_fault(f"run returned {extra}, which model.yaml does not declare as an output")
        return {**outputs, **recast} if recast else outputs

    def _check(
        self,
        name: str,
        array: Any,
        dtype: np.dtype[Any],
        shape: tuple[int, ...] | None,
        head: tuple[int, ...],
    ) -> NDArray[Any]:
        if array is None:
            raise output_fault(f"run did not return output {name!r}")
        if isinstance(array, np.generic):  # what numpy makes of arithmetic on an array without axes
            array = np.asarray(array)
        if not isinstance(array, np.ndarray):
            raise output_fault(f"output {name!r} must be a numpy array, not {type(array).__name__}")
        tensor: NDArray[Any] = array if array.dtype == dtype else _cast(name, array, dtype)
        if tensor.shape[: len(head)] != head:
            raise rows_fault(name, tensor.shape, head[0])
        row = tensor.shape[len(head) :]
        if shape is not None and not fits_shape(row, shape):
            raise output_fault(
                f"output {name!r} has rows of shape {list(row)}, model.yaml says {list(shape)}"
            )
        if dtype == _OBJECT and not all(isinstance(item, bytes | str) for item in tensor.flat):
            wrong = next(item for item in tensor.flat if not isinstance(item, bytes | str))
            raise output_fault(f"output {name!r} must hold bytes or str, but holds {type(wrong).__name__}")
        return tensor


def _cast(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if array.dtype == _FLOAT64 and dtype == _FLOAT32:
        return array.astype(_FLOAT32)
    if dtype == _OBJECT and array.dtype.kind in "SU":
        return array.astype(object)
    wanted = "bytes (an object array of bytes or str)" if dtype == _OBJECT else dtype.name
    order = "" if array.dtype.isnative else "big-endian "
    raise output_fault(f"output {name!r} is {order}{array.dtype.name}, model.yaml says {wanted}")


def output_fault(text: str, reason: Reason = Reason.UNSPECIFIED) -> ServeError:
    """Log that a model returned what it does not declare, and return the error for its callers."""
    log.warning("the model's answer is not what it declares: %s", text)
    return ServeError(Kind.INTERNAL, text, reason=reason)


def rows_fault(name: str, shape: Sequence[int], rows: int) -> ServeError:
    """Return the error of an output whose first axis is not the `rows` of its batch."""
    reason = Reason.OUTPUT_ROWS if shape else Reason.SCALAR_OUTPUT
    return output_fault(f"output {name!r} has shape {list(shape)}, but the batch has {rows} rows", reason)
