"""Writes the models of a script as a repository: a folder for each, with a model.yaml.

    greet/model.yaml    backend: script_json, parameters: {script: {file: /home/me/app.py, ...}}
    greet/1/

A server reads its models from there, as any others. `copy_app` makes a repository that can be moved: the
script's folder is copied into each version.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fastserve.app.script_operations import paths_of
from fastserve.backends.script.declaration import BACKENDS, ScriptModel
from fastserve.errors import ConfigError
from fastserve.settings.config_files import read_yaml

CONFIG_FILE = "model.yaml"
MOST_FILES = 10_000
APP_LINES = tuple(f"backend: {name}\n".encode() for name in BACKENDS.values())
"""A model of a script has one of these in its model.yaml."""
SKIPPED = {"__pycache__", "node_modules", "venv"}


def by_name(models: Iterable[ScriptModel]) -> dict[str, list[ScriptModel]]:
    """Return the versions of each model. Raises ConfigError where they are not alike."""
    found: dict[str, list[ScriptModel]] = {}
    for one in models:
        found.setdefault(one.name, []).append(one)
    for name, versions in found.items():
        first = versions[0]
        for other in versions[1:]:
            alike = (other.kind, other.inputs, other.outputs, other.options, other.uses)
            if alike != (first.kind, first.inputs, first.outputs, first.options, first.uses):
                raise ConfigError(
                    f"{name}: version {other.version} differs from {first.version} in its types"
                )
    if not found:
        raise ConfigError("the script declares no model: put @fastserve.model before a function or a class")
    return found


def configs_of(models: Iterable[ScriptModel], file: Path, stamp: str = "") -> dict[str, dict[str, Any]]:
    """Return the fields of model.yaml of each model. Raises ConfigError."""
    configs = {}
    found = by_name(models)
    check_uses({name: versions[0].uses for name, versions in found.items()})
    for name, versions in found.items():
        paths = {str(one.version): one.path for one in versions}
        types = {str(one.version): found for one in versions if (found := one.types())}
        config = versions[0].config(str(file), paths, stamp, types)
        if len(versions) > 1:
            config.setdefault("version_policy", "all")
        configs[name] = config
    return configs


def check_uses(uses: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a model that calls one that there is not, or itself by a circle of calls: its
    workers would wait for one another."""
    for name, used in uses.items():
        for other in used:
            if other not in uses:
                raise ConfigError(f"{name}: uses: there is no model {other!r}, allowed: {', '.join(uses)}")
    done: set[str] = set()
    for first in uses:
        way, left = [first], [iter(uses[first])]
        while left:
            following = next((one for one in left[-1] if one not in done), None)
            if following is None:
                done.add(way.pop())
                left.pop()
            elif following in way:
                circle = [*way[way.index(following) :], following]
                raise ConfigError(f"{following}: uses: a circle of calls: {' -> '.join(circle)}")
            else:
                way.append(following)
                left.append(iter(uses[following]))


def list_paths(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return path -> NAME, or NAME/VERSION. Raises ConfigError for a path that two models have."""
    found: dict[str, str] = {}
    for name, config in configs.items():
        numbered = {int(number): path for number, path in _paths_of(config).items()}
        for path, target in paths_of(numbered, name):
            other = found.setdefault(path, target)
            if other != target:
                raise ConfigError(f"path: {path} is given to {other} and {target}")
    return found


def _paths_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the number of each version, as text -> its path."""
    paths: dict[str, str] = config["parameters"]["script"]["paths"]
    return paths


def write_models(configs: Mapping[str, Mapping[str, Any]], root: Path) -> None:
    """Make `root` the repository of these models: others of it are removed, equal ones stay as they are."""
    for name, config in configs.items():
        for number in _paths_of(config):
            (root / name / number).mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        place = root / name / CONFIG_FILE
        if not place.exists() or place.read_text() != text:
            beside = place.with_suffix(".new")
            beside.write_text(text)
            os.replace(beside, place)
    for folder in [*root.iterdir(), *root.glob("*/[0-9]*")]:
        script = configs.get(folder.name if folder.parent == root else folder.parent.name)
        gone = script is None or (folder.parent != root and folder.name not in _paths_of(script))
        if gone and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def read_apps(root: Path) -> dict[str, dict[str, Any]]:
    """Return the configurations of a repository's models that are of scripts. One that cannot be read is left
    out: the server says why when it loads it."""
    found = {}
    for file in sorted(root.glob(f"*/{CONFIG_FILE}")):
        with contextlib.suppress(OSError, ConfigError):
            if any(line in file.read_bytes() for line in APP_LINES):
                config = read_yaml(file, CONFIG_FILE)
                if isinstance((config.get("parameters") or {}).get("script"), Mapping):
                    found[file.parent.name] = config
    return found


def copy_app(models: Iterable[ScriptModel], file: Path, root: Path) -> None:
    """Write a repository that needs the script no more: each version has the files of its folder. Raises
    ConfigError for a folder that holds something already."""
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"{root.name} is not empty")
    configs = configs_of(models, Path(file.name))
    root.mkdir(parents=True, exist_ok=True)
    write_models(configs, root)
    inside = root.resolve()
    for name, config in configs.items():
        for number in _paths_of(config):
            for source in app_files(file):
                if not source.resolve().is_relative_to(inside):
                    target = root / name / number / source.relative_to(file.parent)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, target)


def app_files(file: Path) -> list[Path]:
    """Return the script and the Python files in its folder and below, hidden folders and environments left
    out."""
    found = [file]
    for folder, folders, names in os.walk(file.parent):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in SKIPPED and not (here / name / "pyvenv.cfg").exists()
        )
        found += [here / name for name in sorted(names) if name.endswith(".py") and here / name != file]
        if len(found) > MOST_FILES:
            break
    return found[:MOST_FILES]


def stamp_app(file: Path) -> str:
    """Return a text that changes with the app's files."""
    digest = hashlib.sha256()
    for one in app_files(file):
        try:
            found = one.stat()
        except OSError:  # it was removed meanwhile
            continue
        digest.update(f"{one}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
