"""What a remote worker is told of the requests in its batch: who still waits, and their traces. And answers
that are kept in front of it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastserve.settings import Listener, OtelOptions
from tests.server.observability.collector import grpc_collector
from tests.server.observability.test_traces import TELLING, TRACEPARENT
from tests.server.processes.test_remote import placed
from tests.server.rig import KILL_ONCE, WAIT_S, release, run, seen, serving
from tests.server.scheduling.test_request_time import HELD, MODEL, asked

FORMS = pytest.mark.parametrize("shape", [[2], [-1]], ids=["columns", "slabs"])


def write_source(folder: Path, source: str) -> None:
    (folder / "twice" / "1" / "model.py").write_text(source)


def infer(http: httpx.AsyncClient, value: float) -> asyncio.Task[httpx.Response]:
    return asyncio.ensure_future(http.post("/v2/models/twice/infer", json=asked(value)))


@FORMS
def test_a_model_knows_who_has_left_and_does_not_run_what_nobody_waits_for(
    tmp_path: Path, shape: list[int]
) -> None:
    """Two requests run in one batch, of which one leaves; a third leaves before its turn."""
    tensor = {"dtype": "float32", "shape": shape}
    options: dict[str, Any] = {"inputs": {"x": tensor}, "outputs": {"y": tensor}, "max_batch_size": 2}
    with placed(
        tmp_path, warmup="off", remote={"in_flight": 2}, max_queue_delay_us=300_000, **options
    ) as workers:
        write_source(tmp_path, MODEL)
        workers.start()

        async def work() -> None:
            async with (
                serving(tmp_path) as at,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{at.port}", timeout=WAIT_S) as http,
            ):
                assert (await infer(http, 1.0)).status_code == 200
                stays, leaves = infer(http, HELD), infer(http, HELD - 1)
                await at.until(lambda: len(seen(tmp_path)) > 1)
                rows = [row for batch in seen(tmp_path)[1:] for row in batch]
                assert sorted(rows) == [HELD - 1, HELD]
                (hosted,) = at.server.host.hosted.values()
                ring = hosted.queue.ring
                never = infer(http, HELD - 2)
                await at.until(
                    lambda: ring.outstanding() == 3 and ring.queued() == 0
                )  # it is with the worker
                never.cancel()
                await at.until(lambda: sum(len(ring.leases(slot)) for slot in range(ring.slots)) == 2)
                leaves.cancel()
                for _ in range(20):  # it looks again and again: what was said of both has come
                    await at.until((tmp_path / "gone").exists)
                    assert (tmp_path / "gone").read_text() in ("", "0,1" if rows[0] == HELD else "1,0")
                    (tmp_path / "gone").unlink()
                release(tmp_path)
                assert (await stays).json()["outputs"][0]["data"] == [HELD, 0.5]
                assert (await infer(http, 2.0)).status_code == 200
                await at.until(at.is_clean)

        run(work())
    assert HELD - 2 not in [row for batch in seen(tmp_path) for row in batch]


@FORMS
def test_a_model_is_given_the_contexts_of_its_rows(tmp_path: Path, shape: list[int]) -> None:
    tensor = {"dtype": "float32", "shape": shape}
    with (
        placed(tmp_path, inputs={"x": tensor}, outputs={"y": tensor}) as workers,
        grpc_collector() as collector,
    ):
        write_source(tmp_path, TELLING)
        workers.start()
        otel = OtelOptions(endpoint=collector.address, ratio=0.0)

        async def work() -> None:
            told: list[Any] = []
            async with (
                serving(tmp_path, otel=otel, http=(), listen=(Listener("127.0.0.1:0"),)) as at,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{at.port}", timeout=WAIT_S) as http,
            ):
                body = {"instances": [[1.0, 2.0], [3.0, 4.0]]}
                for headers in [{"traceparent": TRACEPARENT, "tracestate": "a=b"}] * 3 + [{}]:
                    answer = await http.post("/v1/models/twice:predict", json=body, headers=headers)
                    told.append(answer.json()["predictions"])
                spans = await asyncio.to_thread(
                    collector.wait, lambda found: len([one for one in found if one.name == "compute"]) == 3
                )
            computes = sorted((one for one in spans if one.name == "compute"), key=lambda one: one.start_ns)
            assert told[:3] == [[[int(one.id, 16) % 2**20, 3]] * 2 for one in computes]
            assert told[3] == [[0.0, 0.0]] * 2

        run(work())


@pytest.mark.logs_errors
def test_answers_are_kept_in_front_of_remote_workers_and_outlive_them(tmp_path: Path) -> None:
    with placed(tmp_path, cache=True, instances=2) as workers:
        started = workers.start(2)

        async def work() -> None:
            async with serving(tmp_path, response_cache_bytes=1 << 20) as at:
                assert [await at.ask(5.0) for _ in range(3)] == [(200, [10.0])] * 3
                assert seen(tmp_path) == [[5.0]]
                # Equal requests wait for one, whose worker dies: it runs once more, for all of them.
                told = await asyncio.gather(*(at.ask(KILL_ONCE) for _ in range(4)))
                assert told == [(200, [2 * KILL_ONCE])] * 4
                assert seen(tmp_path)[1:] == [[KILL_ONCE]] * 2
                # No worker is left, and what was kept is answered.
                for worker in started:
                    worker.signal(signal.SIGKILL)
                    workers.await_end(worker)
                await at.until(lambda: not at.server.front.readiness.ready)
                assert await at.ask(5.0) == (200, [10.0])
                other = asyncio.ensure_future(at.ask(6.0))
                workers.start(2)
                assert await other == (200, [12.0])
                assert await at.ask(6.0) == (200, [12.0])
                assert seen(tmp_path)[3:] == [[6.0]]

        run(work())
