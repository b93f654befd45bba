"""Clients that read streams of tokens over sockets of their own, and keep when each event came."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

# What every event with a token in it has, and no other; and how a stream ends.
EVENT, END = b'"finish_reason":null', b"data: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(slots=True)
class Heard:
    """What one client heard. Seconds, as time.perf_counter counts."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    @property
    def first_ms(self) -> float:
        return (self.times[0] - self.sent) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.times, self.times[1:], strict=False)]


async def ask(port: int, prompt: list[int], new: int, heard: Heard | None = None, **more: Any) -> Heard:
    """One streamed completion of exactly `new` tokens. Raises RuntimeError for anything else."""
    heard = heard or Heard()
    asked = {"model": "text", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}, **more}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard.sent = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    try:
        await _read(reader, heard)
    finally:
        writer.close()
    if b'"completion_tokens":%d,' % new not in heard.body:
        raise RuntimeError(f"{len(heard.times)} of {new} tokens: {bytes(heard.body[-400:])!r}")
    return heard


async def _read(reader: asyncio.StreamReader, heard: Heard) -> None:
    body, seen = heard.body, 0
    while not body.endswith(END):
        data = await reader.read(1 << 16)
        if not data:
            raise RuntimeError(f"the stream broke off: {bytes(body[-400:])!r}")
        body += data
        came, seen = body.count(EVENT, seen), max(len(body) - len(EVENT) + 1, 0)
        heard.times += [time.perf_counter()] * came
