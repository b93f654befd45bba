"""What the scheduler asks of a model: a cache of rows, and logits for a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class Chunk:
    """A stretch of one prompt: `count` tokens that lie at `offset` in the plan and become positions `start`
    and on of the row."""

    row: int
    offset: int
    count: int
    start: int


@dataclass(slots=True)
class Plan:
    """One step: int64 arrays. The first `writing` tokens belong to rows 0, 1, ... of the cache, one each;
    then come the chunks. `wanted` are the places in `tokens` whose logits are needed, `pooled` those whose
    hidden states are; None for none."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    writing: int
    chunks: list[Chunk]
    wanted: NDArray[np.int64]
    pooled: NDArray[np.int64] | None = None


class Cache(Protocol):
    """Rows of keys and values. All of it is finite at any time: what is stale is masked, never looked at, but
    nothing times NaN is NaN."""

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a row."""

    def swap(self, one: int, other: int, count: int) -> None:
        """Exchange the first `count` positions of two rows."""

    def wipe(self, row: int, count: int) -> None:
        """Zeros instead of what may hold NaN."""


class Model(Protocol):
    """Weights, and the cache that belongs to them."""

    @property
    def cache(self) -> Cache:
        """Its rows."""

    def forward(self, plan: Plan) -> NDArray[np.float32]:
        """Logits [wanted, vocab], the caller's until the next call. Raises MemoryError when there is no room
        to compute them: the plan may be asked again, or a smaller one."""

    def states(self) -> NDArray[np.float32]:
        """Hidden states [pooled, width] of the last plan that was computed, behind the last norm."""

    def close(self) -> None:
        """Give memory back."""
