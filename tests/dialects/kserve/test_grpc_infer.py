"""Both paths of ModelInfer: the same requests through the fast one and the general one, the same bytes back.

A request whose id is given twice means the same as with the last one and takes the general path.
"""

from __future__ import annotations

import asyncio
import random
import struct
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fastserve.serving.request_templates import MessageTemplates
from tests.dialects.kserve.grpc_rig import SERVICE, V2, GrpcServed, first_numbers, numbers, serving
from tests.dialects.kserve.test_http_infer import MODELS, write_models
from tests.ext.wire_strategies import field
from tests.server.rig import run, write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
VALUES = [0, 1, -7, 300, 13]
IDS = ["", "7", "é\n", "a" * 40]


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


class Maker:
    """Requests for one model, most of them good; ids apart."""

    def __init__(self, model: str, seed: int) -> None:
        self.model = model
        self.inputs, self.items, self.datatype, self.outputs, self.most = MODELS[model]
        self.pick = random.Random(seed)

    def request(self) -> Any:
        pick = self.pick
        request = V2.ModelInferRequest(model_name=self.model, model_version=pick.choice(["", "1"]))
        rows = pick.choice([1, 1, 1, 2, self.most, self.most + 1, 0])
        form = "i" if self.datatype == "INT32" else "f"
        typed = pick.random() < 0.3
        for name in pick.sample(self.inputs, len(self.inputs)):
            shape = [rows, self.items if pick.random() > 0.02 else 5]
            given = request.inputs.add(name=name, datatype=self.datatype, shape=shape)
            values = [pick.choice(VALUES) for _ in range(rows * self.items)]
            if typed:
                contents = given.contents.int_contents if form == "i" else given.contents.fp32_contents
                contents.extend(values if pick.random() > 0.02 else values[1:])
                continue
            raw = struct.pack(f"<{rows * self.items}{form}", *values)
            request.raw_input_contents.append(raw if pick.random() > 0.02 else raw[1:])
        if pick.random() < 0.4:
            for name in pick.sample(self.outputs, pick.randint(1, len(self.outputs))):
                asked = request.outputs.add(name=name)
                if pick.random() < 0.1:
                    asked.parameters["classification"].int64_param = 2
        if pick.random() < 0.2:
            request.parameters["mood"].string_param = pick.choice(["good", "bad"])
        return request


async def ask(served: GrpcServed, data: bytes) -> Any:
    """The reply's bytes, or what went wrong."""
    try:
        return await served.channel.unary_unary(SERVICE + "ModelInfer")(data)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


@pytest.mark.parametrize("model", MODELS)
def test_both_paths_answer_alike(model: str, tmp_path: Path, taken: list[bool]) -> None:
    write_models(tmp_path)
    maker = Maker(model, seed=11)

    async def work() -> None:
        async with serving(tmp_path, load_models=(model,)) as served:
            for _ in range(150):
                request, text = maker.request(), maker.pick.choice(IDS)
                twice = field(3, 2, b"other") + field(3, 2, text.encode())
                general = await ask(served, request.SerializeToString() + twice)
                request.id = text
                for _ in range(2):
                    assert await ask(served, request.SerializeToString()) == general
        assert sum(taken) > 100

    run(work(), 120)


def test_a_head_is_known_for_one_version(tmp_path: Path, taken: list[bool]) -> None:
    """A version that is loaded anew answers at once, and its batches hold every caller's own rows."""
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            assert await served.infer(1) == [2]
            assert await served.infer(2) == [4]
            write_model(tmp_path, parameters={"add": 1.0})
            load = served.channel.unary_unary(SERVICE + "RepositoryModelLoad")
            await load(V2.RepositoryModelLoadRequest(model_name="twice").SerializeToString())
            assert await served.infer(2) == [5]
            found = await asyncio.gather(*(served.infer(row, id=str(row)) for row in range(1, 200)))
            assert found == [[2 * row + 1] for row in range(1, 200)]
            reply = await served.send(numbers(7, id="seven"))
            assert (reply.id, reply.model_version, first_numbers(reply)) == ("seven", "1", [15])
        assert taken[:3] == [False, True, False]
        assert taken.count(True) > 100

    run(work())
