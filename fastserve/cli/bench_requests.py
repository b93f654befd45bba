"""The requests that `fastserve bench` sends: random inputs in the shapes that a model's metadata gives."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

import click
import numpy as np

from fastserve.cli.client import ServerClient, model_path
from fastserve.cli.generate import CHAT, PLAIN, Question, completion_body
from fastserve.tensor import DTYPE_BY_KSERVE, KSERVE_NAME

JSON, BINARY = "application/json", "application/octet-stream"
HEADER_LENGTH = "Inference-Header-Content-Length"
V2_SERVICE = "/inference.GRPCInferenceService/"
TIMEOUT_S = 60.0
VARIANTS = 16
VARIANT_BYTES = 8 << 20  # of all variants together
WORDS = ("the", "river", "of", "light", "came", "down", "from", "heaven", "and", "every", "man", "said")
# TensorFlow's name for a dtype where it is not DT_ and the dtype's own in capitals.
TENSORFLOW_NAMES = {"DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_HALF": "float16", "DT_STRING": "bytes"}


@dataclass(frozen=True)
class LoadRequest:
    """One POST over HTTP, or one message to the gRPC method `path`."""

    path: str
    content_type: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self, host: str) -> bytes:
        """Return the request as HTTP/1.1 sends it."""
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {self.content_type}\r\n{more}"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(self.body) + self.body


@dataclass(frozen=True)
class LoadOptions:
    """The target of a load and the form of its requests.

    `rows` fills an open batch axis, `length` every other open axis (for text: the words of a prompt).
    """

    server: ServerClient
    model: str
    grpc_url: str = ""
    rows: int = 1
    length: int = 1
    signature: str = "serving_default"
    tokens: int = 64


class LoadInput(NamedTuple):
    """An input by its dtype's name (`tensor.DTYPES`) and the shape to send, batch axis included."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """Return random elements; bfloat16 as uint16. Raises ClickException for complex numbers."""
        if self.dtype == "bytes":
            texts = [rng.bytes(6).hex() for _ in range(int(np.prod(self.shape)))]
            return np.array(texts, object).reshape(self.shape)
        if self.dtype == "bool":
            return rng.random(self.shape) < 0.5
        if self.dtype == "bfloat16":
            return (rng.random(self.shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if self.dtype.startswith("float"):
            return rng.random(self.shape).astype(self.dtype)
        if self.dtype.startswith("complex"):
            raise click.ClickException(f"cannot make random {self.dtype} values; give a body with --data")
        return rng.integers(0, 100, self.shape).astype(self.dtype)

    def pack(self, rng: np.random.Generator) -> bytes:
        """Return random elements as little-endian bytes, texts with their length before them."""
        found = self.sample(rng)
        if self.dtype != "bytes":
            return found.tobytes()
        return b"".join(len(text).to_bytes(4, "little") + text.encode() for text in found.flat)

    def describe(self) -> dict[str, Any]:
        """Return the tensor as V2 has it, without its elements."""
        return {"name": self.name, "shape": self.shape, "datatype": KSERVE_NAME[self.dtype]}


Make = Callable[[np.random.Generator], LoadRequest]


class LoadProtocol(NamedTuple):
    """One way to ask a model: where bodies go, their content type, and what makes random ones."""

    path: Callable[[str], str]
    content_type: str
    prepare: Callable[[LoadOptions], Make]
    grpc: bool = False
    events: bool = False

    def requests(self, options: LoadOptions, data: bytes | None = None) -> list[LoadRequest]:
        """Return up to VARIANTS requests, or the one of `data`. Raises ClickException."""
        if data is not None and self.prepare is prepare_v2_binary:
            raise click.ClickException("--data is for bodies of JSON; use --protocol v2")
        if data is not None:
            return [LoadRequest(self.path(options.model), self.content_type, data)]
        make, rng = self.prepare(options), np.random.default_rng(7)
        made = [make(rng)]
        count = min(VARIANTS, max(1, VARIANT_BYTES // max(1, len(made[0].body))))
        return made + [make(rng) for _ in range(count - 1)]


# --- TensorFlow Serving -----------------------------------------------------------------------------


def predict_path(model: str) -> str:
    return f"{model_path(model)}:predict"


def prepare_rows(options: LoadOptions) -> Make:
    """{"instances": [...]}."""
    inputs = signature_inputs(options)
    named = {} if options.signature == "serving_default" else {"signature_name": options.signature}

    def make(rng: np.random.Generator) -> LoadRequest:
        columns = {one.name: rows_of(one, rng) for one in inputs}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        only = columns[inputs[0].name] if len(inputs) == 1 else rows
        body = json.dumps({**named, "instances": only}).encode()
        return LoadRequest(predict_path(options.model), JSON, body)

    return make


def rows_of(given: LoadInput, rng: np.random.Generator) -> Any:
    """Return nested lists of random elements; binary strings in base64."""
    found = given.sample(rng)
    if given.dtype == "bytes":
        found = np.frompyfunc(lambda text: {"b64": base64.b64encode(text.encode()).decode()}, 1, 1)(found)
    return found.tolist()


def prepare_raw(options: LoadOptions) -> Make:
    """The bytes of the only input."""
    inputs = signature_inputs(options)
    if len(inputs) != 1 or inputs[0].dtype in ("bytes", "bfloat16"):
        raise click.ClickException(f"{options.model} has not one numeric input, which a raw body needs")
    return lambda rng: LoadRequest(predict_path(options.model), BINARY, inputs[0].pack(rng))


def signature_inputs(options: LoadOptions) -> list[LoadInput]:
    signatures = options.server.signatures(options.model)
    if options.signature not in signatures:
        known = ", ".join(sorted(signatures))
        raise click.ClickException(f"{options.model} has no signature {options.signature}; it has {known}")
    return [
        LoadInput(name, tensorflow_dtype(spec["dtype"]), fill_shape(spec["tensor_shape"], options))
        for name, spec in signatures[options.signature]["inputs"].items()
    ]


def tensorflow_dtype(name: str) -> str:
    return TENSORFLOW_NAMES.get(name, name.removeprefix("DT_").lower())


def fill_shape(shape: Mapping[str, Any], options: LoadOptions) -> tuple[int, ...]:
    """Return the shape to send; an unknown rank is taken as one number per row."""
    sizes = [int(dim["size"]) for dim in shape.get("dim", [])] or [-1]
    first = options.rows if sizes[0] < 0 else sizes[0]
    return (first, *(options.length if size < 0 else size for size in sizes[1:]))


# --- Open Inference Protocol V2 ---------------------------------------------------------------------


def infer_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/infer"


def prepare_v2(options: LoadOptions) -> Make:
    inputs = v2_inputs(options)
    if refused := [one.name for one in inputs if one.dtype in ("float16", "bfloat16")]:
        raise click.ClickException(f"{refused[0]} has no JSON form; use --protocol v2-binary")

    def make(rng: np.random.Generator) -> LoadRequest:
        tensors = [{**one.describe(), "data": one.sample(rng).ravel().tolist()} for one in inputs]
        return LoadRequest(infer_path(options.model), JSON, json.dumps({"inputs": tensors}).encode())

    return make


def prepare_v2_binary(options: LoadOptions) -> Make:
    inputs = v2_inputs(options)

    def make(rng: np.random.Generator) -> LoadRequest:
        blobs = [one.pack(rng) for one in inputs]
        tensors = [
            {**one.describe(), "parameters": {"binary_data_size": len(blob)}}
            for one, blob in zip(inputs, blobs, strict=True)
        ]
        header = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
        lengths = {HEADER_LENGTH: str(len(header))}
        return LoadRequest(infer_path(options.model), BINARY, b"".join((header, *blobs)), lengths)

    return make


def prepare_v2_grpc(options: LoadOptions) -> Make:
    """ModelInfer with raw contents."""
    from google.protobuf.json_format import MessageToDict

    from fastserve.protos import load

    described = MessageToDict(call_v2(options, "ModelMetadata"))["inputs"]
    try:
        config = MessageToDict(call_v2(options, "ModelConfig").config, preserving_proto_field_name=True)
    except click.ClickException:
        config = None
    inputs = [read_input(one, options, has_batch_axis(config)) for one in described]

    def make(rng: np.random.Generator) -> LoadRequest:
        request = load("kserve_v2").ModelInferRequest(model_name=options.model)
        for one in inputs:
            request.inputs.add(**one.describe())
            request.raw_input_contents.append(one.pack(rng))
        return LoadRequest(f"{V2_SERVICE}ModelInfer", "", request.SerializeToString())

    return make


def call_v2(options: LoadOptions, method: str) -> Any:
    """Return the reply to a gRPC call about the model. Raises ClickException."""
    import grpc

    from fastserve.protos import load

    messages, address = load("kserve_v2"), options.grpc_url.partition("://")[2]
    secured = options.grpc_url.startswith("https://")
    request = getattr(messages, f"{method}Request")(name=options.model).SerializeToString()
    try:
        with options.server.trust.channel(grpc, address, secured) as channel:
            reply = channel.unary_unary(f"{V2_SERVICE}{method}")(request, timeout=TIMEOUT_S)
    except grpc.RpcError as fault:
        raise click.ClickException(f"{address}: {fault.code().name}: {fault.details()}") from None
    return getattr(messages, f"{method}Response").FromString(reply)


def v2_inputs(options: LoadOptions) -> list[LoadInput]:
    path = f"/v2/models/{quote(options.model, safe='')}"
    metadata = json.loads(options.server.ask(path))
    status, config = options.server.exchange(f"{path}/config", None, "")
    batching = has_batch_axis(json.loads(config) if status == 200 else None)
    return [read_input(one, options, batching) for one in metadata["inputs"]]


def has_batch_axis(config: Mapping[str, Any] | None) -> bool:
    """Return whether tensors have a batch axis: without Triton's model config, the first open axis is one."""
    return config is None or int(config.get("max_batch_size", 0)) > 0


def read_input(described: Mapping[str, Any], options: LoadOptions, batching: bool) -> LoadInput:
    sizes = [int(size) for size in described.get("shape", ())]
    if batching and sizes and sizes[0] < 0:
        sizes[0] = options.rows
    dtype = DTYPE_BY_KSERVE.get(described["datatype"])
    if dtype is None:
        raise click.ClickException(f"{described['name']} has the datatype {described['datatype']}")
    return LoadInput(described["name"], dtype.name, tuple(options.length if n < 0 else n for n in sizes))


# --- OpenAI's API, streamed -------------------------------------------------------------------------


def prepare_text(options: LoadOptions, chat: bool = False) -> Make:
    """Prompts of `length` words, answers of `tokens` tokens."""

    def make(rng: np.random.Generator) -> LoadRequest:
        question = Question(
            prompt=" ".join(rng.choice(WORDS, options.length)), chat=chat, max_new_tokens=options.tokens
        )
        body = {**completion_body(question, options.model), "ignore_eos": True}
        return LoadRequest(CHAT if chat else PLAIN, JSON, json.dumps(body).encode())

    return make


PROTOCOLS: dict[str, LoadProtocol] = {
    "tfserving": LoadProtocol(predict_path, JSON, prepare_rows),
    "tfserving-raw": LoadProtocol(predict_path, BINARY, prepare_raw),
    "v2": LoadProtocol(infer_path, JSON, prepare_v2),
    "v2-binary": LoadProtocol(infer_path, BINARY, prepare_v2_binary),
    "v2-grpc": LoadProtocol(lambda model: f"{V2_SERVICE}ModelInfer", "", prepare_v2_grpc, grpc=True),
    "text": LoadProtocol(lambda model: PLAIN, JSON, prepare_text, events=True),
    "chat": LoadProtocol(lambda model: CHAT, JSON, lambda options: prepare_text(options, True), events=True),
}
