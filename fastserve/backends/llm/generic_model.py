"""A decoder in transformers' own code, its own attention included, run over plans: protocols.ModelRunner.

For families whose attention cannot be given to torch_model.Ragged (ALiBi, attention of their own). What a
family needs beyond a forward, transformers' `generate` gives it, and so does this file: a cache by position,
a mask and positions. A step is one call of the model for all sequences that decode, and one for each chunk of
a prompt.

Sequences that decode together are padded on the left. Their rows end in one column, the *front*, so that a
new token of each is written into the same column, and the keys of all are one view of the cache:

                 columns   0 . . . . . . . . . front
    row 0, 7 tokens        .  .  .  k k k k k k k |
    row 1, 3 tokens        .  .  .  .  .  .  . k k k |      behind the mask: what other sequences left, finite
    row 2, a prompt        k k k k k                         begins in column 0

A row is moved to the front when its sequence begins to decode. When the front has come to the last column,
or a longer sequence joins, all rows are moved, so that the longest one begins in column 0.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from fastserve.backends.llm.kv_cache import STRIDE, CacheSize, zero_pages
from fastserve.backends.llm.protocols import Chunk, StepPlan
from fastserve.backends.llm.torch_model import TorchRunner
from fastserve.backends.model_errors import is_out_of_memory
from fastserve.errors import ConfigError

log = logging.getLogger(__name__)


class LayerShape(NamedTuple):
    """Sizes of one layer's keys and values at one position."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Return the numbers of one position."""
        return self.key_heads * self.key_dim + self.value_heads * self.value_dim


def find_layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shapes of a model's cache, layer by layer, as one token fills it. Raises ConfigError for a
    model whose cache is not keys and values by position."""
    cache = DynamicCache()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    given = {"attention_mask": torch.ones_like(tokens), _cache_name(model): cache}
    text = f"config.json: model_type {model.config.model_type} is not served: {NOT_BY_POSITION}"
    try:
        with torch.inference_mode():
            model(input_ids=tokens, use_cache=True, **given)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(text) from error
    held: list[tuple[Any, Any]]
    held = [(getattr(one, "keys", None), getattr(one, "values", None)) for one in cache.layers]
    if not held or any(tensor is None or tensor.shape[2] != 2 for pair in held for tensor in pair):
        raise ConfigError(text)
    return [
        LayerShape(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]) for keys, values in held
    ]


NOT_BY_POSITION = "what its layers keep is not keys and values by position"


def _cache_name(model: Any) -> str:
    """Return the name of forward's cache, which transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class AlignedCache:
    """Rows of keys and values, [row, head, column, dim] for each layer, and the column that each row begins
    in; a protocols.KVCache."""

    def __init__(
        self, shapes: list[LayerShape], room: CacheSize, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises MemoryError, and torch's own error on a GPU."""
        self.columns = -(-room.tokens // STRIDE) * STRIDE
        self.begins = np.zeros(room.slots, np.int64)
        self._used = np.zeros(room.slots, np.int64)  # columns that may hold more than zeros
        self._front = 0
        positions = room.slots * self.columns
        count = positions * sum(shape.elements for shape in shapes)
        if device.type == "cpu":
            data = torch.frombuffer(zero_pages(count * dtype.itemsize), dtype=dtype)
        else:
            data = torch.zeros(count, dtype=dtype, device=device)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for shape in shapes:
            sizes = [
                (room.slots, shape.key_heads, self.columns, shape.key_dim),
                (room.slots, shape.value_heads, self.columns, shape.value_dim),
            ]
            for size, tensors in zip(sizes, (self.keys, self.values), strict=True):
                tensors.append(data[: prod(size)].view(size))
                data = data[prod(size) :]

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a row."""
        begin = int(self.begins[source])
        part = slice(begin, begin + count)
        for tensor in self._tensors():
            tensor[target, :, part] = tensor[source, :, part]
        self.begins[target] = begin
        self._touch(target, begin + count)

    def swap(self, one: int, other: int, count: int) -> None:
        """Exchange the first `count` positions of two rows, a layer at a time: little memory besides."""
        begins = self.begins[[one, other]]
        part = slice(int(begins.min()), int(begins.max()) + count)
        for tensor in self._tensors():
            tensor[[one, other], :, part] = tensor[[other, one], :, part]
        self.begins[[one, other]] = begins[::-1]
        for row in (one, other):
            self._touch(row, part.stop)

    def wipe(self, row: int, count: int, begin: int = 0) -> None:
        """Zero whatever was ever written into a row, all of it or behind the first `begin` positions: stale
        columns may hold NaN, too."""
        first = int(self.begins[row]) + begin if begin else 0
        for tensor in self._tensors():
            tensor[row, :, first : int(self._used[row])] = 0
        self._used[row] = first
        if not begin:
            self.begins[row] = 0

    def align(self, lengths: np.ndarray) -> tuple[int, int]:
        """Let the first rows, of these lengths, end in one column, and return the first column that any of
        them uses, and the column of the new tokens."""
        longest = int(lengths.max())
        if len(lengths) == 1:  # where its row is: a draft has moved its end
            self._front = int(self.begins[0]) + longest
        if not longest <= self._front < self.columns:
            self._front = longest
        for row, length in enumerate(lengths.tolist()):
            self._shift(row, length, self._front - length)
            self._touch(row, self._front + 1)
        return self._front - longest, self._front

    def advance(self) -> None:
        """Account for the tokens of an aligned step, which were computed."""
        self._front += 1

    def place(self, chunk: Chunk) -> int:
        """Return the column in which a chunk's row begins, with room for the chunk behind it."""
        if not chunk.start:
            self.begins[chunk.row] = 0
        end = chunk.start + chunk.count
        if self.begins[chunk.row] + end > self.columns:
            self._shift(chunk.row, chunk.start, 0)
        begin = int(self.begins[chunk.row])
        self._touch(chunk.row, begin + end)
        return begin

    def _shift(self, row: int, length: int, begin: int) -> None:
        """Move the positions of a row to other columns of it."""
        old = int(self.begins[row])
        if old == begin:
            return
        for tensor in self._tensors():
            tensor[row, :, begin : begin + length] = tensor[row, :, old : old + length].clone()
        self.begins[row] = begin
        self._touch(row, begin + length)

    def _touch(self, row: int, end: int) -> None:
        self._used[row] = max(self._used[row], end)

    def _tensors(self) -> list[torch.Tensor]:
        return self.keys + self.values


class _Layer(DynamicLayer):  # type: ignore[misc]
    """A layer of transformers' cache whose keys and values are views of an AlignedCache: new ones are written
    into them, and nothing is allocated. `length`: positions that were computed before."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        super().__init__()
        self.keys, self.values, self._length = keys, values, length
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new positions; return all of them."""
        begin, end = self._length, self._length + key_states.shape[-2]
        self.keys[:, :, begin:end], self.values[:, :, begin:end] = key_states, value_states
        self._length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self, *_args: Any) -> int:
        """Return the positions that are computed."""
        return self._length

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Return the length of a mask and its offset; `query` is a number of tokens, or their positions."""
        return self._length + (query if isinstance(query, int) else query.shape[0]), 0


class GenericModel(TorchRunner):
    """A ModelRunner on transformers' model, with its cache. `padded`: whether sequences of several lengths
    may share a call; else each has its own."""

    def __init__(self, model: Any, cache: AlignedCache, *, padded: bool) -> None:
        super().__init__(model.device)
        self.cache = cache
        self._model: Any = model
        self._padded = padded
        known = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in known
        self._keeps = "logits_to_keep" in known
        self._cache_name = _cache_name(model)

    def close(self) -> None:
        """Drop weights and cache."""
        del self._model, self.cache
        super().close()

    def _forward(self, plan: StepPlan) -> np.ndarray:
        plan = _join_draft(plan)
        parts = [self._decode(plan)] if plan.writing else []
        states = []
        for chunk in plan.chunks:
            wanted = _places(plan.wanted, chunk)
            pooled = None if plan.pooled is None else _places(plan.pooled, chunk)
            logits, found = self._read(plan, chunk, wanted, pooled)
            parts.append(logits)
            states += [] if found is None else [found]
        if plan.writing:
            self.cache.advance()
        self._states = torch.cat(states) if states else None
        return self._in_order(plan, parts)

    def _in_order(self, plan: StepPlan, parts: list[torch.Tensor]) -> np.ndarray:
        """Return the logits of each wanted place. `parts` has those of each part of the step: places that are
        wanted twice once, in the order of tokens."""
        made = parts[0] if len(parts) == 1 else torch.cat(parts)
        if plan.chunks:
            order = np.unique(plan.wanted, return_inverse=True)[1]
            if len(order) != len(made) or (np.diff(order) != 1).any():
                made = made[torch.from_numpy(order).to(made.device)]
        return self._landing.bring(made.float().contiguous())

    def _decode(self, plan: StepPlan) -> torch.Tensor:
        """Compute one token of each sequence that decodes."""
        lengths = plan.positions[: plan.writing]
        first, front = self.cache.align(lengths)
        tokens = torch.from_numpy(plan.tokens[: plan.writing, None]).to(self._device)
        places = torch.from_numpy(lengths[:, None]).to(self._device)
        if not self._padded:
            rows = range(plan.writing)
            made = [
                self._call(
                    slice(row, row + 1),
                    front - int(lengths[row]),
                    int(lengths[row]),
                    tokens[row : row + 1],
                    places[row : row + 1],
                )
                for row in rows
            ]
            return torch.cat([one.logits[:, -1] for one in made])
        mask = torch.arange(first, front + 1, device=self._device) >= front - places
        return self._call(slice(0, plan.writing), first, front - first, tokens, places, mask.long()).logits[
            :, -1
        ]

    def _read(
        self, plan: StepPlan, chunk: Chunk, wanted: np.ndarray, pooled: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute a chunk of a prompt. Return the logits and hidden states of places within it."""
        part = slice(chunk.offset, chunk.offset + chunk.count)
        tokens = torch.from_numpy(plan.tokens[None, part]).to(self._device)
        places = torch.from_numpy(plan.positions[None, part]).to(self._device)
        more: dict[str, Any] = {}
        kept = torch.from_numpy(wanted).to(self._device)
        if self._keeps:
            more["logits_to_keep"] = kept if len(wanted) else 1
        if pooled is not None:
            more["output_hidden_states"] = True
        row = slice(chunk.row, chunk.row + 1)
        made = self._call(row, self.cache.place(chunk), chunk.start, tokens, places, **more)
        logits = made.logits[0]
        if not (self._keeps and len(wanted)):
            logits = logits[:0] if self._keeps else logits[kept]
        states = None
        if pooled is not None:
            states = made.hidden_states[-1][0, torch.from_numpy(pooled).to(self._device)]
        return logits, states

    def _call(
        self,
        rows: slice,
        first: int,
        length: int,
        tokens: torch.Tensor,
        places: torch.Tensor,
        mask: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        """Run the model on new tokens [rows, count] of rows whose columns from `first` on hold `length`
        positions; `mask` is [rows, length + count], None where nothing is padded."""
        cache = DynamicCache()
        cache.layers = [
            _Layer(keys[rows, :, first:], values[rows, :, first:], length)
            for keys, values in zip(self.cache.keys, self.cache.values, strict=True)
        ]
        if mask is None:
            mask = torch.ones(len(tokens), length + tokens.shape[1], dtype=torch.int64, device=self._device)
        if self._takes_positions:
            more["position_ids"] = places
        more[self._cache_name] = cache
        return self._model(input_ids=tokens, attention_mask=mask, use_cache=True, **more)


def _join_draft(plan: StepPlan) -> StepPlan:
    """Return the plan of one sequence with a draft as one of a chunk: its own token and the draft in one
    call."""
    if plan.writing != 1 or not plan.chunks or plan.chunks[0].row:
        return plan
    draft = plan.chunks[0]
    return replace(plan, writing=0, chunks=[Chunk(0, 0, 1 + draft.count, draft.start - 1), *plan.chunks[1:]])


def _places(places: np.ndarray, chunk: Chunk) -> np.ndarray:
    """Return those of a plan's places that lie in a chunk, counted from its beginning, each once."""
    return np.unique(places[(places >= chunk.offset) & (places < chunk.offset + chunk.count)]) - chunk.offset


TRIED_TOKENS, FIRST, SECOND, OTHER = 24, 9, 11, 4
"""Tokens of the trial at load: those of two chunks, those decoded, and those of a sequence beside."""
MOST_OFF = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Mean difference of logits between a computation in steps and one at once, as a part of their range."""


def open_generic(model: Any, cache: AlignedCache) -> GenericModel:
    """Return a runner that was tried: its steps compute what the model computes of the whole text at once.
    Sequences have calls of their own where padding changes the results. Raises ConfigError for a model whose
    steps differ even then."""
    rows = len(cache.begins)
    for padded in (True, False) if rows > 1 else (False,):
        runner = GenericModel(model, cache, padded=padded)
        off = _find_difference(runner, model, rows)
        if off <= MOST_OFF[model.dtype]:
            return runner
        log.info("%s: padded %s: steps differ by %.3f", model.config.model_type, padded, off)
    text = f"computed in steps, its logits differ by {off:.3f} of their range from those of a whole text"
    raise ConfigError(f"config.json: model_type {model.config.model_type} is not served: {text}")


def _find_difference(runner: GenericModel, model: Any, rows: int) -> float:
    """Compute a text in two chunks and some steps, beside another where there is a row for it, and the same
    at once without a cache. Return the mean difference of their logits."""
    vocab = model.config.get_text_config().vocab_size
    count = min(TRIED_TOKENS, runner.cache.columns)
    text = (np.arange(1, count + 1) * 7919) % vocab
    with torch.inference_mode():
        ids = torch.from_numpy(text[None]).to(model.device)
        expected = model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
    beside = rows > 1
    made, places = [runner.forward(_plan_chunks(text, [Chunk(0, 0, FIRST, 0)]))], [FIRST - 1]
    chunks = [Chunk(0, 0, SECOND, FIRST)] + [Chunk(1, SECOND, OTHER, 0)] * beside
    made.append(runner.forward(_plan_chunks(text, chunks)))
    places += [FIRST + SECOND - 1] + [OTHER - 1] * beside
    for step in range(count - FIRST - SECOND):
        at = np.array([FIRST + SECOND + step] + [OTHER + step] * beside)
        made.append(runner.forward(StepPlan(text[at], at, len(at), [], np.arange(len(at)))))
        places += at.tolist()
    for row in range(1 + beside):
        runner.cache.wipe(row, count)
    off = np.abs(np.concatenate(made) - expected[places]).max(1)
    return float(np.mean(off) / max(float(np.ptp(expected)), 1e-9))


def _plan_chunks(text: np.ndarray, chunks: list[Chunk]) -> StepPlan:
    """Return a plan of chunks of one text, of whose last tokens the logits are wanted."""
    at = np.concatenate([np.arange(one.start, one.start + one.count) for one in chunks])
    wanted = np.array([one.offset + one.count - 1 for one in chunks])
    return StepPlan(text[at], at, 0, chunks, wanted)
