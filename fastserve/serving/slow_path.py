"""The general path: any request on any scheduler, errors included.

    read -> run -> write -> release -> send -> count     or refuse, or fail: the client always gets an answer

A dialect says how a request is read and its answer written; everything else is the same for all of them, and
done here. RegionRequest is a request some of whose tensors may be in client memory, in files or on GPUs.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from time import monotonic_ns

from fastserve.errors import ServeError, invalid
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse, Lent
from fastserve.serving.client_shared_memory import OutputBuffers, Range, hold_buffers
from fastserve.serving.dialect import DialectService
from fastserve.serving.exchange import Exchange, internal_error
from fastserve.util.memory_budget import ALLOWANCE_BYTES, Claim
from fastserve.util.spans import current_span

log = logging.getLogger(__name__)


class SlowRequest(ABC):
    """One request as its dialect reads it. The steps are called in this order; what raises is refused."""

    service: DialectService
    """Its dialect's: whose engine runs it, and where it is counted."""
    version: Version
    """The version that the request is for, from `read` on."""
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
        span = current_span()
        if span is not None:
            span.fail(fault.message)
        request.refused(fault)
    except Exception as error:
        try:
            request.refused(internal_error(exchange, error))
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
    if asked.account is not None and asked.account.charged:  # again: it may be one of many in a stream
        asked.account.check_rows()
    version, traffic = request.version, request.service.traffic
    traffic.stages(version.model, version.number)[0].observe_ns(monotonic_ns() - exchange.received_ns)
    read_ns = monotonic_ns()
    response = await request.run(asked)
    began_ns = monotonic_ns()
    request.ran_ns = began_ns - read_ns
    try:
        await request.write(response)
        wrote_ns = monotonic_ns()
    finally:
        response.release()
    span = current_span()
    if span is not None:
        span.add("decode", exchange.received_ns, read_ns)
        span.add("encode", began_ns, wrote_ns)
    return wrote_ns - began_ns


class RegionRequest(SlowRequest):
    """One request. `rooms` hold its outputs, by name."""

    _claim: Claim | None = None

    def __init__(self, service: DialectService) -> None:
        self.service, self.rooms = service, OutputBuffers()

    def hold(self, ranges: Mapping[str, Range]) -> None:
        """Room for outputs, where their client wants them. Raises ServeError."""
        self.rooms = hold_buffers(self.service.regions, ranges)

    async def charge(self, nbytes: int) -> None:
        """Have so many bytes of client memory on the memory budget, before they are read. Raises ServeError
        UNAVAILABLE for who has waited for room in vain."""
        budget = self.service.regions.budget
        if budget is None or nbytes <= ALLOWANCE_BYTES:
            return
        if self._claim is None:
            self._claim = Claim(budget)
        await self._claim.reserve(nbytes)

    def bring(self, request: InferRequest, outside: Mapping[str, Lent]) -> None:
        """Leave a checked request's tensors on GPUs to its workers: inputs `outside` and outputs in `rooms`.
        Raises ServeError UNIMPLEMENTED where they cannot access them."""
        self.service.regions.bring(self.version, request, outside, self.rooms)

    def close(self) -> None:
        self.rooms.close()
        if self._claim is not None:
            self._claim.release()


Memory = bytes | bytearray | memoryview


class BodyTensors:
    """Reader of the rest of a body. `more` is the dialect's word for missing bytes."""

    def __init__(self, body: Memory, model: str, more: str = "bytes") -> None:
        self._body, self._model, self._more = memoryview(body), model, more
        self._at = 0

    def take(self, name: str, nbytes: int) -> memoryview:
        """The bytes of the next tensor. Raises ServeError."""
        start, self._at = self._at, self._at + nbytes
        missing = self._at - len(self._body)
        if missing > 0:
            raise invalid(
                f"unexpected size for input '{name}', expecting {missing} {self._more} "
                f"for model '{self._model}'"
            )
        return self._body[start : self._at]

    def finish(self) -> None:
        """Raises ServeError when bytes are left over."""
        if self._at != len(self._body):
            raise invalid(f"unexpected additional input data for model '{self._model}'")
