"""The sampler against a plain one in float64, and against the distributions it should draw from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastserve._ext.sampler import Sampler
from tests.effort import examples
from tests.oracles.sampler import PlainSequence

NEAR = 2e-5  # float32 weights may decide otherwise within this share of the mass

SETTINGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "do_sample": st.booleans(),
        "temperature": st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.7, 20.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40, 1000, 10**6]),
        "top_p": st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
        "typical_p": st.sampled_from([1.0, 0.95, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.2, 0.8, 5.0]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3]),
    }
)
VOCABS = st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1000, 3072])


def draw_one(sampler: Sampler, row: np.ndarray, slot: int = 0) -> int:
    tokens = np.zeros(1, np.int32)
    sampler.draw(row[None], np.array([slot], np.int32), tokens)
    return int(tokens[0])


def make_row(rng: np.random.Generator, vocab: int, spread: float) -> np.ndarray:
    row = (rng.standard_normal(vocab) * spread).astype(np.float32)
    row[rng.random(vocab) < 0.1] = -np.inf
    row[rng.integers(vocab)] = 1.0
    return row


@given(st.data(), VOCABS, SETTINGS, st.integers(0, 2**32), st.sampled_from([0.1, 1.0, 4.0, 12.0]))
@examples(400)
def test_agrees_with_the_oracle(
    data: Any, vocab: int, settings: dict[str, Any], noise: int, spread: float
) -> None:
    rng = np.random.default_rng(noise)
    prompt = rng.integers(0, vocab, data.draw(st.integers(0, 20))).astype(np.int32)
    sampler, plain = Sampler(vocab, 3), PlainSequence(**settings, prompt=set(prompt.tolist()))
    sampler.begin(1, **settings)
    sampler.see(1, prompt)
    for _ in range(data.draw(st.integers(1, 6))):
        row = make_row(rng, vocab, spread)
        before = row.copy()
        expected = plain.draw(row)
        assume(plain.margin > NEAR)
        assert draw_one(sampler, row, 1) == expected
        assert np.array_equal(row, before)


@given(st.data(), VOCABS, SETTINGS, st.integers(0, 2**32))
def test_a_mask_leaves_what_a_row_without_the_others_has(
    data: Any, vocab: int, settings: dict[str, Any], noise: int
) -> None:
    """Also beside sequences without masks, and for penalties."""
    rng = np.random.default_rng(noise)
    prompt = rng.integers(0, vocab, data.draw(st.integers(0, 20))).astype(np.int32)
    masked, plain = Sampler(vocab, 3), Sampler(vocab, 3)
    for sampler, is_masked in ((masked, True), (plain, False)):
        sampler.begin(0, seed=3)
        sampler.begin(2, masked=is_masked, **settings)
        sampler.see(2, prompt)
    slots, tokens, expected = np.array([2, 0], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)
    for _ in range(data.draw(st.integers(1, 4))):
        allowed = rng.random(vocab) < data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        bits = np.zeros((3, -(-vocab // 32) * 32), bool)
        bits[2, :vocab] = allowed
        masks = np.packbits(bits, axis=1, bitorder="little").view("<i4")
        rows = np.stack([make_row(rng, vocab, 2.0) for _ in slots])
        cut = rows.copy()
        cut[0, ~allowed] = -np.inf
        before = rows.copy()
        masked.draw(rows, slots, tokens, masks)
        plain.draw(cut, slots, expected)
        assert tokens.tolist() == expected.tolist()
        assert np.array_equal(rows, before)


def test_masks_that_are_missing_or_of_another_size() -> None:
    sampler, row, token = Sampler(33, 2), np.zeros((1, 33), np.float32), np.zeros(1, np.int32)
    sampler.begin(1, masked=True)
    slot = np.array([1], np.int32)
    with pytest.raises(ValueError, match="masks: given none, and slot 1 draws by one"):
        sampler.draw(row, slot, token)
    for shape in ((1, 2), (2, 1), (2, 3)):
        with pytest.raises(ValueError, match="allowed: at least 2 rows of 2"):
            sampler.draw(row, slot, token, np.zeros(shape, np.int32))
    sampler.draw(row, slot, token, np.array([[0, 0], [0, 1]], np.int32))
    assert token.tolist() == [32]


def test_surprises_as_near_as_rounding_decide_nothing() -> None:
    """Two weights within a thousandth of each other are as surprising, but for 6e-8; two equal ones quite."""
    for row, near in (([2.4718206, 2.471476], True), ([2.4718206, 2.4718206], False), ([2.5, 2.4], False)):
        plain = PlainSequence(do_sample=True, typical_p=0.2)
        plain.draw(np.array(row, np.float32))
        assert (plain.margin <= NEAR) == near


@given(VOCABS, SETTINGS, st.integers(0, 2**32))
def test_company_changes_nothing(vocab: int, settings: dict[str, Any], noise: int) -> None:
    rng = np.random.default_rng(noise)
    alone, among = Sampler(vocab, 1), Sampler(vocab, 8)
    alone.begin(0, **settings)
    for slot in range(8):
        among.begin(slot, **(settings if slot == 5 else {"seed": slot, "do_sample": True, "top_p": 0.7}))
    slots = np.array([3, 5, 0, 7], np.int32)
    for _ in range(4):
        rows = np.stack([make_row(rng, vocab, 3.0) for _ in slots])
        tokens = np.zeros(4, np.int32)
        expected = draw_one(alone, rows[1].copy())
        among.draw(rows, slots, tokens)
        assert tokens[1] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"typical_p": 0.5},
        {"top_k": 6, "top_p": 0.9, "typical_p": 0.9, "temperature": 1.3},
    ],
)
def test_draws_are_spread_as_the_distribution(settings: dict[str, Any]) -> None:
    row = np.log(np.array([0.3, 0.02, 0.2, 0.15, 0.1, 0.08, 0.08, 0.07], np.float32))
    sampler, plain, draws = Sampler(8, 1), PlainSequence(do_sample=True, **settings), 20_000
    found, expected = np.zeros(8), np.zeros(8)
    for seed in range(draws):
        sampler.begin(0, seed=seed, do_sample=True, **settings)
        found[draw_one(sampler, row)] += 1
    for seed in range(2000):
        expected[replace(plain, seed=seed + draws).draw(row)] += 1
    assert ((found > 0) == (expected > 0)).all()
    assert (
        np.abs(found / draws - expected / 2000).sum() < 0.08
    )  # total variation of two samples of such sizes


def test_equal_logits_lower_tokens_first() -> None:
    row = np.zeros(700, np.float32)
    sampler = Sampler(700, 1)
    sampler.begin(0)
    assert draw_one(sampler, row) == 0
    drawn = set()
    for seed in range(300):
        sampler.begin(0, seed=seed, do_sample=True, top_k=5)
        drawn.add(draw_one(sampler, row))
    assert drawn == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 299])
def test_rows_that_cannot_be_drawn_from_fail_alone(value: float, place: int) -> None:
    rows = np.zeros((3, 300), np.float32)
    rows[1, place] = value
    sampler = Sampler(300, 3)
    for slot in range(3):
        sampler.begin(slot, seed=slot, do_sample=True, repetition_penalty=1.1)
    tokens = np.zeros(3, np.int32)
    sampler.draw(rows, np.arange(3, dtype=np.int32), tokens)
    assert tokens[1] == -1
    assert tokens[0] >= 0 and tokens[2] >= 0  # noqa: PT018
    rows[1] = -np.inf
    sampler.draw(rows, np.arange(3, dtype=np.int32), tokens)
    assert tokens[1] == -1


def test_masked_tokens_are_never_drawn() -> None:
    row = np.full(1000, -np.inf, np.float32)
    row[[3, 500, 999]] = [-50.0, -50.0, -50.0]
    sampler, drawn = Sampler(1000, 1), set()
    for seed in range(200):
        sampler.begin(0, seed=seed, do_sample=True, temperature=5.0)
        drawn.add(draw_one(sampler, row))
    assert drawn == {3, 500, 999}


def test_a_sequence_goes_on_elsewhere() -> None:
    rng = np.random.default_rng(1)
    rows = [make_row(rng, 400, 2.0) for _ in range(12)]
    settings: dict[str, Any] = {"seed": 9, "do_sample": True, "frequency_penalty": 0.4, "top_p": 0.9}
    whole, part = Sampler(400, 1), Sampler(400, 2)
    whole.begin(0, **settings)
    expected = [draw_one(whole, row) for row in rows]
    part.begin(1, step=5, **settings)
    part.see(1, np.array(expected[:5], np.int32), drawn=True)
    assert [draw_one(part, row, 1) for row in rows[5:]] == expected[5:]


@given(VOCABS, st.integers(0, 2**32), st.integers(0, 30))
def test_logprobs_are_of_the_row_itself(vocab: int, noise: int, best: int) -> None:
    rng = np.random.default_rng(noise)
    row = make_row(rng, vocab, 3.0)
    token = int(rng.integers(vocab))
    wide = row.astype(np.float64)
    plain = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    found, top = Sampler(vocab, 1).logprobs(row, token, best)
    assert found == pytest.approx(plain[token], abs=1e-6)
    order = np.lexsort((np.arange(vocab), -wide))[:best]
    assert [k for k, _ in top] == order.tolist()
    assert [value for _, value in top] == pytest.approx(plain[order].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0.0}, "temperature: given 0, allowed: more than 0"),
        ({"temperature": float("nan")}, "temperature: given nan"),
        ({"temperature": 3.45e38}, "temperature: given 3.45e"),  # infinite as a float
        ({"top_k": -1}, "top_k: given -1, allowed: 0"),
        ({"top_p": 0.0}, "top_p: given 0"),
        ({"top_p": 1.5}, "top_p: given 1.5, allowed: more than 0, at most 1"),
        ({"min_p": 1.5}, "min_p: given 1.5, allowed: 0 .all. to 1"),
        ({"typical_p": -0.1}, "typical_p: given -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: given 0"),
        ({"presence_penalty": 1e9}, "presence_penalty: given 1e"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty: given inf"),
    ],
)
def test_settings_out_of_bounds_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampler(10, 1).begin(0, **settings)


def test_wrong_sizes_are_named() -> None:
    sampler, one = Sampler(10, 2), np.zeros(1, np.int32)
    sampler.begin(0, repetition_penalty=2.0)
    with pytest.raises(ValueError, match="vocab, slots"):
        Sampler(0, 1)
    with pytest.raises(ValueError, match="slot: given 2, allowed: 0 to 1"):
        sampler.begin(2)
    with pytest.raises(ValueError, match=r"tokens\[1\]: given 10, allowed: 0 to 9"):
        sampler.see(0, np.array([9, 10], np.int32))
    with pytest.raises(ValueError, match="given 1 x 11 and 1, allowed: at least 1 rows of 10"):
        sampler.draw(np.zeros((1, 11), np.float32), one, one)
    with pytest.raises(ValueError, match="at least 2 rows"):
        sampler.draw(np.zeros((2, 10), np.float32), np.zeros(2, np.int32), one)
    with pytest.raises(ValueError, match="slot: given -1"):
        sampler.draw(np.zeros((1, 10), np.float32), np.array([-1], np.int32), one)
    with pytest.raises(ValueError, match="row, token, best"):
        sampler.logprobs(np.zeros(10, np.float32), 10, 0)
    with pytest.raises(ValueError, match="row: a NaN"):
        sampler.logprobs(np.full(10, np.nan, np.float32), 1, 0)
