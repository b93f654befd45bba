"""One GET of a URL that a client named: whatever it points at, it reaches nothing that it should not.

    data = await Fetch(most_bytes=20 << 20, most_s=10.0)("https://a.example/b.jpg")

The name is resolved once, and all its addresses have to be public ones; the connection goes to an address
that was checked, not to the name again: a name that changes its mind changes nothing. A redirect is a URL
like the first. Name, connection, redirects and body share one time, and the body is read no further than its
bound. No proxies, no cookies, no credentials, no compression.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urljoin, urlsplit

import httptools

from fastserve.errors import ServeError, invalid

MOST_URL, MOST_HOPS, MOST_HEAD = 4096, 3, 65536
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 65536
_NAT64 = ip_network("64:ff9b::/96")
Address = IPv4Address | IPv6Address


@dataclass
class Answer:
    """What came of one GET; httptools calls it."""

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
    """Gets URLs. `private`: of private networks too."""

    def __init__(self, most_bytes: int, most_s: float, *, private: bool = False) -> None:
        self._most_bytes, self._most_s, self._private = most_bytes, most_s, private
        self.trust: ssl.SSLContext | None = None
        """Whom https trusts; None: whom the system trusts."""

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

    async def _get(self, url: SplitResult) -> Answer:
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

    async def _read(self, reader: asyncio.StreamReader) -> Answer:
        answer, seen = Answer(self._most_bytes), 0
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
    """Whether it is one of the internet's, and not another written inside it that is not."""
    try:
        found: Address = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    inner = embedded(found)
    return found.is_global and not found.is_multicast if inner is None else is_public(str(inner))


def embedded(address: Address) -> Address | None:
    """The IPv4 address that an IPv6 address stands for: mapped, 6to4, Teredo, NAT64."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


async def _system_trust() -> ssl.SSLContext:
    """Read off the loop: it is a file of a thousand certificates."""
    return await asyncio.get_running_loop().run_in_executor(None, ssl.create_default_context)
