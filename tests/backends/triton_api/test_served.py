"""Python models of Triton's form behind a server as users run it: files, completed configurations, calls."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.running import Running, until

MODELS = Path(__file__).parents[2] / "differential" / "models"
SERVED = ("files", "completes", "completes_little", "repeat", "asks_repeat")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for name in SERVED:
        shutil.copytree(MODELS / name, folder / "models" / name)
    with Running(folder / "models", folder / "log") as running:
        yield running


@pytest.fixture
def controlled(tmp_path):
    """Under explicit control, one load at a time: `loads` loads `files` while it is being loaded."""
    for name in ("files", "counts", "loads"):
        shutil.copytree(MODELS / name, tmp_path / "models" / name)
    settings = tmp_path / "settings.yaml"
    settings.write_text("parallel_loads: 1\n")
    wanted = ("--model-control", "explicit", "--load-model", "loads", "--load-model", "counts")
    with Running(tmp_path / "models", tmp_path / "log", "--config", str(settings), *wanted) as running:
        yield running


def ask(served, path, body=None):
    """(status, what came back)"""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{served.http}/v2/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read() or b"{}")
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read() or b"{}")


def infer(served, name, *numbers, shape=None, **more):
    """The numbers of OUT, or the text of the error."""
    sides = {"IN": list(numbers), **more}
    inputs = [
        {"name": key, "datatype": "INT32", "shape": shape or [len(values)], "data": values}
        for key, values in sides.items()
    ]
    status, found = ask(served, f"models/{name}/infer", {"inputs": inputs})
    return found["outputs"][0]["data"] if status == 200 else found["error"]


def test_a_model_of_several_files(served):
    assert infer(served, "files", 1, 10) == [420, 4200]


@pytest.mark.parametrize("name", ["completes", "completes_little"])
def test_what_a_model_says_of_itself_is_what_is_served(served, name):
    _, told = ask(served, f"models/{name}")
    assert told["inputs"][0] == {"name": "IN", "datatype": "INT32", "shape": [-1, 1]}
    assert told["outputs"] == [{"name": "OUT", "datatype": "INT32", "shape": [-1, 2]}]
    _, config = ask(served, f"models/{name}/config")
    assert config["max_batch_size"] == 4
    assert [entry["optional"] for entry in config["input"]] == [False, True]
    assert ("dynamic_batching" in config) == (name == "completes")
    assert "model_transaction_policy" not in config
    assert infer(served, name, 5, 6, shape=[2, 1])[0::2] == [5, 6]
    assert infer(served, name, 5, 6, shape=[2, 1], MORE=[1, 1])[0::2] == [6, 7]
    assert "batch-size must be <= 4" in infer(served, name, *range(5), shape=[5, 1])


def test_requests_of_a_completed_model_run_together(served):
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: infer(served, "completes", n, shape=[1, 1]), range(200)))
    assert [answer[0] for answer in found] == list(range(200))
    assert max(answer[1] for answer in found) > 1


def test_a_stream_of_another_model_in_a_coroutine(served):
    assert infer(served, "asks_repeat", 3, 1, 2) == [3, 1, 2]
    assert infer(served, "asks_repeat", 3, -1, 2) == "a bad number"


def say(served, word):
    """Return the answer of `loads` to a word."""
    inputs = [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [word]}]
    _, found = ask(served, "models/loads/infer", {"inputs": inputs})
    return found["outputs"][0]["data"][0]


def test_a_model_loads_and_unloads_another(controlled):
    assert say(controlled, "ready") == "True"  # since its initialize
    assert infer(controlled, "files", 1) == [420]
    assert say(controlled, "folder") == "1"
    assert say(controlled, "unload") == "False"
    assert "not found" in infer(controlled, "files", 1) or "no available" in infer(controlled, "files", 1)
    assert say(controlled, "load") == "True"
    assert say(controlled, "any") == "True"
    assert say(controlled, "nothing").startswith("Failed to load model: ")
    assert ask(controlled, "repository/models/loads/unload", {})[0] == 200
    until(lambda: ask(controlled, "models/files/ready")[0] != 200, "unloaded by its finalize")


def metric_lines(served):
    with urllib.request.urlopen(f"http://{served.http}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return [line for line in lines if line.startswith(("seen_numbers", "last_number", "numbers"))]


def test_a_models_own_metrics(controlled):
    """Over both instances, after a worker is started again, and until the model is unloaded."""
    for number in range(20):
        assert infer(controlled, "counts", number) == [1.5 * (number + 1), number + 0.25]
    killed = controlled.workers
    assert "died" in infer(controlled, "counts", -1)
    until(lambda: len(set(controlled.workers) - set(killed)) >= 1, "a worker started again")
    assert infer(controlled, "counts", 30) == [31.5, 30.25]
    labels = 'model="counts",version="1"'
    assert metric_lines(controlled) == [
        f"last_number{{{labels}}} 30.25",
        f"numbers_count{{{labels}}} 21",
        f"numbers_sum{{{labels}}} 220",
        f'numbers_bucket{{{labels},le="1"}} 2',
        f'numbers_bucket{{{labels},le="2.5"}} 3',
        f'numbers_bucket{{{labels},le="10"}} 11',
        f'numbers_bucket{{{labels},le="+Inf"}} 21',
        f"seen_numbers{{{labels}}} 31.5",
    ]
    assert ask(controlled, "repository/models/counts/unload", {})[0] == 200
    assert metric_lines(controlled) == []


def test_every_front_shows_them(tmp_path):
    shutil.copytree(MODELS / "counts", tmp_path / "models" / "counts")
    with Running(tmp_path / "models", tmp_path / "log", "--frontends", "2") as running:
        assert infer(running, "counts", 1) == [1.5, 1.25]
        until(lambda: all(metric_lines(running) for _ in range(10)), "the same from every front")
