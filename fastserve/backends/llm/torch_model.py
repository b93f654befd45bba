"""A folder's weights on torch, run over plans: protocols.ModelRunner.

`FusedModel` is the forward of Llama and its relatives, written out: query, key and value in one product, gate
and up in one, tables of the rotary embedding, residuals added by the products; norms, turns, caps, biases and
MLPs are those of the family. It has the weights of transformers' model and the same results, which the tests
compare. Models of another form run in transformers' own code. On a small model half of a step is spent
between products, in that code and in Python's.

A model computes a ragged step as one sequence of [1, tokens]; `Ragged` maps tokens to sequences in its
attention:

    model(tokens, ..., ragged=Ragged(plan, cache)) -> each layer -> attend(..., ragged=...) -> cache, softmax

A Ragged is passed through the model's call: no engine in the process sees another's batch. Sequences that
decode are rows 0, 1, ... of the cache: their keys and values are a view of it, masked behind each one's own
length. Heads that share a key are an axis of the query: nothing is repeated.
"""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import (
    embedding,
    layer_norm,
    linear,
    rms_norm,
    scaled_dot_product_attention,
    silu,
    softmax,
)
from transformers import AttentionInterface, AttentionMaskInterface

from fastserve._ext import decode_step
from fastserve._ext.skinny_gemm import MOST_ROWS, SkinnyGemm, is_supported
from fastserve.backends.llm.kv_cache import STRIDE, CacheSize, RowCache, Shape, shape_of, zero_pages
from fastserve.backends.llm.lora import Adapters, JoinedRank
from fastserve.backends.llm.protocols import Chunk, StepPlan
from fastserve.backends.model_errors import is_out_of_memory

NAME = "fastserve_ragged"
NEVER = 1 << 40
Norm = Callable[[torch.Tensor], torch.Tensor]
Activation = Callable[[torch.Tensor], torch.Tensor]


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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of one layer for transformers: query [1, heads, tokens, dim] -> [1, tokens, heads,
    dim]. `s_aux` are the sinks [heads] of gpt-oss: scores of a key that is not there."""
    window = sliding_window or NEVER
    layer = Layer(module.layer_idx, query[0], key[0], value[0], scaling, window, softcap, s_aux)
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
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether torch's own kernels compute it."""
        return self.softcap is None and self.sinks is None


class Ragged:
    """One step's batch on the device."""

    def __init__(self, plan: StepPlan, cache: RowCache) -> None:
        self._cache, self._writing = cache, plan.writing
        self._dtype, self._device = cache.data.dtype, cache.data.device
        self.positions = torch.from_numpy(plan.positions).to(self._device)
        drafts = _drafts_beside(plan)
        self._beside = _Beside(plan.writing, drafts, self._device) if drafts else None
        self._chunks = plan.chunks[len(drafts) :]
        count = plan.writing + sum(chunk.count for chunk in drafts)
        self._at = self.positions[:count]
        rows = self._beside and self._beside.rows
        self._rows = torch.arange(count, device=self._device) if rows is None else rows
        longest = int(plan.positions[:count].max(initial=0)) + 1
        self._length = -(-longest // STRIDE) * STRIDE
        self._masks: dict[tuple[int, int], torch.Tensor | None] = {}
        self._is_compiled = self._beside is None and _is_float_on_cpu(cache.data)

    def attend(self, layer: Layer) -> torch.Tensor:
        """Write new keys and values into the cache; return the attention of each sequence over its own, [1,
        tokens, heads, dim]."""
        heads, tokens, dim = layer.query.shape
        layer = layer._replace(query=layer.query.unflatten(0, (layer.key.shape[0], -1)))
        parts = [self._attend_writing(layer)] if self._writing else []
        parts += [self._attend_chunk(layer, one) for one in self._chunks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(1, tokens, heads, dim)

    def _attend_writing(self, layer: Layer) -> torch.Tensor:
        count, rows, number, beside = len(self._at), self._writing, layer.number, self._beside
        keys, values = self._cache.keys[number], self._cache.values[number]
        if self._is_compiled and layer.is_plain:
            return self._attend_compiled(layer, keys, values)
        keys[self._rows, :, self._at] = layer.key[:, :count].transpose(0, 1)
        values[self._rows, :, self._at] = layer.value[:, :count].transpose(0, 1)
        mask = self._writing_mask(layer.window, layer.query.shape[1])
        if beside is None:
            query = layer.query[:, :, :count].permute(2, 0, 1, 3)
        else:
            query = beside.spread(layer.query)
        keys, values = keys[:rows, :, : self._length], values[:rows, :, : self._length]
        if layer.is_plain:
            seen = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=layer.scaling)
        else:
            sinks = None
            if layer.sinks is not None:
                share = layer.query.shape[1]
                sinks = layer.sinks.view(-1, share, 1).repeat_interleave(query.shape[2] // share, 1)
            seen = _attend_capped(query, keys, values, mask, layer, sinks)
        if beside is not None:
            seen = beside.gather(seen, layer.query.shape[1])
        return seen.reshape(count, -1, layer.query.shape[3])

    def _attend_compiled(self, layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write and attend as decode_step.pyx does, which looks at each row's own positions."""
        count, scale = len(self._at), layer.scaling
        query = layer.query[:, :, :count].flatten(0, 1)
        made = query.new_empty((count, query.shape[0], query.shape[2]))
        decode_step.attend(
            _by_token(query),
            _by_token(layer.key[:, :count]),
            _by_token(layer.value[:, :count]),
            keys.numpy(),
            values.numpy(),
            self._at.numpy(),
            made.numpy(),
            scale=query.shape[2] ** -0.5 if scale is None else scale,
            window=layer.window,
            threads=torch.get_num_threads(),
        )
        return made

    def _attend_chunk(self, layer: Layer, chunk: Chunk) -> torch.Tensor:
        query, number = layer.query, layer.number
        new, end = slice(chunk.offset, chunk.offset + chunk.count), chunk.start + chunk.count
        keys, values = self._cache.keys[number][chunk.row], self._cache.values[number][chunk.row]
        keys[:, chunk.start : end] = layer.key[:, new]
        values[:, chunk.start : end] = layer.value[:, new]
        sharing = (-1, query.shape[1], -1, -1)
        mask = self._chunk_mask(chunk, layer.window, plain=layer.is_plain)
        if layer.is_plain:
            seen = scaled_dot_product_attention(
                query[:, :, new],
                keys[:, None, :end].expand(sharing),
                values[:, None, :end].expand(sharing),
                attn_mask=mask,
                is_causal=mask is None,
                scale=layer.scaling,
            )
        else:
            sinks = None if layer.sinks is None else layer.sinks.view(*query.shape[:2], 1, 1)
            seen = _attend_capped(
                query[:, :, new], keys[:, None, :end], values[:, None, :end], mask, layer, sinks
            )
        return seen.permute(2, 0, 1, 3).reshape(chunk.count, -1, query.shape[3])

    def _writing_mask(self, window: int, share: int) -> torch.Tensor | None:
        if (-1, window) not in self._masks:
            at = self._at if self._beside is None else self._at[self._beside.places]
            behind = at[..., None] - torch.arange(self._length, device=self._device)
            mask = self._mask(behind, window)
            mask = mask[:, None] if self._beside is None else mask.repeat(1, share, 1)
            self._masks[-1, window] = mask[:, None]
        return self._masks[-1, window]

    def _chunk_mask(self, chunk: Chunk, window: int, *, plain: bool) -> torch.Tensor | None:
        """Return the mask of a chunk; None for the causal triangle of a prompt's beginning, where torch's
        kernels know it."""
        if (chunk.offset, window) not in self._masks:
            end, mask = chunk.start + chunk.count, None
            if chunk.start or end > window or not plain:
                at = torch.arange(end, device=self._device)
                mask = self._mask(at[chunk.start :, None] - at, window)
            self._masks[chunk.offset, window] = mask
        return self._masks[chunk.offset, window]

    def _mask(self, behind: torch.Tensor, window: int) -> torch.Tensor:
        """Return 0 where a key is at most `window` - 1 positions behind its query, and -inf elsewhere."""
        hidden = (behind < 0) | (behind >= window)
        zeros = torch.zeros(behind.shape, dtype=self._dtype, device=self._device)
        return zeros.masked_fill_(hidden, float("-inf"))


def _is_float_on_cpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu" and tensor.dtype == torch.float32)


def _by_token(heads: torch.Tensor) -> Any:
    """Return [heads, tokens, dim] as an array [tokens, heads, dim], whose dims are contiguous."""
    found = heads.transpose(0, 1)
    return (found if found.stride(2) == 1 else found.contiguous()).numpy()


def _drafts_beside(plan: StepPlan) -> list[Chunk]:
    """Return the drafts of a plan, which come first among its chunks, where one call of attention for all
    rows computes at most twice as many queries as there are; else none: each is a chunk then."""
    drafts = [chunk for chunk in plan.chunks if chunk.row < plan.writing]
    width = 1 + max((chunk.count for chunk in drafts), default=0)
    count = plan.writing + sum(chunk.count for chunk in drafts)
    return drafts if plan.writing * width <= 2 * count else []


class _Beside:
    """Places of drafts beside the tokens of their rows: attention has a query [row, head, token, dim] of one
    token more than the longest draft. A row with fewer has its own token again in the rest, whose result is
    dropped. Keys are read once for all tokens of a row."""

    def __init__(self, writing: int, drafts: list[Chunk], device: torch.device) -> None:
        places = np.repeat(np.arange(writing)[:, None], 1 + max(chunk.count for chunk in drafts), 1)
        rows, columns = [np.arange(writing)], [np.zeros(writing, np.int64)]
        for chunk in drafts:
            columns.append(np.arange(1, chunk.count + 1))
            rows.append(np.full(chunk.count, chunk.row))
            places[chunk.row, 1 : chunk.count + 1] = np.arange(chunk.offset, chunk.offset + chunk.count)
        self.rows = torch.from_numpy(np.concatenate(rows)).to(device)
        self._columns = torch.from_numpy(np.concatenate(columns)).to(device)
        self.places = torch.from_numpy(places).to(device)

    def spread(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries [key heads, share, tokens, dim] by row: [rows, key heads, share * width, dim]."""
        return query[:, :, self.places].permute(2, 0, 1, 3, 4).flatten(2, 3)

    def gather(self, seen: torch.Tensor, share: int) -> torch.Tensor:
        """Return the results of such queries by token: [tokens, key heads, share, dim]."""
        return seen.unflatten(2, (share, -1))[self.rows, :, :, self._columns]


def _attend_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    layer: Layer,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention with a soft cap or with sinks, which torch's kernels lack."""
    scaling = query.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling
    scores = (query @ keys.transpose(-1, -2)) * scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    weights = softmax(scores, -1, dtype=torch.float32)[..., : keys.shape[-2]].to(query.dtype)
    return weights @ values


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


_FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
)
_WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2")
"""Families whose layers all have the config's window."""


class Product:
    """A linear layer: `weight` [outputs, inputs], `bias` [outputs] or None. Float32 products of few rows on a
    CPU are those of ext/skinny_gemm.pyx: torch's library takes twice the time (decision 0055)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._turned = weight.t()
        self._gemm = _make_gemm(weight, bias)

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """Return [count, inputs] -> [count, outputs]."""
        if self._gemm is not None and 0 < len(given) <= MOST_ROWS:
            return self._multiply(self._gemm, given)
        return linear(given, self._weight, self._bias)

    def add(self, hidden: torch.Tensor, given: torch.Tensor, scale: float) -> torch.Tensor:
        """Return `hidden` plus the product times a scale, both [count, outputs]."""
        if self._gemm is not None and 0 < len(given) <= MOST_ROWS:
            return self._multiply(self._gemm, given, hidden, scale)
        made = torch.addmm(hidden, given, self._turned, alpha=scale)
        return made if self._bias is None else made.add_(self._bias, alpha=scale)

    def _multiply(
        self, gemm: SkinnyGemm, given: torch.Tensor, hidden: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        made = given.new_empty((len(given), len(self._weight)))
        base = None if hidden is None else hidden.contiguous().numpy()
        gemm.multiply(given.contiguous().numpy(), made.numpy(), base, scale, torch.get_num_threads())
        return made


def _make_gemm(weight: torch.Tensor, bias: torch.Tensor | None) -> SkinnyGemm | None:
    """Return the product of few rows for a weight, None where this machine or its torch has none."""
    if not _is_float_on_cpu(weight) or not weight.is_contiguous():
        return None
    if not is_supported(torch.get_num_threads()):
        return None
    return SkinnyGemm(weight.detach().numpy(), None if bias is None else bias.detach().numpy())


class Int8Product(Product):
    """A linear layer whose weights are int8, with a scale for each output. Each row of the input is rounded
    to 7 bits with a scale of its own, so its result does not depend on the rows beside it.

    7 bits, as AVX2 adds two products of 8 bits in 16, where they would be cut off; the sums are whole
    numbers, which torch's FBGEMM keeps in 32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias, self._call = bias, getattr(torch.ops.quantized, INT8_CALL)
        weight = weight.detach().float()
        scales = weight.abs().amax(1).clamp_(min=_SMALLEST).div_(_INT8)
        rounded = weight.div(scales[:, None]).round_().to(torch.int8)
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():  # torch will replace its quantized tensors (decision 0049)
            warnings.filterwarnings("ignore", ".*quantized tensor creation functions.*", UserWarning)
            made = torch._make_per_channel_quantized_tensor(rounded, scales.double(), zeros, 0)
        self._packed = torch.ops.quantized.linear_prepack(made, None)

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        scales = given.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST).mul_(1 / _INT7)
        made: torch.Tensor = self._call(given / scales, 1.0, _INT7 + 1, self._packed)
        made.mul_(scales)
        return made if self._bias is None else made.add_(self._bias)

    def add(self, hidden: torch.Tensor, given: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.add(hidden, self(given), alpha=scale)


class AdaptedProduct(Product):
    """A product, or a linear layer of transformers', to which the adapters of a step add."""

    def __init__(self, base: Any, step: Adapters, adapters: Mapping[int, JoinedRank]) -> None:
        """`adapters`: those that add to this product, by number."""
        self._base, self._step, self._adapters = base, step, adapters

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._base(given)
        return self._adapt(made, given) if self._step.groups else made

    def add(self, hidden: torch.Tensor, given: torch.Tensor, scale: float) -> torch.Tensor:
        made: torch.Tensor = self._base.add(hidden, given, scale)
        return self._adapt(made, given, scale) if self._step.groups else made

    def _adapt(self, made: torch.Tensor, given: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        given, target = given.reshape(-1, given.shape[-1]), made.view(-1, made.shape[-1])
        if len(given) != self._step.tokens:
            raise RuntimeError(f"a layer with adapters got {len(given)} of {self._step.tokens} tokens")
        for number, places in self._step.groups:
            if number in self._adapters:
                self._adapters[number].add(target, given, places, scale)
        return made


_INT8, _INT7 = 127, 63
_SMALLEST = 1e-30
"""A scale at least: rows of zeros are zeros."""
INT8_CALL = "linear_with_input_q_dq_qweight_dq_output_fp32"


def use_int8(model: torch.nn.Module) -> None:
    """Give all linear layers of a model int8 weights, a layer at a time."""
    for name, child in list(model.named_children()):
        if type(child) is torch.nn.Linear:
            made = torch.nn.Identity()
            made.forward = Int8Product(child.weight, child.bias)
            setattr(model, name, made)
        else:
            use_int8(child)


def use_adapters(model: torch.nn.Module, adapters: Adapters) -> None:
    """Let adapters add to the linear layers of transformers' model."""
    for name in adapters.layers:
        parent, _, child = name.rpartition(".")
        made = torch.nn.Identity()
        made.forward = AdaptedProduct(model.get_submodule(name), adapters, adapters.join([name]))
        setattr(model.get_submodule(parent), child, made)


class ProductMaker:
    """Makes the products of one model, each with what adapters add to the linear layers that it joins."""

    def __init__(self, kind: type[Product], model: torch.nn.Module, adapters: Adapters | None) -> None:
        self._kind, self._adapters = kind, adapters
        # Each layer is dropped once its weights are taken.
        self._names = {layer: name for name, layer in model.named_modules()} if adapters else {}

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, layers: Sequence[torch.nn.Module] = ()
    ) -> Product:
        """Return the product of `layers`, whose outputs are those of `weight` in this order."""
        made = self._kind(weight, bias)
        joined = self._adapters and self._adapters.join([self._names.pop(layer) for layer in layers])
        return AdaptedProduct(made, self._adapters, joined) if self._adapters and joined else made


def fuse(
    model: Any, tokens: int, kind: type[Product] = Product, adapters: Adapters | None = None
) -> FusedModel | None:
    """Return the fused model, None for one of another form. Takes the model's weights, a layer at a time.
    `tokens`: positions at most."""
    config = model.config
    if config.model_type not in _FAMILIES or getattr(config, "qk_layernorm", False):
        return None
    if adapters is not None and config.model_type == "gpt_neox":  # its joined product has another order
        return None
    return FusedModel(model, tokens, ProductMaker(kind, model, adapters))


class FusedModel:
    """The fused forward: from one step's tokens [count] and positions to logits [wanted, vocab] and hidden
    states [pooled, width]."""

    def __init__(self, model: Any, tokens: int, product: ProductMaker) -> None:
        config, core, head = model.config, model.base_model, model.get_output_embeddings()
        self._embedding, self._head = core.get_input_embeddings().weight, product(head.weight, head.bias)
        self._scale = _embedding_scale(config, self._embedding.dtype)
        self._divisor = float(getattr(config, "logits_scaling", 1.0))
        self._cap = getattr(config, "final_logit_softcapping", None)
        names = ("norm", "final_layernorm", "final_layer_norm")
        self._norm = make_norm(next(getattr(core, name) for name in names if hasattr(core, name)), config)
        kinds = _rope_kinds(core, config)
        self._tables = [_tables(core, tokens, kind) for kind in dict.fromkeys(kinds)]
        places = [list(dict.fromkeys(kinds)).index(kind) for kind in kinds]
        self._layers = [_FusedLayer(*one, config, product) for one in zip(core.layers, places, strict=True)]

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
        if self._scale != 1:
            hidden = hidden * self._scale
        turns = [(cos[positions], sin[positions]) for cos, sin in self._tables]
        for number, layer in enumerate(self._layers):
            hidden = layer(number, hidden, turns, ragged)
        states = None if pooled is None else self._norm(hidden[pooled])
        if wanted is not None:
            hidden = hidden[wanted]
        logits = self._head(self._norm(hidden))
        if self._divisor != 1:
            logits = logits / self._divisor
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits, states


class _FusedLayer:
    """One layer: attention, then or beside it the MLP. Norms stand before them (Llama), behind them (OLMo 2)
    or both (Gemma 2)."""

    def __init__(self, layer: Any, turns: int, config: Any, product: ProductMaker) -> None:
        attention = layer.attention if hasattr(layer, "attention") else layer.self_attn
        out = attention.dense if hasattr(attention, "dense") else attention.o_proj
        shape, scale = shape_of(config), float(getattr(config, "residual_multiplier", 1.0))
        self._queries, self._heads, self._dim = (
            config.num_attention_heads, config.num_attention_heads + shape.heads, shape.dim,
        )  # fmt: skip
        self._scaling, self._window = attention.scaling, _window(attention, config)
        self._softcap = getattr(attention, "attn_logit_softcapping", None)
        self._turns = turns if getattr(attention, "use_rope", True) else -1
        self._qkv = product(*_join_queries(attention, self._queries, self._dim))
        self._query_norm, self._key_norm, self._head_norms = _norms_of_heads(attention, config, shape.heads)
        self._norms_heads = self._head_norms is not None or self._query_norm is not None
        before, after, mlp_before, mlp_after = (
            one and make_norm(one, config) for one in _norms_of_layer(layer)
        )
        self._norm, self._mlp_norm = before, mlp_before
        self._out = _make_output(product(out.weight, out.bias, [out]), after, scale)
        self._mlp = _make_mlp(layer.mlp, mlp_after, scale, product)
        self._parallel = config.model_type == "phi" or bool(getattr(config, "use_parallel_residual", False))

    def __call__(
        self,
        number: int,
        hidden: torch.Tensor,
        turns: list[tuple[torch.Tensor, torch.Tensor]],
        ragged: Ragged,
    ) -> torch.Tensor:
        count, heads = hidden.shape[0], self._heads
        normed = hidden if self._norm is None else self._norm(hidden)
        made = self._qkv(normed)
        split = made.view(count, -1, self._dim)
        turned = self._normed_heads(made) if self._norms_heads else split[:, :heads]
        if self._turns >= 0:
            turned = _turn(turned, *turns[self._turns])
        query, key = turned[:, : self._queries], turned[:, self._queries :]
        value = split[:, heads:]
        seen = ragged.attend(
            Layer(
                number,
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                self._scaling,
                self._window,
                self._softcap,
            )
        ).reshape(count, -1)
        if not self._parallel:
            hidden = self._out(hidden, seen)
            normed = hidden if self._mlp_norm is None else self._mlp_norm(hidden)
            return self._mlp(hidden, normed)
        normed = normed if self._mlp_norm is None else self._mlp_norm(hidden)
        return self._mlp(self._out(hidden, seen), normed)

    def _normed_heads(self, made: torch.Tensor) -> torch.Tensor:
        """Return queries and keys [tokens, heads, dim], normed: each head (Qwen 3, Gemma 3), or all at once
        (OLMo 2)."""
        queries, both = self._queries * self._dim, self._heads * self._dim
        if self._query_norm is None or self._key_norm is None:
            assert self._head_norms is not None
            return self._head_norms(made[:, :both].unflatten(1, (-1, self._dim)))
        normed = torch.cat((self._query_norm(made[:, :queries]), self._key_norm(made[:, queries:both])), 1)
        return normed.view(len(made), -1, self._dim)


Output = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Adds the product behind attention or an MLP to the residual: (residual, input of the product)."""


def _make_output(product: Product, after: Norm | None, scale: float) -> Output:
    return partial(product.add, scale=scale) if after is None else _NormedOutput(product, after, scale)


class _NormedOutput:
    """A product, then a norm, times a scale, added to the residual."""

    def __init__(self, product: Product, after: Norm, scale: float) -> None:
        self._product, self._after, self._scale = product, after, scale

    def __call__(self, hidden: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        return torch.add(hidden, self._after(self._product(inner)), alpha=self._scale)


class _GatedMlp:
    """act(gate) * up, in one product for both."""

    def __init__(self, module: Any, after: Norm | None, scale: float, product: ProductMaker) -> None:
        joined, down = getattr(module, "gate_up_proj", None), module.down_proj
        both = (
            _join(module, "gate_proj", "up_proj")
            if joined is None
            else (joined.weight, joined.bias, [joined])
        )
        self._gate_up, self._act = product(*both), _activation(module)
        self._out = _make_output(product(down.weight, down.bias, [down]), after, scale)

    def __call__(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(normed).chunk(2, -1)
        return self._out(hidden, self._act(gate) * up)


class _PlainMlp:
    """Two products with an activation between them."""

    def __init__(self, first: Product, act: Activation, second: Output) -> None:
        self._first, self._act, self._out = first, act, second

    def __call__(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return self._out(hidden, self._act(self._first(normed)))


class _Experts:
    """A mixture of experts, in transformers' code."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        found = self._module(normed[None])
        return hidden + (found[0] if isinstance(found, tuple) else found)[0]


_PLAIN = (("c_fc", "c_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"))


def _make_mlp(
    module: Any, after: Norm | None, scale: float, product: ProductMaker
) -> _GatedMlp | _PlainMlp | _Experts:
    for first, second in _PLAIN:
        if hasattr(module, first):
            one, two = getattr(module, first), getattr(module, second)
            out = _make_output(product(two.weight, two.bias, [two]), after, scale)
            return _PlainMlp(product(one.weight, one.bias, [one]), _activation(module), out)
    return _Experts(module) if hasattr(module, "experts") else _GatedMlp(module, after, scale, product)


def _activation(module: Any) -> Activation:
    names = ("act_fn", "activation_fn", "act")
    found: Activation = next(getattr(module, name) for name in names if hasattr(module, name))
    return silu if type(found).__name__ in ("SiLU", "SiLUActivation") else found


def make_norm(module: Any, config: Any) -> Norm:
    """Return the function of a norm of transformers: with a mean (LayerNorm) or without."""
    if isinstance(module, torch.nn.LayerNorm):
        shape = module.normalized_shape
        return partial(
            layer_norm, normalized_shape=shape, weight=module.weight, bias=module.bias, eps=module.eps
        )
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    weight, exact = _norm_weight(module, config)
    if exact:
        return _RmsNorm(weight, exact, eps)
    return _PlainRmsNorm(weight, eps)


def _norm_weight(module: Any, config: Any) -> tuple[torch.Tensor, bool]:
    """Return the weight of a norm, and whether it multiplies in float32, as in Gemma, whose weight is one
    more than what is stored."""
    if config.model_type.startswith("gemma"):
        return module.weight.float() + 1, True
    return module.weight, False


class _PlainRmsNorm:
    """RMS norm. Few rows on a CPU are computed by one call of decode_step.pyx, where torch makes ten."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight.detach(), eps
        self._numbers = self._weight.numpy() if _is_float_on_cpu(weight) else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._numbers is None or len(rows) > MOST_ROWS:
            return torch.rms_norm(rows, self._weight.shape, self._weight, self._eps)
        made = torch.empty_like(rows, memory_format=torch.contiguous_format)
        decode_step.rms_norm(rows.contiguous().numpy(), self._numbers, made.numpy(), self._eps)
        return made


class _RmsNorm:
    """`exact`: rows are float32 meanwhile."""

    def __init__(self, weight: torch.Tensor, exact: bool, eps: float) -> None:
        self._weight, self._shape, self._exact, self._eps = weight, weight.shape[-1:], exact, eps
        self._shared = weight if weight.ndim == 1 else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._exact:
            return self._compute(rows.float()).to(rows.dtype)
        return self._compute(rows)

    def _compute(self, rows: torch.Tensor) -> torch.Tensor:
        made = rms_norm(rows, self._shape, self._shared, self._eps)
        return made if self._shared is not None else made * self._weight


def _norms_of_layer(layer: Any) -> tuple[Any, Any, Any, Any]:
    """Return the norms before and behind attention, and before and behind the MLP; None for none."""
    found = {name: getattr(layer, f"{name}_layernorm", None) for name in _NORMS}
    before, post = getattr(layer, "input_layernorm", None), found["post_attention"]
    if found["post_feedforward"] is None:
        return before, None, post, None
    return before, post, found["pre_feedforward"], found["post_feedforward"]


_NORMS = ("post_attention", "pre_feedforward", "post_feedforward")


def _norms_of_heads(attention: Any, config: Any, keys: int) -> tuple[Norm | None, Norm | None, Norm | None]:
    """Return the norms of all queries and of all keys at once, and the norm of each head's: [heads, dim]."""
    query, key = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if query is None or key is None:
        return None, None, None
    if config.model_type == "olmo2":
        return make_norm(query, config), make_norm(key, config), None
    eps = query.eps if hasattr(query, "eps") else query.variance_epsilon
    of_query, exact = _norm_weight(query, config)
    of_key, _ = _norm_weight(key, config)
    weight = torch.cat((of_query.expand(config.num_attention_heads, -1), of_key.expand(keys, -1)))
    return None, None, _RmsNorm(weight, exact, eps)


JoinedLayers = tuple[torch.Tensor, torch.Tensor | None, list[torch.nn.Module]]
"""Arguments of ProductMaker."""


def _join_queries(attention: Any, heads: int, dim: int) -> JoinedLayers:
    """Return the product for queries, keys and values, in this order."""
    if hasattr(attention, "qkv_proj"):
        return attention.qkv_proj.weight, attention.qkv_proj.bias, [attention.qkv_proj]
    if not hasattr(attention, "query_key_value"):
        return _join(attention, "q_proj", "k_proj", "v_proj")
    joined, attention.query_key_value = attention.query_key_value, None  # of each head all three
    weight = joined.weight.view(heads, 3, dim, -1).transpose(0, 1).reshape(joined.weight.shape)
    bias = joined.bias
    return weight, None if bias is None else bias.view(heads, 3, dim).transpose(0, 1).reshape(-1), []


def _join(module: Any, *names: str) -> JoinedLayers:
    """Return the weights of several layers as one, and the layers, which are removed from the module: memory
    holds them twice for one layer at most."""
    parts = [getattr(module, name) for name in names]
    weight = torch.cat([part.weight for part in parts])
    biased = parts[0].bias is not None
    bias = torch.cat([part.bias for part in parts]) if biased else None
    for name in names:
        setattr(module, name, None)
    return weight, bias, parts


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn queries and keys [tokens, heads, dim] by their positions: all of them, or their first parts."""
    size = cos.shape[-1]
    half, part = size // 2, heads if size == heads.shape[-1] else heads[..., :size]
    halves = torch.cat((part[..., half:], part[..., :half]), -1)
    turned = torch.addcmul(part * cos, halves, sin)
    return turned if part is heads else torch.cat((turned, heads[..., size:]), -1)


def _tables(core: Any, tokens: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines by position, [tokens, 1, dim]; the sines carry the sign of the turned half.
    `kind`: that of the layers, "" where all layers turn alike."""
    weight = core.get_input_embeddings().weight
    positions = torch.arange(tokens, device=weight.device)[None]
    cos, sin = core.rotary_emb(weight[:1], positions, *([kind] if kind else []))
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    return cos[0, :, None], signed[0, :, None]


def _rope_kinds(core: Any, config: Any) -> list[str]:
    """Return the kind of each layer's turns: Gemma 3 has two."""
    if "layer_type" in inspect.signature(core.rotary_emb.forward).parameters:
        return list(config.layer_types)
    return [""] * config.num_hidden_layers


def _embedding_scale(config: Any, dtype: torch.dtype) -> float:
    """Return the factor of embeddings: Gemma's is rounded to the type of the weights."""
    if config.model_type.startswith("gemma"):
        return float(torch.tensor(config.hidden_size**0.5).to(dtype))
    return float(getattr(config, "embedding_multiplier", 1.0))


def _window(attention: Any, config: Any) -> int:
    """Return the sliding window of one layer: Mistral has it for all, Qwen and Gemma for some."""
    found = config.sliding_window if config.model_type in _WINDOWED else None
    return getattr(attention, "sliding_window", None) or found or NEVER


class TorchRunner(ABC):
    """A ModelRunner on torch without its forward: memory that is short, results on their way back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: torch.Tensor | None = None
        self._landing = HostCopy(device)

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
        """Give the device's memory back, once a model has dropped what it holds."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @abstractmethod
    def _forward(self, plan: StepPlan) -> np.ndarray:
        """Return the logits of a plan, and keep its hidden states."""


class TorchModel(TorchRunner):
    """A ModelRunner on torch, with its cache. `model` is transformers' or FusedModel; `int8` gives its linear
    layers int8 weights. `adapters` are on the model's device."""

    def __init__(
        self, model: Any, cache: RowCache, *, int8: bool = False, adapters: Adapters | None = None
    ) -> None:
        super().__init__(cache.data.device)
        self.cache = cache
        with torch.inference_mode():
            self._fused = fuse(model, cache.data.shape[-2], Int8Product if int8 else Product, adapters)
            if int8 and self._fused is None:
                use_int8(model)
            if adapters is not None and self._fused is None:
                use_adapters(model, adapters)
            if adapters is not None:
                adapters.check_joined()
        self._adapters = adapters
        self._model: Any = model if self._fused is None else None
        # Four axes: transformers takes it for a mask that is finished. Attention here does not look at it.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self._device)

    def close(self) -> None:
        """Drop weights and cache."""
        del self._model, self._fused, self._adapters, self.cache
        super().close()

    def _forward(self, plan: StepPlan) -> np.ndarray:
        ragged = Ragged(plan, self.cache)
        if self._adapters is not None:
            self._adapters.begin(plan.adapters)
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
