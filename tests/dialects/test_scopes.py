"""Every route of every dialect has a scope, and what changes the server for everybody is in ADMIN."""

from __future__ import annotations

from unittest.mock import MagicMock

from fastserve.dialects.kserve_v2 import grpc_methods as v2_methods
from fastserve.dialects.kserve_v2.routes import ROUTES, parse_target
from fastserve.dialects.ops import SCOPES, Ops
from fastserve.dialects.tfserving.routes import parse_target as parse_tfserving
from fastserve.dialects.triton_v1 import rpcs as v1_methods
from fastserve.dialects.triton_v1.routes import PLACES, Target
from fastserve.dialects.triton_v1.routes import parse_target as parse_v1
from fastserve.metrics import Heartbeat, Readiness
from fastserve.wire.grpc import Method
from fastserve.wire.scope import Scope

ADMIN_V2 = {
    ("trace", "POST"), ("logging", "POST"), ("load", "POST"), ("unload", "POST"),
    *((f"{kind}_{verb}", "POST") for kind in ("system", "cuda") for verb in ("register", "unregister")),
}  # fmt: skip


def in_admin(methods: list[Method]) -> set[str]:
    assert all(isinstance(method.scope, Scope) for method in methods)
    return {method.path.rpartition("/")[2] for method in methods if method.scope is Scope.ADMIN}


def test_routes_of_v2() -> None:
    scopes = {(name, verb): scope for name, _, verbs in ROUTES for verb, scope in verbs.items()}
    assert {route for route, scope in scopes.items() if scope is Scope.ADMIN} == ADMIN_V2
    assert parse_target("POST", "/v2/repository/models/m/load").scope is Scope.ADMIN
    assert parse_target("POST", "/v2/models/m/infer").scope is Scope.INFER
    assert parse_target("GET", "/v2/logging").scope is Scope.METADATA


def test_routes_of_v1() -> None:
    assert {place for place, (_, scope) in PLACES.items() if scope is Scope.ADMIN} == {
        "modelcontrol",
        "sharedmemorycontrol",
    }
    for verb, target, scope in (
        ("POST", "/api/modelcontrol/load/m", Scope.ADMIN),
        ("POST", "/api/sharedmemorycontrol/unregisterall", Scope.ADMIN),
        ("GET", "/api/sharedmemorycontrol/status", Scope.METADATA),
        ("POST", "/api/infer/m", Scope.INFER),
    ):
        parsed = parse_v1(verb, target)
        assert isinstance(parsed, Target)
        assert parsed.scope is scope


def test_routes_without_administration() -> None:
    for verb, target, scope in (
        ("GET", "/v1/models/m", Scope.METADATA),
        ("GET", "/v1/models/m/metadata", Scope.METADATA),
        ("POST", "/v1/models/m:predict", Scope.INFER),
        ("POST", "/v1/models/m:classify", Scope.INFER),
    ):
        parsed = parse_tfserving(verb, target)
        assert parsed is not None
        assert parsed.scope is scope
    ops = Ops(Readiness(), Heartbeat(), MagicMock())
    assert {path for path in (*SCOPES, "/healthz") if ops.route("GET", path)} == set(SCOPES)


def test_rpcs() -> None:
    assert in_admin(v2_methods.make_methods(MagicMock(options=MagicMock(grpc_restricted_protocol=())))) == {
        "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings",
        "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
    }  # fmt: skip
    assert in_admin(v1_methods.make_methods(MagicMock())) == {"ModelControl", "SharedMemoryControl"}
