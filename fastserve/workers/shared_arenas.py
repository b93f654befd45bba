"""Arenas that the ferry reads and writes where they lie: which there are, and where in which a view is.

    shared = SharedArenas(forget)
    await shared.join(arena, front)          from now on no page of it is exchanged (ext/include/pins.h)
    found = shared.find(view)                Spot(number, memory, offset), or None: a view of other memory
    shared.leave_all()                       their pages may be given back again

Of one front process, on its loop; `find` from any thread. What is registered with CUDA the ferry knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from typing_extensions import Buffer

from fastserve._ext.upkeep import Pins
from fastserve.workers.arena import Arena

# Giving 16 MB back takes the owner 4 ms.
LOOK_S = 0.001


class Spot(NamedTuple):
    """A place in memory that the ferry has as well."""

    number: int
    arena: Arena
    offset: int


class SharedArenas:
    """`on_gone(number)` is told of one that is closed."""

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        self._on_gone = on_gone
        self._joined: dict[Arena, tuple[int, Pins]] = {}
        self._last = 0

    def __contains__(self, arena: Arena) -> bool:
        return arena in self._joined

    async def join(self, arena: Arena, front: int) -> None:
        """Returns when no page of it is being exchanged, and none will be. No effect on one that is here."""
        pins = None if arena in self._joined else Pins(arena.memory, front=front)
        while pins is not None and not pins.take():
            del pins  # it holds the memory of an arena that may close meanwhile
            await asyncio.sleep(LOOK_S)
            gone = arena in self._joined or arena.memory_fd < 0
            pins = None if gone else Pins(arena.memory, front=front)
        if pins is not None:
            self._last += 1
            self._joined[arena] = self._last, pins
            arena.on_close.append(partial(self._leave, arena, self._last))

    def find(self, view: Buffer) -> Spot | None:
        """Where a view begins, all of which lies in one of them."""
        for arena, (number, pins) in list(self._joined.items()):
            offset = pins.offset_of(view)
            if offset >= 0:
                return Spot(number, arena, offset)
        return None

    def leave_all(self) -> list[int]:
        """Nothing of them is registered any more. Their numbers."""
        numbers = [number for number, _ in self._joined.values()]
        for _, pins in self._joined.values():
            pins.drop()
        self._joined.clear()
        return numbers

    def _leave(self, arena: Arena, number: int) -> None:
        known = self._joined.get(arena)
        if known is not None and known[0] == number:
            del self._joined[arena]
            self._on_gone(number)
