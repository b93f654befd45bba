"""Folders that are not to be served, and what is said of them; what is read of one that is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastserve.backends.llm import kv_cache, torch_model
from fastserve.backends.llm.backend import TransformersBackend
from fastserve.backends.llm.kv_cache import CacheSize, find_cache_size, row_bytes
from fastserve.codec.generation import Finish
from fastserve.errors import ConfigError, ServeError
from fastserve.settings.model_options import TextOptions
from tests.backends.llm.folders import EOS, LENGTH, VOCAB, generate, save_model
from tests.backends.llm.outs import ask, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, save_model(folder, "llama")


@pytest.fixture
def folder(whole: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole[0], tmp_path / "copy"))


def load(folder: Path, config: dict[str, Any] | None = None, **text: Any) -> TransformersBackend:
    backend = TransformersBackend({"text": {"max_sequences": 2, **text}, **(config or {})}, folder, 0)
    backend.load()
    return backend


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def refuse(folder: Path, words: str, config: dict[str, Any] | None = None, **text: Any) -> None:
    with pytest.raises((ConfigError, ServeError), match=words) as caught:
        load(folder, config, **text)
    assert str(folder) not in str(caught.value)


def test_int8_weights_where_they_do_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(
        folder, "int8 computes in float32, text.dtype says bfloat16", quantization="int8", dtype="bfloat16"
    )
    refuse(folder, "numpy does not run text.quantization int8", quantization="int8", runtime="numpy")
    monkeypatch.setattr(torch_model, "INT8_CALL", "what_a_later_torch_lacks")
    refuse(folder, "int8 needs FBGEMM", quantization="int8")


def test_a_load_says_what_it_waits_for(
    whole: tuple[Path, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(whole[0])
    caplog.clear()
    with caplog.at_level("INFO"):
        load(whole[0])
    assert not caplog.records  # as in a worker that was forked
    monkeypatch.delitem(sys.modules, "fastserve.backends.llm.loading")
    with caplog.at_level("INFO"):
        load(whole[0])
    said = [record.message for record in caplog.records if record.name == TransformersBackend.__module__]
    assert said[0].startswith("imports torch and transformers")
    assert said[1].startswith("imported them in ")


def test_info_is_what_it_is(whole: tuple[Path, Any]) -> None:
    info = load(whole[0], max_prompt_tokens=50, max_new_tokens=70).info
    assert (info.vocab_size, info.slots, info.eos_ids) == (VOCAB, 2, [EOS])
    assert (info.max_tokens, info.max_prompt_tokens, info.max_new_tokens) == (LENGTH, 50, 70)
    assert (info.kv_tokens, info.dtype, info.device) == (2 * LENGTH, "float32", "cpu")
    info = load(whole[0], max_tokens=40).info
    assert (info.max_tokens, info.max_prompt_tokens, info.max_new_tokens) == (40, 39, 39)


def test_shards_and_several_ends(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model = save_model(folder, "llama", max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    plain = generate(model, [1, 2, 3], 20)
    ends = {"eos_token_id": [EOS, plain[4]]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    engine = load(folder)
    assert engine.info.eos_ids == sorted({EOS, plain[4]})
    heard = run(engine, [ask(1, [1, 2, 3], max_new_tokens=20)])
    assert heard.tokens[1] == plain[: min(plain.index(end) for end in {EOS, plain[4]} & set(plain)) + 1]
    assert heard.ended[1] == Finish.EOS


def test_bfloat16(whole: tuple[Path, Any]) -> None:
    engine = load(whole[0], dtype="bfloat16")
    assert engine.info.dtype == "bfloat16"
    assert len(run(engine, [ask(1, [1, 2], max_new_tokens=5, ignore_eos=True)]).tokens[1]) == 5


def test_nan_weights_fail_each_sequence(folder: Path) -> None:
    model = save_model(folder, "llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    model.save_pretrained(folder)
    heard = run(load(folder), [ask(1, [1, 2]), ask(2, [3])])
    assert set(heard.ended.values()) == {Finish.FAILED}


def test_pickles_are_refused_with_the_way_out(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse(folder, "pytorch_model.bin is a pickle.*save_pretrained")


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    refuse(tmp_path / "nothing", "no file config.json")
    (folder / "model.safetensors").unlink()
    refuse(folder, "no file model.safetensors or model.safetensors.index.json$")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[]", "config.json: not a JSON object"),
        ("config.json", "{}", "model_type is missing"),
        ("config.json", '{"model_type": "t5"}', 'model_type: given "t5".*textgen.md lists.*text_python'),
        ("config.json", '{"model_type": ["llama"]}', "model_type: given"),
        ("config.json", '{"model_type": "mamba"}', "model_type mamba is not served: .* text_python"),
        ("adapter_config.json", "{}", "the folder is an adapter, not a model: move it to adapters/NAME"),
        ("model.safetensors.index.json", "{}", "weight_map is missing"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "x.safetensors"}}', "names x.safetensors"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../x.safetensors"}}', "files of the folder"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "x.bin"}}', "files of the folder"),
        ("model.safetensors", "not weights", "cannot read the folder"),
        ("generation_config.json", "{", "generation_config.json: not JSON"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id: given"),
    ],
)
def test_broken_files(folder: Path, name: str, text: str, words: str) -> None:
    (folder / name).write_text(text)
    refuse(folder, words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2, "rope_theta": 1e4}}, "rope_type dynamic"),
        ({"num_hidden_layers": 3}, "the weights lack 9 tensors, model.layers.2"),
        ({"hidden_size": 64}, "cannot read the folder"),
        ({"hidden_size": "wide"}, "cannot read the folder"),
    ],
)
def test_configs_that_do_not_fit(folder: Path, fields: dict[str, Any], words: str) -> None:
    change(folder, **fields)
    refuse(folder, words)


def test_truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refuse(folder, "cannot read the folder")


@pytest.mark.parametrize(
    ("config", "text", "words"),
    [
        ({"device": "tpu"}, {}, "device must be cpu, cuda or cuda:N, not 'tpu'"),
        ({}, {"max_tokens": LENGTH + 1}, f"text.max_tokens: given {LENGTH + 1}, allowed: at most {LENGTH}"),
        ({}, {"max_prompt_tokens": LENGTH}, "text.max_prompt_tokens: given 128, allowed: at most 127"),
        ({}, {"max_tokens": 64, "kv_bytes": 1000}, "text.kv_bytes: 1000 bytes hold no sequence of 64 tokens"),
        ({}, {"max_sequence": 3}, "text: .*max_sequence"),
    ],
)
def test_settings_that_do_not_fit(
    whole: tuple[Path, Any], config: dict[str, Any], text: dict[str, Any], words: str
) -> None:
    refuse(whole[0], words, config, **text)


def test_what_a_folder_is_is_said_without_a_framework(tmp_path: Path) -> None:
    """By the process that would load it, and has imported neither torch nor transformers."""
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from fastserve.backends.llm.backend import TransformersBackend\n"
        "try:\n    TransformersBackend({}, Path(sys.argv[1]), 0).load()\n"
        "except Exception as error:\n    print(error)\n"
        "print({'torch', 'transformers'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "model_type mamba is not served" in said
    assert said.endswith("set()\n")


def test_a_cache_for_one_serves_one_after_another(whole: tuple[Path, Any]) -> None:
    folder, model = whole
    engine = load(folder, kv_bytes=row_bytes(LENGTH, 2 * 2 * 2 * 8 * 4) + 1)
    assert (engine.info.slots, engine.info.kv_tokens) == (1, LENGTH)
    heard = run(engine, [ask(rid, [rid + 1, 7], max_new_tokens=5) for rid in range(3)])
    for rid in range(3):
        assert heard.tokens[rid] == generate(model, [rid + 1, 7], 5)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_torch_without_memory_fails_what_it_must(
    whole: tuple[Path, Any], monkeypatch: Any, error: RuntimeError
) -> None:
    """Sequences of more than one token a step are more than there is memory for."""
    engine = load(whole[0])
    model = engine._engine._model  # type: ignore[union-attr]
    forward = model._forward  # type: ignore[attr-defined]

    def try_forward(plan: Any) -> Any:
        if len(plan.tokens) > 1:
            raise error
        return forward(plan)

    monkeypatch.setattr(model, "_forward", try_forward)
    heard = run(engine, [ask(rid, [1, 2, 3], max_new_tokens=4, ignore_eos=True) for rid in range(2)])
    assert heard.ended == {0: Finish.LENGTH, 1: Finish.FAILED}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_no_cuda(whole: tuple[Path, Any]) -> None:
    refuse(whole[0], "device 'cuda:1': this PyTorch .*", {"device": "cuda:1"})


def test_code_of_the_folder_is_not_run(folder: Path) -> None:
    change(folder, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    heard = run(load(folder), [ask(1, [1], max_new_tokens=2, ignore_eos=True)])
    assert len(heard.tokens[1]) == 2


def test_the_cache_is_bounded(caplog: Any) -> None:
    options = TextOptions(max_sequences=8)
    assert find_cache_size(options, 100, 10, 1 << 40) == CacheSize(8, 100)
    row = row_bytes(100, 10)
    assert row == 1280
    with caplog.at_level("WARNING"):
        assert find_cache_size(options, 100, 10, 4 * 3 * row) == CacheSize(3, 100)
        assert find_cache_size(TextOptions(kv_bytes=2 * row + 5), 100, 10, 0) == CacheSize(2, 100)
        assert find_cache_size(options, 1000, 10, 4 * row) == CacheSize(1, 128)
    assert "3 sequences of 100 tokens, not for 8" in caplog.text
    assert "128 of the model's 1000 tokens" in caplog.text
    assert 1 << 20 < kv_cache.host_bytes() < 1 << 50
