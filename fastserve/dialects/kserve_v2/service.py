"""What every endpoint of this dialect shares: the engine, the settings, and how a call is answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from time import monotonic_ns
from typing import Protocol, cast

import msgspec

from fastserve.config import Limits
from fastserve.dialects.kserve_v2.controls import LogSettings, TraceSettings
from fastserve.dialects.kserve_v2.errors import HTTP_STATUS, error_body, in_own_words, unsupported
from fastserve.dialects.kserve_v2.plans import Plan, Plans
from fastserve.dialects.kserve_v2.regions import Regions
from fastserve.dialects.kserve_v2.repository import RepositoryFace
from fastserve.dialects.kserve_v2.statistics import Statistics
from fastserve.errors import ServeError
from fastserve.metrics import Registry, names
from fastserve.metrics.traffic import Traffic
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.wire.call import Call

JSON = b"application/json"
TEXT = b"text/plain"


class EngineFace(Protocol):
    """The part of the engine a dialect sees."""

    @property
    def catalog(self) -> Catalog: ...

    async def infer(self, version: Version, request: InferRequest) -> InferResponse: ...


class Service:
    """One dialect's state in one front process, shared by its HTTP and gRPC halves."""

    def __init__(
        self,
        engine: EngineFace,
        registry: Registry,
        limits: Limits,
        regions: Regions,
        repository: RepositoryFace,
    ) -> None:
        self.engine = engine
        self.catalog = engine.catalog
        self._requests = registry.counters(names.REQUESTS)
        self.limits = limits
        self.regions = regions
        self.repository = repository
        self.plans = Plans()
        self.trace = TraceSettings()
        self.log = LogSettings()
        self.statistics = Statistics(registry, engine.catalog)
        self.traffic = Traffic(registry, "kserve_v2", engine.catalog.models)

    def refuse(
        self,
        call: Call,
        fault: ServeError,
        model: str = "",
        headers: Sequence[tuple[bytes, bytes]] = (),
        version: Version | None = None,
    ) -> None:
        """Reply with an error; `version` is the one that was asked for, where there is one."""
        fault = in_own_words(fault)
        if fault.retry_after_s is not None:
            headers = (*headers, (b"Retry-After", b"%d" % max(1, round(fault.retry_after_s))))
        call.reply(HTTP_STATUS[fault.kind], error_body(fault.message), JSON, headers)
        self.count_failure(fault, model, version)

    def count_failure(self, fault: ServeError, model: str, version: Version | None) -> None:
        """Count an error by the version it happened to, or by the model alone."""
        if version is None:
            self.traffic.refused(model, fault.kind.name)
        else:
            self._requests.of(model, version.number, "kserve_v2", fault.kind.name).add()

    def succeeded(self, call: Call, plan: Plan) -> None:
        """Count an inference that was answered well."""
        self.traffic.count(plan.model, plan.version.number, monotonic_ns() - call.received_ns)
        self.statistics.ran(plan.version)

    @property
    def can_stream(self) -> bool:
        """Whether the engine runs models that give any number of responses."""
        return hasattr(self.engine, "stream")

    def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The engine's responses to one request. Raises ServeError when it gives one at a time only."""
        if not self.can_stream:
            raise unsupported("doesn't support models with decoupled transaction policy")
        return cast("AsyncGenerator[InferResponse, None]", getattr(self.engine, "stream")(version, request))  # noqa: B009


def show(call: Call, value: object) -> None:
    """Reply 200 with a value as JSON."""
    call.reply(200, msgspec.json.encode(value), JSON)


def show_nothing(call: Call) -> None:
    """Reply 200 with an empty body: it is done."""
    call.reply(200, b"", TEXT)
