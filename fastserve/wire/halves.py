"""The half that is left of a connection whose client has sent its last byte: replies go out, then it closes.

A client that shuts down its writing side wants its answer; one that is gone frees what it asked for. Both
have sent FIN, and nothing more can be read of either. They differ in what their kernel does with the next
byte they are sent: a half-closed socket takes it, a closed one answers RST. So some bytes go ahead of the
reply which it will have anyway (Call.ahead), and an epoll set hears of the RST, which the loop, having
stopped reading, would not. The answer is the kernel's of whoever holds the socket, one round trip away.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from typing import Any


class HalfOpen(asyncio.Transport):
    """Stands in for the transport: there is nothing to read, `skip` bytes of the next write are out already,
    and the end of writing is the end."""

    __slots__ = ("_skip", "_transport")

    def __init__(self, transport: asyncio.Transport, skip: int) -> None:
        self._transport = transport
        self._skip = skip

    def fileno(self) -> int:
        number: int = self._transport.get_extra_info("socket").fileno()
        return number

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        skip, self._skip = self._skip, 0
        self._transport.write(data[skip:] if skip else data)

    def write_eof(self) -> None:
        self._transport.close()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Hangups:
    """Calls back when one of the sockets it watches is reset. A listener has one, open as long as it is."""

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[], object]] = {}
        self._epoll: select.epoll | None = None

    def open(self) -> None:
        """From now on the running loop is asked. Not left to the first who closes half a connection: what
        a server holds does not grow with what clients do."""
        self._epoll = select.epoll()
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._turn, self._epoll)

    def watch(self, fd: int, on_gone: Callable[[], object]) -> None:
        """Until `forget`, which must come before the descriptor is closed."""
        assert self._epoll is not None
        self._epoll.register(fd, 0)  # of the events nobody asks for, EPOLLHUP and EPOLLERR come always
        self._watched[fd] = on_gone

    def forget(self, fd: int) -> None:
        """Idempotent."""
        if self._watched.pop(fd, None) is not None and self._epoll is not None:
            with contextlib.suppress(OSError):  # the loop has closed it, and epoll forgets by itself
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Watch nothing any more."""
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
        self._watched, self._epoll = {}, None

    def _turn(self, epoll: select.epoll) -> None:
        for fd, _ in epoll.poll(0):
            on_gone = self._watched.get(fd)
            self.forget(fd)
            if on_gone is not None:
                on_gone()
