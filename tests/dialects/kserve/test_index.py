"""The repository index: it says of a model what model readiness says, whatever has become of its workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastserve.workers import liveness
from fastserve.workers.liveness import SilenceLimits
from tests import proc
from tests.dialects.kserve.grpc_rig import SERVICE, V2, GrpcServed, serving
from tests.server.rig import run, write_model

BRISK = SilenceLimits(ping_s=0.2, silent_s=3.0, computing_s=6.0, starved_s=60.0)
READY = {"name": "twice", "version": "1", "state": "READY"}


async def index(served: GrpcServed, *, ready: bool = False) -> tuple[list[Any], list[Any]]:
    """The index over HTTP and over gRPC."""
    body = json.dumps({"ready": ready}).encode()
    status, page = await (await served.client()).post("/v2/repository/index", body)
    assert status == 200
    call = served.channel.unary_unary(
        SERVICE + "RepositoryIndex", response_deserializer=V2.RepositoryIndexResponse.FromString
    )
    reply = await call(V2.RepositoryIndexRequest(ready=ready).SerializeToString())
    entries = [{field.name: value for field, value in model.ListFields()} for model in reply.models]
    return json.loads(page), entries


@pytest.mark.logs_errors
def test_index_is_unavailable_while_the_only_worker_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(liveness, "SILENCE_LIMITS", BRISK)
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            front = served.server.front
            for _ in range(5):
                await served.until(lambda: front.readiness.ready)
                assert await index(served, ready=True) == ([READY], [READY])
                proc.stop(served.pids[0])
                await served.until(lambda: not front.readiness.ready)
                status, _ = await (await served.client()).get("/v2/models/twice/ready")
                over_http, over_grpc = await index(served)
                none = await index(served, ready=True)
                if not front.readiness.ready:  # else the next worker was there before anybody could look
                    break
            assert status == 400
            assert over_http == over_grpc
            (entry,) = over_http
            assert {**entry, "reason": ""} == {**READY, "state": "UNAVAILABLE", "reason": ""}
            assert entry["reason"]
            assert none == ([], [])
            await served.until(lambda: front.readiness.ready)

    run(work())
