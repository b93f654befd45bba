"""A gRPC load generator that costs little beside the server it loads: unary calls over HTTP/2 by hand.

grpcio's own client takes longer for a tiny call than its server does, so that it would be the client that
is measured. This one sends one prepared message again and again, and reads replies no further than their
frames: each call must bring a message and end in order. Not a client for anything else.

    done = await Load(port, path, message, at_once=8).run(seconds)
"""

from __future__ import annotations

import asyncio
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW = 4
MOST = (1 << 31) - 1
USUAL_WINDOW = 65535
FRAME_BYTES = 16384
# HPACK (RFC 7541): what comes again with every call is put into the table by the first one.
AGAIN = b"\x83\x86" + bytes(0x80 | index for index in (66, 65, 64, 63, 62))


def _literal(prefix: bytes, text: bytes) -> bytes:
    return prefix + bytes([len(text)]) + text


def first_head(path: str) -> bytes:
    """The header block of a connection's first call; the others have AGAIN."""
    return b"\x83\x86" + b"".join(
        (
            _literal(b"\x44", path.encode()),
            _literal(b"\x41", b"localhost"),
            _literal(_literal(b"\x40", b"te"), b"trailers"),
            _literal(b"\x5f", b"application/grpc"),
            _literal(b"\x7a", b"bench"),
        )
    )


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


class Call:
    """One call under way: what of its message is still to be sent, and what has come."""

    __slots__ = ("came", "sent", "window")

    def __init__(self, window: int) -> None:
        self.window, self.sent, self.came = window, 0, 0


class Load(asyncio.Protocol):
    """One connection with `at_once` calls always under way."""

    def __init__(self, port: int, path: str, message: bytes, at_once: int) -> None:
        self._port, self._at_once = port, at_once
        self._head = first_head(path)
        self._body = b"\0" + len(message).to_bytes(4, "big") + message
        self._stream = 1
        self._calls: dict[int, Call] = {}
        self._window, self._call_window = USUAL_WINDOW, USUAL_WINDOW
        self._unread = b""
        self._received = 0
        self.done = 0

    async def run(self, seconds: float) -> int:
        """How many calls ended within `seconds`. Raises RuntimeError when one of them failed."""
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._until = time.perf_counter() + seconds
        transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", self._port)
        try:
            await self._ended
        finally:
            transport.abort()
        return self.done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        settings = struct.pack(">HI", INITIAL_WINDOW, MOST)
        wider = struct.pack(">I", MOST - USUAL_WINDOW)
        transport.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW, 0, 0, wider))
        transport.write(b"".join(self._begin() for _ in range(self._at_once)))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("the server closed the connection")

    def _fail(self, text: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(RuntimeError(text))

    # --- out ------------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        stream, self._stream = self._stream, self._stream + 2
        head, self._head = self._head, AGAIN
        call = self._calls[stream] = Call(self._call_window)
        return frame(HEADERS, END_HEADERS, stream, head) + self._go_on(stream, call)

    def _go_on(self, stream: int, call: Call) -> bytes:
        """The frames that may be sent now."""
        body, frames = self._body, b""
        while call.sent < len(body):
            size = min(FRAME_BYTES, len(body) - call.sent, call.window, self._window)
            if size <= 0:
                break
            piece = body[call.sent : call.sent + size]
            call.sent, call.window, self._window = call.sent + size, call.window - size, self._window - size
            frames += frame(DATA, END_STREAM if call.sent == len(body) else 0, stream, piece)
        return frames

    # --- in -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        data, at, out = self._unread + data, 0, []
        while len(data) - at >= 9:
            size_kind, flags, stream = struct.unpack_from(">IBI", data, at)
            end = at + 9 + (size_kind >> 8)
            if end > len(data):
                break
            out.append(self._take(size_kind & 255, flags, stream, data[at + 9 : end]))
            at = end
        self._unread = data[at:]
        self._transport.write(b"".join(out))

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        """The answer to one frame."""
        if kind == DATA:
            self._calls[stream].came += len(payload)
            return self._read_more(len(payload))
        if kind == HEADERS:
            return self._end(stream) if flags & END_STREAM else b""
        if kind == WINDOW:
            return self._widen(stream, int.from_bytes(payload, "big"))
        if kind == SETTINGS and not flags & ACK:
            return self._settle(payload)
        if kind == PING and not flags & ACK:
            return frame(PING, ACK, 0, payload)
        if kind in (RESET, GOAWAY):
            self._fail(f"frame {kind}: {payload[:100]!r}")
        return b""

    def _read_more(self, size: int) -> bytes:
        self._received += size
        if self._received < MOST // 4:
            return b""
        size, self._received = self._received, 0
        return frame(WINDOW, 0, 0, struct.pack(">I", size))

    def _end(self, stream: int) -> bytes:
        if not self._calls.pop(stream).came:
            self._fail("a call ended without a message")
        self.done += 1
        if time.perf_counter() < self._until:
            return self._begin()
        if not self._calls and not self._ended.done():
            self._ended.set_result(None)
        return b""

    def _widen(self, stream: int, size: int) -> bytes:
        if stream:
            call = self._calls.get(stream)
            if call is None:
                return b""
            call.window += size
            return self._go_on(stream, call)
        self._window += size
        return b"".join(self._go_on(stream, call) for stream, call in self._calls.items())

    def _settle(self, payload: bytes) -> bytes:
        wider = 0
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW:
                wider, self._call_window = value - self._call_window, value
        for call in self._calls.values():
            call.window += wider
        more = b"".join(self._go_on(stream, call) for stream, call in self._calls.items())
        return frame(SETTINGS, ACK, 0) + more
