"""The fast path of predict gives its rows back whatever goes wrong while they are written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastserve.dialects.tfserving.hot import HotDoor
from fastserve.tensor import DTYPES, Tensor

ROW = Tensor(DTYPES["float32"], (1, 1), bytes(4))


class BatchQueue:
    """A queue whose rows cannot be had."""

    max_rows = 4

    def __init__(self) -> None:
        self.ring = self
        self.abandoned: list[tuple[int, int]] = []

    def reserve(self, rows: int) -> int:
        return 7

    def input_rows(self, place: int, rows: int, column: int) -> memoryview:
        raise OSError("no descriptor is left")

    def abandon(self, place: int, rows: int) -> None:
        self.abandoned.append((place, rows))


@pytest.mark.parametrize("start", [HotDoor.start, HotDoor.start_raw])
def test_whatever_goes_wrong_gives_the_rows_back(start: Any) -> None:
    door, queue = HotDoor.__new__(HotDoor), BatchQueue()
    door._queue = queue  # type: ignore[assignment]
    door._items, door._shape = 1, (1,)
    door._reader = SimpleNamespace(count_rows=lambda *_: 1, read_into=None)  # type: ignore[assignment]
    door._plan = SimpleNamespace(raw=SimpleNamespace(read=lambda _: ROW))  # type: ignore[assignment]
    with pytest.raises(OSError, match="no descriptor"):
        start(door, SimpleNamespace(body=b"1234"))
    assert queue.abandoned == [(7, 1)]
