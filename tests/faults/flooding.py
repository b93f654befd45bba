"""Malicious HTTP/2 clients over real sockets: what they send, and what they receive.

A flood is a generator of byte chunks of many frames each, cheap for its client.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from hyperframe.frame import Frame, GoAwayFrame

from fastserve._ext.hpack import static_block
from fastserve._ext.http2_frames import frame
from tests.net.http2.kit import PREFACE, read_frames
from tests.running import WAIT_S

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
BOTH = END_STREAM | END_HEADERS
CANCEL = (8).to_bytes(4, "big")
GREETING = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b"")
MOST_BYTES = 1 << 24  # a flood that nobody stops is over by then
CHUNK = 500  # frames
GOAWAY_HEAD, TAIL = b"\x07\0\0\0\0\0", 200  # the last frame a server sends to a flood
INFER = "/v2/models/free/infer"
ROW = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'


def block(path: str, method: str = "POST", *more: tuple[str, str]) -> bytes:
    """A header block that every connection reads alike: nothing of it is kept in a table."""
    fields = [(":method", method), (":scheme", "http"), (":authority", "t"), (":path", path), *more]
    return static_block([(name.encode(), value.encode()) for name, value in fields])


def grpc_block(path: str, *more: tuple[str, str]) -> bytes:
    return block(path, "POST", ("content-type", "application/grpc"), ("te", "trailers"), *more)


class Link:
    """One connection; what comes is kept by a thread, so that the server can always send."""

    def __init__(self, place: str, greeting: bytes = GREETING) -> None:
        host, _, port = place.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), WAIT_S)
        self.came = bytearray()
        self.ended = threading.Event()  # GOAWAY, or the end
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.send(greeting)

    def _read(self) -> None:
        try:
            while data := self.socket.recv(1 << 16):
                with self._heard:
                    self.came += data
                    self._heard.notify_all()
                if GOAWAY_HEAD in self.came[-TAIL:]:
                    self.ended.set()
        except OSError:
            pass
        self.ended.set()
        with self._heard:
            self._heard.notify_all()

    def send(self, data: bytes) -> bool:
        """Whether it could be sent."""
        try:
            self.socket.sendall(data)
        except OSError:  # the server has hung up
            return False
        return True

    def flood(self, chunks: Iterator[bytes]) -> int:
        """Send until the server has had enough, or MOST_BYTES; how many bytes that were."""
        sent = 0
        for chunk in chunks:
            if self.ended.is_set() or sent > MOST_BYTES or not self.send(chunk):
                break
            sent += len(chunk)
        return sent

    def wait(self, count: int, kind: type[Frame] | tuple[type[Frame], ...]) -> list[Frame]:
        """Until so many frames of a kind have come, or nothing more will."""
        with self._heard:
            self._heard.wait_for(
                lambda: len(self.frames(kind)) >= count or not self._thread.is_alive(), 3 * WAIT_S
            )
        return self.frames(kind)

    def hear(self, word: bytes, count: int) -> None:
        """Until a word has come so often."""
        with self._heard:
            self._heard.wait_for(
                lambda: self.came.count(word) >= count or not self._thread.is_alive(), 3 * WAIT_S
            )

    def frames(self, kind: type[Frame] | tuple[type[Frame], ...] = Frame) -> list[Frame]:
        """Return the frames that have come whole."""
        data, at = bytes(self.came), 0
        while at + 9 <= len(data) and at + 9 + int.from_bytes(data[at : at + 3], "big") <= len(data):
            at += 9 + int.from_bytes(data[at : at + 3], "big")
        return [one for one in read_frames(data[:at]) if isinstance(one, kind)]

    def rest(self) -> list[Frame]:
        """Everything up to the end of the connection, which is the server's to make."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self._thread.join(3 * WAIT_S)
        assert not self._thread.is_alive(), "the server does not hang up"
        return self.frames()

    def goodbye(self) -> tuple[int, int] | None:
        """(last stream, error code) of the last GOAWAY."""
        found = [one for one in self.rest() if isinstance(one, GoAwayFrame)]
        return (found[-1].last_stream_id, found[-1].error_code) if found else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self.socket.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


# -- floods: from a stream's number on, for ever ---------------------------------------------------


def numbers() -> Iterator[range]:
    for first in range(1, 1 << 30, 2 * CHUNK):
        yield range(first, first + 2 * CHUNK, 2)


def rapid_reset() -> Iterator[bytes]:
    """Each request reaches the engine, and is taken back in the same breath."""
    head = block(INFER)
    for some in numbers():
        yield b"".join(
            frame(HEADERS, END_HEADERS, n, head)
            + frame(DATA, END_STREAM, n, ROW)
            + frame(RESET, 0, n, CANCEL)
            for n in some
        )


def rapid_reset_of_half_requests() -> Iterator[bytes]:
    head = block(INFER)
    for some in numbers():
        yield b"".join(frame(HEADERS, END_HEADERS, n, head) + frame(RESET, 0, n, CANCEL) for n in some)


def made_to_reset() -> Iterator[bytes]:
    """Requests that the server has to reset: they have no path."""
    head = b"\x83\x86"
    for some in numbers():
        yield b"".join(frame(HEADERS, BOTH, n, head) for n in some)


def too_many_streams() -> Iterator[bytes]:
    head = block(INFER)
    for some in numbers():
        yield b"".join(frame(HEADERS, END_HEADERS, n, head) for n in some)


def continuation() -> Iterator[bytes]:
    yield frame(HEADERS, END_STREAM, 1, block(INFER))
    while True:
        yield frame(CONTINUATION, 0, 1, b"") * CHUNK


def large_continuation() -> Iterator[bytes]:
    yield frame(HEADERS, END_STREAM, 1, block(INFER))
    while True:
        yield frame(CONTINUATION, 0, 1, b"\0\x01a\x7f\x81\x7f" + bytes(16000))


def hpack_bomb() -> Iterator[bytes]:
    """4 KB in the table, named thousands of times in each block: 16 MB of names and values in 4 KB."""
    entry = b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4000
    yield frame(HEADERS, BOTH, 1, block(INFER) + entry)
    for some in numbers():
        for number in some:
            yield frame(HEADERS, BOTH, number + 2, block(INFER) + b"\xbe" * 4000)


def again(*frames: bytes) -> Iterator[bytes]:
    """On a request that never ends."""
    yield frame(HEADERS, END_HEADERS, 1, block(INFER))
    while True:
        yield b"".join(frames) * CHUNK


FLOODS = {
    "rapid reset": rapid_reset,
    "rapid reset of half requests": rapid_reset_of_half_requests,
    "rapid reset by the server": made_to_reset,
    "streams beyond the limit": too_many_streams,
    "CONTINUATION": continuation,
    "large CONTINUATION": large_continuation,
    "HPACK bomb": hpack_bomb,
    "SETTINGS": lambda: again(frame(SETTINGS, 0, 0, b"\0\x04\0\0\xff\xff")),
    "windows of all streams": lambda: again(
        frame(SETTINGS, 0, 0, b"\0\x04\0\0\0\0"), frame(SETTINGS, 0, 0, b"\0\x04\x7f\xff\xff\xff")
    ),
    "PING": lambda: again(frame(PING, 0, 0, bytes(8))),
    "empty DATA": lambda: again(frame(DATA, 0, 1, b"")),
    "DATA of padding": lambda: again(frame(DATA, 8, 1, b"\x01\0")),
    "PRIORITY": lambda: again(frame(2, 0, 1, b"\0\0\0\x03\x10")),
    "GOAWAY": lambda: again(frame(GOAWAY, 0, 0, bytes(8))),
    "SETTINGS acknowledged that nobody sent": lambda: again(frame(SETTINGS, ACK, 0, b"")),
    "PING answered that nobody asked": lambda: again(frame(PING, ACK, 0, bytes(8))),
    "a window byte by byte": lambda: again(frame(UPDATE, 0, 1, b"\0\0\0\x01")),
    "frames nobody knows": lambda: again(frame(0xBE, 0, 0, b"what")),
}
