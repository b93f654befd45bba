"""POST ...:predict. Read the body, await the engine, write the reply.

The compiled reader takes every good body. What it refuses is read again the exact way, which
finds the original's error text (spec 1.6, 2); beyond EXPLAIN_BYTES that would cost too much, and
the answer is the compiled reader's own short text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any

from fastserve._ext.json_reader import Fault, JSONFault, PredictBody
from fastserve._ext.json_writer import WriterFault, write_outputs, write_predictions
from fastserve.dialects.tfserving.document import read_document, read_signature_name, to_text
from fastserve.dialects.tfserving.errors import writer_error
from fastserve.dialects.tfserving.explain import read_tensors
from fastserve.dialects.tfserving.fast import Fast
from fastserve.dialects.tfserving.lookup import find_predict_signature, find_version, no_signature
from fastserve.dialects.tfserving.plans import Plans, PredictPlan
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import JSON, MAX_DEPTH, Service
from fastserve.dialects.tfserving.short_texts import short_error
from fastserve.errors import ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.paths import LastPath
from fastserve.serving.slow_path import SlowRequest, answer_slowly
from fastserve.tensor import DTYPE_BY_CODE, Tensor
from fastserve.wire.call import Call

FAST_BYTES = 8 << 20  # up to 20 ms; larger bodies are read apart from the event loop
EXPLAIN_BYTES = 1 << 18  # reading and explaining cost up to 0.35 us a byte, in which nobody else is served
RAW_TYPE = b"application/octet-stream"

Inputs = dict[str, Tensor]  # by the signature's names
Read = tuple[PredictPlan, bool, Inputs]  # the plan, whether the body is columnar, the inputs


class Predict:
    """The endpoint of one target."""

    __slots__ = ("_catalog", "_fast", "_head", "_plans", "_raw", "_service", "_target")

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._catalog = service.catalog
        self._target = target
        self._plans: Plans | None = None
        self._fast: LastPath[Fast] = LastPath(service.keepers, self._open)
        self._head: object = None  # of the last call; its kind of body is worked out once
        self._raw = False

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        target, fast = self._target, self._fast.path
        version = self._catalog.available(target.name, target.version)
        if fast is None or fast.version is not version:
            fast = self._fast.find(version)
            if fast is None:
                return self._answer(call)
        if call.head is not self._head and not self._meet(call):
            return self._answer(call)
        if len(call.body) > FAST_BYTES:
            return self._answer(call)
        if self._raw:
            tensor = self._plans_of(fast.version).read_raw(call.body)
            return None if fast.start_raw(call, tensor) else self._answer(call)
        return None if fast.start(call) else self._answer(call)

    def _open(self, version: Version) -> Fast | None:
        """The fast path of this version; labels take the general one, which looks them up."""
        if self._target.label is not None:
            return None
        return Fast.open(self._service, version, self._plans_of(version).default)

    def _meet(self, call: Call) -> bool:
        """Look at a head once (the wire hands equal heads on as one object): may it pass the fast path?"""
        if call.header(b"content-encoding"):
            return False
        self._head, self._raw = call.head, _is_raw(call)
        return True

    def _answer(self, call: Call) -> Coroutine[Any, Any, None]:
        return answer_slowly(
            call, GeneralPredict(self, self._service, self._target.name, call), self._service.traffic
        )

    async def read(self, call: Call) -> tuple[Version, Read]:
        """The general path's look at a call. Raises ServeError."""
        service = self._service
        body = await service.body(call)
        version = self._find_version(body)
        return version, await service.apart(len(body), self._read, version, call, body)

    def _find_version(self, body: bytes | bytearray) -> Version:
        try:
            return find_version(self._service.catalog, self._target)
        except ServeError:
            if len(body) <= EXPLAIN_BYTES:  # a body that is not JSON is the first thing wrong (spec 1.6)
                read_signature_name(read_document(body, MAX_DEPTH))
            raise

    def _plans_of(self, version: Version) -> Plans:
        plans = self._plans
        if plans is None or plans.version is not version:
            plans = self._plans = Plans(version, MAX_DEPTH)
        return plans

    def _read(self, version: Version, call: Call, body: bytes | bytearray) -> Read:
        plans = self._plans_of(version)
        if plans.raw is not None and not body.startswith(b'{"') and _is_raw(call):
            tensor = plans.read_raw(body)
            if tensor is not None:
                default = plans.default
                return default, False, {next(iter(default.dtypes)): tensor}
        return read_predict(plans, body)


class GeneralPredict(SlowRequest):
    """A predict as the general path answers it."""

    def __init__(self, predict: Predict, service: Service, model: str, call: Call) -> None:
        self._predict, self._service, self._model, self._call = predict, service, model, call

    async def read(self) -> InferRequest:
        self.version, (plan, self._columnar, inputs) = await self._predict.read(self._call)
        self._plan = plan
        return InferRequest(
            {plan.signature.input_names[alias]: tensor for alias, tensor in inputs.items()},
            plan.wanted,
            deadline_ns=self._service.deadline_ns(self._call),
        )

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        return self._service.engine.infer(self.version, request)

    async def write(self, response: InferResponse) -> None:
        outputs = response.outputs
        size = sum(memoryview(tensor.data).nbytes for tensor in outputs.values())
        self._reply = await self._service.apart(
            size, write_predict, self._plan, outputs, columnar=self._columnar
        )

    async def send(self) -> None:
        self._call.reply(200, self._reply, JSON, self._service.headers)

    def answered(self, took_ns: int) -> None:
        if self._service.options.monitoring:
            self._service.observe(self._model, "predict", took_ns)

    def refused(self, fault: ServeError) -> None:
        self._service.refuse(self._call, self._model, fault)


def _is_raw(call: Call) -> bool:
    return call.header(b"content-type").partition(b";")[0].strip().lower() == RAW_TYPE


def read_predict(plans: Plans, body: bytes | bytearray) -> Read:
    """A JSON body of predict. Raises ServeError."""
    try:
        plan, read = _read_compiled(plans, body)
    except JSONFault as fault:
        if len(body) > EXPLAIN_BYTES:
            raise _large_error(fault) from None
        return _read_plain(plans, body)
    inputs = {
        alias: Tensor(DTYPE_BY_CODE[code], shape, data) for alias, (code, shape, data) in read.tensors.items()
    }
    return plan, read.columnar, inputs


def _read_compiled(plans: Plans, body: bytes | bytearray) -> tuple[PredictPlan, PredictBody]:
    """With the signature last asked for; a body that names another one says which."""
    plan = plans.latest
    try:
        return plan, plan.reader.read(body)
    except JSONFault as fault:
        if fault.code is not Fault.OTHER_SIGNATURE:
            raise
        plan = plans.choose(to_text(fault.signature or b"")) or plan
        return plan, plan.reader.read(body)


def _large_error(fault: JSONFault) -> ServeError:
    if fault.code is Fault.OTHER_SIGNATURE:
        return no_signature(to_text(fault.signature or b""))
    return short_error(fault)


def _read_plain(plans: Plans, body: bytes | bytearray) -> Read:
    """The exact way, which raises the original's error, or reads what the compiled way would not."""
    document = read_document(body, MAX_DEPTH)
    name = read_signature_name(document)
    find_predict_signature(plans.version, name)
    plan = plans.choose(name)
    assert plan is not None  # the line before found its signature
    columnar, inputs = read_tensors(document, plan.dtypes)
    return plan, columnar, inputs


def write_predict(plan: PredictPlan, outputs: Mapping[str, Tensor], *, columnar: bool) -> bytes:
    """The body of a reply. `outputs` by the model's names. Raises ServeError."""
    named = [
        (alias, tensor.dtype.code, tensor.shape, tensor.data)
        for alias, tensor in ((alias, outputs[name]) for alias, name in plan.outputs)
    ]
    try:
        return write_outputs(named) if columnar else write_predictions(named)
    except WriterFault as fault:
        raise writer_error(fault) from None
