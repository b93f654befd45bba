"""An infer body -> what it asks for, its tensors as flat memory (spec 3, 3.1, 4).

    {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    -> InferBody(inputs=[InputPart("x", "FP32", (1, 2), b"...")], ...)

Nothing here knows the model; `checks` holds the parts against it. The compiled reader takes every good
body. What it refuses is read again the exact way, an object per value, which finds faults in the order the
original does; beyond EXPLAIN_BYTES that would cost too much, and the compiled reader's own text is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastserve._ext.infer_json import InferBody as CompiledBody
from fastserve._ext.infer_json import InferCode, InferFault, InferInput, read_infer
from fastserve._ext.json_value import Members
from fastserve.dialects.kserve_v2.errors import internal, invalid, to_bytes
from fastserve.dialects.kserve_v2.leaves import read_leaves
from fastserve.dialects.kserve_v2.parameters import Parameters, read_parameters, set_parameter
from fastserve.dialects.kserve_v2.values import (
    Value,
    as_array,
    as_bool,
    as_string,
    as_uint,
    find,
    need,
    read_json,
)
from fastserve.serving.shared_memory import Range
from fastserve.tensor import DTYPE_BY_KSERVE, count_items

Memory = bytes | bytearray | memoryview
Header = CompiledBody | InferFault
ReadRegion = Callable[[Range], bytes]
Scalar = str | int | float | bool | None
EXPLAIN_BYTES = 1 << 18
FORMS = ("'data'", "'binary_data_size'", "'shared_memory_region'")


@dataclass(slots=True)
class InputPart:
    """One input as sent. `datatype` is the client's text, which may name no type at all."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Memory
    is_json: bool = False


@dataclass(slots=True)
class OutputPart:
    """One requested output. `classes` 0: no classification."""

    name: str
    binary: bool = False
    classes: int = 0
    range: Range | None = None


@dataclass(slots=True)
class InferBody:
    """What one infer request asks for. No `outputs`: all the model has."""

    request_id: str = ""
    inputs: list[InputPart] = field(default_factory=list)
    outputs: list[OutputPart] = field(default_factory=list)
    parameters: Parameters = field(default_factory=Parameters)


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
        is_json = part.data is not None
        data = part.data if part.data is not None else _find_data(part, rest, read_region)
        body.inputs.append(InputPart(part.name, part.datatype, part.shape, data, is_json))
    rest.end()
    body.outputs = [_make_output(part.name, _members(part.parameters)) for part in read.outputs]
    return body


def _find_data(part: InferInput, rest: _Blobs, read_region: ReadRegion) -> Memory:
    parameters = _members(part.parameters)
    sized, size = find(parameters, "binary_data_size")
    if sized:
        return rest.take(as_uint(size, "Unable to parse 'binary_data_size'"), part.name)
    range = read_range(parameters)
    assert range is not None  # the reader saw one of the three
    return read_region(range)


def _members(parameters: Mapping[str, Scalar]) -> Members:
    return Members([(to_bytes(name), _value(value)) for name, value in parameters.items()])


def _value(value: Scalar) -> Value:
    """As the exact reader has it: strings are bytes."""
    return to_bytes(value) if isinstance(value, str) else value


def read_plainly(header: Memory, blobs: Memory, model: str, read_region: ReadRegion) -> InferBody:
    """The exact way. Raises ServeError."""
    document = read_json(header, EXPLAIN_BYTES)
    body = InferBody()
    found, value = find(document, "id")
    if found:
        body.request_id = as_string(value, "Unable to parse 'id'")
    body.parameters = read_parameters(document)
    rest = _Blobs(blobs, model)
    names: set[str] = set()
    for item in as_array(need(document, "inputs", "Unable to parse 'inputs'"), "Unable to parse 'inputs'"):
        body.inputs.append(_read_input(item, rest, read_region, names, body.request_id))
    rest.end()
    found, value = find(document, "outputs")
    if found:
        body.outputs = [_read_output(item) for item in as_array(value, "Unable to parse 'outputs'")]
    return body


def _read_input(
    item: Value, blobs: _Blobs, read_region: ReadRegion, names: set[str], request_id: str
) -> InputPart:
    _, parameters = find(item, "parameters")
    has_data, data = find(item, "data")
    sized, binary = find(parameters, "binary_data_size")
    outside, _ = find(parameters, "shared_memory_region")
    _check_one_form((has_data, sized, outside))
    name = as_string(need(item, "name", "Unable to parse 'name'"), "Unable to parse 'name'")
    datatype = as_string(need(item, "datatype", "Unable to parse 'datatype'"), "Unable to parse 'datatype'")
    where = "Unable to parse 'shape'"
    shape = tuple(as_uint(size, where) for size in as_array(need(item, "shape", where), where))
    refuse_double(name, names, request_id)
    if sized:
        size = as_uint(binary, "Unable to parse 'binary_data_size'")
        return InputPart(name, datatype, shape, blobs.take(size, name))
    range = read_range(parameters)
    if range is not None:
        return InputPart(name, datatype, shape, read_region(range))
    return InputPart(name, datatype, shape, _read_data(data, datatype, shape, name), is_json=True)


def refuse_double(name: str, names: set[str], request_id: str) -> None:
    """Raises ServeError for an input that is sent a second time; `names` are those before it."""
    if name in names:
        raise invalid(
            f"[request id: {request_id or '<id_unknown>'}] input '{name}' already exists in request"
        )
    names.add(name)


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


def read_range(parameters: Value) -> Range | None:
    """The shared memory a tensor's parameters name, None without any. Raises ServeError."""
    found, region = find(parameters, "shared_memory_region")
    if not found:
        return None
    name = as_string(region, "Unable to parse 'shared_memory_region'")
    numbers = [0, 0]
    for place, key in enumerate(("shared_memory_offset", "shared_memory_byte_size")):
        given, value = find(parameters, key)
        if given:
            numbers[place] = as_uint(value, f"Unable to parse '{key}'")
    return Range(name, *numbers)


def _read_output(item: Value) -> OutputPart:
    parameters = find(item, "parameters")[1]
    _check_output(parameters)
    name = as_string(need(item, "name", "Unable to parse 'name'"), "Unable to parse 'name'")
    return _make_output(name, parameters)


def _check_output(parameters: Value) -> None:
    """Raises ServeError for what does not go together."""
    if not find(parameters, "shared_memory_region")[0]:
        return
    binary, wanted = find(parameters, "binary_data")
    classes = find(parameters, "classification")[0]
    if classes or (binary and as_bool(wanted, "Unable to set 'binary_data'")):
        taken = "classification" if classes else "binary_data"
        raise invalid(f"Output can't set both 'shared_memory_region' and '{taken}'")


def _make_output(name: str, parameters: Value) -> OutputPart:
    _check_output(parameters)
    part = OutputPart(name)
    found, classes = find(parameters, "classification")
    if found:
        part.classes = as_uint(classes, "Unable to set 'classification'")
    part.range = read_range(parameters)
    found, binary = find(parameters, "binary_data")
    if found and part.range is None:
        part.binary = as_bool(binary, "Unable to parse 'binary_data'")
    return part
