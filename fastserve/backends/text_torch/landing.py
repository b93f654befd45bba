"""How a step's numbers come from the device to the host: into pinned memory, by one DMA that is waited for by
an event of its own. On a CPU they are where they have to be.

Not a buffer that is used again: who draws from the last step's logits may still hold them. torch keeps pinned
memory for the next tensor of that size, so after the first steps nothing is pinned anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np


class Landing:
    """For tensors of one device. `empty` and `mark` stand for torch's in tests."""

    def __init__(self, device: torch.device, empty: Any = None, mark: Any = None) -> None:
        self._away = device.type != "cpu"
        self._empty, self._mark = empty or _pinned, mark or _recorded

    def bring(self, found: torch.Tensor) -> np.ndarray:
        """A contiguous tensor as an array, once it is there."""
        if self._away:
            there = self._empty(found)
            there.copy_(found, non_blocking=True)
            self._mark().synchronize()
            found = there
        array: np.ndarray = found.numpy()
        return array


def _pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _recorded() -> torch.cuda.Event:
    """An event behind what is enqueued on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event
