"""Model folders on disk and hooks that only keep a record: what the repository's tests share."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.repository import Repository
from fastserve.repository.version import Attachment, Version
from fastserve.settings import RepositorySettings

BASE: dict[str, Any] = {
    "backend": "python",
    "inputs": {"x": {"dtype": "float32", "shape": [4]}},
    "outputs": {"y": {"dtype": "float32", "shape": [3]}},
}


SIZE = 64 << 20
"""Memory that a version takes."""
LOADED: Attachment[bool] = Attachment()


class RecordingHooks:
    """Hooks that load nothing. `failing` holds (model, number) whose load fails."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.failing: set[tuple[str, int]] = set()
        self.gates: dict[tuple[str, int], asyncio.Event] = {}
        self.sizes: dict[str, int] = {}  # bytes of a version, SIZE where it is not listed
        self.used: set[str] = set()  # models with requests under way
        self.last_used: dict[str, float] = {}

    async def load(self, version: Version) -> None:
        key = (version.model, version.number)
        self.events.append(("load", *key))
        if key in self.gates:
            await self.gates[key].wait()
        await asyncio.sleep(0)
        if key in self.failing:
            raise ServeError(Kind.INTERNAL, "the model says no")
        LOADED.put(version, True)

    def memory_bytes(self, versions: Sequence[Version]) -> list[int]:
        return [self.sizes.get(version.model, SIZE) for version in versions]

    def in_use(self, version: Version) -> bool:
        return version.model in self.used

    def last_used_s(self, version: Version) -> float:
        return self.last_used.get(version.model, 0.0)

    async def unload(self, version: Version) -> None:
        self.events.append(("unload", version.model, version.number))
        await asyncio.sleep(0)
        LOADED.drop(version)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A repository over a temporary folder, with its catalog, hooks and clock."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.catalog = Catalog()
        self.hooks = RecordingHooks()
        self.clock = Clock()
        given = {"repository": str(root), "model_control": "none", **settings}
        self.repository = Repository(RepositorySettings(**given), self.catalog, self.hooks, self.clock)

    def served(self, name: str) -> list[int]:
        model = self.catalog.models.get(name)
        return [] if model is None else [version.number for version in model.available()]


def replace(path: Path, text: str) -> None:
    """Write a file by renaming, as the documentation asks: whoever polls it never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(".new")
    new.write_text(text)
    os.replace(new, path)


def write_config(root: Path, name: str, **changes: Any) -> None:
    replace(root / name / "model.yaml", yaml.safe_dump({**BASE, **changes}))


def write_version(root: Path, name: str, number: int | str, text: str = "class Model: pass\n") -> None:
    replace(root / name / str(number) / "model.py", text)


def remove_version(root: Path, name: str, number: int) -> None:
    shutil.rmtree(root / name / str(number))
