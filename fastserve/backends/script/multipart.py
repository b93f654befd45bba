"""Bodies of multipart/form-data (RFC 7578), which a worker has as a whole: their parts, by name.

    read_parts(body, b"multipart/form-data; boundary=x")     {"image": [File(...)], "top": [File(...)]}

What a part says of itself is its name, its file's name and its media type; transfer encodings are none of
HTTP's. Part by part the bytes are looked for by one search: a body costs what its bytes cost to copy.
"""

from __future__ import annotations

import re

from fastserve.errors import invalid

MEDIA_TYPE = "multipart/form-data"
MOST_PARTS = 1000
MOST_HEAD_BYTES = 8192
"""Of one part's headers."""
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf';[ \t]*({_TOKEN})=(?:"((?:[^"\\\r\n]|\\.)*)"|({_TOKEN}))')
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_CUT = "the body ends before its last boundary"


class File:
    """A file that a client sends: in a part of a form, in base64, or as the body. `content` are its bytes."""

    __slots__ = ("content", "filename", "media_type")

    def __init__(self, content: bytes, filename: str = "", media_type: str = "") -> None:
        self.content, self.filename, self.media_type = content, filename, media_type

    def __repr__(self) -> str:
        return f"File({len(self.content)} bytes, {self.filename!r}, {self.media_type!r})"


def media_type_of(content_type: str) -> str:
    """Return the media type without its parameters, in small letters."""
    return content_type.partition(";")[0].strip().lower()


def read_parts(body: bytes | memoryview, content_type: str) -> dict[str, list[File]]:
    """Return the parts of a body by their names, in order. Raises ServeError INVALID_ARGUMENT."""
    boundary = _parameters(content_type).get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise invalid("content-type: multipart/form-data needs a boundary of 1 to 70 characters")
    data, mark = b"\r\n" + bytes(body), b"\r\n--" + boundary.encode()
    found: dict[str, list[File]] = {}
    at = data.find(mark)
    if at < 0:
        raise invalid("the body has no part: its boundary is not that of content-type")
    for number in range(1, MOST_PARTS + 2):
        at += len(mark)
        if data[at : at + 2] == b"--":
            return found
        if number > MOST_PARTS:
            break
        at = _end_of_line(data, at)
        end = data.find(mark, at - 2)  # of a part without headers, the empty line is that of the mark
        if end < 0:
            raise invalid(_CUT)
        name, part = _read_part(data, at, end, number)
        found.setdefault(name, []).append(part)
        at = end
    raise invalid(f"the body has more than {MOST_PARTS} parts")


def _end_of_line(data: bytes, at: int) -> int:
    """Return where the line of a boundary ends: blanks may follow it."""
    end = data.find(b"\r\n", at, at + 256)
    if end < 0 or data[at:end].strip(b" \t"):
        raise invalid(_CUT if end < 0 else "the body has a line that only begins with its boundary")
    return end + 2


def _read_part(data: bytes, at: int, end: int, number: int) -> tuple[str, File]:
    head_end = data.find(b"\r\n\r\n", at - 2, min(end, at + MOST_HEAD_BYTES))
    if head_end < 0:
        raise invalid(f"part {number}: its headers do not end within {MOST_HEAD_BYTES} bytes")
    headers = {}
    for line in data[at:head_end].decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    disposition = headers.get("content-disposition", "")
    told = _parameters(disposition)
    if media_type_of(disposition) != "form-data" or not told.get("name"):
        raise invalid(f"part {number}: needs a header Content-Disposition: form-data; name=...")
    content = data[head_end + 4 : end]
    return told["name"], File(content, told.get("filename", ""), headers.get("content-type", ""))


def _parameters(value: str) -> dict[str, str]:
    """Return the parameters of a header, by their names in small letters."""
    found = {}
    for name, quoted, plain in _PARAMETER.findall(value):
        text = re.sub(r"\\(.)", r"\1", quoted) if quoted else plain
        # Browsers write these three so in names (RFC 7578, section 2; HTML's form submission).
        found[name.lower()] = text.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
    return found
