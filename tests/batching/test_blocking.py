"""The batching library for callers who block: `with`, `submit` and `map`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastserve import BatchedService
from fastserve.batching.batched_service import NAME
from fastserve.errors import ServeError
from tests.batching import models


class Echoing(BatchedService):
    worker_class = models.Echo


def services() -> list[int]:
    return [thread.ident for thread in threading.enumerate() if thread.name == NAME]


@pytest.mark.parametrize("options", [{}, {"in_process": True}], ids=["worker", "thread"])
def test_threads_share_batches(options):
    with Echoing(8, 0.05, **options) as service:
        assert service.submit(3).result(60)[0] == 3
        assert [value for value, _, _ in service.map(range(20))] == list(range(20))
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda x: service.submit(x).result(60), range(32)))
        assert [value for value, _, _ in found] == list(range(32))
        assert max(size for _, size, _ in found) > 1
        assert {pid == os.getpid() for _, _, pid in found} == {bool(options)}
        assert len(services()) == 1
    assert services() == []
    with pytest.raises(RuntimeError, match="with service"):
        service.submit(1)
    with service:  # again
        assert service.map([1])[0][0] == 1


def test_a_start_outside_of_a_loop_is_enough(loop):
    service = Echoing(8, 0.01)
    service.start()
    assert service.submit(1).result(60)[0] == 1
    assert service.map([1, 2])[1][0] == 2
    service.stop()
    assert services() == []


def test_the_loop_of_the_service_does_not_wait_for_itself():
    async def main():
        async with Echoing(8, 0.01) as service:
            with pytest.raises(RuntimeError, match="await do_one"):
                service.submit(1)
            with pytest.raises(RuntimeError, match="await do_one"):
                service.map([1])
            found = await asyncio.to_thread(lambda: service.submit(5).result(60))
            assert found[0] == 5

    asyncio.run(main())


def test_a_service_with_a_loop_of_its_own_may_be_asked_beside_a_running_loop():
    async def main():
        with Echoing(8, 0.01) as service:  # as in a cell of a notebook
            return service.submit(7).result(60)[0]

    assert asyncio.run(main()) == 7


def test_errors_are_raised_where_the_result_is_asked_for():
    class Picky(BatchedService):
        worker_class = models.Picky

    with Picky(1, 0.01) as service:
        with pytest.raises(ServeError, match="no such luck"):
            service.submit("raise").result(60)
        with pytest.raises(ServeError, match="bad element"):
            service.map(["fine", "bad"])
        assert isinstance(service.map(["bad"], return_exceptions=True)[0], ServeError)
        with pytest.raises(TypeError, match="cannot travel"):
            service.submit(object()).result(60)
    with pytest.raises(TypeError, match="worker_class"), BatchedService(1):
        pass
    assert services() == []


def test_a_program_that_forgets_to_stop_ends():
    text = textwrap.dedent("""
        from fastserve import BatchedService
        from tests.batching import models
        service = BatchedService(8, 0.01)
        service.start(models.Echo)
        print(service.submit(4).result(60)[0], flush=True)
    """)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_a_typed_script_may_ask_without_await():
    text = textwrap.dedent("""
        from dataclasses import dataclass
        from fastserve import BatchedService, VectorTransformer

        @dataclass
        class Point:
            x: int

        class Doubles(VectorTransformer):
            def transform(self, points):
                return [Point(2 * point.x) for point in points]

        service = BatchedService(8, 0.01)
        service.start(Doubles)
        print(service.map([Point(1), Point(2)]))
        service.stop()
    """)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[Point(x=2), Point(x=4)]\n", done.stderr
