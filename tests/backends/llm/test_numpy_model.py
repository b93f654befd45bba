"""Models in numpy against the same models with torch, and the folders and settings that numpy refuses."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastserve.backends.llm import folder as folders
from fastserve.backends.llm.backend import TransformersBackend
from fastserve.backends.llm.numpy_model import NumpyModel, WeightFiles
from fastserve.backends.llm.protocols import Chunk, StepPlan
from fastserve.codec.generation import Finish
from fastserve.errors import ConfigError, ServeError
from tests.backends.llm.folders import CONFIGS, VOCAB, generate, make_config, save_model
from tests.backends.llm.outs import Heard, ask, run

DEMO = Path(__file__).parents[3] / "fastserve" / "demo" / "scribe" / "1"
NUMPY = sorted(set(CONFIGS) - {"bloom", "gemma2", "gpt2", "mistral_gelu"})
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 11},
    "penalties": {"do_sample": True, "repetition_penalty": 1.3, "presence_penalty": 0.4, "seed": 5},
}


@pytest.fixture(scope="module", params=NUMPY)
def family(request: Any, tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(folder, request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_model(tmp_path, "llama")
    return tmp_path


def load(folder: Path, runtime: str = "numpy", **text: Any) -> TransformersBackend:
    backend = TransformersBackend({"text": {"runtime": runtime, "max_sequences": 4, **text}}, folder, 0)
    backend.load()
    return backend


def runner(backend: TransformersBackend) -> Any:
    engine: Any = backend._engine
    return engine._model


def prompts(count: int, vocab: int, longest: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(vocab) for _ in range(dice.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def both() -> tuple[TransformersBackend, TransformersBackend]:
    """The demo's model, in numpy and with torch."""
    return load(DEMO, max_sequences=8, pooling="mean"), load(DEMO, "torch", max_sequences=8, pooling="mean")


def test_logits_are_torchs_to_rounding(both: tuple[TransformersBackend, TransformersBackend]) -> None:
    """Prompts as a whole and in chunks, then rows that decode beside a chunk."""
    models, dice = [runner(one) for one in both], np.random.default_rng(3)
    lengths = [1, 9, 40, 130, 333]
    plans = []
    for row, length in enumerate(lengths):
        ids, half = dice.integers(0, 3072, length), length // 2
        for start, end in ((0, half), (half, length)) if half else ((0, length),):
            count = end - start
            chunk, at = Chunk(row, 0, count, start), np.arange(start, end)
            plans.append(StepPlan(ids[start:end], at, 0, [chunk], np.arange(count)))
    at = np.array(lengths)
    plans += [StepPlan(dice.integers(0, 3072, 5), at + step, 5, [], np.arange(5)) for step in range(3)]
    chunk = Chunk(5, 5, 20, 0)
    tokens, positions = dice.integers(0, 3072, 25), np.concatenate((at + 3, np.arange(20)))
    plans.append(StepPlan(tokens, positions, 5, [chunk], np.array([0, 4, 24])))
    for plan in plans:
        ours, torchs = (np.array(model.forward(plan)) for model in models)
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, torchs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("tokens", [10, pytest.param(40, marks=pytest.mark.torture)])
def test_the_demo_writes_what_torch_writes(
    both: tuple[TransformersBackend, TransformersBackend], tokens: int, settings: dict[str, Any]
) -> None:
    """Token by token, more sequences than there are rows; and alone as in company."""
    asked = [
        ask(rid, ids, max_new_tokens=tokens, ignore_eos=True, logprobs=2, **settings)
        for rid, ids in enumerate(prompts(9, 3072, 4 * tokens))
    ]
    ours, torchs = (run(one, asked) for one in both)
    assert ours.tokens == torchs.tokens
    for rid in ours.tokens:
        for one, other in zip(ours.extras[rid], torchs.extras[rid], strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs.own == pytest.approx(other.logprobs.own, abs=1e-4)
            assert [token for token, _ in one.logprobs.best] == [token for token, _ in other.logprobs.best]
    assert run(both[0], [asked[7]]).tokens[7] == ours.tokens[7]


def test_vectors_are_torchs(both: tuple[TransformersBackend, TransformersBackend]) -> None:
    made = []
    for backend in both:
        asked = [ask(rid, ids) for rid, ids in enumerate(prompts(5, 3072, 300, seed=2))]
        for request in asked:
            request.note.embeds = True
        heard = run(backend, asked)
        made.append(np.array([np.frombuffer(heard.extras[rid][0].vector, "<f4") for rid in range(5)]))
    assert made[0].shape == (5, 256)
    np.testing.assert_allclose(made[0], made[1], atol=1e-5)


def test_families_write_what_generate_writes(family: tuple[Path, Any]) -> None:
    """Mixed lengths on four rows, prompts in chunks, with and without the prefix cache."""
    folder, model = family
    start = prompts(1, VOCAB, 40, seed=9)[0] * 8
    asked = prompts(6, VOCAB, 70, seed=1) + [start[:30] + tail for tail in prompts(3, VOCAB, 9, seed=4)]
    expected = {rid: generate(model, ids, 14) for rid, ids in enumerate(asked)}
    for cached in (False, True):
        engine = load(folder, step_tokens=40, prefix_cache=cached)
        assert isinstance(runner(engine), NumpyModel)
        heard = run(engine, [ask(rid, ids, max_new_tokens=14) for rid, ids in enumerate(asked)])
        assert heard.tokens == expected
        engine.close()


def test_stops_cancellation_and_deadlines_end_sequences() -> None:
    engine = load(DEMO)
    plain = run(engine, [ask(1, [7, 8, 9], max_new_tokens=20, ignore_eos=True)]).tokens[1]
    heard = run(engine, [ask(1, [7, 8, 9], max_new_tokens=20, ignore_eos=True, stop_ids=[plain[6]])])
    assert heard.tokens[1] == plain[: plain.index(plain[6]) + 1]
    assert heard.ended[1] == Finish.STOP

    def cancel(step: int, _heard: Heard) -> None:
        if step == 4:
            engine.cancel(1, Finish.CANCELLED)

    late = ask(2, [1, 2], deadline_ns=1)
    heard = run(engine, [ask(1, [7, 8, 9], max_new_tokens=20, ignore_eos=True), late], cancel)
    assert heard.ended == {1: Finish.CANCELLED, 2: Finish.TIMEOUT}
    assert heard.tokens[1] == plain[:4]


def test_a_step_without_memory_fails_what_it_must(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(llama, max_sequences=2)
    model = runner(engine)
    forward = model._forward

    def try_forward(plan: StepPlan) -> np.ndarray:
        if len(plan.tokens) > 1:
            raise MemoryError
        return forward(plan)

    monkeypatch.setattr(model, "_forward", try_forward)
    heard = run(engine, [ask(rid, [1, 2, 3], max_new_tokens=4, ignore_eos=True) for rid in range(2)])
    assert heard.ended == {0: Finish.LENGTH, 1: Finish.FAILED}


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_the_cache_takes_memory_as_it_is_used() -> None:
    before = resident()
    engine = load(DEMO, max_sequences=1024)
    whole = runner(engine).cache.data.nbytes
    assert whole == 1024 * 1024 * 4096
    run(engine, [ask(1, [1, 2], max_new_tokens=3, ignore_eos=True)])
    assert resident() - before < whole // 32
    engine.close()


def test_shards_half_floats_and_nan(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama", max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert run(load(tmp_path), [ask(1, [1, 2], max_new_tokens=8)]).tokens[1] == generate(model, [1, 2], 8)
    model.half().save_pretrained(tmp_path / "half")
    plain = generate(model.float(), [1, 2], 8)
    assert run(load(tmp_path / "half"), [ask(1, [1, 2], max_new_tokens=8)]).tokens[1] == plain
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    heard = run(load(tmp_path / "nan"), [ask(1, [1, 2]), ask(2, [3])])
    assert set(heard.ended.values()) == {Finish.FAILED}


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 3}, "the weights have no tensor model.layers.2"),
        ({"hidden_size": 64}, r"model.safetensors: model.embed_tokens.weight: given F32 \[97, 32\], allowed"),
        ({"hidden_size": "wide"}, 'config.json: hidden_size: given "wide"'),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads: given 0"),
        ({"num_key_value_heads": 3}, "config.json: .*heads that cannot share keys"),
        ({"layer_types": ["full_attention"]}, "config.json: .*layer_types: not one for each layer"),
        ({"rope_parameters": {"rope_type": "linear"}}, "config.json: rope_parameters: KeyError: 'factor'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "text.runtime: numpy does not run rope_type yarn"),
        ({"hidden_act": "gelu"}, "text.runtime: numpy does not run hidden_act gelu; torch does"),
        ({"model_type": "gpt2"}, "text.runtime: numpy does not run model_type gpt2"),
    ],
)
def test_configs_that_numpy_refuses(llama: Path, fields: dict[str, Any], words: str) -> None:
    change(llama, **fields)
    with pytest.raises(ConfigError, match=words):
        load(llama)


def tensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "x.safetensors: not safetensors"),
        (b"not weights", "its header would have"),
        (tensors(b"{"), "not safetensors"),
        (tensors([1]), "not safetensors"),
        (tensors({"w": {"dtype": "F32"}}), "not safetensors: 'shape'"),
        (tensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}), "do not fit its shape"),
        (tensors({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}), "do not fit its shape"),
        (tensors(b'{"w": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'), "not safetensors"),
        (tensors({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "ends within w"),
        (tensors({"w": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}, bytes(16)), "given I64"),
        (tensors({"v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "no tensor w"),
    ],
)
def test_broken_weights(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        WeightFiles([path]).read("w", 2)


def test_without_torch_numpy_runs_what_it_can(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(runner(load(llama, "auto")), NumpyModel)
    find = folders.find_backend
    missing = type("Entry", (), {"installed": False, "missing_text": find("text").missing_text})
    monkeypatch.setattr(folders, "find_backend", lambda name: missing)
    assert isinstance(runner(load(llama, "auto")), NumpyModel)
    packages = "torch transformers safetensors"
    with pytest.raises(ServeError, match=rf"^the text backend needs torch: pip install {packages}, as "):
        load(llama, "torch")
    change(llama, hidden_act="gelu")
    words = r"^hidden_act gelu does not run in numpy: the text backend needs torch: pip install"
    with pytest.raises(ServeError, match=words):
        load(llama, "auto")
    change(llama, hidden_act="silu")
    with pytest.raises(ServeError, match=r"text.dtype bfloat16 does not run in numpy"):
        load(llama, "auto", dtype="bfloat16")


def test_a_numpy_model_imports_no_framework() -> None:
    code = f"""
import sys
from pathlib import Path
from fastserve.backends.llm.backend import TransformersBackend
backend = TransformersBackend({{"text": {{"runtime": "numpy"}}}}, Path({str(DEMO)!r}), 0)
backend.load()
print(*sorted(sys.modules.keys() & {{"torch", "transformers", "tokenizers", "safetensors", "jinja2"}}))
"""
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert made.stdout == "\n"


def test_fields_of_older_configs(tmp_path: Path) -> None:
    """rope_theta and rope_scaling beside the others, as folders of the hub have them."""
    model = save_model(tmp_path, "llama_stretched")
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = rope.pop("rope_theta"), rope
    old = Path(shutil.copytree(tmp_path, tmp_path / "old"))
    (old / "config.json").write_text(json.dumps(config))
    ids = prompts(1, VOCAB, 70)[0] * 2
    assert run(load(old), [ask(1, ids, max_new_tokens=9)]).tokens[1] == generate(model, ids, 9)
    assert make_config(*CONFIGS["llama"]).rope_parameters["rope_type"] == "default"
