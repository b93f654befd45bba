"""A request on the general path some of whose tensors may be in client memory, in files or on GPUs.

hold     room for outputs, looked up before the model runs
bring    inputs on GPUs: left to the workers, or their bytes are here when it returns
close    in any case; what was put into rooms is flushed before
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from fastserve.request import InferRequest, Lent
from fastserve.serving.rooms import Rooms
from fastserve.serving.service import DialectService
from fastserve.serving.shared_memory import Range, hold_rooms
from fastserve.serving.slow_path import SlowRequest
from fastserve.tensor import Tensor


class RegionRequest(SlowRequest):
    """One request. `rooms` hold its outputs, by name."""

    def __init__(self, service: DialectService) -> None:
        self.service, self.rooms = service, Rooms()

    @abstractmethod
    def check_strings(self, name: str, tensor: Tensor) -> None:
        """Look at the strings of an input whose bytes lay on a GPU. Raises ServeError."""

    def hold(self, ranges: Mapping[str, Range]) -> None:
        """Room for outputs, where their client wants them. Raises ServeError."""
        self.rooms = hold_rooms(self.service.regions, ranges)

    async def bring(self, request: InferRequest, outside: Mapping[str, Lent]) -> None:
        """See to it that the tensors of a checked request reach its model. `outside`: inputs on GPUs, whose
        strings can be looked at only now. Raises ServeError."""
        await self.service.regions.bring(self.version, request, outside, self.rooms)
        for name in outside:
            if not request.inputs[name].dtype.item_bytes:
                self.check_strings(name, request.inputs[name])

    def close(self) -> None:
        self.rooms.close()
