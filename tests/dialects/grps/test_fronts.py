"""Several front processes, the other transport of gRPC, reflection and health: the same dialect."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.dialects.grps import deployments
from tests.dialects.grps.rig import JSON, SERVICE, deployed, settings_of
from tests.running import until


def test_the_ready_flag_is_one_for_all_fronts(tmp_path: Path) -> None:
    folder = deployments.write(tmp_path / "d", [deployments.echo_model("1.0.0", "A")])
    with deployed(msgspec.structs.replace(settings_of(folder), frontends=2)) as served:
        for word, status in (("online", 200), ("offline", 503), ("online", 200)):
            assert served.ask("GET", f"/grps/v1/health/{word}").status == 200
            asked = {served.ask("GET", "/grps/v1/health/ready").status for _ in range(20)}
            assert asked == {status}
            assert {served.call("CheckReadiness").status.code for _ in range(6)} == {status}
        texts = {served.predict({"str_data": f"t{n}"}).json["str_data"] for n in range(20)}
        assert texts == {f"t{n}" for n in range(20)}


def test_the_numbers_are_one_for_all_fronts(tmp_path: Path) -> None:
    """Which connection sees the page first does not matter, nor which one the predicts came over."""
    folder = deployments.write(tmp_path / "d", [deployments.echo_model("1.0.0", "A")])
    with deployed(msgspec.structs.replace(settings_of(folder), frontends=3)) as served:

        def ask(name: str) -> list[list[float]]:
            found = served.ask("GET", f"/grps/v1/monitor/series?name={name}")
            assert found.status == 200
            points: list[list[float]] = found.json["data"]
            return points

        assert served.ask("GET", "/grps/v1/monitor/metrics").status == 200
        for number in range(12):
            assert served.predict({"str_data": f"t{number}"}).status == 200
        until(lambda: sum(value for _, value in ask("*qps")) >= 12, "the predicts of all are counted")
        longest = max(value for _, value in ask("*latency_max(ms)"))
        spreads = [ask("*latency_cdf(ms)") for _ in range(6)]
        assert spreads[1:] == spreads[:1] * 5
        assert 0 < spreads[0][0][1] <= spreads[0][-1][1] <= longest
        assert max(value for _, value in ask("*mem_usage(%25)")) > 0
        assert served.ask("GET", "/grps/v1/monitor/series?name=none").body == b"key not found"


def test_clients_of_grpc(tmp_path: Path) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with deployed(settings_of(deployments.write(tmp_path / "d"))) as served:
        assert served.call("Predict", str_data="x").str_data == "x"
        assert [part.str_data for part in served.stream(str_data="s")] == ["s-0", "s-1", "s-2"]
        assert [part.str_data for part in served.stream(str_data="serr")][:3] == [
            "serr-0",
            "serr-1",
            "serr-2",
        ]
        assert served.stream(model="no-1", str_data="s")[0].status.code == 500
        data = b"x" * (3 << 20)
        assert served.call("Predict", bin_data=data).bin_data == data
        with grpc.insecure_channel(served.rpc) as channel:
            name = SERVICE.strip("/")
            request = health_pb2.HealthCheckRequest(service=name)
            assert health_pb2_grpc.HealthStub(channel).Check(request).status == 1
            assert name in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_clients_that_leave_early_hurt_nobody(tmp_path: Path) -> None:
    """Half a request, a request without a reader, many times; what they held is given back."""
    import socket

    with deployed(settings_of(deployments.write(tmp_path / "d"))) as served:
        for n in range(40):
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                body = b'{"str_data":"s"}'
                head = f"POST /grps/v1/infer/predict?streaming={n % 2 == 0} HTTP/1.1\r\nHost: t\r\n"
                head += f"Content-Type: {JSON['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
                client.sendall(head.encode() + body[: len(body) - n % 3])
        assert served.predict({"str_data": "x"}).json["str_data"] == "x"
