"""Where the time of a request goes, by its stages, behind every scheduler and over a device; what the metrics
page says of staging buffers and of memory that ran out."""

from __future__ import annotations

import json
import re
import urllib.request
from itertools import product
from pathlib import Path

import pytest
import yaml

from tests.running import WITH_SIMULATED_DEVICES, Running, until
from tests.server.scheduling.load_models import QUEUES, SEQUENCES, write_repository

STAGES = ("queue", "copy_in", "compute", "copy_out", "encode")
TWICE = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        return {"OUT": inputs["IN"] * 2}
"""
FULL = [{"stage": "compute", "what": "out of memory", "every": True, "larger": 1}]
BEHIND = [queue for queue in QUEUES if queue != "streamed"]
KINDS = {"pinned": {}, "staged": {"pins": False}, "full": {"faults": FULL}}
FORMS = {"columns": 2, "slabs": -1}


def write_device(models: Path, name: str, script: dict, shape: int) -> None:
    folder = models / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(TWICE)
    tensor = {"dtype": "float32", "shape": [shape]}
    config = {
        "backend": "python",
        "device_tensors": True,
        "devices": "simulated",
        "inputs": {"IN": tensor},
        "outputs": {"OUT": tensor},
        "max_batch_size": 4,
        "warmup": "off",
        "shared_worker": name.partition("_")[0],
        "env": {"FASTSERVE_SIMULATED_DEVICE": json.dumps(script)},
    }
    (models / name / "model.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("stages")
    models = root / "models"
    write_repository(models, "triton")
    for (form, shape), (kind, script) in product(FORMS.items(), KINDS.items()):
        write_device(models, f"{kind}_{form}", script, shape)
    names = [f"{queue}_2" for queue in BEHIND] + [f"{kind}_{form}" for kind in KINDS for form in FORMS]
    chosen = [word for name in names for word in ("--load-model", name)]
    options = ("--model-control", "explicit", *chosen)
    with Running(models, root / "log", *options, module=WITH_SIMULATED_DEVICES) as running:
        yield running


def infer(served: Running, model: str, rows: int = 1, **parameters: object) -> list[list[float]]:
    data = [[1.0, float(row)] for row in range(rows)]
    tensor = {"name": "IN", "datatype": "FP32", "shape": [rows, 2], "data": data}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    asked = urllib.request.Request(f"http://{served.http}/v2/models/{model}/infer", body)
    with urllib.request.urlopen(asked, timeout=60) as reply:
        flat = json.loads(reply.read())["outputs"][0]["data"]
    return [flat[at : at + 2] for at in range(0, len(flat), 2)]


def page_of(served: Running) -> str:
    with urllib.request.urlopen(f"http://{served.http}/metrics", timeout=60) as reply:
        return str(reply.read().decode())


def value(page: str, name: str, model: str) -> float:
    """The sum of the samples of a model; -1 where there are none."""
    found = re.findall(rf'^fastserve_{name}\{{[^}}]*model="{model}"[^}}]*\}} (\S+)$', page, re.MULTILINE)
    return sum(map(float, found)) if found else -1.0


def has_stages(served: Running, model: str, times: int = 1) -> None:
    page = page_of(served)
    for stage in STAGES:
        name = f"{stage}_duration_seconds"
        assert value(page, f"{name}_count", model) >= times, stage
        assert value(page, f"{name}_sum", model) > 0, stage


@pytest.mark.parametrize("queue", BEHIND)
def test_behind_every_scheduler(served, queue):
    model = f"{queue}_2"
    assert all(value(page_of(served), f"{s}_duration_seconds_count", model) <= 0 for s in STAGES)
    if queue in SEQUENCES:
        infer(served, model, sequence_id=5, sequence_start=True)
        infer(served, model, sequence_id=5, sequence_end=True)
        has_stages(served, model, 2)
        return
    assert infer(served, model) == [[2.0, 0.0]]
    has_stages(served, model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["pinned", "staged"])
def test_over_a_device(served, form, kind):
    model = f"{kind}_{form}"
    for _ in range(3):
        assert infer(served, model, 2) == [[2.0, 0.0], [2.0, 2.0]]
    has_stages(served, model, 3)
    until(lambda: value(page_of(served), "device_batches_total", model) >= 1, "its batches are told")
    assert value(page_of(served), "device_staged", model) == (kind == "staged")
    lines = served.log.read_text().splitlines()
    said = [line for line in lines if f"{model}/1" in line and "go through a staging buffer" in line]
    assert len(said) == (kind == "staged")
    assert all("this simulated device registers no memory" in line for line in said)


@pytest.mark.parametrize("form", FORMS)
def test_memory_that_ran_out_is_counted_once_a_batch(served, form):
    model = f"full_{form}"
    assert value(page_of(served), "device_out_of_memory_total", model) <= 0
    for times in (1, 2):
        assert infer(served, model, 4) == [[2.0, 2.0 * n] for n in range(4)]
        until(
            lambda times=times: value(page_of(served), "device_out_of_memory_total", model) == times,
            "it is counted",
            20,
        )
    assert infer(served, model, 1) == [[2.0, 0.0]]
    assert value(page_of(served), "device_out_of_memory_total", model) == 2
