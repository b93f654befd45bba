"""Python models of Triton's form behind a server as users run it: files, completed configurations, calls."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.running import Running

MODELS = Path(__file__).parents[1] / "differential" / "models"
SERVED = ("files", "completes", "completes_little", "repeat", "asks_repeat")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for name in SERVED:
        shutil.copytree(MODELS / name, folder / "models" / name)
    with Running(folder / "models", folder / "log") as running:
        yield running


def ask(served, path, body=None):
    """(status, what came back)"""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{served.http}/v2/{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


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
