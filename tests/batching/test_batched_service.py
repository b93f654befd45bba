"""The batching library, with real worker processes: the text's experiment, and everything beyond it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fastserve import BatchedService, VectorTransformer
from fastserve.errors import Kind, ModelError, ServeError
from tests.batching import models

pytestmark = pytest.mark.waits

EXAMPLE = Path(__file__).parents[2] / "examples" / "blog_experiment.py"


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


class Service(BatchedService):
    """A service of one of the test models, its class given when it is made."""

    def __init__(self, kind, init=None, *, size=8, timeout=0.01, **more):
        super().__init__(max_batch_size=size, timeout_seconds=timeout, **more)
        self.kind, self.init = kind, init

    def start(self):
        return super().start(self.kind, self.init)

    async def settled(self):
        """True once shared memory is free; a worker may still be letting go of what nobody waits for."""
        ring = self._batcher.queue.ring
        end = time.monotonic() + 60
        while (ring.outstanding(), ring.slab_pages_used()) != (0, 0):
            assert time.monotonic() < end, (ring.outstanding(), ring.slab_pages_used())
            await asyncio.sleep(0.001)
        return True


@pytest.mark.alone
def test_the_experiment_of_the_text():
    data = list(range(880))

    async def main():
        async with Service(models.Sleepy, size=200, timeout=0.002) as service:
            t0 = time.perf_counter()
            one_by_one = [await service.do_one(x) for x in data]
            t1 = time.perf_counter()
            together = await asyncio.gather(*[service.do_one(x) for x in data])
            t2 = time.perf_counter()
            assert await service.settled()
        return one_by_one, together, (t1 - t0) / (t2 - t1)

    one_by_one, together, ratio = run(main())
    assert one_by_one == together == [x * x for x in data]
    assert ratio > 5, f"batching made it only {ratio:.1f} times faster"


@pytest.mark.parametrize("guarded", [True, False])
def test_the_example_runs_with_and_without_a_main_guard(tmp_path, guarded):
    text = EXAMPLE.read_text()
    script = tmp_path / "experiment.py"
    script.write_text(text if guarded else text.replace('if __name__ == "__main__":', "if True:"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "times faster" in done.stdout


def test_batches_are_full_or_due_and_keep_their_order():
    async def main():
        async with Service(models.Echo, size=4, timeout=0.5) as service:
            many = await service.do_many(range(10))
            alone = await service.do_one("x")
            return many, alone

    many, alone = run(main())
    assert [value for value, _, _ in many] == list(range(10))
    assert [size for _, size, _ in many] == [4] * 8 + [2] * 2
    assert alone[:2] == ("x", 1)
    assert many[0][2] != os.getpid()


def test_constructor_arguments_and_the_three_steps():
    async def main():
        async with Service(models.Steps, {"factor": 3, "offset": 1}) as service:
            return await service.do_many([1, 2])

    assert run(main()) == [(2, 6), (3, 9)]


def test_a_service_started_outside_a_loop_serves_in_it_and_in_another(loop):
    service = Service(models.Sleepy)
    service.start()
    assert loop.run_until_complete(service.do_one(3)) == 9

    async def elsewhere():
        assert await service.do_one(4) == 16, "asyncio.run() has a loop of its own"
        await service.stop()

    run(elsewhere())
    service.start()
    service.stop()


@pytest.mark.lingers  # asyncio.run() ends with the service open: what its loop ran is cancelled
@pytest.mark.parametrize("kind", ["elements", "rows"])
def test_a_service_started_outside_a_loop_moves_once_for_all_callers(loop, kind):
    """Callers in a new loop found the batcher that was being closed, and the service was dead after it."""
    if kind == "rows":
        row = ((1,), "float32")
        service = Service(models.Rows, row=row, out_row=row)
        elements = [np.full(1, v, np.float32) for v in (1, 2)]
        expected = [1, 2]
    else:
        service = Service(models.Sleepy)
        elements, expected = [1, 2], [1, 4]
    service.start()

    async def together():
        many = await asyncio.gather(*[service.do_many(elements) for _ in range(4)])
        return [[float(np.squeeze(v)) for v in one] for one in many]

    for _ in range(3):
        assert run(together()) == [expected] * 4
    assert [float(np.squeeze(v)) for v in run(service.do_many(elements))] == expected
    service.stop()
    assert service.start() is not None
    run(closes(service))


async def closes(service):
    """Stop in a loop that the service never ran on."""
    await service.stop()
    with pytest.raises(RuntimeError, match="start"):
        await service.do_one(1)


@pytest.mark.lingers
def test_a_loop_that_ends_while_the_service_moves_leaves_it_to_the_next(loop):
    service = Service(models.Sleepy)
    service.start()

    async def leaves():
        caller = asyncio.ensure_future(service.do_one(1))
        while service._opening is None:
            await asyncio.sleep(0)
        caller.cancel()

    run(leaves())
    assert run(service.do_many([2, 3])) == [4, 9]
    service.stop()


def test_a_service_of_a_loop_that_runs_is_not_taken_by_another(loop):
    service = Service(models.Sleepy)

    async def main():
        await service.start()
        with pytest.raises(RuntimeError, match="make one for each loop"):
            await asyncio.to_thread(asyncio.run, service.do_one(1))
        assert await service.do_one(2) == 4
        await asyncio.to_thread(service.stop)

    run(main())


def test_stop_works_after_the_loop_was_closed(loop):
    service = Service(models.Sleepy)
    service.start()
    loop.close()
    service.stop()


def test_errors_reach_exactly_the_callers_of_their_batch():
    async def main():
        async with Service(models.Picky, size=2, timeout=1) as service:
            first = await asyncio.gather(service.do_one("raise"), service.do_one("a"), return_exceptions=True)
            second = await service.do_many(["b", "c"])
            short = await asyncio.gather(service.do_one("short"), service.do_one("d"), return_exceptions=True)
            assert await service.settled()
        return first, second, short

    first, second, short = run(main())
    assert [type(e) for e in first] == [ModelError, ModelError]
    assert "no such luck" in str(first[0])
    assert second == ["b", "c"]
    assert "1 results for 2 elements" in str(short[1])


def test_a_bad_element_reaches_only_its_caller():
    async def main():
        async with Service(models.Picky, size=4, timeout=1) as service:
            results = await service.do_many(["a", "bad", "stuck", "b"], return_exceptions=True)
            with pytest.raises(TypeError, match=r"objects of type .*object cannot travel"):
                await service.do_one(["fine", object()])
            assert await service.settled()
        return results

    results = run(main())
    assert (results[0], results[3]) == ("a", "b")
    assert "bad element" in str(results[1])
    assert "cannot be sent back" in str(results[2])


def test_a_dead_worker_is_noticed_and_replaced():
    async def main():
        async with Service(models.Picky, size=1) as service:
            with pytest.raises(ServeError, match="died") as caught:
                await service.do_one("die")
            after = await service.do_one("alive")
            assert await service.settled()
        return caught.value.kind, after

    assert run(main()) == (Kind.UNAVAILABLE, "alive")


class Hooked(Service):
    async def preprocess(self, x):
        return x


@pytest.mark.logs_errors
@pytest.mark.parametrize("kind", [Service, Hooked])
def test_callers_of_a_worker_that_cannot_be_restarted_get_its_failure(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("fastserve.engine.supervision.NO_WORKER_LIMIT_S", 2.0)
    monkeypatch.setattr("fastserve.engine.supervision.NO_WORKER_LOOK_S", 0.1)
    file = tmp_path / "fire"

    async def main():
        async with kind(models.Doomed, {"path": str(file)}, size=1, max_queue_size=1) as service:
            with pytest.raises(ServeError, match="died"):
                await service.do_one("die")
            # More than there are slots: some of them wait in a batch, the others for a slot.
            waited = await service.do_many(range(50), return_exceptions=True)
            assert await service.settled()
            file.unlink()
            while True:
                with contextlib.suppress(ServeError):
                    return waited, await service.do_one("again")

    waited, again = run(main())
    assert again == "again"
    assert {error.kind for error in waited} == {Kind.UNAVAILABLE}
    assert {str(error) for error in waited} == {
        "no worker of this service is alive: ValueError: the disk is on fire"
    }


def test_numpy_rows_land_in_the_batch_and_come_back_as_rows():
    row, out = ((3,), "float32"), ((1,), np.float32)

    async def main():
        async with Service(models.Rows, row=row, out_row=out) as service:
            sums = await service.do_many([np.full(3, i, np.float32) for i in range(20)])
            with pytest.raises(ValueError, match="shape"):
                await service.do_one(np.zeros(4, np.float32))
            assert await service.settled()
        return sums

    assert [float(s[0]) for s in run(main())] == [3.0 * i for i in range(20)]


def test_numpy_rows_in_and_objects_out():
    async def main():
        async with Service(models.RowObjects, row=((2, 2), "int64")) as service:
            return await service.do_many([np.full((2, 2), i) for i in (1, 2)])

    assert run(main()) == [{"sum": 4.0}, {"sum": 8.0}]


class Hooked(Service):
    """Batches pass through both hooks, in this process and in order."""

    seen: list

    async def preprocess(self, x):
        self.seen.append(list(x))
        if "refuse" in x:
            raise KeyError("refused here")
        return {"items": [int(v) for v in x]}

    async def postprocess(self, x):
        assert x["n"] == len(x["items"])
        return [("done", v) for v in x["items"]]


def test_hooks_work_on_whole_batches():
    async def main():
        service = Hooked(models.Whole, size=3, timeout=0.5)
        service.seen = []
        async with service:
            results = await service.do_many(["1", "2", "3", "4"])
            refused = await service.do_many(["refuse", "5"], return_exceptions=True)
            assert await service.settled()
        return results, refused, service.seen

    results, refused, seen = run(main())
    assert results == [("done", v) for v in (2, 4, 6, 8)]
    assert seen[:2] == [["1", "2", "3"], ["4"]]
    assert all(isinstance(e, KeyError) for e in refused)


def gate(tmp_path):
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path, os.open(path, os.O_RDWR)


def test_a_full_queue_makes_callers_wait_in_order(tmp_path):
    path, pipe = gate(tmp_path)

    async def main():
        async with Service(models.Gate, {"path": str(path)}, size=1, max_queue_size=2) as service:
            tasks = [asyncio.ensure_future(service.do_one(i)) for i in range(10)]
            while not service._batcher.queue.room.rows:
                await asyncio.sleep(0)
            waiting = service._batcher.queue.room.rows  # a row each
            os.write(pipe, b"x" * 10)
            results = await asyncio.gather(*tasks)
            assert await service.settled()
        return waiting, results

    try:
        waiting, results = run(main())
    finally:
        os.close(pipe)
    assert waiting > 0
    assert [value for value, _ in results] == list(range(10))


def test_cancelling_a_caller_frees_its_place(tmp_path):
    path, pipe = gate(tmp_path)

    async def main():
        async with Service(models.Gate, {"path": str(path)}, size=4, timeout=0.001) as service:
            blocker = asyncio.ensure_future(service.do_one("first"))
            ring = service._batcher.queue.ring
            while "running" not in [ring.describe(i)[0] for i in range(ring.slots)]:
                await asyncio.sleep(0.001)
            gone = asyncio.ensure_future(service.do_one("gone"))
            while ring.queued() == 0:
                await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            os.write(pipe, b"xx")
            assert await blocker == ("first", 1)
            assert await service.do_one("next") == ("next", 1), "nobody's element was in no batch"
            assert await service.settled()

    try:
        run(main())
    finally:
        os.close(pipe)


def test_stop_gives_waiting_callers_an_error(tmp_path):
    path, pipe = gate(tmp_path)

    async def main():
        service = Service(models.Gate, {"path": str(path)})
        await service.start()
        waiting = asyncio.ensure_future(service.do_one(1))
        while service._batcher.queue.waiting == 0:
            await asyncio.sleep(0)
        stopping = service.stop()
        with pytest.raises(ServeError, match="the service was stopped"):
            await waiting
        await stopping
        service.stop()
        with pytest.raises(RuntimeError, match="start"):
            await service.do_one(2)

    try:
        run(main())
    finally:
        os.close(pipe)


def test_a_worker_that_does_not_come_up_says_why():
    with pytest.raises(ServeError, match="no weights here"):
        run(Service(models.Broken).__aenter__())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0,), "max_batch_size"),
        ((10001,), "max_batch_size"),
        ((1, 0), "timeout_seconds"),
        ((1, 2), "timeout_seconds"),
        ((1, 0.1, 129), "max_queue_size"),
    ],
)
def test_bad_sizes_are_named(arguments, field):
    with pytest.raises(ValueError, match=field):
        BatchedService(*arguments)


def test_classes_a_worker_cannot_import_are_refused():
    class Local(VectorTransformer):
        def transform(self, x):
            return x

    with pytest.raises(TypeError, match="inside a function"):
        BatchedService(1).start(Local)
    with pytest.raises(TypeError, match="subclass of VectorTransformer"):
        BatchedService(1).start(int)
    with pytest.raises(TypeError, match="worker_class"):
        BatchedService(1).start()
    with pytest.raises(TypeError, match="cannot travel"):
        BatchedService(1).start(models.Steps, {"factor": object()})


def test_two_instances_share_the_work():
    async def main():
        async with Service(models.Echo, size=1, instances=2) as service:
            pids = {pid for _, _, pid in await service.do_many(range(200))}
        return pids

    assert 1 <= len(run(main())) <= 2
