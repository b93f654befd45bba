"""Attention of a ragged step: the model computes [1, tokens] as one sequence; `Ragged` maps tokens to
sequences.

    model(tokens, ..., ragged=Ragged(plan, cache)) -> each layer -> attend(..., ragged=...) -> cache, softmax

It is passed through the model's call: no engine in the process sees another's batch. Sequences that decode
are rows 0, 1, ... of the cache: their keys and values are a view of it, masked behind each one's own
length. Heads that share a key are an axis of the query: nothing is repeated.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from fastserve.backends.llm.kv_cache import STRIDE, CacheSize, RowCache, Shape, zero_pages
from fastserve.backends.llm.protocols import Chunk, StepPlan

NAME = "fastserve_ragged"
NEVER = 1 << 40


def make_cache(shape: Shape, room: CacheSize, dtype: torch.dtype, device: torch.device) -> RowCache:
    """Return a cache on a device. Raises MemoryError, and torch's own error on a GPU."""
    size = shape.tensor(room)
    if device.type != "cpu":
        return RowCache(torch.zeros(size, dtype=dtype, device=device))
    return RowCache(torch.frombuffer(zero_pages(prod(size) * dtype.itemsize), dtype=dtype).view(size))


def register() -> None:
    """Register the attention function with transformers. It has no state: calling this twice is fine."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    ragged: Ragged,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of one layer for transformers: query [1, heads, tokens, dim] -> [1, tokens, heads,
    dim]."""
    layer = Layer(module.layer_idx, query[0], key[0], value[0], scaling, sliding_window or NEVER)
    return ragged.attend(layer), None


class Layer(NamedTuple):
    """The tensors of one layer's attention: query [heads, tokens, dim], key and value [key heads, tokens,
    dim]."""

    number: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float | None
    window: int


class Ragged:
    """One step's batch on the device."""

    def __init__(self, plan: StepPlan, cache: RowCache) -> None:
        self._cache, self._chunks, self._writing = cache, plan.chunks, plan.writing
        self._dtype, self._device = cache.data.dtype, cache.data.device
        self.positions = torch.from_numpy(plan.positions).to(self._device)
        self._at = self.positions[: plan.writing]
        self._rows = torch.arange(plan.writing, device=self._device)
        longest = int(plan.positions[: plan.writing].max(initial=0)) + 1
        self._length = -(-longest // STRIDE) * STRIDE
        self._masks: dict[tuple[int, int], torch.Tensor | None] = {}

    def attend(self, layer: Layer) -> torch.Tensor:
        """Write new keys and values into the cache; return the attention of each sequence over its own, [1,
        tokens, heads, dim]."""
        heads, tokens, dim = layer.query.shape
        layer = layer._replace(query=layer.query.unflatten(0, (layer.key.shape[0], -1)))
        parts = [self._attend_writing(layer)] if self._writing else []
        parts += [self._attend_chunk(layer, one) for one in self._chunks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(1, tokens, heads, dim)

    def _attend_writing(self, layer: Layer) -> torch.Tensor:
        count, number = self._writing, layer.number
        keys, values = self._cache.keys[number], self._cache.values[number]
        keys[self._rows, :, self._at] = layer.key[:, :count].transpose(0, 1)
        values[self._rows, :, self._at] = layer.value[:, :count].transpose(0, 1)
        return scaled_dot_product_attention(
            layer.query[:, :, :count].permute(2, 0, 1, 3),
            keys[:count, :, : self._length],
            values[:count, :, : self._length],
            attn_mask=self._writing_mask(layer.window),
            scale=layer.scaling,
        ).reshape(count, -1, layer.query.shape[3])

    def _attend_chunk(self, layer: Layer, chunk: Chunk) -> torch.Tensor:
        query, number = layer.query, layer.number
        new, end = slice(chunk.offset, chunk.offset + chunk.count), chunk.start + chunk.count
        keys, values = self._cache.keys[number][chunk.row], self._cache.values[number][chunk.row]
        keys[:, chunk.start : end] = layer.key[:, new]
        values[:, chunk.start : end] = layer.value[:, new]
        sharing = (-1, query.shape[1], -1, -1)
        mask = self._chunk_mask(chunk, layer.window)
        return (
            scaled_dot_product_attention(
                query[:, :, new],
                keys[:, None, :end].expand(sharing),
                values[:, None, :end].expand(sharing),
                attn_mask=mask,
                is_causal=mask is None,
                scale=layer.scaling,
            )
            .permute(2, 0, 1, 3)
            .reshape(chunk.count, -1, query.shape[3])
        )

    def _writing_mask(self, window: int) -> torch.Tensor | None:
        if (-1, window) not in self._masks:
            behind = self._at[:, None] - torch.arange(self._length, device=self._device)
            self._masks[-1, window] = self._mask(behind, window)[:, None, None]
        return self._masks[-1, window]

    def _chunk_mask(self, chunk: Chunk, window: int) -> torch.Tensor | None:
        """Return the mask of a chunk; None for the causal triangle of a prompt's beginning."""
        if (chunk.offset, window) not in self._masks:
            end, mask = chunk.start + chunk.count, None
            if chunk.start or end > window:
                at = torch.arange(end, device=self._device)
                mask = self._mask(at[chunk.start :, None] - at, window)
            self._masks[chunk.offset, window] = mask
        return self._masks[chunk.offset, window]

    def _mask(self, behind: torch.Tensor, window: int) -> torch.Tensor:
        """Return 0 where a key is at most `window` - 1 positions behind its query, and -inf elsewhere."""
        hidden = (behind < 0) | (behind >= window)
        zeros = torch.zeros(behind.shape, dtype=self._dtype, device=self._device)
        return zeros.masked_fill_(hidden, float("-inf"))
