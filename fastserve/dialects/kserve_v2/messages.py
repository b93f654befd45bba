"""ModelInferRequest, read in place -> an InferBody; a response -> ModelInferResponse, alone or in a stream.

Raw inputs stay where they were received until the engine writes them into the batch; typed contents are
written once into memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from fastserve._ext.proto_wire import (
    InferMessage,
    Unsigned,
    WireFault,
    WireInput,
    read_infer_request,
    write_infer_response,
    write_stream_response,
)
from fastserve._ext.slab import blank_bytes
from fastserve.apart import APART_BYTES
from fastserve.dialects.kserve_v2.answers import reply_parameters, show_outputs
from fastserve.dialects.kserve_v2.errors import tag
from fastserve.dialects.kserve_v2.request import (
    UINT64_MASK,
    Asked,
    Given,
    InferBody,
    InputPart,
    Memory,
    OutputPart,
    mistyped,
    read_int,
    read_rpc_parameters,
    refuse_double,
)
from fastserve.errors import Kind, ServeError, internal, invalid
from fastserve.request import InferResponse, Lent
from fastserve.serving.model_view import ModelView
from fastserve.serving.rooms import Rooms
from fastserve.serving.rpc import read_in_place
from fastserve.serving.shared_memory import Range, Regions
from fastserve.tensor import DTYPE_BY_KSERVE, KSERVE_NAME

# Fields of InferTensorContents by their numbers, named as the original names what they hold.
_CONTENTS = ("", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "FP64", "BYTES")
PARTS = "inputs, outputs, parameters, raw tensors and axes of a shape"
TOO_LARGE = "the response is too large for a gRPC message"
FINAL = "triton_final_response"


@dataclass(slots=True)
class Sent:
    """A request as received: the parsed message, and the bytes its raw tensors lie in."""

    message: InferMessage
    data: memoryview
    typed: dict[int, Memory] = field(default_factory=dict)  # contents that were large enough to be read ahead


def read_sent(data: bytes) -> Sent:
    """A serialized ModelInferRequest. Raises ServeError."""
    message = read_in_place(read_infer_request, data, "ModelInferRequest", PARTS, internal)
    sent = Sent(message, memoryview(data))
    if len(data) >= APART_BYTES:
        _read_ahead(sent)
    return sent


def _read_ahead(sent: Sent) -> None:
    """Typed contents, which are written out; what is wrong with them is told when the model is known."""
    for index, given in enumerate(sent.message.inputs):
        if given.contents and len(given.kinds) == 1:
            with suppress(WireFault):
                sent.typed[index] = _copy_contents(sent.message, index, given)


def read_message(view: ModelView, sent: Sent, regions: Regions) -> InferBody:
    """What a message asks of a model. Raises ServeError."""
    message = sent.message
    body = InferBody(message.id, parameters=read_rpc_parameters(message.parameters))
    names: set[str] = set()
    for given in message.inputs:  # the original looks at names first, at data later
        refuse_double(given.name, names, message.id)
    raws = iter(range(message.raw_count))
    for index, given in enumerate(message.inputs):
        memory, lent = _read_memory(view.model, regions, sent, index, raws)
        body.inputs.append(InputPart(given.name, given.datatype, given.shape, memory, lent))
    body.outputs = [_read_output(one.name, one.parameters) for one in message.outputs]
    first = body.inputs[0] if len(body.inputs) > 1 else None
    if view.max_batch_size and first is not None and first.shape and first.shape[0] < 0:
        # The original takes a negative batch axis for one that differs.
        text = f"input '{first.name}' batch size does not match other inputs for '{view.model}'"
        raise invalid(tag(message.id) + text)
    return body


def _read_memory(
    model: str, regions: Regions, sent: Sent, index: int, raws: Iterator[int]
) -> tuple[Memory, Lent | None]:
    """The bytes of one input, of the next raw entry if they are nowhere else."""
    message, given = sent.message, sent.message.inputs[index]
    of_model = f"'{given.name}' for model '{model}'"
    range = _read_range(given.name, given.parameters)
    if range is not None:
        if given.contents:
            text = "unexpected 'content' provided when using shared memory for input tensor "
            raise invalid(text + of_model)
        return regions.borrow(range)
    if given.contents and message.raw_count:
        raise invalid(f"contents field must not be specified when using raw_input_contents for {of_model}")
    if given.contents:
        return sent.typed.get(index) or _read_contents(of_model, message, index, given), None
    raw = next(raws, None)
    if raw is None:
        raise invalid(f"unable to find data for input tensor {of_model} in request.")
    offset, size = message.raw(raw)
    return sent.data[offset : offset + size], None


def _read_contents(of_model: str, message: InferMessage, index: int, given: WireInput) -> Memory:
    where = f"unexpected explicit tensor data for input tensor {of_model}"
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


def _read_range(tensor: str, given: Given) -> Range | None:
    """The shared memory a tensor's parameters name, None without any. Raises ServeError."""
    if "shared_memory_region" not in given:
        for name in ("shared_memory_offset", "shared_memory_byte_size"):
            if name in given:
                raise invalid(
                    f"'{name}' can not be specified without 'shared_memory_region' parameter "
                    f"for tensor '{tensor}'"
                )
        return None
    region = given["shared_memory_region"]
    if not isinstance(region, str):
        raise mistyped(f"'shared_memory_region' parameter for tensor '{tensor}'", "string_param")
    if "shared_memory_byte_size" not in given:
        raise invalid(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter "
            f"for tensor '{tensor}'"
        )
    sizes = []
    for name in ("shared_memory_offset", "shared_memory_byte_size"):
        size = read_int(f"'{name}' parameter for tensor '{tensor}'", given.get(name, 0))
        sizes.append(size & UINT64_MASK)  # a negative one is far outside of every region
    return Range(region, *sizes)


def _read_output(name: str, given: Given) -> OutputPart:
    """A requested output. Raises ServeError."""
    part = OutputPart(name, range=_read_range(name, given))
    if "classification" in given:
        classes = given["classification"]
        if not isinstance(classes, int) or isinstance(classes, bool | Unsigned):
            raise invalid("invalid value type for 'classification' parameter, expected int64_param")
        if classes <= 0:
            raise invalid("invalid value for 'classification' parameter, expected >= 0")
        if part.range is not None:
            raise invalid("output can't set both 'shared_memory_region' and 'classification'")
        part.classes = classes
    return part


def write_message(
    view: ModelView,
    asked: Asked,
    response: InferResponse,
    request_id: str,
    rooms: Rooms,
    *,
    streams: bool = False,
) -> bytes:
    """A serialized ModelInferResponse, or with `streams` a ModelStreamInferResponse. Raises ServeError."""
    outputs: list[tuple[str, str, tuple[int, ...], None]] = []
    raws: list[Memory] = []
    for name, tensor, outside in show_outputs(view, asked, response, rooms):
        outputs.append((name, KSERVE_NAME[tensor.dtype.name], tensor.shape, None))
        raws.append(b"" if outside else tensor.data)
    number, parameters = str(view.version.number), reply_parameters(view, asked, response)
    try:
        if not streams:
            return write_infer_response(view.model, number, request_id, parameters, outputs, raws)
        parameters[FINAL] = response.final
        return write_stream_response("", view.model, number, request_id, parameters, outputs, raws)
    except (WireFault, OverflowError):
        raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) from None
