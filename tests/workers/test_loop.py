"""A worker's loop: joins, warms up, runs what comes, and stops when told or left alone."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.workers import loop
from fastserve.workers.arena import Arena, plan_geometry
from fastserve.workers.control import ControlChannel
from tests.workers.pair import SIZES, Function, pair, specs

X, Y = specs(x=("float32", (2,))), specs(y=("float32", (2,)))


def twice(inputs):
    return {"y": inputs["x"] * 2}


class Running:
    """loop.serve() in a thread, and the owner's end of its control line."""

    def __init__(self, backend: Function, **config: object) -> None:
        self.config = {**SIZES, **config}
        self.arena = Arena.create(plan_geometry(self.config, backend.inputs, backend.outputs))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(60)
        self.owner, self._worker = ControlChannel(ours, owner=True), ControlChannel(theirs, owner=False)
        self._backend = backend
        self.raised: BaseException | None = None
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        message, fds = self.arena.fds_for_worker(0)
        try:
            loop.serve(self._backend, self._worker, self.config, message, [os.dup(fd) for fd in fds])
        except BaseException as error:
            self.raised = error.with_traceback(None)  # which would keep the arena

    def close(self) -> None:
        self.owner.close()
        self.arena.ring(front=0).wake_all_workers()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self._worker.close()
        self.arena.close()


@contextlib.contextmanager
def running(backend: Function, **config: object) -> Iterator[Running]:
    made = Running(backend, **config)
    made.thread.start()
    try:
        yield made
    finally:
        made.close()


def test_runs_what_comes_and_stops_when_told():
    with running(Function(X, Y, twice), warmup="off") as it:
        assert it.owner.receive().message == {"op": "ready"}
        front = it.arena.ring(front=0)
        for value in (1.0, 2.0, 3.0):
            lease = front.reserve(1)
            front.input_rows(lease, 1, 0)[:] = np.full(2, value, np.float32).tobytes()
            front.commit(lease, 1)
            front.wake_workers()
            assert select.select([it.arena.front_doorbells[0]], [], [], 10)[0]
            assert front.drain() == [(lease >> 16, front.seq(lease >> 16))]
            assert front.describe(lease >> 16)[0] == "done"
            assert np.frombuffer(front.output_rows(lease, 1, 0), np.float32).tolist() == [2 * value] * 2
            front.release(lease, 1)
        it.owner.send({"op": "stop"})
        it.thread.join(60)
        assert not it.thread.is_alive()
        assert it.raised is None


def test_stops_when_the_owner_is_gone():
    with running(Function(X, Y, twice)) as it:
        it.owner.receive()
        it.owner.close()
        it.thread.join(60)
        assert not it.thread.is_alive()


@pytest.mark.parametrize(
    ("warmup", "wanted"),
    [
        ("off", []),
        ("auto", [1, 2, 4]),
        ([{"inputs": {"x": [[1, 2]]}, "rows": 1, "count": 2}], [1, 1]),
        ([{"inputs": {"x": "zeros"}, "rows": 3}], [3]),
        ([{"inputs": {}, "rows": 2}], [2]),
    ],
)
def test_warm_up_comes_before_ready(warmup, wanted):
    backend = Function(X, Y, twice)
    with running(backend, warmup=warmup, allowed_batch_sizes=[1, 2, 4]) as it:
        assert it.owner.receive().message == {"op": "ready"}
        assert [len(seen["x"]) for seen in backend.seen] == wanted


def needs(check, fault=None):
    def run(inputs):
        if not check(inputs["x"]):
            raise fault or ValueError("not these")
        return twice(inputs)

    return Function(X, Y, run)


@pytest.mark.lingers
@pytest.mark.parametrize(
    "model",
    [
        needs(lambda x: x.all()),
        needs(lambda x: np.ptp(x) > 0),
        needs(lambda x: False, ServeError(Kind.INVALID_ARGUMENT, "none of these")),
    ],
    ids=["ones", "numbers that differ", "its own words"],
)
def test_a_model_may_refuse_guesses(model):
    with running(model, warmup="auto") as it:
        assert it.owner.receive().message == {"op": "ready"}


@pytest.mark.lingers
@pytest.mark.parametrize(
    ("inputs", "fault", "sound"),
    [
        (X, RuntimeError("boom"), False),
        (X, ServeError(Kind.INTERNAL, "output 'y' is float64"), False),
        (specs(x=("float32", (-1,))), NameError("nmupy"), False),
        (specs(x=("float32", (-1,))), RuntimeError("kernel larger than picture"), True),
        (specs(x=("bytes", ())), ValueError("no JSON"), True),
    ],
)
def test_a_model_that_can_never_run_is_not_served(inputs, fault, sound):
    def run(_):
        raise fault

    with running(Function(inputs, Y, run), warmup="auto") as it:
        if sound:
            assert it.owner.receive().message == {"op": "ready"}
        else:
            it.thread.join(60)
            assert isinstance(it.raised, ServeError)
            assert str(fault) in str(it.raised)


def test_a_model_that_refuses_its_own_sample_is_not_served():
    def refuse(inputs):
        raise ValueError("not these")

    with running(Function(X, Y, refuse), warmup=[{"inputs": {"x": "zeros"}}]) as it:
        it.thread.join(60)
        assert str(it.raised) == "not these"
    with running(Function(X, Y, twice), warmup=[{"inputs": {"x": [["a", "b"]]}}]) as it:
        it.thread.join(60)
        assert isinstance(it.raised, ConfigError)
        assert "warmup[0].inputs.x" in str(it.raised)


@pytest.mark.lingers  # the logged traceback keeps the arrays, and with them the arena
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (ServeError(Kind.INVALID_ARGUMENT, "too blue"), Kind.INVALID_ARGUMENT, "too blue"),
        (ValueError("bad row"), Kind.INTERNAL, "bad row"),
        (MemoryError(), Kind.INTERNAL, "no memory for a batch of 3 rows: MemoryError"),
    ],
)
def test_what_a_model_raises_reaches_the_callers_of_that_batch(fault, kind, words):
    fail = [True]

    def run(inputs):
        if fail.pop():
            raise fault
        return twice(inputs)

    with pair(Function(X, Y, run), isolate_failures=False) as it:
        leases = [it.put(x=np.ones((1, 2), np.float32)), it.put(x=np.ones((2, 2), np.float32))]
        it.step()
        for lease in leases:
            number, text = it.get(*lease)
            assert number == kind.value
            assert words in text
        fail.append(False)
        lease = it.put(x=np.ones((1, 2), np.float32))
        it.step()
        assert it.get(*lease)["y"].tolist() == [[2, 2]]
