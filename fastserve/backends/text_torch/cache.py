"""Keys and values of every sequence: one tensor, a row for each.

    [layer, key or value, row, head, position, dim]

All of it is finite at any time (backends.text.model.Cache says why). On a CPU what no sequence has used yet
takes no memory: the system gives zeros when a page is first written. torch.zeros would write all of it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fastserve.backends.text_torch.memory import STRIDE, Room


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one position in the cache."""

    layers: int
    heads: int
    dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Of one position, all layers, keys and values."""
        return self.layers * 2 * self.heads * self.dim * int(dtype.itemsize)


def shape_of(config: Any) -> Shape:
    """Of a transformers config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(config.num_hidden_layers, heads, dim)


def _make_zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Raises MemoryError when the system has no room for it. The tensor holds on to the mapping."""
    try:
        pages = mmap.mmap(-1, prod(size) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError("the system has no room for the cache") from error
    return torch.frombuffer(pages, dtype=dtype).view(size)


class RowCache:
    """`keys[layer]` and `values[layer]` are [row, head, position, dim], views of `data`."""

    def __init__(self, shape: Shape, room: Room, dtype: torch.dtype, device: torch.device) -> None:
        positions = -(-room.tokens // STRIDE) * STRIDE
        size = (shape.layers, 2, room.slots, shape.heads, positions, shape.dim)
        self.data = (
            _make_zeros(size, dtype)
            if device.type == "cpu"
            else torch.zeros(size, dtype=dtype, device=device)
        )
        self.keys, self.values = list(self.data[:, 0]), list(self.data[:, 1])

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a row."""
        with torch.inference_mode():
            self.data[:, :, target, :, :count] = self.data[:, :, source, :, :count]

    def swap(self, one: int, other: int, count: int) -> None:
        """Exchange the first `count` positions of two rows, a layer at a time: little memory besides."""
        with torch.inference_mode():
            for layer in self.data[:, :, :, :, :count]:
                kept = layer[:, one].clone()
                layer[:, one] = layer[:, other]
                layer[:, other] = kept

    def wipe(self, row: int, count: int) -> None:
        """Zeros instead of what may hold NaN."""
        with torch.inference_mode():
            self.data[:, :, row, :, :count] = 0
