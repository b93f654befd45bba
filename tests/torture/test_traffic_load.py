"""A hundred thousand requests over three protocols and three front processes: split within 1 %, and sticky
without an exception; and a shadow whose worker is stopped and killed. No request fails or is wrong.

`TORTURE_REQUESTS` is how many requests each half has.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import grpc.aio
import pytest

from fastserve.net.traffic_split import hash_point
from fastserve.protos import load
from fastserve.settings import Listener
from tests.server.models.test_traffic import (
    ADMIN,
    ask,
    ask_v1,
    ask_v2,
    shadow_counts,
    write_versions,
)
from tests.server.processes.test_fronts import connect_to_each
from tests.server.rig import Served, run, serving

pytestmark = [pytest.mark.torture, pytest.mark.lingers, pytest.mark.timeout(1200)]
V2 = load("kserve_v2")
REQUESTS = int(os.environ.get("TORTURE_REQUESTS", "100000"))
FRONTS, CLIENTS = 3, 8
SHARE, USERS = 0.05, 1000
STOPPED_S = 3.0


async def load_server(at: Served, asked: int, *, sticky: bool) -> Counter[int]:
    """Ask over REST and V2 on every front and over gRPC; the versions that answered."""
    counts: Counter[int] = Counter()
    numbers = iter(range(asked))

    def user_of(number: int) -> tuple[str, int]:
        user = f"user-{random.randrange(USERS)}"
        return user, 2 if hash_point(user.encode()) < SHARE else 1

    async def over_http(turn: int) -> None:
        client = await at.client()
        for number in numbers:
            way, headers, wanted = (ask_v1, ask_v2)[(number + turn) % 2], {}, 0
            if sticky:
                headers["x_user"], wanted = user_of(number)
            found = await way(client, float(number % 100), **headers)
            assert wanted in (0, found)
            counts[found] += 1

    async def over_grpc() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            call = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                V2.ModelInferRequest.SerializeToString,
                V2.ModelInferResponse.FromString,
            )
            for number in numbers:
                request = V2.ModelInferRequest(model_name="twice")
                tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
                tensor.contents.fp32_contents.extend([float(number % 100), 0.5])
                metadata, wanted = (), 0
                if sticky:
                    user, wanted = user_of(number)
                    metadata = (("x-user", user),)
                answer = await call(request, metadata=metadata, timeout=60)
                found = int(answer.model_version)
                assert wanted in (0, found)
                counts[found] += 1

    await asyncio.gather(*(over_http(turn) for turn in range(CLIENTS)), *(over_grpc() for _ in range(2)))
    return counts


def test_shares_and_clients_hold(tmp_path: Path) -> None:
    write_versions(tmp_path, traffic={"stable": 95, "canary": 5})
    listen = (Listener("127.0.0.1:0"),)

    async def work() -> None:
        async with serving(tmp_path, frontends=FRONTS, listen=listen, http=(), admin=ADMIN) as at:
            counts = await load_server(at, REQUESTS, sticky=False)
            assert counts.total() == REQUESTS
            assert abs(counts[2] / REQUESTS - SHARE) < 0.01, counts
            rules = {"traffic": {"stable": 95, "canary": 5}, "sticky": {"header": "x-user"}}
            assert (await ask(await at.client(), rules, "/traffic/twice"))[0] == 200
            assert (await load_server(at, REQUESTS, sticky=True)).total() == REQUESTS

    run(work(), 1200)


@pytest.mark.logs_errors
def test_a_shadow_in_trouble_costs_no_request(tmp_path: Path) -> None:
    """Its worker is stopped until the server ends it, and its successor is killed."""
    write_versions(tmp_path, (1, 2, 3), traffic={1: 95, 2: 5}, shadow={"version": 3, "percent": 20})

    async def work() -> None:
        listen = (Listener("127.0.0.1:0"),)
        async with serving(tmp_path, frontends=FRONTS, listen=listen, http=(), strict_readiness=False) as at:
            client = next(iter((await connect_to_each(at, FRONTS)).values()))
            shadow = next(one for one in at.server.host.hosted.values() if one.version.number == 3)
            loading = asyncio.ensure_future(load_server(at, REQUESTS // 5, sticky=False))

            async def worker() -> int:
                await at.until(lambda: shadow.group.pids[0])
                pid = shadow.group.pids[0]
                assert pid is not None
                return pid

            while not loading.done():
                pid = await worker()
                os.kill(pid, signal.SIGSTOP)
                await asyncio.wait([loading], timeout=STOPPED_S)
                os.kill(pid, random.choice([signal.SIGCONT, signal.SIGKILL]))
                await asyncio.wait([loading], timeout=STOPPED_S)
            counts = await loading
            assert counts.keys() == {1, 2}
            told = await shadow_counts(client)
            assert told["dropped"] > 0
            assert told["different"] > 0, "version 3 answers other numbers"
            assert told.keys() <= {"dropped", "different", "failed"}

    run(work(), 1200)
