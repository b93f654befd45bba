"""One gRPC connection of the load generator: a channel of its own, one unary call at a time.

It has the face of `generator.Connection`. grpcio costs some 150 us a call on this side, so one process
makes fewer of them than of HTTP requests; --processes makes more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import grpc
import grpc.aio

from fastserve.cli.load.counters import Counters
from fastserve.cli.trust import Trust

# Equal channels of a process share one TCP connection unless they are told not to.
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


def make_channel(
    module: Any, address: str, trust: Trust | None, options: Sequence[tuple[str, int]] = OPTIONS
) -> Any:
    """A channel of `grpc` or `grpc.aio`, with TLS where there is somebody to trust."""
    if trust is None:
        return module.insecure_channel(address, options=options)
    return module.secure_channel(address, trust.credentials(), options=options)


class GrpcConnection:
    """Asks again as soon as it is answered. `done` is set once it is closed."""

    def __init__(
        self,
        address: str,
        method: str,
        requests: cycle[bytes],
        counters: Counters,
        trust: Trust | None = None,
    ) -> None:
        self.requests, self.counters = requests, counters
        self.done = asyncio.get_running_loop().create_future()
        self.sent_ns = 0  # 0: nothing under way
        self._channel: grpc.aio.Channel = make_channel(grpc.aio, address, trust)
        self._ask = self._channel.unary_unary(method)
        self._asking: asyncio.Task[None] | None = None

    async def connect(self, timeout_s: float) -> bool:
        """Whether the server is there."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), timeout_s)
        except asyncio.TimeoutError:
            await self._channel.close()
            return False
        return True

    def ask(self) -> None:
        """Ask until the load is over or a call fails as one does whose connection is gone."""
        self._asking = asyncio.get_running_loop().create_task(self._keep_asking())

    async def _keep_asking(self) -> None:
        try:
            while not self.counters.stopping and await self._ask_once():
                pass
        finally:
            await self._channel.close()
            if not self.done.done():
                self.done.set_result(None)

    async def _ask_once(self) -> bool:
        request = next(self.requests)
        self.sent_ns = time.perf_counter_ns()
        status, size = "OK", 0
        try:
            size = len(await self._ask(request))
        except grpc.aio.AioRpcError as fault:
            status = fault.code().name
        except asyncio.CancelledError:  # given up, and counted there
            return False
        if self.sent_ns:
            self.counters.answered(status, time.perf_counter_ns() - self.sent_ns, size)
            self.sent_ns = 0
        return status != "UNAVAILABLE"

    def close(self) -> None:
        """Close it when nothing is under way."""
        if self._asking is None and not self.done.done():
            self._asking = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        await self._channel.close()
        self.done.set_result(None)

    def give_up(self, fault: str) -> None:
        """End it now; what is under way has failed."""
        if self.sent_ns:
            self.sent_ns = 0
            self.counters.failed(fault)
        if self._asking is not None:
            self._asking.cancel()
