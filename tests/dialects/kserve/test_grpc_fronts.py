"""Health and reflection of a server of two front processes: every connection is told the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.dialects.kserve.grpc_rig import SERVICE, V2, numbers
from tests.running import WAIT_S, Running
from tests.server.rig import write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its threads
CHANNELS = 8  # 1 of 128 times the kernel gives them all to one front


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[list[grpc.Channel]]:
    folder = tmp_path / "models"
    folder.mkdir()
    write_model(folder)
    with Running(folder, tmp_path / "log", "--frontends", "2") as served:
        own = [("grpc.use_local_subchannel_pool", 1)]
        opened = [grpc.insecure_channel(served.grpc, options=own) for _ in range(CHANNELS)]
        yield opened
        for channel in opened:
            channel.close()


def test_health_reflection_and_the_fast_path(channels: list[grpc.Channel]) -> None:
    for channel in channels:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert "inference.GRPCInferenceService" in services(channel)
        infer = channel.unary_unary(
            SERVICE + "ModelInfer", response_deserializer=V2.ModelInferResponse.FromString
        )
        for row in (1, 2, 3):  # the first of a front is learned from
            assert row_of(infer(numbers(row), timeout=WAIT_S)) == 2 * row


def services(channel: grpc.Channel) -> set[str]:
    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    (reply,) = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=WAIT_S)
    return {service.name for service in reply.list_services_response.service}


def row_of(reply: Any) -> float:
    return float(memoryview(reply.raw_output_contents[0]).cast("f")[0])
