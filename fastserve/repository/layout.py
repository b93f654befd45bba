"""Folders -> what could be served. Reads the disk and nothing else; blocking, so call it in a thread.

    ROOT/NAME/model.yaml          ROOT/NAME/1/model.py      ROOT/NAME/2/model.onnx

A folder that is no model (no model.yaml, no numbered folder) is passed over. A model with a fault
is listed with the reason, so that what was loaded before can go on serving. Links may lead
anywhere inside the root and nowhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fastserve.config import ModelEntry, RepositorySettings
from fastserve.config.fields import fault_text
from fastserve.config.yaml_text import read_text, read_yaml
from fastserve.errors import ConfigError
from fastserve.repository.model_config import ModelConfig, parse_model_config
from fastserve.repository.policy import version_number

MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
CONFIG_FILE = "model.yaml"
MODEL_FILES = {"python": "model.py", "onnx": "model.onnx"}

Stamp = tuple[int, int, int, int]  # device, inode, bytes, mtime_ns: changes whenever a file is replaced


@dataclass(frozen=True, slots=True)
class VersionFolder:
    """One folder that holds a version; `stamp` is its model file's."""

    number: int
    folder: Path
    stamp: Stamp


@dataclass(slots=True)
class ModelFolder:
    """What one model's folder says. `error` set: nothing of it can be used. `notes`: what was passed over."""

    name: str
    folder: Path
    config: ModelConfig | None = None
    versions: dict[int, VersionFolder] = field(default_factory=dict)
    error: str = ""
    notes: list[str] = field(default_factory=list)


def is_model_name(name: str) -> bool:
    """True for 1 to 128 of letters, digits, `_`, `.`, `-` that are no way up or out of a folder."""
    return MODEL_NAME.fullmatch(name) is not None and name.strip(".") != ""


class Layout:
    """Looks at the folders named in the settings. Remembers parsed model.yaml files that did not change."""

    def __init__(self, settings: RepositorySettings) -> None:
        self.root = repository_root(settings.repository)
        self.entries: Sequence[ModelEntry] = settings.models
        self.defaults: Mapping[str, object] = settings.model_defaults
        self._parsed: dict[Path, tuple[Stamp, ModelConfig]] = {}

    def check(self) -> None:
        """Raises ConfigError when a folder named in the settings is not there, or a name is given twice."""
        if self.root is not None and not self.root.is_dir():
            raise ConfigError(fault_text("repository", str(self.root), "a folder that exists, or demo"))
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise ConfigError(f"Illegal to list model {entry.name} multiple times in config list")
            if not is_model_name(entry.name):
                raise ConfigError(
                    fault_text("models.name", entry.name, f"text matching {MODEL_NAME.pattern}")
                )
            seen.add(entry.name)

    def scan(self) -> dict[str, ModelFolder]:
        """Every model, by name. Raises OSError when the root cannot be listed (then change nothing)."""
        found = {entry.name: self._scan_entry(entry) for entry in self.entries}
        if self.root is None:
            return found
        for child in sorted(os.scandir(self.root), key=lambda c: c.name):
            if child.name.startswith(".") or child.name == "__pycache__" or not child.is_dir():
                continue
            model = self._scan_model(child.name, self.root / child.name, self.root)
            if model is not None and child.name in found:
                found[child.name].notes.append("also in the repository folder, which `models` overrides")
            elif model is not None:
                found[child.name] = model
        return found

    def scan_one(self, name: str) -> ModelFolder | None:
        """One model, None when there is none. The name may come from a client."""
        if not is_model_name(name):
            return None
        for entry in self.entries:
            if entry.name == name:
                return self._scan_entry(entry)
        if self.root is None or not (self.root / name).is_dir():
            return None
        return self._scan_model(name, self.root / name, self.root)

    def _scan_entry(self, entry: ModelEntry) -> ModelFolder:
        folder = Path(entry.base_path)
        model = self._scan_model(entry.name, folder, folder) if folder.is_dir() else None
        if model is None:
            reason = "no version folder in base_path" if folder.is_dir() else "base_path is not a folder"
            return ModelFolder(entry.name, folder, error=reason)
        if model.config is not None:
            changes: dict[str, object] = {}
            if entry.version_policy is not None:
                changes["version_policy"] = entry.version_policy
            if entry.labels is not None:
                changes["labels"] = entry.labels
            model.config = msgspec.structs.replace(model.config, **changes)
        return model

    def _scan_model(self, name: str, folder: Path, root: Path) -> ModelFolder | None:
        model = ModelFolder(name, folder)
        if not is_model_name(name):
            model.error = fault_text("name", name, f"text matching {MODEL_NAME.pattern}")
            return model
        try:
            numbered = _numbered_folders(folder)
            if not numbered and not (folder / CONFIG_FILE).exists():
                return None
            if not _inside(folder, root):
                model.error = "the folder is a link that leads out of the repository"
                return model
            model.config = self._config(folder, numbered, root)
            _fill_versions(model, numbered, root)
        except ConfigError as fault:
            model.error = str(fault)
        except OSError as fault:
            model.error = f"the folder cannot be read: {fault.strerror}"
        return model

    def _config(self, folder: Path, numbered: Mapping[int, Path], root: Path) -> ModelConfig:
        path = folder / CONFIG_FILE
        if not path.exists():
            if any((child / MODEL_FILES["onnx"]).exists() for child in numbered.values()):
                return parse_model_config({"backend": "onnx"}, "model_defaults", self.defaults)
            raise ConfigError(f"no {CONFIG_FILE}, and no version folder holds a {MODEL_FILES['onnx']}")
        if not _inside(path, root):
            raise ConfigError(f"{CONFIG_FILE} is a link that leads out of the repository")
        known = self._parsed.get(path)
        stamp = _stamp(path)  # before reading, so that a change while reading is seen next time
        if known is not None and known[0] == stamp:
            return known[1]
        written = parse_model_config(read_yaml(path, CONFIG_FILE), CONFIG_FILE, self.defaults)
        config = _with_class_labels(written, folder, root)
        if isinstance(written.class_labels, list):  # a label file is read again each time: it is small
            self._parsed[path] = (stamp, config)
        return config


def repository_root(repository: str) -> Path | None:
    """The folder the `repository` setting names; None when it names none."""
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


def _fill_versions(model: ModelFolder, numbered: Mapping[int, Path], root: Path) -> None:
    assert model.config is not None
    file_name = MODEL_FILES[model.config.backend]
    for number, folder in sorted(numbered.items()):
        file = folder / file_name
        if not file.is_file():
            model.notes.append(f"version {number}: no {file_name}")
        elif not (_inside(folder, root) and _inside(file, root)):
            model.notes.append(f"version {number}: a link leads out of the repository")
        else:
            model.versions[number] = VersionFolder(number, folder.resolve(), _stamp(file))


def _with_class_labels(config: ModelConfig, folder: Path, root: Path) -> ModelConfig:
    if isinstance(config.class_labels, list):
        return config
    file = folder / config.class_labels
    if not _inside(file, root):
        raise ConfigError(
            fault_text(f"{CONFIG_FILE}: class_labels", config.class_labels, "a file beside model.yaml")
        )
    lines = read_text(file, f"class_labels {config.class_labels}").splitlines()
    return msgspec.structs.replace(config, class_labels=lines)


def _inside(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
