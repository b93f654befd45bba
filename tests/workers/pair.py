"""A backend that is a function, and one front beside one worker over a real arena, all in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastserve.codec.slab_contents import measure_tensors, read_tensors, write_tensors
from fastserve.tensor import DTYPES, TensorSpec
from fastserve.workers.arena import Arena, WorkerContext, plan_geometry
from fastserve.workers.arrays import as_tensor
from fastserve.workers.loop import answer, make_runner
from tests.workers.arrays import view_tensor

Arrays = dict[str, Any]
SIZES = {
    "backend": "python",
    "max_batch_size": 4,
    "max_queue_rows": 16,
    "max_queue_bytes": 1 << 20,
    "max_queue_delay_us": 0,
    "instances": 1,
}


def specs(**tensors: tuple[str, tuple[int, ...] | None]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, DTYPES[dtype], shape) for name, (dtype, shape) in tensors.items()}


class Function:
    """A backend; `seen` keeps what it was run on."""

    def __init__(
        self,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        run: Callable[[Arrays], Arrays],
    ) -> None:
        self.inputs, self.outputs = dict(inputs), dict(outputs)
        self.seen: list[Arrays] = []
        self._run = run

    def load(self) -> None: ...

    def close(self) -> None: ...

    def run(self, inputs: Arrays) -> Arrays:
        self.seen.append({name: np.array(array) for name, array in inputs.items()})
        return self._run(inputs)


class Pair:
    """The front writes, the worker runs, the front reads."""

    def __init__(self, backend: Function, **config: Any) -> None:
        self.backend = backend
        self.config = {**SIZES, **config}
        self.arena = Arena.create(plan_geometry(self.config, backend.inputs, backend.outputs))
        self.front, self.worker = self.arena.ring(front=0), self.arena.ring(worker=0)
        self.runner = make_runner(WorkerContext(self.arena, self.worker, backend, self.config))

    def put(self, **inputs: Any) -> tuple[int, int]:
        """Commit one request; its place and rows."""
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        rows = len(next(iter(arrays.values()))) if self.config["max_batch_size"] else 1
        lease = self.front.reserve(rows)
        if self.arena.geometry.dense:
            for column, name in enumerate(self.backend.inputs):
                self.front.input_rows(lease, rows, column)[:] = arrays[name].tobytes()
        else:
            tensors = [
                (i, as_tensor(arrays[name], spec.dtype))
                for i, (name, spec) in enumerate(self.backend.inputs.items())
            ]
            offset = self.front.allocate_slab(measure_tensors(tensors))
            write_tensors(self.front.slab(offset, measure_tensors(tensors), True), tensors)
            self.front.attach_slab(lease, offset, measure_tensors(tensors))
        self.front.commit(lease, rows)
        return lease, rows

    def step(self, *leaving: tuple[int, int]) -> None:
        """The worker runs one batch; whoever is leaving goes when it has been taken."""
        slot = self.worker.take()
        assert slot >= 0
        assert all(self.front.drop(*lease) for lease in leaving)
        answer(self.worker, self.runner, slot)

    def get(self, lease: int, rows: int) -> Any:
        """The outputs of a place as arrays, or (kind, text) of its failure; the place is released."""
        failure = self.front.failure(lease >> 16)
        try:
            if failure is not None:
                return failure
            if self.arena.geometry.dense:
                return {
                    name: np.frombuffer(
                        bytes(self.front.output_rows(lease, rows, i)), spec.dtype.name
                    ).reshape(rows, *(spec.shape or ()))
                    for i, (name, spec) in enumerate(self.backend.outputs.items())
                }
            tensors = read_tensors(self.front.slab(*self.front.answer_slab(lease)))
            status = self.front.lease_status(lease)
            if status:
                return status, bytes(tensors[0][1].data).decode()
            names = list(self.backend.outputs)
            return {names[i]: np.array(view_tensor(tensor)) for i, tensor in tensors}
        finally:
            self.front.release(lease, rows)


@contextlib.contextmanager
def pair(backend: Function, **config: Any) -> Iterator[Pair]:
    """Nothing may be outstanding afterwards."""
    made = Pair(backend, **config)
    try:
        yield made
        assert made.front.outstanding() == 0
        assert made.front.slab_pages_used() == 0
    finally:
        made.arena.close()
