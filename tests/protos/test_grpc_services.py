"""Our own protos of health and reflection say what the public ones say."""

from __future__ import annotations

from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fastserve.net.grpc.health import make_pool

HEALTH, V1ALPHA = "grpc.health.v1", "grpc.reflection.v1alpha"


def fields(message: Any) -> list[tuple[str, int, int, bool, str]]:
    return [
        (f.name, f.number, f.type, f.is_repeated, f.containing_oneof.name if f.containing_oneof else "")
        for f in message.fields
    ]


@pytest.mark.parametrize("package", [HEALTH, V1ALPHA, "grpc.reflection.v1"])
def test_messages_are_the_public_ones(package: str) -> None:
    pool = make_pool(())
    public = health_pb2 if package == HEALTH else reflection_pb2
    names = [name for name in public.DESCRIPTOR.message_types_by_name if "HealthList" not in name]
    assert names
    for name in names:
        ours = pool.FindMessageTypeByName(f"{package}.{name}")
        assert fields(ours) == fields(public.DESCRIPTOR.message_types_by_name[name]), name
    states = pool.FindEnumTypeByName("grpc.health.v1.HealthCheckResponse.ServingStatus")
    assert {v.name: v.number for v in states.values} == dict(
        health_pb2.HealthCheckResponse.ServingStatus.items()
    )


@pytest.mark.parametrize("package", [HEALTH, V1ALPHA, "grpc.reflection.v1"])
def test_methods_are_the_public_ones(package: str) -> None:
    public = health_pb2 if package == HEALTH else reflection_pb2
    name = "Health" if package == HEALTH else "ServerReflection"
    ours = make_pool(()).FindServiceByName(f"{package}.{name}")
    theirs = public.DESCRIPTOR.services_by_name[name].methods_by_name
    assert ours.methods
    for method in ours.methods:
        given = theirs[method.name]
        assert method.input_type.name == given.input_type.name
        assert method.output_type.name == given.output_type.name
        assert method.client_streaming == given.client_streaming
        assert method.server_streaming == given.server_streaming
