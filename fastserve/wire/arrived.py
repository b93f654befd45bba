"""A large body that has come and is not read yet: from the socket straight to where it is to stay.

    body = find_arrived(transport, pieces, need)      None: some of it is still on its way
    body.read_into([memory])                          all of it; False: there was less than was said

An endpoint with a method `take` is asked before such a body is read. It takes the call and reads the body
into the rows of a batch, or leaves no trace and is called with the whole body as ever. The kernel's copy is
then the only one (of 602 kB 50 to 70 us less, of 250). No rows are kept for a client that is slow: when they
are reserved the bytes are there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from fcntl import ioctl
from termios import FIONREAD
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.wire.call import Call

_NUMBER = bytes(4)  # what FIONREAD answers


class Arrived:
    """One body. `begin` is what was read of it, the socket has `left` bytes more; its length is that of both,
    and stays when it is read."""

    __slots__ = ("_file", "_size", "begin", "left")

    def __init__(self, file: int, begin: bytes, left: int) -> None:
        self._file, self._size = file, len(begin) + left
        self.begin, self.left = begin, left

    def __len__(self) -> int:
        return self._size

    def read_into(self, places: Sequence[memoryview], skip: int = 0) -> bool:
        """All but the first `skip` bytes, into places that are as large together. False: some are missing
        after all; what there was is in `begin`, and the places are undefined."""
        rest = []
        for place in places:
            given = self.begin[skip : skip + len(place)]
            place[: len(given)] = given
            skip += len(given)
            rest.append(place[len(given) :])
        if skip != len(self.begin) or sum(map(len, rest)) != self.left:
            raise ValueError(f"the places for {self._size} bytes have another size")
        got = self._read(rest)
        self.left -= got
        self.begin = self.begin + b"".join(rest)[:got] if self.left else b""
        return not self.left

    def _read(self, places: Sequence[memoryview]) -> int:
        try:
            return os.readv(self._file, places)
        except OSError:  # the loop's own next read tells the connection
            return 0

    def drop(self) -> bool:
        """Read off what nobody has read, lest it be taken for a request. False: some is missing after all."""
        if self.left:
            self.left -= self._read([memoryview(bytearray(self.left))])
        return not self.left


Take = Callable[["Call", Arrived], bool]


def find_arrived(
    transport: asyncio.Transport, pieces: Sequence[bytes | bytearray], need: int
) -> Arrived | None:
    """The body of which `pieces` were read, if all `need` bytes that are missing can be read at once."""
    socket = transport.get_extra_info("socket")
    if socket is None or transport.get_extra_info("ssl_object") is not None:
        return None
    if transport.is_closing():  # its file may be another's already
        return None
    file = socket.fileno()
    there = int.from_bytes(ioctl(file, FIONREAD, _NUMBER), sys.byteorder)
    return Arrived(file, b"".join(pieces), need) if there >= need else None


def offer(take: Take, call: Call, body: Arrived) -> bool:
    """Whether the endpoint has taken the call: then it is answered, also when taking it has failed."""
    try:
        taken = take(call, body)
        if not taken and not body.left:
            raise RuntimeError("the endpoint has read the body of a call that it does not take")
    except Exception as error:
        call.fail(error)
        return True
    return taken
