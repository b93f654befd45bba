"""The forward of Llama and its relatives, written out: query, key and value in one product, gate and up in
one, tables of the rotary embedding, residuals added by the products themselves. The weights are those of
transformers' model; so are the results, which the tests compare. What is not of the plain form is left to it.

On a small model half of a step is spent between products, in transformers' code as in Python's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from fastserve.backends.text_torch.attention import NEVER, Layer, Ragged

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def fuse(model: Any, tokens: int) -> FusedModel | None:
    """None for a model that is not of the plain form. Takes the model's weights away, a layer at a time.
    `tokens`: positions there may be."""
    config = model.config
    if config.model_type not in _FAMILIES or config.hidden_act != "silu" or model.lm_head.bias is not None:
        return None
    layers = model.model.layers
    if any(one.self_attn.o_proj.bias is not None or one.mlp.down_proj.bias is not None for one in layers):
        return None
    return FusedModel(model, tokens)


class FusedModel:
    """Called with one step's tokens [count] and their positions; gives logits [wanted, vocab] and, where
    they are asked for, hidden states [pooled, width]."""

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
    """Weights of several products as one, taken from where they were: memory holds them twice for one layer
    at most."""
    parts = [getattr(module, name) for name in names]
    weight = torch.cat([part.weight for part in parts])
    biased = parts[0].bias is not None
    bias = torch.cat([part.bias for part in parts]) if biased else None
    for name in names:
        setattr(module, name, None)
    return weight, bias


def _tables(core: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by position, [tokens, 1, dim]; the sign of the turned half is in the sines."""
    weight = core.embed_tokens.weight
    positions = torch.arange(tokens, device=weight.device)[None]
    cos, sin = core.rotary_emb(weight[:1], positions)
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    return cos[0, :, None], signed[0, :, None]


def _window(attention: Any, config: Any) -> int:
    """Of one layer: Mistral has it for all, Qwen for some."""
    found = config.sliding_window if config.model_type == "mistral" else None
    return getattr(attention, "sliding_window", None) or found or NEVER


def _head_norms(attention: Any, queries: int, keys: int) -> torch.Tensor | None:
    """Qwen3 norms each head's query and key: [heads, dim]."""
    if getattr(attention, "q_norm", None) is None:
        return None
    query, key = attention.q_norm.weight, attention.k_norm.weight
    return torch.cat((query.expand(queries, -1), key.expand(keys, -1)))
