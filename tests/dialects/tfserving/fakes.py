"""Stand-ins around the real dialect: models computed with numpy here, and calls without a socket."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np

from fastserve.dialects.tfserving.spec import TFServing
from fastserve.errors import ServeError
from fastserve.metrics import Registry
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import parse_model_config
from fastserve.repository.version import Version, VersionState
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.dialect import ServingContext
from fastserve.settings import Settings, TFServingOptions
from fastserve.tensor import DTYPES, Tensor
from fastserve.util.memory_budget import Claim, MemoryBudget

REGISTRY = Registry()  # counts of every test; none is read back
Arrays = dict[str, Any]
Run = Callable[[Arrays], Arrays]

HALF_PLUS_TWO: dict[str, Any] = {
    "backend": "python",
    "max_batch_size": 0,
    "inputs": {"x": {"dtype": "float32", "shape": None}},
    "outputs": {"y": {"dtype": "float32", "shape": None}},
    "signatures": {
        "regress_x_to_y": {
            "method": "regress",
            "inputs": {"inputs": "x"},
            "outputs": {"outputs": "y"},
            "features": {"x": "inputs"},
        },
        "classify_x_to_y": {
            "method": "classify",
            "inputs": {"inputs": "x"},
            "outputs": {"scores": "y"},
            "features": {"x": "inputs"},
        },
    },
}


def half_plus_two(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] / np.float32(2) + np.float32(2)}


def to_array(tensor: Tensor) -> Any:
    """A tensor as an array; strings become an object array of bytes."""
    if tensor.dtype.name != "bytes":
        return np.frombuffer(tensor.data, dtype=tensor.dtype.name).reshape(tensor.shape)
    data, at, items = bytes(tensor.data), 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        items.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(tensor.shape)


def to_tensor(value: Any) -> Tensor:
    """An array as a tensor; object arrays hold bytes."""
    array = np.asarray(value)
    if array.dtype == object:
        packed = b"".join(len(item).to_bytes(4, "little") + item for item in array.ravel())
        return Tensor(DTYPES["bytes"], array.shape, packed)
    return Tensor(DTYPES[array.dtype.name], array.shape, array.tobytes())


class FakeEngine:
    """Runs models in this process. `seen` keeps every request, `open_responses` what was not released."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.seen: list[InferRequest] = []
        self.open_responses = 0
        self._runs: dict[str, Run] = {}

    def text_info(self, version: Version) -> None:
        """None of its models generates text."""

    def serve(self, name: str, config: dict[str, Any], run: Run, numbers: Sequence[int] = (1,)) -> None:
        """Make a model available under these version numbers."""
        self._runs[name] = run
        for number in numbers:
            version = Version(name, number, Path(), parse_model_config(config))
            self.catalog.put(version)
            self.catalog.move(version, VersionState.LOADING)
            self.catalog.move(version, VersionState.AVAILABLE)

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        self.seen.append(request)
        await asyncio.sleep(0)
        arrays = {name: to_array(tensor) for name, tensor in request.inputs.items()}
        outputs = {name: to_tensor(value) for name, value in self._runs[version.model](arrays).items()}
        wanted = request.outputs or tuple(outputs)
        self.open_responses += 1
        return InferResponse({name: outputs[name] for name in wanted}, self._released)

    def _released(self) -> None:
        self.open_responses -= 1


@dataclass
class Reply:
    status: int
    body: bytes
    content_type: bytes
    headers: list[tuple[bytes, bytes]]
    close: bool


@dataclass
class FakeCall:
    """A call as the dialect sees it, without a wire."""

    method: str
    target: str
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    answer: Reply | None = None
    received_ns: int = field(default_factory=monotonic_ns)
    deadline_ns: int = 0
    claim: Claim = field(default_factory=lambda: Claim(MemoryBudget(1 << 30)))

    def cause_of(self, fault: ServeError) -> ServeError:
        return fault

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    def reply(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = b"application/json",
        headers: Sequence[tuple[bytes, bytes]] = (),
        close: bool = False,
    ) -> None:
        assert self.answer is None, "a call is replied to exactly once"
        self.answer = Reply(status, body, content_type, list(headers), close)


def standard_engine() -> FakeEngine:
    """The engine the vectors talk about: half_plus_two as `m` and `default` at 123, and as `half`."""
    engine = FakeEngine()
    for name in ("m", "default", "half"):
        engine.serve(name, HALF_PLUS_TWO, half_plus_two, [123])
        engine.catalog.models[name].labels["latest"] = 123
    return engine


def dialect_of(engine: FakeEngine, **options: Any) -> TFServing:
    return TFServing(context_of(engine), TFServingOptions(**{"result_keys": ("results",), **options}))


def context_of(engine: FakeEngine, **settings: Any) -> ServingContext:
    """Of a server that says what the original says, unless other settings are asked for."""
    settings = {"kserve_replies": False, **settings}
    return ServingContext(engine=engine, registry=REGISTRY, settings=Settings(**settings))  # type: ignore[arg-type]


def ask(
    dialect: TFServing,
    method: str,
    target: str,
    body: bytes | str = b"",
    headers: dict[str, str] | None = None,
) -> Reply:
    """One call straight into the dialect. The target must be one of its own."""
    pairs = [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()]
    call = FakeCall(method, target, body.encode() if isinstance(body, str) else body, pairs)
    route = dialect.route(method, target)
    assert route is not None, "not a target of this dialect"
    work = route.endpoint(call)  # type: ignore[arg-type]
    if inspect.iscoroutine(work):
        asyncio.run(work)
    assert call.answer is not None
    return call.answer
