"""The number of front processes where the settings say `auto`, in one place.

    front processes = cores - cores of the workers, from 1 to 16

Cores are those that the process may use: its affinity, and the CPU quota of its container. A worker needs
`threads` of them (one where that is 0, the library's choice, and one beside a GPU), each instance of each
version that is served from the start; workers that share a process need the most that one of them does.
More than sixteen have to be asked for by number: each takes memory, and few models need as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from fastserve.repository.layout import Layout, ModelFolder
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.version import wanted_versions
from fastserve.settings import Settings
from fastserve.util.cpus import usable_cores

MOST_AUTO = 16


@dataclass(frozen=True)
class FrontCount:
    """The settings with a number of front processes, and the reason for it; "" where they name it."""

    settings: Settings
    reason: str = ""


def size_fronts(settings: Settings, cores: int | None = None) -> FrontCount:
    """Return the settings with `frontends` worked out where it is auto."""
    if settings.frontends != "auto":
        return FrontCount(settings)
    folders = _find_models(settings)
    needs_one = _needs_one(settings)
    if needs_one:
        return _count(settings, 1, f"{needs_one} is kept in one")
    cores = usable_cores() if cores is None else cores
    taken = max(1, sum_workers(folders))
    count = min(max(1, cores - taken), MOST_AUTO)
    most = f", at most {MOST_AUTO}" if cores - taken > MOST_AUTO else ""
    return _count(settings, count, f"{_cores(cores)} less {taken} for workers{most}")


def _count(settings: Settings, fronts: int, why: str) -> FrontCount:
    processes = "1 front process" if fronts == 1 else f"{fronts} front processes"
    return FrontCount(
        msgspec.structs.replace(settings, frontends=fronts), f"frontends auto: {processes}, {why}"
    )


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def sum_workers(folders: Iterable[ModelFolder]) -> int:
    """Return the cores that the workers of these models need."""
    alone, shared = 0, dict[tuple[str, int], int]()
    for folder in folders:
        for number in wanted_versions(_config(folder).version_policy, folder.versions):
            config = folder.config_of(number)
            if config.options.ensemble is not None:
                continue
            each = 1 if config.places else max(1, config.threads)
            if not config.shared_worker:
                alone += config.instances * each
                continue
            for instance in range(config.instances):
                key = config.shared_worker, instance
                shared[key] = max(shared.get(key, 0), each)
    return alone + sum(shared.values())


def _config(folder: ModelFolder) -> ModelConfig:
    assert folder.config is not None
    return folder.config


def _find_models(settings: Settings) -> list[ModelFolder]:
    """Return the models that are loaded at the start; a folder that cannot be read is reported by that."""
    try:
        found: Mapping[str, ModelFolder] = Layout(settings).scan()
    except OSError:
        return []
    every = "*" in settings.load_models or (not settings.load_models and settings.model_control != "explicit")
    return [
        folder
        for name, folder in found.items()
        if folder.config is not None and not folder.error and (every or name in settings.load_models)
    ]


def _needs_one(settings: Settings) -> str:
    """Return the setting that one front process alone can serve; "" for none."""
    return "in_process" if settings.in_process else ""
