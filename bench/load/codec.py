"""JSON <-> float32 in one process: the compiled reader and writer against orjson + numpy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import orjson

from bench.workloads import row_body
from fastserve._ext.json_reader import PredictReader
from fastserve._ext.json_writer import MODE_SHORTEST, MODE_TFS, RowWriter
from fastserve.tensor import DTYPES

ITEMS = 3 * 224 * 224
FLOAT32 = DTYPES["float32"].code
REPEATS = 15


@dataclass(frozen=True)
class Codec:
    """Median seconds for 150528 numbers, theirs and ours, and the size of the JSON."""

    name: str
    theirs_s: float
    ours_s: float
    body_bytes: int

    @property
    def ratio(self) -> float:
        return self.theirs_s / self.ours_s

    @property
    def reads(self) -> bool:
        return self.name.startswith("read")

    @property
    def aim(self) -> float:
        """The ratio at which reading reaches 1 GB/s, writing 15 ns a number."""
        aim_s = self.body_bytes / 1e9 if self.reads else 15e-9 * ITEMS
        return self.theirs_s / aim_s

    @property
    def gb_per_s(self) -> float:
        return self.body_bytes / self.ours_s / 1e9

    @property
    def ns_per_number(self) -> float:
        return self.ours_s / ITEMS * 1e9


def median_s(*calls: Callable[[], object]) -> list[float]:
    """Medians of calls that take turns, so that a slow moment of the machine meets all of them."""
    spans: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, span in zip(calls, spans, strict=True):
            began = time.perf_counter()
            call()
            span.append(time.perf_counter() - began)
    return [statistics.median(span) for span in spans]


def reading(name: str, texts: list[str]) -> Codec:
    body = row_body(texts)
    out = np.zeros(ITEMS, np.float32)
    reader = PredictReader([("x", FLOAT32)], b"serving_default", is_default=True)

    def theirs() -> np.ndarray:
        return np.array(orjson.loads(body)["instances"], np.float32)

    def ours() -> None:
        assert reader.read_into(body, out, (ITEMS,), 1) == 0

    theirs_s, ours_s = median_s(theirs, ours)
    # Through a double or straight from the decimal text: both count as correctly rounded.
    np.testing.assert_allclose(out, theirs()[0], rtol=1.2e-7)
    return Codec(name, theirs_s, ours_s, len(body))


def writing(name: str, mode: int) -> Codec:
    values = np.random.default_rng(7).random((1, ITEMS), dtype=np.float32)
    writer = RowWriter("y", FLOAT32, (ITEMS,), mode)

    def theirs() -> bytes:
        return orjson.dumps({"predictions": values}, option=orjson.OPT_SERIALIZE_NUMPY)

    def ours() -> bytes:
        return writer.write(values, 1)

    theirs_s, ours_s = median_s(theirs, ours)
    written = np.array(orjson.loads(ours())["predictions"], np.float32)
    np.testing.assert_allclose(written, values, rtol=1e-5)
    return Codec(name, theirs_s, ours_s, len(ours()))


def codecs() -> list[Codec]:
    values = np.random.default_rng(7).random(ITEMS, dtype=np.float32)
    return [
        reading("read, 8-9 digits", [str(v) for v in values]),
        reading("read, 16-17 digits", [repr(float(v)) for v in values]),
        writing("write, TF Serving text", MODE_TFS),
        writing("write, shortest text", MODE_SHORTEST),
    ]
