"""Stand-ins round the real dialect: an engine and a repository that run the probe models in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from fastserve.config import Limits
from fastserve.dialects.kserve_v2 import KServeV2, Regions, Service
from fastserve.dialects.kserve_v2.repository import LoadOverride
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.metrics import Registry
from fastserve.repository.catalog import Catalog
from fastserve.repository.triton_config import parse_triton_json, parse_triton_text, to_model_config
from fastserve.repository.triton_schema import TritonConfig
from fastserve.repository.version import Version, VersionState
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import DTYPES, Tensor
from tests.dialects.kserve_v2.models import Arrays, ProbeModel, probe_models, same

BAD_REASON = (
    "Invalid argument: unable to find backend library for backend 'nosuchbackend', try specifying runtime "
    "on the model configuration."
)


def to_array(tensor: Tensor) -> Any:
    """A tensor as an array; strings become an object array of bytes, bfloat16 stays as 16 bits."""
    if tensor.dtype.name != "bytes":
        kind = "uint16" if tensor.dtype.name == "bfloat16" else tensor.dtype.name
        return np.frombuffer(tensor.data, dtype=kind).reshape(tensor.shape)
    data, at, items = bytes(tensor.data), 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        items.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(tensor.shape)


def to_tensor(value: Any, dtype: str) -> Tensor:
    array = np.asarray(value)
    if dtype == "bytes":
        packed = b"".join(len(item).to_bytes(4, "little") + item for item in array.ravel())
        return Tensor(DTYPES["bytes"], array.shape, packed)
    return Tensor(DTYPES[dtype], array.shape, array.tobytes())


class ProbeEngine:
    """Runs the probe models. `open_responses` counts what was not released."""

    def __init__(self, folder: Path) -> None:
        self.catalog = Catalog()
        self.open_responses = 0
        self._folder = folder
        self.models = probe_models()
        for name in self.models:
            self.put(name)

    def put(self, name: str, given: TritonConfig | None = None) -> None:
        model = self.models[name]
        config = to_model_config(given or parse_triton_text(model.config, name))
        if model.labels:
            (self._folder / name).mkdir(exist_ok=True)
            (self._folder / name / "l.txt").write_text(model.labels)
        for number in model.versions:
            version = Version(name, number, self._folder / name / str(number), config)
            self.catalog.put(version)
            self.catalog.move(version, VersionState.LOADING)
            self.catalog.move(version, VersionState.AVAILABLE)

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        await asyncio.sleep(0)
        (outputs,) = self.models[version.model].run(self._arrays(request), request)
        return self._respond(version, request, outputs)

    async def stream(self, version: Version, request: InferRequest) -> AsyncIterator[InferResponse]:
        for outputs in self.models[version.model].run(self._arrays(request), request):
            await asyncio.sleep(0)
            yield self._respond(version, request, outputs)

    def _arrays(self, request: InferRequest) -> Arrays:
        return {name: to_array(tensor) for name, tensor in request.inputs.items()}

    def _respond(self, version: Version, request: InferRequest, outputs: Arrays) -> InferResponse:
        wanted = request.outputs or tuple(outputs)
        specs = version.outputs
        self.open_responses += 1
        return InferResponse(
            {name: to_tensor(outputs[name], specs[name].dtype.name) for name in wanted}, self._released
        )

    def _released(self) -> None:
        self.open_responses -= 1


class ProbeRepository:
    """Loads and unloads the probe models, and fails where the captured server failed."""

    explicit = True

    def __init__(self, engine: ProbeEngine) -> None:
        self._engine = engine
        self._fail_bad()

    def _fail_bad(self) -> None:
        catalog = self._engine.catalog
        config = to_model_config(parse_triton_text(self._engine.models["boom"].config, "boom"))
        version = Version("bad", 1, Path(), config)
        catalog.put(version)
        catalog.move(version, VersionState.LOADING)
        catalog.move(version, VersionState.END, ServeError(Kind.INVALID_ARGUMENT, BAD_REASON))

    async def names(self) -> list[str]:
        return ["bad", *self._engine.models]

    async def load(self, name: str, override: LoadOverride | None) -> None:
        if name == "bad":
            self._fail_bad()
            raise ServeError(Kind.FAILED_PRECONDITION, BAD_REASON)
        given = None
        if override is not None and override.config is not None:
            try:
                given = parse_triton_json(override.config, name)
            except ConfigError:
                raise ServeError(Kind.NOT_FOUND, "no such configuration") from None
            if override.files:
                self._engine.models[name] = ProbeModel("", same)
        if name not in self._engine.models:
            raise ServeError(Kind.NOT_FOUND, "no such model")
        self._engine.put(name, given)

    async def unload(self, name: str, dependents: bool) -> None:
        catalog = self._engine.catalog
        if name not in catalog.models:
            raise ServeError(Kind.NOT_FOUND, "never loaded")
        for version in catalog.models[name].available():
            catalog.move(version, VersionState.UNLOADING)
            catalog.move(version, VersionState.END)


class Probe:
    """One dialect over the probe models; `close` it."""

    def __init__(self, folder: Path, *, allow_shm: bool = True) -> None:
        self.engine = ProbeEngine(folder)
        self.registry = Registry()
        self.regions = Regions(allow_shm)
        repository = ProbeRepository(self.engine)
        self.service = Service(self.engine, self.registry, Limits(), self.regions, repository)
        self.dialect = KServeV2(self.service, alone=True)

    def close(self) -> None:
        self.regions.close()
        self.registry.close()
