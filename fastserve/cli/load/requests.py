"""What a load sends, and what every protocol has to do for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fastserve.cli.rest import Server

VARIANTS = 16
VARIANT_BYTES = 8 << 20  # of all variants together


@dataclass(frozen=True)
class Request:
    """One POST, or one message of a gRPC call: path (or method), content type, further headers, body."""

    path: str
    content_type: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self, host: str) -> bytes:
        """The request as HTTP/1.1 sends it."""
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {self.content_type}\r\n{more}"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(self.body) + self.body


@dataclass(frozen=True)
class Wish:
    """What is asked of the requests: `rows` each, `length` items where the model takes any number."""

    model: str
    rows: int = 1
    length: int = 1
    signature: str = "serving_default"
    data: bytes | None = None  # a body to send as it is
    tokens: int = 64  # of an answer of text


@dataclass(frozen=True)
class Target:
    """Where the server is: its HTTP address, and HOST:PORT of its gRPC one, after https:// if it is TLS."""

    http: Server
    grpc: str = ""

    @property
    def grpc_url(self) -> str:
        return self.grpc if "://" in self.grpc else f"http://{self.grpc}"


class LoadProtocol(Protocol):
    """How one client protocol asks a model. `over_grpc`: requests are messages to the method `path`."""

    over_grpc: bool
    events: bool
    """Answers are streams of text."""

    def requests(self, target: Target, wish: Wish) -> list[Request]:
        """A few different ones. Raises ClickException when the model cannot be asked so."""
        ...

    def close(self) -> None:
        """Give back what the server was asked to hold."""
        ...


def variants(make: Callable[[random.Random], Request]) -> list[Request]:
    """As many as VARIANT_BYTES allow, at most VARIANTS; the same load each time."""
    rng = random.Random(7)
    made = [make(rng)]
    count = min(VARIANTS, max(1, VARIANT_BYTES // max(1, len(made[0].body))))
    return made + [make(rng) for _ in range(count - 1)]
