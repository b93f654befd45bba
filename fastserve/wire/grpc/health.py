"""grpc.health.v1: what is serving, asked once or watched. Knows messages, not transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from fastserve.errors import Kind, ServeError

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """States by service name; "" stands for the whole server, and with `nameless` so does every name that
    has no state of its own."""

    def __init__(self, *, nameless: bool = False) -> None:
        self._states = {"": NOT_SERVING}
        self._nameless = nameless
        self._closed = False
        self._changed: asyncio.Event | None = None  # set, and replaced, at every change

    def set(self, service: str, serving: bool) -> None:
        if not self._closed:
            self._states[service] = SERVING if serving else NOT_SERVING
            self._wake()

    def close(self) -> None:
        """Nothing is serving from now on; watchers are told so, and their calls end."""
        self._closed = True
        self._states = dict.fromkeys(self._states, NOT_SERVING)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    def check(self, service: str) -> int:
        """Raises ServeError NOT_FOUND for a service nobody has named."""
        state = self._find(service)
        if state == SERVICE_UNKNOWN:
            raise ServeError(Kind.NOT_FOUND, "unknown service")
        return state

    def _find(self, service: str) -> int:
        return self._states.get(service, self._states[""] if self._nameless else SERVICE_UNKNOWN)

    async def watch(self, service: str) -> AsyncIterator[int]:
        """The state now and at every change, until close()."""
        last = -1
        while True:
            if self._changed is None:
                self._changed = asyncio.Event()
            changed = self._changed
            state = self._find(service)
            if state != last:
                yield state
                last = state
            if self._closed:
                return
            await changed.wait()

    @staticmethod
    def read(message: bytes) -> str:
        """HealthCheckRequest -> service name."""
        try:
            service: str = health_pb2.HealthCheckRequest.FromString(message).service
        except DecodeError:
            raise ServeError(Kind.INVALID_ARGUMENT, "malformed HealthCheckRequest") from None
        return service

    @staticmethod
    def write(state: int) -> bytes:
        """A state -> HealthCheckResponse."""
        message: bytes = health_pb2.HealthCheckResponse(status=state).SerializeToString()
        return message
