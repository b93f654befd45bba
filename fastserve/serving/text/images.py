"""Images that a request names: found, bounded and looked at before a model sees a byte of them.

    images = Images(ImageRules(root="/srv/pictures", urls=True))
    await images.load(model, ["cats/1.png", "https://a.example/b.jpg", "data:image/png;base64,iVBOR..."])

| value | |
|---|---|
| a path, file://... | a file beneath `root`; refused where no root is set |
| http://..., https://... | refused unless `urls`; those of private networks too unless `private` (fetch.py) |
| data:image/...;base64,... | its bytes |
| base64 alone | a JPEG or PNG: known by how it begins, since "/9j/" begins paths as well |

What comes of it is a JPEG or a PNG by its first bytes; nothing here decodes pictures.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fastserve.apart import Apart
from fastserve.config.confined import read_confined
from fastserve.errors import ConfigError, ServeError, invalid
from fastserve.serving.text.fetch import Fetch
from fastserve.serving.text.models import TextModel

MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
ENDINGS = (".jpg", ".jpeg", ".png")
BEGINS = ("/9j/", "iVBORw0KGgo")  # a JPEG's first bytes in base64, and a PNG's
SHORTEST = 64  # of an image in base64: a path that begins like one is not that long, or has a point in it
_DATA = re.compile(r"data:image/(?:jpeg|jpg|png);base64,", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
FORMS = "a path, file://, http:// or https://, a data: URL of a JPEG or PNG, or one of them in base64"


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """What an operator lets clients name."""

    root: str = ""
    """The folder whose files may be named; "": none."""
    urls: bool = False
    private: bool = False
    """URLs of private networks, loopback and the like too."""
    most_bytes: int = 20 << 20
    most_s: float = 10.0
    """For fetching one."""


class Images:
    """Loads them, for one dialect of a front process."""

    def __init__(self, rules: ImageRules) -> None:
        self._rules = rules
        self._apart = Apart()
        self._fetch = Fetch(rules.most_bytes, rules.most_s, private=rules.private)

    async def load(self, model: TextModel, values: Sequence[str]) -> list[bytes]:
        """Their bytes, in order. Raises ServeError INVALID_ARGUMENT, which says what is wrong with which."""
        if values and not model.info.vision:
            raise invalid(f"model '{model.name}' takes text only, not images")
        return [await self._load(number, value) for number, value in enumerate(values, 1)]

    async def _load(self, number: int, value: str) -> bytes:
        try:
            data = await self._find(value)
        except ServeError as fault:
            raise ServeError(fault.kind, f"image {number}: {fault.message}") from None
        if not data.startswith(MAGIC):
            raise invalid(f"image {number}: neither a JPEG nor a PNG")
        return data

    async def _find(self, value: str) -> bytes:
        head = _DATA.match(value[:64])
        if head is not None:
            return await self._decode(value[head.end() :])
        if is_base64(value):
            return await self._decode(value)
        scheme, separator, _ = value[:16].partition(":")
        if not separator:
            return await self._read(value)
        if scheme.lower() == "file":
            return await self._read(path_of(value))
        if scheme.lower() not in ("http", "https"):
            raise invalid(f"allowed: {FORMS}")
        if not self._rules.urls:
            raise invalid("URLs are not fetched here (image_urls)")
        return await self._fetch(value)

    async def _decode(self, text: str) -> bytes:
        if len(text) > self._rules.most_bytes * 4 // 3 + 4:
            raise invalid(f"more than {self._rules.most_bytes} bytes")
        try:
            return await self._apart(len(text), b64decode, text, validate=True)
        except (NotBase64, ValueError):
            raise invalid("not base64") from None

    async def _read(self, name: str) -> bytes:
        if not self._rules.root:
            raise invalid("files are not read here (image_root)")
        if not name.lower().endswith(ENDINGS):
            raise invalid(f"a file's name ends with {', '.join(ENDINGS)}")
        root = Path(self._rules.root)
        inner = Path(name).relative_to(root) if Path(name).is_relative_to(root) else Path(name)
        read = partial(read_confined, root, str(inner), self._rules.most_bytes)
        try:
            return await asyncio.get_running_loop().run_in_executor(None, read)
        except ConfigError as fault:
            raise invalid(str(fault)) from None


def is_base64(value: str) -> bool:
    """Whether it is an image in base64 rather than a path."""
    return len(value) >= SHORTEST and value.startswith(BEGINS) and _BASE64.fullmatch(value) is not None


def path_of(url: str) -> str:
    """The path of a file:// URL of this machine. Raises ServeError."""
    try:
        parts = urlsplit(url)
        if parts.netloc in ("", "localhost") and not parts.query and not parts.fragment:
            return unquote(parts.path, errors="strict")
    except ValueError:
        pass
    raise invalid("a file:// URL names a path and nothing else")
