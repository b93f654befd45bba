"""Reply heads as bytes: built once per (status, content type, connection mode) and second.

No header that holds a control character can be written: `header_lines` refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from email.utils import formatdate
from http import HTTPStatus

KEEP, CLOSE, KEEP_1_0 = range(3)  # what the reply says about the connection
EVERY_REPLY = b"HTTP/1.1 "  # what each begins with
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BODILESS = frozenset((204, 304))
_CONNECTION = (b"", b"Connection: close\r\n", b"Connection: keep-alive\r\n")
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus} | {
    405: b"Not Allowed",  # as Triton has it (V2 spec 1); nobody else's clients show it
    413: b"Content Too Large",
    414: b"URI Too Long",
    499: b"Client Closed Request",
}
_CACHED_HEADS = 256
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def check_header(name: bytes, value: bytes) -> None:
    """Raises ValueError for a name or value that would break the framing."""
    if _NAME.fullmatch(name) is None or _CONTROL.search(value) is not None:
        raise ValueError(f"reply header {name!r} holds a character that must not be sent")


def header_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Header lines ready to send. Raises ValueError for a name or value that would break the framing."""
    lines = []
    for name, value in headers:
        check_header(name, value)
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join(lines)


class ReplyHeads:
    """Heads without their length line, with the date of the last `tick`. One per listener.

    `ok_json` is the head of a plain 200: what a fast path puts before "Content-Length: N".
    """

    __slots__ = ("_date", "_heads", "_second", "ok_json")

    def __init__(self) -> None:
        self._heads: dict[tuple[int, bytes, int], bytes] = {}
        self._second = -1
        self._date = b""
        self.ok_json = b""

    def tick(self, unix_s: float) -> None:
        """Set the date; what was built with an older second is dropped."""
        if int(unix_s) == self._second:
            return
        self._second = int(unix_s)
        self._date = b"Date: %b\r\n" % formatdate(self._second, usegmt=True).encode()
        self._heads.clear()
        self.ok_json = self.find(200, b"application/json", KEEP)

    def find(self, status: int, content_type: bytes, mode: int) -> bytes:
        """The status line and standing headers of a reply; an empty content type sends none."""
        key = (status, content_type, mode)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= _CACHED_HEADS:
                self._heads.clear()
            head = self._heads[key] = self._make(status, content_type, mode)
        return head

    def _make(self, status: int, content_type: bytes, mode: int) -> bytes:
        kind = header_lines([(b"Content-Type", content_type)]) if content_type else b""
        reason = _REASONS.get(status, b"Unknown")
        return b"%b%d %b\r\n%b%b%b" % (EVERY_REPLY, status, reason, kind, self._date, _CONNECTION[mode])
