"""How a folder wants vectors made of its hidden states: modules.json and the files it names, in the form of
sentence-transformers; and what model.yaml says instead. No framework is imported here.

    modules.json                a transformer, a pooling, and a normalization where there is one: nothing else
    1_Pooling/config.json       pooling_mode_mean_tokens, pooling_mode_lasttoken or pooling_mode_cls_token
    sentence_bert_config.json   max_seq_length
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fastserve.backends.text_torch.folder import ENCODERS, read_json
from fastserve.config.fields import fault_text
from fastserve.config.text import TextOptions
from fastserve.errors import ConfigError

MODULES = "modules.json"
_MODES = {"mean_tokens": "mean", "lasttoken": "last", "cls_token": "cls"}
_WORDS = {"mean": "mean", "lasttoken": "last", "cls": "cls"}


class Pooling(NamedTuple):
    """`how` is that of TextOptions.pooling, "" for no vectors; `most` tokens of a text, 0: as many as fit."""

    how: str = ""
    normalize: bool = True
    most: int = 0


def find_pooling(folder: Path, options: TextOptions, model_type: str) -> Pooling:
    """Raises ConfigError for a folder that asks for what is not done here."""
    said = _read_modules(folder) if (folder / MODULES).exists() else Pooling()
    how = options.pooling or said.how or ("mean" if model_type in ENCODERS else "")
    normalize = said.normalize if options.normalize is None else options.normalize
    return Pooling(how, normalize, said.most)


def with_pooling(options: TextOptions, pooling: Pooling) -> TextOptions:
    """The options an engine runs with."""
    return msgspec.structs.replace(options, pooling=pooling.how, normalize=pooling.normalize)


def _read_modules(folder: Path) -> Pooling:
    how, normalize = "", False
    for kind, path in _modules(folder / MODULES):
        if kind == "Pooling":
            how = _read_mode(folder / path / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ConfigError(f"{MODULES}: {fault_text('type', kind, 'Transformer, Pooling, Normalize')}")
    if not how:
        raise ConfigError(f"{MODULES}: there is no module of the type Pooling")
    return Pooling(how, normalize, _read_most(folder / "sentence_bert_config.json"))


def _modules(path: Path) -> list[tuple[str, str]]:
    """What each is, and its folder beneath the model's."""
    try:
        said = json.loads(path.read_bytes())
        found = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in said]
    except (ValueError, TypeError, KeyError, RecursionError, OSError):
        raise ConfigError(f"{MODULES}: not a list of objects with type and path") from None
    if any(Path(path).name != path and path for _, path in found):
        raise ConfigError(f"{MODULES}: path: allowed: folders beside it")
    return found


def _read_mode(path: Path) -> str:
    said = read_json(path)
    if "pooling_mode" in said:
        modes = [str(said["pooling_mode"])]
        known: dict[str, str] = _WORDS
    else:
        modes = [key[len("pooling_mode_") :] for key in said if key.startswith("pooling_mode_") and said[key]]
        known = _MODES
    if len(modes) != 1 or modes[0] not in known:
        given = ", ".join(map(str, modes)) or "nothing"
        raise ConfigError(
            f"{path.parent.name}/config.json: {fault_text('pooling_mode', given, ', '.join(known))}"
        )
    return known[modes[0]]


def _read_most(path: Path) -> int:
    most: Any = read_json(path).get("max_seq_length") if path.exists() else 0
    return most if type(most) is int and most > 0 else 0
