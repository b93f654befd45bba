"""What every endpoint of this dialect shares: the engine, the settings, and how a call is answered."""

from __future__ import annotations

from collections.abc import Sequence

from fastserve.codec.client_text import leading_int
from fastserve.config import TritonOptions
from fastserve.config.triton import parse_trace_config
from fastserve.dialects.kserve_v2.errors import HTTP_STATUS, error_body, in_own_words
from fastserve.dialects.kserve_v2.request import Forwarding
from fastserve.dialects.kserve_v2.settings import LogSettings
from fastserve.dialects.kserve_v2.values import INT64_MAX
from fastserve.errors import ServeError, invalid
from fastserve.repository.version import Version
from fastserve.serving.dialect import ServingContext
from fastserve.serving.model_view import ModelView, find_version
from fastserve.serving.service import DialectService
from fastserve.serving.traces import Traces
from fastserve.wire.call import Call
from fastserve.wire.dialect import retry_after

JSON = b"application/json"
TEXT = b"text/plain"


def read_version(text: str) -> int | None:
    """A version as clients write it; None for the latest. Raises ServeError INVALID_ARGUMENT."""
    if not text:
        return None
    number = leading_int(text)
    if number is None or abs(number) > INT64_MAX:
        raise invalid(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if number < 0:
        raise invalid(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return number


class Service(DialectService):
    """One dialect's state in one front process, shared by its HTTP and gRPC halves."""

    def __init__(self, context: ServingContext, options: TritonOptions) -> None:
        super().__init__(context, "kserve_v2")
        self.options = options
        self.traces = Traces(self.engine, parse_trace_config(options.trace_config))
        self.log = LogSettings(context.settings.log.level)
        http, grpc = options.http_header_forward_pattern, options.grpc_header_forward_pattern
        self.forward_http = Forwarding(http) if http else None
        self.forward_grpc = Forwarding(grpc) if grpc else None

    def find(self, model: str, version: str) -> ModelView:
        """The version of a model that answers, "" for the latest. Raises ServeError."""
        return self.views.of(find_version(self.catalog, model, read_version(version)))

    def refuse(
        self,
        call: Call,
        fault: ServeError,
        model: str = "",
        headers: Sequence[tuple[bytes, bytes]] = (),
        version: Version | None = None,
    ) -> None:
        """Reply with an error; `version` is the one that was asked for, where there is one."""
        self.traffic.refused(model, fault.kind.name, "" if version is None else version.number)
        fault = in_own_words(fault)
        call.reply(HTTP_STATUS[fault.kind], error_body(fault.message), JSON, (*headers, *retry_after(fault)))
