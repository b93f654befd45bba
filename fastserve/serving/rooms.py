"""Room for outputs in clients' memory, in files and on GPUs: held while a request runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastserve.errors import Kind, ServeError, invalid
from fastserve.serving.device_regions import DeviceDestination, must_fit

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Destination:
    """Room for one output in a client's memory, good until closed."""

    __slots__ = ("_fd", "_offset", "_region", "byte_size")

    def __init__(self, region: str, fd: int, offset: int, byte_size: int) -> None:
        self._region = region
        self._fd = fd
        self._offset = offset
        self.byte_size = byte_size

    def __enter__(self) -> Destination:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """It will not be written any more."""
        os.close(self._fd)

    def put(self, output: str, data: Buffer) -> None:
        """Write an output that has to fit. Raises ServeError."""
        must_fit(output, memoryview(data).nbytes, self.byte_size)
        self.write(data)

    def write(self, data: Buffer) -> None:
        """Write into the client's memory. Raises ServeError when its file has shrunk: it is never grown."""
        view = memoryview(data).cast("B")
        if self._offset + len(view) > os.fstat(self._fd).st_size:
            raise beyond(self._region)
        at = 0
        try:
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], self._offset + at)
        except OSError as error:  # a file with holes, and no memory is left to fill them
            raise broken(self._region, error) from None


Room = Destination | DeviceDestination


class Rooms(dict[str, Room]):
    """Client memory for outputs by their names, good until closed; and what is `kept` as long."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Callable[[], None]] = []

    @property
    def apart(self) -> bool:
        """Some of it is on a device: what is put there has to be flushed."""
        return any(isinstance(room, DeviceDestination) for room in self.values())

    async def flush(self) -> None:
        """What was put into device memory is there when this returns. Raises ServeError."""
        for room in self.values():
            if isinstance(room, DeviceDestination):
                await room.flush()

    def __enter__(self) -> Rooms:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """None of them will be written any more; a second time is none."""
        while self:
            self.popitem()[1].close()
        while self.kept:
            self.kept.pop()()


def beyond(region: str) -> ServeError:
    """Of a range that leaves its region."""
    return invalid(f"Invalid offset + byte size for shared memory region: '{region}'")


def broken(region: str, error: OSError) -> ServeError:
    """Of memory that the system does not give."""
    return ServeError(Kind.UNAVAILABLE, f"shared memory region '{region}' cannot be used: {error.strerror}")
