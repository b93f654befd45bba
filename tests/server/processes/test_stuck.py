"""Workers that hang or keep dying, and models none of whose runs works: what callers and probes are told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fastserve.engine import supervision
from fastserve.errors import Kind, ServeError
from fastserve.repository.model_config import ModelConfig
from tests.backends.triton_api.rig import entry, model
from tests.backends.triton_api.rig import serving as serving_triton
from tests.server.rig import HOLD, Served, release, run, seen, serving, write_model

pytestmark = pytest.mark.waits

FAST_S = 10.0  # with a start on a busy machine; the eighth cost 13 s of waiting alone
ENDED = "was ended: a batch ran longer than run_timeout_ms 2000"
BROKEN = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs): raise RuntimeError("boom")
"""


def test_a_run_has_a_limit_unless_it_is_taken_away():
    assert ModelConfig(backend="onnx").run_timeout_ms == 120_000


async def ready(served: Served) -> tuple[bool, dict[str, Any]]:
    client = await served.client()
    status, body = await client.get("/healthz/ready")
    return status == 200, json.loads(body)


@pytest.mark.logs_errors
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("shape", [[2], [-1]], ids=["columns", "slabs"])
def test_readiness_is_false_while_every_worker_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instances: int, shape: list[int]
):
    monkeypatch.setattr(supervision, "STUCK_S", 0.2)
    tensor = {"dtype": "float32", "shape": shape}
    sides = {"inputs": {"x": tensor}, "outputs": {"y": tensor}}
    write_model(tmp_path, max_batch_size=1, instances=instances, run_timeout_ms=0, **sides)

    async def work() -> None:
        async with serving(tmp_path) as served:
            held = []
            for number in range(1, instances + 1):
                assert (await ready(served))[0], "one worker is free"
                held.append(served.asking(HOLD))
                await served.until(lambda n=number: len(seen(tmp_path)) == n)
            probe = served.server.front
            await served.until(lambda: not probe.readiness.ready)
            _, told = await ready(served)
            assert "every worker has been in one batch for more than 0.2 s" in told["reason"]
            release(tmp_path)
            assert [status for status, _ in await asyncio.gather(*held)] == [200] * instances
            await served.until(lambda: probe.readiness.ready)

    run(work())


@pytest.mark.logs_errors
def test_what_hung_is_not_run_again(tmp_path: Path):
    """It would hang the next worker, too; the others' requests go on."""
    write_model(tmp_path, max_batch_size=1, instances=2, run_timeout_ms=2000)

    async def work() -> None:
        async with serving(tmp_path) as served:
            status, text = await served.ask(HOLD)
            assert (status, ENDED in text) == (504, True)
            assert len(seen(tmp_path)) == 1
            assert await served.ask(2.0) == (200, [4.0])

    run(work())


@pytest.mark.logs_errors
@pytest.mark.parametrize("sequences", [None, {"direct": {}}, {"oldest": {"max_candidate_sequences": 2}}])
def test_a_model_of_tritons_form_that_hangs_is_ended(tmp_path: Path, sequences: dict[str, Any] | None):
    ins, outs = [entry("IN", "TYPE_STRING", 1)], [entry("OUT", "TYPE_STRING", 1)]
    more = {} if sequences is None else {"sequence_batching": sequences}
    fields = {} if sequences is None else {"sequence_id": 7, "sequence_start": True}
    made = model("trouble", ins, outs, max_batch_size=4, **more)

    async def work() -> None:
        async with serving_triton(tmp_path) as at:
            await at.load(made, run_timeout_ms=2000)
            with pytest.raises(ServeError, match=ENDED) as caught:
                await at.ask("trouble", {"IN": [[b"!hangs"]]}, **fields)
            assert caught.value.kind is Kind.DEADLINE_EXCEEDED
            assert (await at.ask("trouble", {"IN": [[b"ok"]]}, **fields))["OUT"].tolist() == [b"ok"]
            await at.host.close()

    run(work())


@pytest.mark.logs_errors
def test_nine_quick_deaths_cost_no_outage(tmp_path: Path):
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            for _ in range(9):
                os.kill(served.pids[0], signal.SIGKILL)
                began = time.monotonic()
                assert await served.ask(2.0) == (200, [4.0])
                assert time.monotonic() - began < FAST_S

    run(work())


@pytest.mark.logs_errors
@pytest.mark.parametrize("shape", [[2], [-1]], ids=["columns", "slabs"])
def test_a_version_whose_every_run_fails_does_not_load(tmp_path: Path, shape: list[int]):
    tensor = {"dtype": "float32", "shape": shape}
    folder = write_model(tmp_path, inputs={"x": tensor}, outputs={"y": tensor})

    async def work() -> None:
        async with serving(tmp_path) as served:
            (folder / "2").mkdir()
            source = BROKEN if shape == [2] else BROKEN.replace('raise RuntimeError("boom")', "return boom")
            (folder / "2" / "model.py").write_text(source)
            with pytest.raises(ServeError, match=r"every run of its warm-up failed.*boom"):
                await served.server.repository.load("twice")
            assert await served.ask(2.0) == (200, [4.0]), "the old version keeps serving"

    run(work())
