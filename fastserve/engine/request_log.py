"""The request log: sampled inputs and outputs of a model, as JSON lines in files of bounded size.

    {"time": "2026-03-01T12:00:00.123456Z", "id": "", "model": "m", "version": 1, "key": "team",
     "status": "OK", "latency_us": 812, "outputs": [...],
     "inputs": [{"name": "x", "dtype": "float32", "shape": [1, 2], "floats": [1.0, 2.0], "integers": [],
                 "texts": [], "elements": 2, "redacted": false}]}

Every line has the same fields with the same types, so that pyarrow and DuckDB read a file as one table. A
tensor's values are in the list of its type: as many as fit `max_tensor_bytes`, out of `elements`. NaN and
infinities are null.

    RequestLogs       of a process: a thread that writes, and a queue that it writes from
    LoggedScheduler   before a version's scheduler: draws requests, and copies their tensors for the queue

The event loop copies bounded memory and never waits: what the queue has no room for is dropped and counted. A
request that is drawn takes the general path, so the fast path of a logged model pays for the draw, and that
of others nothing.
"""

from __future__ import annotations

import codecs
import logging
import os
import queue
import random
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from math import isfinite, prod
from pathlib import Path
from typing import NamedTuple

import msgspec

from fastserve.engine.engine import DelegatingScheduler, Engine, Scheduler
from fastserve.errors import ServeError
from fastserve.metrics import Registry, names
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.settings.model_options import RequestLogOptions
from fastserve.tensor import Tensor
from fastserve.util.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
MOST_RECORDS, MOST_BYTES = 256, 16 << 20
"""Of records that wait for the thread."""
WRITE_EVERY_S = 0.25
CLOSE_S = 2.0
TAIL_BYTES = 1 << 16
MOST_TENSORS = 256
MOST_OWED = 64
MOST_ID = 256
"""Characters of a request's id, which its client has chosen."""
RECORD_BYTES, AXIS_BYTES = 200, 40
"""Of a tensor in a record, and of each axis of its shape, besides its values."""
PIECE = 1024
"""Values, or bytes of a text, that become text at a time: 0.5 ms, in which the event loop waits for the
interpreter's lock."""
NAP_BYTES, NAP_S = 1024, 1e-4
"""After so much text the thread sleeps for so long: a thread that releases the lock without a sleep takes it
again before others wake up."""
MOST_SHARE = 0.25
"""Of a processor, for the thread."""
KINDS = ("floats", "integers", "texts")
_CODES = {
    "bool": "B", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I",
    "int64": "q", "uint64": "Q", "float16": "e", "bfloat16": "H", "float32": "f", "float64": "d",
}  # fmt: skip
_LARGEST = (1 << 63) - 1
_UTF8 = codecs.getincrementaldecoder("utf-8")
encode = msgspec.json.encode


class LoggedTensor(msgspec.Struct, frozen=True):
    """The beginning of a tensor in a line; its values follow."""

    name: str
    dtype: str
    shape: Sequence[int]


class LoggedRequest(msgspec.Struct, frozen=True):
    """The beginning of a line; its tensors follow."""

    time: str
    id: str
    model: str
    version: int
    key: str
    status: str
    latency_us: int


class CopiedTensor(NamedTuple):
    """The beginning of a tensor's memory; `data` None: redacted."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None


class Record(NamedTuple):
    """A request as the loop hands it over."""

    file: LogFile
    at_ns: int
    id: str
    key: str
    version: int
    status: str
    took_ns: int
    inputs: list[CopiedTensor]
    outputs: list[CopiedTensor]
    nbytes: int


class RequestLogs:
    """The logs of all models in one front process. Without a folder there are none."""

    def __init__(self, folder: str, registry: Registry, front: int = 0, fronts: int = 1) -> None:
        self.folder = Path(folder) if folder else None
        self._registry, self._front, self._fronts = registry, front, fronts
        self._records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._put = self._taken = 0  # bytes: each is counted by one thread alone
        self._files: dict[str, LogFile] = {}
        self._thread: threading.Thread | None = None

    def wrap(self, version: Version, inner: Scheduler) -> Scheduler:
        """Return the version's scheduler, with a log before it where its config asks for one."""
        options = version.config.request_log
        if options is None or not options.sample:
            return inner
        if self.folder is None or version.config.options.decoupled:
            why = "it answers in parts" if self.folder else "request_log_folder names no folder"
            log.warning("%r: request_log has no effect: %s", version, why)
            return inner
        ending = f"-{self._front}" if self._front else ""
        path = self.folder / f"{version.model}{ending}.jsonl"
        file = self._files.get(version.model)
        most = max(1, options.max_bytes // self._fronts // 2)
        if file is None:
            file = self._files[version.model] = LogFile(path, most, version.model, self._registry)
        file.most = most
        return LoggedScheduler(inner, options, file, self)

    def put(self, record: Record) -> None:
        """Hand a record to the thread, or drop it. On the loop."""
        if self._records.qsize() >= MOST_RECORDS or self._put - self._taken + record.nbytes > MOST_BYTES:
            record.file.dropped.add()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
            self._thread.start()
        self._put += record.nbytes
        self._records.put(record)

    def close(self) -> None:
        """Write what waits, for at most CLOSE_S seconds, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._records.put(None)
            thread.join(CLOSE_S)

    def _run(self) -> None:
        record = self._records.get()
        while record is not None:
            began_s = time.thread_time()
            with suppress(queue.Empty):
                while record is not None:
                    self._taken += record.nbytes
                    record.file.write(write_line(record))
                    record = self._records.get_nowait()
            if record is not None:
                took_s = time.thread_time() - began_s
                time.sleep(max(WRITE_EVERY_S, took_s / MOST_SHARE - took_s))
                record = self._records.get()
        for file in self._files.values():
            file.close()


class LogFile:
    """A model's file of one front process, and the one before it; `most` bytes each. The thread writes."""

    def __init__(self, path: Path, most: int, model: str, registry: Registry) -> None:
        self.path, self.most, self.model = path, most, model
        counters = registry.counters(names.REQUEST_LOG)
        self.written, self.dropped, self.failed = (
            counters.of(model, result) for result in names.REQUEST_LOG_RESULTS
        )
        self._fd = -1
        self._limited_log = RateLimitedLog(log)

    def write(self, line: bytes | bytearray) -> None:
        """Append a line, to a file of its own where the one at hand has no room for it; drop an empty one."""
        try:
            self._append(line)
        except OSError as error:
            self.close()
            self.failed.add()
            text = "%s cannot be written: %s"
            self._limited_log.warn(text, self.path.name, error.strerror or error)

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _append(self, line: bytes | bytearray) -> None:
        if not 0 < len(line) <= self.most:
            self.dropped.add()
            return
        if self._fd < 0 or os.fstat(self._fd).st_nlink == 0:  # an operator's tool has removed it
            self._open()
        if os.fstat(self._fd).st_size + len(line) > self.most:
            self.close()
            os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
            self._open()
        size = os.fstat(self._fd).st_size
        if os.write(self._fd, line) < len(line):
            os.ftruncate(self._fd, size)  # half a line is none
            raise OSError("no room is left")
        self.written.add()

    def _open(self) -> None:
        self.close()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)
        os.fchmod(self._fd, 0o600)
        if size := os.fstat(self._fd).st_size:
            self._cut(size)

    def _cut(self, size: int) -> None:
        """Take away half a line at the end, which a killed process has left."""
        with self.path.open("rb") as file:
            whole, start = 0, size
            while not whole and start:
                start = max(0, start - TAIL_BYTES)
                file.seek(start)
                tail = file.read(TAIL_BYTES)[: size - start]
                whole = start + tail.rfind(b"\n") + 1 if b"\n" in tail else 0
        if whole < size:
            os.ftruncate(self._fd, whole)


class RequestSampler:
    """Draws the requests of one version. One that the fast path has drawn is `owed` by the general path."""

    __slots__ = ("_owed", "_random", "_share")

    def __init__(self, share: float) -> None:
        self._share, self._owed, self._random = share, 0, random.Random().random

    def draw(self) -> bool:
        """Draw a request on the fast path, which leaves it to the general path then."""
        if self._random() >= self._share:
            return False
        self._owed = min(self._owed + 1, MOST_OWED)  # not all of them get as far as the scheduler
        return True

    def take(self) -> bool:
        """Draw a request on the general path."""
        if self._owed:
            self._owed -= 1
            return True
        return self._random() < self._share


class LoggedScheduler(DelegatingScheduler):
    """A request log before another scheduler."""

    def __init__(
        self, inner: Scheduler, options: RequestLogOptions, file: LogFile, logs: RequestLogs
    ) -> None:
        super().__init__(inner)
        self.sampler = RequestSampler(options.sample)
        self._redacted, self._most = frozenset(options.redact), options.max_tensor_bytes
        self._file, self._logs = file, logs

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        if not self.sampler.take():
            return await self.inner.infer(engine, version, request)
        at_ns, began_ns = time.time_ns(), time.monotonic_ns()
        inputs = self._copy(request.inputs.items(), request.lent)
        status, outputs = "CANCELLED", list[CopiedTensor]()
        try:
            response = await self.inner.infer(engine, version, request)
            status, outputs = "OK", self._copy(response.in_order(), request.placed)
            return response
        except ServeError as fault:
            status = fault.kind.name
            raise
        finally:
            took_ns = time.monotonic_ns() - began_ns
            nbytes = sum(
                len(one.data or b"") + RECORD_BYTES + AXIS_BYTES * len(one.shape)
                for one in (*inputs, *outputs)
            )
            key, id = str(getattr(request.account, "name", "")), request.request_id[:MOST_ID]
            told = at_ns, id, key, version.number, status, took_ns, inputs, outputs
            self._logs.put(Record(self._file, *told, nbytes))

    def request_sampler(self) -> RequestSampler:
        return self.sampler

    def _copy(
        self, tensors: Iterable[tuple[str, Tensor]], elsewhere: Mapping[str, object]
    ) -> list[CopiedTensor]:
        found: list[CopiedTensor] = []
        for name, tensor in tensors:
            if len(found) >= MOST_TENSORS:
                break
            # A tensor in a GPU's memory is not read for a log.
            hidden = name in self._redacted or name in elsewhere
            data = None if hidden else bytes(memoryview(tensor.data).cast("B")[: self._most])
            found.append(CopiedTensor(name, tensor.dtype.name, tensor.shape, data))
        return found


def write_line(record: Record) -> bytes | bytearray:
    """Return the line of a record; nothing where it is longer than a file may be."""
    line = bytearray()
    for piece in _line_pieces(record):
        line += piece
        if len(line) > record.file.most:
            return b""
        if len(piece) >= NAP_BYTES:
            time.sleep(NAP_S)
    return line


def _line_pieces(record: Record) -> Iterator[bytes]:
    at = datetime.fromtimestamp(record.at_ns / 1e9, timezone.utc)
    head = LoggedRequest(
        at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        record.id,
        record.file.model,
        record.version,
        record.key,
        record.status,
        record.took_ns // 1000,
    )
    yield encode(head)[:-1]
    for name, tensors in ((b"inputs", record.inputs), (b"outputs", record.outputs)):
        yield b',"%b":[' % name
        for number, tensor in enumerate(tensors):
            yield b"," if number else b""
            yield from tensor_pieces(tensor)
        yield b"]"
    yield b"}\n"


def tensor_pieces(tensor: CopiedTensor) -> Iterator[bytes]:
    """Yield the text of a tensor in a line, a few of its values at a time."""
    elements = prod(tensor.shape)
    kind, texts = "", iter(list[bytes]())
    if tensor.data is not None:
        kind, texts = _write_values(tensor.data, tensor.dtype, elements)
    yield encode(LoggedTensor(tensor.name, tensor.dtype, tensor.shape))[:-1]
    for name in KINDS:
        yield b',"%b":[' % name.encode()
        if name == kind:
            yield from texts
        yield b"]"
    redacted = b"true" if tensor.data is None else b"false"
    yield b',"elements":%d,"redacted":%b}' % (elements, redacted)


def _write_values(data: bytes, dtype: str, elements: int) -> tuple[str, Iterator[bytes]]:
    """Return which of KINDS the values are, and the text between the brackets of their list."""
    if dtype == "bytes":
        return "texts", _write_texts(data, elements)
    if dtype in ("float16", "bfloat16", "float32", "float64"):
        numbers = read_numbers(data, dtype)
        return "floats", _join([one if isfinite(one) else None for one in piece] for piece in numbers)
    if dtype == "uint64" and any(max(piece) > _LARGEST for piece in read_numbers(data, dtype)):
        # No table has a type for both.
        return "texts", _join([str(one) for one in piece] for piece in read_numbers(data, dtype))
    return "integers", _join([int(one) for one in piece] for piece in read_numbers(data, dtype))


def _join(pieces: Iterable[Sequence[object]]) -> Iterator[bytes]:
    for number, piece in enumerate(pieces):
        yield (b"," if number else b"") + encode(piece)[1:-1]


def read_numbers(data: bytes, dtype: str) -> Iterator[Sequence[float]]:
    """Yield the whole elements of a beginning, some at a time; none of complex numbers."""
    code = _CODES.get(dtype)
    if code is None:
        return
    size = struct.calcsize(f"<{code}")
    whole = len(data) // size * size
    for start in range(0, whole, PIECE * size):
        piece = data[start : min(start + PIECE * size, whole)]
        numbers = struct.unpack(f"<{len(piece) // size}{code}", piece)
        if dtype == "bfloat16":  # the upper half of a float32
            wide = struct.pack(f"<{len(numbers)}I", *(number << 16 for number in numbers))
            numbers = struct.unpack(f"<{len(numbers)}f", wide)
        yield numbers


def _write_texts(data: bytes, most: int) -> Iterator[bytes]:
    """Yield texts as JSON; bytes other than UTF-8 are escaped."""
    comma = b""
    for texts in _read_texts(data, most):
        if len(texts[0]) <= PIECE:
            yield comma + encode([text.decode("utf-8", "backslashreplace") for text in texts])[1:-1]
        else:
            yield comma + b'"'
            decoder, text = _UTF8("backslashreplace"), texts[0]
            for start in range(0, len(text), PIECE):
                piece = decoder.decode(text[start : start + PIECE], start + PIECE >= len(text))
                yield encode(piece)[1:-1]
            yield b'"'
        comma = b","


def _read_texts(data: bytes, most: int) -> Iterator[list[bytes]]:
    """Yield the texts that are whole in a beginning of BYTES packing: one longer than PIECE by itself, others
    as many together as PIECE has room for."""
    together: list[bytes] = []
    at = count = size = 0
    while count < most and at + 4 <= len(data):
        start, at = at + 4, at + 4 + int.from_bytes(data[at : at + 4], "little")
        if at > len(data):
            break
        if together and size + at - start > PIECE:
            yield together
            together, size = [], 0
        together.append(data[start:at])
        size, count = size + 4 + at - start, count + 1
    if together:
        yield together
