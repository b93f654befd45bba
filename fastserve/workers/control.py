"""The control line between the owner (front process) and one worker: rare words, never tensors.

An AF_UNIX SOCK_SEQPACKET socketpair. One datagram is one JSON object with an "op"; descriptors
(arena, doorbells) travel beside it by SCM_RIGHTS. Reading EOF means the other side is gone.

    owner                                        worker
      | -- load {name, version_dir, config ...} -->|
      | <-- loaded {inputs, outputs}               |      or failed {message, kind}
      | -- serve {worker, layout ...} + fds ------>|
      | <-- ready                                  |      or failed {message, kind}
      | <-- infer {id, offset, nbytes ...}         |      calls to other models, see line.py
      | -- answer {id, offset, nbytes ...} ------->|
      | -- stop ---------------------------------->|

The two sides do not trust each other alike. A worker runs the model's code, so the owner takes
nothing but small messages from it: a descriptor, an over-long or a malformed datagram is a fault
(hardening I4). The worker believes its owner, and a message too long for one datagram (a model
with 20 000 class labels) reaches it in a memfd. Another front process runs our code alone; between
it and its owner both sides are `trusted` with long messages.

The same object serves both: blocking `receive` in the worker, `watch` on the owner's event loop.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    import asyncio

# Well under the kernel's default send buffer (208 KiB), which bounds a SEQPACKET datagram.
MESSAGE_BYTES = 65536
# The kernel's SCM_MAX_FD: a message cannot carry more.
MESSAGE_FDS = 253
# Datagrams that an owner hears at once, beside its loop; a worker that is warm has said five.
CATCH_UP = 64
_SPILLED = "spilled"
_GONE = "the other side is gone"


OnMessage = Callable[[dict[str, Any]], None]
OnGone = Callable[[str], None]


class ControlFault(Exception):
    """The peer sent, or was to be sent, something the control line does not carry."""


class PeerGone(ControlFault):
    """The other side has closed the line."""


class Received(NamedTuple):
    """One message and the descriptors that came with it; whoever receives them closes them."""

    message: dict[str, Any]
    fds: list[int]


class Control:
    """One end of the line. Owns its socket until `close`."""

    def __init__(self, sock: socket.socket, *, owner: bool, trusted: bool = False) -> None:
        self._sock = sock
        self._sends_long = owner or trusted
        self._takes_long = trusted or not owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard: tuple[OnMessage, OnGone]

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed: readable when a message waits or the peer is gone."""
        return self._sock.fileno()

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends one message; `fds` are duplicated by the kernel and stay the caller's.

        Raises PeerGone when nobody listens any more, ControlFault when the message is too long for
        a worker to send, or when the peer has stopped reading.
        """
        data = msgspec.json.encode(message)
        if len(data) <= MESSAGE_BYTES:
            self._send(data, fds)
            return
        if not self._sends_long:
            raise ControlFault(f"a message of {len(data)} bytes; at most {MESSAGE_BYTES} are carried")
        spilled = _write_memfd(data)
        try:
            self._send(msgspec.json.encode({"op": _SPILLED}), [spilled, *fds])
        finally:
            os.close(spilled)

    def receive(self) -> Received:
        """Takes one message. Raises PeerGone at EOF, BlockingIOError when the line is watched and empty,
        and ControlFault for a datagram that breaks the rules above (its descriptors are closed).
        """
        try:
            # Not socket.recv_fds: it drops its flags, and the descriptors would outlive an exec.
            data, ancillary, flags, _ = self._sock.recvmsg(
                MESSAGE_BYTES, socket.CMSG_SPACE(MESSAGE_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise PeerGone(_GONE) from error
        fds = _read_fds(ancillary)
        try:
            return Received(self._read(data, fds, flags), fds)
        except ControlFault:
            _close_all(fds)
            raise

    def watch(self, on_message: OnMessage, on_gone: OnGone) -> None:
        """Owner only: calls back on the running loop. `on_gone` comes at most once, with the reason
        ("" for plain EOF); after it nothing more is read."""
        import asyncio  # a worker, which has no loop, starts 50 ms sooner without it

        self._loop, self._heard = asyncio.get_running_loop(), (on_message, on_gone)
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._turn, on_message, on_gone)

    def catch_up(self) -> bool:
        """Owner only: call back with what lies there now, not when the loop comes by. False: there may be
        more; nobody can keep the loop with it."""
        line = select.poll()
        line.register(self._sock.fileno(), select.POLLIN)
        for _ in range(CATCH_UP):
            if self._loop is None or not line.poll(0):
                return True
            self._turn(*self._heard)
        return False

    def drain(self, on_message: OnMessage) -> None:
        """Owner only: delivers what a dead worker had still said. Bounded: a worker says three words."""
        self.unwatch()
        with contextlib.suppress(ControlFault, BlockingIOError):
            for _ in range(4):
                on_message(self.receive().message)

    def unwatch(self) -> None:
        """Stops calling back; idempotent."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
        self._loop = None

    def deafen(self) -> None:
        """Nothing more is read: from now on the descriptor reads EOF, and stays readable."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Closes the line, which the other side reads as EOF; idempotent."""
        self.unwatch()
        self._sock.close()

    def _turn(self, on_message: OnMessage, on_gone: OnGone) -> None:
        # One datagram a turn (the reader is level-triggered): a flooding worker cannot keep the loop.
        try:
            received = self.receive()
        except BlockingIOError:
            return
        except ControlFault as fault:
            self.unwatch()
            on_gone("" if isinstance(fault, PeerGone) else str(fault))
            return
        on_message(received.message)

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        try:
            if fds:
                socket.send_fds(self._sock, [data], list(fds), socket.MSG_NOSIGNAL)
            else:
                self._sock.send(data, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone(_GONE) from error
        except OSError as error:
            raise ControlFault(f"the message could not be sent: {os.strerror(error.errno or 0)}") from error

    def _read(self, data: bytes, fds: list[int], flags: int) -> dict[str, Any]:
        if flags & socket.MSG_TRUNC:
            raise ControlFault(f"a message of more than {MESSAGE_BYTES} bytes")
        if flags & socket.MSG_CTRUNC:
            raise ControlFault("a message whose descriptors did not fit")
        if fds and not self._takes_long:
            raise ControlFault("a message with descriptors")
        if not data:  # EOF; an empty datagram, which no side of ours sends, looks the same
            raise PeerGone(_GONE)
        message = _decode(data)
        if message["op"] == _SPILLED and fds:
            return _decode(_read_memfd(fds.pop(0)))
        return message


def _decode(data: bytes) -> dict[str, Any]:
    try:
        message = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ControlFault("a message that is not JSON") from error
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ControlFault("a message without an op")
    return message


def _write_memfd(data: bytes) -> int:
    fd = os.memfd_create("control", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_memfd(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def _read_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
