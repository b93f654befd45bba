"""A numpy row as the batching library declares it: shape and dtype, checked once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from fastserve.tensor import DTYPES, TensorSpec


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Every element is one such row."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, shape: int | Iterable[int], dtype: Any) -> RowSpec:
        """From what a user writes: a shape and anything numpy takes for a dtype. Raises ValueError."""
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
        """The same as a tensor without its batch axis."""
        return TensorSpec("row", DTYPES[self.dtype], self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * DTYPES[self.dtype].item_bytes

    def pack(self, x: Any) -> memoryview:
        """The bytes of one row; such an array is not copied. Raises ValueError for anything else."""
        import numpy as np

        row = np.ascontiguousarray(x, self.dtype).reshape(np.shape(x))
        if row.shape != self.shape:
            raise ValueError(f"an element has shape {row.shape}, the service takes {self.shape}")
        return memoryview(row.reshape(-1).view(np.uint8))

    def unpack(self, data: bytes) -> Any:
        """The row as an array over `data`."""
        import numpy as np

        return np.frombuffer(data, self.dtype).reshape(self.shape)
