"""The ways in over gRPC, through grpcio's client."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any

import grpc.aio

from fastserve.errors import Kind
from fastserve.protos import load
from tests.conformance.rig import Rig
from tests.conformance.ways import (
    FULL,
    FULL_BYTES,
    LIMIT_S,
    OK,
    TFS_WORDS,
    V1_WORDS,
    Answer,
    Line,
    Sent,
    Way,
    Words,
    get_region,
    numbers,
    pack,
    put_region,
    region_place,
    unpack,
)

V2, V1, TFS = load("kserve_v2"), load("triton_v1"), load("tfserving")
TFS_SERVICE = "/tensorflow.serving.PredictionService/"
V2_SERVICE, V1_SERVICE = "/inference.GRPCInferenceService/", "/nvidia.inferenceserver.GRPCService/"


class UnaryLine(Line):
    """Calls of one method."""

    def __init__(self, way: RpcWay, rig: Rig) -> None:
        self._way, self._rig = way, rig
        channel = rig.channel
        self._call = channel.unary_unary(way.path)
        self._open = channel.stream_unary(way.path)  # the same on the wire
        self._calls: deque[tuple[Any, Sent]] = deque()

    def send(self, sent: Sent) -> None:
        self._calls.append((asyncio.ensure_future(self._run(sent)), sent))

    async def _run(self, sent: Sent) -> bytes:
        found: bytes = await self._call(sent.data, timeout=LIMIT_S, metadata=sent.metadata)
        return found

    def begin(self, sent: Sent) -> None:
        self._calls.append((self._open(timeout=LIMIT_S), sent))

    async def reply(self) -> Answer:
        call, sent = self._calls.popleft()
        try:
            return self._way.read(await call, sent)
        except grpc.aio.AioRpcError as error:
            return Answer(error.code().value[0], [], error.details() or "")

    def leave(self) -> None:
        for call, _ in self._calls:
            call.cancel()
        self._calls.clear()


class StreamLine(Line):
    """Requests of one stream."""

    def __init__(self, way: RpcWay, rig: Rig) -> None:
        self._way = way
        self._open = rig.channel.stream_stream(way.path)
        self._begun: Any = None
        self._sent: deque[Sent] = deque()
        self._writing: asyncio.Future[None] = asyncio.ensure_future(asyncio.sleep(0))

    def _stream(self, sent: Sent) -> Any:
        """The stream, opened with the metadata of its first request."""
        if self._begun is None:
            self._begun = self._open(timeout=LIMIT_S, metadata=sent.metadata)
        return self._begun

    def send(self, sent: Sent) -> None:
        self._sent.append(sent)
        self._writing = asyncio.ensure_future(self._write(self._writing, sent))

    async def _write(self, before: asyncio.Future[None], sent: Sent) -> None:
        await before
        await self._stream(sent).write(sent.data)

    def begin(self, sent: Sent) -> None:
        """The stream alone."""
        self._stream(sent)

    async def reply(self) -> Answer:
        sent = self._sent.popleft()
        try:
            await self._writing
            data = await asyncio.wait_for(self._stream(sent).read(), LIMIT_S)
        except grpc.aio.AioRpcError:  # of a stream that has ended already it is grpcio's own
            code, details = await self._begun.code(), await self._begun.details()
            return Answer(f"the stream ended: {code.name}", [], details)
        if data is grpc.aio.EOF:
            return Answer("the stream ended", [], "")
        return self._way.read(data, sent)

    def leave(self) -> None:
        self._writing.cancel()
        if self._begun is not None:
            self._begun.cancel()


class RpcWay(Way):
    """One message. A dialect says its method and its messages."""

    path = ""
    streams = False

    async def connect(self, rig: Rig) -> Line:
        return StreamLine(self, rig) if self.streams else UnaryLine(self, rig)

    def cut(self, sent: Sent) -> Sent:
        return replace(sent, data=sent.data[:-1])

    def read(self, data: bytes, sent: Sent) -> Answer:
        """A message that came back."""
        raise NotImplementedError


V2_FULL = (Kind.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size")


class V2Rpc(RpcWay):
    """ModelInfer, tensors raw."""

    name, dialect, timed = "v2-grpc", "kserve_v2", True
    words: Words = {FULL: V2_FULL, FULL_BYTES: V2_FULL}
    path = V2_SERVICE + "ModelInfer"
    statuses = {OK: OK, **{kind: kind.value for kind in Kind}}

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        request = V2.ModelInferRequest(model_name=model, id=id)
        self.fill(request, name, rows, columns, slot)
        return Sent(request.SerializeToString(), slot)

    def fill(self, request: Any, name: str, rows: list[float], columns: int, slot: int) -> None:
        request.inputs.add(name=name, datatype="FP32", shape=[len(rows), columns])
        request.raw_input_contents.append(pack(rows, columns))

    def read(self, data: bytes, sent: Sent) -> Answer:
        return Answer(OK, self.rows(V2.ModelInferResponse.FromString(data), sent), "", data)

    def rows(self, reply: Any, sent: Sent) -> list[float]:
        return unpack(reply.raw_output_contents[0])


class V2RpcTyped(V2Rpc):
    """Infer over gRPC with numbers as protobuf has them."""

    name = "v2-grpc-typed"

    def fill(self, request: Any, name: str, rows: list[float], columns: int, slot: int) -> None:
        given = request.inputs.add(name=name, datatype="FP32", shape=[len(rows), columns])
        given.contents.fp32_contents.extend(numbers(rows, columns))


class V2RpcRegions(V2Rpc):
    """Infer with both tensors in client memory."""

    name, outside = "v2-grpc-regions", True
    fast = frozenset()

    def fill(self, request: Any, name: str, rows: list[float], columns: int, slot: int) -> None:
        given = request.inputs.add(name=name, datatype="FP32", shape=[len(rows), columns])
        asked = request.outputs.add(name="y")
        for side, tensor in enumerate((given, asked)):
            for key, value in region_place(slot, side, len(rows), columns).items():
                kind = "string_param" if isinstance(value, str) else "int64_param"
                setattr(tensor.parameters[key], kind, value)
        put_region(slot, rows, columns)

    def rows(self, reply: Any, sent: Sent) -> list[float]:
        return get_region(sent.slot, reply.outputs[0].shape[0])


class V2Stream(V2Rpc):
    """ModelStreamInfer: errors are texts in the stream, without a code."""

    name, streams = "v2-stream", True
    path = V2_SERVICE + "ModelStreamInfer"
    statuses = {OK: OK, **dict.fromkeys(Kind, "error")}

    def read(self, data: bytes, sent: Sent) -> Answer:
        reply = V2.ModelStreamInferResponse.FromString(data)
        if reply.error_message:
            return Answer("error", [], reply.error_message, data)
        return Answer(OK, self.rows(reply.infer_response, sent), "", data)


class TfsRpc(RpcWay):
    """Predict of TensorFlow Serving, numbers as protobuf has them."""

    name, dialect, timed = "tfserving-grpc", "tfserving", True
    words: Words = TFS_WORDS
    path = TFS_SERVICE + "Predict"
    statuses = {OK: OK, **{kind: kind.value for kind in Kind}}

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        request = TFS.PredictRequest(model_spec={"name": model})
        tensor = request.inputs[name]
        tensor.dtype = TFS.DataType.Value("DT_FLOAT")
        for size in (len(rows), columns):
            tensor.tensor_shape.dim.add(size=size)
        self.fill(tensor, rows, columns)
        return Sent(request.SerializeToString(), slot)

    def fill(self, tensor: Any, rows: list[float], columns: int) -> None:
        tensor.float_val.extend(numbers(rows, columns))

    def read(self, data: bytes, sent: Sent) -> Answer:
        values = TFS.PredictResponse.FromString(data).outputs["y"].float_val
        return Answer(OK, list(values)[::2], "", data)


class TfsRpcContent(TfsRpc):
    """Predict over gRPC with tensors as bytes."""

    name = "tfserving-grpc-content"

    def fill(self, tensor: Any, rows: list[float], columns: int) -> None:
        tensor.tensor_content = pack(rows, columns)


class V1Rpc(RpcWay):
    """Infer of Triton's first API: what went wrong is in the answer."""

    name, dialect, timed = "v1-grpc", "triton_v1", True
    words: Words = V1_WORDS
    path = V1_SERVICE + "Infer"
    statuses = {
        OK: "SUCCESS",
        Kind.INTERNAL: "INTERNAL",
        Kind.RESOURCE_EXHAUSTED: "UNAVAILABLE",
        Kind.UNAVAILABLE: "UNAVAILABLE",
        Kind.INVALID_ARGUMENT: "INVALID_ARG",
        Kind.NOT_FOUND: "NOT_FOUND",
        Kind.DEADLINE_EXCEEDED: "UNAVAILABLE",
    }

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        request = V1.InferRequest(model_name=model, model_version=-1)
        request.meta_data.batch_size = len(rows)
        if id:
            request.meta_data.id = int(id)
        given = request.meta_data.input.add(name=name, dims=[columns])
        asked = request.meta_data.output.add(name="y")
        if self.outside:
            for side, tensor in enumerate((given, asked)):
                place = tensor.shared_memory
                place.name, place.offset, place.byte_size = region_place(
                    slot, side, len(rows), columns
                ).values()
            put_region(slot, rows, columns)
        else:
            request.raw_input.append(pack(rows, columns))
        return Sent(request.SerializeToString(), slot)

    def read(self, data: bytes, sent: Sent) -> Answer:
        reply = V1.InferResponse.FromString(data)
        status = reply.request_status
        word = V1.RequestStatusCode.Name(status.code)
        status.request_id = 0
        raw: bytes = reply.SerializeToString()
        if word != "SUCCESS":
            return Answer(word, [], status.msg, raw)
        if self.outside:
            return Answer(word, get_region(sent.slot, reply.meta_data.batch_size), "", raw)
        return Answer(word, unpack(reply.raw_output[0]), "", raw)


class V1RpcRegions(V1Rpc):
    """Infer with both tensors in client memory."""

    fast = frozenset({"columns", "slabs", "whole"})
    name, outside = "v1-grpc-regions", True


class V1Stream(V1Rpc):
    """StreamInfer."""

    name, streams = "v1-stream", True
    path = V1_SERVICE + "StreamInfer"


RPC_WAYS = (
    *(V2Rpc(), V2RpcTyped(), V2RpcRegions(), V2Stream()),
    *(TfsRpc(), TfsRpcContent(), V1Rpc(), V1RpcRegions(), V1Stream()),
)
