"""The general path of an inference, for both transports, which say how it is read and written; and the checks
on it, with the original's texts and in its order (spec 3.3).

The original keeps inputs in a hash table that lists the latest first; that order shows in its texts
and decides which of several faults is told, so it is kept here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Sequence
from math import prod
from typing import Any

from fastserve._ext.flatten import walk_bytes
from fastserve.dialects.kserve_v2.errors import tag
from fastserve.dialects.kserve_v2.request import Asked, Forwarding, InferBody, InputPart, Memory
from fastserve.dialects.kserve_v2.service import Service
from fastserve.errors import Kind, ModelError, invalid, unsupported
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.model_view import ModelView, TensorView
from fastserve.serving.region_request import RegionRequest
from fastserve.serving.traces import Traced
from fastserve.tensor import DTYPE_BY_KSERVE, KSERVE_NAME, Tensor, count_items, fits_shape, kserve_name


class Inference(RegionRequest):
    """One request. `view` is None until its model is found, `request` until it has passed its checks."""

    service: Service
    refusal: str
    """Of models that answer several times."""

    def __init__(self, service: Service, forwarding: Forwarding | None, traced: Traced | None = None) -> None:
        super().__init__(service)
        self.forwarding, self.traced = forwarding, traced
        self.view: ModelView | None = None
        self.request: InferRequest | None = None
        self.deadline_ns = 0

    # --- what a transport says -------------------------------------------------------------------------

    @abstractmethod
    def find(self) -> ModelView:
        """The version it is for. Raises ServeError."""

    @abstractmethod
    async def read_body(self, view: ModelView) -> InferBody:
        """What was sent. Raises ServeError."""

    @abstractmethod
    def sent_headers(self) -> Iterable[tuple[str, str | bytes]]:
        """Those that may become parameters."""

    @abstractmethod
    def encode(self, view: ModelView, response: InferResponse) -> Any:
        """The reply, for `send`. Raises ServeError."""

    # --- the steps -------------------------------------------------------------------------------------

    async def read(self) -> InferRequest:
        view = self.view = self.find()
        if view.decoupled and not view.whole:
            raise unsupported(self.refusal)
        return await self.prepare(view)

    async def prepare(self, view: ModelView) -> InferRequest:
        """Read, hold client memory, check. Raises ServeError."""
        service, self.version = self.service, view.version
        body = self.body = await self.read_body(view)
        if self.forwarding:
            self.forwarding.add(self.sent_headers(), body.parameters)
        self.asked = Asked.of(body)
        self.hold(self.asked.ranges)
        strings = sum(len(part.data) for part in body.inputs if part.datatype == "BYTES")  # read one by one
        request = await service.apart(strings, make_request, view, body)
        outside = {part.name: part.lent for part in body.inputs if part.lent is not None}
        await self.bring(request, outside)
        request.deadline_ns = self.deadline_ns
        self.request = request
        return request

    def check_strings(self, name: str, tensor: Tensor) -> None:
        told, count = tag(self.body.request_id), count_items(tensor.shape)
        check_strings(tensor.data, count, name, self.version.model, told)

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        return (self.traced or self.service.engine).infer(self.version, request)

    async def write(self, response: InferResponse) -> None:
        assert self.view is not None
        self.reply = await self.service.apart(response.nbytes, self.encode, self.view, response)
        await self.rooms.flush()


_LENGTH_BYTES = 4
_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim in your "
    "input dims config, try setting max_batch_size to zero. See the model configuration docs for more info "
    "on max_batch_size."
)


def make_request(view: ModelView, body: InferBody) -> InferRequest:
    """The neutral request of a body that fits the model. Raises ServeError."""
    parameters = body.parameters
    wanted = check_outputs(view, [part.name for part in body.outputs])
    return InferRequest(
        check_inputs(view, body.inputs, body.request_id),
        wanted,
        request_id=body.request_id,
        priority=parameters.priority,
        parameters=parameters.own,
        sequence_id=parameters.sequence_id,
        sequence_start=parameters.sequence_start,
        sequence_end=parameters.sequence_end,
        timeout_us=parameters.timeout_us,
    )


def check_outputs(view: ModelView, names: Sequence[str]) -> tuple[str, ...]:
    """The outputs to ask for, in the model's order; empty for all. Raises ServeError."""
    for name in sorted(names):  # the original keeps them in a sorted set
        if name not in view.outputs:
            raise invalid(f"unexpected inference output '{name}' for model '{view.model}'")
    wanted = set(names)
    return () if len(wanted) == len(view.outputs) else tuple(n for n in view.outputs if n in wanted)


def check_inputs(view: ModelView, parts: Sequence[InputPart], request_id: str) -> dict[str, Tensor]:
    """The tensors for the engine, in the model's own shapes. Raises ServeError."""
    told = tag(request_id)
    latest_first = parts[::-1]
    _check_count(view, latest_first, told)
    for part in latest_first:
        if part.name not in view.inputs:
            raise invalid(f"unexpected inference input '{part.name}' for model '{view.model}'")
    if view.max_batch_size:
        _check_batch(view, latest_first, told)
    for part in latest_first:
        _check_part(view, view.inputs[part.name], part, told)
    _check_required(view, parts, told)
    sent = {part.name: part for part in parts}
    return {
        name: Tensor(side.dtype, side.to_model(sent[name].shape, batching=view.batching), sent[name].data)
        for name, side in view.inputs.items()
        if name in sent
    }


def _check_count(view: ModelView, parts: Sequence[InputPart], told: str) -> None:
    required, most, count = len(view.required), len(view.inputs), len(parts)
    if required <= count <= most:
        return
    wanted = f"{most} inputs" if required == most else f"number of inputs between {required} and {most}"
    given = {part.name for part in parts}
    missing = ",".join(f"'{name}'" for name in view.required if name not in given)
    names = ",".join(f"'{part.name}'" for part in parts)
    raise invalid(
        f"{told}expected {wanted} but got {count} inputs for model '{view.model}'. Got input(s) [{names}], "
        # With none missing the original drops the bracket it just opened.
        f"but missing required input(s) {'[' + missing if missing else ''}]. "
        "Please provide all required input(s)."
    )


def _check_required(view: ModelView, parts: Sequence[InputPart], told: str) -> None:
    """The original counts only, and lets the model find out: an exception of the model's."""
    given = {part.name for part in parts}
    for name in view.required:
        if name not in given:
            text = f"{told}input '{name}' is missing for model '{view.model}'"
            raise ModelError(Kind.INTERNAL, text)


def _check_batch(view: ModelView, parts: Sequence[InputPart], told: str) -> None:
    rows = -1
    for part in parts:
        if not part.shape:
            raise invalid(
                f"{told}input '{part.name}' has no shape but model requires batch dimension "
                f"for '{view.model}'"
            )
        if rows not in (-1, part.shape[0]):
            raise invalid(
                f"{told}input '{part.name}' batch size does not match other inputs for '{view.model}'"
            )
        rows = part.shape[0]
    if view.row_limit and rows > view.row_limit:
        raise invalid(f"{told}inference request batch-size must be <= {view.row_limit} for '{view.model}'")


def _check_part(view: ModelView, side: TensorView, part: InputPart, told: str) -> None:
    dtype = DTYPE_BY_KSERVE.get(part.datatype)
    if dtype is not side.dtype:
        given = KSERVE_NAME[dtype.name] if dtype is not None else "<invalid>"
        raise invalid(
            f"{told}inference input '{part.name}' data-type is '{given}', "
            f"but model '{view.model}' expects '{kserve_name(side.dtype)}'"
        )
    _check_shape(view, side, part, told)
    if side.dtype.item_bytes:
        _check_size(view, side, part, told)
    elif part.lent is None:
        check_strings(part.data, count_items(part.shape), part.name, view.model, told)


def _check_shape(view: ModelView, side: TensorView, part: InputPart, told: str) -> None:
    dims = view.full_dims(side)
    if side.dims is None or fits_shape(part.shape, dims):
        return
    wanted, given = ",".join(map(str, dims)), ",".join(map(str, part.shape))
    raise invalid(
        f"{told}unexpected shape for input '{part.name}' for model '{view.model}'. "
        f"Expected [{wanted}], got [{given}]. {_NOTE if view.max_batch_size else ''}"
    )


def _check_size(view: ModelView, side: TensorView, part: InputPart, told: str, name: str = "") -> None:
    """`name` is what the input is called in the text, where that is not its own name."""
    shape = part.shape
    if view.max_batch_size and shape[0] == 0:
        shape = (1, *shape[1:])  # the original wants one row for none
    wanted, given = count_items(shape) * side.dtype.item_bytes, part.nbytes
    if wanted != given:
        raise invalid(
            f"{told}input byte size mismatch for input '{name or part.name}' for model '{view.model}'. "
            f"Expected {wanted}, got {given}"
        )


def check_strings(data: Memory, count: int, name: str, model: str, told: str) -> None:
    """Raises ServeError unless `data` is `count` elements in BYTES packing."""
    found, last, end = walk_bytes(data, count + 1)
    if found > count:
        raise invalid(
            f"{told}unexpected number of string elements {found} for inference input '{name}' "
            f"for model '{model}', expecting {count}"
        )
    missing = end - memoryview(data).nbytes
    if missing > 0:
        size = end - last - _LENGTH_BYTES
        raise invalid(
            f"incomplete string data for inference input '{name}', expecting string of length {size} "
            f"but only {size - missing} bytes available"
        )
    if missing < 0:
        raise invalid(
            f"{told}incomplete string length indicator for inference input '{name}' for model '{model}', "
            f"expecting 4 bytes but only {-missing} bytes available. Please make sure the string length "
            "indicator is in one buffer."
        )
    if found != count:
        raise invalid(
            f"{told}expected {count} string elements for inference input '{name}' for model '{model}', "
            f"got {found}"
        )


def deduce_raw(view: ModelView, body: Memory) -> InputPart:
    """The one input a raw binary request brings (spec 3.1): batch 1, one free axis deduced.

    Raises ServeError.
    """
    told = tag("")
    if len(view.inputs) != 1:
        raise invalid(
            f"{told}Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(view.inputs)} inputs in '{view.model}' model configuration"
        )
    side = next(iter(view.inputs.values()))
    dims = (1, *(side.dims or (-1,))) if view.max_batch_size else (side.dims or (-1,))
    if not side.dtype.item_bytes:
        if prod(dims) != 1:
            raise invalid(
                f"{told}For BYTE datatype raw input '{side.name}', the model must have input shape [1]"
            )
        packed = len(body).to_bytes(_LENGTH_BYTES, "little") + bytes(body)
        return InputPart(side.name, kserve_name(side.dtype), tuple(1 for _ in dims), packed)
    free = dims.count(-1)
    if free > 1:
        raise invalid(
            f"{told}The shape of the raw input '{side.name}' can not be deduced because there are "
            "more than one variable-sized dimension"
        )
    unit = side.dtype.item_bytes * prod(size for size in dims if size != -1)
    deduced = len(body) // unit if free and unit else 0
    part = InputPart(side.name, kserve_name(side.dtype), tuple(deduced if n == -1 else n for n in dims), body)
    _check_size(view, side, part, told, "raw_input")
    return part
