"""A folder's weights on torch, run over plans: protocols.ModelRunner.

`FusedModel` is the forward of Llama and its relatives, written out: query, key and value in one product, gate
and up in one, tables of the rotary embedding, residuals added by the products. It has the weights of
transformers' model and the same results, which the tests compare. Models of another form run in transformers'
own code. On a small model half of a step is spent between products, in that code and in Python's.

A model computes a ragged step as one sequence of [1, tokens]; `Ragged` maps tokens to sequences in its
attention:

    model(tokens, ..., ragged=Ragged(plan, cache)) -> each layer -> attend(..., ragged=...) -> cache, softmax

A Ragged is passed through the model's call: no engine in the process sees another's batch. Sequences that
decode are rows 0, 1, ... of the cache: their keys and values are a view of it, masked behind each one's own
length. Heads that share a key are an axis of the query: nothing is repeated.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import AttentionInterface, AttentionMaskInterface

from fastserve.backends.llm.kv_cache import STRIDE, CacheSize, RowCache, Shape, zero_pages
from fastserve.backends.llm.protocols import Chunk, StepPlan
from fastserve.backends.model_errors import is_out_of_memory

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


class HostCopy:
    """Copies a step's results from the device to pinned host memory, waiting for an event of their own; on a
    CPU there is nothing to copy. `empty` and `mark` replace torch's in tests.

    Buffers are not reused here: callers may still hold the last step's logits. torch's allocator keeps
    pinned memory for the next tensor of that size."""

    def __init__(self, device: torch.device, empty: Any = None, mark: Any = None) -> None:
        self._away = device.type != "cpu"
        self._empty, self._mark = empty or _pinned, mark or _recorded

    def bring(self, found: torch.Tensor) -> np.ndarray:
        """Return a contiguous tensor as an array, once it is copied."""
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
    """Return an event behind all work on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def fuse(model: Any, tokens: int) -> FusedModel | None:
    """Return the fused model, None for one of another form. Takes the model's weights, a layer at a time.
    `tokens`: positions at most."""
    config = model.config
    if config.model_type not in _FAMILIES or config.hidden_act != "silu" or model.lm_head.bias is not None:
        return None
    layers = model.model.layers
    if any(one.self_attn.o_proj.bias is not None or one.mlp.down_proj.bias is not None for one in layers):
        return None
    return FusedModel(model, tokens)


class FusedModel:
    """The fused forward: from one step's tokens [count] and positions to logits [wanted, vocab] and hidden
    states [pooled, width]."""

    def __init__(self, model: Any, tokens: int) -> None:
        core = model.model
        self._embedding, self._head = core.embed_tokens.weight, model.lm_head.weight
        self._norm, self._eps = core.norm.weight, core.norm.variance_epsilon
        self._width = core.norm.weight.shape
        self._cos, self._sin = _tables(core, tokens)
        self._layers = [_FusedLayer(layer, model.config) for layer in core.layers]

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        pooled: torch.Tensor | None,
        ragged: Ragged,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`wanted`: places in `tokens`, None for all; `pooled`: others, None for none."""
        hidden = embedding(tokens, self._embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        for number, layer in enumerate(self._layers):
            hidden = layer(number, hidden, cos, sin, ragged)
        states = None if pooled is None else rms_norm(hidden[pooled], self._width, self._norm, self._eps)
        if wanted is not None:
            hidden = hidden[wanted]
        return linear(rms_norm(hidden, self._width, self._norm, self._eps), self._head), states


class _FusedLayer:
    def __init__(self, layer: Any, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._heads = config.num_attention_heads + config.num_key_value_heads
        self._queries, self._keys = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._scaling = attention.head_dim, attention.scaling
        self._window = _window(attention, config)
        self._norm, self._eps = layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon
        self._mlp_norm, self._width = layer.post_attention_layernorm.weight, self._norm.shape
        self._qkv, self._bias = _join(attention, "q_proj", "k_proj", "v_proj")
        self._gate_up, self._mlp_bias = _join(mlp, "gate_proj", "up_proj")
        self._out, self._down = attention.o_proj.weight.t(), mlp.down_proj.weight.t()
        self._head_norms = _head_norms(attention, self._queries, self._keys)

    def __call__(
        self, number: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ragged: Ragged
    ) -> torch.Tensor:
        count, heads, dim = hidden.shape[0], self._heads, self._dim
        made = linear(rms_norm(hidden, self._width, self._norm, self._eps), self._qkv, self._bias)
        made = made.view(count, -1, dim)
        turned = made[:, :heads]
        if self._head_norms is not None:
            turned = rms_norm(turned, (dim,), None, self._eps) * self._head_norms
        halves = torch.cat((turned[..., dim // 2 :], turned[..., : dim // 2]), -1)
        turned = torch.addcmul(turned * cos, halves, sin)
        query, key = turned[:, : self._queries], turned[:, self._queries :]
        value = made[:, heads:]
        seen = ragged.attend(
            Layer(
                number,
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                self._scaling,
                self._window,
            )
        )
        hidden = torch.addmm(hidden, seen.view(count, -1), self._out)
        gate, up = linear(
            rms_norm(hidden, self._width, self._mlp_norm, self._eps), self._gate_up, self._mlp_bias
        ).chunk(2, -1)
        return torch.addmm(hidden, silu(gate) * up, self._down)


def _join(module: Any, *names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights of several products as one, and remove them from the module: memory holds them
    twice for one layer at most."""
    parts = [getattr(module, name) for name in names]
    weight = torch.cat([part.weight for part in parts])
    biased = parts[0].bias is not None
    bias = torch.cat([part.bias for part in parts]) if biased else None
    for name in names:
        setattr(module, name, None)
    return weight, bias


def _tables(core: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines by position, [tokens, 1, dim]; the sines carry the sign of the turned
    half."""
    weight = core.embed_tokens.weight
    positions = torch.arange(tokens, device=weight.device)[None]
    cos, sin = core.rotary_emb(weight[:1], positions)
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    return cos[0, :, None], signed[0, :, None]


def _window(attention: Any, config: Any) -> int:
    """Return the sliding window of one layer: Mistral has it for all, Qwen for some."""
    found = config.sliding_window if config.model_type == "mistral" else None
    return getattr(attention, "sliding_window", None) or found or NEVER


def _head_norms(attention: Any, queries: int, keys: int) -> torch.Tensor | None:
    """Return Qwen3's norms of each head's query and key, [heads, dim]."""
    if getattr(attention, "q_norm", None) is None:
        return None
    query, key = attention.q_norm.weight, attention.k_norm.weight
    return torch.cat((query.expand(queries, -1), key.expand(keys, -1)))


class TorchModel:
    """A ModelRunner on torch, with its cache. `model` is transformers' or FusedModel."""

    def __init__(self, model: Any, cache: RowCache) -> None:
        self.cache = cache
        with torch.inference_mode():
            self._fused = fuse(model, cache.data.shape[-2])
        self._model: Any = model if self._fused is None else None
        self._device = cache.data.device
        self._states: torch.Tensor | None = None
        self._landing = HostCopy(self._device)
        # Four axes: transformers takes it for a mask that is finished. Attention here does not look at it.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self._device)

    def forward(self, plan: StepPlan) -> np.ndarray:
        """Return the logits of a plan. Raises MemoryError when torch is out of memory."""
        try:
            with torch.inference_mode():
                return self._forward(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # here, where no traceback holds the step's tensors any longer
        raise MemoryError("torch has no memory for this step")

    def states(self) -> np.ndarray:
        """Return the hidden states that the last plan wanted."""
        states, self._states = self._states, None
        assert states is not None
        return self._landing.bring(states.float())

    def close(self) -> None:
        """Drop weights and cache."""
        del self._model, self._fused, self.cache
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, plan: StepPlan) -> np.ndarray:
        ragged = Ragged(plan, self.cache)
        tokens, wanted = torch.from_numpy(plan.tokens).to(self._device), None
        if plan.chunks:
            wanted = torch.from_numpy(plan.wanted).to(self._device)
        pooled = None if plan.pooled is None else torch.from_numpy(plan.pooled).to(self._device)
        logits, self._states = (self._fused or self._run_plain)(
            tokens, ragged.positions, wanted, pooled, ragged
        )
        return self._landing.bring(logits.float().contiguous())

    def _run_plain(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        pooled: torch.Tensor | None,
        ragged: Ragged,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        made = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=0 if wanted is None else wanted,
            output_hidden_states=pooled is not None,
            ragged=ragged,
        )
        return made.logits[0], None if pooled is None else made.hidden_states[-1][0, pooled]
