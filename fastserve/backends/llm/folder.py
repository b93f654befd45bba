"""A local folder in Hugging Face's form: config.json, safetensors, generation_config.json; and what runs it.

Nothing is fetched, no code of the folder is run, and pickled weights are refused: reading one can run any
code. No framework is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.fields import fault_text
from fastserve.settings.model_options import TextOptions

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
NUMPY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that numpy runs, in their plain form."""
ENCODERS = ("bert", "distilbert", "roberta", "xlm-roberta")
"""Model types that make embeddings and write no text."""
# Values of model_type, whose results are compared with transformers' own, in the tests.

JSON_BYTES_MAX = 64 << 20  # the index of a model of many shards names every tensor
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_ALONE = ("quantization_config", "is_encoder_decoder")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# These stretch positions by the longest sequence of the batch: what a request gets depends on the others.
_ROPES_OF_COMPANY = ("dynamic", "longrope")
_NUMPY_ROPES = ("default", "linear", "llama3")


def check_folder(folder: Path) -> Mapping[str, Any]:
    """Return config.json of a folder that can be served. Raises ConfigError with the obstacle."""
    config = read_json(folder / "config.json")
    if "model_type" not in config:
        raise ConfigError("config.json: model_type is missing: not a model of transformers")
    if config["model_type"] not in FAMILIES + ENCODERS:
        allowed = ", ".join(FAMILIES + ENCODERS)
        raise ConfigError(f"config.json: {fault_text('model_type', config['model_type'], allowed)}")
    for name in _ALONE:
        if config.get(name):
            raise ConfigError(f"config.json: {name} is set, which is not served")
    if (folder / "adapter_config.json").exists():
        raise ConfigError("adapter_config.json: adapters are not served; merge it into its model first")
    _check_rope(config)
    _check_weights(folder)
    return config


def find_runtime(config: Mapping[str, Any], options: TextOptions, device: str = "cpu") -> str:
    """Return "torch" or "numpy" for a checked folder. Raises ConfigError where numpy is configured and does
    not run it, ServeError where torch is needed and not installed."""
    entry, obstacle = find_backend("text"), _numpy_obstacle(config, options, device)
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
        ("device", device, ("cpu",)),
    )
    return next((f"{name} {value}" for name, value, runs in facts if value not in runs), "")


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


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checked folder."""
    if not (folder / _INDEX).exists():
        return [folder / _SINGLE]
    return [folder / name for name in sorted(set(read_json(folder / _INDEX)["weight_map"].values()))]


def _check_rope(config: Mapping[str, Any]) -> None:
    kind = rope_of(config)["rope_type"]
    if kind in _ROPES_OF_COMPANY:
        text = "it stretches positions by the longest sequence of a batch"
        raise ConfigError(f"config.json: rope_type {kind} is not served: {text}")


def _check_weights(folder: Path) -> None:
    if (folder / _INDEX).exists():
        _check_shards(folder)
    elif not (folder / _SINGLE).is_file():
        _explain_missing(folder)


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


def _explain_missing(folder: Path) -> None:
    text = f"the version's folder has no file {_SINGLE} or {_INDEX}"
    pickles = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
    if pickles:
        text += (
            f", and {pickles[0]} is a pickle: reading one can run any code. Where you trust it, convert it: "
            "from transformers import AutoModelForCausalLM as Model; "
            "Model.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise ConfigError(text)
