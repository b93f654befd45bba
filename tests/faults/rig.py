"""Hostile clients: requests as bytes on a socket, and gRPC messages as bytes in a call.

Whatever is sent, the server answers with a status of its own or closes the connection; its answer must not
reveal internals (`leaks`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from fastserve.protos import load
from tests.running import Running

MESSAGES = load("kserve_v2")
LETTERS = str.maketrans("0123456789", "ghijklmnop")
SERVICE = "/inference.GRPCInferenceService/"
ANSWER_S = 60.0  # to the largest of requests, on a busy machine
CLOSED = 0  # in place of a status: the connection was closed without an answer
INSIDES = re.compile(
    r"(?<![\w'])/(?:tmp|home|root|usr|work|dev|proc|var|etc|opt|srv)/|site-packages|(?<!model)\.pyx?\b|Traceback|memfd"
    r"|\b(?:pid|fd)[ =:]+\d|\b0x[0-9a-f]{6,}|fastserve[-_]model|<[\w.]+ object|line \d+, in "
)

# Numbers of a request's own: one of thousands of answers would hold some process's by chance.
PLACES = re.compile(
    r"\bat (?:byte )?\d+|\(0, \d+\), got: \d+|\[[-\d,]+\]"
    r"|\d+ (?:additional )?(?:bytes|elements|parameters|inputs)\b"
)


@dataclass(frozen=True)
class Answer:
    """One reply: an HTTP status or gRPC code, and the text or bytes with it."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def error(self) -> str:
        """The text of an error; "" of an answer that is none. A client's own bytes need not be UTF-8."""
        text = self.body.decode("utf-8", "replace")
        if self.status in (200, CLOSED):
            return ""
        return str(json.loads(text)["error"]) if text.startswith("{") else text

    def json(self) -> Any:
        return json.loads(self.body)


class Http:
    """One connection, opened anew after the server has closed it."""

    def __init__(self, served: Running) -> None:
        host, _, port = served.http.rpartition(":")
        self._place = (host, int(port))
        self._socket: socket.socket | None = None

    def send(self, data: bytes | Iterable[bytes]) -> None:
        """Bytes as they are. A server that stops reading ends it."""
        if self._socket is None:
            self._socket = socket.create_connection(self._place, ANSWER_S)
        with contextlib.suppress(ConnectionError):
            for piece in (data,) if isinstance(data, bytes) else data:
                self._socket.sendall(piece)

    def read(self) -> Answer:
        """The next reply."""
        assert self._socket is not None
        reply = http.client.HTTPResponse(self._socket)
        try:
            reply.begin()
            found = Answer(reply.status, reply.read(), {k.lower(): v for k, v in reply.headers.items()})
        except (ConnectionError, http.client.HTTPException):
            found = Answer(CLOSED, b"", {})
        finally:
            reply.close()
        if found.status == CLOSED or found.headers.get("connection") == "close":
            self.close()
        return found

    def wait_for(self, words: bytes) -> None:
        """Reads what comes until it has held these words."""
        assert self._socket is not None
        found = b""
        while words not in found:
            piece = self._socket.recv(65536)
            assert piece, found
            found += piece

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """One request. `path` goes out as it is, in UTF-8; header names have _ for -."""
        self.send(request_bytes(method, path, body, **headers))
        return self.read()

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """Post a body of JSON."""
        return self.ask("POST", path, json.dumps(body).encode(), **headers)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


def request_bytes(method: str, path: str, body: bytes, **headers: str) -> bytes:
    """A request as it goes out."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"{method} {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    return head.encode("utf-8", "surrogateescape") + body


class Grpc:
    """A channel. Codes are numbers, OK is 200 so that both transports are read alike."""

    def __init__(self, served: Running) -> None:
        self._channel = grpc.insecure_channel(served.grpc, options=[("grpc.max_send_message_length", -1)])

    def ask_bytes(self, method: str, data: bytes) -> Answer:
        try:
            reply = self._channel.unary_unary(SERVICE + method)(data, timeout=ANSWER_S)
        except grpc.RpcError as fault:
            return Answer(fault.code().value[0], (fault.details() or "").encode(), {})
        return Answer(200, reply, {})

    def ask(self, method: str, **fields: Any) -> Answer:
        """A call without tensors."""
        return self.ask_bytes(method, getattr(MESSAGES, f"{method}Request")(**fields).SerializeToString())

    def infer(self, message: Any) -> Answer:
        return self.ask_bytes("ModelInfer", message.SerializeToString())

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Grpc:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


def leaks(served: Running, answer: Answer, own: str = "") -> str:
    """Find text of the server's insides in an answer; "" for none. `own` is text of the client's."""
    text = answer.error.replace(own or "\0", "")
    found = INSIDES.search(text)
    if found is not None:
        return f"{found[0]!r} in {text!r}"
    numbers = set(re.findall(r"(?<![\d.])\d{3,}(?![\d.])", PLACES.sub("", text)))
    told = numbers & {str(pid) for pid in (served.pid, *served.workers)}
    return f"process {told} in {text!r}" if told else ""


# --- requests --------------------------------------------------------------------------------------


def tensor(name: str, shape: list[int], data: Any = None, datatype: str = "INT32", **parameters: Any) -> Any:
    """An input of a JSON body."""
    made: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatype}
    if data is not None:
        made["data"] = data
    return {**made, "parameters": parameters} if parameters else made


def pair(*inputs: Any, **members: Any) -> dict[str, Any]:
    """A body for `sums` and `simple`, good unless it is given other inputs."""
    good = [tensor(f"INPUT{n}", [1, 16], [n] * 16) for n in (0, 1)]
    return {"inputs": list(inputs) or good, **members}


def mixed(header: Any, *blobs: bytes) -> tuple[bytes, int]:
    """A body of JSON and what follows it, and where the JSON ends."""
    text = json.dumps(header).encode()
    return b"".join((text, *blobs)), len(text)


def message(model: str, *inputs: tuple[str, str, list[int], bytes | None]) -> Any:
    """A ModelInferRequest of (name, datatype, shape, raw bytes)."""
    made = MESSAGES.ModelInferRequest(model_name=model)
    for name, datatype, shape, raw in inputs:
        made.inputs.add(name=name, datatype=datatype, shape=shape)
        if raw is not None:
            made.raw_input_contents.append(raw)
    return made


def ints(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


# --- shared memory ---------------------------------------------------------------------------------


class Memory:
    """A file of the client's in shared memory."""

    def __init__(self, byte_size: int) -> None:
        # letters alone: digits could by chance be some process's number, which `leaks` would find
        self.name = f"fastserve-test-{uuid.uuid4().hex.translate(LETTERS)}"
        self.key = f"/{self.name}"
        self.path = f"/dev/shm/{self.name}"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.fd, byte_size)
        self.byte_size = byte_size

    def put(self, data: bytes, offset: int = 0) -> None:
        os.pwrite(self.fd, data, offset)

    def get(self, size: int, offset: int = 0) -> bytes:
        return os.pread(self.fd, size, offset)

    def place(self, offset: int, byte_size: int) -> dict[str, Any]:
        """Parameters of a tensor that lies here."""
        return {
            "shared_memory_region": self.name,
            "shared_memory_offset": offset,
            "shared_memory_byte_size": byte_size,
        }


@contextlib.contextmanager
def memory(http_: Http, byte_size: int = 4096) -> Iterator[Memory]:
    """A registered region of that size, gone in the end."""
    made = Memory(byte_size)
    try:
        path = f"/v2/systemsharedmemory/region/{made.name}"
        body = {"key": made.key, "offset": 0, "byte_size": byte_size}
        assert http_.post(f"{path}/register", body).status == 200
        try:
            yield made
        finally:
            assert http_.post(f"{path}/unregister", {}).status == 200
    finally:
        os.close(made.fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made.path)
