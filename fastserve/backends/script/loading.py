"""Runs a script for the models it declares, by the path of its file.

`fastserve.serve()` in a script that is run so ends it: what stands after that line is for the process that
serves. The script's folder comes first on sys.path, and it is a module of its file's name, so that files
beside it import one another.
"""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from fastserve.backends.script.declaration import ScriptModel, declared, forget_declared
from fastserve.errors import ConfigError

_turn = threading.Lock()  # workers that share a process load one after the other
_running = False
_stamps: dict[Path, str] = {}  # of each folder, with which its script was last run


class ScriptEnd(BaseException):
    """Raised by `serve` to end a script that is run for its declarations. Not an Exception: no handler of the
    script's own is meant."""


def end_script() -> None:
    """End the script, where it is run for its declarations. Raises ScriptEnd."""
    if _running:
        raise ScriptEnd


def load_script(file: Path, stamp: str = "") -> list[ScriptModel]:
    """Return the models that a script declares; with another stamp than before its modules are imported anew.
    Raises ConfigError, and what the script raises."""
    global _running
    if not file.is_file():
        raise ConfigError(f"there is no file {file.name}")
    with _turn:
        forget_declared()
        sys.dont_write_bytecode = True  # folders of scripts are watched for changes
        folder = str(file.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        _drop_changed(file.parent, stamp)
        name = file.stem if file.stem not in sys.modules else f"{file.stem}_script"
        spec = spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{file.name} is not a file that Python runs: its name must end in .py")
        module = module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and typing look their module up there
        _running = True
        try:
            spec.loader.exec_module(module)
        except ScriptEnd:
            pass
        finally:
            _running = False
        return declared()


def _drop_changed(folder: Path, stamp: str) -> None:
    """Forget the imported modules of a folder where its script was run with another stamp before. Packages
    that were installed below it stay."""
    if _stamps.setdefault(folder, stamp) == stamp:
        return
    _stamps[folder] = stamp
    # Copied at once: while a list of its items is made, other threads may import.
    for name, module in sys.modules.copy().items():
        file = str(getattr(module, "__file__", None) or "")
        ours = name == "__main__" or name.partition(".")[0] == "fastserve"
        if file.startswith(f"{folder}/") and not ours and "/site-packages/" not in file:
            del sys.modules[name]
    importlib.invalidate_caches()
