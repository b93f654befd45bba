"""Questions of the Open Inference Protocol, as HTTP and as gRPC have them.

A question is a request and the function that reads its answer; a transport sends the one, so that clients
which block and clients which await share everything else. `HttpQuestions` and `RpcQuestions` have one face.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

from fastserve.client.tensors import (
    BYTES,
    CallInputs,
    CallOutputs,
    DeclaredTensor,
    ModelDescription,
    as_values,
    from_values,
    pack,
    unpack,
)
from fastserve.errors import Kind, ServeError, internal
from fastserve.protos import load

Found = TypeVar("Found")
JSON = "application/json"
BINARY = "application/octet-stream"
HEADER_LENGTH = "inference-header-content-length"
SERVICE = "/inference.GRPCInferenceService/"
READY = "READY"
KINDS = {
    400: Kind.INVALID_ARGUMENT,
    401: Kind.UNAUTHENTICATED,
    403: Kind.PERMISSION_DENIED,
    404: Kind.NOT_FOUND,
    413: Kind.RESOURCE_EXHAUSTED,
    429: Kind.RESOURCE_EXHAUSTED,
    499: Kind.CANCELLED,
    501: Kind.UNIMPLEMENTED,
    503: Kind.UNAVAILABLE,
    504: Kind.DEADLINE_EXCEEDED,
}
# V2's datatype -> the field of InferTensorContents, for servers that answer without raw contents.
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


class SentHttp(NamedTuple):
    """A request of HTTP, without its host."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = {}
    blobs: Sequence[bytes | memoryview] = ()
    """Memory of the caller, sent behind the body."""


@dataclass
class ReceivedHttp:
    """An answer of HTTP; names of headers are lower-case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class SentRpc(NamedTuple):
    """A call of gRPC: its method, its message, and the class of the answer."""

    method: str
    message: Any
    answer: Any
    streams: bool = False


@dataclass(frozen=True)
class ClientQuestion(Generic[Found]):
    """A request and the function that reads its answer; of a stream, each part of it."""

    request: Any
    read: Callable[[Any], Found]


TensorQuestion = ClientQuestion[CallOutputs]


class Questions(Protocol):
    """Questions of clients over one protocol."""

    def ready(self) -> ClientQuestion[bool]: ...
    def models(self) -> ClientQuestion[list[str]]: ...
    def describe(self, name: str, version: str) -> ClientQuestion[ModelDescription]: ...
    def infer(
        self, model: ModelDescription, version: str, inputs: CallInputs
    ) -> ClientQuestion[CallOutputs]: ...
    def stream(
        self, model: ModelDescription, version: str, inputs: CallInputs
    ) -> ClientQuestion[CallOutputs]: ...


class HttpQuestions:
    """V2 over HTTP. `binary`: tensors are sent and asked for raw, not as JSON."""

    def __init__(self, *, binary: bool = True) -> None:
        self._binary = binary

    def ready(self) -> ClientQuestion[bool]:
        return ClientQuestion(SentHttp("GET", "/v2/health/ready"), lambda found: found.status == 200)

    def models(self) -> ClientQuestion[list[str]]:
        request = SentHttp("POST", "/v2/repository/index", b"{}", {"content-type": JSON})
        return ClientQuestion(request, lambda found: _ready_names(_read_json(found)))

    def describe(self, name: str, version: str) -> ClientQuestion[ModelDescription]:
        return ClientQuestion(
            SentHttp("GET", _path(name, version)), lambda found: _description(_read_json(found))
        )

    def infer(self, model: ModelDescription, version: str, inputs: CallInputs) -> TensorQuestion:
        path = f"{_path(model.name, version)}/infer"
        described = [
            {"name": one.name, "datatype": one.datatype, "shape": array.shape} for one, array in inputs.arrays
        ]
        if not self._binary:
            for about, (one, array) in zip(described, inputs.arrays, strict=True):
                about["data"] = as_values(array, one.datatype)
            body = json.dumps({"inputs": described}).encode()
            return ClientQuestion(SentHttp("POST", path, body, {"content-type": JSON}), read_infer)
        blobs = [pack(array, one.datatype) for one, array in inputs.arrays]
        for about, blob in zip(described, blobs, strict=True):
            about["parameters"] = {"binary_data_size": len(blob)}
        head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
        headers = {"content-type": BINARY, HEADER_LENGTH: str(len(head))}
        return ClientQuestion(SentHttp("POST", path, head, headers, blobs), read_infer)

    def stream(
        self, model: ModelDescription, version: str, inputs: CallInputs
    ) -> ClientQuestion[CallOutputs]:
        """Ask by `generate_stream`, whose events are JSON: arrays come and go flat, bytes as text."""
        members: dict[str, Any] = {"stream": True} if model.takes_json else {}
        for one, array in inputs.arrays:
            values = as_values(array, one.datatype)
            members[one.name] = values if len(values) != 1 else values[0]
        request = SentHttp(
            "POST",
            f"{_path(model.name, version)}/generate_stream",
            json.dumps(members).encode(),
            {"content-type": JSON, "accept": "text/event-stream"},
        )
        return ClientQuestion(request, partial(_read_event, {one.name: one for one in model.outputs}))


class RpcQuestions:
    """V2 over gRPC."""

    def __init__(self) -> None:
        self._messages: Any = load("kserve_v2")

    def ready(self) -> ClientQuestion[bool]:
        return ClientQuestion(self._sent("ServerReady"), lambda found: bool(found.ready))

    def models(self) -> ClientQuestion[list[str]]:
        def read(found: Any) -> list[str]:
            return _ready_names([{"name": one.name, "state": one.state} for one in found.models])

        return ClientQuestion(self._sent("RepositoryIndex"), read)

    def describe(self, name: str, version: str) -> ClientQuestion[ModelDescription]:
        def read(found: Any) -> ModelDescription:
            sides = (
                tuple(DeclaredTensor(one.name, one.datatype, tuple(one.shape)) for one in side)
                for side in (found.inputs, found.outputs)
            )
            return ModelDescription(found.name, found.platform, *sides)

        return ClientQuestion(self._sent("ModelMetadata", name=name, version=version), read)

    def infer(self, model: ModelDescription, version: str, inputs: CallInputs) -> TensorQuestion:
        message = self._request(model, version, inputs)
        return ClientQuestion(
            self._of("ModelInfer", message, self._messages.ModelInferResponse), _read_message
        )

    def stream(
        self, model: ModelDescription, version: str, inputs: CallInputs
    ) -> ClientQuestion[CallOutputs]:
        message = self._request(model, version, inputs)
        if model.takes_json:
            message.parameters["stream"].bool_param = True
        answer = self._messages.ModelStreamInferResponse

        def read(found: Any) -> CallOutputs:
            if found.error_message:
                raise ServeError(Kind.UNKNOWN, found.error_message)
            return _read_message(found.infer_response)

        return ClientQuestion(self._of("ModelStreamInfer", message, answer, streams=True), read)

    def _sent(self, method: str, /, **fields: Any) -> SentRpc:
        message = getattr(self._messages, f"{method}Request")(**fields)
        return self._of(method, message, getattr(self._messages, f"{method}Response"))

    def _of(self, name: str, message: Any, answer: Any, *, streams: bool = False) -> SentRpc:
        return SentRpc(SERVICE + name, message, answer, streams)

    def _request(self, model: ModelDescription, version: str, inputs: CallInputs) -> Any:
        message = self._messages.ModelInferRequest(model_name=model.name, model_version=version)
        for one, array in inputs.arrays:
            message.inputs.add(name=one.name, datatype=one.datatype, shape=array.shape)
            message.raw_input_contents.append(bytes(pack(array, one.datatype)))
        return message


def read_infer(found: ReceivedHttp) -> CallOutputs:
    """Return the tensors of an answer of V2's infer, raw or JSON. Raises ServeError."""
    _check_status(found)
    length = found.headers.get(HEADER_LENGTH)
    head, blobs = found.body, memoryview(b"")
    if length is not None:
        head, blobs = found.body[: int(length)], memoryview(found.body)[int(length) :]
    document = _decode(head)
    arrays = {}
    for one in document["outputs"]:
        size = one.get("parameters", {}).get("binary_data_size")
        if size is None:
            arrays[one["name"]] = from_values(one["data"], one["datatype"], one["shape"])
        else:
            arrays[one["name"]] = unpack(blobs[:size], one["datatype"], one["shape"])
            blobs = blobs[size:]
    return CallOutputs(arrays, document.get("parameters", {}))


def split_events(text: bytes) -> Iterator[bytes]:
    """Yield the data of whole server-sent events."""
    for event in text.split(b"\n\n"):
        lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            yield b"\n".join(lines)


def fault_of(found: ReceivedHttp) -> ServeError:
    """Return the error that an answer tells."""
    kind = KINDS.get(found.status, Kind.INTERNAL if found.status >= 500 else Kind.UNKNOWN)
    text = found.body[:16384].decode("utf-8", "replace")
    for data in (*split_events(found.body), found.body):
        try:
            text = str(json.loads(data)["error"])
            break
        except (ValueError, KeyError, TypeError):
            continue
    later = found.headers.get("retry-after", "")
    later_s = float(later) if later.isdigit() else None
    return ServeError(kind, text or f"status {found.status}", retry_after_s=later_s)


def _check_status(found: ReceivedHttp) -> None:
    if found.status != 200:
        raise fault_of(found)


def _read_json(found: ReceivedHttp) -> Any:
    _check_status(found)
    return _decode(found.body)


def _decode(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise internal(f"the server answered with no JSON: {text[:80]!r}") from None


def _read_event(outputs: Mapping[str, DeclaredTensor], data: bytes) -> CallOutputs:
    document = _decode(data)
    if "error" in document and "error" not in outputs:
        raise ServeError(Kind.UNKNOWN, str(document["error"]))
    arrays = {
        name: from_values(document[name], one.datatype, (-1,))
        for name, one in outputs.items()
        if name in document
    }
    return CallOutputs(arrays, document)


def _read_message(found: Any) -> CallOutputs:
    arrays = {}
    for index, one in enumerate(found.outputs):
        if found.raw_output_contents:
            arrays[one.name] = unpack(found.raw_output_contents[index], one.datatype, one.shape)
        else:
            values = list(getattr(one.contents, CONTENTS[one.datatype]))
            arrays[one.name] = from_values(values, one.datatype, one.shape)
    parameters = {
        name: getattr(one, one.WhichOneof("parameter_choice") or "", None)
        for name, one in found.parameters.items()
    }
    return CallOutputs(arrays, parameters)


def _description(found: Mapping[str, Any]) -> ModelDescription:
    sides = (
        tuple(
            DeclaredTensor(one["name"], one["datatype"], tuple(map(int, one["shape"]))) for one in found[side]
        )
        for side in ("inputs", "outputs")
    )
    return ModelDescription(found["name"], found.get("platform", ""), *sides)


def _ready_names(index: list[Mapping[str, Any]]) -> list[str]:
    return sorted({one["name"] for one in index if one.get("state") == READY})


def _path(name: str, version: str) -> str:
    of_version = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(name, safe='')}{of_version}"
