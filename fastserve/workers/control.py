"""The control channel between the owner (front process) and one worker: rare messages, never tensors.

An AF_UNIX SOCK_SEQPACKET socketpair. One datagram is one JSON object with an "op"; descriptors
(arena, doorbells) travel beside it by SCM_RIGHTS. Reading EOF means the other side is gone.

    owner                                        worker
      | -- load {name, version_dir, config ...} -->|
      | <-- loaded {inputs, outputs} --------------|      or failed {message, kind}
      | -- serve {worker, layout ...} + fds ------>|
      | <-- ready ---------------------------------|      or failed {message, kind}
      | <-- infer {id, offset, nbytes ...} --------|      calls to other models, see bls.py
      | -- answer {id, offset, nbytes ...} ------->|
      | <-- callback {id, text, more} -------------|      of the model: JSON in pieces, until more is false
      | -- reply {id, final, ...} ---------------->|      none for id 0
      | -- stop ---------------------------------->|

The two sides do not trust each other alike. A worker runs the model's code, so the owner takes
nothing but small messages from it: a descriptor, an over-long or a malformed datagram is a fault
(hardening I4). The worker believes its owner, and a message too long for one datagram (a model
with 20 000 class labels) reaches it in a memfd. Another front process runs our code alone; between
it and its owner both sides are `trusted` with long messages.

The same object serves both: blocking `receive` in the worker, `watch` on the owner's event loop. A child
process also ends with its owner, whatever its threads do (`die_with_owner`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import logging
import os
import select
import signal
import socket
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from fastserve.workers.pinning import take_affinity

if TYPE_CHECKING:
    import asyncio


# Well under the kernel's default send buffer (208 KiB), which bounds a SEQPACKET datagram.
MESSAGE_BYTES = 65536
# The kernel's SCM_MAX_FD: a message cannot carry more.
MESSAGE_FDS = 253
# Datagrams that an owner reads at once, outside its loop; a worker that is warm has sent five.
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
    """One message and the descriptors that came with it, which the receiver closes."""

    message: dict[str, Any]
    fds: list[int]


class ControlChannel:
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
        """Owner only: deliver the messages that have arrived, before the loop does. Returns False when there
        may be more: a flooding worker must not hold the loop."""
        line = select.poll()
        line.register(self._sock.fileno(), select.POLLIN)
        for _ in range(CATCH_UP):
            if self._loop is None or not line.poll(0):
                return True
            self._turn(*self._heard)
        return False

    def drain(self, on_message: OnMessage) -> None:
        """Owner only: deliver the last messages of a dead worker. Bounded: a worker sends three at most."""
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
        """Stop reading: from now on the descriptor reads EOF, and stays readable."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Send no more: the other side reads EOF, and what it has sent can still be read."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

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


PIECE_CHARACTERS = 16_000  # characters: of 1 to 3 bytes each


def in_pieces(number: int, callback: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Split one model callback into messages. Raises TypeError for values that JSON has not."""
    text = msgspec.json.encode(callback).decode()
    for start in range(0, len(text), PIECE_CHARACTERS):
        more = start + PIECE_CHARACTERS < len(text)
        yield {"op": "callback", "id": number, "text": text[start : start + PIECE_CHARACTERS], "more": more}


class LoadChannel:
    """Model callbacks while the model loads: its own thread reads the reply, as nothing else comes from the
    owner."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._numbers = itertools.count(1)
        self._one_at_a_time = threading.Lock()

    def ask(self, callback: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a callback and return the reply. Raises PeerGone when the server stops."""
        with self._one_at_a_time:
            number = next(self._numbers)
            self._send(number, callback)
            message = self._control.receive().message
            if message["op"] != "reply" or message["id"] != number:
                raise PeerGone("the load was given up")
            return message

    def tell(self, callback: Mapping[str, Any]) -> None:
        self._send(0, callback)

    def _send(self, number: int, callback: Mapping[str, Any]) -> None:
        for piece in in_pieces(number, callback):
            self._control.send(piece)


_PR_SET_PDEATHSIG = 1


def die_with_owner(fd: int) -> None:
    """End this process with its owner, at the other end of the control channel `fd`. Call it first of all, on
    the main thread.

    The kernel sends SIGKILL when the thread that made the child ends (PR_SET_PDEATHSIG), which reaches a
    model stuck in native code and a stopped process. It does not reach a child whose owner died before the
    call: its control channel reads as hung up already.

    SIGTERM may reach every process of a service at once (systemd does that): a child must go on through the
    owner's drain. Handled by a function, not SIG_IGN: what a model executes would inherit an ignored signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    line = select.poll()
    line.register(fd, 0)
    # A dying process closes its files before the kernel tells its children: one of the two ties holds.
    if any(events & select.POLLHUP for _, events in line.poll(0)):
        os._exit(0)


def enter_child(fd: int) -> ControlChannel:
    """Begin a child process: tie it to its owner, and return its end of the control channel `fd`."""
    die_with_owner(fd)
    take_affinity()
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.enable()
    os.set_inheritable(fd, False)  # a model's subprocesses must not hold the line open
    return ControlChannel(socket.socket(fileno=fd), owner=False)


def name_process(title: str) -> None:
    """Show the title in ps and top; the kernel keeps 15 bytes."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(f"fs:{title}"[:15])


def exit_now(status: int) -> NoReturn:
    """End this process at once. An interpreter that ends in the usual way joins threads, and a thread that
    never ends (of a library, of a model) would keep the process and its ports."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or full: nobody reads it
            continue
    os._exit(status)
