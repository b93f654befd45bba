"""The frames in a stream of bytes, by RFC 9113 4 and 6: whole input in, a list of events out.

Same events as fastserve._ext.http2_frames, but DATA and REQUEST are told as DATA frames in one piece.
"""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, UPDATE, CONTINUATION = range(10)
UNKNOWN, FAULT = 16, 17
PROTOCOL_ERROR, FRAME_SIZE_ERROR, CALM = 1, 6, 11
Event = tuple[int, int, int, bytes, int]


class Over(Exception):
    """A fault of the connection: its error code."""


def read(data: bytes, most_frame: int, most_block: int, most_parts: int) -> list[Event]:
    """Every event that whole frames in `data` make, the last one a FAULT when the connection is over."""
    events: list[Event] = []
    try:
        _read(data, most_frame, most_block, most_parts, events)
    except Over as over:
        events.append((FAULT, 0, 0, b"", over.args[0]))
    return events


def _read(data: bytes, most_frame: int, most_block: int, most_parts: int, events: list[Event]) -> None:
    if not PREFACE.startswith(data[:24]):
        raise Over(PROTOCOL_ERROR)
    data = data[24:]
    first, block, of, parts, flags_of, own = True, b"", 0, 0, 0, False
    while len(data) >= 9:
        size, kind, flags = int.from_bytes(data[:3], "big"), data[3], data[4]
        stream = int.from_bytes(data[5:9], "big") & 0x7FFFFFFF
        if first and (kind != SETTINGS or flags & 1):
            raise Over(PROTOCOL_ERROR)
        first = False
        if (of and (kind, stream) != (CONTINUATION, of)) or (not of and kind == CONTINUATION):
            raise Over(PROTOCOL_ERROR)
        if kind == PUSH or (kind in (SETTINGS, PING, GOAWAY) and stream):
            raise Over(PROTOCOL_ERROR)
        if kind in (DATA, HEADERS, PRIORITY, RST, CONTINUATION) and not stream:
            raise Over(PROTOCOL_ERROR)
        wrong = (
            size > most_frame
            or (kind == DATA and flags & 8 and not size)
            or (kind in (RST, UPDATE) and size != 4)
            or (kind == PING and size != 8)
            or (kind == SETTINGS and (size % 6 or (flags & 1 and size) or size > 16384))
            or (kind == GOAWAY and size < 8)
        )
        if wrong or (kind == PRIORITY and size != 5 and size > most_frame):
            raise Over(FRAME_SIZE_ERROR)
        if kind in (HEADERS, CONTINUATION) and size > most_block + 261:
            raise Over(CALM)
        payload, data = data[9 : 9 + size], data[9 + size :]
        if kind == PRIORITY and size != 5:
            events.append((FAULT, 0, stream, b"", FRAME_SIZE_ERROR))
            continue
        if kind == GOAWAY or kind > CONTINUATION:
            events.append((GOAWAY if kind == GOAWAY else UNKNOWN, flags, stream, b"", 0))
            continue
        if kind == DATA and flags & 8 and payload and payload[0] > size - 1:
            raise Over(PROTOCOL_ERROR)
        if len(payload) < size:
            return
        if kind == DATA:
            body = payload[1 : size - payload[0]] if flags & 8 else payload
            events.append((DATA, flags & 1, stream, body, size))
        elif kind == HEADERS:
            start = 1 if flags & 8 else 0
            pad = payload[0] if flags & 8 and payload else 0
            after = start + 5 if flags & 32 else start
            if after > size:
                raise Over(FRAME_SIZE_ERROR)
            if after + pad > size:
                raise Over(PROTOCOL_ERROR)
            parent = int.from_bytes(payload[start : start + 4], "big") & 0x7FFFFFFF
            own = bool(flags & 32) and parent == stream
            block, flags_of, parts = payload[after : size - pad], flags & 1, 1
        elif kind == CONTINUATION:
            block, parts = block + payload, parts + 1
        elif kind == PRIORITY:
            itself = int.from_bytes(payload[:4], "big") & 0x7FFFFFFF == stream
            events.append(
                (FAULT, 0, stream, b"", PROTOCOL_ERROR) if itself else (kind, flags, stream, payload, 0)
            )
        elif kind in (RST, UPDATE):
            value = int.from_bytes(payload, "big") & (0x7FFFFFFF if kind == UPDATE else 0xFFFFFFFF)
            if kind == UPDATE and not value:
                if not stream:
                    raise Over(PROTOCOL_ERROR)
                events.append((FAULT, 0, stream, b"", PROTOCOL_ERROR))
            else:
                events.append((kind, flags, stream, b"", value))
        else:
            events.append((kind, flags, stream, payload, 0))
        if kind in (HEADERS, CONTINUATION):
            if len(block) > most_block or parts > most_parts + 1:
                raise Over(CALM)
            of = 0 if flags & 4 else stream
            if not of:
                events.append((HEADERS, flags_of, stream, block, int(own)))
