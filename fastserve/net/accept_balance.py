"""Even distribution of connections over several front processes that accept from the same sockets.

    listening socket, one for all fronts           counts of open connections, in shared memory
        |  whichever front runs first accepts            |
        v                                                v
    front k -- has fewest: keeps it;  else: descriptor --inbox--> the front that has fewest

SO_REUSEPORT spreads connections by a hash, which is even for thousands and uneven for the few long
connections of gRPC clients; it also gives connections to a front that is stopped, and resets those that a
dying front had not accepted. Here nobody owns a waiting connection: a front that does not run accepts
nothing, and what lies in its inbox is taken out by others. A connection counts for its port first, and for
all ports of a front where fronts are even.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import socket
import struct
import termios
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from fastserve.util.memory import new_files
from fastserve.util.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)

MOST_PORTS = 100  # their descriptors travel in one message of the control channel
ACCEPTS_A_TURN = 16
# A front that has not looked into its inbox for so long gets nothing until it runs again.
STALL_S = 0.25
BEAT_S = 0.5
REST_S = 0.1  # without descriptors: other fronts accept meanwhile
MOST_HOPS = 3  # from inbox to inbox, where several fronts have chosen the same one at once
_MESSAGE = struct.Struct("<HH")  # in an inbox: the number of the port, and how often it was handed over
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Take = Callable[[socket.socket], None]


class AcceptState(IntEnum):
    """Whether a front process takes connections, as all fronts see it."""

    CLOSED = 0
    ACCEPTING = 1
    STALLED = 2


class ConnectionTable:
    """Counts of open connections by port and front, in shared memory.

    Every count has one writer, its front. The others' words are hints: a stale one costs evenness and
    nothing else."""

    _STATE, _PROGRESS, _TOTAL, _PORTS = range(4)  # vectors of one word a front

    def __init__(self, fronts: int, fd: int) -> None:
        self._fronts = fronts
        self._memory = mmap.mmap(fd, self.size(fronts))
        self._words = memoryview(self._memory).cast("q")

    @classmethod
    def size(cls, fronts: int) -> int:
        """Return the bytes of a table."""
        return 8 * fronts * (cls._PORTS + MOST_PORTS)

    def _vector(self, number: int) -> list[int]:
        return self._words[number * self._fronts : (number + 1) * self._fronts].tolist()

    def counts(self, port: int) -> list[int]:
        """Return the open connections of a port, by front."""
        return self._vector(self._PORTS + port)

    def totals(self) -> list[int]:
        """Return the open connections of all ports, by front."""
        return self._vector(self._TOTAL)

    def states(self) -> list[int]:
        """Return the AcceptState of every front."""
        return self._vector(self._STATE)

    def set_count(self, front: int, port: int, count: int) -> None:
        at, total = (self._PORTS + port) * self._fronts + front, self._TOTAL * self._fronts + front
        self._words[total] += count - self._words[at]
        self._words[at] = count

    def set_state(self, front: int, state: AcceptState) -> None:
        self._words[self._STATE * self._fronts + front] = state

    def note_progress(self, front: int) -> None:
        """Record that the front's inbox is empty, or was read just now."""
        self._words[self._PROGRESS * self._fronts + front] = time.monotonic_ns()

    def idle_s(self, front: int) -> float:
        """Return the seconds since a front's inbox was read, or empty."""
        return (time.monotonic_ns() - self._words[self._PROGRESS * self._fronts + front]) / 1e9

    def clear(self, front: int) -> None:
        """Forget a front that has ended."""
        for vector in range(self._PORTS + MOST_PORTS):
            self._words[vector * self._fronts + front] = 0

    def close(self) -> None:
        self._words.release()
        self._memory.close()


class ConnectionInbox:
    """The connections that other fronts have accepted for one front and it has not taken yet.

    A socket pair whose ends all fronts hold: messages outlive the front that they are for, and are read once,
    by the process that is first."""

    def __init__(self, sending: int, receiving: int) -> None:
        self._sending = socket.socket(fileno=sending)
        self._receiving = socket.socket(fileno=receiving)
        self._waiting = bytearray(4)

    @staticmethod
    def make() -> tuple[int, int]:
        """Return the descriptors of a new inbox: sending, receiving."""
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in pair:
            end.setblocking(False)
        return pair[0].detach(), pair[1].detach()

    def fds(self) -> tuple[int, int]:
        return self._sending.fileno(), self._receiving.fileno()

    def fileno(self) -> int:
        """Return the descriptor that is readable while connections wait."""
        return self._receiving.fileno()

    def waiting(self) -> int:
        """Return the number of connections that wait."""
        fcntl.ioctl(self._receiving.fileno(), termios.FIONREAD, self._waiting)
        return int.from_bytes(self._waiting, "little") // _MESSAGE.size

    def send(self, port: int, accepted: socket.socket, hops: int = 1) -> bool:
        """Send a connection, which stays the caller's too; return False where the inbox is full."""
        try:
            socket.send_fds(self._sending, [_MESSAGE.pack(port, hops)], [accepted.fileno()])
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, *_SCARCE):
                return False
            raise
        return True

    def receive(self) -> tuple[int, int, socket.socket | None] | None:
        """Take one connection, with its port and how often it was handed over; None where none waits. The
        connection is None where there was no descriptor left for it."""
        try:
            data, ancillary, _, _ = self._receiving.recvmsg(
                _MESSAGE.size, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        if not data:
            return None
        fds = array("i")
        for _, _, found in ancillary:
            fds.frombytes(found[: len(found) - len(found) % fds.itemsize])
        return *_MESSAGE.unpack(data), socket.socket(fileno=fds[0]) if fds else None

    def close(self) -> None:
        self._sending.close()
        self._receiving.close()


class PortCount:
    """The connections of one port in one front, as the table shows them: open ones, and those that were
    accepted and are not set up yet."""

    def __init__(self, table: ConnectionTable, front: int, port: int) -> None:
        self._table, self._front, self._port = table, front, port
        self._open = self._coming = 0

    def expect(self) -> None:
        """Count a connection that is about to be set up."""
        self._coming += 1
        self._show()

    def arrive(self, count: int) -> None:
        """A connection has been set up, one of `count` now."""
        self._open, self._coming = count, max(0, self._coming - 1)
        self._show()

    def leave(self, count: int) -> None:
        """A connection has ended; `count` are left."""
        self._open = count
        self._show()

    def settle(self) -> None:
        """No connection is about to be set up."""
        if self._coming:
            self._coming = 0
            self._show()

    def _show(self) -> None:
        self._table.set_count(self._front, self._port, self._open + self._coming)


class AcceptBalancer:
    """Accepts the connections of one front process, and shares them with the other fronts.

    The owner makes it with `create`, every other front joins with the owner's descriptors (`fds`)."""

    def __init__(self, front: int, fronts: int, fds: Sequence[int]) -> None:
        """Take over the descriptors of `fds`."""
        self.front = front
        self.table = ConnectionTable(fronts, fds[0])
        self._table_fd = fds[0]
        self._inboxes = [ConnectionInbox(*fds[i : i + 2]) for i in range(1, 1 + 2 * fronts, 2)]
        self._places, self._inherited = dict[str, int](), dict[str, int]()
        self._listening: dict[int, socket.socket] = {}  # by port; those that are accepted from
        self._take: dict[int, Take] = {}
        self._looking: set[int] = set()  # fronts that were given something, and are looked at again
        self._accepting = False
        self._beating: asyncio.TimerHandle | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._limited_log = RateLimitedLog(log)

    @classmethod
    def create(cls, fronts: int) -> AcceptBalancer:
        """Return the owner's balancer, of a new table and new inboxes. Raises ServeError where there is no
        memory for them."""
        with new_files("fastserve-accept", ConnectionTable.size(fronts)) as fds:
            for _ in range(fronts):
                fds += ConnectionInbox.make()
        return cls(0, fronts, fds)

    def fds(self) -> list[int]:
        """Return the descriptors that another front joins with; they stay this object's."""
        return [self._table_fd, *(fd for inbox in self._inboxes for fd in inbox.fds())]

    def places(self) -> dict[str, int]:
        """Return the listening sockets by address; they stay the listeners'."""
        return {place: self._listening[port].fileno() for place, port in self._places.items()}

    def inherit(self, places: Mapping[str, int]) -> None:
        """Accept from the owner's sockets, which become this object's, by address in its order."""
        self._places = {place: i for i, place in enumerate(places)}
        self._inherited = dict(places)

    def inherited(self, place: str) -> socket.socket | None:
        """Return the owner's listening socket of an address; None where this front is the owner."""
        fd = self._inherited.pop(place, -1)
        return None if fd < 0 else socket.socket(fileno=fd)

    def attach(self, place: str, listening: socket.socket, take: Take) -> PortCount:
        """Accept from a listening socket on the running loop from now on; `take` gets the connections.

        Raises OSError for more than MOST_PORTS."""
        port = self._places.setdefault(place, len(self._places))
        if port >= MOST_PORTS:
            text = f"{port + 1} ports: at most {MOST_PORTS} with several front processes"
            raise OSError(errno.EMFILE, text)
        self._listening[port], self._take[port] = listening, take
        self._read(port)
        return PortCount(self.table, self.front, port)

    def detach(self, listening: socket.socket) -> None:
        """Accept no more from a socket, and close it; connections that others have accepted still come."""
        for port, known in list(self._listening.items()):
            if known is listening:
                del self._listening[port]
                asyncio.get_running_loop().remove_reader(listening.fileno())
        listening.close()

    def open(self) -> None:
        """Take connections of the other fronts from now on."""
        loop = asyncio.get_running_loop()
        own = self._inboxes[self.front]
        loop.add_reader(own.fileno(), self._on_inbox, own)
        self._accepting = True
        self.table.note_progress(self.front)
        self.table.set_state(self.front, AcceptState.ACCEPTING)
        self._beat()

    def retire(self) -> None:
        """Have the other fronts give no more connections; those on their way still come. Idempotent."""
        if not self._inboxes:
            return
        self._accepting = False
        self.table.set_state(self.front, AcceptState.CLOSED)
        for front in range(len(self._inboxes)):
            if front != self.front and self.table.states()[front] == AcceptState.STALLED:
                self._rescue(front)

    def bury(self, front: int) -> None:
        """Forget a front that has ended, and take over the connections that it had not taken."""
        if self._inboxes:
            self.table.clear(front)
            self._rescue(front)

    def close(self) -> None:
        """Let go of the table and the inboxes. Idempotent."""
        if not self._inboxes:
            return
        self.retire()
        for timer in (self._beating, self._resting):
            if timer is not None:
                timer.cancel()
        own = self._inboxes[self.front]
        asyncio.get_running_loop().remove_reader(own.fileno())
        self._on_inbox(own)
        for fd in self._inherited.values():
            os.close(fd)
        for inbox in self._inboxes:
            inbox.close()
        self._inboxes, self._inherited = [], {}
        self.table.close()
        os.close(self._table_fd)

    # ---- accepting

    def _read(self, port: int) -> None:
        listening = self._listening[port]
        asyncio.get_running_loop().add_reader(listening.fileno(), self._on_waiting, port, listening)

    def _on_waiting(self, port: int, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError):  # another front was faster
                return
            except OSError as error:
                if error.errno in _SCARCE:
                    self._rest(error)
                    return
                if error.errno not in (errno.ECONNABORTED, errno.EPERM, errno.EPROTO):
                    raise
                continue
            accepted.setblocking(False)
            self._place(port, accepted)

    def _rest(self, error: OSError) -> None:
        """Accept nothing for a while, where this process or the machine has no room for a connection."""
        self._limited_log.warn("no connection can be accepted: %s", os.strerror(error.errno or 0))
        if self._resting is not None:
            return
        loop = asyncio.get_running_loop()
        for listening in self._listening.values():
            loop.remove_reader(listening.fileno())
        self._resting = loop.call_later(REST_S, self._go_on)
        if self._accepting:
            self.table.set_state(self.front, AcceptState.STALLED)

    def _go_on(self) -> None:
        self._resting = None
        for port in self._listening:
            self._read(port)
        if self._accepting:
            self.table.set_state(self.front, AcceptState.ACCEPTING)

    def _place(self, port: int, accepted: socket.socket, hops: int = 0) -> None:
        """Give a connection to the front that has fewest."""
        while hops < MOST_HOPS and (front := self._choose(port)) != self.front:
            inbox = self._inboxes[front]
            if not inbox.waiting():
                self.table.note_progress(front)
            if inbox.send(port, accepted, hops + 1):
                accepted.close()
                self._look_later(front)
                return
            self.table.set_state(front, AcceptState.STALLED)
        self._keep(port, accepted)

    def _keep(self, port: int, accepted: socket.socket) -> None:
        take = self._take.get(port)
        if take is None:  # this front has begun and does not listen there yet, or no more
            accepted.close()
        else:
            take(accepted)

    def _choose(self, port: int) -> int:
        """Return the front that has fewest connections of the port; this one if it is among those."""
        if not self._accepting:
            return self.front
        fronts, me = len(self._inboxes), self.front
        counts, totals, states = self.table.counts(port), self.table.totals(), self.table.states()
        keys = {
            front: (counts[front], totals[front], (front - me) % fronts)
            for front in range(fronts)
            if front == me or states[front] == AcceptState.ACCEPTING
        }
        asked = set[int]()
        while True:
            front = min(keys, key=keys.__getitem__)
            if front in asked:
                return front
            asked.add(front)
            waiting = self._inboxes[front].waiting()
            if waiting and front != me and self.table.idle_s(front) >= STALL_S:
                del keys[front]
                self._rescue_soon(front)
            elif waiting:
                count, total, distance = keys[front]
                keys[front] = count + waiting, total + waiting, distance

    # ---- inboxes

    def _on_inbox(self, inbox: ConnectionInbox) -> None:
        """Take the connections that other fronts have accepted for this one; those too many go on."""
        for _ in range(ACCEPTS_A_TURN):
            received = inbox.receive()
            self.table.note_progress(self.front)
            if received is None:
                return
            port, hops, accepted = received
            if accepted is not None:
                self._place(port, accepted, hops)
            else:
                self._rest(OSError(errno.EMFILE, "a connection of another front was lost"))

    def _look_later(self, front: int) -> None:
        if front not in self._looking:
            self._looking.add(front)
            asyncio.get_running_loop().call_later(STALL_S, self._look, front)

    def _look(self, front: int) -> None:
        """See whether a front has taken what this one gave it."""
        self._looking.discard(front)
        if not self._inboxes or not self._inboxes[front].waiting():
            return
        if self.table.idle_s(front) >= STALL_S:
            self._rescue(front)
        else:
            self._look_later(front)

    def _rescue_soon(self, front: int) -> None:
        self.table.set_state(front, AcceptState.STALLED)
        asyncio.get_running_loop().call_soon(self._rescue, front)

    def _rescue(self, front: int) -> None:
        """Take the connections out of the inbox of a front that does not run."""
        if not self._inboxes:
            return
        if self.table.states()[front] == AcceptState.ACCEPTING:
            self.table.set_state(front, AcceptState.STALLED)
        found = False
        while (received := self._inboxes[front].receive()) is not None:
            port, _, accepted = received
            found = True
            if accepted is not None:
                self._place(port, accepted)
        if found:
            self._limited_log.warn("front process %d does not take its connections: others have them", front)

    def _beat(self) -> None:
        self._beating = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
        if self._accepting and self._resting is None:
            self.table.set_state(self.front, AcceptState.ACCEPTING)
        for front, inbox in enumerate(self._inboxes):
            # Connections for a front whose giver has ended meanwhile.
            if front != self.front and inbox.waiting() and self.table.idle_s(front) >= BEAT_S:
                self._rescue(front)
