"""The backend of the batching library: a user's VectorTransformer, in a worker process.

    elements --preprocess--> x --transform--> y --postprocess--> results, one for each element

The class reaches the worker by name: module and qualified name, or the script for classes of
`__main__`. Its constructor's arguments travel as plain values (codec/wireable).
"""

from __future__ import annotations

import sys
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fastserve.backends.base import read_specs
from fastserve.codec.wireable import decode

BACKEND = "fastserve.backends.transformer:TransformerBackend"
SCRIPT = "__fastserve_main__"


class VectorTransformer(metaclass=ABCMeta):
    """A vectorized function that runs in its own process. Subclass it and define `transform`.

    Arguments of `__init__` come from `worker_init_kwargs` and are plain values. `preprocess` gets the
    batch as a list of elements (with `row` set on the service: as one array, rows first), `transform`
    what preprocess returned, `postprocess` both; the last result holds one item for each element.
    An exception fails every element of the batch; an item that is an exception fails its element only.
    """

    def preprocess(self, x: Any) -> Any:
        """Prepare a batch for `transform`; as it is by default."""
        return x

    @abstractmethod
    def transform(self, x: Any) -> Any:
        """The vectorized function."""
        raise NotImplementedError

    def postprocess(self, pre: Any, trans: Any) -> Any:
        """What goes back to the main process; what `transform` returned by default."""
        return trans


class StartedWhileImported(BaseException):
    """A script without an `if __name__ == "__main__"` guard reached its own start() while a worker
    imported it: everything the worker needs stands above that line."""


class ScriptImport:
    """Whether this process is a worker that imports the user's script right now."""

    running = False


class TransformerBackend:
    """Holds the transformer; the worker's runner for elements calls `apply`."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self._config = config
        self._transformer: Any = None

    def load(self) -> None:
        """Import the class and construct it. Raises whatever either raises."""
        wanted = self._config["transformer"]
        kind: Any = _import_module(wanted["module"], wanted["script"])
        for name in wanted["qualname"].split("."):
            kind = getattr(kind, name)
        self._transformer = kind(**decode(bytes.fromhex(wanted["init_kwargs"])))

    def apply(self, batch: Any) -> Any:
        """One batch through the three steps."""
        transformer = self._transformer
        pre = transformer.preprocess(batch)
        return transformer.postprocess(pre, transformer.transform(pre))

    def run(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Not a model of tensors: the runner for elements calls `apply`."""
        raise TypeError("a transformer runs elements, not tensors")

    def close(self) -> None:
        """Call the transformer's own `close`, if it has one."""
        close = getattr(self._transformer, "close", None)
        if callable(close):
            close()


def _import_module(name: str, script: str) -> ModuleType:
    if not script:
        return import_module(name)
    spec = spec_from_file_location(SCRIPT, script)
    if spec is None or spec.loader is None:
        raise ImportError("the script that defines the transformer cannot be imported")
    module = module_from_spec(spec)
    sys.modules[SCRIPT] = module
    ScriptImport.running = True
    try:
        spec.loader.exec_module(module)
    except StartedWhileImported:
        pass  # see there
    finally:
        ScriptImport.running = False
    return module
