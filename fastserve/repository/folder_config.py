"""Reads the config of one model folder, in whichever form it is written. Loads nothing.

    model.yaml      a native model; wins over a config.pbtxt beside it
    config.pbtxt    a model of Triton's form
    neither         N/MLmodel of MLflow, N/model.onnx, or N/model.py with a class TritonPythonModel: the model
                    tells the rest

A folder with a model of a foreign framework is refused with the call that makes the model servable. Those
texts may reach clients: paths begin at the model's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fastserve.backends.llm.folder import read_json
from fastserve.backends.registry import BACKENDS, TO_ONNX, BackendEntry, find_backend
from fastserve.errors import ConfigError, install_text
from fastserve.repository.mlflow_model import MLMODEL, MlflowModel, find_mlflow, holds_mlflow
from fastserve.repository.model_config import ModelConfig, config_json, may_share, parse_model_config
from fastserve.repository.triton_config.completion import complete_from_files, find_file
from fastserve.repository.triton_config.reading import (
    TRITON_FILE,
    make_triton_config,
    parse_triton_json,
    read_triton_config,
    to_model_config,
)
from fastserve.settings import convert
from fastserve.settings.config_files import read_yaml
from fastserve.settings.confined_file import read_confined

CONFIG_FILE = "model.yaml"

GRAPH_FILE = BACKENDS["onnx"].model_file  # tensors a config.pbtxt leaves out are read from it

# Fields of model_defaults that say how any model is run; config.pbtxt has no words for them.
OPERATION = (
    "env",
    "isolate_failures",
    "load_timeout_s",
    "max_queue_bytes",
    "max_queue_rows",
    "request_log",
    "restart_backoff_max_s",
    "restart_backoff_s",
    "run_timeout_ms",
    "shared_worker",
)

PYTHON_BYTES = 1 << 20  # how far into a model.py the class is looked for

LABEL_BYTES = 16 << 20  # of one file of class labels

Stamp = tuple[int, int, int, int]  # device, inode, bytes, mtime_ns: changes whenever a file is replaced


def model_file(config: ModelConfig, folder: Path | None = None) -> str:
    """Return the file a version's folder must hold; "" when the folder is enough."""
    if config.fault:
        return ""  # its versions are listed with the fault, whatever they hold
    named = config.options.model_file or (config.torch.file if config.torch is not None else "")
    entry = find_backend(config.backend)
    if named or folder is None:
        return named or entry.model_file
    return next((name for name in entry.other_files if (folder / name).is_file()), entry.model_file)


def inside(path: Path, root: Path) -> bool:
    """Return True when `path`, links followed, does not leave `root`. Without a link on the way down from
    `root` nothing else has to be followed: that was most of the time of a look at a repository."""
    place, below = os.fspath(root), os.fspath(path)
    parts = below[len(place) :].split("/") if below.startswith(place) else [".."]
    if parts[0] == "" and ".." not in parts:
        for part in parts[1:]:
            place = f"{place}/{part}"
            if os.path.islink(place):
                break
        else:
            return True
    return path.resolve().is_relative_to(root.resolve())


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of a file. Raises OSError."""
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class _CachedConfig:
    """A config, and the stamps of its files from before they were read."""

    stamps: dict[Path, Stamp]
    config: ModelConfig
    labels: dict[Path, Stamp | None]

    def holds(self, stamps: Mapping[Path, Stamp]) -> bool:
        return self.stamps == stamps and all(_stamp_or_none(file) == was for file, was in self.labels.items())


class ConfigReader:
    """Reads configs, and caches those whose files did not change."""

    def __init__(self, defaults: Mapping[str, object]) -> None:
        self._defaults = defaults
        self._known: dict[Path, _CachedConfig] = {}
        self._mlflow: dict[Path, tuple[Stamp, Stamp | None, MlflowModel]] = {}

    def read(self, name: str, folder: Path, numbered: Mapping[int, Path], root: Path) -> ModelConfig:
        """Return the config of model `name`. Raises ConfigError, OSError."""
        if (folder / CONFIG_FILE).exists():
            return self._native(folder, root)
        if (folder / TRITON_FILE).exists():
            _must_be_inside(folder / TRITON_FILE, root)
            return self._triton(name, folder, numbered, root)
        saved = [path for _, path in sorted(numbered.items(), reverse=True) if holds_mlflow(path)]
        if saved:
            return self._first_of_mlflow(saved, root)
        for entry in BACKENDS.values():
            if not entry.needs_config and _recognises(entry, numbered, root):
                if entry.alternative and not entry.installed:
                    break  # said with the folder's name
                return self._bare(entry, name)
        raise ConfigError(_no_config(name, numbered))

    def _first_of_mlflow(self, saved: Sequence[Path], root: Path) -> ModelConfig:
        """Return the config of the first of these versions that has one. Raises ConfigError."""
        faults = []
        for folder in saved:
            try:
                return self._of_mlflow(self._find_mlflow(folder, root))
            except ConfigError as fault:
                faults.append(fault)
        raise ConfigError(f"{saved[0].name}/{faults[0]}")

    def read_version(
        self, config: ModelConfig, folder: Path, root: Path, *, written: bool
    ) -> ModelConfig | None:
        """Return the config of a version that MLflow has saved; None where its model's is enough.

        `written`: the model's folder has a config, which wins: MLmodel adds to one of the same backend what
        that does not say. A version whose MLmodel cannot be used has a config with that fault.
        """
        if config.triton is not None or (written and config.options.model_file) or not holds_mlflow(folder):
            return None
        try:
            found = self._find_mlflow(folder, root)
            if not written:
                return self._of_mlflow(found)
        except ConfigError as fault:
            return None if written else msgspec.structs.replace(config, fault=str(fault))
        if config.backend != found.backend:
            return None
        told = dict(found.fields.get("parameters", {}))
        for side, name in (("inputs", "columns"), ("outputs", "outputs")):
            if getattr(config, side):
                told.pop(name, None)
        options = msgspec.structs.replace(config.options, model_file=found.file)
        return msgspec.structs.replace(config, parameters={**told, **config.parameters}, options=options)

    def _find_mlflow(self, folder: Path, root: Path) -> MlflowModel:
        path = folder / MLMODEL
        _must_be_inside(path, root)
        stamp, known = stamp_of(path), self._mlflow.get(folder)
        if known is not None and known[:2] == (stamp, _stamp_or_none(folder / known[2].file)):
            return known[2]
        found = find_mlflow(folder)
        self._mlflow[folder] = (stamp, _stamp_or_none(folder / found.file), found)
        return found

    def _of_mlflow(self, found: MlflowModel) -> ModelConfig:
        entry = find_backend(found.backend)
        if not entry.installed:
            raise ConfigError(f"{MLMODEL}: {entry.missing_text}")
        raw = {"backend": found.backend, **found.fields}
        if "parameters" in raw:
            given = self._defaults.get("parameters")
            raw["parameters"] = {**raw["parameters"], **(given if isinstance(given, Mapping) else {})}
        config = parse_model_config(raw, "model_defaults", self._defaults)
        options = msgspec.structs.replace(config.options, model_file=found.file)
        return msgspec.structs.replace(config, options=options)

    def read_single(self, folder: Path, file: str, fields: Mapping[str, object]) -> ModelConfig:
        """Return the config of a model that is one file, by the model.yaml beside it or these fields. Raises
        ConfigError, OSError."""
        beside = folder / CONFIG_FILE
        raw = read_yaml(beside, CONFIG_FILE) if beside.exists() else fields
        config = parse_model_config(raw, CONFIG_FILE, self._defaults)
        if file != find_backend(config.backend).model_file:
            config = msgspec.structs.replace(
                config, options=msgspec.structs.replace(config.options, model_file=file)
            )
        return _with_class_labels(config, folder)

    def read_json(
        self, name: str, text: str, folder: Path, numbered: Mapping[int, Path], root: Path
    ) -> ModelConfig:
        """Return the config a client gave for `name`, completed from its folder. Raises ConfigError,
        OSError."""
        written = parse_triton_json(text, name)
        config = to_model_config(complete_from_files(written, numbered, root), folder.absolute())
        return self.operate(_with_output_labels(config, folder))

    def _bare(self, entry: BackendEntry, name: str) -> ModelConfig:
        """Return the config of a model without one, whose file says the rest."""
        if entry.native:
            return parse_model_config({"backend": entry.name}, "model_defaults", self._defaults)
        return self.operate(to_model_config(make_triton_config({"backend": entry.triton}, name)))

    def operate(self, config: ModelConfig) -> ModelConfig:
        """Return the config with the operational fields of model_defaults, for a model of another form than
        ours. Raises ConfigError."""
        chosen = {key: value for key, value in self._defaults.items() if key in OPERATION}
        if not chosen:
            return config
        if not may_share(config.backend):
            chosen.pop("shared_worker", None)
        rows = chosen.get("max_queue_rows")
        if isinstance(rows, int) and rows < config.max_batch_size:
            del chosen["max_queue_rows"]  # a queue that cannot hold one batch would refuse full batches
        return convert({**config_json(config), **chosen}, ModelConfig, "model_defaults")

    def _native(self, folder: Path, root: Path) -> ModelConfig:
        path = folder / CONFIG_FILE
        _must_be_inside(path, root)
        stamps = {path: stamp_of(path)}  # before reading, so that a change while reading is seen next time
        known = self._known.get(path)
        if known is not None and known.holds(stamps):
            return known.config
        written = parse_model_config(read_yaml(path, CONFIG_FILE), CONFIG_FILE, self._defaults)
        names = [] if isinstance(written.class_labels, list) else [written.class_labels]
        labels = {folder / name: _stamp_or_none(folder / name) for name in names}
        config = _with_class_labels(written, folder)
        self._known[path] = _CachedConfig(stamps, config, labels)
        return config

    def _triton(self, name: str, folder: Path, numbered: Mapping[int, Path], root: Path) -> ModelConfig:
        path = folder / TRITON_FILE
        models = [find_file({n: p}, GRAPH_FILE, root) for n, p in sorted(numbered.items())]
        stamps = {file: stamp_of(file) for file in (path, *models) if file is not None}
        known = self._known.get(path)
        if known is not None and known.holds(stamps):
            return known.config
        written = read_triton_config(folder, name)
        completed = complete_from_files(written, numbered, root)
        config = to_model_config(completed, folder.absolute())
        labels = {folder / file: _stamp_or_none(folder / file) for file in _label_files(config).values()}
        config = self.operate(_with_output_labels(config, folder))
        self._known[path] = _CachedConfig(stamps, config, labels)
        return config


def holds_text(folder: Path) -> bool:
    """Return whether a folder is itself a version of a text model, in the form of a download."""
    return _recognises(BACKENDS["text"], {1: folder}, folder)


def _must_be_inside(path: Path, root: Path) -> None:
    if not inside(path, root):
        raise ConfigError(f"{path.name} is a link that leads out of the repository")


def _is_enough(entry: BackendEntry) -> bool:
    return bool(entry.model_file) and not entry.needs_config and not entry.class_name


def _recognises(entry: BackendEntry, numbered: Mapping[int, Path], root: Path) -> bool:
    """Return whether a version folder holds a model of this backend."""
    names = (entry.model_file, *entry.other_files)
    file = next((found for name in names if (found := find_file(numbered, name, root))), None)
    if (
        file is not None
        and entry.weights_pattern
        and next(file.parent.glob(entry.weights_pattern), None) is None
    ):
        return False
    if file is not None and entry.architectures:
        return _has_architecture(file, entry.architectures)
    if file is None or not entry.class_name:
        return file is not None
    with file.open("rb") as stream:
        return entry.class_name.encode() in stream.read(PYTHON_BYTES)


def _has_architecture(file: Path, endings: tuple[str, ...]) -> bool:
    try:
        told = read_json(file)
    except ConfigError:
        return False
    names = told.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(endings) for name in names)


def _with_class_labels(config: ModelConfig, folder: Path) -> ModelConfig:
    if isinstance(config.class_labels, list):
        return config
    lines = _read_lines(folder, config.class_labels, f"{CONFIG_FILE}: class_labels")
    return msgspec.structs.replace(config, class_labels=lines)


def _label_files(config: ModelConfig) -> dict[str, str]:
    """Return output -> its label_filename; none for a model that cannot be run."""
    outputs = (config.triton or {}).get("output", ()) if not config.fault else ()
    return {output["name"]: output["label_filename"] for output in outputs if output.get("label_filename")}


def _with_output_labels(config: ModelConfig, folder: Path) -> ModelConfig:
    labels = {
        name: _read_lines(folder, file, f"output {name}: label_filename")
        for name, file in _label_files(config).items()
    }
    return msgspec.structs.replace(config, output_labels=labels)


def _read_lines(folder: Path, name: str, field: str) -> list[str]:
    """Return the lines of a label file, which must lie in the model's folder. Raises ConfigError."""
    try:
        text = read_confined(folder, name, LABEL_BYTES).decode("utf-8", "replace")
    except ConfigError as fault:
        raise ConfigError(f"{field} {fault}") from None
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def _stamp_or_none(path: Path) -> Stamp | None:
    try:
        return stamp_of(path)
    except (OSError, ValueError):
        return None


def _no_config(name: str, numbered: Mapping[int, Path]) -> str:
    """Return why a folder without a config is not served, and what is missing."""
    code = BACKENDS["python"].model_file
    if any((folder / code).exists() for folder in numbered.values()):
        inner = [number for number in sorted(numbered) if (numbered[number] / CONFIG_FILE).exists()]
        if inner:
            return f"{CONFIG_FILE} lies in version folder {inner[0]}: move it up, beside the version folders"
        return (
            f"there is a {code} and no {CONFIG_FILE} beside the version folders: write one, "
            "with backend: python and the inputs and outputs by name, dtype and shape"
        )
    told = [text for number in sorted(numbered) if (text := foreign_text(name, numbered[number]))]
    files = " or ".join(dict.fromkeys(entry.model_file for entry in BACKENDS.values() if _is_enough(entry)))
    return told[0] if told else f"no {CONFIG_FILE}, and no version folder holds a {files}"


_CONVERT = "convert it: " + TO_ONNX

_WRITE = "load it in a {folder}/model.py (backend: python)"

# Ending of a file's name -> what it is, what to do
_ENDINGS = {
    ".keras": ("a Keras model", "export it as a SavedModel (model.export('saved')) and " + _CONVERT),
    ".h5": ("a Keras model", _CONVERT),
    ".tflite": ("a TensorFlow Lite model", _CONVERT),
    ".pt": (
        "a PyTorch model",
        "a TorchScript or torch.export program is served as {folder}/model.pt or model.pt2, beside a "
        "model.yaml with backend: torch, inputs and outputs; export others: "
        "torch.onnx.export(model, (x,), '{folder}/model.onnx', "
        "dynamic_axes={{'x': {{0: 'rows'}}}}, input_names=['x'])",
    ),
    ".pkl": (
        "a pickled Python object",
        "a fitted model of scikit-learn is served as {folder}/model.pkl or model.joblib, beside a model.yaml "
        "with backend: sklearn and parameters: {{trust_pickle: true}}, or as model.skops alone; others: "
        + _WRITE,
    ),
    ".mar": (
        "an archive of TorchServe",
        "unzip it: its TorchScript program is served as {folder}/model.pt, beside a model.yaml with backend: "
        "torch, inputs and outputs, and its handler becomes a {folder}/model.py "
        "(docs/moving-from-torchserve.md)",
    ),
    ".plan": ("a TensorRT engine", "serve the ONNX model it was built from"),
    ".bst": (
        "an XGBoost model",
        "rename a JSON or UBJSON file to {folder}/model.json or model.ubj; others are written so by "
        "xgboost.Booster(model_file='{place}').save_model('{folder}/model.ubj')",
    ),
    ".lgb": (
        "a LightGBM model",
        "rename it to {folder}/model.txt",
    ),
    ".cbm": ("a CatBoost model of another name", "rename it to {folder}/model.cbm"),
    ".skops": ("a scikit-learn model of another name", "rename it to {folder}/model.skops"),
    ".onnx": ("an ONNX model of another name", "rename it to {folder}/model.onnx"),
    ".py": ("Python code of another name", "rename it to {folder}/model.py"),
}

_OURS = ("model.onnx", "model.py")

_SAME = {
    ".pth": ".pt",
    ".pickle": ".pkl",
    ".joblib": ".pkl",
    ".engine": ".plan",
    ".hdf5": ".h5",
    ".ubj": ".bst",
    ".lgbm": ".lgb",
}

# Whole names, where the ending says nothing: of Triton's FIL backend
_NAMES = {"xgboost.model": ".bst", "xgboost.json": ".bst"}

_KINDS = {".h5": "--keras", ".tflite": "--tflite", ".keras": "--saved-model"}


def foreign_text(model: str, folder: Path) -> str:
    """Return the error for a model of a foreign framework in a version's folder, with the call that converts
    it; "" when nothing is known. Only names are read."""
    where = f"{model}/{folder.name}"
    for place, ending in _found(folder):
        if ending == "":
            return f"{where}{place} is a TensorFlow SavedModel, {_saved_model(where, place)}"
        what, to_do = _ENDINGS[ending]
        source = "saved" if ending == ".keras" else f"{where}/{place}"
        told = to_do.format(kind=_KINDS.get(ending, ""), place=source, folder=where)
        return f"{where}/{place} is {what}; {told}"
    return ""


def foreign_file_text(file: Path) -> str:
    """Return the error for one file that is a model of a foreign framework; "" when nothing is known."""
    ending = _SAME.get(file.suffix, file.suffix)
    if ending not in _ENDINGS or file.suffix == ".py":
        return ""
    what, to_do = _ENDINGS[ending]
    source = "saved" if ending == ".keras" else file.name
    told = to_do.format(kind=_KINDS.get(ending, ""), place=source, folder="MODEL/1")
    return f"{file.name} is {what}; {told}"


def _saved_model(where: str, place: str) -> str:
    entry = BACKENDS["tensorflow"]
    told = _CONVERT.format(kind="--saved-model", place=f"{where}{place}", folder=where)
    if not entry.installed:
        told = f"{install_text(entry.packages, entry.extra)}, or {told}"
        return "which needs TensorFlow to run: " + told + f"; the first wants it as {where}" * bool(place)
    if place:
        return f"which is served where its files lie in {where} itself: move them up, or {told}"
    return f"which is served by backend: {entry.name}; or {told}"


def _found(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield places within the folder with their ending, SavedModels (ending "") first. Raises OSError."""
    files = sorted(folder.iterdir())
    for child in files:
        if child.name in ("saved_model.pb", "saved_model.pbtxt"):
            yield "", ""
        elif child.is_dir() and any(child.glob("saved_model.pb*")):
            yield f"/{child.name}", ""
    for child in files:
        ending = _NAMES.get(child.name, _SAME.get(child.suffix, child.suffix))
        if child.is_file() and ending in _ENDINGS and child.name not in _OURS:
            yield child.name, ending
