"""The python backend: a class in NAME/VERSION/model.py, called with numpy arrays.

Files beside model.py import by their plain names. A shared worker has several models, and Python has one
table of modules: a name belongs to one model at a time, so a second model with a file of that name is
refused, and a new version of the same model has its files read anew. This is no isolation: modules from
anywhere else are shared.

A model may write into its inputs (`x /= 255`). Rows of a batch are read-only arrays over shared memory, since
a second run of the batch must see what was sent: after a worker's death, in parts after a failure, by halves
where memory is short. A model that fails on such an array is run once more on copies; when that succeeds it
gets copies from then on. Models that do not write pay nothing.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from opcode import opname
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import CompletedConfig, read_specs
from fastserve.backends.batch_io import OutputCheck
from fastserve.errors import ConfigError
from fastserve.settings.model_options import may_isolate

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays


TAKEN = "{file} lies beside model {other} too, with which this one shares a worker: rename one of the two"
_folders: dict[Path, list[int]] = {}  # and the threads that opened each: one is a model's for life
_turn = threading.Lock()


def open_folder(folder: Path) -> None:
    """Make the files of a version's folder importable. Raises ConfigError for names that another model
    has."""
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
    """Undo `open_folder`; nothing happens for a folder that this thread has not opened."""
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
    """Return the importable modules of a folder: module name -> name of its file or folder. A model's own
    file is imported under another name."""
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
    """Drop the modules of these names that came from `folder`. Code that holds one keeps it."""
    inside = f"{folder}/"
    # Copied at once: while a list of its items is made, other threads may import.
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] in names and str(getattr(module, "__file__", None) or "").startswith(
            inside
        ):
            del sys.modules[name]


log = logging.getLogger(__name__)

WRITES_TEXT = (
    "the model writes into its inputs: from now on it is given copies (a new array, as of `x = x / 255`, "
    "saves them)"
)


class CopyOnWrite:
    """Calls `call(inputs)`, with writable copies once the model has tried to write into its inputs.

    `again`: whether a batch may be run a second time at any time; else only until a first run has succeeded,
    which is during the version's warm-up.
    """

    __slots__ = ("_again", "_call", "_ran", "copies")

    def __init__(self, call: Callable[[Any], Any], *, again: bool = True) -> None:
        self._call, self._again, self._ran, self.copies = call, again, False, False

    def __call__(self, inputs: Any) -> Any:
        """Run a batch. Raises what the model raises."""
        if self.copies:
            return self._call(copy_arrays(inputs))
        try:
            found = self._call(inputs)
        except ValueError as error:
            if (self._ran and not self._again) or _raised_by_code(error):
                raise
            return self._on_copies(inputs, error)
        self._ran = True
        return found

    def _on_copies(self, inputs: Any, error: ValueError) -> Any:
        copies = copy_arrays(inputs)
        try:
            found = self._call(copies)
        except Exception:
            raise error from None
        self._ran = self.copies = True
        log.warning(WRITES_TEXT)
        return found


def copy_arrays(inputs: Any) -> Any:
    """Return a writable copy of the array, or of each array of a mapping."""
    if isinstance(inputs, Mapping):
        return {name: copy_arrays(array) for name, array in inputs.items()}
    return inputs.copy() if isinstance(inputs, np.ndarray) else inputs


def _raised_by_code(error: BaseException) -> bool:
    """Return whether a `raise` statement raised it. numpy refuses a write in compiled code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code.co_code
    return opname[code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


STREAMS = {"model_transaction_policy": {"decoupled": True}}
"""Completes the configuration of a model whose `run` yields (python_stream.py)."""


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
        self._run: Any = None

    def load(self) -> None:
        """Import model.py, make the model, load it and warm it up. Raises what the model raises, and
        ConfigError when the class does not fit."""
        for field in ("inputs", "outputs"):
            if not getattr(self, field):
                raise ConfigError(f"a python model must declare its {field} in model.yaml")
        self._model = open_class(self._config, self._version_dir, self._instance)
        check_run(self._model)
        if yields(self._model.run):
            if self._config.get("device_tensors"):
                raise ConfigError("device_tensors: given true, allowed: false for a run that yields")
            raise CompletedConfig(STREAMS)
        if inspect.iscoroutinefunction(self._model.run):
            raise ConfigError("run must be a plain function: a worker runs one batch at a time")
        self._run = CopyOnWrite(self._model.run, again=may_isolate(self._config))
        if self._config.get("device_tensors"):
            self._on_device = open_tensors(self._config, self.inputs, self.outputs)
        for name in ("load", "warmup"):
            getattr(self._model, name, lambda: None)()

    @property
    def takes_device_tensors(self) -> bool:
        """Whether the model asks for tensors of its device (`device_tensors`)."""
        return self._on_device is not None

    def run(self, inputs: Arrays) -> Arrays:
        """Run one batch; see Backend.run. Raises ServeError (INTERNAL) for outputs that break their
        declaration."""
        if self._on_device is not None:
            arrays: Arrays = self._on_device.run_arrays(self._model.run, inputs)
            return arrays
        return self._check(inputs, self._run(inputs))

    def run_on_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one batch of tensors of the device; see SupportsDevice."""
        found: Mapping[str, Any] = self._on_device.run(self._model.run, inputs)
        return found

    def close(self) -> None:
        """Call the model's close, if it has one."""
        model, self._model, self._run = self._model, None, None
        forget_folder(self._version_dir)
        if hasattr(model, "close"):
            model.close()
        del model
        if self._on_device is not None:
            self._on_device.close()


def open_class(config: Mapping[str, Any], version_dir: Path, instance: int) -> Any:
    """Return an instance of the model's class. Raises what the model raises, and ConfigError when the class
    does not fit."""
    factory = import_class(version_dir, str(config.get("class") or "Model"))
    check_takes_one(factory, f"class {factory.__name__!r}", "def __init__(self, config)")
    return factory(describe_model(config, version_dir, instance))


def check_run(model: Any) -> None:
    """Raise ConfigError for a model without a method run(self, inputs)."""
    if not callable(getattr(model, "run", None)):
        raise ConfigError(f"class {type(model).__name__!r} has no method run(self, inputs)")
    check_takes_one(model.run, "run", "def run(self, inputs)")


def yields(run: Any) -> bool:
    """Return whether `run` is a generator function, or an async one."""
    return inspect.isgeneratorfunction(run) or inspect.isasyncgenfunction(run)


def open_tensors(config: Mapping[str, Any], inputs: Any, outputs: Any) -> Any:
    """Return the DeviceTensors of a model. torch is first needed here. Raises ConfigError."""
    from fastserve.backends.frameworks.torch_tensors import DeviceTensors

    return DeviceTensors(config, inputs, outputs)


def import_class(version_dir: Path, wanted: str, file: str = "model.py") -> type:
    """Return the class of that name in model.py of a version's folder. Raises ConfigError where there is
    none, and what the file raises."""
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
    """Return the config that a model's class is made with; see docs/writing-a-backend.md."""
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


def check_takes_one(called: Any, name: str, form: str) -> None:
    """Raise ConfigError for a callable that does not take one argument. The TypeError of a call could not say
    whose fault it is."""
    try:
        inspect.signature(called).bind(None)
    except TypeError as fault:
        raise ConfigError(f"{name} must take one argument: {form} ({fault})") from None
    except ValueError:  # nothing is known of a class that is compiled
        return
