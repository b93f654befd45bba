"""The document of /openapi.json: bounded in size and in turns of the loop, kept until a version changes, and
without the operations whose secret the caller does not send."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.dialects import SPECS
from fastserve.dialects.admin import openapi as document
from fastserve.dialects.admin.openapi import SPEC, Document, OpenApi
from fastserve.metrics import Registry
from fastserve.net.access_control import Secret
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import ModelConfig, TensorConfig
from fastserve.repository.version import Version, VersionState
from fastserve.serving.api_operations import (
    ApiOperation,
    example_array,
    fits_example,
    json_content,
    value_schema,
)
from fastserve.serving.dialect import NoOptions, ServingContext
from fastserve.settings import Settings, TritonOptions
from fastserve.tensor import DTYPES
from tests.turns import Turns

SPOKEN = ("tfserving", "kserve_v2", "triton_v1", "textgen", "ops")


class DescribedEngine:
    """An engine that has versions and runs none."""

    def __init__(self) -> None:
        self.catalog = Catalog()

    infer: Any = None
    stream: Any = None

    def text_info(self, version: Version) -> None:
        return None


def add_model(catalog: Catalog, name: str, tensors: int = 1) -> Version:
    specs = {f"x{number}": TensorConfig("float32", [4]) for number in range(tensors)}
    config = ModelConfig(backend="python", inputs=specs, outputs={"y": TensorConfig("float32", [4])})
    version = Version(name, 1, Path(), config)
    catalog.put(version)
    for state in (VersionState.LOADING, VersionState.AVAILABLE):
        catalog.move(version, state)
    return version


@pytest.fixture
def registry() -> Iterator[Registry]:
    found = Registry()
    yield found
    found.close()


def make_document(registry: Registry, **settings: Any) -> tuple[Document, Catalog]:
    engine: Any = DescribedEngine()
    context = ServingContext(engine=engine, registry=registry, settings=Settings(**settings))
    specs = [spec for spec in SPECS if spec.name in SPOKEN]
    spoken = [(spec, spec.build(context, spec.read_options(context.settings))) for spec in specs]
    return Document(context, spoken), engine.catalog


def sends_nothing(secret: Secret) -> bool:
    return False


def sends_all(secret: Secret) -> bool:
    return True


@pytest.fixture
def no_collection() -> Iterator[None]:
    """A collection of all that the suite holds is no turn of the document's."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_200_models_of_100_tensors_do_not_hold_the_loop(registry: Registry) -> None:
    made, catalog = make_document(registry)
    for number in range(200):
        add_model(catalog, f"m{number}", tensors=100)

    async def main() -> None:
        turns = Turns()
        text = await made.read(sends_nothing)
        longest_s = turns.longest_s()
        turns.close()
        assert longest_s < 0.4, "which takes a second in one turn"
        assert len(text) < document.MOST_BYTES
        found = json.loads(text)
        assert "x-models-left-out" not in found
        assert all(f"/v2/models/m{number}/infer" in found["paths"] for number in range(200))

    asyncio.run(main())


def test_models_past_the_size_are_named(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MOST_BYTES", 20_000)
    made, catalog = make_document(registry)
    for number in range(9):
        add_model(catalog, f"m{number}", tensors=3)
    found = json.loads(asyncio.run(made.read(sends_nothing)))
    assert "/v2/models/m0/infer" in found["paths"]
    left = found["x-models-left-out"]
    assert left[-1] == "m8"
    assert f"{len(left)} models are left out" in found["info"]["description"]
    assert "/v2/models/m8" not in found["paths"]


def test_a_document_is_made_once_until_a_version_changes(registry: Registry) -> None:
    made, catalog = make_document(registry)
    add_model(catalog, "one")

    async def main() -> None:
        first, same = await asyncio.gather(made.read(sends_nothing), made.read(sends_nothing))
        assert first is same
        assert await made.read(sends_nothing) is first
        version = add_model(catalog, "two")
        second = await made.read(sends_nothing)
        assert b"/v2/models/two/infer" in second
        assert b"/v2/models/two/infer" not in first
        catalog.move(version, VersionState.UNLOADING)
        assert b"/v2/models/two" not in await made.read(sends_nothing)

    asyncio.run(main())


def test_changes_while_it_is_made_begin_one_more_at_most(registry: Registry) -> None:
    made, catalog = make_document(registry)
    add_model(catalog, "one")
    begun, gate = 0, asyncio.Event()
    write = made._write

    async def counted(granted: Any) -> bytes:
        nonlocal begun
        begun += 1
        await gate.wait()
        return await write(granted)

    made._write = counted  # type: ignore[method-assign]

    async def main() -> None:
        asked = []
        for number in range(20):
            asked.append(asyncio.ensure_future(made.read(sends_nothing)))
            await asyncio.sleep(0)
            add_model(catalog, f"m{number}")
        gate.set()
        texts = await asyncio.gather(*asked)
        assert begun == 2
        assert len(set(texts)) <= 2
        assert b"/v2/models/m19/infer" in texts[-1]

    asyncio.run(main())


def test_operations_behind_a_secret_are_for_callers_who_send_it(registry: Registry) -> None:
    options = TritonOptions(http_restricted_api=("inference:key=secret",))
    made, catalog = make_document(registry, triton=options)
    add_model(catalog, "one")

    async def main() -> None:
        without = json.loads(await made.read(sends_nothing))["paths"]
        granted = json.loads(await made.read(sends_all))["paths"]
        behind = {path for path in granted if path not in without}
        assert behind == {"/v1/models/one:predict", "/v2/models/one/infer", "/api/infer/one"}

    asyncio.run(main())


def test_a_path_that_another_dialect_has_is_not_described(registry: Registry) -> None:
    engine: Any = DescribedEngine()
    context = ServingContext(engine=engine, registry=registry)
    add_model(engine.catalog, "one")
    specs = {spec.name: spec for spec in SPECS}
    kserve = specs["kserve_v2"]

    def describe(facts: Any) -> Iterator[ApiOperation]:
        yield ApiOperation("GET", "/healthz/live", "V2", "Not its own")
        yield ApiOperation("POST", "/v2/repository/models/one/load", "V2", "Not for everybody")

    foreign = dataclasses.replace(kserve, describe_server=lambda settings, models: describe(models))
    spoken = [
        (foreign, kserve.build(context, kserve.read_options(context.settings))),
        (specs["ops"], specs["ops"].build(context, NoOptions())),
    ]
    made = Document(context, spoken)
    found = json.loads(asyncio.run(made.read(sends_nothing)))["paths"]
    assert found["/healthz/live"]["get"]["tags"] == ["Server"]
    assert all("load" not in path for path in found)


def test_a_server_without_docs_has_no_route(registry: Registry) -> None:
    engine: Any = DescribedEngine()
    context = ServingContext(engine=engine, registry=registry, settings=Settings(allow_docs=False))
    dialect = OpenApi(context, NoOptions())
    bound = dialect.on_listener([(SPEC, dialect)])
    assert [bound.route("GET", path) for path in ("/", "/docs", "/openapi.json")] == [None] * 3


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_element_type_has_a_schema(name: str) -> None:
    schema = value_schema(DTYPES[name])
    assert schema["type"] in ("boolean", "string", "number", "integer")
    if name == "int8":
        assert (schema["minimum"], schema["maximum"]) == (-128, 127)
    if name == "uint8":
        assert (schema["minimum"], schema["maximum"]) == (0, 255)


def test_examples_are_small() -> None:
    assert example_array(1, (2, -1)) == [[1], [1]]
    assert example_array(1, None) == 1
    assert fits_example(iter([4096]))
    assert not fits_example(iter([4096, 1]))
    assert not fits_example(iter([0] * 200))
    assert json_content({}) == {"application/json": {"schema": {}}}
