"""A local folder in Hugging Face's form: config.json, safetensors, generation_config.json; and what runs it.

What runs a decoder is decided by the model_type of config.json alone:

    written   fastserve's forward and attention (torch_model.FusedModel, numpy_model)
    ragged    transformers' forward, fastserve's attention (torch_model.Ragged)
    generic   transformers' forward and attention (generic_model)

Nothing is fetched, no code of the folder is run, and pickled weights are refused: reading one can run any
code. No framework is imported here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

from fastserve.backends.llm.kv_cache import STRIDE
from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.fields import fault_text
from fastserve.settings.model_options import TextOptions

_FORMS = {
    "written": """
        gemma gemma2 gemma3_text gpt_neox granite llama mistral mixtral olmo2 phi phi3 qwen2 qwen3 smollm3
        starcoder2""",
    "ragged": """
        afmoe apertus arcee biogpt bitnet cohere cohere2 cohere2_moe cwm ernie4_5 ernie4_5_moe exaone4
        exaone_moe flex_olmo glm glm4 glm4_moe gpt2 gpt_bigcode gpt_oss granite_swa granitemoe
        granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe laguna mellum minimax_m2
        ministral ministral3 modernbert-decoder nanochat olmo olmo3 olmoe opt persimmon qwen2_moe qwen3_moe
        seed_oss solar_open vaultgemma""",
    "generic": """
        bloom codegen ctrl deepseek_v2 deepseek_v3 diffllama falcon gemma3 gemma4_text gpt_neo
        gpt_neox_japanese gptj jetmoe llama4_text mimo_v2_flash minicpm3 mpt nemotron phimoe stablelm xglm
        youtu""",
    "tried": """
        axk1 beam dbrx doge dots1 exaone flint gemma3n_text glm4_moe_lite gpt-sw3 hy_v3 hyperclovax
        internlm3 iquestcoder jais2 kolibri1 lara_mini longcat_flash sarvam_mla sarvam_moe""",
    "encoder": """
        albert bert camembert deberta-v2 distilbert electra modernbert mpnet roberta xlm-roberta""",
    "recurrent": """
        bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3
        mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
        qwen3_next recurrent_gemma rwkv xlstm zamba zamba2""",
}
FAMILIES = {kind: form for form, kinds in _FORMS.items() for kind in kinds.split()}
"""Forms by model_type: what runs it. The tests compare each with transformers' own results, but for those
that are "tried". These are generic: loading compares steps with the model's own forward of a whole text.

Encoders make embeddings and write no text. Layers of recurrent ones keep a state instead of keys and values,
which cannot go back to a position: they are refused."""
NUMPY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that numpy runs, in their plain form."""

ADAPTERS, ADAPTER_WEIGHTS, _ADAPTER_JSON = "adapters", "adapter_model.safetensors", "adapter_config.json"
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # as a model's: requests name either
ADAPTERS_MAX = 64
"""Adapters of a version: a step has products of its own for each that it meets."""
_ADAPTERS_ALONE = (
    "modules_to_save",
    "use_dora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_qalora",
)
"""Settings of PEFT that make more of an adapter than two small products."""
_STARTS_THAT_CHANGE = ("pissa", "olora", "corda", "loftq")
UNBOUNDED = 1 << 24
"""Tokens of a text where nothing bounds them."""
JSON_BYTES_MAX = 64 << 20  # the index of a model of many shards names every tensor
_FROM_PADDING = ("camembert", "mpnet", "roberta", "xlm-roberta")
"""Model types that count positions from the one behind their padding's."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_ALONE = ("quantization_config", "is_encoder_decoder", "use_bidirectional_attention")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# These stretch positions by the longest sequence of the batch: what a request gets depends on the others.
_ROPES_OF_COMPANY = ("dynamic", "longrope")
_NUMPY_ROPES = ("default", "linear", "llama3")


def check_folder(folder: Path, options: TextOptions) -> Mapping[str, Any]:
    """Return config.json of a folder that can be served. Raises ConfigError with the obstacle."""
    config = read_json(folder / "config.json")
    if "model_type" not in config:
        raise ConfigError("config.json: model_type is missing: not a model of transformers")
    _check_family(config["model_type"])
    for name in _ALONE:
        if config.get(name):
            raise ConfigError(f"config.json: {name} is set, which is not served")
    if (folder / _ADAPTER_JSON).exists():
        way = "move it to adapters/NAME of its model's version"
        raise ConfigError(f"adapter_config.json: the folder is an adapter, not a model: {way}")
    if find_adapters(folder):
        _check_adapted(config["model_type"])
    _check_rope(config, options)
    encodes = FAMILIES[config["model_type"]] == "encoder"
    check_weights(folder, "AutoModel" if encodes else "AutoModelForCausalLM")
    return config


def find_runtime(folder: Path, config: Mapping[str, Any], options: TextOptions, device: str = "cpu") -> str:
    """Return "torch" or "numpy" for a checked folder with this config.json. Raises ConfigError where numpy is
    configured and does not run it, ServeError where torch is needed and not installed."""
    entry, obstacle = find_backend("text"), _numpy_obstacle(config, options, device)
    obstacle = obstacle or next((f"adapter {name}" for name in find_adapters(folder)), "")
    if options.runtime == "numpy" and obstacle:
        raise ConfigError(f"text.runtime: numpy does not run {obstacle}; torch does")
    if options.runtime != "numpy" and entry.installed:
        return "torch"
    if options.runtime != "torch" and not obstacle:
        return "numpy"
    text = f"{obstacle} does not run in numpy: " if obstacle else ""
    raise ServeError(Kind.FAILED_PRECONDITION, f"{text}{entry.missing_text}")


def _numpy_obstacle(config: Mapping[str, Any], options: TextOptions, device: str) -> str:
    """Return the first setting that numpy does not run, "" where there is none."""
    facts = (
        ("model_type", config["model_type"], NUMPY_FAMILIES),
        ("hidden_act", config.get("hidden_act", "silu"), ("silu",)),
        ("rope_type", rope_of(config)["rope_type"], _NUMPY_ROPES),
        ("partial_rotary_factor", rope_of(config).get("partial_rotary_factor", 1), (1,)),
        ("text.dtype", options.dtype, ("auto", "float32")),
        ("text.quantization", options.quantization, ("none",)),
        ("device", device, ("cpu",)),
    )
    return next((f"{name} {value}" for name, value, runs in facts if value not in runs), "")


class AdapterConfig(NamedTuple):
    """A LoRA adapter: an output of a linear layer gets `scale` * B A x more, A of `rank` rows."""

    folder: Path
    rank: int
    scale: float


def find_adapters(folder: Path) -> dict[str, AdapterConfig]:
    """Return the adapters in `adapters/NAME/` of a version's folder, in PEFT's form, by name. Raises
    ConfigError for one that cannot be served."""
    place = folder / ADAPTERS
    found = sorted(one for one in place.iterdir() if one.is_dir()) if place.is_dir() else []
    found = [one for one in found if not one.name.startswith(".")]
    if len(found) > ADAPTERS_MAX:
        raise ConfigError(f"{ADAPTERS}: the folder has {len(found)} adapters, allowed: {ADAPTERS_MAX}")
    adapters = {}
    for one in found:
        try:
            adapters[one.name] = _read_adapter(one)
        except ConfigError as error:
            raise ConfigError(f"{ADAPTERS}/{one.name}: {error}") from None
    return adapters


def _read_adapter(folder: Path) -> AdapterConfig:
    if not _ADAPTER_NAME.fullmatch(folder.name):
        raise ConfigError(fault_text("name", folder.name, f"text matching {_ADAPTER_NAME.pattern}"))
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickles = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
        more = f", and {pickles[0]} is a pickle: reading one can run any code" if pickles else ""
        raise ConfigError(f"there is no file {ADAPTER_WEIGHTS}{more}")
    if not (folder / _ADAPTER_JSON).is_file():
        raise ConfigError(f"there is no file {_ADAPTER_JSON}")
    config = read_json(folder / _ADAPTER_JSON)
    if fault := next(filter(None, _adapter_faults(config)), ""):
        raise ConfigError(f"{_ADAPTER_JSON}: {fault}")
    rank = config["r"]
    return AdapterConfig(
        folder, rank, config["lora_alpha"] / (sqrt(rank) if config.get("use_rslora") else rank)
    )


def _adapter_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of an adapter's config cannot be served, "" where a key can. `target_modules` is not looked
    at: the tensors say where they belong."""
    kind, rank, alpha = config.get("peft_type"), config.get("r"), config.get("lora_alpha")
    yield "" if kind == "LORA" else fault_text("peft_type", kind, "LORA")
    yield "" if type(rank) is int and rank > 0 else fault_text("r", rank, "a whole number from 1")
    yield "" if type(alpha) in (int, float) else fault_text("lora_alpha", alpha, "a number")
    yield "" if config.get("bias") in (None, "none") else fault_text("bias", config["bias"], "none")
    yield from (f"{name} is set, which is not served" for name in _ADAPTERS_ALONE if config.get(name))
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_STARTS_THAT_CHANGE):
        yield f"init_lora_weights {start} changes the model itself: convert it to plain LoRA"


def _check_adapted(kind: str) -> None:
    """Raise ConfigError for a model_type without adapters."""
    form = FAMILIES[kind]
    if form not in ("written", "ragged"):
        own = "its layers run in transformers' own steps" if form != "encoder" else "it is an encoder"
        raise ConfigError(f"{ADAPTERS}: model_type {kind} takes no adapters: {own}")


def read_ends(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text: generation_config.json's, which may list several, or else
    config.json's."""
    path, found = folder / "generation_config.json", None
    if path.exists():
        found = read_json(path).get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    ends = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise ConfigError(fault_text("eos_token_id", str(found), "a token id, or a list of them"))
    return sorted(set(ends))


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises ConfigError that names the file."""
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ConfigError(f"{path.name} is larger than {JSON_BYTES_MAX} bytes")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"the version's folder has no file {path.name}") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path.name}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name}: not a JSON object")
    return value


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how positions turn, as config.json has it; `rope_type` is always there."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, dict) else {}
    return {"rope_type": rope.get("type", "default"), **rope}


def most_positions(config: Any) -> int:
    """Return the tokens of a text that a model takes at most, by transformers' config of it."""
    most = int(getattr(config, "max_position_embeddings", UNBOUNDED))
    return most - config.pad_token_id - 1 if config.model_type in _FROM_PADDING else most


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checked folder."""
    if not (folder / _INDEX).exists():
        return [folder / _SINGLE]
    return [folder / name for name in sorted(set(read_json(folder / _INDEX)["weight_map"].values()))]


def _check_family(kind: Any) -> None:
    form = FAMILIES.get(kind) if isinstance(kind, str) else None
    if form == "recurrent":
        text = "its layers keep a state instead of keys and values by position"
        raise ConfigError(f"config.json: model_type {kind} is not served: {text}; {_OWN}")
    if form is None:
        allowed = f"a family that docs/backends/textgen.md lists; {_OWN}"
        raise ConfigError(f"config.json: {fault_text('model_type', kind, allowed)}")


_OWN = "an engine of your own runs with the backend text_python"


def _check_rope(config: Mapping[str, Any], options: TextOptions) -> None:
    config = config.get("text_config") or config  # of a model that takes images as well
    rope = rope_of(config)
    kinds = [rope["rope_type"], *(one.get("rope_type") for one in rope.values() if isinstance(one, dict))]
    kind = next((one for one in kinds if one in _ROPES_OF_COMPANY), None)
    if kind is None:
        return
    first = "max_position_embeddings" if kind == "dynamic" else "original_max_position_embeddings"
    most = rope.get(first) or config.get(first)
    most = most // STRIDE * STRIDE if type(most) is int else 0
    if not 0 < options.max_tokens <= most:
        text = "it stretches positions by the longest sequence of a batch"
        way = f"; up to {most} tokens it does not: text.max_tokens: {most}" if most > 0 else ""
        raise ConfigError(f"config.json: rope_type {kind} is not served: {text}{way}")


def check_weights(folder: Path, kind: str) -> None:
    """Raise ConfigError for a folder without safetensors. `kind`: the class of transformers that reads it."""
    if (folder / _INDEX).exists():
        _check_shards(folder)
    elif not (folder / _SINGLE).is_file():
        _explain_missing(folder, kind)


def _check_shards(folder: Path) -> None:
    shards = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ConfigError(f"{_INDEX}: weight_map is missing")
    for name in sorted(set(map(str, shards.values()))):
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise ConfigError(
                f"{_INDEX}: {fault_text('weight_map', name, 'safetensors files of the folder')}"
            )
        if not (folder / name).is_file():
            raise ConfigError(f"{_INDEX} names {name}, which the version's folder has not")


def _explain_missing(folder: Path, kind: str) -> None:
    text = f"the version's folder has no file {_SINGLE} or {_INDEX}"
    pickles = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
    if pickles:
        text += (
            f", and {pickles[0]} is a pickle: reading one can run any code. Where you trust it, convert it: "
            f"from transformers import {kind} as Model; "
            "Model.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise ConfigError(text)
