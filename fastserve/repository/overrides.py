"""Models a client brought along with a load: a config in place of the folder's, files in place of the folder.

    load NAME {config}            the folder on disk, under the client's config
    load NAME {config, file:...}  a folder of ours that holds the client's files; NAME need not be on disk

An override holds until the next load of the model. Folders stay as long as a version may run from them:
until a later load has succeeded, or the model was unloaded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fastserve.errors import ConfigError

LONGEST_PATH = 512


@dataclass(frozen=True, slots=True)
class Override:
    """`config` is a ModelConfig as JSON text; `files` are by their path inside the model's folder."""

    config: str
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldOverride:
    """What holds for a model now; `folder` is None where its folder on disk stays in use."""

    config: str
    folder: Path | None


class Overrides:
    """What holds, by model. Blocking; `close` removes every folder."""

    def __init__(self) -> None:
        self._held: dict[str, HeldOverride] = {}
        self._folders: dict[str, list[Path]] = {}  # of a model, those a version may still run from

    def of(self, name: str) -> HeldOverride | None:
        """What holds for a model, None for nothing."""
        return self._held.get(name)

    def make(self, name: str, override: Override) -> HeldOverride:
        """Write the files down. Raises ConfigError for a path that leads out of the folder."""
        if not override.files:
            return HeldOverride(override.config, None)
        places = {_place(path): data for path, data in override.files.items()}
        # Named as the model: its last parts may be told, as the place where a model raised.
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
        """From now on this holds; what held before."""
        before = self._held.pop(name, None)
        if held is not None:
            self._held[name] = held
        return before

    def tidy(self, name: str) -> None:
        """Remove a model's folders but the one that holds."""
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
