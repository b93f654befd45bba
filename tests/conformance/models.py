"""One model in every form there is, twice: as it is, and with its fast path taken away.

    columns   rows of a fixed size, in the columns of a batch
    slabs     rows of any size, each request in a slab
    whole     Triton's Python form, which sees requests
    cached    the same behind the response cache

    pair      columns with two workers
    policy    whole, behind a queue policy of Triton's; there is no fast path

The last two are asked where it matters only (`scenarios.py`).

`NAME-fast` and `NAME-slow` are as long as one another, so that answers differ in nothing but these letters.
What happens to a request is said by its numbers: others come back doubled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FORMS = ("columns", "slabs", "whole", "cached")
LIKE = {"pair": "columns", "policy": "whole"}
PATHS = ("fast", "slow")
WRONG, OWN = -4.0, -5.0  # the run raises; an error in place of the answer
HOLD = -1000.0  # this and what is below runs until `go`
MAX_BATCH, QUEUE_ROWS, QUEUE_BYTES = 8, 16, 1 << 17
POLICY_ROWS, POLICY_US = 2, 60_000_000
WRONG_TEXT, OWN_TEXT = "these numbers are wrong", "this request is wrong"
BASE = f"""
import os, pathlib, time

def meet(folder, x, gone):
    if x.any():
        (folder / "runner").write_text(str(os.getpid()))
        with open(folder / "seen", "a") as seen:
            seen.write(",".join(str(v) for v in x[:, 0]) + "\\n")
    until = time.monotonic() + 60
    while (x <= {HOLD}).any() and not (folder / "go").exists() and time.monotonic() < until:
        time.sleep(0.0005)
        left = [str(row[0]) for row, none in zip(x, gone(), strict=True) if none]
        if left:
            (folder / "gone").write_text(",".join(left))
    if {WRONG} in x:
        raise ValueError("{WRONG_TEXT}")
    return x * 2
"""
NATIVE = f"""{BASE}
import fastserve

class Model:
    def __init__(self, config):
        self.folder = pathlib.Path(config["parameters"]["folder"])

    def run(self, inputs):
        return {{"y": meet(self.folder, inputs["x"], fastserve.cancelled_rows)}}
"""
WHOLE = f"""{BASE}
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        told = json.loads(args["model_config"])["parameters"]
        self.folder = pathlib.Path(told["folder"]["string_value"])

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        y = meet(self.folder, x, lambda: [request.is_cancelled()] * len(x))
        if {OWN} in x:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("{OWN_TEXT}"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])
"""
CONFIG = f"""backend: "python"
max_batch_size: {MAX_BATCH}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
"""
POLICY = f"""default_queue_policy {{
  timeout_action: REJECT default_timeout_microseconds: {POLICY_US} max_queue_size: {POLICY_ROWS}
}}"""


def write_all(folder: Path) -> None:
    for form in (*FORMS, *LIKE):
        for path in PATHS:
            write(folder / f"{form}-{path}", form)


def write(model: Path, form: str) -> None:
    (model / "1").mkdir(parents=True)
    if LIKE.get(form, form) in ("columns", "slabs"):
        (model / "1" / "model.py").write_text(NATIVE)
        (model / "model.yaml").write_text(yaml.safe_dump(native_config(model, form)))
        return
    told = [CONFIG, f'parameters {{ key: "folder" value {{ string_value: "{model}" }} }}']
    told.append(f"dynamic_batching {{ {POLICY if form == 'policy' else ''} }}")
    if form == "cached":
        told.append("response_cache { enable: true }")
    (model / "1" / "model.py").write_text(WHOLE)
    (model / "config.pbtxt").write_text("\n".join([*told, ""]))


def native_config(model: Path, form: str) -> dict[str, Any]:
    tensor = {"dtype": "float32", "shape": [-1 if form == "slabs" else 2]}
    config: dict[str, Any] = {"backend": "python", "max_batch_size": MAX_BATCH, "warmup": "off"}
    config |= {"inputs": {"x": tensor}, "outputs": {"y": tensor}, "parameters": {"folder": str(model)}}
    if form == "slabs":
        config["max_queue_bytes"] = QUEUE_BYTES
    return config | {"instances": 2 if form == "pair" else 1}
