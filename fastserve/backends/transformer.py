"""The backend of the batching library: a user's VectorTransformer, in a worker process.

    elements --preprocess--> x --transform--> y --postprocess--> results, one for each element

The class reaches the worker by name: module and qualified name, or the script for classes of
`__main__`, or its source where that has no file (class_source). Its constructor's arguments travel as
plain values (codec/safe_msgpack).
"""

from __future__ import annotations

import re
import sys
from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from fastserve.backends.base import read_specs
from fastserve.backends.class_source import run_source
from fastserve.backends.frameworks.python import CopyOnWrite
from fastserve.codec.object_codecs import CODECS
from fastserve.codec.safe_msgpack import SCRIPT
from fastserve.tensor import DTYPES, TensorSpec

DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
BACKEND = "fastserve.backends.transformer:TransformerBackend"


class VectorTransformer(metaclass=ABCMeta):
    """A vectorized function that runs in its own process. Subclass it and define `transform`.

    Arguments of `__init__` come from `worker_init_kwargs` and are plain values. `preprocess` gets the
    batch as a list of elements (with `row` set on the service: as one array, rows first), `transform`
    what preprocess returned, `postprocess` both; the last result holds one item for each element.
    An exception fails every element of the batch; an item that is an exception fails its element only.
    With `device_tensors` set on the service `preprocess` gets a tensor of `device`, and a tensor that comes
    out is brought back.
    """

    device = "cpu"
    """The device of the service; set before `__init__` is called."""

    def preprocess(self, x: Any) -> Any:
        """Prepare a batch for `transform`; returns it unchanged by default."""
        return x

    @abstractmethod
    def transform(self, x: Any) -> Any:
        """Compute a batch: the vectorized function."""
        raise NotImplementedError

    def postprocess(self, pre: Any, trans: Any) -> Any:
        """Return the results for the main process; by default what `transform` returned."""
        return trans


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Shape and dtype of the numpy rows of a batching service, checked once."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, shape: int | Iterable[int], dtype: Any) -> RowSpec:
        """Read a user's shape and dtype, of any form that numpy takes. Raises ValueError."""
        import numpy as np

        name = np.dtype(dtype).name
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        if name not in DTYPES or name == "bytes":
            raise ValueError(f"a row of {name} cannot lie in a column; numeric dtypes can")
        if any(n < 1 for n in lengths):
            raise ValueError(f"a row's axes have lengths from 1, not {lengths}")
        return cls(lengths, name)

    @property
    def spec(self) -> TensorSpec:
        """The row as a tensor spec, without a batch axis."""
        return TensorSpec("row", DTYPES[self.dtype], self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * DTYPES[self.dtype].item_bytes

    def pack(self, x: Any) -> memoryview:
        """Return the bytes of one row, without a copy of a matching array. Raises ValueError for any other
        shape."""
        import numpy as np

        row = np.ascontiguousarray(x, self.dtype).reshape(np.shape(x))
        if row.shape != self.shape:
            raise ValueError(f"an element has shape {row.shape}, the service takes {self.shape}")
        return memoryview(row.reshape(-1).view(np.uint8))

    def unpack(self, data: bytes) -> Any:
        """Return the row as an array over `data`."""
        import numpy as np

        return np.frombuffer(data, self.dtype).reshape(self.shape)


class StartedWhileImported(BaseException):
    """A script without an `if __name__ == "__main__"` guard reached its own start() while a worker imported
    it. Everything that the worker needs stands above that line."""


class ScriptImport:
    """Whether this process is a worker that is importing the user's script."""

    running = False


class TransformerBackend:
    """Runs a VectorTransformer; the worker's runner for elements calls `apply`."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self._config = config
        self._device = str(config.get("device") or "cpu")
        self._tensors = bool(config.get("device_tensors"))
        self._place: Any = None
        self._transformer: Any = None
        self._steps = CopyOnWrite(self._three_steps)

    def load(self) -> None:
        """Import the class and construct it. Raises whatever either raises."""
        wanted = self._config["transformer"]
        kind: Any
        if wanted["source"]:
            kind = run_source(wanted["source"])
        else:
            kind = _import_module(wanted["module"], wanted["script"])
        for name in wanted["qualname"].split("."):
            kind = getattr(kind, name)
        self.construct(kind, CODECS[wanted["transport"]].decode(bytes.fromhex(wanted["init_kwargs"])))

    def construct(self, kind: type[VectorTransformer], init_kwargs: Mapping[str, Any]) -> None:
        """Make the transformer. Raises whatever its constructor raises."""
        if self._tensors:
            from fastserve.backends.frameworks.torch_tensors import device_of, import_torch, open_device

            self._place = open_device(import_torch(), device_of(self._config))
        self._transformer = kind.__new__(kind)
        self._transformer.device = self._device
        self._transformer.__init__(**init_kwargs)

    def apply(self, batch: Any) -> Any:
        """Run one batch through the three steps."""
        found = self._steps(self._carried(batch) if self._tensors else batch)
        return found.detach().cpu().numpy() if self._tensors and hasattr(found, "detach") else found

    def _three_steps(self, batch: Any) -> Any:
        pre = self._transformer.preprocess(batch)
        return self._transformer.postprocess(pre, self._transformer.transform(pre))

    def _carried(self, rows: Any) -> Any:
        """Copy rows of shared memory into a tensor of the device. A CPU's are copied too, as a view could be
        kept."""
        from fastserve.backends.frameworks.torch_tensors import over_memory

        return over_memory(rows).to(self._place, copy=True)

    def run(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raise TypeError: the runner for elements calls `apply`."""
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
