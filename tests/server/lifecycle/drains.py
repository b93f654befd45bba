"""Clients that keep a server busy while it is stopped, and record the outcome of each request.

A client ends when it can send nothing more: its connection was closed and the port no longer accepts. Its
earlier requests that got an error or no answer are `lost`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import grpc
import grpc.aio

from fastserve.protos import load

pb = load("kserve_v2")
BODY = json.dumps({"instances": [[1.0, 0.5]]}).encode()
HEAD = b"POST /v1/models/twice:predict HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n"
PREDICT = HEAD % len(BODY) + BODY
INFER = "/inference.GRPCInferenceService/ModelInfer"
ANSWER_S = 60.0
UNSENT = ("failed to connect", "Connection refused")


class Load:
    """Closed-loop clients against one server. `answered` counts by transport."""

    def __init__(self, http: str, grpc: str) -> None:
        self._http, self._grpc = http, grpc
        self.answered: Counter[str] = Counter()
        self.lost: list[str] = []

    async def run(self, http: int, rpc: int, think_s: float = 0.0) -> None:
        """Until the last client could send nothing more."""
        clients = [self._ask_http(think_s * i) for i in range(http)]
        await asyncio.gather(*clients, *(self._ask_grpc(i) for i in range(rpc)))

    async def _ask_http(self, think_s: float) -> None:
        host, _, port = self._http.partition(":")
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return
            try:
                while await self._ask_once(reader, writer):
                    await asyncio.sleep(think_s)
            except (OSError, EOFError, asyncio.TimeoutError) as fault:
                self.lost.append(f"http: {fault!r}")
                return
            finally:
                writer.close()

    async def _ask_once(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may be used again."""
        if reader.at_eof():  # closed while it was idle, and known to be: nothing was sent
            return False
        writer.write(PREDICT)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_S)
        lines = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:-2])
        await asyncio.wait_for(reader.readexactly(int(lines["content-length"])), ANSWER_S)
        if head.startswith(b"HTTP/1.1 200 "):
            self.answered["http"] += 1
        else:
            self.lost.append(f"http: {head[:40]!r}")
        return lines.get("connection") != "close"

    async def _ask_grpc(self, number: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("fastserve.test", number)]
        request = pb.ModelInferRequest(model_name="twice")
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        tensor.contents.fp32_contents.extend([1.0, 0.5])
        async with grpc.aio.insecure_channel(self._grpc, options=options) as channel:
            ask = channel.unary_unary(
                INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
            )
            while True:
                try:
                    await ask(request, timeout=ANSWER_S)
                except grpc.aio.AioRpcError as fault:
                    said = f"{fault.code().name}: {fault.details()}"
                    if fault.code() is not grpc.StatusCode.UNAVAILABLE or not any(u in said for u in UNSENT):
                        self.lost.append(f"grpc: {said}")
                    return
                self.answered["grpc"] += 1
