"""Models in Triton's own form for whole servers under test: config.pbtxt and a Python backend's model.py.

What they compute is simple enough to be written down beside each assertion. `write` puts chosen ones into a
folder; HELD waits for a file, so that a test decides when a worker is free again.
"""

from __future__ import annotations

from pathlib import Path

SUM_AND_DIFFERENCE = """
import numpy as np
import triton_python_backend_utils as utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        first, second = (utils.get_input_tensor_by_name(request, n).as_numpy() for n in ("INPUT0", "INPUT1"))
        found = {"OUTPUT0": self.add(first, second), "OUTPUT1": self.subtract(first, second)}
        wanted = request.requested_output_names()
        return utils.InferenceResponse([utils.Tensor(n, a) for n, a in found.items() if n in wanted])

    def add(self, first, second):
        return first + second

    def subtract(self, first, second):
        return first - second
"""
# Numbers written as decimal text.
OF_STRINGS = (
    SUM_AND_DIFFERENCE
    + """
    def add(self, first, second):
        return self.write(first.astype(np.int64) + second.astype(np.int64))

    def subtract(self, first, second):
        return self.write(first.astype(np.int64) - second.astype(np.int64))

    def write(self, numbers):
        return np.array([str(n).encode() for n in numbers.ravel()], np.object_).reshape(numbers.shape)
"""
)
ECHO = """
import triton_python_backend_utils as utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(utils.get_input_tensor_by_name(request, "IN").as_numpy()) for request in requests]

    def answer(self, value):
        return utils.InferenceResponse([utils.Tensor("OUT", value)])
"""
# Every input comes back under its name with _OUT behind it.
ECHO_ALL = """
import triton_python_backend_utils as utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.inputs()) for request in requests]

    def answer(self, inputs):
        return utils.InferenceResponse([utils.Tensor(t.name() + "_OUT", t.as_numpy()) for t in inputs])
"""
REFUSE = """
import triton_python_backend_utils as utils

class TritonPythonModel:
    def execute(self, requests):
        error = utils.TritonError("the model will not", utils.TritonError.UNAVAILABLE)
        return [utils.InferenceResponse(error=error) for _ in requests]
"""
# Runs until the file `go` stands in the model's folder, unless it is sent 0.
HELD = """
import os, time
import triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, args):
        self.go = os.path.join(args["model_repository"], "go")

    def execute(self, requests):
        return [self.answer(utils.get_input_tensor_by_name(request, "IN").as_numpy()) for request in requests]

    def answer(self, value):
        with open(self.go + ".running", "a") as file:
            print(value.ravel()[0], file=file)
        until = time.monotonic() + 60
        while value.any() and not os.path.exists(self.go) and time.monotonic() < until:
            time.sleep(0.001)
        return utils.InferenceResponse([utils.Tensor("OUT", value)])
"""
# The sum of a sequence so far, and what the scheduler said of this step.
RUNNING_SUM = """
import numpy as np
import triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        names = ("START", "READY", "END", "WHO", "INPUT")
        tensors = [utils.get_input_tensor_by_name(request, name).as_numpy() for name in names]
        start, ready, end, who, value = (int(one.ravel()[0]) for one in tensors)
        if start:
            self.sums[who] = 0
        if ready:  # else a slot without a request
            self.sums[who] += value
        total = self.sums.pop(who) if end else self.sums.get(who, 0)
        flags = start | end << 1
        return utils.InferenceResponse([
            utils.Tensor("OUTPUT", np.array([[total]], np.int32)),
            utils.Tensor("SEEN", np.array([[flags]], np.int32)),
        ])
"""


def tensor(name: str, dtype: str, dims: str, more: str = "") -> str:
    return f'{{ name: "{name}" data_type: TYPE_{dtype} dims: [ {dims} ] {more} }}'


def pair(dtype: str, dims: str) -> str:
    inputs = f"input [ {tensor('INPUT0', dtype, dims)}, {tensor('INPUT1', dtype, dims)} ]"
    return f"{inputs} output [ {tensor('OUTPUT0', dtype, dims)}, {tensor('OUTPUT1', dtype, dims)} ]"


def single(dtype: str, dims: str, more: str = "", output: str = "") -> str:
    given = tensor("OUT", dtype, dims, f"{more} {output}")
    return f"input [ {tensor('IN', dtype, dims, more)} ] output [ {given} ]"


CONTROL = 'control_input { name: "%s" control { kind: CONTROL_SEQUENCE_%s int32_false_true: [ 0, 1 ] } }'
CONTROLS = " ".join(CONTROL % (name, name) for name in ("START", "READY", "END"))
WHO = 'control_input { name: "WHO" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }'
SEQUENCE = (
    f"max_batch_size: %d input [ {tensor('INPUT', 'INT32', '1')} ] "
    f"output [ {tensor('OUTPUT', 'INT32', '1')}, {tensor('SEEN', 'INT32', '1')} ] "
    f"sequence_batching {{ max_sequence_idle_microseconds: 5000000 %s {CONTROLS} {WHO} }}"
)
POLICY = (
    "max_batch_size: 1 dynamic_batching {{ priority_levels: 2 default_priority_level: 2 "
    "default_queue_policy {{ timeout_action: {action} default_timeout_microseconds: {timeout} "
    "allow_timeout_override: {override} max_queue_size: {size} }} }} "
)
INTEGERS = [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]
FIXED = [*INTEGERS, "BOOL", "FP16", "FP32", "FP64"]

# name -> (config.pbtxt, model.py)
MODELS: dict[str, tuple[str, str]] = {
    "simple": ("max_batch_size: 8 " + pair("INT32", "16"), SUM_AND_DIFFERENCE),
    "simple_string": ("max_batch_size: 8 " + pair("STRING", "16"), OF_STRINGS),
    "unbatched": (pair("FP32", "-1, 2"), SUM_AND_DIFFERENCE),
    "labelled": ("max_batch_size: 4 " + single("FP32", "3", "", 'label_filename: "words.txt"'), ECHO),
    "reshaped": ("max_batch_size: 4 " + single("FP32", "4", "reshape { shape: [ 2, 2 ] }"), ECHO),
    "free": ("max_batch_size: 4 " + single("FP32", "-1"), ECHO),
    "text": ("max_batch_size: 4 " + single("STRING", "-1"), ECHO),
    "later": (single("BF16", "2"), ECHO.replace("Tensor(", "Tensor.from_dlpack(").replace(".as_numpy()", "")),
    "refusing": (single("INT32", "1"), REFUSE),
    "held": ("max_batch_size: 1 " + single("INT32", "1"), HELD),
    "queued": (
        POLICY.format(action="REJECT", timeout=20_000_000, override="true", size=2) + single("INT32", "1"),
        HELD,
    ),
    "strict": (
        POLICY.format(action="REJECT", timeout=300_000, override="false", size=8) + single("INT32", "1"),
        HELD,
    ),
    "brief": (
        POLICY.format(action="REJECT", timeout=300_000, override="true", size=8) + single("INT32", "1"),
        HELD,
    ),
    "patient": (
        POLICY.format(action="DELAY", timeout=10_000, override="true", size=8) + single("INT32", "1"),
        HELD,
    ),
    "seq": (SEQUENCE % (2, "direct { }"), RUNNING_SUM),
    "oldest": (SEQUENCE % (2, "oldest { max_candidate_sequences: 4 }"), RUNNING_SUM),
    "bad": (single("INT32", "1"), "raise RuntimeError('no weights')"),
    "every": (
        f"input [ {', '.join(tensor(name, name, '-1') for name in FIXED)} ] "
        f"output [ {', '.join(tensor(name + '_OUT', name, '-1') for name in FIXED)} ]",
        ECHO_ALL,
    ),
}


def write(folder: Path, *names: str) -> None:
    """Put these models into a repository."""
    for name in names:
        config, source = MODELS[name]
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(
            f'backend: "python" instance_group [ {{ kind: KIND_CPU }} ] {config}\n'
        )
        (folder / name / "1" / "model.py").write_text(source)
        if "words.txt" in config:
            (folder / name / "words.txt").write_text("zero\none\n")


def release(folder: Path, name: str) -> None:
    """Let HELD go on."""
    (folder / name / "go").touch()


def is_running(folder: Path, name: str) -> bool:
    """Whether HELD has begun a request."""
    return (folder / name / "go.running").exists()


def ran(folder: Path, name: str) -> list[int]:
    """Return the requests that HELD has begun, by their numbers, in order."""
    return [int(line) for line in (folder / name / "go.running").read_text().split()]


def hold(folder: Path, name: str) -> None:
    """Let HELD wait again."""
    for mark in ("go", "go.running"):
        (folder / name / mark).unlink(missing_ok=True)
