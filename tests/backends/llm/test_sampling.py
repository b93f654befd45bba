"""Settings of single sequences against transformers' own processors: biases, least tokens, min_p, ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastserve._ext.sampler import Sampler
from fastserve.backends.llm.backend import TransformersBackend
from fastserve.backends.llm.sampling import BatchSampler
from fastserve.backends.llm.scheduling import make_sequence
from fastserve.codec.generation import Finish, Info, read_ranks
from fastserve.errors import Kind, ServeError
from tests.backends.llm.folders import EOS, VOCAB, generate, save_model
from tests.backends.llm.outs import ask, run

BIASES = {3: 2.5, 17: -100.0, 40: 100.0, EOS: 1.25}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_model(folder, "llama")


@pytest.fixture(scope="module")
def engine(llama: tuple[Path, Any]) -> Any:
    backend = TransformersBackend(
        {"device": "cpu", "text": {"max_sequences": 4, "step_tokens": 40}}, llama[0], 0
    )
    backend.load()
    yield backend
    backend.close()


def prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCAB) for _ in range(dice.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("bias", [BIASES, {5: -3.0}, {token: 0.01 * token for token in range(VOCAB)}])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_logit_bias_is_generates(
    llama: tuple[Path, Any], engine: TransformersBackend, bias: dict[int, float], penalty: float
) -> None:
    """SequenceBiasLogitsProcessor, before the repetition penalty; beside sequences without a bias."""
    settings = {"max_new_tokens": 12, "repetition_penalty": penalty}
    asked = prompts(4, seed=1)
    heard = run(
        engine,
        [ask(at, ids, logit_bias={} if at % 2 else bias, **settings) for at, ids in enumerate(asked)],
    )
    for at, ids in enumerate(asked):
        more = {} if at % 2 else {"sequence_bias": {(token,): value for token, value in bias.items()}}
        expected = generate(llama[1], ids, 12, repetition_penalty=penalty, **more)
        assert heard.tokens[at] == expected


@pytest.mark.parametrize("least", [1, 6, 12])
def test_min_tokens_is_generates(llama: tuple[Path, Any], engine: TransformersBackend, least: int) -> None:
    """MinNewTokensLengthLogitsProcessor: the end is likely at every token, and comes when it may."""
    bias = {EOS: 3.0}
    asked = prompts(4, seed=2)
    heard = run(
        engine,
        [
            ask(at, ids, max_new_tokens=12, min_new_tokens=least, logit_bias=bias)
            for at, ids in enumerate(asked)
        ],
    )
    for at, ids in enumerate(asked):
        expected = generate(llama[1], ids, 12, min_new_tokens=least, sequence_bias={(EOS,): 3.0})
        assert heard.tokens[at] == expected
        assert len(expected) >= least
    if least < 12:
        assert Finish.EOS in heard.ended.values()


def test_min_tokens_holds_stop_tokens_too(engine: TransformersBackend) -> None:
    (ids,) = prompts(1, seed=3)
    plain = run(engine, [ask(1, ids, max_new_tokens=8, ignore_eos=True)]).tokens[1]
    settings = {"max_new_tokens": 8, "ignore_eos": True, "stop_ids": [plain[0]]}
    assert len(run(engine, [ask(1, ids, **settings)]).tokens[1]) == 1
    held = run(engine, [ask(1, ids, min_new_tokens=5, **settings)]).tokens[1]
    assert len(held) > 5
    assert plain[0] not in held[:5]


@pytest.mark.parametrize("min_p", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    "more",
    [{}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.9, "temperature": 1.4}],
)
def test_min_p_is_the_warpers(min_p: float, more: dict[str, Any]) -> None:
    """The tokens that are drawn are those that transformers' chain of warpers leaves, as often."""
    rng = np.random.default_rng(5)
    row = (rng.standard_normal(30) * 2).astype(np.float32)
    warpers = LogitsProcessorList()
    if "temperature" in more:
        warpers.append(TemperatureLogitsWarper(more["temperature"]))
    if "top_k" in more:
        warpers.append(TopKLogitsWarper(more["top_k"]))
    if "top_p" in more:
        warpers.append(TopPLogitsWarper(more["top_p"]))
    warpers.append(MinPLogitsWarper(min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), torch.tensor(row)[None])
    expected = torch.softmax(scores[0].double(), -1).numpy()
    sampler, found, tokens = Sampler(30, 1), np.zeros(30), np.zeros(1, np.int32)
    for seed in range(4000):
        sampler.begin(0, seed=seed, do_sample=True, min_p=min_p, **more)
        sampler.draw(row[None], np.zeros(1, np.int32), tokens)
        found[tokens[0]] += 1
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))
    assert np.abs(found / 4000 - expected).sum() < 0.1


def test_ranks_of_a_prompt_are_torchs(llama: tuple[Path, Any], engine: TransformersBackend) -> None:
    """Also of a prompt that is read in several chunks, beside one whose tokens are only scored."""
    asked = [prompts(1, seed=seed, longest=70)[0] * 2 for seed in (6, 7)]
    heard = run(
        engine,
        [
            ask(0, asked[0], max_new_tokens=2, prompt_logprobs=True, prompt_best=3),
            ask(1, asked[1], max_new_tokens=2, prompt_logprobs=True),
        ],
    )
    for at, ids in enumerate(asked):
        with torch.inference_mode():
            expected = torch.log_softmax(llama[1](torch.tensor([ids])).logits[0].double(), -1)
        extra = heard.extras[at][0]
        assert extra.prompt is not None
        assert extra.prompt[0] == (ids[0], None)
        assert [own for _, own in extra.prompt[1:]] == pytest.approx(
            [float(expected[place, token]) for place, token in enumerate(ids[1:])], abs=1e-4
        )
        ranks = read_ranks(extra.prompt_ranks)
        if at:
            assert not ranks
            continue
        assert len(ranks) == len(ids) - 1
        for place, (token, (rank, best)) in enumerate(zip(ids[1:], ranks, strict=True)):
            row = expected[place]
            assert rank == int((row >= row[token]).sum())
            values, tokens = row.topk(3)
            assert [one for one, _ in best] == tokens.tolist()
            assert [own for _, own in best] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_row_has_its_own_logits_afterwards() -> None:
    """Log probabilities are of the model's distribution, and another slot's row is never touched."""
    info = Info(vocab_size=8, max_tokens=16, max_prompt_tokens=8, max_new_tokens=8, slots=2)
    drawing = BatchSampler(Sampler(8, 3), 2)
    settings = [{"logit_bias": {2: 100.0, 7: -1.5}, "min_new_tokens": 2, "stop_ids": [2]}, {}]
    sequences = []
    for at, more in enumerate(settings):
        request = ask(at, [1], **more)
        sequence = make_sequence(request, np.array([1], np.int32), info, {7: Finish.EOS})
        drawing.begin(sequence)
        sequences.append(sequence)
    logits = np.array([[0, 1, 2, 3, 4, 5, 6, 7]] * 2, np.float32)
    slots = np.array([one.slot for one in sequences], np.int32)
    for drawn, expected in ((0, [6, 7]), (1, [6, 7]), (2, [2, 7])):
        sequences[0].drawn = drawn
        assert drawing.draw(logits, slots).tolist() == expected
        assert logits.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
    drawing.end(sequences[0])
    assert not drawing._biased


def test_a_bias_of_no_token_is_refused(engine: TransformersBackend) -> None:
    for token in (-1, VOCAB):
        with pytest.raises(ServeError, match=f"logit_bias: allowed: tokens from 0 to {VOCAB - 1}") as caught:
            engine.submit(ask(1, [1], logit_bias={token: 1.0}))
        assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert not engine.pending()
