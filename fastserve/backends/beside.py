"""Python files beside a model's own: imported by their plain names, as if the worker had one model.

A worker that is shared has several, and Python has one table of modules. So a name belongs to one model at a
time: a second model with a file of that name is refused, and a new version of the same model has its files
read anew. Not isolation: modules from anywhere else are everybody's.
"""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

from fastserve.errors import ConfigError

TAKEN = "{file} lies beside model {other} too, with which this one shares a worker: rename one of the two"

_folders: dict[Path, list[int]] = {}  # and the threads that opened each: one is a model's for life
_turn = threading.Lock()


def open_folder(folder: Path) -> None:
    """Files in it can be imported from now on. Raises ConfigError for names that another model has."""
    with _turn:
        mine = _names(folder)
        for other in _folders:
            both = {} if other.parent == folder.parent else mine.keys() & _names(other).keys()
            for name in both:
                raise ConfigError(TAKEN.format(file=mine[name], other=other.parent.name))
        for other in _folders:
            _drop_modules(other, mine)
        _folders.setdefault(folder, []).append(threading.get_ident())
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()  # a file that was replaced within the clock's grain is looked at


def forget_folder(folder: Path) -> None:
    """The way back; nothing for a folder that this thread has not opened."""
    with _turn:
        threads = _folders.get(folder, [])
        if threading.get_ident() not in threads:
            return
        threads.remove(threading.get_ident())
        sys.path.remove(str(folder))
        if not threads:
            del _folders[folder]
            _drop_modules(folder, _names(folder))


def _names(folder: Path) -> dict[str, str]:
    """What can be imported from it: name of the module -> name of its file or folder. A model's own file is
    imported under another name."""
    found = {}
    try:
        entries = list(folder.iterdir())
    except OSError:  # it was removed meanwhile
        return {}
    for entry in entries:
        if entry.suffix == ".py" and entry.name != "model.py":
            found[entry.stem] = entry.name
        elif entry.suffix == ".so":
            found[entry.name.partition(".")[0]] = entry.name
        elif entry.is_dir() and (entry / "__init__.py").is_file():
            found[entry.name] = entry.name
    return found


def _drop_modules(folder: Path, names: dict[str, str]) -> None:
    """Of these names, the modules that came from `folder`. Who holds one goes on with it."""
    inside = f"{folder}/"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in names and str(getattr(module, "__file__", None) or "").startswith(
            inside
        ):
            del sys.modules[name]
