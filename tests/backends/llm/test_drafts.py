"""Drafts by prompt look-up: an answer is token by token the one without drafts, whatever its request asks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.backends import model_callbacks
from fastserve.backends.llm.drafts import DraftPace, find_draft
from fastserve.backends.llm.engine import BatchEngine
from fastserve.backends.llm.protocols import Chunk, StepPlan
from fastserve.codec.generation import Finish, Info
from fastserve.settings.model_options import TextOptions
from tests.backends.llm.folders import VOCAB as MODEL_VOCAB
from tests.backends.llm.folders import save_model
from tests.backends.llm.outs import Heard, ask, run
from tests.backends.llm.scripted import POISON, VOCAB, ScriptedModel, continue_plainly, next_repeated
from tests.backends.llm.test_families import load
from tests.effort import examples

LENGTH = 128
Fates = list[tuple[int, int]]


def make(
    slots: int = 4, drafts: int = 6, *, soft: bool = False, **options: Any
) -> tuple[BatchEngine, ScriptedModel, Fates]:
    """An engine, its model, and (drafted, accepted) of each draft."""
    model = ScriptedModel(slots, LENGTH, next_repeated, soft=soft)
    info = Info(
        vocab_size=VOCAB,
        max_tokens=LENGTH,
        max_prompt_tokens=LENGTH - 1,
        max_new_tokens=80,
        slots=slots,
        eos_ids=[11],
    )
    asked = {"step_tokens": 40, "step_ms": 0, "prompt_lookup_num_tokens": drafts, **options}
    engine = BatchEngine(model, info, TextOptions(**asked))
    return engine, model, follow(engine)


def follow(engine: Any) -> Fates:
    """(drafted, accepted) of each draft to come."""
    fates: Fates = []
    engine._drafts.add = lambda drafts: fates.extend((len(one.tokens), one.accepted) for one in drafts)
    return fates


def test_what_followed_the_longest_and_latest_match_is_drafted() -> None:
    def draft(*said: int, count: int = 3) -> list[int]:
        return find_draft(np.array(said, np.int32), count)

    assert draft(1, 2, 3, 4, 5, 6, 9, 1, 2, 3) == [4, 5, 6]
    assert draft(1, 2, 3, 7, 1, 2, 3, 4, 8, 8, 1, 2, 3) == [4, 8, 8]  # the latest
    assert draft(0, 1, 2, 3, 7, 7, 6, 1, 2, 3, 4, 8, 8, 0, 1, 2, 3) == [7, 7, 6]  # the longest
    assert draft(5, 0, 1, 2, 0, 1, 2) == [0, 1, 2]  # over again
    assert draft(1, 2, 3, 9, 2, 3) == []  # two tokens alike are too few
    assert draft(2, 3, 9, 2, 3) == draft(2, 9, 2) == draft(2) == draft(1, 2) == []
    assert draft(3, 3, 3, 3, count=5) == [3] * 5


def test_a_pace_grows_by_success_and_pauses_by_failure() -> None:
    pace = DraftPace()
    lengths = []
    for _ in range(3):
        lengths.append(pace.tokens)
        pace.judge(pace.tokens, pace.tokens)
    assert lengths == [4, 8, 16]
    pace.judge(9, 5)
    assert pace.tokens == 6
    pauses = []
    for _ in range(6):
        pace.judge(pace.tokens, 0)
        pauses.append(pace.left)
    assert pauses == [1, 2, 4, 8, 16, 16]
    assert pace.tokens == 2
    pace.judge(2, 1)
    assert (pace.tokens, pace.pause) == (2, 0)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([1, 16, 200]), st.booleans(), st.booleans())
@examples(40)
def test_any_company_gets_its_own_tokens(
    seed: int, slots: int, step_tokens: int, prefix_cache: bool, short: bool
) -> None:
    dice = random.Random(seed)
    engine, model, _ = make(slots, 1 if short else 6, step_tokens=step_tokens, prefix_cache=prefix_cache)
    heard, asked = Heard(), {}
    stems = [[dice.randrange(12) for _ in range(40)] for _ in range(3)]
    for turn in range(60):
        for _ in range(dice.choice((0, 0, 1, 2)) if turn < 45 else 0):
            rid = len(asked)
            asked[rid] = dice.choice(stems)[: dice.randint(1, 40)] + [dice.randrange(POISON)] * (rid % 2)
            engine.submit(ask(rid, asked[rid], max_new_tokens=dice.randint(1, 60), ignore_eos=True))
        for rid in [rid for rid in heard.tokens if rid not in heard.ended and dice.random() < 0.02]:
            engine.cancel(rid, Finish.CANCELLED)
        heard.blocked = {rid for rid in heard.tokens if dice.random() < 0.1}
        engine.step(heard)
    heard.blocked = set()
    while engine.pending():
        engine.step(heard)
    assert set(heard.ended) == set(asked)
    for rid, tokens in heard.tokens.items():
        assert tokens == continue_plainly(asked[rid], len(tokens), next_repeated)
    assert max(len(plan.tokens) for plan in model.plans) <= max(step_tokens, slots + min(16, step_tokens))
    rows = engine._rows
    assert rows.free == slots
    assert not rows.writing


def test_most_of_a_copy_is_accepted_in_few_steps() -> None:
    engine, model, fates = make(1, 8)
    prompt = [1, 2, 3]
    tokens = run(engine, [ask(0, prompt, max_new_tokens=80, ignore_eos=True)]).tokens[0]
    assert tokens == continue_plainly(prompt, 80, next_repeated)
    assert len(model.plans) + sum(accepted for _, accepted in fates) == 80
    assert len(model.plans) < 50


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "seed": 3},
    "every setting": {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "typical_p": 0.95,
        "min_p": 0.01,
        "seed": 2**63 + 5,
    },
    "penalties": {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.05},
    "sampled with penalties": {
        "do_sample": True,
        "temperature": 0.5,
        "repetition_penalty": 1.02,
        "frequency_penalty": 0.02,
        "seed": 9,
    },
    "bias, least tokens": {"logit_bias": {4: 1.0, 7: -2.0}, "min_new_tokens": 30, "ignore_eos": False},
    "log probabilities": {"logprobs": 3, "prompt_logprobs": True, "prompt_best": 2},
    "a stop token": {"stop_ids": [6], "min_new_tokens": 20},
    "one token": {"max_new_tokens": 1},
}


def test_all_settings_in_one_batch_give_the_same_with_drafts() -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 1, 2], [7, 8, 9] * 4, [3, 3, 3, 3]]
    requests = [
        ask(3 * number + at, prompt, **{"max_new_tokens": 70, "ignore_eos": True, **settings})
        for number, settings in enumerate(SETTINGS.values())
        for at, prompt in enumerate(prompts)
    ]
    plain, drafted = (make(27, drafts, soft=True, step_tokens=200) for drafts in (0, 6))
    expected, heard = (run(engine, requests) for engine, _, _ in (plain, drafted))
    assert heard.tokens == expected.tokens
    assert heard.ended == expected.ended
    assert heard.extras == expected.extras
    assert sum(accepted for _, accepted in drafted[2]) > 100
    assert any(0 < accepted < count for count, accepted in drafted[2])


def test_an_accepted_draft_ends_where_its_sequence_ends() -> None:
    engine, model, fates = make(2, 8)
    model.tell = lambda said: said[-5]
    asked = [
        ask(0, [1, 2, 3, 4, 6] * 3, max_new_tokens=60, stop_ids=[6]),
        ask(1, [1, 2, 3, 4, 5] * 20, max_new_tokens=60),  # its row of the cache is full before
    ]
    heard = run(engine, asked)
    assert heard.tokens == {0: [1, 2, 3, 4, 6], 1: ([1, 2, 3, 4, 5] * 6)[: LENGTH - 100]}
    assert heard.ended == {0: Finish.STOP, 1: Finish.LENGTH}
    assert (8, 8) in fates


def test_nan_of_a_rejected_token_is_wiped() -> None:
    engine, model, fates = make(1, 4)
    model.tell = lambda said: 5 if len(said) == 12 else (said[-3] if len(said) > 3 else 1)
    plain = model.forward

    def forward(plan: Any) -> np.ndarray:
        """Positions that come after a wrong one hold NaN."""
        logits = plain(plan)
        for at in range(plan.writing, len(plan.tokens)):
            if plan.positions[at] >= 12 and plan.positions[0] < 12:
                model.data[0, plan.positions[at]] = np.nan
                logits[at] = np.nan
        return logits

    model.forward = forward  # type: ignore[method-assign]
    prompt = [1, 2, 3] * 2
    heard = run(engine, [ask(0, prompt, max_new_tokens=30, ignore_eos=True)])
    assert heard.ended == {0: Finish.LENGTH}
    assert heard.tokens[0] == continue_plainly(prompt, 30, model.tell)
    assert any(accepted < count for count, accepted in fates)


def test_a_step_without_memory_is_tried_without_drafts() -> None:
    engine, model, fates = make(2, 8)
    model.room = 4
    asked = [ask(rid, [1, 2, 3], max_new_tokens=60, ignore_eos=True) for rid in range(2)]
    heard = run(engine, asked)
    assert heard.ended == {0: Finish.LENGTH, 1: Finish.LENGTH}
    assert heard.tokens[1] == continue_plainly([1, 2, 3], 60, next_repeated)
    assert fates
    assert max(len(plan.tokens) for plan in model.plans) > model.room


def test_counts_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, fates = make(1)
    del engine._drafts.add
    told: list[tuple[str, dict[str, int]]] = []
    monkeypatch.setattr(model_callbacks, "notify", lambda do, **fields: told.append((do, fields)))
    run(engine, [ask(0, [1, 2, 3], max_new_tokens=60, ignore_eos=True)])
    assert {do for do, _ in told} == {"drafts"}
    drafted, accepted = (sum(fields[name] for _, fields in told) for name in ("drafted", "accepted"))
    assert drafted >= accepted > 0
    assert not fates


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "written": ("llama", {}),
    "window and cap": ("gemma2", {}),
    "ragged": ("gpt2", {}),
    "generic": ("bloom", {"max_sequences": 1}),
    "int8": ("qwen2", {"quantization": "int8"}),
    "numpy": ("mistral", {"runtime": "numpy"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_models_of_each_form_write_the_same(tmp_path: Path, form: str) -> None:
    """On four rows or one, greedy and sampled, with a cache of prefixes. Of three tokens, of which
    texts repeat themselves."""
    few = dict.fromkeys((10, 11, 12), 60.0)
    family, text = FORMS[form]
    save_model(tmp_path, family)
    dice = random.Random(4)
    asked = []
    for rid in range(8):
        stem = [dice.randrange(MODEL_VOCAB) for _ in range(dice.randint(2, 9))]
        settings: dict[str, Any] = {"max_new_tokens": 48, "logprobs": 0, "logit_bias": few}
        settings |= {"do_sample": True, "temperature": 2.0, "seed": rid} if rid % 2 else {}
        asked.append(ask(rid, (stem * 30)[:40], ignore_eos=True, **settings))
    heard, fates = [], []
    for drafts in (0, 5):
        backend = load(tmp_path, prompt_lookup_num_tokens=drafts, prefix_cache=True, **text)
        if drafts:
            fates = follow(backend._loaded)
        heard.append(run(backend, asked))
        backend.close()
    plain, drafted = heard
    assert drafted.tokens == plain.tokens
    assert sum(accepted for _, accepted in fates) > 20
    for rid, extras in drafted.extras.items():
        own = [[one.logprobs.own for one in said if one.logprobs] for said in (extras, plain.extras[rid])]
        np.testing.assert_allclose(*own, atol=2e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_logits_behind_a_draft_are_those_of_steps(tmp_path: Path, family: str) -> None:
    """Where all rows have drafts, and where one of several has: attention computes them together, or each."""
    save_model(tmp_path, family)
    backend = load(tmp_path)
    model: Any = backend._loaded._model  # type: ignore[attr-defined]
    text = (np.arange(40) * 31) % MODEL_VOCAB
    begun = [9, 17, 12, 5]
    for counts in ([3, 1, 2, 3], [0, 0, 4, 0], [0, 2, 0, 0]):
        for row, length in enumerate(begun):
            chunk = Chunk(row, 0, length, 0)
            model.forward(StepPlan(text[:length] + row, np.arange(length), 0, [chunk], np.array([0])))
        at, rows, offset, chunks = list(begun), [0, 1, 2, 3], 4, []
        for row, count in enumerate(counts):
            if count:
                chunks.append(Chunk(row, offset, count, begun[row] + 1))
                at += range(begun[row] + 1, begun[row] + 1 + count)
                rows += [row] * count
                offset += count
        tokens = text[at] + rows
        made = model.forward(StepPlan(tokens, np.array(at), 4, chunks, np.arange(offset))).copy()
        for row in range(4):
            mine = np.flatnonzero(np.array(rows) == row)
            for step, place in enumerate(mine):
                where = np.array(begun) + [step if other == row else 0 for other in range(4)]
                given = text[where] + np.arange(4)
                expected = model.forward(StepPlan(given, where, 4, [], np.arange(4)))[row]
                np.testing.assert_allclose(made[place], expected, atol=2e-3 * np.ptp(expected))
    backend.close()
