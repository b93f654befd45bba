"""The model repository the captured answers were given from, written anew: Triton Python-backend models.

`write_probe_models` fills a folder: same names, configurations and behaviour, down to `bad`, which no
server can load.
"""

from __future__ import annotations

from pathlib import Path

TYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "STRING", "BF16",
)  # fmt: skip
LABELS = "".join(f"lab{number}\n" for number in range(10))


def tensors(side: str, **dims: str) -> str:
    """`side` input or output; NAME="TYPE [dims] more"."""
    entries = []
    for name, text in dims.items():
        kind, _, rest = text.partition(" ")
        size, _, more = rest.partition("]")
        entries.append(f'{{ name: "{name}" data_type: TYPE_{kind} dims: {size}] {more} }}')
    return f"{side} [ {', '.join(entries)} ]\n"


def config(rows: int, body: str, more: str = "", backend: str = "python") -> str:
    head = f'backend: "{backend}"\nmax_batch_size: {rows}\n'
    return head + body + "instance_group [ { kind: KIND_CPU } ]\n" + more


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
QUEUE = """dynamic_batching { priority_levels: 2 default_priority_level: 2
 default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 20000000
  allow_timeout_override: true max_queue_size: 2 } }
"""
ENSEMBLE = """platform: "ensemble"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 16 ] } ]
ensemble_scheduling { step [ { model_name: "simple" model_version: -1
 input_map { key: "INPUT0" value: "X" } input_map { key: "INPUT1" value: "X" }
 output_map { key: "OUTPUT0" value: "Y" } } ] }
"""
SAID = {"stream": "BOOL [1] optional: true", "max_tokens": "INT32 [1] optional: true"}
TALK = tensors("input", text_input="STRING [1]", **SAID) + tensors(
    "output", text_output="STRING [-1]", ntok="INT32 [1]", vec="FP32 [-1]"
)
SAMPLED = {
    "stream": "BOOL [1] optional: true",
    "sampling_parameters": "STRING [1] optional: true",
    "exclude_input_in_output": "BOOL [1] optional: true",
}

# What every source begins with; `one` answers one request.
HEAD = """
import json, time
import numpy as np
import triton_python_backend_utils as pb_utils

def array(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()

def respond(**outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

"""
EACH = """
    def execute(self, requests):
        return [self.one(request) for request in requests]
"""
SAME = """
    def one(self, request):
        return respond(OUT=array(request, "IN"))
"""
SAME_BF16 = """
    def one(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        same = pb_utils.Tensor.from_dlpack("OUT", tensor.to_dlpack())
        return pb_utils.InferenceResponse([same])
"""
ADD_SUB = """
    def one(self, request):
        a, b = array(request, "INPUT0"), array(request, "INPUT1")
        given = {"OUTPUT0": a + b, "OUTPUT1": a - b}
        return respond(**{name: given[name] for name in given if name in request.requested_output_names()})
"""
ADD_OPTIONAL = """
    def one(self, request):
        b = array(request, "B")
        return respond(OUT=array(request, "A") + (0 if b is None else b))
"""
SHOW_PARAMETERS = """
    def one(self, request):
        seen = {
            "params": json.loads(request.parameters()),
            "id": request.request_id(),
            "corr": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "inp": repr(array(request, "IN").tolist()),
        }
        return respond(OUT=np.array([json.dumps(seen, sort_keys=True)], dtype=object))
"""
BOOM = """
    def one(self, request):
        number = int(array(request, "IN")[0])
        if number == 99:
            raise ValueError("kaboom")
        if number == 0:
            return respond(OUT=array(request, "IN"))
        names = ("UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS "
                 "CANCELLED").split()
        code = getattr(pb_utils.TritonError, names[number - 1])
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"model says no {number}", code))
"""
MANY = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for response in self.all(request):
                sender.send(response)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
REPEAT = """
    def all(self, request):
        for number in array(request, "IN"):
            if number == -1:
                yield pb_utils.InferenceResponse(error=pb_utils.TritonError("bad value"))
            else:
                yield respond(OUT=np.array([number], np.int32))
"""
SPEAK = """
    def all(self, request):
        text = array(request, "text_input").ravel()[0].decode()
        stream, most = array(request, "stream"), array(request, "max_tokens")
        count = 3 if most is None else int(most.ravel()[0])
        if "FAIL" in text:
            yield pb_utils.InferenceResponse(error=pb_utils.TritonError("llm failed"))
            return
        words = [f"{text}{number}" for number in range(count)]
        for said in words if stream is not None and stream.ravel()[0] else [" ".join(words)]:
            spoken = np.array([said.encode()], dtype=object)
            yield respond(text_output=spoken, **self.more(count))
"""
COUNTED = """
    def more(self, count):
        return {"ntok": np.array([count], np.int32), "vec": np.array([1.5, 2.5], np.float32)}
"""
BARE = """
    def more(self, count):
        return {}
"""
SUM_UP = """
    def one(self, request):
        number, start, ready, who = (
            int(array(request, name).ravel()[0]) for name in ("IN", "START", "READY", "CORRID")
        )
        if ready:
            self.sums[who] = number + (0 if start else self.sums.get(who, 0))
        return respond(OUT=np.array([[self.sums[who] if ready else 0]], np.int32))
"""
SLEEP = """
    def one(self, request):
        milliseconds = array(request, "IN")
        time.sleep(milliseconds.ravel()[0] / 1000)
        return respond(OUT=milliseconds)
"""


def write_probe_models(folder: Path) -> None:
    """Every model of the captured server, and the labelled one of a gRPC case."""
    for kind in TYPES:
        sides = tensors("input", IN=f"{kind} [-1]") + tensors("output", OUT=f"{kind} [-1]")
        put(folder, f"id_{kind.lower()}", config(0, sides), EACH + (SAME_BF16 if kind == "BF16" else SAME))
    put(folder, "simple", config(8, PAIR + LABELLED), EACH + ADD_SUB, labels=LABELS)
    versions = "version_policy: { specific { versions: [1,3] } }\n"
    put(folder, "multi_ver", config(8, PAIR + SUMS, versions), EACH + ADD_SUB, (1, 2, 3))
    put(folder, "cached", config(8, PAIR + SUMS, "response_cache { enable: true }\n"), EACH + ADD_SUB)
    square = {"IN": "FP32 [4] reshape { shape: [2,2] }"}, {"OUT": "FP32 [4] reshape { shape: [2,2] }"}
    put(
        folder,
        "reshape",
        config(4, tensors("input", **square[0]) + tensors("output", **square[1])),
        EACH + SAME,
    )
    optional = tensors("input", A="FP32 [2]", B="FP32 [2] optional: true") + tensors("output", OUT="FP32 [2]")
    put(folder, "opt", config(0, optional), EACH + ADD_OPTIONAL)
    text = tensors("input", IN="STRING [1]") + tensors("output", OUT="STRING [1]")
    put(folder, "params", config(0, text), EACH + SHOW_PARAMETERS)
    put(folder, "boom", config(0, ONE), EACH + BOOM)
    many = tensors("input", IN="INT32 [-1]") + tensors("output", OUT="INT32 [1]")
    put(folder, "repeat", config(0, many, DECOUPLED), MANY + REPEAT)
    put(folder, "llm", config(0, TALK, DECOUPLED), MANY + SPEAK + COUNTED)
    sampled = tensors("input", text_input="STRING [1]", **SAMPLED) + tensors(
        "output", text_output="STRING [-1]"
    )
    put(folder, "vllm_like", config(0, sampled, DECOUPLED), MANY + SPEAK + BARE)
    put(folder, "seq", config(2, SEQUENCE + ONE), EACH + SUM_UP)
    put(folder, "slow", config(1, QUEUE + ONE), EACH + SLEEP)
    put(folder, "ens", ENSEMBLE)
    put(folder, "bad", config(0, ONE, backend="nosuchbackend"), EACH + SAME)
    animals = tensors("input", IN="FP32 [3]") + tensors("output", OUT='FP32 [3] label_filename: "l.txt"')
    put(folder, "identity_fp32", config(8, animals), EACH + SAME, labels="cat\ndog\nfox\n")


def put(
    folder: Path, name: str, text: str, source: str = "", versions: tuple[int, ...] = (1,), labels: str = ""
) -> None:
    """Write one model; an ensemble has no source."""
    for number in versions:
        (folder / name / str(number)).mkdir(parents=True)
        if source:
            (folder / name / str(number) / "model.py").write_text(HEAD + source)
    (folder / name / "config.pbtxt").write_text(text)
    if labels:
        (folder / name / "l.txt").write_text(labels)
