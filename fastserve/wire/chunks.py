"""Reads a chunked request body (RFC 9112 7.1). No I/O: bytes in, a count of used bytes out.

    SIZE --"0"--> TRAILER --empty line--> done
    SIZE --"n"--> DATA --n bytes--> DATA_END --CRLF--> SIZE

Strict where readers are known to differ: CRLF only, no sign, prefix or padding round a size. Sizes'
extensions and trailers are checked, counted against limits.header_bytes, and dropped.
"""

from __future__ import annotations

import re

from fastserve.config import Limits
from fastserve.wire.faults import bad_request, over_limit

SIZE, DATA, DATA_END, TRAILER = range(4)
STEP_CHUNKS = 2  # taken by one call of `feed`: of one byte each, a read of 256 KiB has forty thousand
SMALL_BYTES = 4096  # smaller pieces are gathered: an object each would cost more memory than the body
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")


def append_piece(pieces: list[bytes | bytearray], piece: bytes) -> None:
    """Add a piece of a body, gathering small ones."""
    if len(piece) >= SMALL_BYTES or not pieces:
        pieces.append(piece)
        return
    last = pieces[-1]
    if type(last) is bytearray and len(last) < 16 * SMALL_BYTES:
        last += piece
    else:
        pieces.append(bytearray(piece))


def join_pieces(pieces: list[bytes | bytearray]) -> bytes:
    """The whole body; a single piece is handed on without a copy."""
    if len(pieces) == 1 and type(pieces[0]) is bytes:
        return pieces[0]
    return b"".join(pieces)


class ChunkReader:
    """One body. Feed until `done`; then `body()` once."""

    __slots__ = (
        "_chunks",
        "_limits",
        "_line",
        "_need",
        "_overhead",
        "_pieces",
        "_state",
        "_trailers",
        "done",
        "received",
    )

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._state = SIZE
        self._line = bytearray()
        self._need = 0
        self._chunks = 0
        self._overhead = 0
        self._trailers = 0
        self._pieces: list[bytes | bytearray] = []
        self.received = 0  # body bytes declared so far
        self.done = False

    def body(self) -> bytes:
        return join_pieces(self._pieces) if self._pieces else b""

    def feed(self, data: bytes | bytearray, start: int = 0) -> int:
        """Use data[start:] up to the end of this body, or of STEP_CHUNKS. Returns where it stopped; raises
        WireFault."""
        end = len(data)
        most = self._chunks + STEP_CHUNKS
        while start < end and not self.done and (self._chunks < most or self._state == DATA):
            if self._state == DATA:
                start = self._take_data(data, start)
                continue
            newline = data.find(b"\n", start)
            stop = end if newline < 0 else newline + 1
            self._line += data[start:stop]
            start = stop
            self._check_overhead()
            if newline >= 0:
                self._take_line(bytes(self._line))
                self._line.clear()
        return start

    def _take_data(self, data: bytes | bytearray, start: int) -> int:
        stop = min(start + self._need, len(data))
        append_piece(self._pieces, bytes(data[start:stop]))
        self._need -= stop - start
        if self._need == 0:
            self._state = DATA_END
        return stop

    def _check_overhead(self) -> None:
        if self._overhead + len(self._line) > self._limits.header_bytes:
            raise over_limit(
                431, "Chunk extension and trailer bytes", "header_bytes", self._limits.header_bytes
            )
        if self._state == DATA_END and not b"\r\n".startswith(self._line):
            raise bad_request("Malformed chunk: its data does not end with CRLF")

    def _take_line(self, line: bytes) -> None:
        if self._state == DATA_END:
            self._state = SIZE
        elif self._state == SIZE:
            self._take_size(line)
        else:
            self._take_trailer(line)

    def _take_size(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise bad_request("Malformed chunk size")
        limits = self._limits
        size = int(match[1], 16)
        self._overhead += len(line) - len(match[1]) - 2  # extensions; plain sizes have their own limit
        if size == 0:
            self._state = TRAILER
            return
        self._chunks += 1
        self.received += size
        if self.received > limits.body_bytes:
            raise over_limit(413, "Request body bytes", "body_bytes", limits.body_bytes)
        if self._chunks > limits.body_chunks:
            raise over_limit(413, "Chunks of the request body", "body_chunks", limits.body_chunks)
        self._need = size
        self._state = DATA

    def _take_trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self.done = True
            return
        self._overhead += len(line)
        self._trailers += 1
        if self._trailers > self._limits.header_count:
            raise over_limit(431, "Trailer lines", "header_count", self._limits.header_count)
        if _TRAILER_LINE.fullmatch(line) is None:
            raise bad_request("Malformed trailer")
