"""What models may claim of each GPU's memory, together: the sum of their `device_memory_mb`.

A load that does not fit fails with words before any worker begins; what a worker then takes is held to its
claim by its framework. Models that claim nothing are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastserve.devices.found import Device
from fastserve.errors import Kind, ServeError
from fastserve.repository.placement import Place


class DeviceBudget:
    """`share` of every device is there for claims."""

    def __init__(self, devices: Callable[[], Sequence[Device]], share: float = 1.0) -> None:
        self._devices, self._share = devices, share
        self._taken: dict[int, int] = {}

    def take(self, places: Sequence[Place]) -> None:
        """Raises ServeError RESOURCE_EXHAUSTED, having taken nothing."""
        wanted = _sums(places)
        for gpu, nbytes in wanted.items():
            device, taken = self._devices()[gpu], self._taken.get(gpu, 0)
            most = int(device.memory_bytes * self._share)
            if taken + nbytes > most:
                raise ServeError(
                    Kind.RESOURCE_EXHAUSTED,
                    f"its workers claim {nbytes >> 20} MB of {device.title} (device_memory_mb), of whose "
                    f"{most >> 20} MB for models {taken >> 20} are claimed already (device_memory_share)",
                )
        for gpu, nbytes in wanted.items():
            self._taken[gpu] = self._taken.get(gpu, 0) + nbytes

    def give_back(self, places: Sequence[Place]) -> None:
        """What `take` took for them."""
        for gpu, nbytes in _sums(places).items():
            self._taken[gpu] -= nbytes


def _sums(places: Sequence[Place]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for place in places:
        if place.bytes:
            sums[place.gpu] = sums.get(place.gpu, 0) + place.bytes
    return sums
