"""Keys and values of every sequence: one tensor, a row for each; and how many rows there are.

    [layer, key or value, row, head, position, dim]

The number of rows is decided once, at load: nothing runs out later. Every sequence has a row of `max_tokens`;
`max_sequences` and bytes bound the rows.

The tensor is torch's, or numpy's where a model runs without torch; this file imports neither framework.
All of it is finite at any time (see protocols.KVCache). On a CPU, positions that no sequence has used take no
memory: the system maps zeros when a page is first written. torch.zeros would write all of it.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastserve.errors import ConfigError
from fastserve.settings.model_options import TextOptions

log = logging.getLogger(__name__)
STRIDE = 32
"""A row's positions are a multiple of this: attention looks at whole strides."""
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class CacheSize(NamedTuple):
    """Number of rows, and tokens of each."""

    slots: int
    tokens: int


def host_bytes() -> int:
    """Return the memory of this machine, or the control group's limit."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP:
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(found)


def find_cache_size(
    options: TextOptions, model_tokens: int, token_bytes: int, memory_bytes: int
) -> CacheSize:
    """Return the cache size for a model. `token_bytes`: bytes of one position, all layers. Raises
    ConfigError when the configured size does not fit."""
    if options.max_tokens > model_tokens:
        raise ConfigError(f"text.max_tokens: given {options.max_tokens}, allowed: at most {model_tokens}")
    tokens = options.max_tokens or model_tokens
    budget = options.kv_bytes or memory_bytes // 4
    slots = min(options.max_sequences, budget // row_bytes(tokens, token_bytes))
    if not slots and not options.max_tokens:
        fits = budget // token_bytes // STRIDE * STRIDE
        if fits:
            log.warning(
                "the cache has room for %d of the model's %d tokens: text.kv_bytes", fits, model_tokens
            )
            return CacheSize(1, fits)
    if not slots:
        need = row_bytes(tokens, token_bytes)
        raise ConfigError(
            f"text.kv_bytes: {budget} bytes hold no sequence of {tokens} tokens: allowed: at least {need}, "
            "or a lower text.max_tokens"
        )
    if slots < options.max_sequences:
        text = "the cache has room for %d sequences of %d tokens, not for %d: text.max_tokens, text.kv_bytes"
        log.warning(text, slots, tokens, options.max_sequences)
    return CacheSize(slots, tokens)


def row_bytes(tokens: int, token_bytes: int) -> int:
    """Return the bytes of one sequence."""
    return -(-tokens // STRIDE) * STRIDE * token_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers, heads and size of one position."""

    layers: int
    heads: int
    dim: int

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of one position, all layers, keys and values."""
        return self.layers * 2 * self.heads * self.dim * itemsize

    def tensor(self, room: CacheSize) -> tuple[int, ...]:
        """Return the axes of the cache's tensor."""
        positions = -(-room.tokens // STRIDE) * STRIDE
        return self.layers, 2, room.slots, self.heads, positions, self.dim


def shape_of(config: Any) -> Shape:
    """Return the shape for a config of transformers, or one with the same fields."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(config.num_hidden_layers, heads, dim)


def zero_pages(nbytes: int) -> mmap.mmap:
    """Return lazily mapped zeros. Raises MemoryError."""
    try:
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError("the system has no room for the cache") from error


class RowCache:
    """`keys[layer]` and `values[layer]` are [row, head, position, dim], views of `data`, which is zeros."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.keys, self.values = list(data[:, 0]), list(data[:, 1])

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a row."""
        self.data[:, :, target, :, :count] = self.data[:, :, source, :, :count]

    def swap(self, one: int, other: int, count: int) -> None:
        """Exchange the first `count` positions of two rows, a layer at a time: little memory besides."""
        for layer in self.data[:, :, :, :, :count]:
            layer[:, [one, other]] = layer[:, [other, one]]

    def wipe(self, row: int, count: int, begin: int = 0) -> None:
        """Zeros instead of what may hold NaN."""
        self.data[:, :, row, :, begin:count] = 0
