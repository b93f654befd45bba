"""Models that write into their inputs: they are served, and what was sent stays what it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fastserve.backends.frameworks.python import CopyOnWrite
from fastserve.tensor import DTYPES, TensorSpec
from fastserve.workers.warmup import SYNTHETIC_INPUTS, run_samples
from tests.server.rig import run, serving

SOURCE = """
class Model:
    def __init__(self, config):
        self.writes = config["parameters"]["writes"]

    def run(self, inputs):
        x = inputs["x"]
        if self.writes == "always" or x.max() > 1:
            x /= 2
        if -7.0 in x:
            int("no number")
        return {"y": x}
"""


def write(folder: Path, shape: list[int], **config: Any) -> None:
    version = folder / "twice" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(SOURCE)
    tensor = {"dtype": "float32", "shape": shape}
    whole = {"backend": "python", "inputs": {"x": tensor}, "outputs": {"y": tensor}, "max_batch_size": 16}
    (folder / "twice" / "model.yaml").write_text(yaml.safe_dump({**whole, **config}))


@pytest.mark.parametrize("shape", [[2], [-1]], ids=["columns", "slabs"])
@pytest.mark.parametrize("writes", ["always", "sometimes"])
@pytest.mark.parametrize("warmup", ["auto", "off"])
def test_a_model_that_writes_into_its_input_is_served(
    tmp_path: Path, shape: list[int], writes: str, warmup: str
):
    """Its warm-up was on writable arrays, and every request was 500."""
    write(tmp_path, shape, warmup=warmup, parameters={"writes": writes})

    async def work() -> None:
        async with serving(tmp_path) as served:
            for _ in range(2):
                answers = await asyncio.gather(*[served.ask(4.0, 6.0) for _ in range(5)])
                assert answers == [(200, [2.0, 3.0])] * 5

    run(work())


@pytest.mark.logs_errors
def test_rows_of_a_batch_that_fails_are_run_again_as_they_were_sent(tmp_path: Path):
    write(tmp_path, [2], parameters={"writes": "always"}, max_queue_delay_us=200000)

    async def work() -> None:
        async with serving(tmp_path) as served:
            assert await served.ask(8.0) == (200, [4.0])
            answers = await asyncio.gather(served.ask(4.0), served.ask(-14.0), served.ask(6.0))
            assert [status for status, _ in answers] == [200, 500, 200]
            assert [answers[0][1], answers[2][1]] == [[2.0], [3.0]]

    run(work())


def halve(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x /= 2
    return x


def sent() -> np.ndarray[Any, Any]:
    array = np.full(2, 4, np.float32)
    array.flags.writeable = False
    return array


def test_a_written_input_is_seen_once_and_copied_from_then_on():
    call = CopyOnWrite(halve)
    x = sent()
    assert call(x).tolist() == [2, 2]
    assert (call.copies, x.tolist()) == (True, [4, 4])
    assert call({"x": x}["x"]).tolist() == [2, 2]


def test_a_model_that_does_not_write_is_given_what_was_sent():
    given: list[Any] = []
    call = CopyOnWrite(given.append)
    x = sent()
    call(x)
    assert given == [x]
    assert given[0] is x
    assert not call.copies


@pytest.mark.parametrize("kind", ["raises", "always fails"])
def test_other_failures_of_a_model_are_not_taken_for_writes(kind: str):
    runs: list[int] = []

    def fail(x: Any) -> None:
        runs.append(1)
        if kind == "raises":
            raise ValueError("no such row")
        int("text")

    call = CopyOnWrite(fail)
    with pytest.raises(ValueError, match=r"no such row|invalid literal"):
        call(sent())
    assert len(runs) == (1 if kind == "raises" else 2)
    assert not call.copies


def test_a_model_whose_runs_have_effects_is_tried_on_copies_in_its_warm_up_alone():
    fresh, proven = CopyOnWrite(halve, again=False), CopyOnWrite(halve, again=False)
    assert fresh(sent()).tolist() == [2, 2]
    proven(np.zeros(2))
    with pytest.raises(ValueError, match="read-only"):
        proven(sent())


def test_warm_up_arrays_are_as_those_of_requests():
    spec = TensorSpec("x", DTYPES["float32"], (2,))
    flags: list[Any] = []

    class ArenaScanner:
        inputs = {"x": spec}
        outputs: dict[str, Any] = {}

        def run(self, inputs: Any) -> Any:
            flags.append((inputs["x"].flags.writeable, inputs["x"].flags.owndata))

    samples = [{"inputs": {"x": "zeros"}}, {"inputs": {"x": [[1, 2]]}}]
    samples.append({"inputs": {"x": {"dims": [2], "data": "random"}}})
    run_samples(ArenaScanner(), samples, batching=True)  # type: ignore[arg-type]
    for guess in SYNTHETIC_INPUTS:
        made = guess.make(spec, (3,))
        flags.append((made.flags.writeable, made.flags.owndata))
    assert flags == [(False, False)] * 6
