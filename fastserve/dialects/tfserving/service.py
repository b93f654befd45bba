"""Versions, signatures, settings and replies, shared by all endpoints and RPCs of this dialect.

version = find_version(catalog, target)
view = service.signatures.of(version).find(name)        view.reader, view.wanted, view.rows
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from fastserve._ext.json_reader import PredictReader
from fastserve.codec.json_text import to_bytes
from fastserve.dialects.tfserving.errors import error_body
from fastserve.dialects.tfserving.json_body import MAX_DEPTH
from fastserve.dialects.tfserving.monitoring import TFServingMonitor
from fastserve.dialects.tfserving.routes import Target
from fastserve.errors import DeadlineError, Kind, Reason, ServeError, invalid
from fastserve.net.compression import inflate, inflate_offloaded
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.net.router import CANONICAL_STATUS, fault_headers
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import DEFAULT_SIGNATURE, Signature
from fastserve.repository.version import Version
from fastserve.serving.dialect import DialectService, ServingContext
from fastserve.serving.fast_path import PerVersion
from fastserve.serving.slow_path import SlowRequest
from fastserve.settings import Limits, TFServingOptions
from fastserve.tensor import DTYPES, DType, Tensor

_LOOKS_LIKE_JSON = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*["}]')
_MAY_BE_JSON = re.compile(rb'[ \t\r\n]*(?:\Z|\{[ \t\r\n]*(?:\Z|["}]))')  # its beginning


def find_version(catalog: Catalog, target: Target) -> Version:
    """The available version a target names. Raises ServeError; an unknown label is 400 (spec 1.7)."""
    if target.label is not None:
        version = catalog.labelled(target.name, target.label)
        if version is None:
            catalog.explain_absence(target.name)
            raise invalid(f"Unrecognized servable version label: {target.label}")
        return version
    version = catalog.available(target.name, target.version)
    if version is None:
        catalog.explain_absence(target.name)
        which = "Latest({})" if target.version is None else "Specific({}, {})"
        wanted = which.format(target.name, target.version)
        raise ServeError(Kind.NOT_FOUND, f"Servable not found for request: {wanted}")
    return version


def find_signature(version: Version, name: str) -> Signature:
    """The signature of that name, "" for the default one. Raises ServeError in the words of Classify and
    Regress; Predict has its own."""
    signature = version.signatures.get(name or DEFAULT_SIGNATURE)
    if signature is None:
        raise invalid(f"No signature was found with the name: {name or DEFAULT_SIGNATURE}")
    return signature


def code_of(dtype: DType) -> int:
    """The code by which the compiled reader reads a type: uint16, which REST does not have (spec 2.6), as one
    that it does not have either."""
    return DTYPES["float16"].code if dtype.name == "uint16" else dtype.code


@dataclass(frozen=True, slots=True)
class RowReader:
    """How a body of bare numbers becomes the one input of a signature (an extension)."""

    dtype: DType
    shape: tuple[int, ...]
    row_bytes: int
    batching: bool

    def count(self, body: bytes | bytearray) -> int:
        """The rows of a body; 0 when it is no whole number of them, or is JSON."""
        rows = self._divide(len(body))
        return 0 if rows and _LOOKS_LIKE_JSON.match(body) else rows

    def count_arrived(self, body: ArrivedBody) -> int:
        """Count the rows of a body whose beginning is known; 0 also when it may yet turn out to be JSON."""
        rows = self._divide(len(body))
        return 0 if rows and _MAY_BE_JSON.match(body.begin) else rows

    def _divide(self, nbytes: int) -> int:
        rows, rest = divmod(nbytes, self.row_bytes)
        return 0 if rest or (rows > 1 and not self.batching) else rows

    def read(self, body: bytes | bytearray) -> Tensor | None:
        """The body as a tensor over its own bytes; None when it is no rows."""
        rows = self.count(body)
        shape = (rows, *self.shape) if self.batching else self.shape
        return Tensor(self.dtype, shape, body) if rows else None


@dataclass(frozen=True, slots=True)
class SignatureView:
    """How predict bodies of one signature are read and written."""

    signature: Signature
    reader: PredictReader
    wanted: tuple[str, ...]
    """The model's outputs to ask for; empty for all of them."""
    rows: RowReader | None


class SignatureViews:
    """The signatures of one version as predict reads them, each made when it is first asked for."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self._made: dict[str, SignatureView] = {}
        # Every version has a default signature; one without inputs still reads, and always faults.
        self.default = self.latest = self._make(version.signatures[DEFAULT_SIGNATURE])

    def find(self, name: str) -> SignatureView:
        """Return the view of a signature, "" for the default one, and make it `latest`. Raises ServeError."""
        signature = self.version.signatures.get(name or DEFAULT_SIGNATURE)
        if signature is None:
            text = f'Serving signature name: "{name or DEFAULT_SIGNATURE}" not found in signature def'
            raise invalid(text)
        if not signature.inputs:
            raise invalid(f"Failed to get input map for signature: {name or 'DEFAULT'}")
        self.latest = self._made.get(signature.name) or self._make(signature)
        return self.latest

    def _make(self, signature: Signature) -> SignatureView:
        names = signature.output_names.values()
        view = self._made[signature.name] = SignatureView(
            signature,
            PredictReader(
                [(alias, code_of(spec.dtype)) for alias, spec in signature.inputs.items()],
                to_bytes(signature.name),
                is_default=signature.name == DEFAULT_SIGNATURE,
                max_depth=MAX_DEPTH,
            ),
            () if set(names) == self.version.outputs.keys() else tuple(dict.fromkeys(names)),
            _row_reader(signature, self.version.batching),
        )
        return view


def _row_reader(signature: Signature, batching: bool) -> RowReader | None:
    if len(signature.inputs) != 1:
        return None
    spec = next(iter(signature.inputs.values()))
    if not spec.row_bytes or spec.shape is None or spec.dtype.name == "bool":
        return None
    return RowReader(spec.dtype, spec.shape, prod(spec.shape) * spec.dtype.item_bytes, batching)


NO_DIMENSIONS = "Batched output tensor has 0 dimensions"

OTHER_ROWS = (
    "Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of the "
    "input tensors"
)

OUTPUT_TEXTS = {Reason.SCALAR_OUTPUT: NO_DIMENSIONS, Reason.OUTPUT_ROWS: OTHER_ROWS}

API_WORD = {"predict": "Predict", "classify": "Classify", "regress": "Regress"} | {
    word: word for word in ("Predict", "Classify", "Regress")
}
"""The name of a run in runtime latencies: one word for REST and gRPC."""

CORS_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"Access-Control-Allow-Origin", b"*"),
    (b"Access-Control-Allow-Methods", b"POST, GET"),
    (b"Access-Control-Allow-Headers", b"Content-Type"),
)


class TFServingService(DialectService):
    """Reads what all bodies have in common and sends what all replies have in common."""

    def __init__(self, context: ServingContext, options: TFServingOptions) -> None:
        super().__init__(context, "tfserving")
        self.options = options
        self.tells_ready = context.settings.kserve_replies
        self.message_bytes = context.settings.grpc_options.message_bytes
        self.headers = CORS_HEADERS if options.cors else ()
        models = self.engine.catalog.models
        self.monitor = context.share("tfserving monitor", lambda: TFServingMonitor(models, context.registry))
        self.timeout_ns = options.rest_timeout_ms * 1_000_000
        self.signatures = PerVersion(self.keepers, SignatureViews)

    async def body(self, call: Call) -> bytes | bytearray:
        """The body, decompressed when its coding says gzip; a broken one is an empty one (spec 1.3)."""
        if b"gzip" not in call.header(b"content-encoding"):
            return call.body
        body = call.body
        return await inflate_offloaded(
            call.claim, self.offload, len(body), self.limits, _inflate, body, self.limits
        )

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

    def observer(
        self, model: str, api: str, entrypoint: str = "REST"
    ) -> Callable[[object, int, int], None] | None:
        """Return `Outcome.answered` of one model's fast path; None where the metrics page is off."""
        if not self.options.monitoring:
            return None
        return lambda prepared, took_ns, ran_ns: self.observe(model, api, took_ns, ran_ns, entrypoint)

    def observe_tasks(self, model: str, ran_ns: int, examples: int) -> None:
        """Count a MultiInference, which is no request in the original's counts."""
        if self.options.monitoring:
            self.monitor.run(model, "MultiInference", ran_ns / 1000)
            self.monitor.examples(model, examples)

    def count_refused(
        self, exchange: object, model: str, fault: ServeError, told: ServeError, *, on_page: bool = True
    ) -> None:
        """Count a call that is answered with an error: as `fault`, and on the original's page as `told`."""
        self.traffic.refused(model, fault.kind.name, message=told.message, exchange=exchange)
        if on_page and self.options.monitoring:
            self.monitor.count(model, told.kind.name)

    def refuse(self, call: Call, model: str, fault: ServeError) -> None:
        """Reply with an error."""
        told = tfserving_error(call.cause_of(fault))
        headers = (*self.headers, *fault_headers(told))
        self.count_refused(call, model, fault, told)  # first: a client that has its answer finds it counted
        call.reply(CANONICAL_STATUS[told.kind], error_body(told.message), JSON, headers)


def _inflate(body: bytes | bytearray, limits: Limits) -> bytes:
    try:
        return inflate(body, limits)
    except ServeError:
        return b""


class RestRequest(SlowRequest):
    """An inference call over REST on the general path. `write` leaves the `body` to send."""

    service: TFServingService

    def __init__(self, service: TFServingService, target: Target, call: Call) -> None:
        self.service, self.target, self.call = service, target, call
        self.deadline_ns = service.deadline_ns(call.received_ns, call.deadline_ns)
        self.body = b""

    async def send(self) -> None:
        self.call.reply(200, self.body, JSON, self.service.headers)

    def answered(self, took_ns: int) -> None:
        self.service.observe(self.target.name, self.target.verb, took_ns, self.ran_ns)

    def refused(self, fault: ServeError) -> None:
        self.service.refuse(self.call, self.target.name, fault)


def tfserving_error(fault: ServeError) -> ServeError:
    """Return a fault as TensorFlow Serving words it: a deadline that passed in the queue (vector
    ba-timeout-in-queue), an output without the batch's rows (spec 6.3; the worker logs which)."""
    if isinstance(fault, DeadlineError) and fault.queued:
        return ServeError(Kind.RESOURCE_EXHAUSTED, "Run() timeout exceeded while waiting in batching queue")
    text = OUTPUT_TEXTS.get(fault.reason)
    return fault if text is None else ServeError(Kind.FAILED_PRECONDITION, text)


DETAIL_BYTES = 1024
TRUNCATED = "...TRUNCATED"


def target_of(request: Any) -> Target:
    """Return the target of a message's model_spec. Raises ServeError when there is none (spec 4.3)."""
    if not request.HasField("model_spec"):
        raise invalid("Missing ModelSpec")
    spec, chosen = request.model_spec, request.model_spec.WhichOneof("version_choice")
    number = spec.version.value if chosen == "version" else None
    return Target(spec.name, number, spec.version_label if chosen == "version_label" else None, "")


def find_model(catalog: Catalog, target: Target) -> Version:
    """The version of a call that has to name its model. Raises ServeError."""
    if not target.name:
        raise invalid("ModelSpec has no name specified.")
    return find_version(catalog, target)


def fill_spec(spec: Any, version: Version, signature_name: str | None) -> None:
    """The model_spec of a response: the version is always told, a label never (spec 4.3)."""
    spec.name = version.model
    spec.version.value = version.number
    if signature_name is not None:
        spec.signature_name = signature_name or DEFAULT_SIGNATURE


def status_error(fault: ServeError) -> ServeError:
    """The status of a fault: in the original's words, and no longer than it makes them (spec 4.4)."""
    fault = tfserving_error(fault)
    raw = fault.message.encode("utf-8", "replace")
    if len(raw) <= DETAIL_BYTES:
        return fault
    text = raw[:DETAIL_BYTES].decode("utf-8", "ignore") + TRUNCATED
    return ServeError(fault.kind, text, retry_after_s=fault.retry_after_s)


def refuse_rpc(
    service: TFServingService, exchange: object, model: str, fault: ServeError, *, on_page: bool = True
) -> ServeError:
    """Return the status of a fault, and count it; `on_page`: on the original's metrics page too."""
    told = status_error(fault)
    service.count_refused(exchange, model, fault, told, on_page=on_page)
    return told
