"""Numbers are read when their copy is over, and not before."""

from __future__ import annotations

import numpy as np
import torch

from fastserve.backends.llm.torch_model import HostCopy

FOUND = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def test_on_a_cpu_nothing_is_copied():
    found = HostCopy(torch.device("cpu")).bring(FOUND)
    assert found.ctypes.data == FOUND.data_ptr()


def test_what_a_device_has_is_waited_for_in_memory_of_its_own():
    made, waited = [], []

    class Room:
        def __init__(self, like: torch.Tensor) -> None:
            self.like, self.there, self.copied = like, torch.full_like(like, -1), False
            made.append(self)

        def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            self.copied = source is FOUND

        def numpy(self) -> np.ndarray:
            return self.there.numpy()

    class Mark:
        def synchronize(self) -> None:
            assert made[-1].copied  # the event is behind the copy
            made[-1].there.copy_(FOUND)
            waited.append(self)

    landing = HostCopy(torch.device("meta"), Room, Mark)
    first, second = landing.bring(FOUND), landing.bring(FOUND)
    np.testing.assert_array_equal(first, FOUND.numpy())
    assert len(waited) == 2
    assert not np.shares_memory(first, second)
