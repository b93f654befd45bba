"""A folder's weights in numpy, run over plans: protocols.ModelRunner on a CPU without torch.

The forward of Llama, Mistral and Qwen as torch_model.FusedModel has it, in float32: query, key and value in
one product, gate and up in one, tables of the rotary embedding. Logits differ from torch's by rounding alone,
which the tests compare. numpy's BLAS has as many threads as the environment said when it was imported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastserve.backends.llm.kv_cache import RowCache
from fastserve.backends.llm.protocols import StepPlan


@dataclass(slots=True, eq=False)
class LinearWeights:
    """A product: `weight` is [in, out], in whichever order of memory its products are quick in."""

    weight: np.ndarray
    bias: np.ndarray | None = None

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        made: np.ndarray = hidden @ self.weight
        if self.bias is not None:
            made += self.bias
        return made


@dataclass(slots=True, eq=False)
class LayerWeights:
    """Weights of one layer. `head_norms` are Qwen3's, [heads of queries and keys, dim]; `window` is how many
    positions a token sees, 0 for all."""

    norm: np.ndarray
    qkv: LinearWeights
    out: LinearWeights
    mlp_norm: np.ndarray
    gate_up: LinearWeights
    down: LinearWeights
    head_norms: np.ndarray | None = None
    window: int = 0


@dataclass(slots=True, eq=False)
class DecoderWeights:
    """Weights of a decoder. `cos` and `sin` are [positions, 1, dim]; the sines carry the sign of the turned
    half. `heads` are those of queries."""

    embedding: np.ndarray
    head: LinearWeights
    norm: np.ndarray
    layers: list[LayerWeights]
    cos: np.ndarray
    sin: np.ndarray
    heads: int
    eps: float


class NumpyModel:
    """A ModelRunner in numpy, with its cache."""

    def __init__(self, weights: DecoderWeights, cache: RowCache) -> None:
        self.cache = cache
        self._weights = weights
        self._states: np.ndarray | None = None

    def forward(self, plan: StepPlan) -> np.ndarray:
        """Return the logits of a plan. Raises MemoryError."""
        with np.errstate(all="ignore"):  # broken weights make NaN, which the sampler finds
            return self._forward(plan)

    def states(self) -> np.ndarray:
        """Return the hidden states that the last plan wanted."""
        states, self._states = self._states, None
        assert states is not None
        return states

    def close(self) -> None:
        """Drop weights and cache."""
        del self._weights, self.cache

    def _forward(self, plan: StepPlan) -> np.ndarray:
        weights = self._weights
        hidden: np.ndarray = weights.embedding[plan.tokens]
        step = _StepAttention(plan, self.cache, weights)
        for number, layer in enumerate(weights.layers):
            hidden += layer.out(step.attend(number, layer, _rms_norm(hidden, layer.norm, weights.eps)))
            gate_up = layer.gate_up(_rms_norm(hidden, layer.mlp_norm, weights.eps))
            hidden += layer.down(_gated(gate_up))
        if plan.pooled is not None:
            self._states = _rms_norm(hidden[plan.pooled], weights.norm, weights.eps)
        if plan.chunks:
            hidden = hidden[plan.wanted]
        return weights.head(_rms_norm(hidden, weights.norm, weights.eps))


def _rms_norm(hidden: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return rows divided by their root mean square, times a weight."""
    squares = np.einsum("...i,...i->...", hidden, hidden)
    made: np.ndarray = hidden / np.sqrt(squares / hidden.shape[-1] + eps)[..., None]
    made *= weight
    return made


def _gated(gate_up: np.ndarray) -> np.ndarray:
    """Return silu(gate) * up of [tokens, gate and up]."""
    half = gate_up.shape[1] // 2
    gate = gate_up[:, :half]
    made: np.ndarray = np.exp(-gate)
    made += 1
    np.divide(gate, made, out=made)
    made *= gate_up[:, half:]
    return made


class _StepAttention:
    """Attention of one step. Sequences that decode are rows 0, 1, ... of the cache: their keys and values are
    a view of it, masked behind each one's own length. Heads that share a key are an axis of the query."""

    def __init__(self, plan: StepPlan, cache: RowCache, weights: DecoderWeights) -> None:
        self._cache, self._chunks, self._writing = cache, plan.chunks, plan.writing
        self._cos, self._sin = weights.cos[plan.positions], weights.sin[plan.positions]
        self._heads, self._eps, self._at = weights.heads, weights.eps, plan.positions[: plan.writing]
        self._rows = np.arange(plan.writing)
        self._length = int(self._at.max(initial=-1)) + 1
        self._masks: dict[tuple[int, int], np.ndarray | None] = {}

    def attend(self, number: int, layer: LayerWeights, hidden: np.ndarray) -> np.ndarray:
        """Write new keys and values into the cache; return the attention of each token over its sequence,
        [tokens, heads * dim]."""
        tokens, writing, dim = len(hidden), self._writing, self._cos.shape[-1]
        made = layer.qkv(hidden).reshape(tokens, -1, dim)
        shared = (made.shape[1] - self._heads) // 2
        self._turn(made[:, : self._heads + shared], layer.head_norms)
        query = made[:, : self._heads].reshape(tokens, shared, -1, dim)
        query *= dim**-0.5
        new = made[:, self._heads :].reshape(tokens, 2, shared, dim)
        seen = np.empty(query.shape, np.float32)
        data = self._cache.data[number]
        if writing:
            data[:, self._rows, :, self._at] = new[:writing]
            keys, values = data[:, :writing, :, : self._length]
            mask = self._mask(self._at, self._length, (-1, layer.window))
            _attend(query[:writing], keys, values, mask, seen[:writing])
        for chunk in self._chunks:
            part, end = slice(chunk.offset, chunk.offset + chunk.count), chunk.start + chunk.count
            row = data[:, chunk.row]
            row[:, :, chunk.start : end] = new[part].transpose(1, 2, 0, 3)
            mask = self._mask(np.arange(chunk.start, end), end, (chunk.offset, layer.window))
            keys, values = row[:, :, None, :end]
            _attend(query[part].transpose(1, 2, 0, 3), keys, values, mask, seen[part].transpose(1, 2, 0, 3))
        return seen.reshape(tokens, -1)

    def _turn(self, heads: np.ndarray, norms: np.ndarray | None) -> None:
        """Turn queries and keys by their positions, in their place."""
        if norms is not None:
            heads[:] = _rms_norm(heads, norms, self._eps)
        half = heads.shape[-1] // 2
        turned = np.concatenate((heads[..., half:], heads[..., :half]), -1)
        turned *= self._sin
        heads *= self._cos
        heads += turned

    def _mask(self, at: np.ndarray, length: int, key: tuple[int, int]) -> np.ndarray | None:
        """Return 0 where a key is at most `window` - 1 positions behind its query, and -inf elsewhere; None
        where no key is hidden."""
        if key not in self._masks:
            behind, window = at[:, None] - np.arange(length), key[1]
            hidden = behind < 0
            if window:
                hidden |= behind >= window
            mask = np.where(hidden, np.float32("-inf"), np.float32(0)) if hidden.any() else None
            self._masks[key] = mask[:, None, None] if mask is not None and key[0] < 0 else mask
        return self._masks[key]


def _attend(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None, out: np.ndarray
) -> None:
    """Write the attention of queries [..., count, dim] over keys and values [..., length, dim] into `out`."""
    scores = query @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores += mask
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    np.matmul(scores, values, out=out)
