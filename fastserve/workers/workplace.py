"""Where a runner works: slots of this arena, at this worker's end of the ring, with this backend. What the
runners' constructors take, as one thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fastserve._ext.batch_ring import BatchRing
    from fastserve.workers.arena import Arena


class Workplace(NamedTuple):
    """`config` is model.yaml as plain values. What the backend has to be able to, its runner says."""

    arena: Arena
    ring: BatchRing
    backend: Any
    config: Mapping[str, Any]
