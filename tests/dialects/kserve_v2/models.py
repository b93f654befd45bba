"""The models the captured answers were given by: their configurations, and their maths in numpy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastserve.errors import Kind, ServeError
from fastserve.request import InferRequest

Arrays = dict[str, Any]
Run = Callable[[Arrays, InferRequest], Iterator[Arrays]]


@dataclass(frozen=True)
class ProbeModel:
    """A config.pbtxt, what the model computes, and its versions. `run` yields one response or more."""

    config: str
    run: Run
    versions: tuple[int, ...] = (1,)
    labels: str = ""


def tensors(side: str, **dims: str) -> str:
    """`side` input or output; NAME="TYPE [dims] more"."""
    entries = []
    for name, text in dims.items():
        kind, _, rest = text.partition(" ")
        size, _, more = rest.partition("]")
        entries.append(f'{{ name: "{name}" data_type: TYPE_{kind} dims: {size}] {more} }}')
    return f"{side} [ {', '.join(entries)} ]\n"


def config(rows: int, body: str, more: str = "") -> str:
    head = f'backend: "python"\nmax_batch_size: {rows}\n'
    return head + body + "instance_group [ { kind: KIND_CPU } ]\n" + more


def same(inputs: Arrays, request: InferRequest) -> Iterator[Arrays]:
    yield {"OUT": inputs["IN"]}


def add_sub(inputs: Arrays, request: InferRequest) -> Iterator[Arrays]:
    a, b = inputs["INPUT0"], inputs["INPUT1"]
    yield {"OUTPUT0": a + b, "OUTPUT1": a - b}


def add_optional(inputs: Arrays, request: InferRequest) -> Iterator[Arrays]:
    if "A" not in inputs:
        raise ServeError(Kind.INTERNAL, "Failed to process the request(s) for model 'opt_0_0'")
    yield {"OUT": inputs["A"] + inputs.get("B", np.float32(0))}


def show_params(inputs: Arrays, request: InferRequest) -> Iterator[Arrays]:
    seen = {
        "params": request.parameters,
        "id": request.request_id,
        "corr": request.sequence_id,
        "flags": request.sequence_start + 2 * request.sequence_end,
        "timeout": request.timeout_us,
        "inp": repr(inputs["IN"].tolist()),
    }
    yield {"OUT": np.array([json.dumps(seen, sort_keys=True).encode()], dtype=object)}


KINDS = (
    Kind.UNKNOWN, Kind.INTERNAL, Kind.NOT_FOUND, Kind.INVALID_ARGUMENT, Kind.UNAVAILABLE,
    Kind.UNIMPLEMENTED, Kind.ALREADY_EXISTS, Kind.CANCELLED,
)  # fmt: skip


def boom(inputs: Arrays, request: InferRequest) -> Iterator[Arrays]:
    number = int(inputs["IN"][0])
    if number == 99:
        raise ServeError(Kind.INTERNAL, "Failed to process the request(s) for model 'boom_0_0'")
    if number:
        raise ServeError(KINDS[number - 1], f"model says no {number}")
    yield {"OUT": inputs["IN"]}


def repeat(inputs: Arrays, request: InferRequest) -> Iterator[Arrays]:
    for number in inputs["IN"]:
        if number == -1:
            raise ServeError(Kind.UNKNOWN, "bad value")
        yield {"OUT": np.array([number], np.int32)}


def talk(inputs: Arrays, request: InferRequest) -> Iterator[Arrays]:
    if "text_input" not in inputs:
        raise ServeError(Kind.UNKNOWN, "there is no text_input")
    text = inputs["text_input"].flatten()[0].decode()
    streams = bool(inputs["stream"][0]) if "stream" in inputs else False
    count = int(inputs["max_tokens"][0]) if "max_tokens" in inputs else 3
    if "FAIL" in text:
        raise ServeError(Kind.UNKNOWN, "llm failed")
    words = [f"{text}{n}" for n in range(count)]
    for said in words if streams else [" ".join(words)]:
        yield {
            "text_output": np.array([said.encode()], dtype=object),
            "ntok": np.array([count], np.int32),
            "vec": np.array([1.5, 2.5], np.float32),
        }


class Sequences:
    """What the server's sequence batcher and the model `seq` do together."""

    def __init__(self) -> None:
        self._sums: dict[int | str, int] = {}

    def __call__(self, inputs: Arrays, request: InferRequest) -> Iterator[Arrays]:
        which = request.sequence_id
        if not which:
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                "inference request to model 'seq' must specify a non-zero or non-empty correlation ID",
            )
        if inputs["IN"].shape[0] != 1:
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                "inference request to model 'seq' must specify batch-size 1 due to requirements of "
                "sequence batcher",
            )
        if request.sequence_start:
            self._sums[which] = 0
        if which not in self._sums:
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                f"inference request for sequence {which} to model 'seq' must specify the START flag on the "
                "first request of the sequence",
            )
        self._sums[which] += int(inputs["IN"][0, 0])
        total = self._sums[which]
        if request.sequence_end:
            del self._sums[which]
        yield {"OUT": np.array([[total]], np.int32)}


def double(inputs: Arrays, request: InferRequest) -> Iterator[Arrays]:
    yield {"Y": inputs["X"] + inputs["X"]}


PAIR = tensors("input", INPUT0="INT32 [16]", INPUT1="INT32 [16]")
SUMS = tensors("output", OUTPUT0="INT32 [16]", OUTPUT1="INT32 [16]")
LABELLED = tensors("output", OUTPUT0='INT32 [16] label_filename: "l.txt"', OUTPUT1="INT32 [16]")
ONE = tensors("input", IN="INT32 [1]") + tensors("output", OUT="INT32 [1]")
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
SEQUENCE = """sequence_batching { max_sequence_idle_microseconds: 2000000
 direct { }
 control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [0,1] } ] },
  { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [0,1] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [0,1] } ] },
  { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }
"""
TALK = tensors(
    "input",
    text_input="STRING [1]",
    stream="BOOL [1] optional: true",
    max_tokens="INT32 [1] optional: true",
) + tensors("output", text_output="STRING [-1]", ntok="INT32 [1]", vec="FP32 [-1]")
ENSEMBLE = """platform: "ensemble"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 16 ] } ]
ensemble_scheduling { step [ { model_name: "simple" model_version: -1
 input_map { key: "INPUT0" value: "X" } input_map { key: "INPUT1" value: "X" }
 output_map { key: "OUTPUT0" value: "Y" } } ] }
"""
TYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "STRING", "BF16",
)  # fmt: skip
LABELS = "".join(f"lab{number}\n" for number in range(10))


def identity(kind: str) -> ProbeModel:
    sides = tensors("input", IN=f"{kind} [-1]") + tensors("output", OUT=f"{kind} [-1]")
    return ProbeModel(config(0, sides), same)


def probe_models() -> dict[str, ProbeModel]:
    """Every model of the probe repository that loads; `bad` does not."""
    optional = tensors("input", A="FP32 [2]", B="FP32 [2] optional: true") + tensors("output", OUT="FP32 [2]")
    text = tensors("input", IN="STRING [1]") + tensors("output", OUT="STRING [1]")
    many = tensors("input", IN="INT32 [-1]") + tensors("output", OUT="INT32 [1]")
    versions = "version_policy: { specific { versions: [1,3] } }\n"
    return {
        **{f"id_{kind.lower()}": identity(kind) for kind in TYPES},
        "simple": ProbeModel(config(8, PAIR + LABELLED), add_sub, labels=LABELS),
        "multi_ver": ProbeModel(config(8, PAIR + SUMS, versions), add_sub, (1, 3)),
        "cached": ProbeModel(config(8, PAIR + SUMS, "response_cache { enable: true }\n"), add_sub),
        "opt": ProbeModel(config(0, optional), add_optional),
        "params": ProbeModel(config(0, text), show_params),
        "boom": ProbeModel(config(0, ONE), boom),
        "repeat": ProbeModel(config(0, many, DECOUPLED), repeat),
        "llm": ProbeModel(config(0, TALK, DECOUPLED), talk),
        "seq": ProbeModel(config(2, SEQUENCE + ONE), Sequences()),
        "ens": ProbeModel(ENSEMBLE, double),
    }
