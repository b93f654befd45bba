"""A Python model of several files: model.py as a module of the package that its version's folder is.

NAME/config.pbtxt      NAME/beside.py          import beside
NAME/1/model.py        NAME/1/helper.py        from .helper import F        import helper
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def import_from(folder: Path, filename: str) -> ModuleType:
    """The module of a .py file in a version's folder. Raises what the module raises.

    The package has the folder's name, as there: what a model pickles is found by its own subprocesses.
    """
    package = folder.name
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]  # of another model in this process, whose version has the same number
    init = folder / "__init__.py"
    if init.is_file():
        _execute(package, init, [str(folder)])
    else:
        sys.modules[package] = _bare_package(package, folder)
    return _execute(f"{package}.{Path(filename).stem}", folder / filename)


def _bare_package(name: str, folder: Path) -> ModuleType:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return module_from_spec(spec)


def _execute(name: str, path: Path, locations: list[str] | None = None) -> ModuleType:
    spec = spec_from_file_location(name, path, submodule_search_locations=locations)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
