"""The JSON of an infer request, and what follows it -> an InferBody, tensors as flat memory (spec 3, 3.1, 4).

    {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    -> InferBody(inputs=[InputPart("x", "FP32", (1, 2), b"...")], ...)

Nothing here knows the model. The compiled reader takes every good body. What it refuses is read again the
exact way, an object per value, which finds faults in the order the original does; beyond EXPLAIN_BYTES that
would cost too much, and the compiled reader's own text is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastserve._ext.infer_json import InferBody as CompiledBody
from fastserve._ext.infer_json import InferCode, InferFault, InferInput, read_infer
from fastserve._ext.json_value import Members
from fastserve.dialects.kserve_v2.errors import internal, invalid, to_bytes, to_text
from fastserve.dialects.kserve_v2.request import (
    InferBody,
    InputPart,
    Memory,
    OutputPart,
    Parameters,
    refuse_double,
    set_parameter,
)
from fastserve.dialects.kserve_v2.values import (
    Value,
    as_array,
    as_bool,
    as_string,
    as_uint,
    find,
    member,
    members_of,
    optional,
    read_json,
    read_leaves,
)
from fastserve.request import Lent
from fastserve.serving.shared_memory import Range
from fastserve.tensor import DTYPE_BY_KSERVE, count_items

Header = CompiledBody | InferFault
ReadRegion = Callable[[Range], tuple[bytes, Lent | None]]
Scalar = str | int | float | bool | None
EXPLAIN_BYTES = 1 << 18
FORMS = ("'data'", "'binary_data_size'", "'shared_memory_region'")


class _Blobs:
    """What follows the JSON, taken in order."""

    def __init__(self, memory: Memory, model: str) -> None:
        self._memory = memoryview(memory)
        self._model = model
        self._at = 0

    def take(self, size: int, name: str) -> memoryview:
        missing = self._at + size - len(self._memory)
        if missing > 0:
            raise invalid(
                f"unexpected size for input '{name}', expecting {missing} additional bytes "
                f"for model '{self._model}'"
            )
        self._at += size
        return self._memory[self._at - size : self._at]

    def end(self) -> None:
        if self._at != len(self._memory):
            raise invalid(f"unexpected additional input data for model '{self._model}'")


def read_header(header: Memory) -> Header:
    """The JSON of a request, or why it is none: all of the work that grows with its size, and nothing that
    has to be done on the event loop."""
    try:
        return read_infer(header)
    except InferFault as fault:
        return fault.with_traceback(None)  # else it would hold what it was read from


def read_body(read: Header, header: Memory, blobs: Memory, model: str, read_region: ReadRegion) -> InferBody:
    """The whole request: `read` of its JSON, which is `header`, and `blobs`, which follow. Raises
    ServeError."""
    if not isinstance(read, InferFault):
        return _take_over(read, _Blobs(blobs, model), read_region)
    if len(header) > EXPLAIN_BYTES or read.code is InferCode.TOO_MANY:
        raise invalid(read.text) if read.is_callers else internal(read.text)
    return read_plainly(header, blobs, model, read_region)


def _take_over(read: CompiledBody, rest: _Blobs, read_region: ReadRegion) -> InferBody:
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
    rest.end()
    body.outputs = [_make_output(part.name, _members(part.parameters)) for part in read.outputs]
    return body


def _find_data(part: InferInput, rest: _Blobs, read_region: ReadRegion) -> tuple[Memory, Lent | None]:
    parameters = _members(part.parameters)
    if "binary_data_size" in part.parameters:
        return rest.take(member(parameters, "binary_data_size", as_uint), part.name), None
    range = _read_range(parameters)
    assert range is not None  # the reader saw one of the three
    return read_region(range)


def _members(parameters: Mapping[str, Scalar]) -> Members:
    return Members([(to_bytes(name), _value(value)) for name, value in parameters.items()])


def _value(value: Scalar) -> Value:
    """As the exact reader has it: strings are bytes."""
    return to_bytes(value) if isinstance(value, str) else value


# --- the exact way; everything raises ServeError --------------------------------------------------------


def read_plainly(header: Memory, blobs: Memory, model: str, read_region: ReadRegion) -> InferBody:
    """The same as `read_body`."""
    document = read_json(header, EXPLAIN_BYTES)
    body = InferBody(optional(document, "id", as_string, ""))
    _read_parameters(document, body.parameters)
    rest, names = _Blobs(blobs, model), set[str]()
    for item in member(document, "inputs", as_array):
        body.inputs.append(_read_input(item, rest, read_region, names, body.request_id))
    rest.end()
    no_outputs: list[Value] = []
    body.outputs = [_read_output(item) for item in optional(document, "outputs", as_array, no_outputs)]
    return body


def _read_parameters(document: Value, parameters: Parameters) -> None:
    found, members = find(document, "parameters")
    seen: set[bytes] = set()
    for key, value in members_of(members, "failed to get request params.") if found else ():
        if key not in seen:  # the first of equal keys counts
            seen.add(key)
            set_parameter(parameters, to_text(key), value)


def _read_input(
    item: Value, blobs: _Blobs, read_region: ReadRegion, names: set[str], request_id: str
) -> InputPart:
    parameters = find(item, "parameters")[1]
    has_data, data = find(item, "data")
    sized, outside = find(parameters, "binary_data_size")[0], find(parameters, "shared_memory_region")[0]
    _check_one_form((has_data, sized, outside))
    name, datatype = member(item, "name", as_string), member(item, "datatype", as_string)
    shape = tuple(as_uint(size, "Unable to parse 'shape'") for size in member(item, "shape", as_array))
    refuse_double(name, names, request_id)
    if sized:
        size = member(parameters, "binary_data_size", as_uint)
        return InputPart(name, datatype, shape, blobs.take(size, name))
    range = _read_range(parameters)
    if range is not None:
        return InputPart(name, datatype, shape, *read_region(range))
    return InputPart(name, datatype, shape, _read_data(data, datatype, shape, name), is_json=True)


def _read_data(data: Value, datatype: str, shape: tuple[int, ...], name: str) -> Memory:
    leaves = as_array(data, "Unable to parse 'data'")
    count = count_items(shape)
    if count == 0:
        return b""
    dtype = DTYPE_BY_KSERVE.get(datatype)
    if dtype is None:
        raise invalid(f"invalid datatype for input {name}")
    return read_leaves(leaves, dtype, count, name)


def _check_one_form(given: tuple[bool, bool, bool]) -> None:
    if sum(given) == 1:
        return
    fields = " ".join(form for form, there in zip(FORMS, given, strict=True) if there)
    raise invalid(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        "'shared_memory_region' in 'parameters'. But " + (f"set {fields}" if fields else "no field is set")
    )


def _read_range(parameters: Value) -> Range | None:
    """The shared memory a tensor's parameters name, None without any."""
    if not find(parameters, "shared_memory_region")[0]:
        return None
    name = member(parameters, "shared_memory_region", as_string)
    offset = optional(parameters, "shared_memory_offset", as_uint, 0)
    return Range(name, offset, optional(parameters, "shared_memory_byte_size", as_uint, 0))


def _read_output(item: Value) -> OutputPart:
    parameters = find(item, "parameters")[1]
    _check_output(parameters)
    return _make_output(member(item, "name", as_string), parameters)


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
