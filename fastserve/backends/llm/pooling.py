"""Embeddings: hidden states pooled into one vector for each text, and what a folder says of it.

    pool.places(chunk, last=...)   positions whose states are needed
    pool.add(states)               once for each chunk
    pool.vector()                  the mean of all, the last, or the first; of length 1 where configured

A folder configures pooling in the form of sentence-transformers, and model.yaml overrides it:

    modules.json                a transformer, a pooling and perhaps a normalization: nothing else
    1_Pooling/config.json       pooling_mode_mean_tokens, pooling_mode_lasttoken or pooling_mode_cls_token
    sentence_bert_config.json   max_seq_length

No framework is imported here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fastserve.backends.llm.folder import FAMILIES, read_json
from fastserve.backends.llm.protocols import Chunk
from fastserve.codec.generation import Extra, Finish, Info, write_text
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.fields import fault_text
from fastserve.settings.model_options import TextOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray


NO_VECTOR = "the model computed NaN or infinity"
NONE_MADE = "this model makes no embeddings (text.pooling)"


class Pool:
    """The pooling of one prompt. `how` is TextOptions.pooling."""

    __slots__ = ("_count", "_how", "_normalize", "_sum")

    def __init__(self, how: str, *, normalize: bool) -> None:
        self._how, self._normalize = how, normalize
        self._sum: Any = 0.0
        self._count = 0

    def places(self, chunk: Chunk, *, last: bool) -> NDArray[np.int64]:
        """Return the places in the plan whose states are needed. `last`: the prompt ends with this chunk."""
        end = chunk.offset + chunk.count
        if self._how == "mean":
            return np.arange(chunk.offset, end)
        if self._how == "last":
            return np.arange(end - last, end)
        return np.arange(chunk.offset, chunk.offset + (chunk.start == 0))

    def add(self, states: NDArray[np.float32]) -> None:
        """Add states [places, width] of the next chunk."""
        self._sum = self._sum + states.sum(0, dtype=np.float64)
        self._count += len(states)

    def vector(self) -> NDArray[np.float32]:
        """Return the embedding [width] of a prompt that was read."""
        return finish_vector(self._sum / self._count, normalize=self._normalize)


def make_pool(info: Info, options: TextOptions) -> Pool:
    """Return the pooling of a new prompt. Raises ServeError where the model makes no embeddings."""
    if not info.embeds:
        raise ServeError(Kind.UNIMPLEMENTED, NONE_MADE)
    return Pool(options.pooling, normalize=options.normalize is not False)


def finish_vector(vector: NDArray[Any], *, normalize: bool) -> NDArray[np.float32]:
    """Return a vector as float32, of length 1 where `normalize`; zeros stay zeros."""
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype("<f4")


def tell_vector(vector: NDArray[np.float32]) -> tuple[Finish, bytes]:
    """Return the last record of a sequence with this embedding."""
    if not np.isfinite(vector).all():
        return Finish.FAILED, write_text(Extra(message=NO_VECTOR, kind=Kind.INTERNAL.value))
    return Finish.STOP, write_text(Extra(vector=vector.tobytes()))


MODULES, BERT = "modules.json", "sentence_bert_config.json"
_MODES = {"mean_tokens": "mean", "lasttoken": "last", "cls_token": "cls"}
_WORDS = {"mean": "mean", "lasttoken": "last", "cls": "cls"}


class Pooling(NamedTuple):
    """`how` is that of TextOptions.pooling, "" for no vectors; `most` tokens of a text, 0: as many as fit."""

    how: str = ""
    normalize: bool = True
    most: int = 0


def find_pooling(folder: Path, options: TextOptions, model_type: str) -> Pooling:
    """Return the pooling of a folder. Raises ConfigError for one that is not supported."""
    said = _read_modules(folder) if (folder / MODULES).exists() else Pooling()
    how = options.pooling or said.how or ("mean" if FAMILIES.get(model_type) == "encoder" else "")
    normalize = said.normalize if options.normalize is None else options.normalize
    return Pooling(how, normalize, said.most)


def with_pooling(options: TextOptions, pooling: Pooling) -> TextOptions:
    """Return the options of an engine with this pooling."""
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
    return Pooling(how, normalize, _read_most(folder / BERT))


def counts_prompt(folder: Path) -> bool:
    """Return whether a prompt's tokens are pooled with those of the text. Raises ConfigError."""
    modules = _modules(folder / MODULES) if (folder / MODULES).exists() else []
    pools = [read_json(folder / path / "config.json") for kind, path in modules if kind == "Pooling"]
    return all(pool.get("include_prompt", True) for pool in pools)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the type of each module, and its folder beneath the model's."""
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
