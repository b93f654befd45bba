"""One bound for a process, of the claims of all models in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fastserve.backends.frameworks import torch_tensors
from fastserve.backends.frameworks.torch_tensors import bound_memory, unbound_memory

GPU = SimpleNamespace(type="cuda", index=0)


class Torch:
    """The part of torch that is asked, for a device of 1000 bytes."""

    def __init__(self) -> None:
        self.cuda = self
        self.shares: list[float] = []

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=1000)

    def set_per_process_memory_fraction(self, share, device):
        assert device is GPU
        self.shares.append(share)


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setattr(torch_tensors, "_claims", {})
    return Torch()


def test_the_bound_is_the_sum_and_there_is_none_with_one_that_claims_nothing(torch):
    for nbytes in (200, 300, 0):
        bound_memory(torch, GPU, nbytes)
    for nbytes in (0, 200, 300):
        unbound_memory(torch, GPU, nbytes)
    assert torch.shares == [0.2, 0.5, 1.0, 0.5, 0.3, 1.0]


def test_more_than_there_is_is_all_there_is(torch):
    bound_memory(torch, GPU, 2000)
    assert torch.shares == [1.0]


def test_a_cpu_has_no_bound_and_what_was_not_claimed_is_not_given_back(torch):
    bound_memory(torch, SimpleNamespace(type="cpu", index=None), 100)
    unbound_memory(torch, None, 100)
    unbound_memory(torch, GPU, 100)
    assert torch.shares == []
