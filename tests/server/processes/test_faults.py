"""Workers that die, clients that leave, queues that fill: every request is answered exactly once."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from fastserve.settings import TFServingOptions
from tests import proc
from tests.server.rig import HOLD, KILL, KILL_ONCE, Served, release, run, seen, serving, write_model

DIED = "the worker process died while it ran this request"
ENDED = "the worker process that ran this request was ended: a batch ran longer than run_timeout_ms 2000"


def ring_of(served: Served) -> Any:
    return next(iter(served.server.host.hosted.values())).queue.ring


def states(served: Served) -> list[str]:
    ring = ring_of(served)
    return [ring.describe(i)[0] for i in range(ring.slots)]


@pytest.mark.parametrize("instances", [1, 2])
def test_worker_killed_while_it_runs(tmp_path, instances):
    """With another instance the batch runs once more there; alone, its callers are told at once."""
    write_model(tmp_path, instances=instances, max_batch_size=2)

    async def work() -> None:
        async with serving(tmp_path) as served:
            answers = await asyncio.gather(*(served.ask(KILL_ONCE, 5.0) for _ in range(3)))
            told = sorted(status for status, _ in answers)
            assert told == ([200] * 3 if instances == 2 else [200, 200, 503])
            assert all(body == ([-4.0, 10.0] if status == 200 else DIED) for status, body in answers)
            assert await served.ask(3.0) == (200, [6.0])

    run(work())


def test_a_batch_that_kills_every_worker_is_tried_twice_and_no_more(tmp_path):
    write_model(tmp_path, instances=2)

    async def work() -> None:
        async with serving(tmp_path) as served:
            assert await served.ask(KILL) == (503, DIED)
            assert seen(tmp_path) == [[KILL], [KILL]]
            assert await served.ask(1.0) == (200, [2.0])

    run(work())


@pytest.mark.parametrize("instances", [1, 2])
def test_worker_killed_while_requests_are_queued(tmp_path, instances):
    write_model(tmp_path, instances=instances, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path) as served:
            for pid in served.pids:
                proc.stop(pid)
            asking = [served.asking(float(n)) for n in range(1, 7)]
            await served.until(lambda: ring_of(served).outstanding() == 6)
            os.kill(served.pids[0], signal.SIGKILL)
            for pid in served.pids[1:]:
                os.kill(pid, signal.SIGCONT)
            assert await asyncio.gather(*asking) == [(200, [2.0 * n]) for n in range(1, 7)]
            assert sorted(seen(tmp_path)) == [[float(n)] for n in range(1, 7)], "each ran once"

    run(work())


@pytest.mark.parametrize("strings", [False, True])
def test_client_gone_while_queued(tmp_path, strings):
    """The model never sees a batch that only clients were in who have left."""
    shape = {"shape": [-1] if strings else [2], "dtype": "float32"}
    write_model(tmp_path, max_batch_size=2, inputs={"x": shape}, outputs={"y": shape})

    async def work() -> None:
        async with serving(tmp_path) as served:
            running = served.asking(HOLD)
            await served.until(lambda: seen(tmp_path))
            leaving = [await served.client() for _ in range(2)]
            for n, client in enumerate(leaving):
                client.send(5.0 + n)
            queue = next(iter(served.server.host.hosted.values())).queue
            await served.until(lambda: queue.waiting == 3)
            for client in leaving:
                client.close()
            await served.until(lambda: queue.waiting == 1)
            staying = served.asking(9.0)
            await served.until(lambda: queue.waiting == 2)
            release(tmp_path)
            assert await running == (200, [HOLD * 2])
            assert await staying == (200, [18.0])
            assert seen(tmp_path) == [[HOLD], [9.0]]

    run(work())


def test_client_gone_while_running(tmp_path):
    write_model(tmp_path, max_batch_size=2, max_queue_delay_us=20_000_000)

    async def work() -> None:
        async with serving(tmp_path) as served:
            leaving = await served.client()
            leaving.send(HOLD)
            staying = served.asking(4.0)
            await served.until(lambda: seen(tmp_path))
            queue = next(iter(served.server.host.hosted.values())).queue
            leaving.close()
            await served.until(lambda: queue.waiting == 1)
            release(tmp_path)
            assert await staying == (200, [8.0])

    run(work())


@pytest.mark.parametrize("stage", ["queued", "running"])
def test_deadlines(tmp_path, stage):
    """A request whose time was up before it ran is told to come again (429); one that ran too long, 504."""
    write_model(tmp_path, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path, tfserving=TFServingOptions(rest_timeout_ms=2000)) as served:
            first = served.asking(HOLD)
            await served.until(lambda: seen(tmp_path))
            status, _ = await (served.ask(5.0) if stage == "queued" else first)
            assert status == (429 if stage == "queued" else 504)
            assert (await first)[0] == 504
            release(tmp_path)
            await served.until(served.is_clean)
            assert seen(tmp_path) == [[HOLD]]

    run(work())


def test_a_full_queue_says_when_to_come_again(tmp_path):
    write_model(tmp_path, max_batch_size=1, max_queue_rows=4)

    async def work() -> None:
        async with serving(tmp_path) as served:
            asking = [served.asking(HOLD)]
            await served.until(lambda: seen(tmp_path))
            asking += [served.asking(float(n)) for n in range(1, 5)]
            await served.until(lambda: ring_of(served).rows_left() == 0)
            client = await served.client()
            status, text = await client.predict(77.0)
            assert (status, "queue of this model is full" in text) == (503, True)
            assert int(client.headers["retry-after"]) >= 1
            release(tmp_path)
            assert {status for status, _ in await asyncio.gather(*asking)} == {200}

    run(work())


@pytest.mark.parametrize("others", [0, 2])
def test_a_large_request_is_split_though_it_fills_the_queue(tmp_path, others):
    write_model(tmp_path, max_batch_size=2, max_queue_rows=4)

    async def work() -> None:
        async with serving(tmp_path) as served:
            asking = [served.asking(HOLD, 0.5) for _ in range(others)]
            await served.until(lambda: len(seen(tmp_path)) >= bool(others))
            rows = [float(n) for n in range(1, 60)]
            large = served.asking(*rows)
            await served.until(lambda: large.done() or others)
            release(tmp_path)
            assert await large == (200, [2 * row for row in rows])
            await asyncio.gather(*asking)

    run(work())


def test_split_can_be_forbidden(tmp_path):
    write_model(tmp_path, max_batch_size=2, split_large_requests=False)

    async def work() -> None:
        async with serving(tmp_path) as served:
            status, text = await served.ask(1.0, 2.0, 3.0)
            assert (status, text) == (400, "Task size 3 is larger than maximum input batch size 2")

    run(work())


def test_what_is_split_can_be_bounded(tmp_path):
    write_model(tmp_path, max_batch_size=2, max_request_rows=5)

    async def work() -> None:
        async with serving(tmp_path) as served:
            assert await served.ask(*[1.0] * 5) == (200, [2.0] * 5)
            status, text = await served.ask(*[1.0] * 6)
            assert (status, text) == (400, "Task size 6 is larger than maximum input batch size 5")

    run(work())


def test_a_request_fills_a_bounded_number_of_batches_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr("fastserve.engine.schedulers.plain.MOST_BATCHES", 3)
    write_model(tmp_path, max_batch_size=2)

    async def work() -> None:
        async with serving(tmp_path) as served:
            assert await served.ask(*[1.0] * 6) == (200, [2.0] * 6)
            status, text = await served.ask(*[1.0] * 7)
            assert status == 400
            assert text.startswith(
                "7 rows are more than 3 batches of 2, the most of one request unless max_r"
            )

    run(work())


def test_a_batch_that_runs_too_long_costs_its_worker(tmp_path):
    write_model(tmp_path, max_batch_size=1, run_timeout_ms=2000)  # the run that is well may wait for a core

    async def work() -> None:
        async with serving(tmp_path) as served:
            before = served.pids
            assert await served.ask(HOLD) == (504, ENDED)
            release(tmp_path)
            assert await served.ask(2.0) == (200, [4.0])
            assert served.pids != before

    run(work())


def test_with_nobody_left_those_who_wait_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("fastserve.engine.supervision.NO_WORKER_LIMIT_S", 0.01)
    monkeypatch.setattr("fastserve.engine.supervision.NO_WORKER_LOOK_S", 0.01)
    write_model(tmp_path, restart_backoff_s=3600.0, restart_backoff_max_s=3600.0)

    async def work() -> None:
        async with serving(tmp_path) as served:
            assert await served.ask(KILL) == (503, DIED)
            assert await served.ask(1.0) == (503, "no worker of this model is alive")
            client = await served.client()
            assert (await client.get("/healthz/ready"))[0] == 503

    run(work())


def test_worker_killed_while_its_version_drains(tmp_path):
    write_model(tmp_path, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path) as served:
            running = served.asking(HOLD)
            await served.until(lambda: seen(tmp_path))
            unloading = asyncio.ensure_future(served.server.repository.unload("twice"))
            await served.until(lambda: next(iter(served.server.host.hosted.values())).closing)
            os.kill(served.pids[0], signal.SIGKILL)
            assert await running == (503, DIED)
            await unloading

    run(work())


def test_hot_reload_under_load_fails_no_request(tmp_path):
    write_model(tmp_path, max_batch_size=4)

    async def work() -> None:
        async with serving(tmp_path, frontends=2) as served:
            over, answers = asyncio.Event(), []

            async def load() -> None:
                client = await served.client()
                while not over.is_set():
                    answers.append(await client.predict(*range(1, 12)))

            loads = [asyncio.ensure_future(load()) for _ in range(6)]
            for turn in range(1, 5):
                write_model(tmp_path, numbers=(1 + turn % 2,), max_batch_size=4, parameters={"add": turn})
                await served.server.repository.load("twice")
                enough = len(answers) + 30
                await served.until(lambda: len(answers) >= enough)  # noqa: B023
            over.set()
            await asyncio.gather(*loads)
            assert {status for status, _ in answers} == {200}
            adds = {body[0] - 2 for _, body in answers}
            assert {0, 1, 4} <= adds <= {0, 1, 2, 3, 4}

    run(work())


@pytest.mark.parametrize("strict", [True, False])
def test_keep_going_serves_what_could_be_loaded(tmp_path, strict):
    write_model(tmp_path, "good")
    (write_model(tmp_path, "bad") / "1" / "model.py").write_text("raise ValueError('no luck')")

    async def work() -> None:
        async with serving(tmp_path, keep_going=True, strict_readiness=strict) as served:
            assert await served.ask(1.0, model="good") == (200, [2.0])
            assert (await served.ask(1.0, model="bad"))[0] == 404
            client = await served.client()
            health = {(await client.get(path))[0] == 200 for path in ("/healthz/ready", "/v2/health/ready")}
            assert health == {not strict}  # one rule for every protocol

    run(work())


@pytest.mark.parametrize("instances", [1, 2])
def test_every_request_is_answered_once_and_with_its_own_rows_in_a_kill_storm(tmp_path, instances):
    """R1, R2, R8: unique numbers in, doubled out, while workers are killed and clients leave."""
    write_model(tmp_path, max_batch_size=4, instances=instances, restart_backoff_max_s=0.1)

    async def work() -> None:
        async with serving(tmp_path) as served:
            over, answers, failed = asyncio.Event(), 0, 0

            async def load(number: int) -> None:
                nonlocal answers, failed
                client, turn = await served.client(), 0
                while not over.is_set():
                    turn += 1
                    rows = [float(number * 100_000 + turn * 10 + n) for n in range(1 + turn % 7)]
                    if turn % 17 == 0:
                        client.send(*rows)
                        client.close()
                        client = await served.client()
                        continue
                    status, body = await client.predict(*rows)
                    answers += 1
                    failed += status == 503
                    assert body == ([2 * row for row in rows] if status == 200 else DIED), status

            loads = [asyncio.ensure_future(load(n)) for n in range(1, 9)]
            kills = 0
            while kills < 6 and not any(task.done() for task in loads):
                seen_enough = answers + 40
                await served.until(lambda: answers >= seen_enough or any(t.done() for t in loads))  # noqa: B023
                victims = [pid for pid in served.pids if pid]
                if victims:
                    os.kill(victims[kills % len(victims)], signal.SIGKILL)
                    kills += 1
            over.set()
            await asyncio.gather(*loads)
            assert answers > 200
            assert failed <= kills * 8 * 2

    run(work())
