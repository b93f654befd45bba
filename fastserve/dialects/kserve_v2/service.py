"""What every endpoint of this dialect shares: the engine, the settings, and how a call is answered."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import monotonic_ns

from fastserve.apart import Apart
from fastserve.config import TritonOptions
from fastserve.config.triton import parse_trace_config
from fastserve.dialects.kserve_v2.errors import HTTP_STATUS, error_body, in_own_words
from fastserve.dialects.kserve_v2.request import Forwarding
from fastserve.dialects.kserve_v2.settings import LogSettings, TraceSettings
from fastserve.dialects.kserve_v2.traces import Traced, Traces
from fastserve.dialects.kserve_v2.values import INT64_MAX
from fastserve.errors import ServeError, invalid
from fastserve.metrics import names
from fastserve.metrics.traffic import Traffic
from fastserve.repository.keepers import Keepers
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.dialect import ServingContext
from fastserve.serving.model_view import ModelView, Views, find_version
from fastserve.wire.call import Call
from fastserve.wire.dialect import retry_after

JSON = b"application/json"
TEXT = b"text/plain"
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")


def read_version(text: str) -> int | None:
    """A version as clients write it; None for the latest. Raises ServeError INVALID_ARGUMENT."""
    if not text:
        return None
    match = _NUMBER.match(text)
    number = int(match[1]) if match and len(match[1]) <= 20 else INT64_MAX + 1
    if abs(number) > INT64_MAX:
        raise invalid(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if number < 0:
        raise invalid(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return number


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
        self.views = Views(engine.catalog)
        self.options = options
        self.admin = settings.admin
        self.traces = Traces()
        self.trace = TraceSettings(parse_trace_config(self.options.trace_config), self.traces)
        self.log = LogSettings(settings.log.level)
        self.forward_http = Forwarding(self.options.http_header_forward_pattern)
        self.forward_grpc = Forwarding(self.options.grpc_header_forward_pattern)
        self.keepers = Keepers(engine.catalog)
        self.traffic = Traffic(registry, "kserve_v2", engine.catalog.models)

    def find(self, model: str, version: str) -> ModelView:
        """The version of a model that answers, "" for the latest. Raises ServeError."""
        return self.views.of(find_version(self.catalog, model, read_version(version)))

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
        self.count_failure(fault, model, version)
        fault = in_own_words(fault)
        call.reply(HTTP_STATUS[fault.kind], error_body(fault.message), JSON, (*headers, *retry_after(fault)))

    def count_failure(self, fault: ServeError, model: str, version: Version | None) -> None:
        """Count an error by the version it happened to, or by the model alone."""
        if version is None:
            self.traffic.refused(model, fault.kind.name)
        else:
            self._requests.of(model, version.number, "kserve_v2", fault.kind.name).add()

    def succeeded(self, call: Call, view: ModelView) -> None:
        """Count an inference that was answered well."""
        self.traffic.count(view.model, view.version.number, monotonic_ns() - call.received_ns)

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
