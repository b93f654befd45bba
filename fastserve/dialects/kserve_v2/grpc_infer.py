"""ModelInfer: a ModelInferRequest read in place, the engine, a ModelInferResponse (spec 11).

Raw inputs stay where they were received until the engine writes them into the batch; typed contents are
written once into memory of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from fastserve._ext.proto_outline import Outline, read_outline
from fastserve._ext.proto_wire import (
    MOST_ENTRIES,
    Fault,
    InferMessage,
    WireFault,
    WireInput,
    read_infer_request,
    write_infer_response,
)
from fastserve._ext.slab import blank_bytes
from fastserve.dialects.kserve_v2.answers import reply_parameters, shown_tensor
from fastserve.dialects.kserve_v2.body import InferBody, InputPart, Memory, OutputPart, refuse_double
from fastserve.dialects.kserve_v2.errors import internal, invalid, tell, unsupported
from fastserve.dialects.kserve_v2.grpc_fast import TOO_LARGE, FastGrpc
from fastserve.dialects.kserve_v2.grpc_parameters import (
    GrpcParameters,
    read_output,
    read_parameters,
    read_range,
)
from fastserve.dialects.kserve_v2.infer import make_request
from fastserve.dialects.kserve_v2.operations import SERVICE
from fastserve.dialects.kserve_v2.service import Service
from fastserve.dialects.kserve_v2.traces import Traced
from fastserve.errors import Kind, ServeError
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import Awaited
from fastserve.serving.model_view import ModelView
from fastserve.serving.shared_memory import Rooms, hold_rooms
from fastserve.serving.slow_path import SlowRequest, answer_slowly
from fastserve.tensor import DTYPE_BY_KSERVE, KSERVE_NAME, Tensor
from fastserve.wire.apart import APART_BYTES
from fastserve.wire.grpc import Exchange, Method, Rpc
from fastserve.wire.scope import Scope

# Fields of InferTensorContents by their numbers, named as the original names what they hold.
_CONTENTS = ("", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "FP64", "BYTES")
DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
Output = tuple[str, str, tuple[int, ...], None]


@dataclass(slots=True)
class Sent:
    """A request as received: the parsed message, and the bytes its raw tensors lie in."""

    message: InferMessage
    data: memoryview
    typed: dict[int, Memory] = field(default_factory=dict)  # contents that were large enough to be read ahead


@dataclass(slots=True)
class Job:
    """One request that passed its checks. `rooms` are held until the job is closed."""

    plan: ModelView
    body: InferBody
    parameters: GrpcParameters
    request: InferRequest
    rooms: Rooms


def read_sent(data: bytes) -> Sent:
    """A serialized ModelInferRequest. Raises ServeError."""
    try:
        sent = Sent(read_infer_request(data), memoryview(data))
        if len(data) >= APART_BYTES:
            _read_ahead(sent)
        return sent
    except WireFault as fault:
        if fault.code is Fault.TOO_MANY:
            raise invalid(
                f"ModelInferRequest: at most {MOST_ENTRIES} inputs, outputs, parameters, raw tensors and "
                f"axes of a shape are read, more begin at byte {fault.offset}"
            ) from None
        raise internal(f"malformed ModelInferRequest: {fault}") from None


def _read_ahead(sent: Sent) -> None:
    """Typed contents, which are written out; what is wrong with them is told when the model is known."""
    for index, given in enumerate(sent.message.inputs):
        if given.contents and len(given.kinds) == 1:
            with suppress(WireFault):
                sent.typed[index] = _copy_contents(sent.message, index, given)


class Infer:
    """The RPC: the fast path first, and the general one for what it does not take."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._fast = FastGrpc(service)

    def start(self, data: bytes, exchange: Exchange) -> bool:
        """Take a request that the fast path knows, or leave it to the coroutine below."""
        service = self._service
        outline = None if service.traces.on or service.forward_grpc else read_outline(data)
        if outline is None:
            return False
        return self._fast.start(outline, exchange, exchange.deadline_ns)

    async def __call__(self, data: bytes, rpc: Rpc) -> bytes:
        """A serialized ModelInferResponse. Raises ServeError."""
        service, exchange = self._service, Awaited(rpc.received_ns)
        outline = None if service.traces.on or service.forward_grpc else read_outline(data)
        sent = await service.apart(len(data), read_sent, data)
        request = GeneralInfer(service, exchange, sent, rpc, outline, self._fast)
        await answer_slowly(exchange, request, service.traffic)
        return await exchange.answer()


class GeneralInfer(SlowRequest):
    """A request as the general path answers it; the fast one learns it."""

    def __init__(
        self,
        service: Service,
        exchange: Awaited,
        sent: Sent,
        rpc: Rpc,
        outline: Outline | None,
        fast: FastGrpc,
    ) -> None:
        self._service, self._exchange, self._sent, self._rpc = service, exchange, sent, rpc
        self._outline, self._fast = outline, fast
        self._job: Job | None = None
        self._traced: Traced | None = None

    async def read(self) -> InferRequest:
        service = self._service
        plan = service.find(self._sent.message.model_name, self._sent.message.model_version)
        self.version = plan.version
        if plan.decoupled:
            raise unsupported(DECOUPLED)
        job = self._job = make_job(service, plan, self._sent, self._rpc)
        self._traced = service.traces.sample(plan.model) if service.traces.on else None
        return job.request

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        return self._service.infer(self.version, request, self._traced)

    async def write(self, response: InferResponse) -> None:
        job, traced = self._job, self._traced
        assert job is not None
        parameters = dict(reply_parameters(job.plan, job.parameters, response))
        size = sum(memoryview(tensor.data).nbytes for tensor in response.outputs.values())
        self._reply = await self._service.apart(size, write_response, job, response, parameters)
        if traced is not None:
            traced.stamp("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", ns=self._exchange.received_ns)
            traced.stamp("GRPC_SEND_START", "GRPC_SEND_END")

    def close(self) -> None:
        if self._traced is not None:
            self._traced.end()
        if self._job is not None:
            self._job.rooms.close()

    async def send(self) -> None:
        self._exchange.reply(self._reply)

    def answered(self, took_ns: int) -> None:
        job = self._job
        if self._outline is not None and job is not None:
            self._fast.learn(
                self._outline,
                job.plan,
                self._sent.message,
                job.body,
                job.request,
                self._rpc.patience_ns,
            )

    def refused(self, fault: ServeError) -> None:
        told = tell(fault, self._sent.message.id)
        self._service.traffic.refused(self._sent.message.model_name, told.kind.name)
        self._exchange.refuse(told)


def make_infer(service: Service) -> Method:
    """ModelInfer."""
    infer = Infer(service)
    return Method(SERVICE + "ModelInfer", bytes, infer, bytes, scope=Scope.INFER, start=infer.start)


def deadline_of(rpc: Rpc) -> int:
    """When the client's time is up, 0 for never."""
    left_s = rpc.seconds_left()
    return 0 if left_s is None else monotonic_ns() + int(left_s * 1e9)


def make_job(service: Service, plan: ModelView, sent: Sent, rpc: Rpc) -> Job:
    """Read and check a request (spec 3.3, 11). Raises ServeError."""
    message = sent.message
    parameters = read_parameters(message.parameters)
    if service.forward_grpc:
        service.forward_grpc.add(rpc.metadata, parameters)
    body = InferBody(message.id, _read_inputs(service, plan, sent), parameters=parameters)
    body.outputs = [read_output(one.name, one.parameters) for one in message.outputs]
    _check_rows(plan, body)
    request = make_request(plan, body)
    request.deadline_ns = deadline_of(rpc)
    ranges = {part.name: part.range for part in reversed(body.outputs) if part.range is not None}
    return Job(plan, body, parameters, request, hold_rooms(service.regions, ranges))


def _check_rows(plan: ModelView, body: InferBody) -> None:
    """The original takes a negative batch axis for one that differs."""
    if plan.max_batch_size and len(body.inputs) > 1:
        first = body.inputs[0]
        if first.shape and first.shape[0] < 0:
            told = f"[request id: {body.request_id or '<id_unknown>'}] "
            raise invalid(
                f"{told}input '{first.name}' batch size does not match other inputs for '{plan.model}'"
            )


def _read_inputs(service: Service, plan: ModelView, sent: Sent) -> list[InputPart]:
    names: set[str] = set()
    for given in sent.message.inputs:  # the original looks at names first, at data later
        refuse_double(given.name, names, sent.message.id)
    parts: list[InputPart] = []
    raw_at = 0
    for index, given in enumerate(sent.message.inputs):
        memory, used_raw = _read_memory(service, plan, sent, index, given, raw_at)
        raw_at += used_raw
        parts.append(InputPart(given.name, given.datatype, given.shape, memory))
    return parts


def _read_memory(
    service: Service, plan: ModelView, sent: Sent, index: int, given: WireInput, raw_at: int
) -> tuple[Memory, bool]:
    """The bytes of one input, and whether they were the next raw entry."""
    message = sent.message
    range = read_range(given.name, given.parameters)
    if range is not None:
        if given.contents:
            raise invalid(
                "unexpected 'content' provided when using shared memory for input tensor "
                f"'{given.name}' for model '{plan.model}'"
            )
        return service.regions.read(range), False
    if given.contents and not message.raw_count:
        ready = sent.typed.get(index)
        return _read_contents(plan, message, index, given) if ready is None else ready, False
    if given.contents:
        raise invalid(
            "contents field must not be specified when using raw_input_contents for "
            f"'{given.name}' for model '{plan.model}'"
        )
    if raw_at >= message.raw_count:
        raise invalid(
            f"unable to find data for input tensor '{given.name}' for model '{plan.model}' in request."
        )
    offset, size = message.raw(raw_at)
    return sent.data[offset : offset + size], True


def _read_contents(plan: ModelView, message: InferMessage, index: int, given: WireInput) -> Memory:
    where = f"unexpected explicit tensor data for input tensor '{given.name}' for model '{plan.model}'"
    kinds = given.kinds
    if len(kinds) > 1:
        raise invalid(f"{where}, binary data was already supplied.")
    if not kinds:
        return b""
    try:
        return _copy_contents(message, index, given)
    except WireFault:
        wanted = given.datatype if given.datatype in DTYPE_BY_KSERVE else "<invalid>"
        raise invalid(f"{where} of type '{_CONTENTS[kinds[0]]}', expected datatype '{wanted}'") from None


def _copy_contents(message: InferMessage, index: int, given: WireInput) -> Memory:
    """Raises WireFault."""
    dtype = DTYPE_BY_KSERVE.get(given.datatype)
    code = dtype.code if dtype is not None else 0
    memory = blank_bytes(message.contents_bytes(index, code))
    message.copy_contents(index, code, memory)
    return memory


def write_response(job: Job, response: InferResponse, parameters: dict[str, Any]) -> bytes:
    """A serialized ModelInferResponse. Raises ServeError."""
    outputs, raws = collect_outputs(job, response)
    plan = job.plan
    try:
        return write_infer_response(
            plan.model, str(plan.version.number), job.body.request_id, parameters, outputs, raws
        )
    except (WireFault, OverflowError):
        raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) from None


def collect_outputs(job: Job, response: InferResponse) -> tuple[list[Output], list[Memory]]:
    """What a response says of each output, and the bytes; empty where they went to shared memory."""
    parts: dict[str, OutputPart] = {part.name: part for part in reversed(job.body.outputs)}
    outputs: list[Output] = []
    raws: list[Memory] = []
    for name, given in response.outputs.items():
        tensor = shown_tensor(job.plan, name, given, parts.get(name))
        outputs.append((name, KSERVE_NAME[tensor.dtype.name], tensor.shape, None))
        raws.append(_send_or_put(job, name, tensor))
    return outputs, raws


def _send_or_put(job: Job, name: str, tensor: Tensor) -> Memory:
    room = job.rooms.get(name)
    if room is None:
        return tensor.data
    room.put(name, tensor.data)
    return b""
