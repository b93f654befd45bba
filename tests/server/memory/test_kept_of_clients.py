"""Caches of a server for requests to come: they hold nothing of earlier connections and calls."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from fastserve.net.grpc.calls import GrpcCall as GrpcCall
from fastserve.net.http1.connection import Http1Connection
from fastserve.net.http2.connection import Http2Connection
from fastserve.net.http2.flow_control import Sending
from fastserve.net.http2.stream import Http2Stream
from fastserve.net.request import Call
from fastserve.settings import Listener
from tests.server.rig import run, serving, write_model

OF_CLIENTS = (Http1Connection, Http2Connection, Sending, Http2Stream, Call, GrpcCall)
ROWS = [[1.0, 0.5]]
TENSOR = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 0.5]}
JSON = {"content-type": "application/json"}
REQUESTS: tuple[tuple[str, str, Any, dict[str, str]], ...] = (
    *[
        ("GET", path, b"", {})
        for path in ("/", "/nowhere", "/metrics", "/v2", "/v2/health/ready", "/v2/models/twice")
    ],
    *[
        ("GET", path, b"", {})
        for path in ("/v1/models/twice", "/v1/models/none", "/api/status", "/info", "/%zz")
    ],
    ("POST", "/v1/models/twice:predict", {"instances": ROWS}, {}),
    ("POST", "/v1/models/twice:predict", {"instances": [["a"]]}, {}),
    ("POST", "/v1/models/twice:predict", b"{", {"content-encoding": "gzip"}),
    ("POST", "/v1/models/none:predict", {"instances": ROWS}, {}),
    ("POST", "/v2/models/twice/infer", {"inputs": [TENSOR]}, {}),
    ("POST", "/v2/models/twice/infer", {"inputs": [{**TENSOR, "shape": [2]}]}, {}),
    ("POST", "/v2/models/twice/infer", {"inputs": [TENSOR]}, {"inference-header-content-length": "x"}),
    ("POST", "/v2/models/none/infer", {"inputs": [TENSOR]}, {}),
    ("POST", "/v2/repository/index", b"", {"origin": "http://evil.example"}),
    ("POST", "/api/infer/twice", b"\0" * 8, {"nv-inferrequest": "batch_size: 1 input { name: 'x' }"}),
    ("POST", "/api/infer/twice", b"\0" * 8, {"nv-inferrequest": "{"}),
    ("POST", "/grps/v1/infer/predict", {"model": "twice", "ndarray": ROWS}, JSON),
    ("POST", "/v1/chat/completions", {"model": "none", "messages": []}, JSON),
    ("POST", "/generate", {"inputs": "x"}, JSON),
    ("PUT", "/v2", b"", {}),
    ("GET", "/v2", b"", {"host": "a b"}),
    ("GET", "/v2", b"", {"expect": "what"}),
    ("GET", "/v2", b"", {f"x-{number}": "v" for number in range(200)}),
)
GRPC = {"content-type": "application/grpc"}
MALFORMED_CALLS: tuple[tuple[str, str, Any, dict[str, str]], ...] = tuple(
    ("POST", "/inference.GRPCInferenceService/ServerLive", b"\0" * 5, {**GRPC, **headers})
    for headers in ({}, {"grpc-timeout": "9x"}, {"grpc-encoding": "what"}, {"x-bin": "*"}, {"expect": "what"})
)  # fmt: skip
CALLS = (
    ("/inference.GRPCInferenceService/ServerLive", b"", ()),
    ("/inference.GRPCInferenceService/ModelInfer", b"\xff", ()),
    ("/inference.GRPCInferenceService/ModelMetadata", b"\x0a\x05twice", ()),
    ("/inference.GRPCInferenceService/RepositoryIndex", b"", (("origin", "http://evil.example"),)),
    ("/tensorflow.serving.PredictionService/Predict", b"", ()),
    ("/grpc.health.v1.Health/Check", b"", ()),
    ("/grpc.health.v1.Health/Check", b"", (("x-bin", b"\0"),)),
    ("/nobody.Service/Call", b"", ()),
)


async def ask(base: str, http2: bool) -> None:
    async with httpx.AsyncClient(http1=not http2, http2=http2, base_url=base, trust_env=False) as client:
        for method, target, body, headers in (REQUESTS + MALFORMED_CALLS if http2 else REQUESTS) * 2:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            await client.request(method, target, content=content, headers=headers)


async def call(target: str) -> None:
    codes = set()
    async with grpc.aio.insecure_channel(target) as channel:
        for path, message, metadata in CALLS * 2:
            try:
                await channel.unary_unary(path)(message, metadata=metadata, timeout=60)
            except grpc.aio.AioRpcError as error:
                codes.add(error.code())
    assert grpc.StatusCode.INVALID_ARGUMENT in codes or grpc.StatusCode.INTERNAL in codes
    assert grpc.StatusCode.UNAVAILABLE not in codes


def left_of_clients(before: Sequence[object] = ()) -> list[Any]:
    """The objects of connections and calls that are alive, but for those of tests `before` this one."""
    gc.collect()
    known = {id(one) for one in before}
    return [one for one in gc.get_objects() if isinstance(one, OF_CLIENTS) and id(one) not in known]


def test_nothing_of_a_client_is_kept_when_it_has_left(tmp_path: Path) -> None:
    async def main() -> None:
        write_model(tmp_path)
        async with serving(tmp_path, http=(), listen=(Listener("127.0.0.1:0"),)) as served:
            before = left_of_clients()
            base = f"127.0.0.1:{served.port}"
            for http2 in (False, True):
                await ask(f"http://{base}", http2)
            await call(base)
            listener = served.server.front.http[0]
            await served.until(lambda: not listener.connections)
            await asyncio.sleep(0)
            left = left_of_clients(before)
            assert [(one, gc.get_referrers(one)) for one in left] == []

    run(main())
