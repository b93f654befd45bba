"""The reshape of a config.pbtxt: clients see `dims`, the model `reshape.shape`, of as many elements.

    dims [ 4 ]       reshape [ 2, 2 ]       rows of 4 become rows of 2 x 2
    dims [ -1, 6 ]   reshape [ -1, 3, 2 ]   an axis of any length keeps its length

Without a copy: arrays are C-contiguous. Nothing is checked here that `repository.triton_rules` has checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.config.options import Options
from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # name -> what it is, what it becomes


def reshapes_of(options: Options) -> tuple[Shapes, Shapes]:
    """Of inputs on their way in, of outputs on their way out."""
    given = options.reshaped_inputs, options.reshaped_outputs
    return (
        {name: (tuple(one.dims), tuple(one.shape)) for name, one in given[0].items()},
        {name: (tuple(one.shape), tuple(one.dims)) for name, one in given[1].items()},
    )


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
