"""Scans the model folders on disk: which models and versions could be served. Blocking: call it in a thread.

    ROOT/NAME/model.yaml          ROOT/NAME/1/model.py      ROOT/NAME/2/model.onnx
    ROOT/NAME/config.pbtxt        ROOT/NAME/1/model.py      of Triton's form
    BASE_PATH/config.json         *.safetensors             a folder of `models` may be a text model's own

A folder that is no model (no config, no numbered folder) is passed over. A model with a fault is listed with
the reason, so that versions loaded before go on serving. Links may lead anywhere inside the root and nowhere
else.

A load call may bring an override, which holds until the next load of the model:

    load NAME {config}            the folder on disk, under the client's config
    load NAME {config, file:...}  a temporary folder with the client's files; NAME need not be on disk

A temporary folder stays while a version may run from it: until a later load succeeds or the model is
unloaded.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import msgspec

from fastserve.backends.registry import BACKENDS
from fastserve.errors import ConfigError
from fastserve.repository.folder_config import (
    CONFIG_FILE,
    ConfigReader,
    Stamp,
    foreign_text,
    holds_text,
    inside,
    model_file,
    stamp_of,
)
from fastserve.repository.grps_config import NUMBER, Deployment, read_deployment
from fastserve.repository.mlflow_model import MLMODEL
from fastserve.repository.model_config import ModelConfig, config_json
from fastserve.repository.triton_config.reading import TRITON_FILE
from fastserve.repository.version import version_number
from fastserve.settings import ModelEntry, RepositorySettings
from fastserve.settings.config_files import FILE_BYTES
from fastserve.settings.confined_file import read_confined
from fastserve.settings.fields import convert, fault_text
from fastserve.settings.tensorflow import VERSION_BATCHING_FILE, batching_defaults

LONGEST_PATH = 512
SAVED_MODEL = "tensorflow"  # the backend of bare folders of SavedModels


@dataclass(frozen=True, slots=True)
class Override:
    """A config, and perhaps files, that a load call brings. `config` is a ModelConfig as JSON text; `files`
    are by their path inside the model's folder."""

    config: str
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldOverride:
    """The override in force for a model; `folder` is None where its folder on disk stays in use."""

    config: str
    folder: Path | None


class Overrides:
    """Overrides in force, by model. Blocking; `close` removes every temporary folder."""

    def __init__(self) -> None:
        self._held: dict[str, HeldOverride] = {}
        self._folders: dict[str, list[Path]] = {}  # of a model, those a version may still run from

    def of(self, name: str) -> HeldOverride | None:
        """Return the override of a model, None where there is none."""
        return self._held.get(name)

    def make(self, name: str, override: Override) -> HeldOverride:
        """Write the override's files to a temporary folder. Raises ConfigError for a path that leads out of
        it."""
        if not override.files:
            return HeldOverride(override.config, None)
        places = {_place(path): data for path, data in override.files.items()}
        # Named as the model: clients may see the last parts, as the place where a model raised.
        folder = Path(tempfile.mkdtemp(prefix="fastserve-model-")) / name
        self._folders.setdefault(name, []).append(folder)
        for place, data in places.items():
            try:
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                (folder / place).write_bytes(data)
            except OSError as fault:
                raise ConfigError(f"file:{place}: cannot be written: {fault.strerror}") from None
        return HeldOverride(override.config, folder)

    def put(self, name: str, held: HeldOverride | None) -> HeldOverride | None:
        """Set or clear the override of a model. Returns the one before."""
        before = self._held.pop(name, None)
        if held is not None:
            self._held[name] = held
        return before

    def tidy(self, name: str) -> None:
        """Remove a model's temporary folders but the one in force."""
        held = self._held.get(name)
        keep = held.folder if held is not None else None
        for folder in self._folders.pop(name, []):
            if folder == keep:
                self._folders[name] = [folder]
            else:
                shutil.rmtree(folder.parent, ignore_errors=True)

    def close(self) -> None:
        self._held.clear()
        for name in list(self._folders):
            self.tidy(name)


def _place(path: str) -> PurePosixPath:
    place = PurePosixPath(path)
    sound = path and not place.is_absolute() and ".." not in place.parts and place.parts and "\0" not in path
    if not sound or len(path) > LONGEST_PATH:
        raise ConfigError(f"file:{path[:LONGEST_PATH]!a}: allowed: a path inside the model's folder")
    return place


MODEL_FILES = tuple(
    dict.fromkeys(
        file
        for entry in BACKENDS.values()
        if entry.native and entry.model_file
        for file in (entry.model_file, *entry.other_files)
    )
)

MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class VersionFolder:
    """One folder that holds a version.

    `stamp` is that of its model file and the files beside it. `config` is its own, where its folder says more
    than its model's.
    """

    number: int
    folder: Path
    stamp: Stamp
    config: ModelConfig | None = None


@dataclass(slots=True)
class ModelFolder:
    """The contents of one model's folder. `error` set: nothing of it can be used. `notes`: files that were
    passed over."""

    name: str
    folder: Path
    config: ModelConfig | None = None
    versions: dict[int, VersionFolder] = field(default_factory=dict)
    error: str = ""
    notes: list[str] = field(default_factory=list)
    absent: bool = False  # there is no folder, or none with a number in it

    def config_of(self, number: int) -> ModelConfig:
        """Return the config of one version. Version policy and labels are always the model's."""
        assert self.config is not None
        own = self.versions[number].config
        if own is None:
            return self.config
        return msgspec.structs.replace(
            own,
            version_policy=self.config.version_policy,
            labels=self.config.labels,
            traffic=self.config.traffic,
            sticky=self.config.sticky,
            shadow=self.config.shadow,
        )

    @property
    def may_come(self) -> bool:
        """True when nothing is wrong with it but that it holds no version yet."""
        return self.absent or not (self.error or self.versions)


def is_model_name(name: str) -> bool:
    """Return True for 1 to 128 of letters, digits, `_`, `.`, `-` that are no way up or out of a folder."""
    return MODEL_NAME.fullmatch(name) is not None and name.strip(".") != ""


class Layout:
    """Scans the folders named in the settings."""

    def __init__(self, settings: RepositorySettings) -> None:
        self.root = repository_root(settings.repository)
        self.entries: Sequence[ModelEntry] = settings.models
        self.deployment = Path(settings.deployment) if settings.deployment else None
        self.overrides = Overrides()
        self._configs = ConfigReader(settings.model_defaults)
        self._version_batching = settings.version_batching

    def check(self) -> None:
        """Raise ConfigError when a folder named in the settings does not exist, or a name is given twice."""
        if self.root is not None and not self.root.is_dir():
            raise ConfigError(fault_text("repository", str(self.root), "a folder that exists, or demo"))
        if self.deployment is not None:
            read_deployment(self.deployment)
        if self.root is not None:
            _must_hold_models(self.root)
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise ConfigError(f"Illegal to list model {entry.name} multiple times in config list")
            if not is_model_name(entry.name):
                raise ConfigError(
                    fault_text("models.name", entry.name, f"text matching {MODEL_NAME.pattern}")
                )
            seen.add(entry.name)

    def scan(self, pause: Callable[[float], None] = lambda seconds: None) -> dict[str, ModelFolder]:
        """Return every model, by name. `pause` is called after each with the seconds that it took. Raises
        OSError when the root cannot be listed (then change nothing)."""
        found = {entry.name: self._scan_entry(entry) for entry in self.entries}
        if self.deployment is not None:
            found |= _scan_deployment(self.deployment, self._configs)
        if self.root is None:
            return found
        for child in sorted(os.scandir(self.root), key=lambda c: c.name):
            if child.name.startswith(".") or child.name == "__pycache__" or not child.is_dir():
                continue
            began_s = time.monotonic()
            model = self._scan_model(child.name, self.root / child.name, self.root)
            pause(time.monotonic() - began_s)
            if model is not None and child.name in found:
                found[child.name].notes.append("also in the repository folder, which `models` overrides")
            elif model is not None:
                found[child.name] = model
        return found

    def scan_one(self, name: str) -> ModelFolder | None:
        """Return one model, None when there is none. The name may come from a client."""
        if not is_model_name(name):
            return None
        held = self.overrides.of(name)
        if held is not None and held.folder is not None:
            return self._scan_model(name, held.folder, held.folder)
        for entry in self.entries:
            if entry.name == name:
                return self._scan_entry(entry)
        if self.deployment is not None and name in (
            deployed := _scan_deployment(self.deployment, self._configs)
        ):
            return deployed[name]
        if self.root is None or not (self.root / name).is_dir():
            return None
        return self._scan_model(name, self.root / name, self.root)

    def _scan_entry(self, entry: ModelEntry) -> ModelFolder:
        folder = Path(entry.base_path)
        model: ModelFolder | None = None
        if entry.file:
            model = self._scan_file(entry, folder)
        elif folder.is_dir():
            model = self._scan_model(entry.name, folder, folder, alone=True)
        if model is None:
            reason = "no version folder in base_path" if folder.is_dir() else "base_path is not a folder"
            return ModelFolder(entry.name, folder, error=reason, absent=True)
        if entry.saved_model and not model.error:
            model.error = _not_saved_models(model)
        if model.config is not None:
            changes: dict[str, object] = {}
            if entry.version_policy is not None:
                changes["version_policy"] = entry.version_policy
            if entry.labels is not None:
                changes["labels"] = entry.labels
            model.config = msgspec.structs.replace(model.config, **changes)
        return model

    def _scan_file(self, entry: ModelEntry, folder: Path) -> ModelFolder:
        """Return a model that is one file. Links are followed: the operator named it."""
        model, file = ModelFolder(entry.name, folder), folder / entry.file
        try:
            stamp = _stamp_of_all(file) if file.match("saved_model.*") else stamp_of(file)
            model.config = self._configs.read_single(folder, entry.file, entry.fields)
            model.versions[1] = VersionFolder(1, folder.resolve(), stamp)
        except ConfigError as fault:
            model.error = str(fault)
        except OSError as fault:
            model.error, model.absent = f"{entry.file} cannot be read: {fault.strerror}", True
        return model

    def _scan_model(self, name: str, folder: Path, root: Path, *, alone: bool = False) -> ModelFolder | None:
        """Return one model. `alone`: the folder was named outright, and may be the one version of a text
        model itself."""
        model = ModelFolder(name, folder)
        if not is_model_name(name):
            model.error = fault_text("name", name, f"text matching {MODEL_NAME.pattern}")
            return model
        try:
            numbered = _numbered_folders(folder)
            if alone and not numbered and holds_text(folder):
                numbered = {1: folder}
            held = self.overrides.of(name)
            has_config = (folder / CONFIG_FILE).exists() or (folder / TRITON_FILE).exists()
            if not numbered and not has_config and held is None:
                return None
            if not inside(folder, root):
                model.error = "the folder is a link that leads out of the repository"
                return model
            if held is not None:
                model.config = self._configs.read_json(name, held.config, folder, numbered, root)
            else:
                model.config = self._configs.read(name, folder, numbered, root)
            self._fill_versions(model, numbered, root, written=has_config or held is not None)
            if self._version_batching:
                model.versions = {n: _batched(one, model.config) for n, one in model.versions.items()}
        except ConfigError as fault:
            model.error = str(fault)
        except OSError as fault:
            model.error = f"the folder cannot be read: {fault.strerror}"
        return model

    def _fill_versions(
        self, model: ModelFolder, numbered: Mapping[int, Path], root: Path, *, written: bool
    ) -> None:
        assert model.config is not None
        file_name = model_file(model.config)
        for number, folder in sorted(numbered.items()):
            own = self._configs.read_version(model.config, folder, root, written=written)
            wanted = model_file(own or model.config, folder)
            file = folder / wanted
            if wanted and not file.is_file():
                other = "" if own is not None else foreign_text(model.name, folder)
                missing = wanted if own is not None else file_name
                model.notes.append(f"version {number}: no {missing}" + f"; {other}" * bool(other))
            elif not (inside(folder, root) and inside(file, root)):
                model.notes.append(f"version {number}: a link leads out of the repository")
            else:
                stamp = _stamp_of_all(file)
                model.versions[number] = VersionFolder(number, folder.resolve(), stamp, own)
        if file_name and not model.versions:
            model.notes += _misplaced(model.folder, file_name)


def _not_saved_models(model: ModelFolder) -> str:
    """Return why a folder that a client has named may not be served; "" for SavedModels alone, without a
    config that could say how they are run."""
    config = next((name for name in (CONFIG_FILE, TRITON_FILE) if os.path.lexists(model.folder / name)), "")
    backend = "" if model.config is None else model.config.backend
    if not config and backend == SAVED_MODEL:
        return ""
    held = config or (f"a model of the backend {backend}" if backend else "no SavedModel")
    return (
        f"base_path holds {held}: without --admin-reload-config "
        "(FASTSERVE_ADMIN_RELOAD_CONFIG=true) clients name folders of SavedModels alone"
    )


def _scan_deployment(folder: Path, configs: ConfigReader) -> dict[str, ModelFolder]:
    """Return the models of a grps deployment. Raises OSError when it cannot be read (then change nothing)."""
    try:
        deployment = read_deployment(folder)
    except ConfigError as fault:
        raise OSError(str(fault)) from None
    return {name: _deployed(deployment, name, configs) for name in deployment.names}


def _deployed(deployment: Deployment, name: str, configs: ConfigReader) -> ModelFolder:
    model = ModelFolder(name, deployment.folder)
    try:
        model.config = configs.operate(deployment.config(name))
        stamps = [stamp_of(file) for file in deployment.files(model.config)]
        newest = max(stamps, key=lambda stamp: stamp[3])
        model.versions[NUMBER] = VersionFolder(NUMBER, deployment.folder, newest)
    except OSError:
        model.error = f"inferer_path: there is no file {model.config and model.config.options.model_file}"
    except ConfigError as fault:
        model.error = str(fault)
    if not is_model_name(name):
        model.error = fault_text("name", name, f"text matching {MODEL_NAME.pattern}")
    return model


def _must_hold_models(root: Path) -> None:
    """Raise ConfigError for a folder that is itself a model, or a version of one."""
    versions = [child.name for child in root.iterdir() if version_number(child.name) is not None]
    configs = (CONFIG_FILE, TRITON_FILE)
    for held in (
        *configs,
        *(f"{number}/{name}" for number in sorted(versions) for name in (*MODEL_FILES, MLMODEL)),
    ):
        if (root / held).is_file():
            raise ConfigError(f"repository: {root} is one model (it holds {held}); give the folder above it")
    for held in (*MODEL_FILES, MLMODEL):
        if (root / held).is_file():
            what = f"one version of a model (it holds {held})"
            raise ConfigError(f"repository: {root} is {what}; give the folder two above it")


def repository_root(repository: str) -> Path | None:
    """Return the folder the `repository` setting names; None when it names none."""
    if repository == "demo":
        from fastserve.demo import demo_repository  # only servers of the demo need it

        return demo_repository()
    return Path(repository) if repository else None


def _numbered_folders(folder: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for child in sorted(folder.iterdir()):  # of two names for one number the lexically later wins (spec 5)
        number = version_number(child.name)
        if number is not None and child.is_dir():
            found[number] = child
    return found


def _batched(version: VersionFolder, config: ModelConfig) -> VersionFolder:
    """Return a version with the batching of its own file; a fault of that file is the version's."""
    file = version.folder / VERSION_BATCHING_FILE
    if not config.batching or not os.path.lexists(file):
        return version
    try:
        text = read_confined(version.folder, VERSION_BATCHING_FILE, FILE_BYTES).decode("utf-8", "replace")
        fields, _ = batching_defaults(text, VERSION_BATCHING_FILE)
        given = {"allowed_batch_sizes": None, **fields}
        own = convert({**config_json(config), **given}, ModelConfig, VERSION_BATCHING_FILE)
    except ConfigError as fault:
        own = msgspec.structs.replace(config, fault=str(fault))
    return dataclasses.replace(version, config=own)


def _misplaced(folder: Path, file_name: str) -> list[str]:
    """Return notes on model files that lie outside any version folder."""
    beside = folder / file_name
    notes = [f"{file_name} lies beside the version folders: move it to 1/{file_name}"] * beside.is_file()
    for child in sorted(folder.iterdir()):
        if version_number(child.name) is None and (child / file_name).is_file():
            notes.append(f"{child.name}/{file_name}: a version's folder has a number for its name, say 1")
    return notes


# Files beside a model file, by its ending: a change of one reloads the version.
SAVED = ("saved_model.*", "variables/*", "assets/*")

_BESIDE = {
    ".py": ("*.py",),
    ".json": ("*.json", "*.safetensors", "*.jinja"),
    ".pb": SAVED,
    ".pbtxt": SAVED,
}


def _stamp_of_all(file: Path) -> Stamp:
    """Return the stamp of a model's file and the files that belong to it. Raises OSError."""
    stamp = stamp_of(file)
    patterns = _BESIDE.get(file.suffix)
    if patterns is None:
        return stamp
    found = sorted(beside for pattern in patterns for beside in file.parent.glob(pattern))
    stamps = tuple(stamp_of(beside) for beside in found)
    return (*stamp[:2], hash(stamps), max((one[3] for one in stamps), default=stamp[3]))
