"""The JSON of an infer request, and what follows it -> an InferBody, tensors as flat memory (spec 3, 3.1, 4).

    {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    -> InferBody(inputs=[InputPart("x", "FP32", (1, 2), b"...")], ...)

Nothing here knows the model. The compiled reader has looked at all that JSON can say; what is left are the
parameters' meanings, and tensors that lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastserve._ext.infer_json import InferBody as CompiledBody
from fastserve._ext.infer_json import InferFault, InferInput, read_infer
from fastserve._ext.json_value import Members
from fastserve.codec.client_text import to_bytes
from fastserve.dialects.kserve_v2.request import (
    InferBody,
    InputPart,
    Memory,
    OutputPart,
    refuse_double,
    set_parameter,
)
from fastserve.dialects.kserve_v2.values import (
    Value,
    as_bool,
    as_string,
    as_uint,
    find,
    member,
    optional,
)
from fastserve.errors import internal, invalid
from fastserve.request import Lent
from fastserve.serving.body_tensors import BodyTensors
from fastserve.serving.shared_memory import Range

Header = CompiledBody | InferFault
ReadRegion = Callable[[Range], tuple[bytes, Lent | None]]
Scalar = str | int | float | bool | None
MORE = "additional bytes"  # what are missing behind the JSON


def read_header(header: Memory) -> Header:
    """The JSON of a request, or why it is none: all of the work that grows with its size, and nothing that
    has to be done on the event loop."""
    try:
        return read_infer(header)
    except InferFault as fault:
        return fault.with_traceback(None)  # else it would hold what it was read from


def read_body(read: Header, blobs: Memory, model: str, read_region: ReadRegion) -> InferBody:
    """The whole request: `read` of its JSON, and `blobs`, which follow. Raises ServeError, for the first
    that is wrong in the order in which the original looks."""
    if not isinstance(read, InferFault):
        return _take_over(read, BodyTensors(blobs, model, MORE), read_region)
    if read.before is not None:
        _take_over(read.before, BodyTensors(blobs, model, MORE), read_region)
    raise invalid(read.text) if read.is_callers else internal(read.text)


def _take_over(read: CompiledBody, rest: BodyTensors, read_region: ReadRegion) -> InferBody:
    """What the compiled reader found, with the tensors that lie elsewhere. Raises ServeError."""
    body = InferBody(read.id)
    for name, value in read.parameters.items():
        set_parameter(body.parameters, name, _value(value))
    names: set[str] = set()
    for part in read.inputs:
        refuse_double(part.name, names, read.id)
        if part.data is not None:
            found = InputPart(part.name, part.datatype, part.shape, part.data, is_json=True)
        else:
            found = InputPart(part.name, part.datatype, part.shape, *_find_data(part, rest, read_region))
        body.inputs.append(found)
    if read.outputs is not None:
        rest.finish()
        body.outputs = [_make_output(part.name, _members(part.parameters)) for part in read.outputs]
    return body


def _find_data(part: InferInput, rest: BodyTensors, read_region: ReadRegion) -> tuple[Memory, Lent | None]:
    parameters = _members(part.parameters)
    if "binary_data_size" in part.parameters:
        return rest.take(part.name, member(parameters, "binary_data_size", as_uint)), None
    range = _read_range(parameters)
    assert range is not None  # the reader saw one of the three
    return read_region(range)


def _members(parameters: Mapping[str, Scalar]) -> Members:
    return Members([(to_bytes(name), _value(value)) for name, value in parameters.items()])


def _value(value: Scalar) -> Value:
    """As the exact reader has it: strings are bytes."""
    return to_bytes(value) if isinstance(value, str) else value


def _read_range(parameters: Value) -> Range | None:
    """The shared memory a tensor's parameters name, None without any."""
    if not find(parameters, "shared_memory_region")[0]:
        return None
    name = member(parameters, "shared_memory_region", as_string)
    offset = optional(parameters, "shared_memory_offset", as_uint, 0)
    return Range(name, offset, optional(parameters, "shared_memory_byte_size", as_uint, 0))


def _check_output(parameters: Value) -> None:
    """Raises for what does not go together."""
    if not find(parameters, "shared_memory_region")[0]:
        return
    classes = find(parameters, "classification")[0]
    if classes or optional(parameters, "binary_data", as_bool, False, "Unable to set 'binary_data'"):
        taken = "classification" if classes else "binary_data"
        raise invalid(f"Output can't set both 'shared_memory_region' and '{taken}'")


def _make_output(name: str, parameters: Value) -> OutputPart:
    _check_output(parameters)
    classes = optional(parameters, "classification", as_uint, 0, "Unable to set 'classification'")
    range = _read_range(parameters)
    binary = range is None and optional(parameters, "binary_data", as_bool, False)
    return OutputPart(name, binary, classes, range)
