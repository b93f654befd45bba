"""A backend of fastserve, whole: dense layers from a file. docs/writing-a-backend.md walks through it.

NAME/1/layers.npz    w0 [in, hidden], b0 [hidden], w1 [hidden, out], b1 [out], ...; relu between layers
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays

FILE = "layers.npz"


class Layers:
    """One version in one worker. What the model takes and gives is read from its file."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs: dict[str, TensorSpec] = {}
        self.outputs: dict[str, TensorSpec] = {}
        self._file, self._batched = version_dir / FILE, config["max_batch_size"] > 0

    def load(self) -> None:
        import numpy as np  # not before: the process that owns the workers reads this module too

        from fastserve.backends.batch_io import OutputCheck

        if not self._batched:
            raise ConfigError("max_batch_size: given 0, allowed: 1 or more with layers")
        try:
            with np.load(self._file) as file:
                numbers = range(len(file.files) // 2)
                arrays = [[file[f"{kind}{n}"].astype(np.float32) for kind in "wb"] for n in numbers]
        except FileNotFoundError:
            raise ConfigError(f"{FILE} is missing") from None
        except (OSError, ValueError, KeyError) as fault:
            raise ConfigError(f"{FILE} cannot be read: {fault}") from None
        if not arrays or any(w.shape[1:] != b.shape for w, b in arrays):
            raise ConfigError(
                f"{FILE}: given layers that do not fit, allowed: w0 [in, out] and b0 [out], and so on"
            )
        self._layers, self._relu, self._isfinite = arrays, np.maximum, np.isfinite
        float32 = DTYPES["float32"]
        self.inputs = {"x": TensorSpec("x", float32, arrays[0][0].shape[:1])}
        self.outputs = {"y": TensorSpec("y", float32, arrays[-1][1].shape)}
        self._check = OutputCheck(self.outputs, batched=True)

    def run(self, inputs: "Arrays") -> "Arrays":
        x = inputs["x"]  # [rows, in], shared memory: read-only, and valid until this returns
        if not self._isfinite(x).all():
            raise ServeError(Kind.INVALID_ARGUMENT, "x must be finite")
        for at, (weights, bias) in enumerate(self._layers):
            x = x @ weights + bias
            if at + 1 < len(self._layers):
                x = self._relu(x, 0)
        return self._check(inputs, {"y": x})

    def close(self) -> None:
        self._layers = []
