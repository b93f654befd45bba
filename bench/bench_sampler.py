"""Drawing 32 tokens of a vocabulary of 32000, against numpy's sort and cumsum."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve._ext.sampler import Sampler
from tests.oracles.sampler import PlainSequence

ROWS, VOCAB = 32, 32000
LOGITS = (np.random.default_rng(0).standard_normal((ROWS, VOCAB)) * 4).astype(np.float32)
SLOTS, TOKENS = np.arange(ROWS, dtype=np.int32), np.zeros(ROWS, np.int32)
EVERY = {"top_k": 50, "top_p": 0.9, "typical_p": 0.95, "repetition_penalty": 1.1, "temperature": 0.8}
WAYS = {"greedy": {}, "plain": {"do_sample": True}, "top_p": {"do_sample": True, "top_p": 0.9}}
WAYS["every"] = {"do_sample": True, **EVERY}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch(benchmark, way):  # type: ignore[no-untyped-def]
    sampler = Sampler(VOCAB, ROWS)
    for slot in range(ROWS):
        sampler.begin(slot, seed=slot, **WAYS[way])
    benchmark(lambda: sampler.draw(LOGITS, SLOTS, TOKENS))
    assert (TOKENS >= 0).all()


def test_numpy_with_top_p(benchmark):  # type: ignore[no-untyped-def]
    drawn = benchmark(
        lambda: [PlainSequence(seed=i, **WAYS["top_p"]).draw(row) for i, row in enumerate(LOGITS)]
    )
    assert min(drawn) >= 0
