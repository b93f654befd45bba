"""What an inference asks for, as both codecs read it: neutral of HTTP and gRPC, and of the model.

    InferBody("7", inputs=[InputPart("x", "FP32", (1, 2), b"...")], outputs=[OutputPart("y")])

`body` makes one of JSON, `messages` of a ModelInferRequest; `checks` holds it against the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fastserve.dialects.kserve_v2.errors import invalid
from fastserve.serving.shared_memory import Range

Memory = bytes | bytearray | memoryview


@dataclass(slots=True)
class Parameters:
    """What a request's parameters say. `own` are handed to the model; `empty_final` is of streams."""

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    binary_output: bool = False
    empty_final: bool = False
    own: dict[str, object] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says of its reply, without its tensors. `ranges`: of outputs that go into client memory;
    `parameters.binary_output`: how outputs go that it does not name."""

    parts: dict[str, OutputPart]
    ranges: dict[str, Range]
    parameters: Parameters

    @classmethod
    def of(cls, body: InferBody) -> Asked:
        parts = {part.name: part for part in reversed(body.outputs)}  # the first of a name counts
        ranges = {name: part.range for name, part in parts.items() if part.range is not None}
        return cls(parts, ranges, body.parameters)

    @property
    def classifies(self) -> bool:
        return any(part.classes for part in self.parts.values())

    def form(self, name: str) -> str:
        """How an output goes over HTTP: "json", "binary" or "outside"."""
        part = self.parts.get(name)
        if part is None:
            return "binary" if self.parameters.binary_output else "json"
        return "outside" if part.range is not None else "binary" if part.binary else "json"


def tag(request_id: str) -> str:
    """What many texts begin with."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def refuse_double(name: str, names: set[str], request_id: str) -> None:
    """Raises ServeError for an input that is sent a second time; `names` are those before it."""
    if name in names:
        raise invalid(f"{tag(request_id)}input '{name}' already exists in request")
    names.add(name)
