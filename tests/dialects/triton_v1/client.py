"""The original's own client (tensorrtserver 1.11) as it was seen on the wire (spec 12), byte for byte.

It is built on libcurl: control calls take a connection each, an inference context keeps one. Replies are read
as that client reads them: header lines by prefix whatever their case, NV-InferResponse before the body, raw
outputs walked by the sizes it tells (strings by their own), and what is left is the header once more.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import text_format

from tests.dialects.triton_v1.rig import V1
from tests.server.rig import WAIT_S

AGENT = "User-Agent: libcurl-agent/1.0\r\nAccept: */*\r\n"
FORM = "Content-Type: application/x-www-form-urlencoded\r\n"
STRING = 13


class ProtocolError(Exception):
    """A reply at which the original client gives up."""


@dataclass
class Answer:
    """A reply as the client has read it."""

    code: int = 0
    status: Any = None  # RequestStatus
    header: Any = None  # InferResponseHeader, of its header line
    body: bytes = b""
    lines: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        """One header line, in the order sent."""
        self.lines.append(line)
        name, _, value = line.partition(":")
        if name.lower() == "nv-status":
            self.status = text_format.Parse(value, V1.RequestStatus())
        elif name.lower() == "nv-inferresponse":
            self.header = text_format.Parse(value, V1.InferResponseHeader())

    def check(self) -> Answer:
        if self.status is None:
            raise ProtocolError("infer request did not return status")
        return self


class Wire:
    """One connection."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._host = "Host: {}:{}\r\n".format(*address)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.opened = 0

    async def send(self, first: str, lines: str, body: bytes = b"") -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
            self.opened += 1
        reader, writer = self._streams
        writer.write(f"{first} HTTP/1.1\r\n{self._host}{AGENT}{lines}\r\n".encode() + body)
        return await asyncio.wait_for(self._read(reader), WAIT_S)

    async def _read(self, reader: asyncio.StreamReader) -> Answer:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        answer = Answer(int(first.split(" ")[1]))
        size = 0
        for line in lines:
            answer.take(line)
            if line.lower().startswith("content-length:"):
                size = int(line[15:])
        answer.body = await reader.readexactly(size)
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Client:
    """The calls the client makes."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    async def get(self, target: str) -> Answer:
        """A control call that reads."""
        return await self._alone(f"GET {target}", "")

    async def post(self, target: str) -> Answer:
        """A control call that does: an empty form."""
        return await self._alone(f"POST {target}", f"Content-Length: 0\r\n{FORM}")

    async def _alone(self, first: str, lines: str) -> Answer:
        wire = Wire(self._address)
        try:
            return (await wire.send(first, lines)).check()
        finally:
            wire.close()


class Context:
    """An inference context: the model's configuration first, then requests on one connection."""

    def __init__(
        self, address: tuple[str, int], model: str, version: int = -1, *, text: bool = False
    ) -> None:
        self._client, self._model = Client(address), model
        self._target = f"/api/infer/{model}" + (f"/{version}" if version >= 0 else "")
        self._text = text
        self.wire = Wire(address)
        self.config: Any = None

    async def open(self) -> Context:
        answer = await self._client.get(f"/api/status/{self._model}?format=binary")
        shown = V1.ServerStatus.FromString(answer.body).model_status
        if self._model not in shown or not shown[self._model].HasField("config"):
            raise ProtocolError(f"unable to find configuration of {self._model!r}")
        self.config = shown[self._model].config
        return self

    async def run(self, header: str, body: bytes) -> tuple[Answer, dict[str, bytes]]:
        """The reply, and its raw outputs by name."""
        query = "" if self._text else "?format=binary"
        lines = f"NV-InferRequest: {header}\r\nContent-Type: application/octet-stream\r\n"
        answer = await self.wire.send(
            f"POST {self._target}{query}", f"{lines}Content-Length: {len(body)}\r\n", body
        )
        answer.check()
        if answer.status.code != 1:
            return answer, {}
        if answer.header is None:
            raise ProtocolError("the response's header did not come before its body")
        return answer, self._walk(answer)

    def _walk(self, answer: Answer) -> dict[str, bytes]:
        found, at = {}, 0
        types = {output.name: output.data_type for output in self.config.output}
        for output in answer.header.output:
            if not output.HasField("raw"):
                continue
            size = output.raw.batch_byte_size
            if types[output.name] == STRING:
                size = self._measure_strings(answer, at, output.raw.dims)
            found[output.name] = answer.body[at : at + size]
            at += size
        trailer = answer.body[at:]
        if not trailer:
            raise ProtocolError("infer request did not return result header")
        if self._text:
            again = text_format.Parse(trailer.decode(), V1.InferResponseHeader())
        else:
            again = V1.InferResponseHeader.FromString(trailer)
        assert again == answer.header
        return found

    def _measure_strings(self, answer: Answer, start: int, dims: Any) -> int:
        count = answer.header.batch_size
        for length in dims:
            count *= length
        at = start
        for _ in range(count):
            at += 4 + struct.unpack_from("<I", answer.body, at)[0]
        return at - start

    def close(self) -> None:
        self.wire.close()
