"""Half-closed connections: after the client's FIN replies still go out, then the connection closes.

A client that shuts down its writing side waits for its reply; one that is gone should free its work. Both
have sent FIN, and nothing more can be read of either. Their kernels differ at the next byte: a half-closed
socket takes it, a closed one answers RST. So the first bytes of the reply, which are known, go out at once
(Call.ahead), and an epoll set reports the RST, which the loop, having stopped reading, would not see.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from typing import Any

from fastserve.util.rate_limited_log import run_all


def send_fin(transport: asyncio.Transport) -> None:
    """End the server's side of a connection. Where the client has reset it, asyncio's own loop raises and
    uvloop does not; `connection_lost` reports the reset in either."""
    with contextlib.suppress(OSError):
        transport.write_eof()


class HalfClosedTransport(asyncio.Transport):
    """Wrap the transport of a client that has sent FIN. Nothing can be read, `skip` bytes of the next
    write are sent already, and write_eof closes."""

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


class HangupWatch:
    """Call back when one of the watched sockets is reset. A listener has one, open as long as the
    listener."""

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[], object]] = {}
        self._epoll: select.epoll | None = None

    def open(self) -> None:
        """Register with the running loop. This is not left to the first half-closed connection: what a
        server holds does not grow with what clients do."""
        self._epoll = select.epoll()
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._turn, self._epoll)

    def watch(self, fd: int, on_gone: Callable[[], object]) -> None:
        """Call `on_gone` when the socket is reset, until `forget`, which must come before the descriptor
        is closed."""
        assert self._epoll is not None
        self._epoll.register(fd, 0)  # EPOLLHUP and EPOLLERR always come
        self._watched[fd] = on_gone

    def forget(self, fd: int) -> None:
        """Stop watching a socket. Idempotent."""
        if self._watched.pop(fd, None) is not None and self._epoll is not None:
            with contextlib.suppress(OSError):  # the loop has closed it, and epoll forgets by itself
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop watching all sockets."""
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
        self._watched, self._epoll = {}, None

    def _turn(self, epoll: select.epoll) -> None:
        run_all((fd for fd, _ in epoll.poll(0)), self._hear)

    def _hear(self, fd: int) -> None:
        on_gone = self._watched.get(fd)
        self.forget(fd)
        if on_gone is not None:
            on_gone()
