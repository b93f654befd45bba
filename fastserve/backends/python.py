"""The python backend: a class in NAME/VERSION/model.py.

    class Model:
        def __init__(self, config): ...        # read-only mapping, see docs/writing-a-backend.md
        def load(self): ...                    # optional: the slow part
        def warmup(self): ...                  # optional: after load, before the first request
        def run(self, inputs): ...             # dict of arrays -> dict of arrays
        def close(self): ...                   # optional

The file is imported under a private module name; its folder comes first on sys.path, for as long as
the backend lives, so that files beside it import plainly, early or late. Where several models share a worker
the names of such files must be one model's (beside.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fastserve.backends.base import read_specs
from fastserve.backends.beside import forget_folder, open_folder
from fastserve.backends.outputs import OutputCheck
from fastserve.errors import ConfigError

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays


class PythonBackend:
    """Runs the model's own class."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self._config = config
        self._version_dir = version_dir
        self._instance = instance
        self._batched = int(config.get("max_batch_size", 0)) > 0
        self._check = OutputCheck(self.outputs, batched=self._batched)
        self._on_device: Any = None
        self._model: Any = None

    def load(self) -> None:
        """Imports model.py, makes the model, loads and warms it up. Raises what the model raises, and
        ConfigError when the class does not fit."""
        for field in ("inputs", "outputs"):
            if not getattr(self, field):
                raise ConfigError(f"a python model must declare its {field} in model.yaml")
        factory = import_class(self._version_dir, str(self._config.get("class") or "Model"))
        must_take_one(factory, f"class {factory.__name__!r}", "def __init__(self, config)")
        self._model = factory(describe_model(self._config, self._version_dir, self._instance))
        if not callable(getattr(self._model, "run", None)):
            raise ConfigError(f"class {factory.__name__!r} has no method run(self, inputs)")
        must_take_one(self._model.run, "run", "def run(self, inputs)")
        if inspect.iscoroutinefunction(self._model.run):
            raise ConfigError("run must be a plain function: a worker runs one batch at a time")
        if self._config.get("device_tensors"):
            self._on_device = open_tensors(self._config, self.inputs, self.outputs)
        for name in ("load", "warmup"):
            getattr(self._model, name, lambda: None)()

    @property
    def takes_device_tensors(self) -> bool:
        """Whether the model asks for tensors of its device (`device_tensors`)."""
        return self._on_device is not None

    def run(self, inputs: Arrays) -> Arrays:
        """Runs one batch; see Backend.run. Raises ServeError (INTERNAL) for outputs that break their
        declaration."""
        if self._on_device is not None:
            arrays: Arrays = self._on_device.run_arrays(self._model.run, inputs)
            return arrays
        return self._check(inputs, self._model.run(inputs))

    def run_on_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same with tensors of the device, in and out."""
        found: Mapping[str, Any] = self._on_device.run(self._model.run, inputs)
        return found

    def close(self) -> None:
        """Calls the model's close, if there is one."""
        model, self._model = self._model, None
        forget_folder(self._version_dir)
        if hasattr(model, "close"):
            model.close()
        del model
        if self._on_device is not None:
            self._on_device.close()


def open_tensors(config: Mapping[str, Any], inputs: Any, outputs: Any) -> Any:
    """What brings tensors of the device to the model. torch is first needed here. Raises ConfigError."""
    from fastserve.backends.device_tensors import DeviceTensors

    return DeviceTensors(config, inputs, outputs)


def import_class(version_dir: Path, wanted: str, file: str = "model.py") -> type:
    """The class of that name in model.py of a version's folder. Raises ConfigError for none, and what the
    file raises."""
    path = version_dir / file
    if not path.is_file():
        raise ConfigError(f"the version's folder has no file {file}")
    # No __pycache__ beside the model: a repository may be read-only, and is watched for changes.
    sys.dont_write_bytecode = True
    open_folder(version_dir)
    name = f"fastserve_model_{version_dir.parent.name}_{version_dir.name}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look their module up there
    spec.loader.exec_module(module)
    factory = getattr(module, wanted, None)
    if not isinstance(factory, type):
        raise ConfigError(f"{file} has no class {wanted!r}")
    return factory


def describe_model(config: Mapping[str, Any], version_dir: Path, instance: int) -> Mapping[str, Any]:
    """What a model's class is told of itself; see docs/writing-a-backend.md."""
    version = version_dir.name
    return MappingProxyType(
        {
            "name": config.get("name") or version_dir.parent.name,
            "version": int(version) if version.isdecimal() else 0,
            "version_dir": str(version_dir),
            "instance": instance,
            "device": config.get("device") or "cpu",
            "max_batch_size": int(config.get("max_batch_size", 0)),
            "parameters": MappingProxyType(dict(config.get("parameters") or {})),
        }
    )


def must_take_one(called: Any, name: str, form: str) -> None:
    """Says it before the call would, which could not tell whose fault a TypeError is."""
    try:
        inspect.signature(called).bind(None)
    except TypeError as fault:
        raise ConfigError(f"{name} must take one argument: {form} ({fault})") from None
    except ValueError:  # nothing is known of a class that is compiled
        return
