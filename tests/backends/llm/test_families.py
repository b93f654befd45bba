"""Each family of models against transformers' own generate, and what a request's settings make of logits."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastserve.backends.llm.backend import TransformersBackend
from fastserve.backends.llm.folder import FAMILIES as FORMS
from fastserve.backends.llm.generic_model import GenericModel
from fastserve.backends.llm.protocols import Chunk, StepPlan
from fastserve.backends.llm.torch_model import FusedModel, use_int8
from fastserve.codec.generation import Finish
from fastserve.errors import ConfigError
from tests.backends.llm.families import FAMILIES, OFTEN
from tests.backends.llm.folders import (
    CONFIGS,
    EOS,
    LENGTH,
    PLAIN,
    SIZE,
    VOCAB,
    generate,
    make_config,
    read_model,
    save_config,
    save_model,
)
from tests.backends.llm.outs import Heard, ask, run

PAGE = Path(__file__).parents[3] / "docs" / "backends" / "textgen.md"
SMALL = {"max_sequences": 4, "step_tokens": 40}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def family(request: Any, tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(folder, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_model(folder, "llama")


def load(folder: Path, device: str = "cpu", **text: Any) -> TransformersBackend:
    backend = TransformersBackend({"device": device, "text": SMALL | text}, folder, 0)
    backend.load()
    return backend


def prompts(count: int, seed: int = 0, longest: int = 70) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCAB) for _ in range(dice.randint(1, longest))] for _ in range(count)]


def test_greedy_is_generate(family: tuple[Path, Any]) -> None:
    """Mixed lengths on four rows, prompts in chunks of 40 at most, ends by eos and by length."""
    folder, model = family
    dice = random.Random(1)
    lengths = [dice.randint(1, 30) for _ in range(9)]
    asked = list(zip(prompts(9), lengths, strict=True))
    engine = load(folder)
    heard = run(engine, [ask(rid, ids, max_new_tokens=count) for rid, (ids, count) in enumerate(asked)])
    for rid, (ids, count) in enumerate(asked):
        expected = generate(model, ids, count)
        assert heard.tokens[rid] == expected
        assert heard.ended[rid] == (Finish.EOS if expected[-1] == EOS else Finish.LENGTH)
    assert isinstance(computes(engine), FusedModel) != (folder.name[:-1] in PLAIN)
    check_logits(engine, model, asked[0][0])
    engine.close()


def check_logits(engine: TransformersBackend, model: Any, ids: list[int]) -> None:
    """Compare a prompt's logits: caps and scales of all of them do not show in the greatest."""
    runner: Any = engine._engine._model  # type: ignore[union-attr]
    tokens = np.array(ids)
    plan = StepPlan(tokens, np.arange(len(ids)), 0, [Chunk(0, 0, len(ids), 0)], np.array([len(ids) - 1]))
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(tokens[None])).logits[0, -1].numpy()
    np.testing.assert_allclose(runner.forward(plan)[0], expected, rtol=1e-3, atol=1e-3 * np.ptp(expected))


def computes(engine: TransformersBackend) -> Any:
    """What computes a step: the forward that is written out, or a model of transformers."""
    runner: Any = engine._engine._model  # type: ignore[union-attr]
    return getattr(runner, "_fused", None) or runner._model


def form_of(engine: TransformersBackend) -> str:
    """The form of folder.py that an engine has."""
    runner: Any = engine._engine._model  # type: ignore[union-attr]
    if isinstance(runner, GenericModel):
        return "generic"
    return "ragged" if runner._fused is None else "written"


FEW = [pytest.param(name, 3, 8, id=f"{name}-few") for name in sorted(OFTEN)]
MANY = [pytest.param(name, 20, 64, id=f"{name}-many", marks=pytest.mark.torture) for name in sorted(FAMILIES)]


@pytest.mark.parametrize(("name", "count", "tokens"), FEW + MANY)
def test_every_family_is_generate(tmp_path: Path, name: str, count: int, tokens: int) -> None:
    """In company, and the last prompt alone, or each where there are many."""
    config = make_config(*FAMILIES[name])
    save_config(tmp_path, config)
    model, asked = read_model(tmp_path), prompts(count, seed=11, longest=LENGTH - tokens)
    expected = [generate(model, ids, tokens) for ids in asked]
    assert len({token for said in expected for token in said}) > 2
    engine = load(tmp_path)
    assert form_of(engine) == FORMS[config.model_type]
    requests = [ask(rid, ids, max_new_tokens=tokens) for rid, ids in enumerate(asked)]
    heard = run(engine, requests)
    assert [heard.tokens[rid] for rid in range(count)] == expected
    for request in requests if count > 3 else requests[-1:]:
        assert run(engine, [request]).tokens[request.rid] == expected[request.rid]
    check_logits(engine, model, asked[0])
    engine.close()


def test_the_docs_list_every_family() -> None:
    table = re.search(r"<!-- table: families -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert table is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()[2:]]
    found = [(kind, form) for form, _, kinds in rows for kind in re.findall(r"`([\w-]+)`", kinds)]
    assert found == list(FORMS.items())


@pytest.mark.parametrize("name", ["llama_biased", "qwen3", "gemma2", "gpt2", "bloom"])
def test_int8_weights_of_each_form(tmp_path: Path, name: str) -> None:
    """What is written is what transformers writes with the same linear layers, alone and in company, and its
    logits are near those of float32."""
    save_model(tmp_path, name)
    plain, model, asked = read_model(tmp_path), read_model(tmp_path), prompts(5, seed=3, longest=60)
    with torch.inference_mode():
        use_int8(model)
        ids = torch.tensor([asked[0][:8] * 4])
        exact, near = plain(ids).logits, model(ids).logits
    assert 0 < (near - exact).abs().mean() < 0.1 * exact.std()
    engine = load(tmp_path, quantization="int8")
    requests = [ask(rid, ids, max_new_tokens=12) for rid, ids in enumerate(asked)]
    heard = run(engine, requests)
    assert [heard.tokens[rid] for rid in range(5)] == [generate(model, ids, 12) for ids in asked]
    assert run(engine, requests[-1:]).tokens[4] == heard.tokens[4]
    engine.close()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_stretch_beyond_a_bound(tmp_path: Path, kind: str) -> None:
    """What depends on company lies behind the bound."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    bound = "max_position_embeddings"
    if kind == "longrope":
        rope |= {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [9.0] * 4}
        bound = "original_max_position_embeddings"
    family = {"dynamic": "LlamaConfig", "longrope": "Phi3Config"}[kind]
    model = save_config(tmp_path, make_config(family, SIZE | {"rope_parameters": rope, bound: 32}))
    with pytest.raises(ConfigError, match=f"rope_type {kind} is not served.*text.max_tokens: 32$"):
        load(tmp_path)
    engine, asked = load(tmp_path, max_tokens=32), prompts(4, seed=12, longest=20)
    heard = run(engine, [ask(rid, ids, max_new_tokens=12) for rid, ids in enumerate(asked)])
    assert [heard.tokens[rid] for rid in range(4)] == [generate(model, ids, 12) for ids in asked]
    engine.close()


def test_every_family_that_is_served_is_compared() -> None:
    compared = {make_config(*one).model_type for one in (CONFIGS | FAMILIES).values()}
    assert compared == {kind for kind, form in FORMS.items() if form in ("written", "ragged", "generic")}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_says_the_same(family: tuple[Path, Any]) -> None:
    folder, model = family
    engine = load(folder, "cuda", dtype="float32")
    heard = run(engine, [ask(rid, ids, max_new_tokens=10) for rid, ids in enumerate(prompts(6))])
    for rid, ids in enumerate(prompts(6)):
        assert heard.tokens[rid] == generate(model, ids, 10)
    engine.close()


def test_repetition_penalty_is_generates(family: tuple[Path, Any]) -> None:
    folder, model = family
    asked = prompts(3, seed=3)
    engine = load(folder)
    heard = run(
        engine, [ask(rid, ids, max_new_tokens=12, repetition_penalty=1.7) for rid, ids in enumerate(asked)]
    )
    for rid, ids in enumerate(asked):
        assert heard.tokens[rid] == generate(model, ids, 12, repetition_penalty=1.7)
    engine.close()


def test_a_seed_draws_the_same_alone_and_in_company(llama: tuple[Path, Any]) -> None:
    engine = load(llama[0], max_sequences=8)
    settings = {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "max_new_tokens": 30, "ignore_eos": True}
    asked = [ask(rid, ids, seed=rid, **settings) for rid, ids in enumerate(prompts(16, seed=4))]
    together = run(engine, asked)
    for request in asked:
        assert run(engine, [request]).tokens[request.rid] == together.tokens[request.rid]
    other = run(engine, [ask(0, asked[0].ids, seed=99, **settings)])
    assert other.tokens[0] != together.tokens[0]
    engine.close()


def test_logprobs_are_torchs(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    engine, ids = load(folder), prompts(1, seed=5)[0]
    heard = run(engine, [ask(1, ids, max_new_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=True)])
    with torch.inference_mode():
        said = torch.tensor([ids + heard.tokens[1]])
        expected = torch.log_softmax(model(said).logits[0].double(), -1)
    first = heard.extras[1][0].prompt
    assert first is not None
    assert first[0] == (ids[0], None)
    assert [token for token, _ in first] == ids
    assert [own for _, own in first[1:]] == pytest.approx(
        [float(expected[at - 1, ids[at]]) for at in range(1, len(ids))], abs=1e-4
    )
    for at, (token, extra) in enumerate(zip(heard.tokens[1], heard.extras[1], strict=True), len(ids) - 1):
        assert extra.logprobs is not None
        assert extra.logprobs.own == pytest.approx(float(expected[at, token]), abs=1e-4)
        values, tokens = expected[at].topk(3)
        assert [best for best, _ in extra.logprobs.best] == tokens.tolist()
        assert [own for _, own in extra.logprobs.best] == pytest.approx(values.tolist(), abs=1e-4)
    engine.close()


def test_stop_ids_eos_and_bounds(llama: tuple[Path, Any]) -> None:
    folder, _model = llama
    engine, ids = load(folder, max_new_tokens=40), prompts(1, seed=6)[0]
    plain = run(engine, [ask(1, ids, max_new_tokens=1000, ignore_eos=True)]).tokens[1]
    assert len(plain) == 40
    stop = plain[7]
    heard = run(engine, [ask(1, ids, max_new_tokens=40, ignore_eos=True, stop_ids=[stop, 96])])
    assert heard.tokens[1] == plain[: plain.index(stop) + 1]
    assert heard.ended[1] == Finish.STOP
    nearly = prompts(1, seed=8, longest=1)[0] * (LENGTH - 3)
    heard = run(engine, [ask(2, nearly, max_new_tokens=40, ignore_eos=True)])
    assert len(heard.tokens[2]) == 3
    assert heard.ended[2] == Finish.LENGTH
    engine.close()


def test_two_engines_in_one_process_do_not_mix(tmp_path: Path, llama: tuple[Path, Any]) -> None:
    other = save_model(tmp_path, "gpt2")
    engines = load(llama[0]), load(tmp_path)
    asked = prompts(6, seed=9)
    heard = Heard(), Heard()
    for engine in engines:
        for rid, ids in enumerate(asked):
            engine.submit(ask(rid, ids, max_new_tokens=12))
    while any(engine.pending() for engine in engines):
        for engine, out in zip(engines, heard, strict=True):
            engine.step(out)
    for rid, ids in enumerate(asked):
        assert heard[0].tokens[rid] == generate(llama[1], ids, 12)
        assert heard[1].tokens[rid] == generate(other, ids, 12)
    for engine in engines:
        engine.close()


def test_prefixes_change_nothing(family: tuple[Path, Any]) -> None:
    """Prompts that begin alike, as conversations do: copies of rows that are left, and of rows that run."""
    folder, model = family
    engine, start = load(folder, prefix_cache=True), prompts(1, seed=10, longest=30)[0] * 3
    start = start[:40]
    for turn in range(4):
        asked = [start + tail for tail in prompts(3, seed=20 + turn, longest=8)]
        heard = run(engine, [ask(rid, ids, max_new_tokens=6) for rid, ids in enumerate(asked)])
        for rid, ids in enumerate(asked):
            assert heard.tokens[rid] == generate(model, ids, 6)
        start = (asked[turn % 3] + heard.tokens[turn % 3])[: 60 + turn]
    engine.close()
