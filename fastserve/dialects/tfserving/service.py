"""What every endpoint of this dialect shares: the engine, the settings, and how a call is answered."""

from __future__ import annotations

from fastserve.backends.base import wrong_rows_rank
from fastserve.config import TFServingOptions
from fastserve.dialects.tfserving.errors import error_body
from fastserve.dialects.tfserving.monitoring import Monitor
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.signatures import Signatures
from fastserve.errors import DeadlineError, Kind, ModelError, ServeError
from fastserve.serving.dialect import ServingContext
from fastserve.serving.paths import Kept
from fastserve.serving.service import DialectService
from fastserve.serving.slow_path import SlowRequest
from fastserve.wire.call import Call
from fastserve.wire.dialect import CANONICAL_STATUS, retry_after
from fastserve.wire.inflate import inflate, work_of

JSON = b"application/json"
NO_DIMENSIONS = "Batched output tensor has 0 dimensions"
OTHER_ROWS = (
    "Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of the "
    "input tensors"
)
API_WORD = {"predict": "Predict", "classify": "Classify", "regress": "Regress"} | {
    word: word for word in ("Predict", "Classify", "Regress")
}
"""What ran, as runtime latencies call it: one word for REST and gRPC."""
CORS_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"Access-Control-Allow-Origin", b"*"),
    (b"Access-Control-Allow-Methods", b"POST, GET"),
    (b"Access-Control-Allow-Headers", b"Content-Type"),
)


class Service(DialectService):
    """Reads what all bodies have in common and sends what all replies have in common."""

    def __init__(self, context: ServingContext, options: TFServingOptions) -> None:
        super().__init__(context, "tfserving")
        self.options = options
        self.message_bytes = context.settings.grpc_options.message_bytes
        self.headers = CORS_HEADERS if options.cors else ()
        self.monitor = Monitor(self.catalog.models)
        self.timeout_ns = options.rest_timeout_ms * 1_000_000
        self.signatures = Kept(self.keepers, Signatures)

    async def body(self, call: Call) -> bytes | bytearray:
        """The body, decompressed when its coding says gzip; a broken one is an empty one (spec 1.3)."""
        if b"gzip" not in call.header(b"content-encoding"):
            return call.body
        try:
            return await self.apart(work_of(call.body, self.limits), inflate, call.body, self.limits)
        except ServeError:
            return b""

    def answer(self, call: Call, model: str, body: bytes) -> None:
        """Reply 200."""
        call.reply(200, body, JSON, self.headers)
        self.observe(model)

    def observe(
        self, model: str, api: str = "", took_ns: int = 0, ran_ns: int = 0, entrypoint: str = "REST"
    ) -> None:
        """Put a call that was answered well on TensorFlow Serving's metrics page; `api` names what ran."""
        if self.options.monitoring:
            self.monitor.count(model, "OK")
            if api:
                self.monitor.time(model, api, took_ns / 1000, entrypoint)
            if ran_ns:
                self.monitor.run(model, API_WORD[api], ran_ns / 1000)

    def observe_tasks(self, model: str, ran_ns: int, examples: int) -> None:
        """The same of a MultiInference, which is no request in the original's counts."""
        if self.options.monitoring:
            self.monitor.run(model, "MultiInference", ran_ns / 1000)
            self.monitor.examples(model, examples)

    def count_refused(self, model: str, fault: ServeError, told: ServeError, *, on_page: bool = True) -> None:
        """One call that is answered with an error: what it was; on the original's page, what it is told."""
        self.traffic.refused(model, fault.kind.name)
        if on_page and self.options.monitoring:
            self.monitor.count(model, told.kind.name)

    def refuse(self, call: Call, model: str, fault: ServeError) -> None:
        """Reply with an error."""
        told = own_words(fault)
        headers = (*self.headers, *retry_after(told))
        call.reply(CANONICAL_STATUS[told.kind], error_body(told.message), JSON, headers)
        self.count_refused(model, fault, told)


class GeneralRequest(SlowRequest):
    """What the inference calls have in common on the general path. `write` leaves the `body` to send."""

    service: Service

    def __init__(self, service: Service, target: Target, call: Call) -> None:
        self.service, self.target, self.call = service, target, call
        self.deadline_ns = service.deadline_ns(call.received_ns)
        self.body = b""

    async def send(self) -> None:
        self.call.reply(200, self.body, JSON, self.service.headers)

    def answered(self, took_ns: int) -> None:
        self.service.observe(self.target.name, self.target.verb, took_ns, self.ran_ns)

    def refused(self, fault: ServeError) -> None:
        self.service.refuse(self.call, self.target.name, fault)


def own_words(fault: ServeError) -> ServeError:
    """What has a kind and a text of its own here: a deadline that passed in the queue (vector
    ba-timeout-in-queue), an output without the batch's rows (spec 6.3; the worker logs which)."""
    if isinstance(fault, DeadlineError) and fault.queued:
        return ServeError(Kind.RESOURCE_EXHAUSTED, "Run() timeout exceeded while waiting in batching queue")
    rank = wrong_rows_rank(fault.message) if isinstance(fault, ModelError) else None
    if rank is None:
        return fault
    return ServeError(Kind.FAILED_PRECONDITION, NO_DIMENSIONS if rank == 0 else OTHER_ROWS)
