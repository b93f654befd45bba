"""Specs of the dialects: every route and RPC has a scope, and calls have those of the tables."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from fastserve.app.json_api import SPEC as APP
from fastserve.dialects import SPECS as DIALECTS
from fastserve.metrics import Registry
from fastserve.net.access_control import Resource, Scope
from fastserve.net.grpc import Method
from fastserve.repository.catalog import Catalog
from fastserve.serving.dialect import Dialect, DialectSpec, ServingContext
from fastserve.settings import Settings
from fastserve.settings.server_settings import TFServingOptions

SPECS = (APP, *DIALECTS)
ADMINISTERS = {
    "tfserving": {"HandleReloadConfigRequest"},
    "kserve_v2": {
        "POST /v2/logging", "POST /v2/trace/setting", "POST /v2/models/MODEL/trace/setting",
        "POST /v2/repository[/REPOSITORY]/models/MODEL/load",
        "POST /v2/repository[/REPOSITORY]/models/MODEL/unload",
        *(
            f"POST /v2/{kind}sharedmemory[/region/REGION]/{verb}"
            for kind in ("system", "cuda")
            for verb in ("register", "unregister")
        ),
        "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings",
        "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
    },
    "triton_v1": {
        "POST /api/modelcontrol/load|unload/MODEL", "POST /api/sharedmemorycontrol/...",
        "ModelControl", "SharedMemoryControl",
    },
    "traffic": {"POST /traffic/MODEL", "DELETE /traffic/MODEL"},
    "grps": {
        *(f"{verb} /grps/v1/health/{word}" for verb in ("GET", "POST") for word in ("online", "offline")),
        "Online", "Offline",
    },
    "textgen": {"GET /stopService"},
}  # fmt: skip
# What is reached by rows and RPCs that say so themselves, as their scope does not say it.
REACHES = {
    "traffic": {"rules": "model-repository"},
    "tfserving": {"preflight": "", "HandleReloadConfigRequest": "model-repository"},
    "triton_v1": {
        "modelcontrol": "model-repository",
        "repository": "model-repository",
        "sharedmemorycontrol": "shared-memory",
        "sharedmemorycontrol/status": "shared-memory",
        "status": "metadata model-config statistics",
        "Status": "metadata model-config statistics",
        "ModelControl": "model-repository",
        "Repository": "model-repository",
        "SharedMemoryControl": "shared-memory",
    },
    "grps": {
        "online": "health",
        "offline": "health",
        "Online": "health",
        "Offline": "health",
        "server": "metadata model-config",
        "model": "metadata model-config",
        "ServerMetadata": "metadata model-config",
        "ModelMetadata": "metadata model-config",
        "script": "",
    },
    "textgen": {
        "timed": "health inference",
        "status": "health statistics",
        "slots": "statistics",
        "stop_service": "model-repository",
        "config": "model-config",
        "info": "metadata model-config",
        "limits": "metadata model-config",
    },
    "metrics": {"metrics": ""},
}
# A word of a path -> what a client may write for it.
SAID = {
    "/...": "/unregisterall", "[/metadata]": "/metadata", "[/versions/N or /labels/L]": "/labels/new",
    "live|ready": "ready", "load|unload": "load", ":predict|classify|regress": ":classify",
    "tfserving.monitoring_path": "/monitoring/prometheus/metrics", "/v1/unregisterall": "/v1/anything",
    "MODEL": "m", "NAME": "m", "VERSION": "7",
    "REPOSITORY": "r", "REGION": "x",
    "timed-N": "timed-7", "ROLE": "prefill",
}  # fmt: skip


class NoEngine:
    """An engine for dialects that are asked for no inference."""

    def __init__(self) -> None:
        self.catalog = Catalog()

    infer: Any = None
    stream: Any = None


@pytest.fixture(scope="module")
def context() -> Any:
    registry = Registry()
    paths = {"app": {"paths": {"/m": "m"}}}  # "/NAME", of the models that there are
    settings = Settings(tfserving=TFServingOptions(monitoring=True), dialect_options=paths)
    yield ServingContext(engine=NoEngine(), registry=registry, settings=settings)
    registry.close()


def built(spec: DialectSpec[Any], context: ServingContext) -> Dialect:
    return spec.build(context, spec.read_options(context.settings))


def targets(path: str) -> list[str]:
    """Targets that clients write for a path of the tables: with all that may be left out, and without."""
    for word, said in SAID.items():
        path = path.replace(word, said)
    return [re.sub(r"\[([^]]*)\]", r"\1", path), re.sub(r"\[([^]]*)\]", "", path)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_route_has_the_scope_of_its_row(spec: DialectSpec[Any], context: ServingContext) -> None:
    dialect = built(spec, context)
    for row in spec.routes:
        assert row.scopes
        for verb, scope in row.scopes.items():
            assert isinstance(scope, Scope)
            for target in targets(row.path):
                route = dialect.route(verb, target)
                assert route is not None, (verb, target)
                assert route.scope is scope, (verb, target)
                assert route.resources == row.resources, (verb, target)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_rpc_has_the_scope_of_its_row(spec: DialectSpec[Any], context: ServingContext) -> None:
    methods = spec.methods_of(built(spec, context))
    assert {method.path: method.scope for method in methods} == spec.rpcs
    assert all(isinstance(scope, Scope) for scope in spec.rpcs.values())
    assert set(spec.services) == {method.service for method in methods}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_administers_is_known(spec: DialectSpec[Any]) -> None:
    """A new route that changes the server for everybody is written down here as well."""
    routes = {
        f"{verb} {row.path}"
        for row in spec.routes
        for verb, scope in row.scopes.items()
        if scope is Scope.ADMIN
    }
    rpcs = {path.rpartition("/")[2] for path, scope in spec.rpcs.items() if scope is Scope.ADMIN}
    assert routes | rpcs == ADMINISTERS.get(spec.name, set())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_reaches_more_than_its_scope_says_is_known(spec: DialectSpec[Any]) -> None:
    """A new route in ADMIN that does not say what it reaches wants the header of all that can be changed."""
    said = {row.name: row.resources for row in spec.routes if row.resources is not None}
    said |= {path.rpartition("/")[2]: resources for path, resources in spec.rpc_resources.items()}
    assert set(spec.rpc_resources) <= set(spec.rpcs)
    reached = {name: " ".join(one.value for one in resources) for name, resources in said.items()}
    if spec.name == "kserve_v2":  # every row says it, in one word of Triton's
        assert set(reached.values()) == {resource.value for resource in Resource}
        assert set(reached) >= {row.name for row in spec.routes} - {"root"}  # KServe's, whose scope says it
        return
    assert reached == REACHES.get(spec.name, {})
    silent = [row.name for row in spec.routes if row.resources is None and Scope.ADMIN in row.scopes.values()]
    assert silent == []


def test_rpcs_that_are_not_those_of_the_spec_are_not_served(context: ServingContext) -> None:
    class Forgetful(Dialect):
        def grpc_methods(self) -> list[Method]:
            return [Method("/a.B/Load", bytes, bytes, bytes, scope=Scope.INFER)]

    told = {"/a.B/Load": Scope.ADMIN}
    spec = DialectSpec(name="f", options=TFServingOptions, build=lambda *_: Forgetful(), rpcs=told)
    with pytest.raises(RuntimeError, match="the RPCs, or their scopes, are not those of its spec"):
        spec.methods_of(Forgetful())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_options_are_those_of_the_settings(spec: DialectSpec[Any]) -> None:
    assert type(spec.read_options(Settings())) is spec.options
    if spec.section:
        fields = {field.name: field.type for field in msgspec.structs.fields(Settings)}
        assert fields[spec.section] is spec.options


def test_names_are_told_apart() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    services = [service for spec in SPECS for service in spec.services]
    assert sorted(services) == [
        "grps.protos.v1.GrpsService",
        "inference.GRPCInferenceService",
        "nvidia.inferenceserver.GRPCService",
        "tensorflow.serving.ModelService",
        "tensorflow.serving.PredictionService",
    ]
