"""The moment in which a gRPC server stops: replies wait, so that nobody is turned away in it.

A server of grpcio's that is told to stop answers CANCELLED to every call it has received and not yet looked
at. Clients that wait for a reply send nothing new, and what they have sent gets looked at meanwhile; then the
server is told to stop, which sends GOAWAY, and then the replies go out behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

# When no call began for so long, what was sent has been looked at: clients, and grpcio's thread that reads,
# may wait for a processor. With 0.02, beside four busy processes, 1 drain of 12 lost calls.
SETTLED_S = 0.1
SETTLING_S = 0.5  # and when calls never cease to begin, this is as long as replies wait
FAREWELL_S = 0.02  # for the stop to begin: GOAWAY stands before the replies


class Pause:
    """Holds replies back while a server is stopped."""

    __slots__ = ("_over", "begun")

    def __init__(self) -> None:
        self.begun = 0  # calls so far
        self._over: asyncio.Event | None = None

    @property
    def holds(self) -> bool:
        """Whether a reply has to wait now."""
        return self._over is not None

    async def wait(self) -> None:
        """For a reply that is ready to go."""
        if self._over is not None:
            await self._over.wait()

    async def stop(self, stopping: Awaitable[None], *, settle: bool) -> None:
        """Run `stopping`; replies wait until no more calls begin and it has begun."""
        over = self._over = asyncio.Event()
        try:
            if settle:
                await self._settle()
            stop = asyncio.ensure_future(stopping)
            await asyncio.wait({stop}, timeout=FAREWELL_S)
        finally:
            self._over = None
            over.set()
        await stop

    async def _settle(self) -> None:
        for _ in range(round(SETTLING_S / SETTLED_S)):
            begun = self.begun
            await asyncio.sleep(SETTLED_S)
            if begun == self.begun:
                return
