"""A repository with a model for every scheduler, and the check of its answers.

Models of arrays and of requests double their input; sequence models return the sum of a sequence so far;
the decoupled model returns each number twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.backends.models import FLOAT, helper, save, value

DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()) for request in requests]

    def one(self, x):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x * np.float32(2))])
"""
SUMS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x, start, ready, id = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("IN", "START", "READY", "CORRID")
        )
        key = int(id.ravel()[0])
        if ready.ravel()[0]:
            self.sums[key] = x + (0 if start.ravel()[0] else self.sums[key])
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.sums.get(key, x).astype(np.float32))])
"""
TWICE_SAID = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for _ in range(2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x * 2)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
NATIVE = """
class Model:
    def __init__(self, config):
        self.config = config

    def run(self, inputs):
        return {"OUT": inputs["IN"] * 2}
"""
CONTROLS = """
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
"""
TENSORS = """
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
PATIENT = "max_queue_delay_microseconds: 2000"
# What the config of a model says of its queue. Four slots for sequences: of five clients one waits.
QUEUES = {
    "plain": "dynamic_batching { }",
    "delayed": "dynamic_batching { max_queue_delay_microseconds: 2000 }",
    "preferred": "dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 2000 }",
    "levels": "dynamic_batching { priority_levels: 3 default_priority_level: 2 }",
    "bounded": "dynamic_batching { default_queue_policy { max_queue_size: 1000 } }",
    "ordered": "dynamic_batching { preserve_ordering: true }",
    "cached": "dynamic_batching { } response_cache { enable: true }",
    "direct": f"sequence_batching {{ direct {{ }} {CONTROLS} }}",
    "waiting": f"sequence_batching {{ direct {{ {PATIENT} minimum_slot_utilization: 0.75 }} {CONTROLS} }}",
    "oldest": f"sequence_batching {{ oldest {{ max_candidate_sequences: 4 }} {CONTROLS} }}",
    "limited": "dynamic_batching { }",
    "streamed": "model_transaction_policy { decoupled: true }",
}
LIMITED = 'rate_limiter { resources [ { name: "share" count: 1 } ] }'
SEQUENCES = ("direct", "waiting", "oldest")


@dataclass(frozen=True)
class Loaded:
    """One model under load: how its requests queue, and on how many instances they run."""

    queue: str
    instances: int

    @property
    def name(self) -> str:
        return f"{self.queue}_{self.instances}"

    @property
    def sequences(self) -> bool:
        return self.queue in SEQUENCES

    @property
    def streams(self) -> bool:
        return self.queue == "streamed"

    def __str__(self) -> str:
        return self.name


MODELS = {
    "triton": [
        *(
            Loaded(queue, instances)
            for instances in (1, 2)
            for queue in QUEUES
            if (queue, instances) != ("ordered", 1)
        ),
        Loaded("ensemble", 1),
    ],
    "onnx": [Loaded(queue, 2) for queue in ("plain", "preferred", "levels", "ordered")],
    "native": [Loaded(queue, instances) for instances in (1, 2) for queue in ("plain", "delayed", "ragged")],
}


def write_repository(folder: Path, backend: str) -> None:
    """The models of a backend."""
    write = {"triton": _write_triton, "onnx": _write_onnx, "native": _write_native}[backend]
    for model in MODELS[backend]:
        write(folder, model)


def _write_triton(folder: Path, model: Loaded) -> None:
    if model.queue == "ensemble":
        _write_ensemble(folder, model)
        return
    (folder / model.name / "1").mkdir(parents=True)
    source = SUMS if model.sequences else TWICE_SAID if model.streams else DOUBLE
    (folder / model.name / "1" / "model.py").write_text(source)
    group = f"kind: KIND_CPU count: {model.instances} {LIMITED if model.queue == 'limited' else ''}"
    text = f'backend: "python" max_batch_size: 4 {TENSORS} {QUEUES[model.queue]}'
    text += f" instance_group [ {{ {group} }} ]"
    (folder / model.name / "config.pbtxt").write_text(text)


def _write_ensemble(folder: Path, model: Loaded) -> None:
    """Nothing but a step of its own."""
    (folder / model.name / "1").mkdir(parents=True)
    step = 'step [ { model_name: "levels_2" model_version: -1 input_map { key: "IN" value: "IN" }'
    step += ' output_map { key: "OUT" value: "OUT" } } ]'
    text = f'platform: "ensemble" max_batch_size: 4 {TENSORS} ensemble_scheduling {{ {step} }}'
    (folder / model.name / "config.pbtxt").write_text(text)


def _write_onnx(folder: Path, model: Loaded) -> None:
    """Rows in columns behind the schedulers, not slabs."""
    save(
        folder,
        [helper.make_node("Mul", ["IN", "two"], ["OUT"])],
        [value("IN", FLOAT, ["n", 2])],
        [value("OUT", FLOAT, ["n", 2])],
        helper.make_tensor("two", FLOAT, [], [2.0]),
    )
    (folder / "net").rename(folder / model.name)
    text = f'platform: "onnxruntime_onnx" max_batch_size: 4 {TENSORS} {QUEUES[model.queue]}'
    text += f" instance_group [ {{ kind: KIND_CPU count: {model.instances} }} ]"
    (folder / model.name / "config.pbtxt").write_text(text)


def _write_native(folder: Path, model: Loaded) -> None:
    free = model.queue == "ragged"
    tensor = {"dtype": "float32", "shape": [-1 if free else 2]}
    config = {
        "backend": "python",
        "inputs": {"IN": tensor},
        "outputs": {"OUT": tensor},
        "max_batch_size": 4,
        "max_queue_delay_us": 2000 if model.queue == "delayed" else 0,
        "instances": model.instances,
    }
    (folder / model.name / "1").mkdir(parents=True)
    (folder / model.name / "1" / "model.py").write_text(NATIVE)
    (folder / model.name / "model.yaml").write_text(yaml.safe_dump(config))
