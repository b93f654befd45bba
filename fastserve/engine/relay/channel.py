"""The relay channel: shared memory and two rings of tickets between the owner and one other front process.

    memfd:  [ ring to the owner | ring to the front | request memory | reply memory ]

    front                                              owner
      REQUEST number, offset of the request  ------->
      CANCEL number                          ------->
                      <------- ANSWER number, offset of the reply, whether the request's memory is still read
                      <------- END number: the request's memory is no longer read

A front allocates request memory and releases it; the owner allocates reply memory and the front releases it
once it has printed the reply. Both are pools of slabs (ext/slab.pyx), as sparse as the memfd. Each front
process has a channel of its own: when it dies, the owner drops the channel and nothing is left to reclaim.

Tickets are sent as they are made, and the other side is woken once a turn of the loop. A ticket that finds
the ring full waits in this process; the reader wakes the writer after each half of a ring, so that it tries
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from fastserve._ext.message_ring import MessageRing, ring_bytes
from fastserve._ext.slab import PAGE_BYTES, SlabPool, pool_bytes
from fastserve.util.memory import new_files
from fastserve.util.rate_limited_log import run_all

RING_TICKETS = 2048
SLICE_BYTES = 1 << 20  # copied before another thread may have the interpreter
CHANNEL_FDS = 3  # the memory and an eventfd for each side
TRIM_S, TRIM_LOOKS = 5.0, 3
POOL_OWNER = 1  # only one process allocates in each pool

Parts = Sequence[bytes | bytearray | memoryview]


class TicketKind(IntEnum):
    """Kinds of tickets."""

    REQUEST = 1
    CANCEL = 2
    ANSWER = 3
    END = 4


OnTicket = Callable[[TicketKind, int, int, bool], None]
"""Called with kind, number, offset and the flag of each ticket that came."""


class RelayChannel:
    """One end of a channel. Owns its descriptors until `close`."""

    def __init__(self, pages: int, tickets: int, fds: Sequence[int], *, owner: bool) -> None:
        self.memory_fd, owner_doorbell, front_doorbell = fds
        self._fds = list(fds)
        self._pages, self._tickets = pages, tickets
        self._whole = memoryview(mmap.mmap(self.memory_fd, channel_bytes(pages, tickets)))
        ring, pool = ring_bytes(tickets), pool_bytes(pages)
        self._requests_at = _page_up(2 * ring)
        self._replies_at = self._requests_at + pool
        to_owner, to_front = (MessageRing(self._whole[at : at + ring], tickets) for at in (0, ring))
        self._out, self._in = (to_front, to_owner) if owner else (to_owner, to_front)
        self._own_doorbell = owner_doorbell if owner else front_doorbell
        self._their_doorbell = front_doorbell if owner else owner_doorbell
        make = SlabPool.create if owner else SlabPool
        pools = [
            make(self._whole[at : at + pool], *([pages] if owner else []))
            for at in (self._requests_at, self._replies_at)
        ]
        self.requests, self.replies = pools
        self._own_pool = self.replies if owner else self.requests
        self._unsent: deque[tuple[TicketKind, int, int, bool]] = deque()
        self._read = 0  # tickets since the writer was last woken for them
        self._on_ticket: OnTicket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waking = self._reading = False
        self._untrimmed = 0  # looks until nothing is left to give back
        self._trimming: asyncio.TimerHandle | None = None

    @classmethod
    def create(cls, pool_size: int, *, tickets: int = RING_TICKETS) -> RelayChannel:
        """Create a channel with `pool_size` bytes of request memory and as much reply memory: its owner's
        end. Raises ServeError where there is no memory for it."""
        pages = max(pool_size // PAGE_BYTES, 1)
        with new_files("fastserve-relay", channel_bytes(pages, tickets)) as fds:
            for _ in range(2):
                fds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            return cls(pages, tickets, fds, owner=True)

    @classmethod
    def join(cls, message: Mapping[str, Any], fds: Sequence[int]) -> RelayChannel:
        """Map the channel that its owner has described: the front's end. Owns the descriptors."""
        return cls(message["pages"], message["tickets"], fds, owner=False)

    def describe(self) -> tuple[dict[str, Any], list[int]]:
        """Return the message and the descriptors that the front process joins with."""
        return {"pages": self._pages, "tickets": self._tickets}, list(self._fds)

    @property
    def pool_size(self) -> int:
        """Bytes of the largest request, and of the largest reply."""
        return self._pages * PAGE_BYTES

    def open(self, on_ticket: OnTicket) -> None:
        """Read tickets on the running loop."""
        self._loop, self._on_ticket = asyncio.get_running_loop(), on_ticket
        self._loop.add_reader(self._own_doorbell, self._on_doorbell)
        self._trimming = self._loop.call_later(TRIM_S, self._trim)

    def close(self) -> None:
        """Stop reading and close the descriptors. The memory goes with the last view of it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._own_doorbell)
        if self._trimming is not None:
            self._trimming.cancel()
        self._loop, self._on_ticket = None, None
        self._unsent.clear()
        _close_all(self._fds)
        self._fds = []

    # --- memory

    def reserve_request(self, nbytes: int) -> int:
        """Return the offset of request memory, 0 when there is no room now."""
        self._untrimmed = TRIM_LOOKS
        return self.requests.allocate(nbytes, POOL_OWNER)

    def reserve_reply(self, nbytes: int) -> int:
        """Return the offset of reply memory, 0 when there is no room now."""
        self._untrimmed = TRIM_LOOKS
        return self.replies.allocate(nbytes, POOL_OWNER)

    def request_view(self, offset: int) -> memoryview:
        """Return the memory from a request's first byte on."""
        return self._whole[self._requests_at + offset : self._replies_at]

    def reply_view(self, offset: int) -> memoryview:
        """Return the memory from a reply's first byte on."""
        return self._whole[self._replies_at + offset :]

    def _trim(self) -> None:
        """Give back the pages of our pool that nothing has used since the look before."""
        assert self._loop is not None
        self._trimming = self._loop.call_later(TRIM_S, self._trim)
        if self._untrimmed:
            self._untrimmed -= 1
            self._loop.run_in_executor(None, self._trim_pool)

    def _trim_pool(self) -> None:
        """Trim in a thread, as half a gigabyte takes 0.1 s. What is in use will be free at a later look."""
        if self._own_pool.trim(POOL_OWNER) or self._own_pool.used():
            self._untrimmed = TRIM_LOOKS

    # --- tickets

    def send(self, kind: TicketKind, number: int, offset: int = 0, *, flag: bool = False) -> None:
        """Send a ticket; the other side is woken at the end of this turn of the loop."""
        if self._loop is None:
            return
        if self._unsent or not self._out.push(kind=kind, slot=flag, seq=number, value=offset):
            self._unsent.append((kind, number, offset, flag))
        self._wake_soon()

    def _wake_soon(self) -> None:
        if not self._waking and self._loop is not None:
            self._waking = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = False
        if self._loop is not None:
            os.eventfd_write(self._their_doorbell, 1)

    def _on_doorbell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._own_doorbell)
        self._drain()

    def _drain(self) -> None:
        """Send what waits and read what came, at most a ring of it in one turn of the loop."""
        self._reading = False
        while self._unsent:
            kind, number, offset, flag = self._unsent[0]
            if not self._out.push(kind=kind, slot=flag, seq=number, value=offset):
                break
            self._unsent.popleft()
            self._wake_soon()
        found: list[tuple[int, int, int, int]] = []
        while len(found) < self._tickets and (ticket := self._in.pop()) is not None:
            found.append(ticket)
        self._read += len(found)
        if self._read >= self._tickets // 2:
            self._read = 0
            self._wake_soon()
        if len(found) == self._tickets and not self._reading and self._loop is not None:
            self._reading = True
            self._loop.call_soon(self._drain)
        run_all(found, self._take)

    def _take(self, ticket: tuple[int, int, int, int]) -> None:
        kind, flag, number, offset = ticket
        if self._on_ticket is not None:
            self._on_ticket(TicketKind(kind), number, offset, bool(flag))


def channel_bytes(pages: int, tickets: int) -> int:
    """Return the size of a channel's memory."""
    return _page_up(2 * ring_bytes(tickets)) + 2 * pool_bytes(pages)


def write_parts(room: memoryview, parts: Parts, nbytes: int) -> None:
    """Write parts one behind the other; together they have `nbytes` bytes."""
    at = 0
    for part in parts:
        data = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        for start in range(0, data.nbytes, SLICE_BYTES):
            piece = data[start : start + SLICE_BYTES]
            room[at : at + piece.nbytes] = piece
            at += piece.nbytes
    if at != nbytes:
        raise ValueError(f"{at} bytes for {nbytes} bytes of room")


def _page_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
