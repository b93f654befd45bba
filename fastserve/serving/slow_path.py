"""The general path: what the fast one did not know, errors included. Any scheduler, any request.

    read -> run -> write -> release -> send -> count     or refuse, or fail: the client always hears

A dialect says how a request is read and its answer written; everything else is the same for all of them,
and done here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from time import monotonic_ns

from fastserve.errors import ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import Exchange, unforeseen
from fastserve.serving.service import DialectService

log = logging.getLogger(__name__)


class SlowRequest(ABC):
    """One request as its dialect reads it. The steps are called in this order; what raises is refused."""

    service: DialectService
    """Its dialect's: whose engine runs it, and where it is counted."""
    version: Version
    """Whose it is, from `read` on."""
    ran_ns = 0
    """From its being read to the engine's answer, when there is one."""

    @abstractmethod
    async def read(self) -> InferRequest:
        """Find the version, check what was sent, hold client memory. Raises ServeError."""

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        """The engine's answer. Raises ServeError."""
        return self.service.engine.infer(self.version, request)

    @abstractmethod
    async def write(self, response: InferResponse) -> None:
        """Write the answer, and send it unless `send` does. The response is valid until here. Raises
        ServeError."""

    async def send(self) -> None:  # noqa: B027
        """Send what was written."""

    def close(self) -> None:  # noqa: B027
        """Let go of client memory; in any case."""

    def answered(self, took_ns: int) -> None:  # noqa: B027
        """It was answered well, and is counted."""

    @abstractmethod
    def refused(self, fault: ServeError) -> None:
        """Tell the client what is wrong, in the dialect's words, and count it."""


async def answer_slowly(exchange: Exchange, request: SlowRequest) -> None:
    """Answer a request; when this returns, it was, unless its client is gone."""
    try:
        try:
            encode_ns = await _run(exchange, request)
        finally:
            request.close()
        await request.send()
    except ServeError as fault:
        request.refused(fault)
    except Exception as error:
        try:
            request.refused(unforeseen(exchange, error))
        except Exception:  # it was answered before
            exchange.fail(error)
    else:
        version, traffic = request.version, request.service.traffic
        traffic.stages(version.model, version.number)[1].observe_ns(encode_ns)
        took_ns = traffic.answered(version.model, version.number, exchange.received_ns)
        try:
            request.answered(took_ns)
        except Exception:  # what is learned of a request is no matter of its client's, who has the answer
            log.exception("nothing could be learned of a request that was answered")


async def _run(exchange: Exchange, request: SlowRequest) -> int:
    """How long its answer was written. Reading is counted whatever comes of it, as on the fast path."""
    asked = await request.read()
    version, traffic = request.version, request.service.traffic
    traffic.stages(version.model, version.number)[0].observe_ns(monotonic_ns() - exchange.received_ns)
    read_ns = monotonic_ns()
    response = await request.run(asked)
    began_ns = monotonic_ns()
    request.ran_ns = began_ns - read_ns
    try:
        await request.write(response)
        return monotonic_ns() - began_ns
    finally:
        response.release()
