"""Versions of a Triton form whose models are Python functions: no arena, no worker, no process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastserve.engine.engine import SCHEDULER, Engine, Scheduler
from fastserve.engine.schedulers.batch_sender import BatchMember, MemberAnswer
from fastserve.errors import ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import ModelConfig, parse_model_config
from fastserve.repository.triton_config.messages import TritonConfig
from fastserve.repository.triton_config.reading import options_of
from fastserve.repository.version import Version, VersionState
from fastserve.request import InferRequest, InferResponse
from fastserve.settings import convert
from fastserve.tensor import DTYPES, Tensor

Compute = Callable[[dict[str, np.ndarray]], "dict[str, np.ndarray] | Awaitable[dict[str, np.ndarray]]"]
TYPES = {
    "TYPE_INT32": "int32",
    "TYPE_FP32": "float32",
    "TYPE_STRING": "bytes",
    "TYPE_BOOL": "bool",
    "TYPE_UINT64": "uint64",
    "TYPE_INT64": "int64",
}


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def ints(*values: int, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(DTYPES["int32"], shape or (len(values), 1), np.array(values, np.int32).tobytes())


def array(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.data, tensor.dtype.name).reshape(tensor.shape)


def io(name: str, *dims: int, kind: str = "TYPE_INT32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": kind, "dims": list(dims or (1,)), **more}


def model_config(triton: dict[str, Any], **more: Any) -> ModelConfig:
    def side(field: str) -> dict[str, Any]:
        return {t["name"]: {"dtype": TYPES[t["data_type"]], "shape": t["dims"]} for t in triton[field]}

    raw: dict[str, Any] = {"backend": "python", "max_batch_size": triton.get("max_batch_size", 0)}
    raw |= {"inputs": side("input"), "outputs": side("output"), **more}
    options = options_of(convert(triton, TritonConfig, "config.pbtxt", lax=True))
    return msgspec.structs.replace(parse_model_config(raw), options=options, triton=triton)


class Answers(Scheduler):
    """A scheduler that computes in this process; `unreleased` counts answers somebody still reads."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.asked: list[InferRequest] = []
        self.unreleased = 0

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        self.asked.append(request)
        found: Any = self.compute({name: array(tensor) for name, tensor in request.inputs.items()})
        if asyncio.iscoroutine(found):
            found = await found
        self.unreleased += 1
        outputs = {n: Tensor(DTYPES[a.dtype.name], a.shape, a.tobytes()) for n, a in found.items()}
        return InferResponse(outputs, self._released)

    def _released(self) -> None:
        self.unreleased -= 1

    async def drain(self) -> None:
        return

    def close(self) -> None:
        return


class House:
    """A catalog of such versions, and an engine over it."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.engine = Engine(self.catalog)
        self.schedulers: list[Answers] = []

    def put(self, name: str, triton: dict[str, Any], scheduler: Any, number: int = 1) -> Version:
        version = Version(name, number, Path(), model_config(triton))
        SCHEDULER.put(version, scheduler)
        if isinstance(scheduler, Answers):
            self.schedulers.append(scheduler)
        self.catalog.put(version)
        self.catalog.move(version, VersionState.LOADING)
        self.catalog.move(version, VersionState.AVAILABLE)
        return version

    def model(
        self, name: str, inputs: list[Any], outputs: list[Any], compute: Compute, **more: Any
    ) -> Answers:
        scheduler = Answers(compute)
        self.put(name, {"input": inputs, "output": outputs, "max_batch_size": 8, **more}, scheduler)
        return scheduler

    def all_released(self) -> bool:
        return not any(scheduler.unreleased for scheduler in self.schedulers)


class Hand:
    """A sender whose batches wait until the test lets them run."""

    def __init__(self, rows: int) -> None:
        self.max_rows = max(rows, 1)
        self.batches: list[tuple[list[BatchMember], Callable[[], None]]] = []
        self.unreleased = 0

    def send(self, members: Sequence[BatchMember], finished: Callable[[], None]) -> None:
        self.batches.append((list(members), finished))

    async def batch(self) -> list[BatchMember]:
        while not self.batches:
            await asyncio.sleep(0)
        return self.batches[0][0]

    async def seen(self, *names: str) -> list[Any]:
        """The first number of the named inputs, or of IN alone, in each row of the batch at hand."""
        rows = [[int(array(m.inputs[n]).ravel()[0]) for n in names or ("IN",)] for m in await self.batch()]
        return [tuple(row) if names else row[0] for row in rows]

    async def answer(self, error: ServeError | None = None) -> None:
        """Every row answers with its input, and a state that counts up."""
        members = await self.batch()
        finished = self.batches.pop(0)[1]
        for member in members:
            if error is not None:
                member.done(None, error)
                continue
            self.unreleased += 1
            outputs = {"OUT": member.inputs["IN"]}
            if "S_IN" in member.inputs:
                count = int(array(member.inputs["S_IN"]).ravel()[0]) + 1
                outputs = {"OUT": ints(count), "S_OUT": ints(count)}
            member.done(MemberAnswer(outputs, self.released), None)
        finished()

    def released(self) -> None:
        self.unreleased -= 1
