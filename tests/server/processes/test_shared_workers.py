"""Models that share a worker process: who is in which, and what the end of one is to the others."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests import proc
from tests.running import Running, until
from tests.server.raw_clients import ask

CODE = """
import os, time
import {helper}
class Model:
    def __init__(self, config):
        self.factor = {helper}.FACTOR
    def load(self):
        {load}
    def run(self, inputs):
        import {helper} as late
        assert late.FACTOR == self.factor
        x = inputs["x"]
        if x[0, 0] < 0:
            time.sleep(600)
        return {{"y": x * self.factor, "pid": x[:, :1] * 0 + os.getpid()}}
"""
CONFIG = {
    "backend": "python",
    "shared_worker": "all",
    "inputs": {"x": {"dtype": "float32", "shape": [4]}},
    "outputs": {"y": {"dtype": "float32", "shape": [4]}, "pid": {"dtype": "float32", "shape": [1]}},
    "max_batch_size": 8,
    "max_queue_delay_us": 200,
    "load_timeout_s": 20,
}
ROWS = np.arange(256, dtype=np.float32).reshape(64, 4)
OPTIONS = ("--model-control", "explicit", "--keep-going")


def write(
    models: Path, name: str, factor: float, *, helper: str = "", load: str = "pass", **changes: object
) -> None:
    version, helper = models / name / "1", helper or f"helper_{name}"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(CODE.format(helper=helper, load=load))
    (version / f"{helper}.py").write_text(f"FACTOR = {factor}\n")
    (models / name / "model.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))


def manage(served: Running, what: str, name: str) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://{served.http}/v2/repository/models/{name}/{what}", b"{}", method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, ""
    except urllib.error.HTTPError as fault:
        return fault.code, json.loads(fault.read())["error"]


def ask_all(served: Running, name: str, factor: float, count: int, at_once: int) -> Counter[int]:
    """How many got which status; those that were answered are right."""

    def one(number: int) -> int:
        row = ROWS[number % 64 : number % 64 + 1]
        status, found = ask(served.http, name, "x", row, "y")
        if status == 200:
            np.testing.assert_array_equal(found, row * factor)
        return int(status)

    with ThreadPoolExecutor(at_once) as pool:
        return Counter(pool.map(one, range(count)))


def pid_of(served: Running, name: str) -> int:
    status, found = ask(served.http, name, "x", ROWS[:1], "pid")
    assert status == 200, found
    return int(found[0, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def served(folder):
    models = folder / "models"
    write(models, "two", 2)
    write(models, "three", 3)
    write(models, "pair", 5, instances=2)
    write(models, "alone", 7, shared_worker="")
    first = ("two", "three", "pair", "alone")
    chosen = [word for name in first for word in ("--load-model", name)]
    with Running(models, folder / "log", *OPTIONS, *chosen) as running:
        yield running


def test_who_shares_with_whom(served):
    """The first instances of all in one process, the second of the pair in another, the last in its own."""
    shared = pid_of(served, "two")
    assert pid_of(served, "three") == shared != pid_of(served, "alone")
    both = {pid_of(served, "pair") for _ in range(40)}
    assert shared in both or len(both) == 1
    assert len(served.workers) == 3
    assert proc.name_of(shared) == "fs:all#0"


SIZES = pytest.mark.parametrize(
    ("clients", "asked"), [(4, 200), (64, 400), pytest.param(64, 1200, marks=pytest.mark.torture)]
)


@SIZES
def test_one_is_reloaded_under_load_and_the_other_does_not_hear_of_it(served, folder, clients, asked):
    before = pid_of(served, "two")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask_all, served, "two", 2, asked, clients // 2)
        reloaded = pool.submit(ask_all, served, "three", 3, asked, clients // 2)
        loads = 0
        while loads < 2 or not (other.done() and reloaded.done()):
            write(folder / "models", "three", 3)
            status, text = manage(served, "load", "three")
            assert (status, text) == (200, "")
            loads += 1
        assert other.result() == reloaded.result() == {200: asked}
    assert pid_of(served, "two") == pid_of(served, "three") == before


def test_a_new_version_of_a_model_reads_the_files_beside_it_anew(served, folder):
    write(folder / "models", "three", 30)
    assert manage(served, "load", "three") == (200, "")
    assert ask_all(served, "three", 30, 8, 4) == {200: 8}
    write(folder / "models", "three", 3)
    assert manage(served, "load", "three") == (200, "")
    assert ask_all(served, "three", 3, 8, 4) == {200: 8}


@SIZES
def test_a_killed_worker_takes_all_and_all_come_back(served, clients, asked):
    before = pid_of(served, "two")
    with ThreadPoolExecutor(3) as pool:
        answers = [
            pool.submit(ask_all, served, name, factor, asked, max(clients // 3, 1))
            for name, factor in (("two", 2), ("three", 3), ("pair", 5))
        ]
        until(lambda: len(served.log.read_text()) and ask_all(served, "two", 2, 4, 2) == {200: 4}, "a load")
        os.kill(before, signal.SIGKILL)
        found = [one.result(120) for one in answers]
    for statuses in found:
        assert set(statuses) <= {200, 503}
        assert statuses[200] >= asked - 100
    assert set(found[2]) == {200}  # its other worker is in another process, and runs what the first could not
    until(lambda: ask_all(served, "three", 3, 2, 1) == {200: 2}, "well again", 30)
    until(lambda: ask_all(served, "two", 2, 2, 1) == {200: 2}, "well again", 30)
    assert pid_of(served, "two") == pid_of(served, "three") != before
    until(lambda: len(served.workers) == 3, "no process more")


def test_a_batch_that_hangs_ends_the_worker_of_all(served, folder):
    """A thread cannot be ended by itself: its caller hears of the limit, others at most of a death."""
    write(folder / "models", "hangs", 6, run_timeout_ms=1000)
    assert manage(served, "load", "hangs") == (200, "")
    before = pid_of(served, "two")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask_all, served, "two", 2, 400, 2)
        status, text = ask(served.http, "hangs", "x", -ROWS[1:2], "y")
        assert (status, "ran longer than run_timeout_ms 1000" in text) == (503, True), (status, text)
        assert set(other.result(60)) <= {200, 503}
    until(lambda: ask_all(served, "two", 2, 2, 1) == {200: 2}, "well again", 30)
    assert pid_of(served, "two") != before
    assert manage(served, "unload", "hangs") == (200, "")


def test_a_load_that_fails_harms_nobody(served, folder):
    before = pid_of(served, "two")
    write(folder / "models", "broken", 1, load="raise RuntimeError('no weights')")
    assert "RuntimeError: no weights" in manage(served, "load", "broken")[1]
    write(folder / "models", "broken", 1, load="raise SystemExit(3)")
    assert "the model called exit(3)" in manage(served, "load", "broken")[1]
    assert pid_of(served, "two") == before


def test_a_load_that_hangs_is_left_to_itself(served, folder):
    before = pid_of(served, "two")
    write(folder / "models", "slow", 1, load="time.sleep(600)", load_timeout_s=0.5)
    status, text = manage(served, "load", "slow")
    assert status == 400
    assert "still loading after 0.5 s" in text
    assert ask_all(served, "two", 2, 20, 4) == {200: 20}
    assert pid_of(served, "two") == before


def test_what_a_process_has_once_is_refused_with_words(served, folder):
    write(folder / "models", "threads", 1, threads=2)
    status, text = manage(served, "load", "threads")
    assert status == 400
    assert "shared_worker 'all' runs with another environment" in text
    assert "OMP_NUM_THREADS" in text
    write(folder / "models", "namesake", 1, helper="helper_two")
    assert "helper_two.py lies beside model two too" in manage(served, "load", "namesake")[1]
    assert pid_of(served, "two") == pid_of(served, "three")


def test_lines_of_the_log_are_the_models_own(served, folder):
    write(folder / "models", "talks", 1, load="print('here I am')")
    assert manage(served, "load", "talks") == (200, "")
    until(lambda: "here I am" in served.log.read_text(), "its line")
    assert re.search(r"here I am.* worker=talks/1#0\n", served.log.read_text())
    assert manage(served, "unload", "talks") == (200, "")


def test_a_process_goes_with_its_last_model(served, folder):
    """And what was in it leaves nothing: the next one with that name begins anew."""
    write(folder / "models", "single", 4, shared_worker="another")
    count = len(served.workers)
    for _ in range(2):
        assert manage(served, "load", "single") == (200, "")
        assert len(served.workers) == count + 1
        assert ask_all(served, "single", 4, 8, 4) == {200: 8}
        assert manage(served, "unload", "single") == (200, "")
        until(lambda: len(served.workers) == count, "its process is gone")


def test_models_without_a_share_say_so(served, folder):
    text = yaml.safe_dump({"backend": "text", "shared_worker": "all"})
    (folder / "models" / "words").mkdir(exist_ok=True)
    (folder / "models" / "words" / "model.yaml").write_text(text)
    (folder / "models" / "words" / "1").mkdir(exist_ok=True)
    assert (
        'shared_worker: given "all", allowed: nothing with backend text' in manage(served, "load", "words")[1]
    )
