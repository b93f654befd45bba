"""One model in every form there is, twice: as it is, and with its fast path taken away.

    columns   rows of a fixed size, in the columns of a batch
    slabs     rows of any size, each request in a slab
    whole     Triton's Python form, which sees requests
    cached    the same behind the response cache

`NAME-fast` and `NAME-slow` are as long as one another, so that answers differ in nothing but these letters.
What happens to a request is said by its numbers: others come back doubled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FORMS = ("columns", "slabs", "whole", "cached")
PATHS = ("fast", "slow")
HOLD, WRONG, OWN = -3.0, -4.0, -5.0  # runs until `go`; the run raises; an error in place of the answer
MAX_BATCH, QUEUE_ROWS = 8, 32
WRONG_TEXT, OWN_TEXT = "these numbers are wrong", "this request is wrong"
BASE = f"""
import pathlib, time

def meet(folder, x):
    if x.any():
        with open(folder / "seen", "a") as seen:
            seen.write(",".join(str(v) for v in x[:, 0]) + "\\n")
    until = time.monotonic() + 20
    while {HOLD} in x and not (folder / "go").exists() and time.monotonic() < until:
        time.sleep(0.0005)
    if {WRONG} in x:
        raise ValueError("{WRONG_TEXT}")
    return x * 2
"""
NATIVE = f"""{BASE}
class Model:
    def __init__(self, config):
        self.folder = pathlib.Path(config["parameters"]["folder"])

    def run(self, inputs):
        return {{"y": meet(self.folder, inputs["x"])}}
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
        y = meet(self.folder, x)
        if {OWN} in x:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("{OWN_TEXT}"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])
"""
CONFIG = f"""backend: "python"
max_batch_size: {MAX_BATCH}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
dynamic_batching {{ }}
"""


def write_all(folder: Path) -> None:
    for form in FORMS:
        for path in PATHS:
            write(folder, form, f"{form}-{path}")


def write(folder: Path, form: str, name: str) -> None:
    model = folder / name
    (model / "1").mkdir(parents=True)
    if form in ("columns", "slabs"):
        tensor = {"dtype": "float32", "shape": [2 if form == "columns" else -1]}
        config: dict[str, Any] = {"backend": "python", "max_batch_size": MAX_BATCH, "warmup": "off"}
        config |= {"inputs": {"x": tensor}, "outputs": {"y": tensor}, "parameters": {"folder": str(model)}}
        (model / "1" / "model.py").write_text(NATIVE)
        (model / "model.yaml").write_text(yaml.safe_dump(config))
        return
    told = f'parameters {{ key: "folder" value {{ string_value: "{model}" }} }}\n'
    cache = "response_cache { enable: true }\n" if form == "cached" else ""
    (model / "1" / "model.py").write_text(WHOLE)
    (model / "config.pbtxt").write_text(CONFIG + told + cache)
