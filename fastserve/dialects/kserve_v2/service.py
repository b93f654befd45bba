"""What every endpoint of this dialect shares: the engine, the settings, and how a call is answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import monotonic_ns

import msgspec

from fastserve.config import TritonOptions
from fastserve.config.triton import parse_trace_config
from fastserve.dialects.kserve_v2.controls import LogSettings, TraceSettings
from fastserve.dialects.kserve_v2.errors import HTTP_STATUS, error_body, in_own_words, unsupported
from fastserve.dialects.kserve_v2.forwarding import Forwarding
from fastserve.dialects.kserve_v2.statistics import Statistics
from fastserve.dialects.kserve_v2.traces import Traced, Traces
from fastserve.errors import ServeError
from fastserve.metrics import names
from fastserve.metrics.traffic import Traffic
from fastserve.repository.keepers import Keepers
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.dialect import ServingContext
from fastserve.serving.model_control import LoadOverride
from fastserve.serving.model_view import ModelView, Views
from fastserve.wire.apart import Apart
from fastserve.wire.call import Call

JSON = b"application/json"
TEXT = b"text/plain"
_OFF = "disabled. Start the server with '--admin-%s' to enable."


class Service:
    """One dialect's state in one front process, shared by its HTTP and gRPC halves."""

    def __init__(self, context: ServingContext, options: TritonOptions) -> None:
        engine, registry, settings = context.engine, context.registry, context.settings
        self.engine = engine
        self.catalog = engine.catalog
        self._requests = registry.counters(names.REQUESTS)
        self.limits = settings.limits
        self.regions = context.regions
        self.repository = context.repository
        self.readiness = context.readiness  # of the server: every dialect says the same
        self.apart = Apart()
        self.plans = Views(engine.catalog)
        self.options = options
        self.admin = settings.admin
        self.traces = Traces()
        self.trace = TraceSettings(parse_trace_config(self.options.trace_config), self.traces)
        self.log = LogSettings(settings.log.level)
        self.forward_http = Forwarding(self.options.http_header_forward_pattern)
        self.forward_grpc = Forwarding(self.options.grpc_header_forward_pattern)
        self.keepers = Keepers(engine.catalog)
        self.statistics = Statistics(engine.catalog)
        self.traffic = Traffic(registry, "kserve_v2", engine.catalog.models)

    def must_allow_files(self, override: LoadOverride | None) -> None:
        """Raises ServeError UNIMPLEMENTED for files, which run as code, unless the server may take them."""
        if override is not None and override.files and not self.admin.file_overrides:
            raise unsupported(f"Files in a load are {_OFF % 'file-overrides'}")

    def must_allow_log_settings(self) -> None:
        """Raises ServeError UNIMPLEMENTED unless the server was told to let clients change its log."""
        if not self.admin.log_settings:
            raise unsupported(f"Changes of log settings are {_OFF % 'log-settings'}")

    async def infer(self, version: Version, request: InferRequest, traced: Traced | None) -> InferResponse:
        """The engine's answer, with its moments noted. Raises ServeError."""
        if traced is None:
            return await self.engine.infer(version, request)
        traced.begin(version, request)
        response: InferResponse | None = None
        try:
            response = await self.engine.infer(version, request)
        finally:
            traced.answered(request, response)
        return response

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

    def succeeded(self, call: Call, plan: ModelView) -> None:
        """Count an inference that was answered well."""
        self.traffic.count(plan.model, plan.version.number, monotonic_ns() - call.received_ns)

    def stream(
        self, version: Version, request: InferRequest, traced: Traced | None
    ) -> AsyncGenerator[InferResponse, None]:
        """The engine's responses to one request, noted as they come. Raises ServeError."""
        responses = self.engine.stream(version, request)
        if traced is None:
            return responses
        traced.begin(version, request)
        return _note_all(responses, request, traced)


async def _note_all(
    responses: AsyncGenerator[InferResponse, None], request: InferRequest, traced: Traced
) -> AsyncGenerator[InferResponse, None]:
    async with aclosing(responses):
        async for response in responses:
            traced.answered(request, response)
            yield response


def show(call: Call, value: object) -> None:
    """Reply 200 with a value as JSON."""
    call.reply(200, msgspec.json.encode(value), JSON)


def show_nothing(call: Call) -> None:
    """Reply 200 with an empty body: it is done."""
    call.reply(200, b"", TEXT)
