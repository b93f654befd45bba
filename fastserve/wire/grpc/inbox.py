"""The messages of a streamed request, as its method takes them; what it leaves fills the client's window."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from fastserve._ext.grpc_messages import PREFIX_BYTES

if TYPE_CHECKING:
    from fastserve.wire.grpc.call import Call


class Inbox:
    """An async iterator of what the method's `read` makes of them."""

    __slots__ = ("_call", "_ended", "_messages", "_waiting")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._messages: deque[tuple[bytes, bool]] = deque()
        self._ended = False
        self._waiting: asyncio.Future[None] | None = None

    def put(self, message: bytes, compressed: bool) -> None:
        self._messages.append((message, compressed))
        self._wake()

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._ended:
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        message, compressed = self._messages.popleft()
        self._call.taken(PREFIX_BYTES + len(message))
        return await self._call.read(message, compressed)
