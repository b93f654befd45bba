"""Closes a listening socket without resetting whoever is half through it.

Closing one resets connections that nobody has accepted yet, with the requests their clients have sent on them
meanwhile. So first a filter drops what would begin a new one (its client tries again a second later, and is
refused then or is served elsewhere), what is under way gets through, and then the socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct

from fastserve.wire.socket_file import UNIX, SocketFile

# A handshake under way ends within a round trip: across the world that is so long. Over loopback it is some
# microseconds, but a processor may be taken away in the midst of it, and a client may keep back the last
# acknowledgement until it sends something.
HANDSHAKE_S, LOOPBACK_S = 0.2, 0.05
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; the module socket does not name it
# Classic BPF over the TCP header: drop a segment that has SYN and not ACK.
_DROP_SYN = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the byte of flags
        (0x54, 0, 0, 0x12),  # keep SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone?
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # take
    )
)


class Gate:
    """A bound socket, from open to close."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self._file = SocketFile(listening.getsockname()) if listening.family == socket.AF_UNIX else None

    @property
    def place(self) -> tuple[str, int]:
        """Host and port, or "unix:PATH" and 0."""
        name = self.listening.getsockname()
        return (UNIX + name, 0) if self._file else (name[0], name[1])

    def shut(self) -> float:
        """Let no new connection begin. Seconds after which every one that had begun can be accepted; one to a
        file begins whole, or not at all once that has lost its name."""
        if self._file is None:
            return _shut(self.listening)
        self._file.remove()
        return 0.0


def _shut(listening: socket.socket) -> float:
    code = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    program = struct.pack("HP", len(_DROP_SYN) // 8, ctypes.addressof(code))
    with contextlib.suppress(OSError):  # a kernel without filters: what is accepted by then is what there is
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    return LOOPBACK_S if _is_loopback(listening.getsockname()[0]) else HANDSHAKE_S


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
