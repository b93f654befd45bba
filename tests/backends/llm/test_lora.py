"""LoRA adapters in one batch against models whose weights have them, and folders that are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastserve.backends.llm.backend import TransformersBackend
from fastserve.backends.llm.engine import BatchEngine
from fastserve.backends.llm.folder import find_adapters
from fastserve.backends.llm.torch_model import use_int8
from fastserve.codec.generation import Finish
from fastserve.errors import ConfigError, Kind, ServeError
from tests.backends.llm.families import FAMILIES
from tests.backends.llm.folders import VOCAB, generate, make_config, read_model, save_config, save_model
from tests.backends.llm.outs import ask, run
from tests.backends.llm.test_drafts import follow

TOKENS = 10
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
MODULES = {
    "gpt2": (("c_attn",), ("c_attn", "c_proj", "c_fc"), ("c_fc",)),
    "gpt_neox": (("query_key_value",), ("query_key_value", "dense", "dense_h_to_4h"), ("dense_4h_to_h",)),
    "phi": (("q_proj", "v_proj"), (*ATTENTION[:3], "dense", "fc1", "fc2"), ("fc1",)),
    "phi3": (("qkv_proj",), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), ("gate_up_proj",)),
}
"""Targets of the three adapters, by family; DEFAULT for the others."""
DEFAULT = (("q_proj", "v_proj"), ALL, ("k_proj", "gate_proj", "down_proj"))
NAMES = ("first", "second", "third")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 8},
    {"r": 2, "lora_alpha": 3.5, "use_rslora": True},
    {"r": 8, "lora_alpha": 16, "bias": "none", "modules_to_save": None, "fan_in_fan_out": False},
)
SCALES = (2.0, 3.5 / 2**0.5, 2.0)
NAMED = ("llama", "qwen2", "mistral", "llama_biased", "gemma2", "gpt2")
MORE = ("glm", "gpt_neox", "granite", "olmo2", "phi", "phi3")


def save_adapter(folder: Path, model: Any, targets: Iterable[str], settings: dict[str, Any]) -> None:
    """Write an adapter of random weights in PEFT's form."""
    folder.mkdir(parents=True)
    torch.manual_seed(crc32(folder.name.encode(), 2) + settings["r"])
    tensors, rank = {}, settings["r"]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            outputs, inputs = shape_of(module)
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs) * 0.3
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "target_modules": sorted(targets), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(said))


def shape_of(module: Any) -> tuple[int, int]:
    outputs, inputs = module.weight.shape
    return (inputs, outputs) if type(module).__name__ == "Conv1D" else (outputs, inputs)


def each_layer(folder: Path, scale: float) -> Iterable[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the layers of an adapter's file with A, and B times its scale."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, down in tensors.items():
        if ".lora_A." in name:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            yield layer, down, tensors[name.replace("lora_A", "lora_B")] * scale


def merge(model: Any, folder: Path, scale: float) -> Any:
    """Return the model with W + scale * B A as weights, what PEFT's merge_and_unload makes."""
    merged = deepcopy(model)
    with torch.no_grad():
        for layer, down, up in each_layer(folder, scale):
            module, more = merged.get_submodule(layer), up @ down
            module.weight += more.T if type(module).__name__ == "Conv1D" else more
    return merged


def adapt_int8(model: Any, folder: Path | None, scale: float) -> Any:
    """Return the model with int8 weights, to which hooks add what an adapter does in float32."""
    made = deepcopy(model)
    with torch.inference_mode():
        use_int8(made)
    for layer, down, up in () if folder is None else each_layer(folder, scale):

        def add(
            _module: Any, given: Any, out: torch.Tensor, down: torch.Tensor = down, up: torch.Tensor = up
        ) -> torch.Tensor:
            return out + given[0] @ down.T @ up.T

        made.get_submodule(layer).register_forward_hook(add)
    return made


def save_family(folder: Path, family: str) -> Any:
    """Save a model with its three adapters beside it."""
    if family in NAMED:
        model = save_model(folder, family)
    else:
        save_config(folder, make_config(*FAMILIES[family]))
        model = read_model(folder)
    targets = MODULES.get(family, DEFAULT)
    for name, given, settings in zip(NAMES, targets, SETTINGS, strict=True):
        save_adapter(folder / "adapters" / name, model, given, settings)
    return model


@pytest.fixture(scope="module", params=(*NAMED, *MORE))
def family(request: Any, tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_family(folder, request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_family(tmp_path, "llama")
    return tmp_path


def load(folder: Path, **text: Any) -> TransformersBackend:
    options = {"max_sequences": 8, "step_tokens": 40, "prefix_cache": True, **text}
    backend = TransformersBackend({"device": "cpu", "text": options}, folder, 0)
    backend.load()
    return backend


def asked_of(adapter: str, rid: int, ids: list[int], tokens: int = TOKENS) -> Any:
    request = ask(rid, ids, max_new_tokens=tokens)
    request.note.adapter = adapter
    return request


def compare(engine: TransformersBackend, models: dict[str, Any], tokens: int = TOKENS) -> None:
    """All adapters and the model in one batch, with prompts that begin alike; then each alone, beginning with
    the rows that the others have left."""
    dice = random.Random(5)
    stems = [[dice.randrange(6, VOCAB) for _ in range(40)] for _ in range(2)]
    ends = [[dice.randrange(6, VOCAB) for _ in range(dice.randint(1, 20))] for _ in range(2)]
    prompts = [stem + end for stem in stems for end in ends] + [stems[0]]
    asked = [(name, ids) for ids in prompts for name in ("", *NAMES)]
    expected = [generate(models[name], ids, tokens) for name, ids in asked]
    assert len({tuple(said) for said in expected[:4]}) == 4  # the adapters matter
    heard = run(engine, [asked_of(name, rid, ids, tokens) for rid, (name, ids) in enumerate(asked)])
    assert [heard.tokens[rid] for rid in range(len(asked))] == expected
    for rid, (name, ids) in list(enumerate(asked))[:4]:
        assert run(engine, [asked_of(name, rid, ids, tokens)]).tokens[rid] == expected[rid]


def test_adapters_and_the_model_in_one_batch_are_merged_models(family: tuple[Path, Any]) -> None:
    folder, model = family
    adapters = zip(NAMES, SCALES, strict=True)
    models = {name: merge(model, folder / "adapters" / name, scale) for name, scale in adapters}
    engine = load(folder)
    assert engine.info.adapters == sorted(NAMES)
    compare(engine, {"": model, **models})
    engine.close()


@pytest.mark.parametrize("name", ["llama", "glm"])
def test_adapters_add_to_int8_weights(tmp_path: Path, name: str) -> None:
    """As in test_families, over few tokens: an input that lies between two numbers of 7 bits is rounded to
    either, as products of other shapes have it."""
    model = save_family(tmp_path, name)
    models = {"": adapt_int8(model, None, 0)}
    for adapter, scale in zip(NAMES, SCALES, strict=True):
        models[adapter] = adapt_int8(model, tmp_path / "adapters" / adapter, scale)
    engine = load(tmp_path, quantization="int8")
    compare(engine, models)
    engine.close()


def test_prompts_of_one_adapter_share_and_of_two_do_not(folder: Path) -> None:
    """What is computed again is counted by the tokens of the steps."""
    engine = load(folder)
    inner = engine._engine
    assert isinstance(inner, BatchEngine)
    prompt, counted = [dice % 90 + 6 for dice in range(50)], []

    def tokens_of(adapter: str) -> int:
        counted.clear()
        run(engine, [asked_of(adapter, 1, prompt)])
        return sum(counted) - TOKENS + 1

    forward = inner._model.forward

    def count(plan: Any) -> Any:
        counted.append(len(plan.tokens))
        return forward(plan)

    inner._model.forward = count  # type: ignore[method-assign]
    assert [tokens_of(name) for name in ("", "first", "second")] == [50, 50, 50]
    assert [tokens_of(name) for name in ("", "first", "second")] == [1, 1, 1]
    engine.close()


def test_steps_without_adapters_are_told_of_none(folder: Path) -> None:
    engine, given = load(folder), []
    inner = engine._engine
    assert isinstance(inner, BatchEngine)
    forward = inner._model.forward

    def keep(plan: Any) -> Any:
        given.append(plan.adapters)
        return forward(plan)

    inner._model.forward = keep  # type: ignore[method-assign]
    run(engine, [asked_of("first", 1, [7, 8, 9])])
    assert all(numbers is not None for numbers in given)
    given.clear()
    run(engine, [asked_of("", 1, [7, 8, 9])])
    assert given
    assert all(numbers is None for numbers in given)
    engine.close()


def test_drafts_have_the_adapters_of_their_rows(folder: Path) -> None:
    few = dict.fromkeys((10, 11, 12), 60.0)
    asked = [ask(rid, [7, 8, 9] * 6, max_new_tokens=40, ignore_eos=True, logit_bias=few) for rid in range(8)]
    for request in asked:
        request.note.adapter = ("", *NAMES)[request.rid % 4]
    engines = load(folder), load(folder, prompt_lookup_num_tokens=6)
    fates = follow(engines[1]._engine)
    expected, heard = (run(engine, asked) for engine in engines)
    assert heard.tokens == expected.tokens
    assert len({tuple(heard.tokens[rid]) for rid in range(4)}) == 4
    assert sum(accepted for _, accepted in fates) > 20
    for engine in engines:
        engine.close()


def test_an_unknown_adapter_is_refused_by_name(folder: Path) -> None:
    engine = load(folder)
    with pytest.raises(ServeError, match="adapter: given 'other', allowed: first, second, third") as caught:
        engine.submit(asked_of("other", 1, [7, 8]))
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    heard = run(engine, [asked_of("first", 1, [7, 8])])
    assert heard.ended[1] in (Finish.LENGTH, Finish.EOS)
    engine.close()


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapters/first/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, 'peft_type: given "IA3", allowed: LORA'),
        ({"r": 0}, "r: given 0"),
        ({"lora_alpha": "8"}, "lora_alpha: given"),
        ({"bias": "all"}, 'bias: given "all", allowed: none'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"use_dora": True}, "use_dora is set"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4 changes the model"),
        ({"r": 5}, r"q_proj\.lora_A\.weight: given shape \(4, 32\), allowed: \(5, 32\)"),
    ],
)
def test_adapters_that_are_more_are_refused(folder: Path, fields: dict[str, Any], words: str) -> None:
    change(folder, **fields)
    with pytest.raises(ConfigError, match=f"^adapters/first.*{words}"):
        load(folder)


def rename(old: str, new: str) -> Callable[[Path], None]:
    def change_tensors(adapter: Path) -> None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        changed = {name.replace(old, new): one.clone() for name, one in tensors.items()}
        save_file(changed, adapter / "adapter_model.safetensors")

    return change_tensors


def move(old: str, new: str) -> Callable[[Path], None]:
    return lambda adapter: (adapter / old).rename(adapter / new) and None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (move("adapter_model.safetensors", "adapter_model.bin"), "adapter_model.bin is a pickle"),
        (move("adapter_config.json", "config.json"), "there is no file adapter_config.json"),
        (lambda at: (at / "adapter_config.json").write_text("{"), "adapter_config.json: not JSON"),
        (lambda at: (at / "adapter_model.safetensors").write_text("x"), "not safetensors"),
        (lambda at: at.rename(at.with_name("a b")), 'name: given "a b"'),
        (rename("model.layers.0.self_attn.q_proj", "lm_head"), "lm_head is no linear layer of the model"),
        (rename("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj"), "layers.9.self_attn.q_proj is no"),
        (rename("lora_B", "lora_magnitude_vector"), "lora_magnitude_vector.weight, allowed: tensors NAME"),
        (rename("layers.0.self_attn.q_proj.lora_B", "layers.0.mlp.up_proj.lora_B"), "given shape None"),
    ],
)
def test_broken_adapters(folder: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(folder / "adapters/first")
    with pytest.raises(ConfigError, match=f"^adapters/.*{words}"):
        load(folder)


def test_numpy_and_generic_models_take_no_adapters(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text.runtime: numpy does not run adapter first; torch does"):
        load(folder, runtime="numpy")
    other = tmp_path / "bloom"
    save_adapter(other / "adapters/one", save_model(other, "bloom"), ["query_key_value"], SETTINGS[0])
    with pytest.raises(ConfigError, match=r"adapters: model_type bloom takes no adapters"):
        load(other)


def test_hidden_folders_and_files_are_no_adapters(folder: Path) -> None:
    (folder / "adapters/.cache").mkdir()
    (folder / "adapters/README.md").write_text("three adapters")
    assert list(find_adapters(folder)) == sorted(NAMES)
