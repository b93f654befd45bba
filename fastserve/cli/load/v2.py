"""The Open Inference Protocol V2 over HTTP, JSON or binary, and over gRPC: what KServe and Triton speak.

Nothing of this server alone is asked for: metadata, a model's config where there is one (Triton's
extension; it tells a batch axis from one of any length), and inference.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from fastserve.cli.load.requests import Request, Target, Wish, variants
from fastserve.cli.load.tensors import Input, flat, packed
from fastserve.tensor import DTYPE_BY_KSERVE, KSERVE_NAME

JSON, BINARY = "application/json", "application/octet-stream"
HEADER_LENGTH = "Inference-Header-Content-Length"
SERVICE = "/inference.GRPCInferenceService/"
TIMEOUT_S = 60.0


class V2Json:
    """Every tensor as a list of numbers, both ways."""

    over_grpc = False
    events = False

    def requests(self, target: Target, wish: Wish) -> list[Request]:
        if wish.data is not None:
            return [Request(infer_path(wish.model), JSON, wish.data)]
        inputs = ask_inputs(target, wish)
        if refused := [one.name for one in inputs if one.dtype in ("float16", "bfloat16")]:
            raise click.ClickException(f"{refused[0]} has no JSON form; use --protocol v2-binary")
        return variants(lambda rng: Request(infer_path(wish.model), JSON, json_body(inputs, rng)))

    def close(self) -> None:
        """Nothing is held."""


class V2Binary(V2Json):
    """Tensors as bytes after a JSON header, both ways."""

    def requests(self, target: Target, wish: Wish) -> list[Request]:
        if wish.data is not None:
            raise click.ClickException("--data is for bodies of JSON; use --protocol v2")
        inputs = ask_inputs(target, wish)
        return variants(lambda rng: binary_request(infer_path(wish.model), inputs, rng))


class V2Grpc(V2Json):
    """ModelInfer with raw contents, a connection of its own for each request under way."""

    over_grpc = True
    events = False

    def requests(self, target: Target, wish: Wish) -> list[Request]:
        if wish.data is not None:
            return [Request(f"{SERVICE}ModelInfer", "", wish.data)]
        inputs = ask_inputs_over_grpc(target, wish)
        return variants(lambda rng: Request(f"{SERVICE}ModelInfer", "", message(wish.model, inputs, rng)))


def infer_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/infer"


# --- bodies ----------------------------------------------------------------------------------------


def described(given: Input) -> dict[str, Any]:
    """A tensor without its elements."""
    return {"name": given.name, "shape": given.shape, "datatype": KSERVE_NAME[given.dtype]}


def json_body(inputs: Sequence[Input], rng: random.Random) -> bytes:
    return json.dumps({"inputs": [{**described(one), "data": flat(one, rng)} for one in inputs]}).encode()


def binary_request(path: str, inputs: Sequence[Input], rng: random.Random) -> Request:
    blobs = [packed(one, rng) for one in inputs]
    tensors = [
        {**described(one), "parameters": {"binary_data_size": len(blob)}}
        for one, blob in zip(inputs, blobs, strict=True)
    ]
    header = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    return Request(path, BINARY, b"".join((header, *blobs)), {HEADER_LENGTH: str(len(header))})


def message(model: str, inputs: Sequence[Input], rng: random.Random) -> bytes:
    from fastserve.protos import load

    request = load("kserve_v2").ModelInferRequest(model_name=model)
    for one in inputs:
        request.inputs.add(name=one.name, datatype=KSERVE_NAME[one.dtype], shape=one.shape)
        request.raw_input_contents.append(packed(one, rng))
    data: bytes = request.SerializeToString()
    return data


# --- what a model takes ----------------------------------------------------------------------------


def ask_inputs(target: Target, wish: Wish) -> list[Input]:
    """The model's inputs as its metadata has them, open dimensions filled in."""
    path = f"/v2/models/{quote(wish.model, safe='')}"
    metadata = json.loads(target.http.ask(path))
    status, config = target.http.exchange(f"{path}/config", None, "")
    return [
        read_input(one, wish, batches(json.loads(config) if status == 200 else None))
        for one in metadata["inputs"]
    ]


def ask_inputs_over_grpc(target: Target, wish: Wish) -> list[Input]:
    """The same from a server that may have no HTTP port."""
    from google.protobuf.json_format import MessageToDict

    metadata = call(target, "ModelMetadata", name=wish.model)
    try:
        config = call(target, "ModelConfig", name=wish.model).config
    except click.ClickException:
        config = None
    shown = MessageToDict(config, preserving_proto_field_name=True) if config is not None else None
    batching = batches(shown)
    return [read_input(MessageToDict(one), wish, batching) for one in metadata.inputs]


def batches(config: Mapping[str, Any] | None) -> bool:
    """Whether tensors have a batch axis; a server that does not say is taken to mean its first open one."""
    return config is None or int(config.get("max_batch_size", 0)) > 0


def read_input(described: Mapping[str, Any], wish: Wish, batching: bool) -> Input:
    sizes = [int(size) for size in described.get("shape", ())]
    if batching and sizes and sizes[0] < 0:
        sizes[0] = wish.rows
    dtype = DTYPE_BY_KSERVE.get(described["datatype"])
    if dtype is None:
        raise click.ClickException(f"{described['name']} has the datatype {described['datatype']}")
    return Input(described["name"], dtype.name, tuple(wish.length if n < 0 else n for n in sizes))


def call(target: Target, method: str, **fields: Any) -> Any:
    """One gRPC call. Raises ClickException with what the server said."""
    from fastserve.protos import load

    messages = load("kserve_v2")
    request = getattr(messages, f"{method}Request")(**fields)
    reply = exchange(target, f"{SERVICE}{method}", request.SerializeToString())
    return getattr(messages, f"{method}Response").FromString(reply)


def exchange(target: Target, method: str, data: bytes) -> bytes:
    """The same over bytes."""
    import grpc

    from fastserve.cli.load.grpc_calls import make_channel

    trust = target.http.trust if target.grpc_url.startswith("https://") else None
    address = target.grpc_url.partition("://")[2]
    with make_channel(grpc, address, trust, [("grpc.max_receive_message_length", -1)]) as channel:
        try:
            reply: bytes = channel.unary_unary(method)(data, timeout=TIMEOUT_S)
        except grpc.RpcError as fault:
            raise click.ClickException(f"{address}: {fault.code().name}: {fault.details()}") from None
    return reply
