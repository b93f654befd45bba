"""A service in threads of this process, and what other systems than Linux have of the package."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from fastserve import BatchedService, VectorTransformer
from fastserve.errors import Kind, ServeError
from tests.batching import models


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


def service_of(kind, size=4, timeout=0.02, base=BatchedService, **more):
    class Service(base):
        worker_class = kind

    return Service(size, timeout, in_process=True, **more)


class Held(VectorTransformer):
    """Runs when it is let."""

    def __init__(self):
        self.open, self.sizes = threading.Event(), []
        Held.last = self

    def transform(self, x):
        self.open.wait(30)
        self.sizes.append(list(x))
        return x


def test_batches_are_full_or_due_and_in_order():
    async def main():
        async with service_of(models.Echo) as service:
            found = await service.do_many(range(9))
            assert [value for value, _, _ in found] == list(range(9))
            assert [size for _, size, _ in found] == [4] * 8 + [1]

    run(main())


def test_classes_may_be_local_and_objects_of_any_type():
    class Local(VectorTransformer):
        def __init__(self, mark):
            self.mark = mark

        def transform(self, x):
            return [(one, self.mark, threading.current_thread().name) for one in x]

        def close(self):
            closed.append(threading.current_thread().name)

    closed = []
    mark, value = object(), object()

    async def main():
        service = BatchedService(4, 0.01, in_process=True)
        await service.start(Local, {"mark": mark})
        (got, marked, name) = await service.do_one(value)
        assert (got, marked) == (value, mark)
        await service.stop()
        assert closed == [name]

    run(main())


def test_errors_reach_the_callers_of_their_batch():
    async def main():
        async with service_of(models.Picky) as service:
            for elements, said in ((["raise", 1], "no such luck"), (["short", 1], "1 results for 2")):
                found = await service.do_many(elements, return_exceptions=True)
                assert [type(one) for one in found] == [ServeError] * 2
                assert said in str(found[0])
            found = await service.do_many(["bad", 5], return_exceptions=True)
            assert (str(found[0]), found[1]) == ("ValueError: bad element", 5)
            assert isinstance(found[0].__cause__, ValueError)
        with pytest.raises(ServeError) as caught:
            async with service_of(models.Steps) as service:
                pass
        assert "factor" in str(caught.value)

    run(main())


def test_rows_are_one_read_only_array():
    class Rows(VectorTransformer):
        def transform(self, x):
            shapes.append((x.shape, x.flags.writeable))
            return x.sum(axis=1, keepdims=True)

    shapes = []

    async def main():
        async with service_of(Rows, row=((3,), "float32"), out_row=((1,), "float32")) as service:
            found = await service.do_many([[1, 2, 3], np.ones(3, np.float32)])
            assert [one.tolist() for one in found] == [[6.0], [3.0]]
            assert shapes == [((2, 3), False)]
            with pytest.raises(ValueError, match="shape"):
                await service.do_one([1, 2])
        wrong = service_of(Rows, row=((3,), "float32"), out_row=((2,), "float32"))
        async with wrong as service:
            with pytest.raises(ServeError, match="out_row says"):
                await service.do_one([1, 2, 3])

    run(main())


def test_hooks_work_on_whole_batches_in_their_order():
    class Hooked(BatchedService):
        async def preprocess(self, x):
            await asyncio.sleep(0.01 if 0 in x else 0)
            return [one + 1 for one in x]

        async def postprocess(self, x):
            return [("post", one) for one in x]

    async def main():
        async with service_of(models.Steps, base=Hooked) as service:
            raise AssertionError(service)  # Steps needs a factor

    with pytest.raises(ServeError):
        run(main())

    class Plain(VectorTransformer):
        def transform(self, x):
            return [2 * one for one in x]

    async def plain():
        async with service_of(Plain, base=Hooked) as service:
            assert await service.do_many(range(6)) == [("post", 2 * (n + 1)) for n in range(6)]

    run(plain())


def test_a_full_queue_waits_and_a_cancelled_caller_is_left_out():
    async def main():
        async with service_of(Held, size=1, max_queue_size=1) as service:
            calls = [asyncio.ensure_future(service.do_one(n)) for n in range(6)]
            while not service._batcher._slots.locked():
                await asyncio.sleep(0)
            calls[1].cancel()
            calls[4].cancel()
            await asyncio.sleep(0)
            Held.last.open.set()
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert [one for one in found if isinstance(one, int)] == [0, 2, 3, 5]
            assert Held.last.sizes == [[0], [2], [3], [5]]

    run(main())


def test_a_stop_fails_callers_who_wait():
    async def main():
        service = service_of(Held, size=1, max_queue_size=1)
        await service.start()
        calls = [asyncio.ensure_future(service.do_one(n)) for n in range(4)]
        while not service._batcher._slots.locked():
            await asyncio.sleep(0)
        stopping = service.stop()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert {one.kind for one in found} == {Kind.UNAVAILABLE}
        Held.last.open.set()
        await stopping
        with pytest.raises(RuntimeError, match="start"):
            await service.do_one(1)

    run(main())


def test_instances_run_beside_one_another():
    barrier = threading.Barrier(2, timeout=30)

    class Meets(VectorTransformer):
        def transform(self, x):
            barrier.wait()
            return x

    async def main():
        async with service_of(Meets, size=1, instances=2) as service:
            assert await service.do_many([1, 2]) == [1, 2]

    run(main())


ELSEWHERE = """
    import os, sys

    sys.platform = "darwin"
    for name in ("memfd_create", "eventfd", "pidfd_open"):
        delattr(os, name) if hasattr(os, name) else None

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("fastserve._ext.") or name == "uvloop":
                raise ImportError(name + " is not built here")

    sys.meta_path.insert(0, Missing())
"""


PROXIES_OF_MACOS = """
from types import SimpleNamespace
sys.modules["_scproxy"] = SimpleNamespace(_get_proxy_settings=dict, _get_proxies=dict)
"""


def elsewhere(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python as on a system without what the server needs of Linux, and without compiled modules."""
    whole = textwrap.dedent(ELSEWHERE) + textwrap.dedent(text)
    command = [sys.executable, "-c", whole, *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root)


def test_another_system_has_the_library_in_process():
    done = elsewhere("""
        import fastserve

        class Doubles(fastserve.VectorTransformer):
            def transform(self, x):
                return [2 * one for one in x]

        try:
            fastserve.BatchedService(8)
        except RuntimeError as fault:
            print(fault)
        service = fastserve.BatchedService(8, 0.01, in_process=True)
        service.start(Doubles)
        print(service.map([1, 2]))
        service.stop()
        print(fastserve.Client("http://127.0.0.1:1").ready())
    """)
    said, *rest = done.stdout.splitlines()
    assert "Linux has and darwin has not" in said
    assert "in_process=True" in said
    assert rest == ["[2, 4]", "False"], done.stderr


@pytest.mark.parametrize("command", [["serve", "demo"], ["run", "app.py"], ["tritonserver"], ["check", "x"]])
def test_another_system_is_told_that_it_has_no_server(command):
    done = elsewhere("from fastserve.cli import main\nmain()\n", *command)
    assert (done.returncode, done.stdout) == (1, "")
    assert "a server needs Linux" in done.stderr
    assert "darwin" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_system_has_the_commands_that_ask():
    for command in (["--help"], ["new", "--help"], ["infer", "--help"], ["bench", "--help"]):
        done = elsewhere(f"{PROXIES_OF_MACOS}\nfrom fastserve.cli import main\nmain()\n", *command)
        assert done.returncode == 0, done.stderr
    done = elsewhere("import fastserve\nfastserve.serve()\n")
    assert "fastserve: a server needs Linux" in done.stderr
    assert "Traceback" not in done.stderr
