"""Models of tests/backends/triton_api/triton_models served by real workers, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.engine import Engine, scheduler_of
from fastserve.engine.loader import VersionLoader
from fastserve.engine.schedulers.plain import PlainScheduler
from fastserve.metrics.registry import Registry
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import ModelConfig, TensorConfig
from fastserve.repository.triton_config.messages import TritonConfig
from fastserve.repository.triton_config.reading import options_of
from fastserve.repository.version import Version, VersionState
from fastserve.request import InferRequest, InferResponse
from fastserve.settings import convert
from fastserve.tensor import DTYPES, Tensor
from fastserve.workers.arrays import BYTES, as_tensor
from tests.workers.arrays import view_tensor

uvloop.run(asyncio.sleep(0))  # libuv opens a pipe with the process's first loop, for good
SOURCES = Path(__file__).parent / "triton_models"
NAMES = {f"TYPE_{n.upper()}": n for n in DTYPES} | {
    "TYPE_STRING": "bytes",
    "TYPE_FP16": "float16",
    "TYPE_FP32": "float32",
    "TYPE_FP64": "float64",
    "TYPE_BF16": "bfloat16",
}
ANY = {"data_type": "TYPE_INT32", "dims": [-1]}
TEXT = {"data_type": "TYPE_STRING", "dims": [-1]}


def entry(name: str, data_type: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": list(dims), **more}


def model(source: str, inputs: Any = None, outputs: Any = None, **fields: Any) -> dict[str, Any]:
    """A config as config.pbtxt would have it; `source` is the file of its model.py."""
    return {
        "name": source,
        "source": source,
        "max_batch_size": 0,
        "input": [{"name": "IN", **ANY}] if inputs is None else inputs,
        "output": [{"name": "OUT", **ANY}] if outputs is None else outputs,
        **fields,
    }


def repeating(**fields: Any) -> dict[str, Any]:
    return model("repeat", model_transaction_policy={"decoupled": True}, **fields)


def _specs(entries: list[dict[str, Any]]) -> dict[str, TensorConfig]:
    return {e["name"]: TensorConfig(NAMES[e["data_type"]], e["dims"]) for e in entries}  # type: ignore[arg-type]


class Served:
    """A host, its catalog and its engine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.registry = Registry()
        self.catalog = Catalog()
        self.host = VersionLoader(self.registry, catalog=self.catalog)
        self.engine = Engine(self.catalog)

    async def load(self, config: dict[str, Any], **fields: Any) -> Version:
        """Raises what Host.load raises."""
        triton = {key: value for key, value in config.items() if key != "source"}
        folder = self._folder / triton["name"] / "1"
        folder.mkdir(parents=True)
        shutil.copy(SOURCES / f"{config['source']}.py", folder / "model.py")
        parsed = ModelConfig(
            backend="triton_python",
            inputs=_specs(triton["input"]),
            outputs=_specs(triton["output"]),
            max_batch_size=triton["max_batch_size"],
            split_large_requests=False,
            options=options_of(convert(triton, TritonConfig, "config.pbtxt", lax=True)),
            triton=triton,
            **{"restart_backoff_s": 0.01, "restart_backoff_max_s": 0.02, "warmup": "off", **fields},
        )
        version = Version(triton["name"], 1, folder, parsed)
        self.catalog.put(version)
        self.catalog.move(version, VersionState.LOADING)
        await self.host.load(version)
        self.catalog.move(version, VersionState.AVAILABLE)
        return version

    async def ask(self, name: str, inputs: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The outputs as arrays."""
        response = await self.engine.infer(self.version(name), request(inputs, **fields))
        try:
            return arrays(response)
        finally:
            response.release()

    async def listen(self, name: str, numbers: list[int], **fields: Any) -> list[Any]:
        """Collect the answers of a stream of `repeat`: numbers, and the words of errors."""
        found: list[Any] = []
        async for response in self.engine.stream(self.version(name), repeat(numbers, **fields)):
            found.append(response.error.message if response.error else int(arrays(response)["OUT"][0]))
            response.release()
        return found

    def version(self, name: str) -> Version:
        found = self.catalog.available(name)
        assert found is not None
        return found

    def queue(self, name: str) -> BatchQueue:
        scheduler = scheduler_of(self.version(name))
        assert isinstance(scheduler, PlainScheduler)
        return scheduler.queue

    def leaks(self, name: str) -> tuple[int, int, int, int]:
        queue = self.queue(name)
        return queue.ring.outstanding(), queue.ring.slab_pages_used(), queue.waiting, queue.unreleased


@contextlib.asynccontextmanager
async def serving(folder: Path, *models: dict[str, Any], **fields: Any) -> AsyncIterator[Served]:
    """These models, loaded; nothing of theirs may be left when the test is done."""
    served = Served(folder)
    try:
        for config in models:
            await served.load(config, **fields)
        yield served
        for config in models:
            if config["source"] != "keeps":
                await until(lambda name=config["name"]: served.leaks(name) == (0, 0, 0, 0))
                assert served.leaks(config["name"]) == (0, 0, 0, 0)
    finally:
        await served.host.close()
        served.registry.close()


async def until(true: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, [c.cell_contents for c in true.__closure__ or ()]
        await asyncio.sleep(0.001)


def run(work: Awaitable[None]) -> None:
    uvloop.run(asyncio.wait_for(work, 200))


def tensor(value: Any) -> Tensor:
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        return as_tensor(array.astype(object), BYTES)
    return as_tensor(array, DTYPES[array.dtype.name])


def request(inputs: dict[str, Any], **fields: Any) -> InferRequest:
    made = {name: v if isinstance(v, Tensor) else tensor(v) for name, v in inputs.items()}
    return InferRequest(made, **fields)


def repeat(numbers: list[int], **fields: Any) -> InferRequest:
    return request({"IN": np.array(numbers, np.int32)}, **fields)


def arrays(response: InferResponse) -> dict[str, Any]:
    return {name: view_tensor(t).copy() for name, t in response.outputs.items()}
