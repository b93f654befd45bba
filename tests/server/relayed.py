"""The engine of a server as another front process has it, in the test's own process: every request goes
through a relay channel to the owner's schedulers and back.

A module that sets RELAYED runs each of its tests twice: asked as in the owner, and asked so.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

from fastserve.engine.engine import Engine
from fastserve.engine.relay.channel import RelayChannel
from fastserve.engine.relay.client import RelayClient, RelayScheduler
from fastserve.engine.relay.server import RelayServer
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.server import Server

POOL_BYTES = 32 << 20


class RelayedEngine(Engine):
    """Relays to the engine of `server`. Opened on the running loop."""

    def __init__(self, server: Server, pool_bytes: int = POOL_BYTES, tickets: int = 64) -> None:
        super().__init__(server.catalog)
        self._versions: dict[int, Version] = {}
        self.owner = RelayChannel.create(pool_bytes, tickets=tickets)
        message, fds = self.owner.describe()
        self.channel = RelayChannel.join(message, [os.dup(fd) for fd in fds])
        self.relay_server = RelayServer(
            self.owner, server.host.engine, self._versions.get, server.host.callbacks.want
        )
        self.client = RelayClient(self.channel)
        self.relay_server.open()
        self.client.open()

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        self._versions[id(version)] = version
        return await RelayScheduler(self.client, id(version)).infer(self, version, request)

    async def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield await self.infer(version, request)

    @property
    def holds(self) -> tuple[int, int, int]:
        """Requests under way, and pages of request and reply memory that are in use."""
        return self.relay_server.running, self.channel.requests.used(), self.channel.replies.used()

    def close(self) -> None:
        self.relay_server.close()
        self.channel.close()
