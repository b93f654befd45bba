"""What HTTP and gRPC share: one inference from header to answer, and the status of every reply."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from time import monotonic_ns
from typing import Protocol

from fastserve.dialects.triton_v1.answers import Answer, Answers
from fastserve.dialects.triton_v1.control import Control
from fastserve.dialects.triton_v1.header import RequestHeader
from fastserve.dialects.triton_v1.inputs import Data, read_request
from fastserve.dialects.triton_v1.lookup import find_version
from fastserve.dialects.triton_v1.names import CODE_OF, STATUS_OF, SUCCESS
from fastserve.dialects.triton_v1.plan import Plan, make_plan
from fastserve.dialects.triton_v1.shared_memory import Destination, SharedRegions
from fastserve.dialects.triton_v1.statistics import Statistics
from fastserve.dialects.triton_v1.text import quote
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.metrics import Readiness, Registry
from fastserve.metrics.traffic import Traffic
from fastserve.protos import load
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version, VersionState
from fastserve.request import InferRequest, InferResponse

SERVER_ID = "inference:0"
QUEUE_FULL = "Exceeds maximum queue size"
NO_SEQUENCE = "non-zero or non-empty correlation ID"
TOO_LATE = "Request timeout expired"


class EngineFace(Protocol):
    """The part of the engine a dialect sees."""

    @property
    def catalog(self) -> Catalog: ...

    async def infer(self, version: Version, request: InferRequest) -> InferResponse: ...


class Service:
    """One per front process, shared by all listeners."""

    def __init__(
        self,
        engine: EngineFace,
        registry: Registry,
        readiness: Readiness,
        control: Control,
        shared: SharedRegions,
    ) -> None:
        self.engine = engine
        self.catalog = engine.catalog
        self.readiness = readiness
        self.control = control
        self.shared = shared
        self.statistics = Statistics()
        self.traffic = Traffic(registry, "triton_v1", engine.catalog.models)
        self.started_ns = monotonic_ns()
        self.next_id: Callable[[], int] = itertools.count(1).__next__
        self._plans: dict[str, tuple[Plan, Answers]] = {}

    @asynccontextmanager
    async def infer(
        self, model: str, number: int, header: RequestHeader, make_data: Callable[[str], Data]
    ) -> AsyncIterator[Answer]:
        """Run one request; its raw outputs are valid inside the block. Raises ServeError."""
        started_ns = monotonic_ns()
        version = None
        try:
            with ExitStack() as holding:
                version = find_version(self.catalog, model, number)
                plan, answers = self._plan_of(version)
                request = read_request(plan, header, make_data(model), self.shared)
                held = self._hold_outputs(header, holding)
                response = await self.engine.infer(version, request)
                holding.callback(response.release)
                answer = answers.write(header, response.outputs, held)
                self._count_success(version, header, monotonic_ns() - started_ns)
                yield answer
        except ServeError as fault:
            self._count_failure(model, version, header, monotonic_ns() - started_ns, fault)
            raise as_v1(fault) from None

    def _hold_outputs(self, header: RequestHeader, holding: ExitStack) -> dict[str, Destination]:
        """Where outputs into shared memory go; looked up before the model runs (spec 3.4)."""
        return {
            one.name: holding.enter_context(self.shared.hold(one.shared))
            for one in header.outputs
            if one.shared is not None
        }

    def _plan_of(self, version: Version) -> tuple[Plan, Answers]:
        key = f"{version.model}/{version.number}"
        found = self._plans.get(key)
        if found is None or found[0].version is not version:
            plan = make_plan(version)
            found = self._plans[key] = (plan, Answers(plan))
        return found

    def _count_success(self, version: Version, header: RequestHeader, took_ns: int) -> None:
        self.statistics.succeeded(version, header.batch_size, took_ns)
        self.traffic.count(version.model, version.number, took_ns)

    def _count_failure(
        self, model: str, version: Version | None, header: RequestHeader, took_ns: int, fault: ServeError
    ) -> None:
        self.traffic.refused(model, fault.kind.name)
        if version is not None:
            plan, _ = self._plan_of(version)
            if 1 <= header.batch_size <= max(1, plan.max_batch_size):  # clients choose no counters
                self.statistics.failed(version, header.batch_size, took_ns)

    def is_ready(self) -> bool:
        """Strict readiness (spec 2): everything known is up, or was unloaded on purpose."""
        return self.readiness.ready and all(
            model.error is None
            and all(
                version.state is VersionState.AVAILABLE
                or (version.state is VersionState.END and version.error is None)
                for version in model.versions.values()
            )
            for model in self.catalog.models.values()
        )

    def status_line(self, fault: ServeError | None) -> bytes:
        """RequestStatus in one line of text: the value of NV-Status."""
        word, text = SUCCESS, ""
        if fault is not None:
            word, text = STATUS_OF[fault.kind], f" msg: {quote(fault.message)}"
        return f'code: {word}{text} server_id: "{SERVER_ID}" request_id: {self.next_id()}'.encode()

    def status_bytes(self, fault: ServeError | None) -> bytes:
        """RequestStatus as a serialized message."""
        code, text, server_id, number = self.status(fault)
        status = load("triton_v1").RequestStatus(code=code, msg=text, server_id=server_id, request_id=number)
        data: bytes = status.SerializeToString()
        return data

    def status(self, fault: ServeError | None) -> tuple[int, str, str, int]:
        """RequestStatus as its fields: code, msg, server_id, request_id."""
        if fault is None:
            return CODE_OF[SUCCESS], "", SERVER_ID, self.next_id()
        text = fault.message.encode("utf-8", "replace").decode()
        return CODE_OF[STATUS_OF[fault.kind]], text, SERVER_ID, self.next_id()


def as_v1(fault: ServeError) -> ServeError:
    """The engine's faults that the original has words of its own for (spec 3.4)."""
    if isinstance(fault, DeadlineError) and fault.queued:
        return ServeError(Kind.UNAVAILABLE, TOO_LATE)
    if fault.kind is Kind.UNAVAILABLE and fault.retry_after_s is not None:
        return ServeError(Kind.UNAVAILABLE, QUEUE_FULL)
    if NO_SEQUENCE in fault.message:  # V1 has no sequences named by a string
        return ServeError(fault.kind, fault.message.replace(NO_SEQUENCE, "non-zero correlation ID"))
    return fault
