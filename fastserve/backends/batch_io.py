"""Requests of different shapes in one run: a config.pbtxt's ragged inputs, `batch_input` and `batch_output`.

    requests   x [1, 2], x [1, 4]                        ragged: one after the other, without any axes
    the model  x [6]                                     BATCH_ACCUMULATED_ELEMENT_COUNT of x: [2, 6]
               y [6]                                     BATCH_SCATTER_WITH_INPUT_SHAPE of x:
    responses  y [1, 2], y [1, 4]

What each kind holds is Triton's (backend: BackendInputCollector, BackendOutputResponder). A request's
elements are counted over all of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.config.options import MadeInput, Options
from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A batch input: tensors of these names get what `make` says of the shapes of `source`."""

    names: tuple[str, ...]
    source: str
    dtype: Any
    make: Callable[[Sequence[Shape]], Any]


@dataclass(frozen=True, slots=True)
class Scattered:
    """A batch output: its elements go to requests in turn, as many as its `dims` say, with the lengths of
    `source` in place of -1. `dims` have the batch axis."""

    source: str
    dims: Shape


class BatchIO:
    """Joins requests into what a model takes, and gives each its part of what came out."""

    def __init__(self, options: Options) -> None:
        """`options` are those of a model with a batch axis."""
        self.ragged = set(options.ragged_inputs)
        self.made = [_open_made(one) for one in options.made_inputs]
        self.scattered = {
            name: Scattered(one.source, tuple(one.dims)) for name, one in options.scattered_outputs.items()
        }

    def __bool__(self) -> bool:
        return bool(self.ragged or self.made or self.scattered)

    @property
    def names(self) -> set[str]:
        """Inputs of the model that no client sends."""
        return {name for made in self.made for name in made.names}

    def join(self, requests: Sequence[Arrays]) -> Arrays:
        """What the model gets."""
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
        """Each request's outputs. Raises ServeError INTERNAL when there are not enough rows or elements."""
        parts: list[dict[str, Any]] = [{} for _ in requests]
        for name, array in outputs.items():
            scattered, at = self.scattered.get(name), 0
            flat = array if scattered is None else array.reshape(-1)
            for part, request in zip(parts, requests, strict=True):
                shape = _rows_of(request) if scattered is None else _filled(scattered, request)
                mine = flat[at : at + prod(shape)]
                if mine.shape[0] < prod(shape):
                    text = f"output {name!r} has {flat.shape[0]} elements, its requests need more"
                    raise ServeError(Kind.INTERNAL, text)
                part[name] = mine if scattered is None else mine.reshape(shape)
                at += prod(shape)
        return parts


def _rows_of(request: Arrays) -> Shape:
    return next(iter(request.values())).shape[:1]


def _filled(scattered: Scattered, request: Arrays) -> Shape:
    shape = request[scattered.source].shape
    if len(shape) < len(scattered.dims):
        shape += (1,) * (len(scattered.dims) - len(shape))
    return tuple(have if want == -1 else want for want, have in zip(scattered.dims, shape, strict=False))


def _open_made(given: MadeInput) -> Made:
    return Made(tuple(given.names), given.source, np.dtype(given.dtype), _KINDS[given.kind])


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
