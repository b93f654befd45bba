"""Both paths of Predict over gRPC: the same requests through the fast one and the general one, alike.

A request that brings an input twice means the same as with the last one and takes the general path.
"""

from __future__ import annotations

import asyncio
import random
import struct
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml

from fastserve.serving.request_templates import MessageTemplates
from tests.dialects.tfserving.grpc_rig import PREDICTION, TFS, TfsServed, fill, serving, status_of
from tests.ext.wire_strategies import field
from tests.server.rig import HOLD, KILL, release, run, seen, write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
MIXED = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        a, b = inputs["a"], inputs["b"]
        return {"sum": a.sum(axis=1) + b[:, 0], "b": b * 2, "h": inputs["h"]}
"""
TENSORS = {
    "inputs": {
        "a": {"dtype": "float32", "shape": [3]},
        "b": {"dtype": "int32", "shape": [2]},
        "h": {"dtype": "float16", "shape": [1]},
    },
    "outputs": {
        "sum": {"dtype": "float32", "shape": []},
        "b": {"dtype": "int32", "shape": [2]},
        "h": {"dtype": "float16", "shape": [1]},
    },
}
ITEMS = {
    "a": (3, "DT_FLOAT", "float_val", "f"),
    "b": (2, "DT_INT32", "int_val", "i"),
    "h": (1, "DT_HALF", "half_val", "H"),
}
VALUES = [0, 1, 7, 300, 15360]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether the fast path took each request."""
    said: list[bool] = []
    start = MessageTemplates.start

    def noting(self: MessageTemplates[Any], *given: Any) -> Any:
        said.append(start(self, *given))
        return said[-1]

    monkeypatch.setattr(MessageTemplates, "start", noting)
    return said


def write_mixed(folder: Path, shapes: dict[str, Any] | None = None) -> None:
    (folder / "mixed" / "1").mkdir(parents=True)
    (folder / "mixed" / "1" / "model.py").write_text(MIXED)
    config = {"backend": "python", "max_batch_size": 4, "labels": {"best": 1}, **TENSORS, **(shapes or {})}
    (folder / "mixed" / "model.yaml").write_text(yaml.safe_dump(config))


def make_request(pick: random.Random) -> Any:
    """A request for `mixed`, most of them good."""
    request = TFS.PredictRequest()
    request.model_spec.name = "mixed"
    choice = pick.random()
    if choice < 0.3:
        request.model_spec.version.value = 1
    elif choice < 0.5:
        request.model_spec.version_label = "best"
    rows, content = pick.choice([1, 1, 2, 4, 5, 0]), pick.random() < 0.4
    for name, (width, dtype, values, form) in ITEMS.items():
        tensor, count = request.inputs[name], rows * width
        fill(tensor, TFS.DataType.Value(dtype), (rows, width if pick.random() > 0.02 else 5))
        numbers = [pick.choice(VALUES) for _ in range(count)]
        if pick.random() < 0.1:
            numbers = numbers[:1]  # stands for all of them
        if content and len(numbers) == count:
            tensor.tensor_content = struct.pack(f"<{count}{form}", *numbers)
        else:
            getattr(tensor, values).extend(numbers)
    if pick.random() < 0.3:
        request.output_filter.extend(pick.sample(["sum", "b", "h"], pick.randint(1, 3)))
    return request


def doubled(request: Any) -> bytes:
    """Return the request with an input in it twice."""
    entry = field(1, 2, b"a") + field(2, 2, TFS.TensorProto(dtype=7).SerializeToString())
    data: bytes = field(2, 2, entry) + request.SerializeToString()
    return data


async def ask(served: TfsServed, data: bytes) -> Any:
    """The reply, or what went wrong."""
    try:
        return await served.send(PREDICTION + "Predict", data)
    except grpc.aio.AioRpcError as error:
        return status_of(error)


@pytest.mark.parametrize("ragged", [False, True], ids=["columns", "slabs"])
def test_both_paths_answer_alike(ragged: bool, tmp_path: Path, taken: list[bool]) -> None:
    changes: dict[str, Any] = {}
    if ragged:
        changes = yaml.safe_load(yaml.safe_dump(TENSORS))
        changes["outputs"]["b"]["shape"] = changes["inputs"]["b"]["shape"] = [-1]
    write_mixed(tmp_path, changes)
    pick = random.Random(5)

    async def work() -> None:
        async with serving(tmp_path) as served:
            for _ in range(120):
                request = make_request(pick)
                general = await ask(served, doubled(request))
                data = request.SerializeToString()
                for _ in range(2):
                    assert await ask(served, data) == general
        assert sum(taken) > 60

    run(work(), 120)


def test_one_head_for_any_number_of_rows(tmp_path: Path, taken: list[bool]) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            for rows in ([1], [2, 3], [4, 5, 6], [7], [8, 9, 10, 11]):
                assert await served.predict(*rows) == [2 * row for row in rows]
        assert taken == [False, True, True, True, True]

    run(work())


def test_a_head_is_known_for_one_version(tmp_path: Path, taken: list[bool]) -> None:
    """A label that moves, and a version that is loaded anew, answer at once."""
    write_model(tmp_path, numbers=(1, 2), labels={"best": 1}, version_policy="all")

    async def work() -> None:
        async with serving(tmp_path, model_control="poll", load_models=()) as served:
            request = TFS.PredictRequest(model_spec={"name": "twice", "version_label": "best"})
            fill(request.inputs["x"], 1, (1, 2))
            request.inputs["x"].float_val.extend([3.0, 0.5])

            async def asked() -> tuple[int, float]:
                reply = await served.ask(PREDICTION + "Predict", request, "PredictResponse")
                return reply.model_spec.version.value, reply.outputs["y"].float_val[0]

            assert [await asked() for _ in range(3)] == [(1, 6.0)] * 3
            assert taken == [False, True, True]
            served.server.catalog.models["twice"].labels = {"best": 2}
            assert [await asked() for _ in range(2)] == [(2, 6.0)] * 2

    run(work())


def test_a_worker_that_dies(tmp_path: Path, taken: list[bool]) -> None:
    """The request that killed a worker is told so, the next one is answered, and nothing stays taken
    (`serving` looks)."""
    write_model(tmp_path, restart_backoff_s=0.01)

    async def work() -> None:
        async with serving(tmp_path) as served:
            assert await served.predict(1) == [2]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.predict(KILL)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await served.predict(5) == [10]

    run(work())


def test_a_deadline_in_the_queue(tmp_path: Path) -> None:
    """The client's deadline is the request's; one that passed in the queue is told in the original's words
    to who still listens."""
    write_model(tmp_path, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path) as served:
            assert await served.predict(1) == [2]
            holding = asyncio.ensure_future(served.predict(HOLD))
            await served.until(lambda: [HOLD] in seen(tmp_path))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.predict(2, timeout=0.2)
            assert caught.value.code() in (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
            release(tmp_path)
            assert await holding == [2 * HOLD]

    run(work())
