"""Each compiled parser of bytes that a client, or a process less trusted, sends; and what one call costs.

cost = PARSERS["infer_json"].measure(data)          CPU seconds, peak bytes of Python's memory, the outcome

python -m tests.fuzz.parsers SECONDS        fuzzes, and keeps inputs with an outcome that is new
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

from fastserve._ext.flatten import unpack_bytes, walk_bytes
from fastserve._ext.grpc_messages import CLAIMED_BYTES, MessageReader, whole_message
from fastserve._ext.hpack import HpackDecoder
from fastserve._ext.http2_frames import FrameReader
from fastserve._ext.infer_json import read_infer
from fastserve._ext.json_bounds import Bounds, check_json, write_plain
from fastserve._ext.json_reader import PredictReader
from fastserve._ext.json_value import parse
from fastserve._ext.message_skeleton import DATA, LEAD, LEADS, TEXT, First, Scheme
from fastserve._ext.number_fields import count_fields, cut_numbers, list_fields
from fastserve._ext.proto_wire import read_infer_request
from fastserve._ext.proto_wire_v1 import read_v1_request
from fastserve._ext.remote_batches import MOST_PARTS, ProtocolFault, read_messages
from fastserve._ext.request_template import RequestTemplate, RequestTemplates, find_placeholders
from fastserve._ext.stop_strings import StopStrings, StopTable
from fastserve._ext.tensor_proto import read_predict_request
from fastserve._ext.token_records import read_prompt
from fastserve.dialects.grps.messages import GTENSORS, NUMBERS, TENSORS
from fastserve.tensor import DTYPE_BY_KSERVE
from fastserve.workers.remote.protocol import FileRequest, Hello, LoadedModel, Welcome, read_body
from tests.ext.json_strategies import at_edge
from tests.fuzz.mutator import FRAME, keep, mutations, read_corpus
from tests.slowness import slowness

TIMES, BASE_BYTES = 10, 64 << 10
OBJECT_BYTES = 160
"""Of a Python object or a tuple of three numbers; a parser makes as many as its own bound allows."""
CPU_S, CPU_S_PER_BYTE = 0.005, 2e-6
"""Of one call on a machine of usual speed: half a megabyte a second is the slowest a parser may be."""
TRIES = 3
CODES = [kind.code for kind in DTYPE_BY_KSERVE.values()]
MOST_VALUES = 16384


class ParserCost(NamedTuple):
    """Of one call for `nbytes`, which may make `objects` objects. `outcome` tells one way through the parser
    from another."""

    nbytes: int
    cpu_s: float
    peak_bytes: int
    outcome: tuple[Any, ...]
    objects: int = 0

    @property
    def excess(self) -> str:
        """Name what is beyond the bounds; "" for nothing."""
        objects = min(self.objects, self.nbytes // 2)  # none is written with less than two bytes
        if self.peak_bytes > TIMES * self.nbytes + OBJECT_BYTES * objects + BASE_BYTES:
            return f"{self.peak_bytes} bytes held for {self.nbytes}"
        most_s = CPU_S + CPU_S_PER_BYTE * self.nbytes
        if self.cpu_s > most_s and self.cpu_s > most_s * slowness():
            return f"{self.cpu_s:.4f} s of CPU for {self.nbytes} bytes"
        return ""


class Parser:
    """One entry point: `corpus` names its kept inputs, `pieces` what mutations put in. It makes at most
    `objects` Python objects, whatever the size of its input."""

    def __init__(
        self,
        call: Callable[[bytes], Any],
        corpus: str,
        pieces: str = "proto",
        reserves: int = 0,
        objects: int = 0,
    ) -> None:
        self.call, self.corpus, self.pieces, self.objects = call, corpus, pieces, objects
        self.reserves = reserves  # bytes of address space, which cost nothing before they are written to

    def outcome(self, data: bytes) -> tuple[Any, ...]:
        """Run it once. A refusal is a ValueError, with a code or words; anything else is a defect."""
        try:
            found = self.call(data)
        except (ValueError, OverflowError, ProtocolFault) as fault:
            code = getattr(fault, "code", getattr(fault, "reason", getattr(fault, "bound", "")))
            return type(fault).__name__, str(code)
        return "read", max(-1, min(found, 8)) if isinstance(found, int) else type(found).__name__

    def measure(self, data: bytes) -> ParserCost:
        began = time.thread_time()
        outcome = self.outcome(data)
        cpu_s = time.thread_time() - began
        tracemalloc.start()
        try:
            self.outcome(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return ParserCost(len(data), cpu_s, max(0, peak - self.reserves), outcome, self.objects)

    def least(self, data: bytes) -> ParserCost:
        """The cheapest of as many tries as it takes: other work on the machine lengthens a call."""
        cost = self.measure(data)
        for _ in range(TRIES):
            if not cost.excess:
                break
            again = self.measure(data)
            cost = again._replace(cpu_s=min(cost.cpu_s, again.cpu_s))
        return cost


# --- entry points -------------------------------------------------------------------------------------


def _infer_json(data: bytes) -> int:
    with at_edge(data) as edge:  # a step beyond its end ends the process
        body = read_infer(edge)
        return len(body.inputs) + len(body.outputs or ()) + sum(len(one.data or b"") for one in body.inputs)


def _json_bounds(data: bytes) -> int:
    with at_edge(data) as edge:
        found = sum(check_json(edge, Bounds()))
        return found + len(write_plain(edge, Bounds()))


FLOAT32, BYTES = (DTYPE_BY_KSERVE[name].code for name in ("FP32", "BYTES"))
ONE = PredictReader([("x", FLOAT32)], b"serving_default", is_default=True)
TWO = PredictReader([("x", FLOAT32), ("y", BYTES)], b"other", is_default=True)


def _predict_json(data: bytes) -> int:
    with at_edge(data) as edge:
        return len(ONE.read(edge).tensors)


def _predict_two(data: bytes) -> int:
    with at_edge(data) as edge:
        return len(TWO.read(edge).tensors)


def _predict_inputs(data: bytes) -> int:
    with at_edge(data) as edge:
        return len(ONE.read_inputs(edge).tensors)


def _predict_rows(data: bytes) -> int:
    """Into memory that is there, as the short way does."""
    with at_edge(data) as edge:
        for count, read in (
            (ONE.count_rows(edge, 2), ONE.read_into),
            (ONE.count_member(edge, (2,)), ONE.read_member),
        ):
            if 0 < count < 1 << 16:
                read(edge, bytearray(count * 8), (2,), count)
    return 0


def _json_value(data: bytes) -> Any:
    return parse(data, max_depth=100, max_values=MOST_VALUES)


def _proto_wire(data: bytes) -> int:
    with at_edge(data) as edge:
        message = read_infer_request(edge)
        for index in range(message.raw_count):
            message.copy_raw(index, bytearray(message.raw(index)[1]))
        for index in range(len(message.inputs)):
            for code in CODES:
                nbytes = message.contents_bytes(index, code)
                if 0 <= nbytes <= TIMES * len(data):
                    message.copy_contents(index, code, bytearray(nbytes))
        return len(message.inputs) + message.raw_count


def _proto_wire_v1(data: bytes) -> int:
    with at_edge(data) as edge:
        message = read_v1_request(edge)
        for index in range(message.raw_count):
            message.copy_raw(index, bytearray(message.raw(index)[1]))
        return message.raw_count


def _tensor_proto(data: bytes) -> int:
    message = read_predict_request(data)
    for tensor in message.inputs.values():
        for code in CODES:
            nbytes = tensor.measure(code, 4)
            if 0 <= nbytes <= TIMES * len(data):
                tensor.fill(code, 4, bytearray(nbytes))
    return len(message.inputs)


SCHEMES = [
    Scheme({3: TEXT, 5: {3: LEADS, 5: dict.fromkeys(range(1, 8), DATA)}, 7: DATA}),
    Scheme({2: {2: {2: {2: First({1: LEAD})}, **dict.fromkeys((4, 5, 6, 7, 10, 11), DATA)}}}),
]


def _message_skeleton(data: bytes) -> int:
    found = 0
    for scheme in SCHEMES:
        skeleton = scheme.read(data)
        if skeleton is not None:
            found += len(skeleton.sizes)
            for index, size in enumerate(skeleton.sizes):
                skeleton.copy_data(index, bytearray(size))
    return found


def _number_fields(data: bytes) -> int:
    found = len(list_fields(data, 0, len(data), MOST_VALUES)) + count_fields(data, 0, len(data))[0]
    numbers = cut_numbers(data, GTENSORS, TENSORS, NUMBERS)
    try:
        return found + sum(numbers.count(0, number) for number in NUMBERS)
    except IndexError:  # it has no tensor
        return found


def _grpc_messages(data: bytes) -> int:
    reader = MessageReader(1 << 20)
    pieces = [data[at : at + 7] for at in range(0, min(len(data), 700), 7)]
    found = sum(len(reader.feed(piece)) for piece in [*pieces, data[700:]])
    return found + (whole_message(data, 1 << 20) is not None)


def _hpack(data: bytes) -> int:
    decoder = HpackDecoder()
    half = len(data) // 2
    with at_edge(data[:half]) as edge:
        found = len(decoder.decode(edge))
    return found + len(decoder.decode(data[half:]))


def _http2_frames(data: bytes) -> int:
    reader = FrameReader(16384, 65536, 16)
    with at_edge(data) as edge:
        return len(reader.read(edge, len(data)))


def _request_template(data: bytes) -> int:
    """A template of the request, each of its tensors one float32 a row, and the request read by it."""
    made, tensors = [], 0
    for kind, first, last, number in find_placeholders(data):
        unit = {"id": 0, "size": 4}.get(kind, 1)
        made.append(("rows" if kind == "size" else kind, first, last, unit, max(number, 0), FLOAT32))
        tensors = max(tensors, number + 1)
    template = RequestTemplate(data, made, [], [4] * tensors, 0)
    templates = RequestTemplates(2)
    templates.add(template)
    if templates.find(data, len(data)) is template and template.rows < MOST_VALUES:
        template.read_into(data, len(data), [bytearray(4 * template.rows) for _ in range(tensors)])
    return len(made)


def _byte_format(data: bytes) -> int:
    with at_edge(data) as edge:
        count, _, _ = walk_bytes(edge, MOST_VALUES)
        return len(unpack_bytes(edge, count))


def _stop_strings(data: bytes) -> int:
    first, _, text = data.decode("utf-8", "replace").partition("\n\n")
    stops, found = StopStrings(StopTable(list(filter(None, first.split("\n", 64)[:64])))), 0
    for at in range(0, len(text), 7):
        found += len(stops.feed(text[at : at + 7]))
    return found + len(stops.flush())


def _prompt(data: bytes) -> int:
    ids, note = read_prompt(data)
    return len(ids) + len(note)


def _remote_batches(data: bytes) -> int:
    """The frames of messages from a remote worker, or to one."""
    found = 0
    frames = [memoryview(frame) for frame in data.split(FRAME)]
    with at_edge(bytes(frames[0])) as edge:
        for message in read_messages([edge, *frames[1:]]):
            assert len(message.parts) <= MOST_PARTS
            found += len(message.table) + len(message.parts)
            for kind in (Hello, Welcome, FileRequest, LoadedModel):
                with contextlib.suppress(ProtocolFault):
                    read_body(message, kind)
        del message
    return found


PARSERS: dict[str, Parser] = {
    "infer_json": Parser(_infer_json, "infer_json", "json"),
    "json_bounds": Parser(_json_bounds, "json", "json"),
    "json_reader": Parser(_predict_json, "json", "json"),
    "json_reader, two inputs": Parser(_predict_two, "json", "json"),
    "json_reader, inputs": Parser(_predict_inputs, "json", "json"),
    "json_reader, rows": Parser(_predict_rows, "json", "json"),
    "json_value": Parser(_json_value, "json", "json", objects=MOST_VALUES),
    "request_template": Parser(_request_template, "infer_json", "json"),
    "proto_wire": Parser(_proto_wire, "v2_proto", objects=MOST_VALUES),
    "proto_wire_v1": Parser(_proto_wire_v1, "v1_proto"),
    "tensor_proto": Parser(_tensor_proto, "tfs_proto"),
    "message_skeleton": Parser(_message_skeleton, "v2_proto"),
    "message_skeleton, predict": Parser(_message_skeleton, "tfs_proto"),
    "number_fields": Parser(_number_fields, "grps_proto", objects=MOST_VALUES),
    "grpc_messages": Parser(_grpc_messages, "grpc", reserves=CLAIMED_BYTES),
    "hpack": Parser(_hpack, "hpack", "frames"),
    "http2_frames": Parser(_http2_frames, "frames", "frames"),
    "flatten": Parser(_byte_format, "strings"),
    "remote_batches": Parser(_remote_batches, "remote", "remote", objects=MOST_PARTS),
    "stop_strings": Parser(_stop_strings, "text", "text"),
    "token_records": Parser(_prompt, "strings"),
}


def main(seconds: float) -> None:
    until, rng = time.monotonic() + seconds, random.Random(time.time_ns())
    seen = {
        (name, parser.outcome(data))
        for name, parser in PARSERS.items()
        for data in read_corpus(parser.corpus)
    }
    while time.monotonic() < until:
        for name, parser in PARSERS.items():
            for data in mutations(read_corpus(parser.corpus), parser.pieces, rng, 200):
                outcome = parser.outcome(data)
                if len(data) < 400 and (name, outcome) not in seen:
                    seen.add((name, outcome))
                    keep(parser.corpus, [data])
                    print(name, outcome, data)


if __name__ == "__main__":
    main(float(sys.argv[1]))
