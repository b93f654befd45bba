"""The ways in of grps: JSON, bytes, and messages over gRPC, whose failures are messages too."""

from __future__ import annotations

import json
from typing import Any

from fastserve.errors import Kind
from fastserve.protos import load
from tests.conformance.h2_ways import OverHttp2
from tests.conformance.rig import Rig
from tests.conformance.rpc_ways import RpcWay
from tests.conformance.ways import OK, Answer, HttpWay, Reply, Sent, numbers, pack, unpack

GRPS = load("grps")
PREDICT = "/grps/v1/infer/predict"
CODES = {
    OK: 200,
    Kind.INTERNAL: 500,
    Kind.RESOURCE_EXHAUSTED: 503,
    Kind.UNAVAILABLE: 503,
    Kind.INVALID_ARGUMENT: 400,
    Kind.NOT_FOUND: 500,
    Kind.DEADLINE_EXCEEDED: 504,
}


class GrpsJson(HttpWay):
    """Generic tensors as JSON."""

    name, dialect = "grps-json", "grps"
    statuses = CODES

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        tensor = {"name": name, "dtype": "DT_FLOAT32", "shape": [len(rows), columns]}
        given = {**tensor, "flat_float32": numbers(rows, columns)}
        body = {"model": f"{model}-1", "gtensors": {"tensors": [given]}}
        return self.post(PREDICT, json.dumps(body).encode(), "Content-Type: application/json")

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        (tensor,) = json.loads(reply.body)["gtensors"]["tensors"]
        return list(tensor["flat_float32"][::2])

    def text(self, reply: Reply) -> str:
        return str(json.loads(reply.body)["status"]["msg"])


class GrpsBytes(GrpsJson):
    """Bare rows, which tell no rows of unknown size apart."""

    name, forms = "grps-bytes", ("columns", "whole", "cached")

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        path = f"{PREDICT}?model={model}-1"
        return self.post(path, pack(rows, columns), "Content-Type: application/octet-stream")

    def rows(self, reply: Reply, rig: Rig, sent: Sent) -> list[float]:
        return unpack(reply.body)


class GrpsJsonH2(OverHttp2, GrpsJson):
    name = "grps-json-h2"


class GrpsRpc(RpcWay):
    """Predict."""

    name, dialect = "grps-grpc", "grps"
    path = "/grps.protos.v1.GrpsService/Predict"
    statuses = CODES

    def build(
        self, model: str, rows: list[float], *, id: str = "", name: str = "x", columns: int = 2, slot: int = 0
    ) -> Sent:
        message = GRPS.GrpsMessage(model=f"{model}-1")
        tensor: dict[str, Any] = {"name": name, "dtype": "DT_FLOAT32", "shape": [len(rows), columns]}
        message.gtensors.tensors.add(**tensor, flat_float32=numbers(rows, columns))
        return Sent(message.SerializeToString(), slot)

    def read(self, data: bytes, sent: Sent) -> Answer:
        message = GRPS.GrpsMessage.FromString(data)
        if message.status.status != GRPS.Status.SUCCESS:
            return Answer(message.status.code, [], message.status.msg, data)
        (tensor,) = message.gtensors.tensors
        return Answer(200, list(tensor.flat_float32[::2]), "", data)


GRPS_WAYS = (GrpsJson(), GrpsBytes(), GrpsJsonH2(), GrpsRpc())
