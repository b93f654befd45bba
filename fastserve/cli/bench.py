"""`fastserve bench`: a closed loop of requests to a model of a running server, over HTTP or gRPC, with random
inputs in the shapes that the model's metadata gives."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit

import click
import httptools
import numpy as np

from fastserve.cli.client import ServerClient, Trust, url_option, with_trust
from fastserve.tensor import DTYPE_BY_KSERVE, DTYPE_BY_TENSORFLOW, KSERVE_NAME

option = partial(click.option, show_default=True)
READABLE = click.Path(exists=True, dir_okay=False, path_type=Path)
PERCENTILES = (50, 90, 99, 99.9)
BAR_CHARS = 50
STEPS_PER_DOUBLING = 2
JSON, BINARY = "application/json", "application/octet-stream"
HEADER_LENGTH = "Inference-Header-Content-Length"
V2_SERVICE = "/inference.GRPCInferenceService/"
GOOD = ("200", "OK")
RETRY_S = 0.1
# Equal channels of a process share one TCP connection by default.
GRPC_OPTIONS = ("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)
VARIANTS = 16
VARIANT_BYTES = 8 << 20  # of all variants together
Rng = np.random.Generator


@dataclass(frozen=True)
class LoadOptions:
    """Target and form of requests. `rows` fills an open batch axis, `length` every other open axis."""

    server: ServerClient
    model: str
    rows: int = 1
    length: int = 1
    signature: str = "serving_default"


class LoadInput(NamedTuple):
    """An input by its dtype's name (`tensor.DTYPES`) and the shape to send, batch axis included."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def sample(self, rng: Rng) -> np.ndarray:
        """Return random elements; bfloat16 as uint16. Raises ClickException for complex numbers."""
        if self.dtype == "bytes":
            texts = [rng.bytes(6).hex() for _ in range(int(np.prod(self.shape)))]
            return np.array(texts, object).reshape(self.shape)
        if self.dtype == "bool":
            return rng.random(self.shape) < 0.5
        if self.dtype == "bfloat16":
            return (rng.random(self.shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if self.dtype.startswith("float"):
            return rng.random(self.shape).astype(self.dtype)
        if self.dtype.startswith("complex"):
            raise click.ClickException(f"cannot make random {self.dtype} values; give a body with --data")
        return rng.integers(0, 100, self.shape).astype(self.dtype)

    def pack(self, rng: Rng) -> bytes:
        """Return random elements as little-endian bytes, texts with their length before them."""
        found = self.sample(rng)
        if self.dtype != "bytes":
            return found.tobytes()
        return b"".join(len(text).to_bytes(4, "little") + text.encode() for text in found.flat)

    def describe(self) -> dict[str, Any]:
        """Return the tensor as V2 has it, without its elements."""
        return {"name": self.name, "shape": self.shape, "datatype": KSERVE_NAME[self.dtype]}


class LoadProtocol(NamedTuple):
    """One way to ask a model. `path` has `{}` for the model; `write` returns a body of random inputs, and how
    many of its bytes are JSON where others follow."""

    path: str
    content_type: str
    describe: Callable[[LoadOptions], list[LoadInput]]
    write: Callable[[LoadOptions, list[LoadInput], Rng], tuple[bytes, int]]
    grpc: bool = False

    def bodies(self, options: LoadOptions, data: bytes | None = None) -> list[tuple[bytes, int]]:
        """Return up to VARIANTS bodies, or `data` alone. Raises ClickException."""
        if data is not None and self.write is write_v2_binary:
            raise click.ClickException("--data is for bodies of JSON; use --protocol v2")
        if data is not None:
            return [(data, 0)]
        inputs, rng = self.describe(options), np.random.default_rng(7)
        made = [self.write(options, inputs, rng)]
        count = min(VARIANTS, max(1, VARIANT_BYTES // max(1, len(made[0][0]))))
        return made + [self.write(options, inputs, rng) for _ in range(count - 1)]

    def encode(self, options: LoadOptions, host: str, body: bytes, json_bytes: int) -> bytes:
        """Return a request as it is sent: a gRPC message, or a request of HTTP/1.1."""
        if self.grpc:
            return body
        path = self.path.format(quote(options.model, safe=""))
        more = f"{HEADER_LENGTH}: {json_bytes}\r\n" if json_bytes else ""
        more += "".join(f"{name}: {value}\r\n" for name, value in options.server.trust.headers.items())
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {self.content_type}\r\n{more}"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def write_rows(options: LoadOptions, inputs: list[LoadInput], rng: Rng) -> tuple[bytes, int]:
    """{"instances": [...]}."""
    named = {} if options.signature == "serving_default" else {"signature_name": options.signature}
    columns = {one.name: rows_of(one, rng) for one in inputs}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    only = columns[inputs[0].name] if len(inputs) == 1 else rows
    return json.dumps({**named, "instances": only}).encode(), 0


def rows_of(given: LoadInput, rng: Rng) -> Any:
    """Return nested lists of random elements; binary strings in base64."""
    found = given.sample(rng)
    if given.dtype == "bytes":
        found = np.frompyfunc(lambda text: {"b64": base64.b64encode(text.encode()).decode()}, 1, 1)(found)
    return found.tolist()


def write_raw(options: LoadOptions, inputs: list[LoadInput], rng: Rng) -> tuple[bytes, int]:
    """The bytes of the only input."""
    if len(inputs) != 1 or inputs[0].dtype in ("bytes", "bfloat16"):
        raise click.ClickException(f"{options.model} has not one numeric input, which a raw body needs")
    return inputs[0].pack(rng), 0


def signature_inputs(options: LoadOptions) -> list[LoadInput]:
    signatures = options.server.signatures(options.model)
    if options.signature not in signatures:
        known = ", ".join(sorted(signatures))
        raise click.ClickException(f"{options.model} has no signature {options.signature}; it has {known}")
    return [
        LoadInput(name, DTYPE_BY_TENSORFLOW[spec["dtype"]].name, fill_shape(spec["tensor_shape"], options))
        for name, spec in signatures[options.signature]["inputs"].items()
    ]


def fill_shape(shape: Mapping[str, Any], options: LoadOptions) -> tuple[int, ...]:
    """Return the shape to send; an unknown rank is taken as one number per row."""
    sizes = [int(dim["size"]) for dim in shape.get("dim", [])] or [-1]
    first = options.rows if sizes[0] < 0 else sizes[0]
    return (first, *(options.length if size < 0 else size for size in sizes[1:]))


def write_v2(options: LoadOptions, inputs: list[LoadInput], rng: Rng) -> tuple[bytes, int]:
    if refused := [one.name for one in inputs if one.dtype in ("float16", "bfloat16")]:
        raise click.ClickException(f"{refused[0]} has no JSON form; use --protocol v2-binary")
    tensors = [{**one.describe(), "data": one.sample(rng).ravel().tolist()} for one in inputs]
    return json.dumps({"inputs": tensors}).encode(), 0


def write_v2_binary(options: LoadOptions, inputs: list[LoadInput], rng: Rng) -> tuple[bytes, int]:
    blobs = [one.pack(rng) for one in inputs]
    tensors = [
        {**one.describe(), "parameters": {"binary_data_size": len(blob)}}
        for one, blob in zip(inputs, blobs, strict=True)
    ]
    header = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    return b"".join((header, *blobs)), len(header)


def write_v2_grpc(options: LoadOptions, inputs: list[LoadInput], rng: Rng) -> tuple[bytes, int]:
    """ModelInfer with raw contents."""
    from fastserve.protos import load

    request = load("kserve_v2").ModelInferRequest(model_name=options.model)
    for one in inputs:
        request.inputs.add(**one.describe())
        request.raw_input_contents.append(one.pack(rng))
    return request.SerializeToString(), 0


def v2_inputs(options: LoadOptions) -> list[LoadInput]:
    """Return the inputs; without Triton's model config the first open axis is a batch axis."""
    path = f"/v2/models/{quote(options.model, safe='')}"
    metadata = json.loads(options.server.ask(path))
    status, config = options.server.exchange(f"{path}/config", None, "")
    batching = status != 200 or int(json.loads(config).get("max_batch_size", 0)) > 0
    return [read_input(one, options, batching) for one in metadata["inputs"]]


def read_input(described: Mapping[str, Any], options: LoadOptions, batching: bool) -> LoadInput:
    sizes = [int(size) for size in described.get("shape", ())]
    if batching and sizes and sizes[0] < 0:
        sizes[0] = options.rows
    dtype = DTYPE_BY_KSERVE.get(described["datatype"])
    if dtype is None:
        raise click.ClickException(f"{described['name']} has the datatype {described['datatype']}")
    return LoadInput(described["name"], dtype.name, tuple(options.length if n < 0 else n for n in sizes))


PREDICT, INFER = "/v1/models/{}:predict", "/v2/models/{}/infer"
PROTOCOLS: dict[str, LoadProtocol] = {
    "tfserving": LoadProtocol(PREDICT, JSON, signature_inputs, write_rows),
    "tfserving-raw": LoadProtocol(PREDICT, BINARY, signature_inputs, write_raw),
    "v2": LoadProtocol(INFER, JSON, v2_inputs, write_v2),
    "v2-binary": LoadProtocol(INFER, BINARY, v2_inputs, write_v2_binary),
    "v2-grpc": LoadProtocol(f"{V2_SERVICE}ModelInfer", "", v2_inputs, write_v2_grpc, grpc=True),
}


@dataclass
class LoadResult:
    """Everything counted after the warm-up. `statuses` are HTTP's numbers or gRPC's names."""

    latencies: array[int] = field(default_factory=lambda: array("q"))
    """Nanoseconds of each request."""
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    body_bytes: int = 0
    seconds: float = 0.0

    def percentile(self, percent: float) -> float:
        """Return the latency in ns that `percent` of the requests stayed under; 0 when there were none."""
        return float(np.percentile(self.latencies or [0], percent, method="inverted_cdf"))

    def mean(self) -> float:
        """Return the mean latency in ns."""
        return sum(self.latencies) / max(1, len(self.latencies))

    @property
    def rate(self) -> float:
        return len(self.latencies) / (self.seconds or 1.0)

    @property
    def failed(self) -> int:
        return self.faults.total() + sum(n for s, n in self.statuses.items() if s not in GOOD)


class BrokenLoadError(Exception):
    """A request got no whole reply. Its connection is of no use any more."""


class HttpLoadClient(asyncio.Protocol):
    """One HTTP/1.1 connection."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._parser = httptools.HttpResponseParser(self)
        self._reply: asyncio.Future[tuple[str, int]] | None = None
        self._nbytes = 0
        self.reusable = True

    async def ask(self, request: bytes) -> tuple[str, int]:
        loop = asyncio.get_running_loop()
        self._reply, self._nbytes = loop.create_future(), 0
        timer = loop.call_later(self._timeout_s, self._fail, "timed out")
        self._transport.write(request)
        try:
            return await self._reply
        finally:
            timer.cancel()

    def close(self) -> None:
        self._transport.abort()

    def _fail(self, fault: str) -> None:
        self.reusable = False
        if self._reply and not self._reply.done():
            self._reply.set_exception(BrokenLoadError(fault))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own classes are no subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("connection lost")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("unreadable reply")

    def on_body(self, body: bytes) -> None:
        self._nbytes += len(body)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._reply and not self._reply.done():
            self._reply.set_result((str(self._parser.get_status_code()), self._nbytes))


class GrpcLoadClient:
    """One gRPC channel with a TCP connection of its own. grpcio takes some 150 us of this side for a call."""

    reusable = True

    def __init__(self, load: ClosedLoop) -> None:
        import grpc.aio

        self._fault, self._timeout_s = grpc.aio.AioRpcError, load.timeout_s
        self._metadata = tuple(load.trust.headers.items())
        self._channel = load.trust.channel(grpc.aio, f"{load.host}:{load.port}", load.secured, GRPC_OPTIONS)
        self._call = self._channel.unary_unary(load.method)

    async def ask(self, request: bytes) -> tuple[str, int]:
        try:
            reply = await self._call(request, timeout=self._timeout_s, metadata=self._metadata)
            return "OK", len(reply)
        except self._fault as fault:
            self.reusable = fault.code().name != "UNAVAILABLE"
            return fault.code().name, 0

    def close(self) -> None:
        asyncio.get_running_loop().create_task(self._channel.close())


@dataclass
class ClosedLoop:
    """Connections that each have one request under way at a time; `requests` are sent as they are, or are
    messages of the gRPC `method`."""

    host: str
    port: int
    connections: int
    warm_up_s: float
    duration_s: float
    timeout_s: float
    requests: list[bytes]
    method: str = ""
    trust: Trust = field(default_factory=Trust)
    secured: bool = False
    """gRPC goes over TLS, as `trust` has it; HTTP does so where there is `tls`."""
    tls: ssl.SSLContext | None = None
    result: LoadResult = field(default_factory=LoadResult)
    _counting: bool = False
    _stopping: bool = False

    async def run(self) -> LoadResult:
        loops = [asyncio.create_task(self._keep_asking(i)) for i in range(self.connections)]
        await asyncio.sleep(self.warm_up_s)
        self._counting, began = True, time.monotonic()
        await asyncio.sleep(self.duration_s)
        self.result.seconds = time.monotonic() - began
        self._stopping = True
        await asyncio.gather(*loops)
        return self.result

    async def _keep_asking(self, number: int) -> None:
        first = number % len(self.requests)
        ring = cycle(self.requests[first:] + self.requests[:first])
        while not self._stopping:
            try:
                client = await self._connect()
            except OSError:
                self._count_fault("connection refused")
                await asyncio.sleep(RETRY_S)
                continue
            while client.reusable and not self._stopping:
                await self._ask(client, next(ring))
            client.close()

    async def _ask(self, client: HttpLoadClient | GrpcLoadClient, request: bytes) -> None:
        sent_ns = time.perf_counter_ns()
        try:
            status, nbytes = await client.ask(request)
        except BrokenLoadError as fault:
            return self._count_fault(str(fault))
        if self._counting:
            self.result.latencies.append(time.perf_counter_ns() - sent_ns)
            self.result.statuses[status] += 1
            self.result.body_bytes += nbytes

    def _count_fault(self, fault: str) -> None:
        if self._counting:
            self.result.faults[fault] += 1

    async def _connect(self) -> HttpLoadClient | GrpcLoadClient:
        if self.method:
            return GrpcLoadClient(self)
        make, loop = partial(HttpLoadClient, self.timeout_s), asyncio.get_running_loop()
        return (await loop.create_connection(make, self.host, self.port, ssl=self.tls))[1]


def run_loop(work: Coroutine[Any, Any, LoadResult]) -> LoadResult:
    """Run a load on the fastest event loop that this system has."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)


def address(url: str, flag: str) -> tuple[str, int]:
    """Return host and port of a URL that `flag` gives. Raises BadParameter."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.BadParameter(f"{url} is not http://HOST:PORT or https://HOST:PORT", param_hint=flag)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


@click.command(short_help="Put a running server under load.")
@click.argument("model")
@url_option
@option("--grpc", default="127.0.0.1:8001", metavar="[https://]HOST:PORT", help="The server's gRPC address.")
@option("--protocol", type=click.Choice(list(PROTOCOLS)), default="tfserving", help="How it is asked; below.")
@option("-c", "--connections", type=click.IntRange(1), default=32, help="Requests at a time.")
@option("-d", "--duration", type=click.FloatRange(0.1), default=10.0, help="Seconds measured.")
@option("--warm-up", type=click.FloatRange(0), default=1.0, help="Seconds before, not measured.")
@option("--rows", type=click.IntRange(1), default=1, help="Rows in each request.")
@option("--length", type=click.IntRange(1), default=1, help="Items where the model takes any number.")
@option("--signature", default="serving_default", help="Signature asked.")
@option("--data", type=READABLE, help="Send this file as every body.")
@option("--timeout", type=click.FloatRange(0.1), default=30.0, help="Seconds to wait for one reply.")
@option("--json", "as_json_text", is_flag=True, help="Print JSON instead of text.")
@with_trust
def bench(
    model: str, url: str, grpc: str, protocol: str, connections: int, duration: float, warm_up: float,
    rows: int, length: int, signature: str, data: Path | None, timeout: float, as_json_text: bool,
    trust: Trust,
) -> None:  # fmt: skip
    """Keep CONNECTIONS requests to MODEL under way and show how long each took.

    Inputs are random, in the shapes the model's metadata tells. Exit code 1 when a request failed.

    \b
    fastserve bench half_plus_two
    fastserve bench digits --protocol v2-binary -c 64 -d 30 --rows 4 --json

    \b
    Protocols:
      tfserving      TensorFlow Serving REST, rows as JSON
      tfserving-raw  the same, one tensor's bytes as the body
      v2             Open Inference Protocol V2 (KServe, Triton), JSON
      v2-binary      the same, tensors as bytes after a JSON header
      v2-grpc        V2 over gRPC, raw contents
    """
    server, chosen = ServerClient(url, trust), PROTOCOLS[protocol]
    target = server.url if not chosen.grpc else grpc if "://" in grpc else f"http://{grpc}"
    host, port = address(target, "--grpc" if chosen.grpc else "--url")
    secured = target.startswith("https://")
    options = LoadOptions(server, model, rows, length, signature)
    bodies = chosen.bodies(options, data.read_bytes() if data else None)
    load = ClosedLoop(
        *(host, port, connections, warm_up, duration, timeout),
        [chosen.encode(options, f"{host}:{port}", *body) for body in bodies],
        method=chosen.path if chosen.grpc else "",
        trust=trust,
        secured=secured,
        tls=trust.context() if secured and not chosen.grpc else None,
    )
    result = run_loop(load.run())
    lines = [json.dumps(as_json(result), indent=2)] if as_json_text else report(result)
    for line in lines:
        click.echo(line)
    sys.exit(1 if result.failed or not result.latencies else 0)


def show_duration(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns:.0f} ns"


def report(result: LoadResult) -> Iterator[str]:
    """Return the lines for a terminal."""
    seconds = max(result.seconds, 1e-9)
    yield f"requests   {len(result.latencies):,} in {result.seconds:.1f} s: {result.rate:,.1f}/s"
    yield f"replies    {result.body_bytes / 1e6 / seconds:,.2f} MB/s of bodies"
    yield f"latency    mean {show_duration(result.mean())}"
    for percent in (*PERCENTILES, 100):
        yield f"  p{percent:<7g} {show_duration(result.percentile(percent))}"
    for status, count in sorted(result.statuses.items()):
        yield f"status {status}  {count:,}"
    for fault, count in sorted(result.faults.items()):
        yield f"FAILED  {fault}: {count:,}"
    if result.latencies:
        yield from bars(result.latencies)


def bars(latencies: Sequence[int]) -> Iterator[str]:
    """Return a line per half doubling of latency; the longest bar is the most common latency."""
    steps = (np.log2(np.maximum(latencies, 1)) * STEPS_PER_DOUBLING).astype(int)
    counts = np.bincount(steps - steps.min())
    yield ""
    for step, count in enumerate(counts, steps.min()):
        upper = show_duration(2 ** ((step + 1) / STEPS_PER_DOUBLING))
        bar = "#" * round(count / counts.max() * BAR_CHARS) or ("." if count else "")
        yield f"  < {upper:>8}  {count:>10,}  {bar}".rstrip()


def as_json(result: LoadResult) -> dict[str, Any]:
    """Return the figures by name, latencies in microseconds."""
    return {
        "requests": len(result.latencies),
        "seconds": result.seconds,
        "requests_per_s": result.rate,
        "mean_us": result.mean() / 1000,
        **{f"p{percent:g}_us": result.percentile(percent) / 1000 for percent in PERCENTILES},
        "body_bytes": result.body_bytes,
        "statuses": result.statuses,
        "faults": result.faults,
    }
