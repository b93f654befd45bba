"""The repository the official clients are run against: native models, and models as Triton users write them.

sums      native         INPUT0 + INPUT1, INPUT0 - INPUT1        simple   the same for Triton, with labels
kinds     native         an input of every type comes back       types    the same for Triton, all optional
told      Triton         what its request says of itself         digits   ONNX, its tensors read from the file
repeat    decoupled      a response for each number              chat     decoupled, texts, for generate
total     sequences      the sum of what a sequence sent         double   an ensemble over `simple`
held      Triton         waits for a file, or for its caller to leave
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


KINDS = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16",
    "FP32": "float32", "FP64": "float64", "BYTES": "bytes", "BF16": "bfloat16",
}  # fmt: skip

SUMS = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        a, b = inputs["INPUT0"], inputs["INPUT1"]
        return {"OUTPUT0": a + b, "OUTPUT1": a - b}
"""
SAME = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {name.replace("IN_", "OUT_"): array for name, array in inputs.items()}
"""
SIMPLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a, b = (pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in ("INPUT0", "INPUT1"))
        made = {"OUTPUT0": a + b, "OUTPUT1": a - b}
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, made[n]) for n in made if n in wanted])
"""
TYPES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.turn(t) for t in r.inputs()]) for r in requests]

    def turn(self, tensor):
        name = tensor.name().replace("IN_", "OUT_")
        if name == "OUT_BYTES":
            return pb_utils.Tensor(name, tensor.as_numpy())
        return pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())
"""
TOLD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.tell(request) for request in requests]

    def tell(self, request):
        said = {
            "id": request.request_id(), "sequence": request.correlation_id(), "flags": request.flags(),
            "timeout": request.timeout(), "priority": request.priority(),
            "parameters": json.loads(request.parameters()),
        }
        text = np.array([json.dumps(said)], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)], parameters={"told": True})
"""
REPEAT = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().tolist():
                self.send(request, sender, number)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, request, sender, number):
        if number == -1:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("a bad value")))
        elif number == -2:
            end = time.monotonic() + 60
            while not request.is_cancelled() and time.monotonic() < end:
                time.sleep(0.001)
        else:
            out = pb_utils.Tensor("OUT", np.array([number], np.int32))
            sender.send(pb_utils.InferenceResponse([out]))
"""
CHAT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0]
            text = text.decode(errors="replace")
            many = pb_utils.get_input_tensor_by_name(request, "stream")
            words = text.split() if many is not None and many.as_numpy().ravel()[0] else [text]
            for word in words:
                out = np.array([word.upper().encode()], dtype=object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", out)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TOTAL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.add(request) for request in requests]

    def add(self, request):
        names = ("IN", "START", "READY", "CORRID")
        given = (pb_utils.get_input_tensor_by_name(request, name) for name in names)
        number, start, ready, sequence = (tensor.as_numpy().ravel()[0] for tensor in given)
        if ready:
            self.sums[sequence] = int(number) + (0 if start else self.sums[sequence])
        out = pb_utils.Tensor("OUT", np.array([[self.sums.get(sequence, 0)]], np.int32))
        return pb_utils.InferenceResponse([out])
"""
HELD = """
import pathlib
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        end = time.monotonic() + 60
        if tensor.as_numpy().any():
            (self.folder / "began").touch()
        while tensor.as_numpy().any() and not (self.folder / "go").exists() and time.monotonic() < end:
            if request.is_cancelled():
                (self.folder / "left").touch()
                break
            time.sleep(0.001)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())])
"""

PAIR = """max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
        { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] label_filename: "labels.txt" },
         { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
dynamic_batching { }
"""
NUMBERS = """input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ %s ] } ]
"""
TEXT = """input [ { name: "IN" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
TEXTS = """input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
SEQUENCES = """max_batch_size: 2
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 5000000 direct { } control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
  { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }
"""
ENSEMBLE = """platform: "ensemble"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 16 ] } ]
ensemble_scheduling { step [ { model_name: "simple" model_version: -1
  input_map { key: "INPUT0" value: "X" } input_map { key: "INPUT1" value: "X" }
  output_map { key: "OUTPUT0" value: "Y" } } ] }
"""


def write_triton(folder: Path, name: str, source: str, config: str, labels: str = "") -> None:
    """A model of Triton's form; an empty `source` for one that has no code."""
    (folder / name / "1").mkdir(parents=True)
    backend = 'backend: "python"\n' if source else ""
    (folder / name / "config.pbtxt").write_text(backend + config)
    if source:
        (folder / name / "1" / "model.py").write_text(source)
    if labels:
        (folder / name / "labels.txt").write_text(labels)


def write_native(folder: Path, name: str, source: str, **config: object) -> None:
    """A model of this server's own form."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(source)
    (folder / name / "model.yaml").write_text(yaml.safe_dump({"backend": "python", **config}))


def write_sums(folder: Path) -> None:
    """`sums` and `simple`."""
    row = {"dtype": "int32", "shape": [16]}
    sides = {side: {f"{side.upper()[:-1]}{n}": row for n in (0, 1)} for side in ("inputs", "outputs")}
    write_native(folder, "sums", SUMS, max_batch_size=8, **sides)
    write_triton(folder, "simple", SIMPLE, PAIR, "".join(f"label{n}\n" for n in range(10)))


def write_kinds(folder: Path) -> None:
    """`kinds` and `types`."""
    sides = {
        side: {f"{short}_{kind}": {"dtype": dtype, "shape": [-1]} for kind, dtype in KINDS.items()}
        for side, short in (("inputs", "IN"), ("outputs", "OUT"))
    }
    write_native(folder, "kinds", SAME, max_batch_size=0, **sides)
    config = "max_batch_size: 0\n"
    for kind in KINDS:
        text = f"data_type: TYPE_{'STRING' if kind == 'BYTES' else kind} dims: [ -1 ]"
        config += f'input {{ name: "IN_{kind}" {text} optional: true }}\n'
        config += f'output {{ name: "OUT_{kind}" {text} }}\n'
    write_triton(folder, "types", TYPES, config)


def write_streams(folder: Path) -> None:
    """`repeat`, `chat` and `held`."""
    write_triton(folder, "repeat", REPEAT, NUMBERS % 1 + DECOUPLED)
    write_triton(folder, "chat", CHAT, TEXTS + DECOUPLED)
    write_triton(folder, "held", HELD, NUMBERS % -1)


def write_digits(folder: Path) -> None:
    """The example's ONNX file under a config that leaves everything out."""
    (folder / "digits" / "1").mkdir(parents=True)
    source = EXAMPLES / "onnx" / "digits" / "1" / "model.onnx"
    shutil.copy(source, folder / "digits" / "1" / "model.onnx")
    (folder / "digits" / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\n')


def write_all(folder: Path) -> None:
    """Every model above."""
    write_sums(folder)
    write_kinds(folder)
    write_streams(folder)
    write_digits(folder)
    write_triton(folder, "told", TOLD, TEXT)
    write_triton(folder, "total", TOTAL, SEQUENCES)
    write_triton(folder, "double", "", ENSEMBLE)
