"""The reshape of a config.pbtxt: clients see `dims`, the model `reshape.shape`, of as many elements.

    dims [ 4 ]       reshape [ 2, 2 ]       rows of 4 become rows of 2 x 2
    dims [ -1, 6 ]   reshape [ -1, 3, 2 ]   an axis of any length keeps its length

Without a copy: arrays are C-contiguous. Nothing is checked here that `repository.triton_rules` has checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # name -> what it is, what it becomes


def read_reshapes(config: Mapping[str, Any]) -> tuple[Shapes, Shapes]:
    """Of a model's config as the worker is sent it: inputs on their way in, outputs on their way out."""
    triton = config.get("triton") or {}
    return (
        {name: (dims, shape) for name, dims, shape in _given(triton.get("input"))},
        {name: (shape, dims) for name, dims, shape in _given(triton.get("output"))},
    )


def _given(tensors: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [
        (tensor["name"], tuple(tensor["dims"]), tuple(tensor["reshape"]["shape"]))
        for tensor in tensors or ()
        if tensor.get("reshape") is not None
    ]


def reshape(arrays: Arrays, shapes: Shapes, *, batched: bool) -> Arrays:
    """The arrays with those named in `shapes` reshaped; rows stay rows. Raises ServeError INTERNAL for an
    output whose elements do not fit."""
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
