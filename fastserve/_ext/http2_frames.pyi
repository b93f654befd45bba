from typing import Any

from typing_extensions import Buffer

DATA: int
HEADERS: int
PRIORITY: int
RST_STREAM: int
SETTINGS: int
PUSH_PROMISE: int
PING: int
GOAWAY: int
WINDOW_UPDATE: int
CONTINUATION: int
UNKNOWN: int
FAULT: int
REQUEST: int
PLACED: int
BORROWED_BYTES: int
READ_EVENTS: int
HEAD_BYTES: int

class FrameReader:
    settled: bool
    waits: bool
    resets: int
    left: int
    diverted: int
    def __init__(self, most_frame: int, most_block: int, most_parts: int) -> None: ...
    def divert(self, stream: int, place: Buffer | None) -> None: ...
    def missing_of(self, file: int, stream: int, rest: int) -> int: ...
    def receive(self, file: int, stream: int, places: list[memoryview]) -> tuple[int, bytes]: ...
    def read(self, data: Buffer, nbytes: int) -> list[tuple[int, Any, int, Any, int]]: ...

def frame_head(size: int, kind: int, flags: int, stream: int) -> bytes: ...
def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes: ...
def reply_frames(stream: int, block: bytes, body: bytes, trailers: bytes) -> bytes: ...
