"""A folder's weights in numpy, run over plans: protocols.ModelRunner on a CPU without torch.

The forward of Llama, Mistral and Qwen as torch_model.FusedModel has it, in float32: query, key and value in
one product, gate and up in one, tables of the rotary embedding. Logits differ from torch's by rounding alone,
which the tests compare. numpy's BLAS has as many threads as the environment said when it was imported.

`open_engine` makes an engine of a checked folder without torch: its config, its safetensors, a NumpyModel.

    engine = open_engine(folder, options)      as loading.open_engine, of a decoder on a CPU

A safetensors file is the length of a header (8 bytes, little-endian), the header, which is JSON, and the
tensors:  {"model.norm.weight": {"dtype": "BF16", "shape": [256], "data_offsets": [0, 512]}, ...}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from fastserve.backends.llm.engine import BatchEngine, describe_engine, open_grammars, try_model
from fastserve.backends.llm.folder import check_folder, read_ends, rope_of, weight_files
from fastserve.backends.llm.kv_cache import RowCache, find_cache_size, host_bytes, shape_of, zero_pages
from fastserve.backends.llm.pooling import find_pooling, with_pooling
from fastserve.backends.llm.protocols import StepPlan
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.fields import convert
from fastserve.settings.model_options import TextOptions


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


_HEADER_BYTES_MAX = 64 << 20
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}


_Size = Annotated[int, msgspec.Meta(ge=1)]


class DecoderConfig(msgspec.Struct, frozen=True):
    """Fields of config.json, with transformers' names and defaults."""

    model_type: str
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    max_position_embeddings: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    sliding_window: _Size | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        shape = shape_of(self)
        if self.num_attention_heads % shape.heads or shape.dim % 2:
            raise ValueError("num_key_value_heads, head_dim: heads that cannot share keys, or of an odd size")
        if len(self.layer_types or range(self.num_hidden_layers)) != self.num_hidden_layers:
            raise ValueError("layer_types: not one for each layer")

    def window(self, layer: int) -> int:
        """Return the positions that a token of a layer sees, 0 for all. Qwen has windows where it says so."""
        slides = self.model_type == "mistral"
        if self.model_type.startswith("qwen") and self.use_sliding_window:
            kinds = self.layer_types
            slides = layer >= self.max_window_layers if kinds is None else "sliding" in kinds[layer]
        return (self.sliding_window or 0) if slides else 0


def open_engine(folder: Path, options: TextOptions) -> BatchEngine:
    """Raises ConfigError and ServeError; see TextBackend.load. Threads are the environment's."""
    said = check_folder(folder, options)
    options = with_pooling(options, find_pooling(folder, options, said["model_type"]))
    known = {name: said[name] for name in DecoderConfig.__struct_fields__ if name in said}
    fields = convert(known, DecoderConfig, "config.json")
    shape = shape_of(fields)
    room = find_cache_size(options, fields.max_position_embeddings, shape.token_bytes(4), host_bytes())
    info = describe_engine(options, fields, room, read_ends(folder, said), "float32", "cpu")
    try:
        weights = read_weights(folder, fields, rope_of(said), room.tokens)
        size = shape.tensor(room)
        model = NumpyModel(weights, RowCache(np.frombuffer(zero_pages(4 * prod(size)), "<f4").reshape(size)))
        try_model(model)
    except MemoryError:
        text = f"no memory for the weights and a cache of {info.kv_tokens} tokens: lower text.kv_bytes"
        raise ServeError(Kind.RESOURCE_EXHAUSTED, text) from None
    return BatchEngine(model, info, options, open_grammars(folder, options, info))


class WeightFiles:
    """The tensors of safetensors files, read one by one."""

    def __init__(self, paths: list[Path]) -> None:
        """Raises ConfigError for a file that is none."""
        self._places = {name: place for path in paths for name, place in _read_header(path)}

    def read(self, name: str, *shape: int) -> np.ndarray:
        """Return a tensor in float32. Raises ConfigError for one that is missing, or of another shape or
        type."""
        if name not in self._places:
            raise ConfigError(f"the weights have no tensor {name}")
        path, dtype, held, offset = self._places[name]
        if dtype not in _DTYPES or tuple(held) != shape:
            given = f"{dtype} {list(held)}, allowed: {', '.join(_DTYPES)} {list(shape)}"
            raise ConfigError(f"{path.name}: {name}: given {given}")
        found: np.ndarray = np.fromfile(path, _DTYPES[dtype], prod(shape), offset=offset)
        if found.size != prod(shape):
            raise ConfigError(f"{path.name} ends within {name}")
        if dtype == "BF16":
            found = (found.astype("<u4") << 16).view("<f4")
        return found.astype(np.float32, copy=False).reshape(shape)


def _read_header(path: Path) -> Iterator[tuple[str, tuple[Path, str, list[int], int]]]:
    """Yield each tensor's name and its place: file, dtype, shape, offset."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _HEADER_BYTES_MAX:
                raise ValueError(f"its header would have {size} bytes")
            header = json.loads(file.read(size))
        for name, one in header.items():
            if name == "__metadata__":
                continue
            shape = [int(length) for length in one["shape"]]
            begin, end = map(int, one["data_offsets"])
            if min(0, begin, *shape) < 0 or (end - begin) % max(1, prod(shape)):
                raise ValueError(f"{name}: data_offsets do not fit its shape")
            yield name, (path, str(one["dtype"]), shape, 8 + size + begin)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, OSError) as error:
        raise ConfigError(f"{path.name}: not safetensors: {error}") from None


def read_weights(folder: Path, config: DecoderConfig, rope: Mapping[str, Any], tokens: int) -> DecoderWeights:
    """Read the weights of a checked folder. Raises ConfigError when they are broken or missing."""
    files, shape, width = WeightFiles(weight_files(folder)), shape_of(config), config.hidden_size
    queries, keys = config.num_attention_heads * shape.dim, shape.heads * shape.dim
    inner, outer_bias = config.intermediate_size, config.attention_bias
    inner_bias = outer_bias or config.model_type == "qwen2"

    def linear(at: str, into: int, biased: bool, **parts: int) -> LinearWeights:
        """Join products of one input: `parts` are their names and outputs."""
        weight = np.concatenate([files.read(f"{at}.{name}.weight", out, into) for name, out in parts.items()])
        bias = [files.read(f"{at}.{name}.bias", out) for name, out in parts.items() if biased]
        return LinearWeights(weight.T, np.concatenate(bias) if biased else None)

    def layer(number: int) -> LayerWeights:
        at, norms = f"model.layers.{number}", None
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        if config.model_type == "qwen3":
            query, key = (files.read(f"{attention}.{one}_norm.weight", shape.dim) for one in "qk")
            norms = np.stack([query] * config.num_attention_heads + [key] * shape.heads)
        return LayerWeights(
            norm=files.read(f"{at}.input_layernorm.weight", width),
            qkv=linear(attention, width, inner_bias, q_proj=queries, k_proj=keys, v_proj=keys),
            out=linear(attention, queries, outer_bias, o_proj=width),
            mlp_norm=files.read(f"{at}.post_attention_layernorm.weight", width),
            gate_up=linear(mlp, width, config.mlp_bias, gate_proj=inner, up_proj=inner),
            down=linear(mlp, inner, config.mlp_bias, down_proj=width),
            head_norms=norms,
            window=config.window(number),
        )

    embedding = files.read("model.embed_tokens.weight", config.vocab_size, width)
    tied = config.tie_word_embeddings
    head = embedding if tied else files.read("lm_head.weight", config.vocab_size, width)
    cos, sin = rope_tables({"rope_theta": config.rope_theta, **rope}, shape.dim, tokens)
    return DecoderWeights(
        embedding=embedding,
        head=LinearWeights(head.T),
        norm=files.read("model.norm.weight", width),
        layers=[layer(number) for number in range(config.num_hidden_layers)],
        cos=cos,
        sin=sin,
        heads=config.num_attention_heads,
        eps=config.rms_norm_eps,
    )


def rope_tables(rope: Mapping[str, Any], dim: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines by position, [tokens, 1, dim]; the sines carry the sign of the turned half."""
    try:
        turns = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
        if rope["rope_type"] == "linear":
            turns = turns / rope["factor"]
        if rope["rope_type"] == "llama3":
            old, factor = rope["original_max_position_embeddings"], rope["factor"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (old * turns / (2 * np.pi) - low) / (high - low)
            turns = turns * (smooth.clip(0, 1) * (1 - 1 / factor) + 1 / factor)
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"config.json: rope_parameters: {type(error).__name__}: {error}") from None
    angles = np.arange(tokens, dtype=np.float32)[:, None] * turns.astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((cos, cos), 1)[:, None], np.concatenate((-sin, sin), 1)[:, None]
