"""Clients that read as little as they like of one reply: over HTTP/1.1, HTTP/2, and V2's stream over gRPC.

line = await open_line("h2", address)
line.send("/infer", body);  await line.until(b"one");  reply = await line.rest();  line.leave()
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from typing import Any

import grpc.aio
import h2.config
import h2.connection
import h2.errors
import h2.events

from fastserve.protos import load
from tests.conformance.text.apis import Reply

LIMIT_S = 60.0
Address = tuple[str, int]
MESSAGES = load("kserve_v2")
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


class Line(ABC):
    """One request and its reply."""

    def __init__(self) -> None:
        self.status, self.body, self.ended, self.whole = 0, b"", False, False

    @abstractmethod
    def send(self, path: str, body: bytes) -> None:
        """All of a request."""

    @abstractmethod
    async def _more(self) -> None:
        """Read on; `ended` when there is no more."""

    @abstractmethod
    def leave(self) -> None:
        """Be gone, without a word."""

    async def until(self, mark: bytes) -> None:
        """Read until this has come."""
        while mark not in self.body:
            assert not self.ended, (mark, self.status, self.body)
            await asyncio.wait_for(self._more(), LIMIT_S)

    async def rest(self) -> Reply:
        """Read to the end."""
        while not self.ended:
            await asyncio.wait_for(self._more(), LIMIT_S)
        return Reply(self.status, self.body, self.whole)


class Http1Line(Line):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader, self._writer = reader, writer
        self._chunked, self._left = False, 0

    def send(self, path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def _more(self) -> None:
        if not self.status:
            await self._read_head()
        elif self._chunked:
            await self._read_chunk()
        else:
            self.body += await self._reader.readexactly(self._left)
            self.ended = self.whole = True

    async def _read_head(self) -> None:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.status = int(head.split(" ", 2)[1])
        self._chunked = "transfer-encoding: chunked" in head
        if not self._chunked:
            self._left = int(head.partition("content-length: ")[2].split("\r\n")[0])

    async def _read_chunk(self) -> None:
        line = await self._reader.readline()
        if not line:
            self.ended = True  # cut off
            return
        size = int(line, 16)
        self.body += (await self._reader.readexactly(size + 2))[:-2]
        self.ended = self.whole = size == 0

    def leave(self) -> None:
        self._writer.transport.abort()


class Http2Line(Line):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader, self._writer = reader, writer
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._stream = 0
        self._flush()

    def send(self, path: str, body: bytes) -> None:
        self._stream = self._h2.get_next_available_stream_id()
        names = (":method", "POST"), (":scheme", "http"), (":authority", "t"), (":path", path)
        self._h2.send_headers(self._stream, list(names))
        self._h2.send_data(self._stream, body, end_stream=True)
        self._flush()

    async def _more(self) -> None:
        data = await self._reader.read(1 << 16)
        if not data:
            self.ended = True
            return
        for event in self._h2.receive_data(data):
            self._hear(event)
        self._flush()

    def _hear(self, event: Any) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            self.status = int(dict(event.headers)[":status"])
        elif isinstance(event, h2.events.DataReceived):
            self.body += event.data
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.ended = self.whole = True
        elif isinstance(event, h2.events.StreamReset):
            self.ended = True

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())

    def leave(self) -> None:
        """The stream is reset; then the connection ends."""
        if self._writer.is_closing():
            return
        if self._stream and not self.ended:
            self._h2.reset_stream(self._stream, h2.errors.ErrorCodes.CANCEL)
        self._flush()
        self._writer.close()


class GrpcLine(Line):
    """V2's stream, whose messages are written down as the events of its HTTP form."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__()
        self._call = channel.stream_stream(
            STREAM,
            MESSAGES.ModelInferRequest.SerializeToString,
            MESSAGES.ModelStreamInferResponse.FromString,
        )(timeout=60)
        self._writing: asyncio.Future[None] | None = None

    def send(self, path: str, body: bytes) -> None:
        said = json.loads(body)
        request = MESSAGES.ModelInferRequest(model_name=path.split("/")[3])
        text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        text.contents.bytes_contents.append(said["text_input"].encode())
        for name in ("stream", "exclude_input_in_output"):
            request.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(
                said[name]
            )
        self._writing = asyncio.ensure_future(self._write(request))

    async def _write(self, request: Any) -> None:
        await self._call.write(request)
        await self._call.done_writing()

    async def _more(self) -> None:
        assert self._writing is not None
        await self._writing
        message = await self._call.read()
        if message is grpc.aio.EOF:
            self.ended = self.whole = True
            self.status = self.status or 200
            return
        self.status = 200
        if message.error_message:
            self._event({"error": message.error_message})
        elif message.infer_response.outputs:
            data = message.infer_response.raw_output_contents[0]
            self._event({"text_output": data[4:].decode()})

    def _event(self, told: Any) -> None:
        self.body += b"data: %b\n\n" % json.dumps(told).encode()

    def leave(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._call.cancel()


async def open_line(transport: str, address: Address, channel: grpc.aio.Channel) -> Line:
    if transport == "grpc":
        return GrpcLine(channel)
    kind = Http2Line if transport == "h2" else Http1Line
    return kind(*await asyncio.open_connection(*address))
