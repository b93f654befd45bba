"""The one registry of client shared memory, as V1 asks for it: both Triton dialects show the same regions."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from fastserve.dialects.kserve_v2 import Regions
from fastserve.dialects.kserve_v2.regions import Destination, Range, Region
from fastserve.dialects.triton_v1.header import SharedPlace


class Places:
    """Raises what the registry raises."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self._regions.register(name, key, offset, byte_size)

    def unregister(self, name: str) -> None:
        if name:  # for the registry no name is every name
            self._regions.unregister(name)

    def unregister_all(self) -> None:
        self._regions.unregister()

    def regions(self) -> Iterable[Region]:
        return self._regions.list()

    def read(self, place: SharedPlace) -> bytes:
        return self._regions.read(_range(place))

    def read_into(self, place: SharedPlace, memory: memoryview) -> None:
        self._regions.read_into(_range(place), memory)

    def hold(self, place: SharedPlace) -> AbstractContextManager[Destination]:
        return self._regions.holding(_range(place))


def _range(place: SharedPlace) -> Range:
    return Range(place.name, place.offset, place.byte_size)
