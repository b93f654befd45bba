"""One file or folder that is a model, served without a repository around it.

    find_single(Path("resnet.onnx"))    ModelEntry(name="resnet", base_path=".", file="resnet.onnx", ...)
    find_single(Path("models"))         None: a repository

Only names and the heads of files are read. A model.yaml beside the file is its configuration, as in a
repository; without one the file says what is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastserve.backends.registry import BACKENDS, find_backend
from fastserve.errors import ConfigError
from fastserve.repository.folder_config import CONFIG_FILE, foreign_file_text, holds_text
from fastserve.repository.layout import MODEL_FILES, is_model_name
from fastserve.repository.mlflow_model import MLMODEL, find_mlflow, holds_mlflow
from fastserve.repository.triton_config.completion import read_onnx_graph
from fastserve.repository.triton_config.reading import TRITON_FILE
from fastserve.repository.version import version_number
from fastserve.settings import ModelEntry
from fastserve.settings.fields import fault_text

HEAD_BYTES = 4096
MODEL_SETTINGS = "model-settings.json"
"""MLServer's file of a model."""
BY_HEAD = (".json", ".txt", ".bst")
LIGHTGBM_HEAD = b"tree\nversion="
SAVED_MODEL = (BACKENDS["tensorflow"].model_file, *BACKENDS["tensorflow"].other_files)
PICKLE = (
    "{} is a pickle: reading it runs whatever code its author put there. --trust-pickle reads it, where you "
    "trust the author"
)
_BACKENDS = {
    ".onnx": "onnx",
    ".pt": "torch",
    ".pt2": "torch",
    ".ubj": "xgboost",
    ".cbm": "catboost",
    ".tl": "treelite",
    ".skops": "sklearn",
    ".pkl": "sklearn",
    ".pickle": "sklearn",
    ".joblib": "sklearn",
}


def find_single(path: Path, name: str = "", *, trust_pickle: bool = False) -> ModelEntry | None:
    """Return the one model that lies at `path`; None for a repository, or nothing. Raises ConfigError for a
    file that is no model, a pickle that is not allowed, and a name that no model may have."""
    path = path.absolute()
    if path.is_file():
        if path.name in SAVED_MODEL or (path.name == "config.json" and holds_text(path.parent)):
            return find_single(path.parent, name)
        return _of_file(path, name or path.stem, trust_pickle=trust_pickle)
    if not path.is_dir():
        if path.suffix in _BACKENDS:
            raise ConfigError(fault_text("file", path.name, "a file that exists"))
        return None
    saved = next((one for one in SAVED_MODEL if (path / one).is_file()), "")
    if saved:
        title = path.parent.name if version_number(path.name) is not None else path.name
        return _entry(name or title, path, saved, {"backend": "tensorflow"})
    if holds_mlflow(path):
        return _of_mlflow(path, name or path.name, trust_pickle=trust_pickle)
    numbered = any(version_number(one.name) is not None and one.is_dir() for one in path.iterdir())
    if holds_text(path) or (numbered and _is_model(path)):
        return _entry(name or path.name, path, "", {})
    held = [path / one for one in MODEL_FILES if (path / one).is_file() and not one.endswith(".py")]
    known = [one for one in held if _backend_of(one)]
    if len(known) == 1:
        return _of_file(known[0], name or path.name, trust_pickle=trust_pickle)
    return None


def _is_model(folder: Path) -> bool:
    """Return whether version folders belong to one model: by its configuration, or what they hold."""
    if (folder / CONFIG_FILE).is_file() or (folder / TRITON_FILE).is_file():
        return True
    versions = [one for one in folder.iterdir() if version_number(one.name) is not None]
    bare = (*SAVED_MODEL, BACKENDS["onnx"].model_file)
    return any((version / one).is_file() for version in versions for one in bare)


def _of_mlflow(folder: Path, name: str, *, trust_pickle: bool) -> ModelEntry:
    found = find_mlflow(folder)
    entry = find_backend(found.backend)
    if not entry.installed:
        raise ConfigError(f"{MLMODEL}: {entry.missing_text}")
    fields = {"backend": found.backend, **found.fields}
    if found.is_pickle and not trust_pickle:
        raise ConfigError(PICKLE.format(found.file))
    if trust_pickle and found.backend == "sklearn":
        fields["parameters"] = {**fields["parameters"], "trust_pickle": True}
    return _entry(name, folder, found.file, fields)


def _of_file(file: Path, name: str, *, trust_pickle: bool) -> ModelEntry:
    backend = _backend_of(file)
    if not backend:
        raise ConfigError(foreign_file_text(file) or _unknown_text(file))
    entry = find_backend(backend)
    if not entry.installed:
        raise ConfigError(f"{file.name}: {entry.missing_text}")
    fields: dict[str, Any] = {"backend": backend}
    if backend == "sklearn" and file.suffix != ".skops":
        if not trust_pickle:
            raise ConfigError(PICKLE.format(file.name))
        fields["parameters"] = {"trust_pickle": True}
    if backend == "onnx":
        graph = read_onnx_graph(file)
        if graph is not None and not graph.batched:
            fields["max_batch_size"] = 0
    return _entry(name, file.parent, file.name, fields)


def _backend_of(file: Path) -> str:
    """Return the backend of a model's file; "" for any other file."""
    if file.suffix not in BY_HEAD:
        return _BACKENDS.get(file.suffix, "")
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if head.startswith(LIGHTGBM_HEAD):
        return "lightgbm"
    return "xgboost" if head[:1] == b"{" and b"learner" in head else ""


def _unknown_text(file: Path) -> str:
    if file.suffix == ".py":
        return f"{file.name} is a script: fastserve run {file.name}"
    kinds = ", ".join([*_BACKENDS, "model.json of XGBoost", "model.txt of LightGBM"])
    return fault_text("file", file.name, f"a repository, a model's folder, or one of {kinds}")


def _entry(name: str, folder: Path, file: str, fields: Mapping[str, Any]) -> ModelEntry:
    if not is_model_name(name):
        raise ConfigError(
            fault_text("name", name, "1 to 128 of letters, digits, _ . -; --name gives another")
        )
    return ModelEntry(name, str(folder), file=file, fields=dict(fields))
