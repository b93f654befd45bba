"""The ways a request gets in: a dialect, a transport, and how the tensors travel. Over HTTP here.

A way builds a request for rows of numbers, and reads what came back into an Answer. To add one, write a class
with `build` and what reads its answer, and name it in its module's tuple: every case here then runs for it.

    sent = way.build("columns-fast", [1.0, 2.0])       two rows, [1, .5] and [2, .5]
    line = await way.open(rig)
    line.send(sent)
    answer = await line.reply()                        Answer(status=200, rows=[2.0, 4.0], ...)
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastserve.engine.batch_queue import QUEUED_TOO_LONG, RAN_TOO_LONG
from fastserve.engine.loader import DIED
from fastserve.errors import Kind
from tests.conformance.models import FORMS, LIKE

if TYPE_CHECKING:
    from tests.conformance.rig import Rig

LIMIT_S = 60.0
SECOND = 0.5  # the other number of each row
OK = "OK"
# Why a request may be refused that has done nothing wrong: an event -> the kind of the error, and its words.
# A dialect has others for some of them.
FULL, FULL_BYTES, QUEUED_LATE, RAN_LATE, LOST = "full", "full of bytes", "queued late", "ran late", "lost"
POLICY_FULL, POLICY_LATE, UNKNOWN = "full by policy", "late by policy", "unknown"
Words = dict[str, tuple[Kind, str]]
WORDS: Words = {
    FULL: (Kind.UNAVAILABLE, "the queue of this model is full (max_queue_rows, max_queue_bytes)"),
    FULL_BYTES: (Kind.UNAVAILABLE, "bytes of inputs (max_queue_bytes)"),
    QUEUED_LATE: (Kind.DEADLINE_EXCEEDED, QUEUED_TOO_LONG),
    RAN_LATE: (Kind.DEADLINE_EXCEEDED, RAN_TOO_LONG),
    LOST: (Kind.UNAVAILABLE, DIED),
    POLICY_FULL: (Kind.UNAVAILABLE, "Exceeds maximum queue size"),
    POLICY_LATE: (Kind.UNAVAILABLE, "Request timeout expired"),
    UNKNOWN: (Kind.NOT_FOUND, "cached-fast"),
}


@dataclass(frozen=True)
class Answer:
    """One reply. `status` is the dialect's own, `raw` all that was sent but times and drawn numbers."""

    status: Any
    rows: list[float]
    text: str
    raw: bytes = b""


@dataclass(frozen=True)
class Sent:
    """A request: for HTTP all of it, for an RPC its message and metadata; and in which place of client
    memory, if any."""

    data: bytes
    slot: int = 0
    metadata: tuple[tuple[str, str], ...] = ()


class Line(ABC):
    """A client's connection, or its calls on one. Answers come in the order of requests."""

    @abstractmethod
    def send(self, sent: Sent) -> None:
        """All of a request."""

    @abstractmethod
    def begin(self, sent: Sent) -> None:
        """A request that stops before its body is whole."""

    @abstractmethod
    async def reply(self) -> Answer:
        """The next answer."""

    @abstractmethod
    def leave(self) -> None:
        """Be gone, without a word."""


class Way(ABC):
    """One way in."""

    name = ""
    dialect = ""
    # Forms of models whose requests take the fast path, after one like them.
    fast: frozenset[str] = frozenset(FORMS)
    forms: tuple[str, ...] = FORMS  # that can be asked this way
    outside = False  # tensors are in memory of the client's
    most_rows = 8  # of one request
    timed = False  # its requests have a deadline
    statuses: dict[Any, Any]
    words: Words = {}  # where they are not those of WORDS

    def status(self, kind: Kind | str) -> Any:
        """How this dialect tells an error of that kind; OK of none."""
        return self.statuses[kind]

    def is_told(self, answer: Answer, event: str) -> bool:
        """Whether this tells a client of such an event, in this dialect's words."""
        kind, text = (WORDS | self.words)[event]
        return answer.status == self.status(kind) and text in answer.text

    def asks(self, form: str) -> bool:
        """Whether such models can be asked this way."""
        return LIKE.get(form, form) in self.forms

    def is_fast(self, form: str) -> bool:
        """Whether such models have a fast path, this way."""
        return form != "policy" and LIKE.get(form, form) in self.fast

    @abstractmethod
    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        """A request. Other names and numbers of columns make a wrong one."""

    @abstractmethod
    def cut(self, sent: Sent) -> Sent:
        """The request without its last byte."""

    @abstractmethod
    async def connect(self, rig: Rig) -> Line:
        """A line of this way."""

    def within(self, sent: Sent, name: str, time: str) -> Sent:
        """The request with a header, or metadata, that gives it so much time."""
        return replace(sent, metadata=((name, time),))

    async def open(self, rig: Rig) -> Line:
        """Open a connection, left at the end of the test if the test has not."""
        line = await self.connect(rig)
        rig.lines.append(line)
        return line

    async def ask(self, rig: Rig, sent: Sent) -> Answer:
        """One request on a line of its own."""
        line = await self.open(rig)
        try:
            line.send(sent)
            return await line.reply()
        finally:
            line.leave()


def pack(rows: list[float], columns: int = 2) -> bytes:
    return struct.pack(f"<{columns * len(rows)}f", *numbers(rows, columns))


def numbers(rows: list[float], columns: int = 2) -> list[float]:
    return [value for row in rows for value in (row, *[SECOND] * (columns - 1))]


def unpack(data: bytes) -> list[float]:
    """The first number of each row."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))[::2]


# --- HTTP --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    status: int
    head: str
    body: bytes

    def header(self, name: str) -> str:
        found = re.search(rf"(?mi)^{name}: (.*?)\r$", self.head)
        return found[1] if found else ""


class HttpLine(Line):
    def __init__(self, way: HttpWay, rig: Rig, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._way, self._rig, self._reader, self._writer = way, rig, reader, writer
        self._sent: deque[Sent] = deque()

    def send(self, sent: Sent) -> None:
        self._sent.append(sent)
        self._writer.write(sent.data)

    def begin(self, sent: Sent) -> None:
        self._writer.write(sent.data[:-4])

    async def reply(self) -> Answer:
        head = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), LIMIT_S)).decode()
        reply = Reply(int(head.split(" ", 2)[1]), head, b"")
        size = int(reply.header("content-length") or 0)
        body = await asyncio.wait_for(self._reader.readexactly(size), LIMIT_S)
        return self._way.understand(self._rig, replace(reply, body=body), self._sent.popleft())

    def leave(self) -> None:
        self._writer.transport.abort()


class HttpWay(Way):
    """A POST. A dialect says its path, its headers and its body."""

    async def connect(self, rig: Rig) -> Line:
        return HttpLine(self, rig, *await asyncio.open_connection(*rig.http))

    def post(self, path: str, body: bytes, *lines: str, slot: int = 0) -> Sent:
        head = [f"POST {path} HTTP/1.1", "Host: t", *lines, f"Content-Length: {len(body)}", "", ""]
        return Sent("\r\n".join(head).encode() + body, slot)

    def cut(self, sent: Sent) -> Sent:
        head, _, body = sent.data.partition(b"\r\n\r\n")
        told = b"Content-Length: %d" % len(body)
        assert told in head
        head = head.replace(told, b"Content-Length: %d" % (len(body) - 1))
        return replace(sent, data=head + b"\r\n\r\n" + body[:-1])

    def within(self, sent: Sent, name: str, time: str) -> Sent:
        first, _, rest = sent.data.partition(b"\r\n")
        return replace(sent, data=b"%b\r\n%b: %b\r\n%b" % (first, name.encode(), time.encode(), rest))

    def understand(self, rig: Rig, reply: Reply, sent: Sent) -> Answer:
        head = re.sub(r"Date: .*?\r\n", "", reply.head)
        head = re.sub(r" request_id: \d+", "", head)
        raw = head.encode() + reply.body
        good = reply.status == 200
        rows = self.rows(reply, rig, sent) if good else []
        return Answer(self.told(reply), rows, "" if good else self.text(reply), raw)

    def told(self, reply: Reply) -> Any:
        return reply.status

    @abstractmethod
    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]: ...

    def text(self, reply: Reply) -> str:
        return str(json.loads(reply.body)["error"])


TFS_WORDS: Words = {
    QUEUED_LATE: (Kind.RESOURCE_EXHAUSTED, "Run() timeout exceeded while waiting in batching queue")
}


class Rest(HttpWay):
    """TensorFlow Serving's REST API: rows."""

    name, dialect, timed = "tfserving-rows", "tfserving", True
    fast = frozenset({"columns", "whole", "cached"})
    words: Words = TFS_WORDS
    statuses = {
        OK: 200,
        Kind.INTERNAL: 500,
        Kind.RESOURCE_EXHAUSTED: 429,
        Kind.UNAVAILABLE: 503,
        Kind.INVALID_ARGUMENT: 400,
        Kind.NOT_FOUND: 404,
        Kind.DEADLINE_EXCEEDED: 504,
    }

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        given: Any = [[row, *[SECOND] * (columns - 1)] for row in rows]
        body = {"instances": given if name == "x" else [{name: row} for row in given]}
        return self.post(f"/v1/models/{model}:predict", json.dumps(body).encode())

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        return [row[0] for row in json.loads(reply.body)["predictions"]]


class RestColumns(Rest):
    """Predict by columns."""

    name = "tfserving-columns"
    fast = frozenset()

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        body = {"inputs": {name: [[row, *[SECOND] * (columns - 1)] for row in rows]}}
        return self.post(f"/v1/models/{model}:predict", json.dumps(body).encode())

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        found = json.loads(reply.body)["outputs"]
        return [row[0] for row in found]


class RestRaw(Rest):
    """Predict with a body of bare numbers, which tells no rows of unknown size apart."""

    name, forms = "tfserving-raw", ("columns", "whole", "cached")

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        return self.post(
            f"/v1/models/{model}:predict", pack(rows, columns), "Content-Type: application/octet-stream"
        )


class App(HttpWay):
    """The API of apps: rows of one input by its name."""

    name, dialect = "app", "app"
    fast = frozenset({"columns", "whole", "cached"})
    words: Words = {UNKNOWN: (Kind.UNAVAILABLE, "model 'cached-fast' is not available now")}
    statuses = {**Rest.statuses, Kind.UNIMPLEMENTED: 501}

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        body = {name: [[row, *[SECOND] * (columns - 1)] for row in rows]}
        return self.post(f"/{model}", json.dumps(body).encode())

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        return [row[0] for row in json.loads(reply.body)]


V2_STATUSES = {
    OK: 200,
    Kind.INTERNAL: 500,
    Kind.RESOURCE_EXHAUSTED: 503,
    Kind.UNAVAILABLE: 503,
    Kind.INVALID_ARGUMENT: 400,
    Kind.NOT_FOUND: 404,
    Kind.DEADLINE_EXCEEDED: 503,
}


class V2Json(HttpWay):
    """V2 over HTTP, numbers as JSON."""

    name, dialect = "v2-json", "kserve_v2"
    statuses = V2_STATUSES

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        tensor = {"name": name, "shape": [len(rows), columns], "datatype": "FP32"}
        body: dict[str, Any] = {"id": id} if id else {}
        body["inputs"] = [{**tensor, "data": numbers(rows, columns)}]
        return self.post(f"/v2/models/{model}/infer", json.dumps(body).encode())

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        (output,) = json.loads(reply.body)["outputs"]
        return list(output["data"][::2])


class V2Binary(V2Json):
    """Infer with the binary extension, both ways."""

    name = "v2-binary"

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        data = pack(rows, columns)
        tensor = {"name": name, "shape": [len(rows), columns], "datatype": "FP32"}
        body: dict[str, Any] = {"id": id} if id else {}
        body["inputs"] = [{**tensor, "parameters": {"binary_data_size": len(data)}}]
        body["outputs"] = [{"name": "y", "parameters": {"binary_data": True}}]
        header = json.dumps(body).encode()
        length = f"Inference-Header-Content-Length: {len(header)}"
        return self.post(f"/v2/models/{model}/infer", header + data, length)

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        told = reply.header("inference-header-content-length")
        return unpack(reply.body[int(told) :]) if told else []


class V2Raw(V2Binary):
    """Infer without any JSON: the body is the one input."""

    name, most_rows = "v2-raw", 1

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        length = "Inference-Header-Content-Length: 0"
        return self.post(f"/v2/models/{model}/infer", pack(rows, columns), length)


class V2Regions(V2Json):
    """Infer with both tensors in client memory."""

    fast = frozenset({"columns", "slabs", "whole"})
    name, outside = "v2-regions", True

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        places = [region_place(slot, side, len(rows), columns) for side in (0, 1)]
        tensor = {"name": name, "shape": [len(rows), columns], "datatype": "FP32", "parameters": places[0]}
        body: dict[str, Any] = {"id": id} if id else {}
        body |= {"inputs": [tensor], "outputs": [{"name": "y", "parameters": places[1]}]}
        put_region(slot, rows, columns)
        return self.post(f"/v2/models/{model}/infer", json.dumps(body).encode(), slot=slot)

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        (output,) = json.loads(reply.body)["outputs"]
        return get_region(sent.slot, output["shape"][0])


V1_FULL = (Kind.UNAVAILABLE, "Exceeds maximum queue size")
V1_WORDS: Words = {
    FULL: V1_FULL,
    FULL_BYTES: V1_FULL,
    QUEUED_LATE: (Kind.UNAVAILABLE, "Request timeout expired"),
    UNKNOWN: (Kind.UNAVAILABLE, "'cached-fast' has no available versions"),
}


class V1Http(HttpWay):
    """Triton's first API over HTTP."""

    name, dialect = "v1-http", "triton_v1"
    words: Words = V1_WORDS
    statuses = {
        OK: "SUCCESS",
        Kind.INTERNAL: "INTERNAL",
        Kind.RESOURCE_EXHAUSTED: "UNAVAILABLE",
        Kind.UNAVAILABLE: "UNAVAILABLE",
        Kind.INVALID_ARGUMENT: "INVALID_ARG",
        Kind.NOT_FOUND: "NOT_FOUND",
        Kind.DEADLINE_EXCEEDED: "UNAVAILABLE",
    }

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        header = v1_header(len(rows), id, name, columns)
        path = f"/api/infer/{model}?format=binary"
        return self.post(path, pack(rows, columns), f"NV-InferRequest: {header}")

    def told(self, reply: Reply) -> Any:
        return reply.header("nv-status").removeprefix("code: ").split(" ")[0]

    def text(self, reply: Reply) -> str:
        found = re.search(r'msg: "(.*)" server_id', reply.header("nv-status"))
        return found[1] if found else ""

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        found = re.search(r"batch_byte_size: (\d+)", reply.header("nv-inferresponse"))
        assert found
        return unpack(reply.body[: int(found[1])])


class V1HttpRegions(V1Http):
    """Infer with both tensors in client memory."""

    fast = frozenset({"columns", "slabs", "whole"})
    name, outside = "v1-http-regions", True

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        header = v1_header(len(rows), id, name, columns, slot)
        put_region(slot, rows, columns)
        path = f"/api/infer/{model}?format=binary"
        return self.post(path, b"", f"NV-InferRequest: {header}", slot=slot)

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        found = re.search(r"batch_size: (\d+)", reply.header("nv-inferresponse"))
        assert found
        return get_region(sent.slot, int(found[1]))


def v1_header(rows: int, id: str, name: str, columns: int, slot: int | None = None) -> str:
    place = ["", ""]
    if slot is not None:
        text = 'shared_memory {{ name: "{}" offset: {} byte_size: {} }}'
        place = [text.format(*region_place(slot, side, rows, columns).values()) for side in (0, 1)]
    told = f"id: {id} " if id else ""
    return (
        f'{told}batch_size: {rows} input {{ name: "{name}" dims: {columns} {place[0]} }} '
        f'output {{ name: "y" {place[1]} }}'
    )


# --- client memory -----------------------------------------------------------------------------------

REGION, KEY, SLOT_BYTES, SLOTS = "conformance", "fastserve-conformance", 1024, 8


def region_place(slot: int, side: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "shared_memory_region": REGION,
        "shared_memory_offset": slot * SLOT_BYTES + side * (SLOT_BYTES // 2),
        "shared_memory_byte_size": rows * columns * 4,
    }


def region_path() -> str:
    import os

    return f"/dev/shm/{KEY}-{os.getpid()}"


def put_region(slot: int, rows: list[float], columns: int) -> None:
    with open(region_path(), "r+b") as file:
        file.seek(slot * SLOT_BYTES)
        file.write(pack(rows, columns).ljust(SLOT_BYTES, b"\0"))


def get_region(slot: int, rows: int) -> list[float]:
    with open(region_path(), "rb") as file:
        file.seek(slot * SLOT_BYTES + SLOT_BYTES // 2)
        return unpack(file.read(rows * 8))


HTTP_WAYS = (
    Rest(),
    RestColumns(),
    RestRaw(),
    App(),
    V2Json(),
    V2Binary(),
    V2Raw(),
    V2Regions(),
    V1Http(),
    V1HttpRegions(),
)
