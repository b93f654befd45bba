"""A text as one vector: the hidden states of its tokens, as they are computed, made one.

pool.places(chunk, last=...)   which tokens' states are wanted
pool.add(states)               as often as there are chunks
pool.vector()                  the mean of all, or the last, or the first; of length 1 where that is asked for
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.text.model import Chunk
from fastserve.codec.text import Extra, Finish, Info, write_text
from fastserve.config.text import TextOptions
from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_VECTOR = "the model computed NaN or infinity"
NONE_MADE = "this model makes no embeddings (text.pooling)"


class Pool:
    """Of one prompt. `how` is TextOptions.pooling."""

    __slots__ = ("_count", "_how", "_normalize", "_sum")

    def __init__(self, how: str, *, normalize: bool) -> None:
        self._how, self._normalize = how, normalize
        self._sum: Any = 0.0
        self._count = 0

    def places(self, chunk: Chunk, *, last: bool) -> NDArray[np.int64]:
        """Places in the plan. `last`: the prompt ends with this chunk."""
        end = chunk.offset + chunk.count
        if self._how == "mean":
            return np.arange(chunk.offset, end)
        if self._how == "last":
            return np.arange(end - last, end)
        return np.arange(chunk.offset, chunk.offset + (chunk.start == 0))

    def add(self, states: NDArray[np.float32]) -> None:
        """States [places, width] of the next chunk."""
        self._sum = self._sum + states.sum(0, dtype=np.float64)
        self._count += len(states)

    def vector(self) -> NDArray[np.float32]:
        """[width]; the prompt was read."""
        return finish_vector(self._sum / self._count, normalize=self._normalize)


def make_pool(info: Info, options: TextOptions) -> Pool:
    """Raises ServeError where the model makes no vectors."""
    if not info.embeds:
        raise ServeError(Kind.UNIMPLEMENTED, NONE_MADE)
    return Pool(options.pooling, normalize=options.normalize is not False)


def finish_vector(vector: NDArray[Any], *, normalize: bool) -> NDArray[np.float32]:
    """float32; of length 1, but zeros stay zeros."""
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype("<f4")


def tell_vector(vector: NDArray[np.float32]) -> tuple[Finish, bytes]:
    """The last record of a sequence that wanted this vector."""
    if not np.isfinite(vector).all():
        return Finish.FAILED, write_text(Extra(message=NO_VECTOR, kind=Kind.INTERNAL.value))
    return Finish.STOP, write_text(Extra(vector=vector.tobytes()))
