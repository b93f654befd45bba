"""A bad request among good ones: it fails, they do not, and the statistics say what was run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve.engine.counters import counts_of
from fastserve.repository.model_config import parse_model_config
from fastserve.settings.model_options import may_isolate
from fastserve.workers import isolation
from tests.server.rig import HOLD, Served, release, run, seen, serving

pytestmark = pytest.mark.logs_errors
BAD = -7.0
SOURCE = """
import pathlib, time

class Model:
    def __init__(self, config):
        self.folder = pathlib.Path(config["parameters"]["folder"])

    def run(self, inputs):
        x = inputs["x"]
        if x.any() and not (x == 1).all():
            with open(self.folder / "seen", "a") as seen:
                seen.write(",".join(str(v) for v in x[:, 0]) + "\\n")
        until = time.monotonic() + 60
        while -3.0 in x and not (self.folder / "go").exists() and time.monotonic() < until:
            time.sleep(0.001)
        if -7.0 in x:
            raise ValueError(f"bad row: {sorted(set(x[:, 0].tolist()))[0]}")
        return {"y": x * 2}
"""


def write(folder: Path, shape: list[int], **config: Any) -> None:
    version = folder / "twice" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(SOURCE)
    tensor = {"dtype": "float32", "shape": shape}
    whole = {"backend": "python", "inputs": {"x": tensor}, "outputs": {"y": tensor}, "max_batch_size": 16}
    whole |= {"parameters": {"folder": str(folder)}, "warmup": "off", **config}
    (folder / "twice" / "model.yaml").write_text(yaml.safe_dump(whole))


async def together(served: Served, folder: Path, *requests: tuple[float, ...]) -> list[tuple[int, Any]]:
    """Answers to requests that run as one batch: they gather while another is held."""
    held = served.asking(HOLD)
    await served.until(lambda: seen(folder))
    asking = [served.asking(*rows) for rows in requests]
    ring = next(iter(served.server.host.hosted.values())).queue.ring
    await served.until(lambda: ring.pending() == len(requests))
    release(folder)
    assert (await held)[0] == 200
    return list(await asyncio.gather(*asking))


FORMS = pytest.mark.parametrize("shape", [[2], [-1]], ids=["columns", "slabs"])


@FORMS
@pytest.mark.parametrize("sizes", [None, [1, 4, 16]], ids=["any size", "allowed sizes"])
def test_a_bad_row_fails_only_itself(tmp_path: Path, shape: list[int], sizes: list[int] | None):
    write(tmp_path, shape, allowed_batch_sizes=sizes)

    async def work() -> None:
        async with serving(tmp_path) as served:
            rows = [(3.0,), (4.0, 5.0), (BAD,), (6.0,), (BAD, 7.0), (8.0,), (9.0,), (10.0, 11.0)]
            answers = await together(served, tmp_path, *rows)
            for sent, (status, body) in zip(rows, answers, strict=True):
                if BAD in sent:
                    assert (status, "bad row: -7.0" in body) == (500, True)
                else:
                    assert (status, body) == (200, [2 * row for row in sent])
            version = served.server.catalog.available("twice")
            counts = counts_of(version)
            assert (counts.success.count, counts.fail.count) == (7, 2), "with the one that was held"
            assert counts.executions == len(seen(tmp_path)), "every run is an execution"
            assert counts.inferences == 9
            infer_ns = sum(batch.infer_ns for batch in counts.batches)
            assert 0 < infer_ns <= counts.compute_infer.ns
            assert await served.ask(2.0) == (200, [4.0])

    run(work())


@FORMS
def test_a_model_that_says_runs_have_effects_runs_once(tmp_path: Path, shape: list[int]):
    write(tmp_path, shape, isolate_failures=False)

    async def work() -> None:
        async with serving(tmp_path) as served:
            answers = await together(served, tmp_path, (3.0,), (BAD,), (4.0,))
            assert [status for status, _ in answers] == [500] * 3
            assert len(seen(tmp_path)) == 2

    run(work())


@FORMS
def test_a_model_that_fails_at_everything_is_left_alone(tmp_path: Path, shape: list[int]):
    write(tmp_path, shape, max_batch_size=64)

    async def work() -> None:
        async with serving(tmp_path) as served:
            answers = await together(served, tmp_path, *[(BAD,)] * 40)
            assert [status for status, _ in answers] == [500] * 40
            assert len(seen(tmp_path)) == 2 + isolation.FRUITLESS

    run(work())


@pytest.mark.parametrize(
    ("raw", "isolates"),
    [
        ({}, True),
        ({"isolate_failures": False}, False),
        ({"parameters": {"isolate_failures": "false"}}, True),
        ({"parameters": {"isolate_failures": "false"}, "options": {"origin": "config.pbtxt"}}, False),
        ({"options": {"decoupled": True}}, False),
        ({"options": {"sequences": {"direct": True}}}, False),
    ],
)
def test_whose_batches_run_again(raw: dict[str, Any], isolates: bool):
    assert may_isolate(raw) is isolates
    assert parse_model_config({"backend": "onnx"}).isolate_failures
