"""Error codes of HTTP/2 (RFC 9113 7), and the two reaches an error can have."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """What RST_STREAM and GOAWAY carry."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFault(Exception):
    """The connection cannot go on: GOAWAY. `text` travels in it."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class StreamFault(Exception):
    """One stream cannot go on: RST_STREAM. A malformed message is one (RFC 9113 8.1.1)."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def malformed(text: str) -> StreamFault:
    return StreamFault(ErrorCode.PROTOCOL_ERROR, text)
