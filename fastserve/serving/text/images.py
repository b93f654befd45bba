"""Images that a request names: fetched, bounded and checked before a model sees a byte of them.

    images = Images(ImageRules(root="/srv/pictures", urls=True))
    await images.load(model, ["cats/1.png", "https://a.example/b.jpg", "data:image/png;base64,iVBOR..."])

| value | |
|---|---|
| a path, file://... | a file beneath `root`; refused where no root is set |
| http://..., https://... | refused unless `urls`; those of private networks too unless `private` |
| data:image/...;base64,... | its bytes |
| base64 alone | a JPEG or PNG: known by how it begins, since "/9j/" begins paths as well |

An image is a JPEG or a PNG by its first bytes; nothing here decodes pictures.

`Fetch` is one GET of a URL that a client named. The name is resolved once, and all its addresses have to be
public; the connection goes to a checked address, so a name that resolves differently later changes nothing. A
redirect is checked like the first URL. Resolution, connection, redirects and body share one timeout, and the
body is read no further than its bound. No proxies, cookies, credentials or compression.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import httptools

from fastserve.errors import ConfigError, ServeError, invalid
from fastserve.serving.text.models import TextModel
from fastserve.settings.confined_file import read_confined
from fastserve.util.offload import Offload

MOST_URL, MOST_HOPS, MOST_HEAD = 4096, 3, 65536
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 65536
_NAT64 = ip_network("64:ff9b::/96")
Address = IPv4Address | IPv6Address


@dataclass
class FetchedReply:
    """The reply to one GET; httptools calls its methods."""

    most_bytes: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    begun: bool = False
    done: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.begun = True
        length = self.headers.get("content-length", "")
        if length.isdigit() and int(length) > self.most_bytes:
            raise self._too_large()

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > self.most_bytes:
            raise self._too_large()

    def on_message_complete(self) -> None:
        self.done = True

    def _too_large(self) -> ServeError:
        return invalid(f"the URL gives more than {self.most_bytes} bytes")


class Fetch:
    """Fetches URLs. `private` allows private networks too."""

    def __init__(self, most_bytes: int, most_s: float, *, private: bool = False) -> None:
        self._most_bytes, self._most_s, self._private = most_bytes, most_s, private
        self.trust: ssl.SSLContext | None = None
        """Certificates that https trusts; None: the system's."""

    async def __call__(self, url: str) -> bytes:
        """The body of its answer. Raises ServeError INVALID_ARGUMENT."""
        try:
            return await asyncio.wait_for(self._follow(url), self._most_s)
        except asyncio.TimeoutError:
            raise invalid(f"the URL gave no answer within {self._most_s:g} s") from None
        except (OSError, EOFError, httptools.HttpParserError):  # its words would tell what there is to reach
            raise invalid("the URL cannot be fetched") from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(MOST_HOPS + 1):
            answer = await self._get(check_url(url))
            if answer.status == 200:
                if answer.headers.get("content-encoding", "identity").lower() != "identity":
                    raise invalid("the URL gives a compressed answer")
                return bytes(answer.body)
            where = answer.headers.get("location")
            if answer.status not in REDIRECTS or where is None:
                raise invalid(f"the URL answers with status {answer.status}")
            url = urljoin(url, where)
        raise invalid(f"the URL leads through more than {MOST_HOPS} redirects")

    async def _get(self, url: SplitResult) -> FetchedReply:
        port = url.port or PORTS[url.scheme]
        host = url.hostname or ""
        address = await self._resolve(host, port)
        secure = url.scheme == "https"
        context = (self.trust or await _system_trust()) if secure else None
        reader, writer = await asyncio.open_connection(
            address, port, ssl=context, server_hostname=host if secure else None, limit=_PIECE
        )
        try:
            writer.write(request_of(url))
            return await self._read(reader)
        finally:
            writer.transport.abort()

    async def _resolve(self, host: str, port: int) -> str:
        """An address of a host all of whose addresses may be reached."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise invalid("the URL's host is not known") from None
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses or not (self._private or all(is_public(each) for each in addresses)):
            raise invalid("the URL's host is not a public one")
        return addresses[0]

    async def _read(self, reader: asyncio.StreamReader) -> FetchedReply:
        answer, seen = FetchedReply(self._most_bytes), 0
        parser = httptools.HttpResponseParser(answer)
        while not answer.done:
            data = await reader.read(_PIECE)
            if not data:
                if answer.begun and not {"content-length", "transfer-encoding"} & answer.headers.keys():
                    break  # until close, as HTTP/1.0 does
                raise EOFError
            seen += len(data)
            if not answer.begun and seen > MOST_HEAD:
                raise invalid("the URL's answer has too long a head")
            try:
                parser.feed_data(data)
            except httptools.HttpParserCallbackError as fault:
                if isinstance(fault.__context__, ServeError):
                    raise fault.__context__ from None
                raise
        answer.status = parser.get_status_code()
        return answer


def check_url(url: str) -> SplitResult:
    """Raises ServeError unless it may be asked for at all."""
    if len(url) > MOST_URL:
        raise invalid(f"a URL has at most {MOST_URL} characters")
    try:
        parts = urlsplit(url)
        good = parts.scheme in PORTS and parts.hostname and not parts.username and not parts.password
        good = good and url.isascii() and url.isprintable() and " " not in url and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise invalid("not a URL of http:// or https://, a host and a path")
    return parts


def request_of(url: SplitResult) -> bytes:
    """The GET."""
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    lines = (
        f"GET {target} HTTP/1.1",
        f"Host: {url.netloc}",
        "User-Agent: fastserve",
        "Accept: image/jpeg, image/png",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


def is_public(address: str) -> bool:
    """Return whether an address is public, and so is any IPv4 address that it embeds."""
    try:
        found: Address = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    inner = embedded(found)
    return found.is_global and not found.is_multicast if inner is None else is_public(str(inner))


def embedded(address: Address) -> Address | None:
    """Return the IPv4 address that an IPv6 address embeds: mapped, 6to4, Teredo, NAT64."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


async def _system_trust() -> ssl.SSLContext:
    """Read off the loop: it is a file of a thousand certificates."""
    return await asyncio.get_running_loop().run_in_executor(None, ssl.create_default_context)


MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
ENDINGS = (".jpg", ".jpeg", ".png")
BEGINS = ("/9j/", "iVBORw0KGgo")  # a JPEG's first bytes in base64, and a PNG's
SHORTEST = 64  # of an image in base64: a path that begins like one is not that long, or has a point in it
_DATA = re.compile(r"data:image/(?:jpeg|jpg|png);base64,", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
FORMS = "a path, file://, http:// or https://, a data: URL of a JPEG or PNG, or one of them in base64"


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """The operator's rules for images that clients name."""

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
        self._offload = Offload()
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
            return await self._offload(len(text), b64decode, text, validate=True)
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
    """Return whether a value is an image in base64 rather than a path."""
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
