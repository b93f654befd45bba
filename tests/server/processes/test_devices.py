"""Servers whose workers have a simulated device: answers under load, batches that come back from a worker
that died or lost its device, and one that ran out of memory."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.backends import models as onnx_models
from tests.backends.frameworks.torch_models import CONFIG, net, save_class, save_script
from tests.running import WITH_SIMULATED_DEVICES, Running, until
from tests.server.raw_clients import ask

STARVED = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""
ROWS = np.random.default_rng(11).standard_normal((64, 4)).astype(np.float32)
WANTED = net()(torch.from_numpy(ROWS)).detach().numpy()


def write(models: Path, name: str, script: dict | None = None, **changes) -> None:
    save_script(models, net(), name)
    config = {**CONFIG, "devices": "simulated", "max_queue_delay_us": 500, **changes}
    if script is not None:
        config["env"] = {"FASTSERVE_SIMULATED_DEVICE": json.dumps(script)}
    (models / name / "model.yaml").write_text(yaml.safe_dump(config))


def ask_all(served: Running, name: str, count: int = 64, at_once: int = 8) -> list[tuple[int, object]]:
    """(status, answer) of requests for one row each; those that were answered are right."""

    def one(number: int) -> tuple[int, object]:
        at = number % len(ROWS)
        status, found = ask(served.http, name, "x", ROWS[at : at + 1], "y")
        if status == 200:
            np.testing.assert_allclose(found, WANTED[at : at + 1], rtol=1e-5, atol=1e-6)
        return status, found

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, range(count)))


STAGES = ("copy-in", "compute", "copy-out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("devices")


@pytest.fixture(scope="module")
def served(folder):
    """One server for all: what happens to one model is nothing to the others."""
    models = folder / "models"
    write(models, "dense")
    write(models, "staged", {"pins": False, "seed": 3})
    write(models, "slabs", {"seed": 5}, inputs={"x": {"dtype": "float32", "shape": [-1]}})
    for stage in STAGES:
        fault = {"stage": stage, "what": "lost", "at": 5, "once": str(folder / f"struck-{stage}")}
        write(models, f"lost-{stage}", {"faults": [fault]}, instances=2)
    fault = {"stage": "compute", "what": "lost", "at": 3, "once": str(folder / "struck-alone")}
    write(models, "alone", {"faults": [fault]})
    fault = {"stage": "copy-in", "what": "hold", "once": str(folder / "held")}
    write(models, "held", {"faults": [fault]}, instances=2)
    write(
        models,
        "full",
        {"faults": [{"stage": "compute", "what": "out of memory", "every": True, "larger": 2}]},
    )
    write(models, "starved", warmup="off")
    (models / "starved" / "1" / "model.pt").unlink()
    save_class(models, STARVED, "starved")
    fault = {"stage": "copy-out", "what": "lost", "at": 30, "once": str(folder / "struck-shared")}
    for name in ("shared-a", "shared-b"):
        write(models, name, {"faults": [fault]}, instances=2, shared_worker="gpu")
    for name in ("onnx-a", "onnx-b"):
        version_dir = onnx_models.affine(folder / name)
        (models / name).mkdir()
        version_dir.rename(models / name / "1")
        config = {"backend": "onnx", "max_batch_size": 8, "devices": "simulated", "shared_worker": "onnx"}
        (models / name / "model.yaml").write_text(yaml.safe_dump(config))
    with Running(models, folder / "log", module=WITH_SIMULATED_DEVICES) as running:
        yield running


@pytest.mark.parametrize("name", ["dense", "staged", "slabs"])
def test_answers_are_the_models_over_a_device(served, name):
    assert {status for status, _ in ask_all(served, name, 200)} == {200}


def test_onnx_models_over_a_device(served):
    """Two of one worker: the batches of both are bound where they lie."""

    def one(number):
        rows = ROWS[number % 8 * 3 :][:2, :3].copy()
        status, found = ask(served.http, f"onnx-{'ab'[number % 2]}", "x", rows, "y")
        assert status == 200, found
        np.testing.assert_array_equal(found, 2 * rows + 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))
    for name in ("onnx-a", "onnx-b"):
        until(lambda name=name: counted(served, name) > 0, "the device's batches are counted")


def counted(served, name: str) -> float:
    with urllib.request.urlopen(f"http://{served.http}/metrics", timeout=60) as reply:
        page = reply.read().decode()
    found = re.search(rf'fastserve_device_batches_total{{model="{name}"[^\n]* (\S+)', page)
    return float(found[1]) if found else 0.0


def test_memory_that_is_not_registered_is_said_once(served):
    told = [line for line in served.log.read_text().splitlines() if "could not be registered" in line]
    assert len(told) == 1
    assert "staged/1#0" in told[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_lost_device_is_another_workers_batch(served, folder, stage):
    """The sticky error strikes one of two workers once: nobody hears of it but the log."""
    name = f"lost-{stage}"
    assert {status for status, _ in ask_all(served, name, 300)} == {200}
    assert (folder / f"struck-{stage}").exists()
    until(
        lambda: re.search(rf"{name}/1: worker \d is ready again", served.log.read_text()),
        "a fresh worker",
        60,
    )
    assert (
        "its GPU has failed, and it answers no more: CUDA error: an illegal memory" in served.log.read_text()
    )
    assert {status for status, _ in ask_all(served, name, 50)} == {200}


def test_a_lost_device_is_that_of_all_who_share_the_worker(served, folder):
    """Both have another worker, in another process: nobody hears of it."""
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask_all, served, f"shared-{one}", 300) for one in "ab"]
        assert {status for one in asked for status, _ in one.result(60)} == {200}
    assert (folder / "struck-shared").exists()
    for one in "ab":
        again = re.compile(rf"shared-{one}/1: worker \d is ready again")
        until(lambda again=again: again.search(served.log.read_text()), "a fresh worker", 60)
        assert {status for status, _ in ask_all(served, f"shared-{one}", 50)} == {200}


def test_a_lost_device_without_another_worker_is_503_and_then_well(served):
    assert {status for status, _ in ask_all(served, "alone", 100)} == {200, 503}
    until(lambda: {status for status, _ in ask_all(served, "alone", 4)} == {200}, "well again", 60)


def test_a_worker_killed_between_copy_in_and_compute(served, folder):
    """The device stands still once the rows are there; the worker dies; another runs the batch."""
    held = folder / "held"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, served, "held", 40, 4)
        until(lambda: held.exists() and held.read_text(), "a batch on the device")
        assert int(held.read_text()) in served.workers
        os.kill(int(held.read_text()), signal.SIGKILL)
        assert {status for status, _ in asked.result(60)} == {200}


def test_out_of_memory_costs_neither_the_batch_nor_the_worker(served):
    assert {status for status, _ in ask_all(served, "full", 200, 16)} == {200}
    status, found = ask(served.http, "full", "x", ROWS[:8], "y")  # one request, by halves of its own rows
    assert status == 200, found
    np.testing.assert_allclose(found, WANTED[:8], rtol=1e-5, atol=1e-6)
    told = served.log.read_text()
    assert "there was no memory for a batch of" in told
    assert "full/1: worker 0 died" not in told


def test_two_models_on_one_device_do_not_hear_of_each_other(served):
    """One has no memory for anything, the other goes on."""
    with ThreadPoolExecutor(2) as pool:
        fed = pool.submit(ask_all, served, "dense", 100, 4)
        starved = pool.submit(ask_all, served, "starved", 100, 4)
        assert {status for status, _ in fed.result(60)} == {200}
        found = starved.result(60)
    assert {status for status, _ in found} == {503}
    assert all("there is no memory for a batch of 1 rows" in text for _, text in found)
    assert "starved/1: worker 0 died" not in served.log.read_text()


def test_stages_are_on_the_metrics_page(served):
    ask_all(served, "dense", 20)

    def shown() -> str:
        with urllib.request.urlopen(f"http://{served.http}/metrics", timeout=60) as reply:
            return reply.read().decode()

    until(lambda: re.search(r'copy_in[^\n]*"dense"', shown()), "its copy-in times")
