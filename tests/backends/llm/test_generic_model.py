"""Rows that end in one column, and models that are tried before they are served."""

from __future__ import annotations

import random
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastserve.backends.llm.generic_model import (
    AlignedCache,
    GenericModel,
    LayerShape,
    find_layer_shapes,
    open_generic,
)
from fastserve.backends.llm.kv_cache import CacheSize
from fastserve.backends.llm.protocols import Chunk
from fastserve.codec.generation import Finish
from fastserve.errors import ConfigError
from tests.backends.llm.folders import EOS, LENGTH, VOCAB, generate, make_config, save_model, transformers
from tests.backends.llm.outs import ask, run
from tests.backends.llm.test_families import load, prompts
from tests.backends.llm.test_kv_cache import resident

CPU = torch.device("cpu")
ROWS, COLUMNS = 5, 64
SHAPES = [LayerShape(2, 3, 1, 5), LayerShape(1, 4, 2, 2)]


class Rows:
    """An AlignedCache beside the positions that its rows should hold: numbers, in all of keys and values."""

    def __init__(self) -> None:
        self.cache = AlignedCache(SHAPES, CacheSize(ROWS, COLUMNS), torch.float32, CPU)
        self.held: list[list[float]] = [[] for _ in range(ROWS)]
        self.count = 0.0

    def write(self, row: int, column: int) -> None:
        self.count += 1
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor[row, :, column] = self.count
        self.held[row].append(self.count)

    def read(self, row: int, count: int) -> None:
        """Compute a chunk of a prompt."""
        length = len(self.held[row])
        begin = self.cache.place(Chunk(row, 0, count, length))
        for at in range(length, length + count):
            self.write(row, begin + at)

    def decode(self, writing: int) -> None:
        lengths = [len(held) for held in self.held[:writing]]
        first, front = self.cache.align(np.array(lengths))
        assert front - first == max(lengths)
        assert first >= 0
        assert front < COLUMNS
        for row in range(writing):
            self.write(row, front)
        self.cache.advance()

    def check(self) -> None:
        for row, held in enumerate(self.held):
            begin = int(self.cache.begins[row])
            for tensor in (*self.cache.keys, *self.cache.values):
                found = tensor[row, :, begin : begin + len(held)]
                expected = torch.tensor(held)[None, :, None].expand(found.shape)
                assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_what_they_should(seed: int) -> None:
    """Chunks, steps, exchanges, copies and wipes in any order; the front comes to the last column often."""
    dice, rows = random.Random(seed), Rows()
    cache = rows.cache
    writing = 0
    for _ in range(400):
        row, other = dice.sample(range(ROWS), 2)
        held = rows.held
        match dice.randrange(6):
            case 0 if row >= writing and len(held[row]) < COLUMNS // 2:
                rows.read(row, dice.randint(1, 20))
            case 1:
                writing = dice.randint(0, ROWS)
            case 2 if held[row] and held[other]:
                cache.swap(row, other, max(len(held[row]), len(held[other])))
                held[row], held[other] = held[other], held[row]
            case 3 if held[row]:
                count = dice.randint(1, len(held[row]))
                cache.move(row, other, count)
                held[other] = held[row][:count]
            case 4:
                cache.wipe(row, len(held[row]))
                held[row].clear()
                assert not any(tensor[row].any() for tensor in (*cache.keys, *cache.values))
            case _:
                for full in range(writing):
                    if len(held[full]) >= COLUMNS - 1:
                        held[full].clear()
                if writing:
                    rows.decode(writing)
        rows.check()


def test_a_step_that_failed_is_run_again(tmp_path: Path) -> None:
    """Memory runs out in the middle of a step, once in each: prompts are computed more slowly, and right."""
    model = save_model(tmp_path, "bloom")
    engine = load(tmp_path)
    runner: Any = engine._engine._model  # type: ignore[union-attr]
    forward, calls = runner._model.forward, [0]

    def fail_often(**given: Any) -> Any:
        calls[0] += 1
        made = forward(**given)
        if calls[0] % 7 == 3 and given["input_ids"].shape[1] > 1:
            raise torch.OutOfMemoryError("out of memory")
        return made

    runner._model.forward = fail_often
    asked = prompts(6, seed=21, longest=60)
    heard = run(engine, [ask(rid, ids, max_new_tokens=20) for rid, ids in enumerate(asked)])
    assert calls[0] > 20
    assert [heard.tokens[rid] for rid in range(6)] == [generate(model, ids, 20) for ids in asked]
    engine.close()


def test_a_nan_stays_with_its_sequence(tmp_path: Path) -> None:
    """What it left in the cache is behind the masks of others, and zero."""
    model = save_model(tmp_path, "bloom")
    with torch.no_grad():
        model.transformer.word_embeddings.weight[96] = float("nan")
    model.save_pretrained(tmp_path)
    engine = load(tmp_path, max_sequences=2)
    good = [ids for ids in prompts(8, seed=22) if 96 not in ids]
    asked = [ids for one in good for ids in ([*one[:5], 96], one)]
    heard = run(engine, [ask(rid, ids, max_new_tokens=8, ignore_eos=True) for rid, ids in enumerate(asked)])
    for rid, ids in enumerate(asked):
        assert heard.ended[rid] == (Finish.FAILED if 96 in ids else Finish.LENGTH)
    fresh = run(engine, [ask(99, good[0], max_new_tokens=8, ignore_eos=True)])
    assert fresh.tokens[99] == heard.tokens[1]
    engine.close()


def test_a_cache_is_bounded_and_takes_memory_as_it_is_used(tmp_path: Path) -> None:
    """The bytes of a position are those that a call of the model fills: two layers, keys and values of 32."""
    model = save_model(tmp_path, "bloom")
    row = LENGTH * 2 * 2 * 32 * 4
    engine = load(tmp_path, max_tokens=LENGTH, kv_bytes=2 * row + 1)
    assert (engine.info.slots, engine.info.kv_tokens) == (2, 2 * LENGTH)
    asked = prompts(5, seed=23, longest=LENGTH - 20)
    heard = run(engine, [ask(rid, ids, max_new_tokens=20) for rid, ids in enumerate(asked)])
    assert [heard.tokens[rid] for rid in range(5)] == [generate(model, ids, 20) for ids in asked]
    engine.close()
    before = resident()
    cache = AlignedCache([LayerShape(4, 64, 4, 64)] * 4, CacheSize(32, 4096), torch.float32, CPU)
    for row in range(32):
        cache.place(Chunk(row, 0, 40, 0))
        for tensor in (*cache.keys, *cache.values):
            tensor[row, :, :40] = 1
    cache.wipe(3, 40)
    assert not any(tensor[3].any() for tensor in (*cache.keys, *cache.values))
    assert resident() - before < 128 << 20  # of 2 GiB
    with pytest.raises(MemoryError):
        AlignedCache([LayerShape(64, 128, 64, 128)] * 64, CacheSize(1 << 20, 1 << 20), torch.float32, CPU)


def make(family: str, **fields: Any) -> Any:
    torch.manual_seed(2)
    config = make_config(family, {"vocab_size": VOCAB, "eos_token_id": EOS, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return model


def small_bloom() -> tuple[Any, AlignedCache]:
    model = make("BloomConfig", hidden_size=32, n_layer=2, n_head=4)
    return model, AlignedCache(find_layer_shapes(model), CacheSize(2, LENGTH), torch.float32, CPU)


def test_sequences_share_a_call_unless_that_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = small_bloom()
    assert open_generic(model, cache)._padded
    forward = model.forward

    @wraps(forward)
    def see_padding(attention_mask: Any = None, **given: Any) -> Any:
        return forward(**given)

    monkeypatch.setattr(model, "forward", see_padding)
    runner = open_generic(model, cache)
    assert isinstance(runner, GenericModel)
    assert not runner._padded


def test_a_model_whose_steps_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = small_bloom()
    forward = model.forward

    @wraps(forward)
    def forget(**given: Any) -> Any:
        for name in {"cache", "past_key_values"} & given.keys():
            given[name].layers[1].values[:, :, :3] = 9
        return forward(**given)

    monkeypatch.setattr(model, "forward", forget)
    with pytest.raises(ConfigError, match="model_type bloom is not served: computed in steps"):
        open_generic(model, cache)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}),
        ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2}),
    ],
)
def test_a_model_without_keys_and_values_is_refused(kind: str, fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="is not served: what its layers keep is not keys and values"):
        find_layer_shapes(make(kind, **fields))
