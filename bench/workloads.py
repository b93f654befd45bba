"""What is measured: one model, one row, one request body each, and what the issue asks of the server.

Both servers run the same model files (bench/repository), so a difference between them is never a
difference of model, and a reply is checked against the model in this process before any load is sent.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).parent / "repository"
ROW_ITEMS = {"tiny": 4, "mlp": 784, "image": 3 * 224 * 224, "batch": 1}
MAX_BATCH_ROWS = 200  # of the model `batch`, as in its model.yaml
BATCH_DELAY_S = 0.010


@dataclass(frozen=True)
class Workload:
    """`least` and `aim` are ratios to the reference server, or to `bound` (rows a second) where given."""

    name: str
    model: str
    least: float
    aim: float
    raw: bool = False  # the body is the row's bytes, not JSON
    connections: int = 32
    bound: float = 0.0

    @property
    def path(self) -> str:
        return f"/v1/models/{self.model}:predict"

    @property
    def content_type(self) -> str:
        return "application/octet-stream" if self.raw else "application/json"


BATCH_BOUND = MAX_BATCH_ROWS / (0.001 * math.log(MAX_BATCH_ROWS + 1))
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny", "tiny", least=0.7, aim=1.0),
        Workload("mlp", "mlp", least=2.0, aim=3.0),
        Workload("image", "image", least=3.0, aim=5.0),
        Workload("imagebin", "image", least=0.7, aim=1.0, raw=True),
        Workload("batch", "batch", least=0.75, aim=0.9, connections=200, bound=BATCH_BOUND),
    )
}


def load_model(name: str) -> Any:
    """The model of bench/repository, in this process. Its `apply` takes and gives one array."""
    path = REPOSITORY / name / "1" / "model.py"
    spec = importlib.util.spec_from_file_location(f"bench_model_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model({})


def row(model: str) -> np.ndarray:
    """The one row every request of this model carries: float32 [items]."""
    if model == "batch":
        return np.array([3.0], np.float32)
    return np.random.default_rng(7).random(ROW_ITEMS[model], dtype=np.float32)


def body(workload: Workload, *, doubles: bool = False) -> bytes:
    """`doubles` prints numbers as Python clients do after widening: 16 to 17 digits, not 6 to 9."""
    values = row(workload.model)
    if workload.raw:
        return values.astype("<f4").tobytes()
    texts = [repr(float(v)) for v in values] if doubles else [str(v) for v in values]
    return row_body(texts)


def row_body(numbers: list[str]) -> bytes:
    """One row in TF Serving's row format, of numbers that are text already."""
    return ('{"instances": [[' + ", ".join(numbers) + "]]}").encode()


def expected(model: str) -> np.ndarray:
    return load_model(model).apply(row(model)[None])[0]
