"""Vectors of texts against transformers' own hidden states: decoders in chunks beside others that write, and
encoders in padded batches. And how a folder says what is made of the states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastserve.backends.llm.backend import TransformersBackend
from fastserve.backends.llm.protocols import TextRequest
from fastserve.codec.generation import Finish, TextNote
from fastserve.errors import ConfigError, Kind, ServeError
from tests.backends.llm.folders import VOCAB, generate, make_config, save_model, transformers
from tests.backends.llm.outs import Heard, ask, run
from tests.backends.llm.test_families import load, prompts

_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
}
_DISTILLED = {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
_ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _SIZE),
    "roberta": ("RobertaConfig", _SIZE | {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaConfig", _SIZE | {"pad_token_id": 1}),
    "distilbert": ("DistilBertConfig", _DISTILLED | {"max_position_embeddings": 80}),
    "albert": ("AlbertConfig", _SIZE | {"embedding_size": 16}),
    "camembert": ("CamembertConfig", _SIZE | {"pad_token_id": 1}),
    "deberta-v2": ("DebertaV2Config", _SIZE | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "electra": ("ElectraConfig", _SIZE | {"embedding_size": 16}),
    "modernbert": (
        "ModernBertConfig",
        _SIZE | _ENDS | {"local_attention": 16, "global_attn_every_n_layers": 2},
    ),
    "mpnet": ("MPNetConfig", _SIZE | {"pad_token_id": 1}),
}


def save_encoder(folder: Path, name: str) -> Any:
    config = make_config(*ENCODERS[name])
    torch.manual_seed(3)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim < 2), std=0.2)
    model.save_pretrained(folder)
    return model


def asked(rid: int, ids: list[int], **fields: Any) -> TextRequest:
    return TextRequest(rid, ids, TextNote(embeds=True, **fields))


def vector_of(heard: Heard, rid: int) -> np.ndarray:
    assert heard.ended[rid] == Finish.STOP, heard.extras.get(rid)
    assert rid not in heard.tokens
    (extra,) = heard.extras[rid]
    return np.frombuffer(extra.vector, "<f4")


def expected(model: Any, ids: list[int], how: str, *, normalize: bool = True) -> np.ndarray:
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
    found = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[how]
    return found / np.linalg.norm(found) if normalize else found


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *((family, "mean") for family in ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2", "bloom")),
        ("llama", "last"),
        ("llama", "cls"),
    ],
)
def test_decoders_in_chunks_beside_others(tmp_path: Path, family: str, how: str) -> None:
    model = save_model(tmp_path, family)
    core = model.base_model
    engine = load(tmp_path, pooling=how, step_tokens=24)
    assert (engine.info.embeds, engine.info.writes) == (32, True)
    given = prompts(6, seed=2)
    writing = [ask(10 + at, ids, max_new_tokens=12) for at, ids in enumerate(given[:3])]
    heard = run(engine, writing + [asked(rid, ids) for rid, ids in enumerate(given)])
    for rid, ids in enumerate(given):
        np.testing.assert_allclose(vector_of(heard, rid), expected(core, ids, how), atol=2e-5)
    for at, ids in enumerate(given[:3]):
        assert heard.tokens[10 + at] == generate(model, ids, 12)
    rows = engine._engine._rows  # type: ignore[union-attr]
    assert rows.free == len(rows.sequences)
    engine.close()


def test_a_copied_prefix_is_no_part_of_a_mean(tmp_path: Path) -> None:
    core = save_model(tmp_path, "llama").base_model
    engine = load(tmp_path, pooling="mean", prefix_cache=True, normalize=False)
    ids = prompts(1, longest=60, seed=8)[0] * 60
    heard = run(engine, [ask(0, ids[:60], max_new_tokens=3)])
    heard = run(engine, [asked(1, ids[:60])])
    np.testing.assert_allclose(
        vector_of(heard, 1), expected(core, ids[:60], "mean", normalize=False), rtol=1e-4, atol=1e-4
    )
    engine.close()


def test_who_makes_none_says_so(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    engine = load(tmp_path)
    assert engine.info.embeds == 0
    with pytest.raises(ServeError, match=r"makes no embeddings \(text.pooling\)") as none:
        engine.submit(asked(0, [1, 2]))
    assert none.value.kind is Kind.UNIMPLEMENTED
    engine.close()


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_encoders_in_batches(tmp_path: Path, name: str) -> None:
    """Texts of mixed lengths, padded: each is as alone."""
    model = save_encoder(tmp_path, name)
    config = model.config
    for how in ("mean", "cls", "last"):
        engine = load(tmp_path, pooling=how)
        assert (engine.info.embeds, engine.info.writes) == (32, False)
        assert engine.info.max_prompt_tokens == (80 if config.pad_token_id == 0 else 78)
        given = [[token if token > 1 else 2 for token in ids] for ids in prompts(9, seed=4)]
        heard = run(engine, [asked(rid, ids) for rid, ids in enumerate(given)])
        for rid, ids in enumerate(given):
            np.testing.assert_allclose(vector_of(heard, rid), expected(model, ids, how), atol=2e-5)
        longest = [5] * engine.info.max_prompt_tokens
        np.testing.assert_allclose(
            vector_of(run(engine, [asked(0, longest)]), 0), expected(model, longest, how), atol=2e-5
        )
        with pytest.raises(ServeError, match="writes none"):
            engine.submit(ask(0, [1]))
        for wrong in ([], [VOCAB], [-1], [*longest, 5]):
            with pytest.raises(ServeError, match="prompt: given"):
                engine.submit(asked(0, wrong))
        assert not engine.pending()
        engine.close()


def test_what_an_encoder_was_trained_with_is_left_out(tmp_path: Path) -> None:
    """A folder of BertForMaskedLM has no pooler, and a head."""
    torch.manual_seed(3)
    model = transformers.BertForMaskedLM(make_config("BertConfig", _SIZE)).eval()
    model.save_pretrained(tmp_path)
    core = model.base_model
    engine = load(tmp_path)
    np.testing.assert_allclose(
        vector_of(run(engine, [asked(0, [3, 4, 5])]), 0), expected(core, [3, 4, 5], "mean"), atol=2e-5
    )
    engine.close()


def write_modules(folder: Path, *kinds: str, pooling: Any = None, most: int = 0) -> None:
    modules = [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": f"a.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_cls_token": True}))
    if most:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))


def test_the_folder_says_how(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "bert")
    write_modules(tmp_path, "Transformer", "Pooling", most=40)
    engine = load(tmp_path)
    assert engine.info.max_prompt_tokens == 40
    np.testing.assert_allclose(
        vector_of(run(engine, [asked(0, [3, 4, 5])]), 0),
        expected(model, [3, 4, 5], "cls", normalize=False),
        rtol=1e-4,
        atol=1e-5,
    )
    engine.close()
    write_modules(
        tmp_path,
        "Transformer",
        "Pooling",
        "Normalize",
        pooling={
            "word_embedding_dimension": 32,
            "pooling_mode_cls_token": False,
            "pooling_mode_lasttoken": True,
        },
    )
    engine = load(tmp_path)
    np.testing.assert_allclose(
        vector_of(run(engine, [asked(0, [3, 4, 5])]), 0), expected(model, [3, 4, 5], "last"), atol=2e-5
    )
    engine.close()
    engine = load(tmp_path, pooling="mean", normalize=False)
    np.testing.assert_allclose(
        vector_of(run(engine, [asked(0, [3, 4])]), 0),
        expected(model, [3, 4], "mean", normalize=False),
        rtol=1e-4,
        atol=1e-5,
    )
    engine.close()


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "Pooling", "Dense"), None, 'type: given "Dense"'),
        (("Transformer",), None, "no module of the type Pooling"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "max_tokens"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True},
            "max_tokens, cls_token",
        ),
        (("Transformer", "Pooling"), {"pooling_mode": ["mean"]}, "pooling_mode"),
    ],
)
def test_what_would_make_other_vectors_is_refused(
    tmp_path: Path, kinds: tuple[str, ...], pooling: Any, words: str
) -> None:
    save_encoder(tmp_path, "bert")
    write_modules(tmp_path, *kinds, pooling=pooling)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("said", ["{", "[1]", '{"a": 1}', '[{"type": "x.Pooling", "path": "../a"}]'])
def test_broken_modules(tmp_path: Path, said: str) -> None:
    save_encoder(tmp_path, "bert")
    (tmp_path / "modules.json").write_text(said)
    with pytest.raises(ConfigError, match=r"modules\.json"):
        load(tmp_path)


def test_bounds_beyond_the_encoders_own(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    for field in ("max_tokens", "max_prompt_tokens"):
        with pytest.raises(ConfigError, match=f"{field}: given 81, allowed: at most 80"):
            TransformersBackend({"text": {field: 81}}, tmp_path, 0).load()
