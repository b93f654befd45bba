"""The general path of an inference over either transport: checks, and outputs (spec 3.1 to 3.3, 5).

Requests are checked against their model with Triton's texts and in Triton's order. Triton keeps inputs in a
hash table that lists the latest first. That order shows in its texts and decides which of several errors is
reported, so it is kept here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from fastserve._ext.flatten import join_columns, take_column, walk_bytes
from fastserve.dialects.kserve.request import HeaderForwarding, InferBody, InputPart, ReplyOptions, id_prefix
from fastserve.dialects.kserve.service import KServeService
from fastserve.errors import Kind, ModelError, invalid, unsupported
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.client_shared_memory import (
    OutputBuffer,
    OutputBuffers,
    Regions,
    check_total,
    most_bytes,
)
from fastserve.serving.model_view import Class, ModelView, TensorView, check_order, classify
from fastserve.serving.prepared_requests import Memory
from fastserve.serving.slow_path import RegionRequest
from fastserve.serving.traces import RequestTrace
from fastserve.tensor import (
    ARRAY_CODE,
    DTYPE_BY_KSERVE,
    DTYPES,
    KSERVE_NAME,
    DType,
    Tensor,
    count_items,
    fits_shape,
    kserve_name,
)


class Inference(RegionRequest):
    """One request. `view` is None until its model is found, `request` until it has passed its checks."""

    service: KServeService
    refusal: str
    """The error text for decoupled models."""

    def __init__(
        self, service: KServeService, forwarding: HeaderForwarding | None, traced: RequestTrace | None = None
    ) -> None:
        super().__init__(service)
        self.forwarding, self.traced = forwarding, traced
        self.view: ModelView | None = None
        self.request: InferRequest | None = None
        self.converts = False
        """Its inputs' values were converted as no template does it."""
        self.deadline_ns = 0

    # --- the transport ---------------------------------------------------------------------------------

    @abstractmethod
    def find(self) -> ModelView:
        """Return the version it is for. Raises ServeError."""

    @abstractmethod
    async def read_body(self, view: ModelView) -> InferBody:
        """Return the body as sent. Raises ServeError."""

    @abstractmethod
    def sent_headers(self) -> Iterable[tuple[str, str | bytes]]:
        """Return the headers that may become parameters."""

    @abstractmethod
    def encode(self, view: ModelView, response: InferResponse) -> Any:
        """Return the reply, for `send`. Raises ServeError."""

    # --- the steps -------------------------------------------------------------------------------------

    async def read(self) -> InferRequest:
        view = self.view = self.find()
        if view.decoupled and not view.whole:
            raise unsupported(self.refusal)
        return await self.prepare(view)

    async def prepare(self, view: ModelView) -> InferRequest:
        """Read the body, reserve client memory for outputs, check it against the model. Raises ServeError."""
        service, self.version = self.service, view.version
        body = self.body = await self.read_body(view)
        if self.forwarding:
            self.forwarding.add(self.sent_headers(), body.parameters)
        self.options = ReplyOptions.of(body)
        self.hold(self.options.ranges)
        # Work for a thread: strings are checked one by one, and client memory is read.
        parts = [part for part in body.inputs if part.datatype == "BYTES" or part.range is not None]
        work = sum(min(part.nbytes, view.version.config.max_queue_bytes) for part in parts)
        if work:
            await self.charge(service.regions.count_bytes(view.version, (part.range for part in body.inputs)))
        if view.version.config.loose_inputs:
            most = _count_converted(view, body.inputs)
            await self.charge(most)
            self.converts = await service.offload(
                most + len(body.inputs) * _PART_COST, fit_inputs, view, body
            )
        request = await service.offload(work, make_request, view, body, service.regions)
        outside = {part.name: part.lent for part in body.inputs if part.lent is not None}
        self.bring(request, outside)
        request.deadline_ns = self.deadline_ns
        self.request = request
        return request

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        return (self.traced or self.service.engine).infer(self.version, request)

    async def write(self, response: InferResponse) -> None:
        assert self.view is not None
        self.reply = await self.service.offload(response.nbytes, self.encode, self.view, response)


class ReplyOutput(NamedTuple):
    """One output of a reply. `outside`: it is in its client's memory already."""

    name: str
    tensor: Tensor
    outside: bool


def show_outputs(
    view: ModelView, options: ReplyOptions, response: InferResponse, rooms: OutputBuffers
) -> list[ReplyOutput]:
    """Return the outputs in the form the client asked for; fill client memory. Raises ServeError."""
    return [_show(view, options, name, t, rooms.get(name)) for name, t in response.in_order()]


def _show(
    view: ModelView, options: ReplyOptions, name: str, tensor: Tensor, room: OutputBuffer | None
) -> ReplyOutput:
    tensor, part = client_tensor(view, name, tensor), options.parts.get(name)
    if part is not None and part.classes:
        tensor = _best_classes(view, name, tensor, part.classes)
    if room is not None:
        room.put(name, tensor.data)
    return ReplyOutput(name, tensor, outside=room is not None)


def client_tensor(view: ModelView, name: str, tensor: Tensor) -> Tensor:
    """Return an output in the shape clients see."""
    shape = view.client_shape(name, tensor.shape)
    return tensor if shape is tensor.shape else Tensor(tensor.dtype, shape, tensor.data)


def _best_classes(view: ModelView, name: str, tensor: Tensor, most: int) -> Tensor:
    """Return the classification (spec 5): `VALUE:INDEX` or `VALUE:INDEX:LABEL` as BYTES [rows?, classes].

    Raises ServeError for a type that has no order.
    """
    check_order(tensor, "output", kserve_name(tensor.dtype))
    rows = classify(tensor, most, view.labels(name), batching=view.batching)
    shape = (len(rows), min(most, prod(tensor.shape[view.batching :])))
    texts = [_describe(one) for row in rows for one in row]
    packed = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return Tensor(DTYPES["bytes"], shape if view.batching else shape[1:], packed)


def _describe(one: Class) -> bytes:
    number = str(one.value) if isinstance(one.value, int) else f"{one.value:f}"
    return f"{number}:{one.idx}:{one.label}".encode() if one.label else f"{number}:{one.idx}".encode()


def reply_parameters(view: ModelView, options: ReplyOptions, response: InferResponse) -> dict[str, Any]:
    """Return the parameters of a reply; an ensemble repeats the request's sequence."""
    own = {key: value for key, value in response.parameters.items() if isinstance(value, str | int | float)}
    if not view.ensemble:
        return own
    names = ("sequence_id", "sequence_start", "sequence_end")
    return {**{name: getattr(options.parameters, name) for name in names}, **own}


_LENGTH_BYTES = 4
_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim in your "
    "input dims config, try setting max_batch_size to zero. See the model configuration docs for more info "
    "on max_batch_size."
)


def make_request(view: ModelView, body: InferBody, regions: Regions) -> InferRequest:
    """Return the engine's request of a body that fits the model. Raises ServeError.

    Client memory is read after every check that needs none of it.
    """
    parameters = body.parameters
    wanted = check_outputs(view, [part.name for part in body.outputs])
    return InferRequest(
        check_inputs(view, body.inputs, body.request_id, regions),
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
    """Return the outputs to ask for, in the model's order; empty for all. Raises ServeError."""
    names = names or view.version.config.default_outputs
    for name in sorted(names):  # Triton keeps them in a sorted set
        if name not in view.outputs:
            raise invalid(f"unexpected inference output '{name}' for model '{view.model}'")
    wanted = set(names)
    return () if len(wanted) == len(view.outputs) else tuple(n for n in view.outputs if n in wanted)


def check_inputs(
    view: ModelView, parts: Sequence[InputPart], request_id: str, regions: Regions
) -> dict[str, Tensor]:
    """Return the tensors for the engine, in the model's own shapes. Raises ServeError."""
    prefix = id_prefix(request_id)
    latest_first = parts[::-1]
    _check_count(view, latest_first, prefix)
    for part in latest_first:
        if part.name not in view.inputs:
            raise invalid(f"unexpected inference input '{part.name}' for model '{view.model}'")
    if view.max_batch_size:
        _check_batch(view, latest_first, prefix)
    for part in latest_first:
        _check_part(view, view.inputs[part.name], part, prefix, regions)
    _check_required(view, parts, prefix)
    check_total(view.version, (part.range for part in parts if part.range is not None))
    sent = {part.name: part for part in parts}
    return {
        name: Tensor(
            side.dtype,
            side.to_model(sent[name].shape, batching=view.batching),
            _read_part(view, sent[name], prefix, regions),
        )
        for name, side in view.inputs.items()
        if name in sent
    }


# --- inputs as clients of MLServer send them ------------------------------------------------------------

CONTENT_TYPE = "content_type"
TABLE = "pd"
"""The content type of a request that has a tensor for each column."""
_PART_COST = 4096  # a tensor is fitted as long as so many bytes are converted
_NUMBERS = ARRAY_CODE.keys() | {"bool"}


def fit_inputs(view: ModelView, body: InferBody) -> bool:
    """Give a body's inputs the names, types and shapes of a model with `loose_inputs`, where its client has
    sent others. Return whether values were converted as no template does it. Raises ServeError.

    One tensor of any name is the only input; a tensor for each column makes one matrix, and one matrix the
    inputs of a model that has one for each column. Numbers of any type become float32 or float64, in memory
    of their own: for a thread where they are many. What has no such form is left to the model's own checks.
    """
    prefix = id_prefix(body.request_id)
    is_table = body.parameters.own.pop(CONTENT_TYPE, "") == TABLE
    sides, sent = list(view.inputs.values()), body.inputs
    parts = list(sent)
    if len(sides) == 1:
        (side,) = sides
        names = view.version.inputs[side.name].columns
        if len(sent) > 1 and side.dims is not None and len(side.dims) == 1:
            if is_table or (names and {part.name for part in sent} >= set(names)):
                parts = [_stack(view, side, sent, names, prefix)]
        elif len(sent) == 1:
            parts = [_fit(view, side, sent[0], prefix)]
    elif len(sent) == 1 and sent[0].name not in view.inputs:
        parts = _split(view, sent[0], prefix)
    else:
        parts = [
            _fit(view, view.inputs[part.name], part, prefix) if part.name in view.inputs else part
            for part in sent
            if part.name in view.inputs or not is_table  # a table may have columns that nobody wants
        ]
    body.inputs = parts
    return len(parts) != len(sent) or any(
        new.data is not old.data and not _read_alike(new, old) for new, old in zip(parts, sent, strict=True)
    )


def _read_alike(new: InputPart, old: InputPart) -> bool:
    """Return whether a template reads the numbers as they were converted: floats of JSON, of either type."""
    return old.is_json and {new.datatype, old.datatype} == {"FP32", "FP64"}


def _count_converted(view: ModelView, parts: Sequence[InputPart]) -> int:
    """Return how many bytes of a request's inputs may be converted, once their numbers are the model's: those
    of a byte become eight. Raises ServeError for more than the model takes."""
    wanted = {side.dtype for side in view.inputs.values()}
    widest = max((dtype.item_bytes for dtype in wanted), default=0)
    keeps = len(parts) == len(view.inputs) == 1  # one matrix, which is copied for its type alone
    dtypes = ((DTYPE_BY_KSERVE.get(part.datatype), part) for part in parts if part.range is None)
    total = sum(
        part.nbytes // dtype.item_bytes * widest
        for dtype, part in dtypes
        if dtype is not None and dtype.item_bytes and not (keeps and dtype in wanted)
    )
    if total > view.version.config.max_queue_bytes and total > (most := most_bytes(view.version)):
        text = f"inputs have {total} bytes as the model's types, model '{view.model}' takes at most {most}"
        raise invalid(f"{text} (max_queue_bytes)")
    return total


def _fit(view: ModelView, side: TensorView, part: InputPart, prefix: str) -> InputPart:
    """Return a tensor as the model's input `side`: of its name, its type, and its one axis more or less."""
    fitted = _rename(view, side, part)
    dtype = DTYPE_BY_KSERVE.get(part.datatype)
    if dtype is None or dtype is side.dtype or part.range is not None or not _converts(dtype, side.dtype):
        return fitted
    _check_shape(view, side, fitted, prefix)
    _check_size(view, TensorView(side.name, dtype, side.dims, side.model_dims), fitted, prefix)
    data = join_columns([(part.data, dtype.code)], side.dtype.code)
    rounded = (dtype.name, side.dtype.name) == ("float32", "float64")
    return replace(fitted, datatype=kserve_name(side.dtype), data=data, rounded=rounded)


def _rename(view: ModelView, side: TensorView, part: InputPart) -> InputPart:
    """Return a tensor of a name of the model's, with one axis more or less where that gives its form."""
    shape = part.shape
    wanted = None if side.dims is None else len(side.dims) + view.batching
    if wanted == 1 and len(shape) == 2 and shape[1] == 1:
        shape = shape[:1]
    elif wanted == 2 and len(shape) == 1 and side.dims == (1,):
        shape = (*shape, 1)
    return replace(part, name=side.name, shape=shape)


def _converts(dtype: DType, wanted: DType) -> bool:
    return wanted.name in ("float32", "float64") and dtype.name in _NUMBERS


def _stack(
    view: ModelView, side: TensorView, parts: Sequence[InputPart], names: Sequence[str], prefix: str
) -> InputPart:
    """Return the matrix of a tensor for each column: by the model's own names, else as they were sent."""
    by_name = {part.name: part for part in parts}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise invalid(f"{prefix}missing columns {', '.join(missing)} for model '{view.model}'")
    chosen = [by_name[name] for name in names] if names else list(parts)
    column = TensorView(side.name, side.dtype, (), ())
    rows = _rename(view, column, chosen[0]).shape
    dtypes = [_check_column(view, column, part, chosen[0].name, rows, prefix) for part in chosen]
    sources = [(part.data, dtype.code) for part, dtype in zip(chosen, dtypes, strict=True)]
    matrix = join_columns(sources, side.dtype.code)
    return InputPart(side.name, kserve_name(side.dtype), (*rows, len(chosen)), matrix)


def _check_column(
    view: ModelView, column: TensorView, part: InputPart, first: str, rows: tuple[int, ...], prefix: str
) -> DType:
    """Return the type of a column that has a number for each of the rows. Raises ServeError."""
    one, dtype = _rename(view, column, part), DTYPE_BY_KSERVE.get(part.datatype)
    fits = dtype is not None and (dtype is column.dtype or _converts(dtype, column.dtype))
    if dtype is None or not fits or dtype.name not in _NUMBERS or part.range is not None or one.shape != rows:
        raise invalid(
            f"{prefix}column '{part.name}' for model '{view.model}' is {part.datatype} of shape "
            f"{list(part.shape)}, expected numbers, one for each of the rows of '{first}'"
        )
    _check_shape(view, column, one, prefix)
    _check_size(view, TensorView(column.name, dtype, (), ()), one, prefix, part.name)
    return dtype


def _split(view: ModelView, part: InputPart, prefix: str) -> list[InputPart]:
    """Return the columns of a matrix, for a model that has one input for each; the matrix itself where it
    cannot be one of theirs."""
    sides = list(view.inputs.values())
    dtype, width = DTYPE_BY_KSERVE.get(part.datatype), len(sides)
    fits = len(part.shape) == 2 and part.shape[1] == width and part.range is None
    if not fits or dtype is None or not all(_converts(dtype, side.dtype) for side in sides):
        return [part]
    _check_size(view, TensorView(part.name, dtype, (width,), (width,)), part, prefix)
    return [_take(view, side, part, dtype, at) for at, side in enumerate(sides)]


def _take(view: ModelView, side: TensorView, part: InputPart, dtype: DType, column: int) -> InputPart:
    """Return a column of a matrix as the model's input `side`."""
    data = take_column(part.data, dtype.code, part.shape[1], column, side.dtype.code)
    one = InputPart(side.name, kserve_name(side.dtype), part.shape[:1], data)
    return _rename(view, side, one)


def _read_part(view: ModelView, part: InputPart, prefix: str, regions: Regions) -> Memory:
    """Return the bytes of a checked input, none yet for one on a device. Raises ServeError."""
    if part.range is None or part.lent is not None:
        return part.data
    data = regions.read(part.range)
    if not DTYPE_BY_KSERVE[part.datatype].item_bytes:  # its client may have written them meanwhile
        check_strings(data, _count_strings(view, part), part.name, view.model, prefix)
    return data


def _check_count(view: ModelView, parts: Sequence[InputPart], prefix: str) -> None:
    required, most, count = len(view.required), len(view.inputs), len(parts)
    if required <= count <= most:
        return
    wanted = f"{most} inputs" if required == most else f"number of inputs between {required} and {most}"
    given = {part.name for part in parts}
    missing = ",".join(f"'{name}'" for name in view.required if name not in given)
    names = ",".join(f"'{part.name}'" for part in parts)
    raise invalid(
        f"{prefix}expected {wanted} but got {count} inputs for model '{view.model}'. Got input(s) [{names}], "
        # With none missing Triton drops the bracket it just opened.
        f"but missing required input(s) {'[' + missing if missing else ''}]. "
        "Please provide all required input(s)."
    )


def _check_required(view: ModelView, parts: Sequence[InputPart], prefix: str) -> None:
    """Raise ModelError for a missing input: Triton counts inputs only, and the model fails."""
    given = {part.name for part in parts}
    for name in view.required:
        if name not in given:
            text = f"{prefix}input '{name}' is missing for model '{view.model}'"
            raise ModelError(Kind.INTERNAL, text)


def _check_batch(view: ModelView, parts: Sequence[InputPart], prefix: str) -> None:
    rows = -1
    for part in parts:
        if not part.shape:
            raise invalid(
                f"{prefix}input '{part.name}' has no shape but model requires batch dimension "
                f"for '{view.model}'"
            )
        if rows not in (-1, part.shape[0]):
            raise invalid(
                f"{prefix}input '{part.name}' batch size does not match other inputs for '{view.model}'"
            )
        rows = part.shape[0]
    if view.row_limit and rows > view.row_limit:
        raise invalid(f"{prefix}inference request batch-size must be <= {view.row_limit} for '{view.model}'")


def _check_part(view: ModelView, side: TensorView, part: InputPart, prefix: str, regions: Regions) -> None:
    dtype = DTYPE_BY_KSERVE.get(part.datatype)
    if dtype is not side.dtype:
        given = KSERVE_NAME[dtype.name] if dtype is not None else "<invalid>"
        raise invalid(
            f"{prefix}inference input '{part.name}' data-type is '{given}', "
            f"but model '{view.model}' expects '{kserve_name(side.dtype)}'"
        )
    _check_shape(view, side, part, prefix)
    if side.dtype.item_bytes:
        _check_size(view, side, part, prefix)
    elif part.range is None:
        check_strings(part.data, _count_strings(view, part), part.name, view.model, prefix)
    elif part.lent is None:
        check_total(view.version, [part.range])
        count = _count_strings(view, part)
        walked = regions.walk(part.range, count + 1)
        check_walk(walked, part.nbytes, count, part.name, view.model, prefix)


def _count_strings(view: ModelView, part: InputPart) -> int:
    """Return how many strings an input has to bring; for zero rows those of one row, as in Triton."""
    return count_items(
        part.shape if part.shape[:1] != (0,) or not view.max_batch_size else (1, *part.shape[1:])
    )


def _check_shape(view: ModelView, side: TensorView, part: InputPart, prefix: str) -> None:
    dims = view.full_dims(side)
    if side.dims is None or fits_shape(part.shape, dims):
        return
    wanted, given = ",".join(map(str, dims)), ",".join(map(str, part.shape))
    raise invalid(
        f"{prefix}unexpected shape for input '{part.name}' for model '{view.model}'. "
        f"Expected [{wanted}], got [{given}]. {_NOTE if view.max_batch_size else ''}"
    )


def _check_size(view: ModelView, side: TensorView, part: InputPart, prefix: str, name: str = "") -> None:
    """Raise ServeError for a wrong size in bytes; `name` replaces the input's own in the text."""
    shape = part.shape
    if view.max_batch_size and shape[0] == 0:
        shape = (1, *shape[1:])  # Triton wants one row for none
    wanted, given = count_items(shape) * side.dtype.item_bytes, part.nbytes
    if wanted != given:
        raise invalid(
            f"{prefix}input byte size mismatch for input '{name or part.name}' for model '{view.model}'. "
            f"Expected {wanted}, got {given}"
        )


def check_strings(data: Memory, count: int, name: str, model: str, prefix: str) -> None:
    """Raise ServeError unless `data` is `count` elements in BYTES packing."""
    check_walk(walk_bytes(data, count + 1), memoryview(data).nbytes, count, name, model, prefix)


def check_walk(
    walked: tuple[int, int, int], nbytes: int, count: int, name: str, model: str, prefix: str
) -> None:
    """Raise ServeError unless a walk by `walk_bytes` over `nbytes` found `count` elements."""
    found, last, end = walked
    if found > count:
        raise invalid(
            f"{prefix}unexpected number of string elements {found} for inference input '{name}' "
            f"for model '{model}', expecting {count}"
        )
    missing = end - nbytes
    if missing > 0:
        size = end - last - _LENGTH_BYTES
        raise invalid(
            f"incomplete string data for inference input '{name}', expecting string of length {size} "
            f"but only {size - missing} bytes available"
        )
    if missing < 0:
        raise invalid(
            f"{prefix}incomplete string length indicator for inference input '{name}' for model '{model}', "
            f"expecting 4 bytes but only {-missing} bytes available. Please make sure the string length "
            "indicator is in one buffer."
        )
    if found != count:
        raise invalid(
            f"{prefix}expected {count} string elements for inference input '{name}' for model '{model}', "
            f"got {found}"
        )


def deduce_raw(view: ModelView, body: Memory) -> InputPart:
    """Return the one input of a raw binary request (spec 3.1): batch 1, one free axis deduced.

    Raises ServeError.
    """
    prefix = id_prefix("")
    if len(view.inputs) != 1:
        raise invalid(
            f"{prefix}Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(view.inputs)} inputs in '{view.model}' model configuration"
        )
    side = next(iter(view.inputs.values()))
    dims = (1, *(side.dims or (-1,))) if view.max_batch_size else (side.dims or (-1,))
    if not side.dtype.item_bytes:
        if prod(dims) != 1:
            raise invalid(
                f"{prefix}For BYTE datatype raw input '{side.name}', the model must have input shape [1]"
            )
        packed = len(body).to_bytes(_LENGTH_BYTES, "little") + bytes(body)
        return InputPart(side.name, kserve_name(side.dtype), tuple(1 for _ in dims), packed)
    free = dims.count(-1)
    if free > 1:
        raise invalid(
            f"{prefix}The shape of the raw input '{side.name}' can not be deduced because there are "
            "more than one variable-sized dimension"
        )
    unit = side.dtype.item_bytes * prod(size for size in dims if size != -1)
    deduced = len(body) // unit if free and unit else 0
    part = InputPart(side.name, kserve_name(side.dtype), tuple(deduced if n == -1 else n for n in dims), body)
    _check_size(view, side, part, prefix, "raw_input")
    return part
