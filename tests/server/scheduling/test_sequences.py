"""A sequence model in a whole server: real workers, an instance each, and a client that comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.errors import Kind, ServeError
from fastserve.request import InferRequest
from fastserve.tensor import DTYPES, Tensor
from tests.server.rig import Served, run, serving

RELAYED = True
# Sums up what each sequence sends: by id in the process, and in a state the server carries.
SOURCE = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x, start, ready, id, state = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("IN", "START", "READY", "CORRID", "S_IN")
        )
        key, number = int(id.ravel()[0]), int(x.ravel()[0])
        if number == -1:
            os._exit(1)
        if ready.ravel()[0]:
            self.sums[key] = number + (0 if start.ravel()[0] else self.sums[key])
        out = np.array([[self.sums.get(key, 0), state.ravel()[0] + number, os.getpid()]], np.int32)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT", out), pb_utils.Tensor("S_OUT", out[:, 1:2])]
        )
"""
CONFIG = """
backend: "python"
max_batch_size: 2
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 3 ] } ]
instance_group [ { kind: KIND_CPU count: 2 } ]
sequence_batching {
  max_sequence_idle_microseconds: 100000000
  direct { }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
  state [ { input_name: "S_IN" output_name: "S_OUT" data_type: TYPE_INT32 dims: [ 1 ]
            initial_state { name: "zero" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } ]
}
"""


def write_seq(folder: Path) -> None:
    (folder / "seq" / "1").mkdir(parents=True)
    (folder / "seq" / "config.pbtxt").write_text(CONFIG)
    (folder / "seq" / "1" / "model.py").write_text(SOURCE)


async def say(at: Served, id: int, number: int, **flags: Any) -> list[int]:
    version = at.server.catalog.available("seq")
    assert version is not None
    data = np.array([number], np.int32).tobytes()
    request = InferRequest({"IN": Tensor(DTYPES["int32"], (1, 1), data)}, sequence_id=id, **flags)
    response = await at.engine.infer(version, request)
    try:
        assert list(response.outputs) == ["OUT"]
        return np.frombuffer(response.outputs["OUT"].data, np.int32).tolist()
    finally:
        response.release()


def test_sequences_keep_their_instance_their_sum_and_their_state(tmp_path: Path) -> None:
    write_seq(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as at:
            ids = (1, 2, 3, 4)
            begun = await asyncio.gather(*(say(at, id, id, sequence_start=True) for id in ids))
            assert [row[:2] for row in begun] == [[id, id] for id in ids]
            pids = [row[2] for row in begun]
            assert len(set(pids)) == 2
            parked = asyncio.ensure_future(say(at, 5, 50, sequence_start=True, sequence_end=True))
            for turn in range(2, 5):
                rows = await asyncio.gather(*(say(at, id, id) for id in ids))
                assert rows == [[turn * id, turn * id, pid] for id, pid in zip(ids, pids, strict=True)]
            assert not parked.done()
            assert await say(at, 3, 0, sequence_end=True) == [12, 12, pids[2]]
            assert (await parked)[:2] == [50, 50]
            with pytest.raises(ServeError, match="must specify the START flag"):
                await say(at, 3, 1)

    run(work())


def test_a_worker_that_dies_takes_its_sequences_along(tmp_path: Path) -> None:
    write_seq(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as at:
            begun = {id: await say(at, id, id, sequence_start=True) for id in (1, 2)}
            with pytest.raises(ServeError) as caught:
                await say(at, 1, -1)
            assert caught.value.kind is Kind.UNAVAILABLE
            with pytest.raises(ServeError, match="the sequence's state with it") as caught:
                await say(at, 1, 1)
            assert (caught.value.kind, caught.value.retry_after_s) == (Kind.UNAVAILABLE, 1.0)
            assert await say(at, 2, 5) == [7, 7, begun[2][2]]
            version = at.server.catalog.available("seq")
            assert version is not None
            await at.until(lambda: at.server.host.alive(version) == 2)
            assert (await say(at, 1, 9, sequence_start=True))[:2] == [9, 9]

    run(work())


def test_every_instance_has_a_name_of_its_own(tmp_path: Path) -> None:
    write_seq(tmp_path)
    noted = "open(f\"{args['model_repository']}/{args['model_instance_name']}\", 'x').close()"
    source = SOURCE.replace("self.sums = {}", f"self.sums = {{}}\n        {noted}", 1)
    (tmp_path / "seq" / "1" / "model.py").write_text(source)

    async def work() -> None:
        async with serving(tmp_path):
            assert {path.name for path in (tmp_path / "seq").glob("seq_*")} == {"seq_0_0", "seq_0_1"}

    run(work())
