"""`fastserve bench`: a load generator for a model of a running server.

Requests have random inputs, in the shapes that the model's metadata gives; `load` sends them.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import log2
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import click
import numpy as np

from fastserve.cli.client import ServerClient, Trust, url_option, with_trust
from fastserve.cli.generate import CHAT, PLAIN, Question, completion_body
from fastserve.cli.load import LatencyHistogram, LoadPlan, LoadResult, floor_of, run_plans, share
from fastserve.tensor import DTYPE_BY_KSERVE, DTYPE_BY_TENSORFLOW, KSERVE_NAME

option = partial(click.option, show_default=True)
PORTS = {"http": 80, "https": 443}
READABLE = click.Path(exists=True, dir_okay=False, path_type=Path)
PERCENTILES = (50, 90, 99, 99.9)
TEXT_PERCENTILES = (50, 90, 99, 100)
BAR_CHARS = 50
STEPS_PER_DOUBLING = 2
JSON, BINARY = "application/json", "application/octet-stream"
HEADER_LENGTH = "Inference-Header-Content-Length"
V2_SERVICE = "/inference.GRPCInferenceService/"
TIMEOUT_S = 60.0
VARIANTS = 16
VARIANT_BYTES = 8 << 20  # of all variants together
WORDS = ("the", "river", "of", "light", "came", "down", "from", "heaven", "and", "every", "man", "said")
Rng = np.random.Generator


@dataclass(frozen=True)
class LoadRequest:
    """One POST over HTTP, or one message to the gRPC method `path`.

    `json_bytes` of a V2 body are JSON; 0: all of them.
    """

    path: str
    content_type: str
    body: bytes
    json_bytes: int = 0

    def encode(self, host: str) -> bytes:
        """Return the request as HTTP/1.1 sends it."""
        more = f"{HEADER_LENGTH}: {self.json_bytes}\r\n" if self.json_bytes else ""
        head = f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {self.content_type}\r\n{more}"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(self.body) + self.body


@dataclass(frozen=True)
class LoadOptions:
    """The target of a load and the form of its requests.

    `rows` fills an open batch axis, `length` every other open axis (for text: the words of a prompt).
    """

    server: ServerClient
    model: str
    grpc_url: str = ""
    rows: int = 1
    length: int = 1
    signature: str = "serving_default"
    tokens: int = 64


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
    """One way to ask a model: where bodies go (`{}` is the model), their type, the inputs, and bodies of
    random ones.

    `write` returns a body, and how many of its bytes are JSON where others follow.
    """

    path: str
    content_type: str
    describe: Callable[[LoadOptions], list[LoadInput]]
    write: Callable[[LoadOptions, list[LoadInput], Rng], tuple[bytes, int]]
    grpc: bool = False
    events: bool = False

    def requests(self, options: LoadOptions, data: bytes | None = None) -> list[LoadRequest]:
        """Return up to VARIANTS requests, or the one of `data`. Raises ClickException."""
        make = partial(LoadRequest, self.path.format(quote(options.model, safe="")), self.content_type)
        if data is not None and self.write is write_v2_binary:
            raise click.ClickException("--data is for bodies of JSON; use --protocol v2")
        if data is not None:
            return [make(data)]
        inputs, rng = self.describe(options), np.random.default_rng(7)
        made = [make(*self.write(options, inputs, rng))]
        count = min(VARIANTS, max(1, VARIANT_BYTES // max(1, len(made[0].body))))
        return made + [make(*self.write(options, inputs, rng)) for _ in range(count - 1)]


# --- TensorFlow Serving -----------------------------------------------------------------------------


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


# --- Open Inference Protocol V2 ---------------------------------------------------------------------


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


def v2_grpc_inputs(options: LoadOptions) -> list[LoadInput]:
    from google.protobuf.json_format import MessageToDict

    described = MessageToDict(call_v2(options, "ModelMetadata"))["inputs"]
    try:
        config = MessageToDict(call_v2(options, "ModelConfig").config, preserving_proto_field_name=True)
    except click.ClickException:
        config = None
    return [read_input(one, options, has_batch_axis(config)) for one in described]


def call_v2(options: LoadOptions, method: str) -> Any:
    """Return the reply to a gRPC call about the model. Raises ClickException."""
    import grpc

    from fastserve.protos import load

    messages, address = load("kserve_v2"), options.grpc_url.partition("://")[2]
    secured = options.grpc_url.startswith("https://")
    request = getattr(messages, f"{method}Request")(name=options.model).SerializeToString()
    try:
        with options.server.trust.channel(grpc, address, secured) as channel:
            reply = channel.unary_unary(f"{V2_SERVICE}{method}")(request, timeout=TIMEOUT_S)
    except grpc.RpcError as fault:
        raise click.ClickException(f"{address}: {fault.code().name}: {fault.details()}") from None
    return getattr(messages, f"{method}Response").FromString(reply)


def v2_inputs(options: LoadOptions) -> list[LoadInput]:
    path = f"/v2/models/{quote(options.model, safe='')}"
    metadata = json.loads(options.server.ask(path))
    status, config = options.server.exchange(f"{path}/config", None, "")
    batching = has_batch_axis(json.loads(config) if status == 200 else None)
    return [read_input(one, options, batching) for one in metadata["inputs"]]


def has_batch_axis(config: Mapping[str, Any] | None) -> bool:
    """Return whether tensors have a batch axis: without Triton's model config, the first open axis is one."""
    return config is None or int(config.get("max_batch_size", 0)) > 0


def read_input(described: Mapping[str, Any], options: LoadOptions, batching: bool) -> LoadInput:
    sizes = [int(size) for size in described.get("shape", ())]
    if batching and sizes and sizes[0] < 0:
        sizes[0] = options.rows
    dtype = DTYPE_BY_KSERVE.get(described["datatype"])
    if dtype is None:
        raise click.ClickException(f"{described['name']} has the datatype {described['datatype']}")
    return LoadInput(described["name"], dtype.name, tuple(options.length if n < 0 else n for n in sizes))


# --- OpenAI's API, streamed -------------------------------------------------------------------------


def write_text(
    options: LoadOptions, inputs: list[LoadInput], rng: Rng, chat: bool = False
) -> tuple[bytes, int]:
    """Prompts of `length` words, answers of `tokens` tokens."""
    words = " ".join(rng.choice(WORDS, options.length))
    question = Question(prompt=words, chat=chat, max_new_tokens=options.tokens)
    return json.dumps({**completion_body(question, options.model), "ignore_eos": True}).encode(), 0


def no_inputs(options: LoadOptions) -> list[LoadInput]:
    return []


PREDICT, INFER = "/v1/models/{}:predict", "/v2/models/{}/infer"
PROTOCOLS: dict[str, LoadProtocol] = {
    "tfserving": LoadProtocol(PREDICT, JSON, signature_inputs, write_rows),
    "tfserving-raw": LoadProtocol(PREDICT, BINARY, signature_inputs, write_raw),
    "v2": LoadProtocol(INFER, JSON, v2_inputs, write_v2),
    "v2-binary": LoadProtocol(INFER, BINARY, v2_inputs, write_v2_binary),
    "v2-grpc": LoadProtocol(f"{V2_SERVICE}ModelInfer", "", v2_grpc_inputs, write_v2_grpc, grpc=True),
    "text": LoadProtocol(PLAIN, JSON, no_inputs, write_text, events=True),
    "chat": LoadProtocol(CHAT, JSON, no_inputs, partial(write_text, chat=True), events=True),
}


# --- the command ------------------------------------------------------------------------------------


def address(url: str, flag: str) -> tuple[str, int]:
    """Return host and port of a URL that `flag` gives. Raises BadParameter."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise click.BadParameter(f"{url} is not http://HOST:PORT or https://HOST:PORT", param_hint=flag)
    return parts.hostname, parts.port or PORTS[parts.scheme]


@click.command(short_help="Put a running server under load.")
@click.argument("model")
@url_option
@option("--grpc", default="127.0.0.1:8001", metavar="[https://]HOST:PORT", help="The server's gRPC address.")
@option("--protocol", type=click.Choice(list(PROTOCOLS)), default="tfserving", help="How it is asked; below.")
@option("-c", "--connections", type=click.IntRange(1), default=32, help="Requests at a time.")
@option("-d", "--duration", type=click.FloatRange(0.1), default=10.0, help="Seconds measured.")
@option("--warm-up", type=click.FloatRange(0), default=1.0, help="Seconds before, not measured.")
@option("--processes", type=click.IntRange(1), default=1, help="Processes that share the connections.")
@option("--rows", type=click.IntRange(1), default=1, help="Rows in each request.")
@option(
    "--length",
    type=click.IntRange(1),
    default=1,
    help="Items where the model takes any number; words of a prompt.",
)
@option("--tokens", type=click.IntRange(1), default=64, help="Tokens of each answer of text.")
@option("--signature", default="serving_default", help="Signature asked.")
@option("--data", type=READABLE, help="Send this file as every body.")
@option("--timeout", type=click.FloatRange(0.1), default=30.0, help="Seconds to wait for one reply.")
@option("--json", "as_json_text", is_flag=True, help="Print JSON instead of text.")
@with_trust
def bench(
    model: str, url: str, grpc: str, protocol: str, connections: int, duration: float, warm_up: float,
    processes: int, rows: int, length: int, tokens: int, signature: str, data: Path | None, timeout: float,
    as_json_text: bool, trust: Trust,
) -> None:  # fmt: skip
    """Keep CONNECTIONS requests to MODEL under way and show how long each took.

    Inputs are random, in the shapes the model's metadata tells. Exit code 1 when a request failed.

    \b
    fastserve bench half_plus_two
    fastserve bench digits -c 64 -d 30 --rows 4
    fastserve bench digits --protocol v2-binary --json
    fastserve bench llm --protocol text --length 100 --tokens 200

    \b
    Protocols:
      tfserving      TensorFlow Serving REST, rows as JSON
      tfserving-raw  the same, one tensor's bytes as the body
      v2             Open Inference Protocol V2 (KServe, Triton), JSON
      v2-binary      the same, tensors as bytes after a JSON header
      v2-grpc        V2 over gRPC, raw contents
      text           OpenAI's completions, streamed: time to the first token, gaps, tokens/s
      chat           OpenAI's chat completions, the same
    """
    server, chosen = ServerClient(url, trust), PROTOCOLS[protocol]
    grpc_url = grpc if "://" in grpc else f"http://{grpc}"
    target = grpc_url if chosen.grpc else server.url
    host, port = address(target, "--grpc" if chosen.grpc else "--url")
    options = LoadOptions(server, model, grpc_url, rows, length, signature, tokens)
    requests = chosen.requests(options, data.read_bytes() if data else None)
    plans = [
        LoadPlan(
            *(host, port, count, warm_up, duration, timeout),
            [one.body if chosen.grpc else one.encode(f"{host}:{port}") for one in requests],
            method=requests[0].path if chosen.grpc else "",
            events=chosen.events,
            trust=trust if target.startswith("https://") else None,
        )
        for count in share(connections, processes)
    ]
    result = run_plans(plans)
    lines = [json.dumps(as_json(result), indent=2)] if as_json_text else report(result)
    for line in lines:
        click.echo(line)
    sys.exit(1 if result.failed or not result.latency.total() else 0)


def show_duration(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns:.0f} ns"


def report(result: LoadResult) -> Iterator[str]:
    """Return the lines for a terminal. The bars are of the gaps where the replies are streams of text."""
    latency, seconds = result.latency, result.seconds
    yield f"requests   {latency.total():,} in {seconds:.1f} s: {result.rate:,.1f}/s"
    yield f"replies    {result.body_bytes / 1e6 / max(seconds, 1e-9):,.2f} MB/s of bodies"
    yield f"latency    mean {show_duration(latency.mean())}"
    for percent in (*PERCENTILES, 100):
        yield f"  p{percent:<7g} {show_duration(latency.percentile(percent))}"
    if result.answers:
        yield f"tokens     {result.token_rate:,.1f}/s, {result.tokens / result.answers:,.1f} an answer"
        for name, histogram in (("first", result.first), ("gaps", result.gaps)):
            spans = (f"p{p:g} {show_duration(histogram.percentile(p))}" for p in TEXT_PERCENTILES)
            yield f"{name:<9}  {'  '.join(spans)}"
    for status, count in sorted(result.statuses.items()):
        yield f"status {status}  {count:,}"
    for fault, count in sorted(result.faults.items()):
        yield f"FAILED  {fault}: {count:,}"
    yield from bars(result.gaps if result.gaps.total() else latency)


def bars(histogram: LatencyHistogram) -> Iterator[str]:
    """Return a line per half doubling of latency; the longest bar is the most common latency."""
    steps: dict[int, int] = {}
    for bucket, count in histogram.items():
        step = int(log2(max(1, floor_of(bucket))) * STEPS_PER_DOUBLING)
        steps[step] = steps.get(step, 0) + count
    if not steps:
        return
    yield ""
    for step in range(min(steps), max(steps) + 1):
        count = steps.get(step, 0)
        upper = show_duration(2 ** ((step + 1) / STEPS_PER_DOUBLING))
        bar = "#" * round(count / max(steps.values()) * BAR_CHARS) or ("." if count else "")
        yield f"  < {upper:>8}  {count:>10,}  {bar}".rstrip()


def as_json(result: LoadResult) -> dict[str, Any]:
    """Return the figures by name, latencies in microseconds."""

    def spans(prefix: str, histogram: LatencyHistogram, percents: Iterable[float]) -> dict[str, float]:
        return {f"{prefix}p{percent:g}_us": histogram.percentile(percent) / 1000 for percent in percents}

    found: dict[str, Any] = {
        "requests": result.latency.total(),
        "seconds": result.seconds,
        "requests_per_s": result.rate,
        "mean_us": result.latency.mean() / 1000,
        **spans("", result.latency, PERCENTILES),
        "body_bytes": result.body_bytes,
        "statuses": result.statuses,
        "faults": result.faults,
    }
    if result.answers:
        found |= {"tokens_per_s": result.token_rate, "answers": result.answers, "tokens": result.tokens}
        found |= spans("first_", result.first, TEXT_PERCENTILES)
        found |= spans("gap_", result.gaps, TEXT_PERCENTILES)
    return found
