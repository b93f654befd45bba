"""Limits and usage of keys on running servers: refusals of every API, clients that vanish, several fronts."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from fastserve.engine import BatchQueue, fast_queue_of
from fastserve.metrics import Registry, names
from fastserve.net.access_control import Scope
from fastserve.protos import load
from fastserve.server import Server, audit_log
from fastserve.settings.key_file import changing, make_key
from tests.running import Running, until
from tests.server.listeners.test_key_matrix import RPCS, Keys, routes, serving
from tests.server.listeners.test_keys import BODY, PREDICT
from tests.server.listeners.test_keys import serving as running
from tests.server.rig import HOLD, run, seen, write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe

INFER = "/v2/models/twice/infer"
AGAIN_S = 0.005


def add(path: Path, name: str, *scopes: Any, **limits: Any) -> dict[str, str]:
    """Add a key; the headers of its client."""
    with changing(path) as entries:
        text, entry = make_key(name, scopes or ("infer", "metadata"), **limits)
        entries[:] = [one for one in entries if one.name != name]
        entries.append(entry)
    return {"authorization": f"Bearer {text}"}


def held_body() -> bytes:
    data = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [HOLD, 1.0]}
    return json.dumps({"inputs": [data]}).encode()


def running_of(server: Server, name: str) -> float:
    return sum(one.value for one in server.front._shares.find(name).all_running)


async def turns(true: Callable[[], object]) -> None:
    async def wait() -> None:
        while not true():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(wait(), 60)


# ---- refusals


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
def test_every_api_says_429(tmp_path: Path, http2: bool) -> None:
    """From the server's own routes: a key that has had its one request of this hour."""
    write_model(tmp_path)
    keys = Keys(tmp_path)
    spent = add(keys.path, "spent", *(scope.value for scope in Scope), requests_per_second=1 / 3600)

    async def work() -> None:
        wrong, count = [], 0
        async with (
            serving(tmp_path, keys) as server,
            httpx.AsyncClient(http1=not http2, http2=http2, timeout=60, headers=spent) as client,
        ):
            root = "http://{}:{}".format(*server.front.http[0].address)
            first = await client.get(f"{root}/v2")
            assert first.status_code == 200
            for at, verb, target, scope in list(routes(server)):
                if scope is Scope.HEALTH or "//" in target:
                    continue
                host = "{}:{}".format(*server.front.http[at].address)
                reply = await client.request(
                    verb, f"http://{host}{target}", json={} if verb == "POST" else None
                )
                count += 1
                given = ("resource", "limit", "remaining")
                told = {name: reply.headers.get(f"x-ratelimit-{name}") for name in given}
                again = int(reply.headers.get("retry-after", "0"))
                fine = reply.status_code == 429 and told == dict(
                    zip(given, ("requests", "0.000277778", "0"), strict=True)
                )
                if not fine or not 3500 < again <= 3600 or "x-ratelimit-reset" not in reply.headers:
                    wrong.append(f"{verb} {target} ({scope}): {reply.status_code} {told} {again}")
        assert not wrong, "\n".join(wrong)
        assert count > 100

    run(work())


def test_every_rpc_says_resource_exhausted(tmp_path: Path) -> None:
    write_model(tmp_path)
    keys = Keys(tmp_path)
    scopes = [scope.value for scope in Scope]
    spent = tuple(add(keys.path, "spent", *scopes, requests_per_second=1 / 3600).items())
    details = load("google_rpc")

    async def work() -> None:
        async with serving(tmp_path, keys) as server:
            place = "{}:{}".format(*server.front.grpc[1].address)
            async with grpc.aio.insecure_channel(place) as channel:
                await channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")(
                    b"", metadata=spent
                )
                for path, scope in RPCS.items():
                    if scope is Scope.HEALTH:
                        continue
                    given = channel.unary_stream(path)(b"", metadata=spent, timeout=60)
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await given.read()
                    fault = caught.value
                    assert fault.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, path
                    trailers = dict(fault.trailing_metadata() or ())
                    status = details.Status.FromString(trailers["grpc-status-details-bin"])
                    retry = details.RetryInfo.FromString(status.details[0].value)
                    assert 3500 < retry.retry_delay.seconds <= 3600

    run(work())


def test_limits_change_without_a_restart(tmp_path: Path) -> None:
    write_model(tmp_path)
    keys = Keys(tmp_path)
    headers = add(keys.path, "k", requests_per_second=1 / 3600)

    async def work() -> None:
        async with (
            serving(tmp_path, keys) as server,
            httpx.AsyncClient(headers=headers, timeout=60) as client,
        ):
            root = "http://{}:{}".format(*server.front.http[0].address)

            async def statuses(count: int) -> list[int]:
                return [(await client.get(f"{root}/v2")).status_code for _ in range(count)]

            assert await statuses(3) == [200, 429, 429]
            with changing(keys.path) as entries:
                entries[:] = [
                    type(one)(one.name, one.scopes, one.id, one.hash) if one.name == "k" else one
                    for one in entries
                ]
            server.front.renew_files()
            assert await statuses(50) == [200] * 50

    run(work())


# ---- rows, and usage


def of_rows(count: int, first: float = 0.0) -> bytes:
    data = {"name": "x", "datatype": "FP32", "shape": [count, 2], "data": [first, 1.0] * count}
    return json.dumps({"inputs": [data]}).encode()


GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"


def message_of(rows: int) -> bytes:
    contents = {"fp32_contents": [0.0] * 2 * rows}
    inputs = [{"name": "x", "datatype": "FP32", "shape": [rows, 2], "contents": contents}]
    return load("kserve_v2").ModelInferRequest(model_name="twice", inputs=inputs).SerializeToString()


@pytest.mark.parametrize("path", ["fast", "general", "split", "tfserving", "grpc"])
def test_rows_are_limited_and_counted_on_every_path(tmp_path: Path, path: str) -> None:
    """The first request is more than a second's worth: it is served, and the next one has to wait."""
    write_model(tmp_path)
    keys = Keys(tmp_path)
    rows = {"split": 10}.get(path, 2)
    limited = add(keys.path, "k", rows_per_second=rows / 3600)
    free = add(keys.path, "free")

    async def work() -> None:
        async with (
            serving(tmp_path, keys, load_models=("*",)) as server,
            httpx.AsyncClient(timeout=60) as client,
        ):
            root = "http://{}:{}".format(*server.front.http[0].address)
            place = "{}:{}".format(*server.front.grpc[1].address)

            async def ask(headers: dict[str, str]) -> tuple[int, dict[str, str]]:
                if path == "grpc":
                    async with grpc.aio.insecure_channel(place) as channel:
                        call = channel.unary_unary(GRPC_INFER)
                        try:
                            await call(message_of(rows), metadata=tuple(headers.items()), timeout=60)
                        except grpc.aio.AioRpcError as fault:
                            status = 429 if fault.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else 500
                            return status, {"x-ratelimit-resource": (fault.details() or "").split()[-3]}
                    return 200, {}
                if path == "tfserving":
                    body = json.dumps({"instances": [[0.0, 1.0]] * rows}).encode()
                    reply = await client.post(
                        f"{root}/v1/models/twice:predict", content=body, headers=headers
                    )
                else:
                    more = {"x-request-id": "r1"} if path == "general" else {}
                    reply = await client.post(root + INFER, content=of_rows(rows), headers=headers | more)
                return reply.status_code, dict(reply.headers)

            for _ in range(4):  # the general path teaches the fast one
                assert (await ask(free))[0] == 200
            assert (await ask(limited))[0] == 200
            status, told = await ask(limited)
            assert (status, told.get("x-ratelimit-resource")) == (429, "rows")
            server.front.look_twice_a_second()
            found = server.registry.read(names.KEY_ROWS, names.KEY_COMPUTE)
            counted, compute = ({key: value for (key,), (value,) in one.items()} for one in found)
            assert (counted["k"], counted["free"]) == (rows, 4 * rows)
            assert 0 < compute["k"] < 60
            assert compute["free"] > 0

    run(work())


def test_answers_of_the_cache_are_requests_without_rows(tmp_path: Path) -> None:
    write_model(tmp_path, cache=True, request_log={"sample": 1.0})
    keys, logs = Keys(tmp_path), tmp_path / "logs"
    headers = add(keys.path, "k")

    async def work() -> None:
        more = {"load_models": ("*",), "request_log_folder": str(logs)}
        async with serving(tmp_path, keys, **more) as server, httpx.AsyncClient(timeout=60) as client:
            url = "http://{}:{}/v1/models/twice:predict".format(*server.front.http[0].address)
            told = []
            for _ in range(6):
                reply = await client.post(url, content=b'{"instances": [[3.0, 0.5]]}', headers=headers)
                assert (reply.status_code, reply.json()) == (200, {"predictions": [[6.0, 1.0]]})
                server.front.look_twice_a_second()
                told.append([one["k",] for one in server.registry.read(names.KEY_ROWS, names.KEY_COMPUTE)])
            found = server.registry.read(names.KEY_REQUESTS, names.KEY_ROWS)
            assert [one["k",] for one in found] == [(6.0,), (1.0,)]
            assert told == told[:1] * 6, "no compute after the first"
        lines = [json.loads(line) for line in (logs / "twice.jsonl").read_text().splitlines()]
        assert [one["key"] for one in lines] == ["k"] * 6

    run(work())


def test_each_message_of_a_stream_has_rows(tmp_path: Path) -> None:
    write_model(tmp_path)
    keys = Keys(tmp_path)
    limited = add(keys.path, "k", rows_per_second=5 / 3600)
    free = add(keys.path, "free")

    async def work() -> None:
        async with serving(tmp_path, keys, load_models=("*",)) as server:
            place = "{}:{}".format(*server.front.grpc[1].address)
            answer_of = load("kserve_v2").ModelStreamInferResponse.FromString
            async with grpc.aio.insecure_channel(place) as channel:
                for headers, wanted in ((free, [""] * 6), (limited, ["", *["rows"] * 5])):
                    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
                    stream = call(metadata=tuple(headers.items()), timeout=60)
                    for text in wanted:
                        await stream.write(message_of(2))
                        found = answer_of(await stream.read()).error_message
                        assert (text in found, bool(found)) == (True, bool(text)), found
                    await stream.done_writing()

    run(work())


TELLER = """
class Model:
    info = {"tokenizer": "", "eos_ids": [999]}

    def __init__(self, config):
        pass

    def generate(self, request):
        for _ in range(request.sampling.max_new_tokens):
            yield 7, "ab "
"""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tokens_are_limited_and_counted(tmp_path: Path, stream: bool) -> None:
    """An answer of more tokens than a second's worth is given; the next request waits for it."""
    model = tmp_path / "teller"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(TELLER)
    (model / "model.yaml").write_text("backend: text_python\n")
    keys = Keys(tmp_path)
    limited = add(keys.path, "k", tokens_per_second=1 / 36)

    async def work() -> None:
        async with (
            serving(tmp_path, keys, load_models=("*",)) as server,
            httpx.AsyncClient(timeout=60, headers=limited) as client,
        ):
            url = "http://{}:{}/v1/completions".format(*server.front.http[0].address)
            asked = {"model": "teller", "prompt": "hello", "max_tokens": 50, "stream": stream}
            reply = await client.post(url, json=asked)
            assert reply.status_code == 200
            assert reply.text.count("ab ") == 50
            assert reply.headers["x-ratelimit-resource"] == "tokens"
            reply = await client.post(url, json=asked)
            assert reply.status_code == 429
            assert reply.json()["error"]["message"] == "this API key may use 0.0277778 tokens a second"
            assert reply.headers["x-ratelimit-resource"] == "tokens"
            assert 1700 < int(reply.headers["retry-after"]) <= 1800
            server.front.look_twice_a_second()
            tokens, rows = server.registry.read(names.KEY_TOKENS, names.KEY_ROWS)
            assert (tokens["k",], rows["k",]) == ((50.0,), (1.0,))

    run(work())


def test_replies_of_the_general_path_tell_what_is_left(tmp_path: Path) -> None:
    write_model(tmp_path)
    keys = Keys(tmp_path)
    limited, free = add(keys.path, "k", requests_per_second=100), add(keys.path, "free")

    async def work() -> None:
        async with serving(tmp_path, keys) as server, httpx.AsyncClient(timeout=60) as client:
            root = "http://{}:{}".format(*server.front.http[0].address)
            told = (await client.get(f"{root}/v2", headers=limited)).headers
            assert (told["x-ratelimit-resource"], told["x-ratelimit-limit"]) == ("requests", "100")
            assert 98 <= int(told["x-ratelimit-remaining"]) <= 99
            assert 0 < float(told["x-ratelimit-reset"]) <= 0.011
            told = (await client.get(f"{root}/v2", headers=free)).headers
            assert not [name for name in told if name.startswith("x-ratelimit")]

    run(work())


# ---- shares of a model that is overloaded


def is_held(folder: Path) -> bool:
    """Whether the held batch runs: others that ran before it have been seen as well."""
    return any(HOLD in batch for batch in seen(folder))


def order(folder: Path) -> list[float]:
    """The first number of each row that waited, in the order in which the worker ran them."""
    return [value for batch in seen(folder) for value in batch if value >= 10]


@pytest.mark.parametrize(
    "weights", [(1.0, 1.0), (3.0, 1.0), pytest.param((1.0, 4.0), marks=pytest.mark.torture)]
)
def test_waiting_requests_of_keys_are_served_by_weight(tmp_path: Path, weights: tuple[float, float]) -> None:
    """A worker holds its first batch until both keys have sent everything; then it runs what waits."""
    write_model(tmp_path, max_queue_rows=1000)
    keys = Keys(tmp_path)
    a, b = (add(keys.path, name, weight=weight) for name, weight in zip("ab", weights, strict=True))
    each = 60

    async def work() -> None:
        async with (
            serving(tmp_path, keys, load_models=("*",)) as server,
            httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client,
        ):
            url = "http://{}:{}".format(*server.front.http[0].address) + INFER
            for headers in (a, b):  # both are known to send requests
                await client.post(url, content=of_rows(1), headers=headers)
            first = asyncio.ensure_future(client.post(url, content=held_body(), headers=a))
            await turns(lambda: is_held(tmp_path))
            sent = [first]
            for number in range(each):
                for headers, at in ((a, 100), (b, 200)):
                    posted = client.post(url, content=of_rows(1, at + number), headers=headers)
                    sent.append(asyncio.ensure_future(posted))
            queue = queue_of(server)
            await turns(lambda: queue.room.rows + queue.ring.queued() == 2 * each)
            ahead = queue.ring.queued()
            assert ahead <= queue.max_rows
            (tmp_path / "go").touch()
            assert {reply.status_code for reply in await asyncio.gather(*sent)} == {200}

            ran = order(tmp_path)
            assert sorted(ran) == sorted(at + n for at in (100.0, 200.0) for n in range(each))
            share = weights[0] / sum(weights)
            for count in range(8, int(each / max(share, 1 - share))):  # until one of them has no more
                mine = sum(value < 200 for value in ran[ahead : ahead + count])
                assert abs(mine - count * share) <= 2, (count, ran)
            for at in (100, 200):  # in order, of each key
                own = [value for value in ran[ahead:] if at <= value < at + 100]
                assert own == sorted(own)

    run(work())


@pytest.mark.parametrize("clients", [4, 64])
def test_one_keys_flood_is_not_before_another_keys_request(tmp_path: Path, clients: int) -> None:
    """The flood waits before the other key sends anything; its requests run within the next two batches."""
    write_model(tmp_path, max_queue_rows=1000)
    keys = Keys(tmp_path)
    flood, other = add(keys.path, "flood"), add(keys.path, "other")

    async def work() -> None:
        async with (
            serving(tmp_path, keys, load_models=("*",)) as server,
            httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client,
        ):
            url = "http://{}:{}".format(*server.front.http[0].address) + INFER
            queue = queue_of(server)
            for headers in (flood, other):
                await client.post(url, content=of_rows(1), headers=headers)
            first = asyncio.ensure_future(client.post(url, content=held_body(), headers=flood))
            await turns(lambda: is_held(tmp_path))
            sent = [first]
            for number in range(clients):
                posted = client.post(url, content=of_rows(1, 100 + number), headers=flood)
                sent.append(asyncio.ensure_future(posted))
            await turns(lambda: queue.room.rows + queue.ring.queued() == clients)
            for number in range(2):
                posted = client.post(url, content=of_rows(1, 10 + number), headers=other)
                sent.append(asyncio.ensure_future(posted))
            await turns(lambda: queue.room.rows + queue.ring.queued() == clients + 2)
            (tmp_path / "go").touch()
            assert {reply.status_code for reply in await asyncio.gather(*sent)} == {200}
            ran = order(tmp_path)
            assert max(ran.index(10.0), ran.index(11.0)) < 2 * queue.max_rows, ran

    run(work())


@pytest.mark.parametrize("weights", [(3.0, 1.0), pytest.param((1.0, 1.0), marks=pytest.mark.torture)])
def test_shares_are_those_of_all_front_processes(tmp_path: Path, weights: tuple[float, float]) -> None:
    """As above with three fronts, whose clients' connections are spread over them."""
    models = tmp_path / "models"
    write_model(models, max_queue_rows=1000, parameters={"folder": str(tmp_path)})
    path = tmp_path / "keys.yaml"
    a, b = (add(path, name, weight=weight) for name, weight in zip("ab", weights, strict=True))
    watch = add(path, "watch", "metrics")
    each, statuses = 48, Counter[int]()
    options = ("--keys", str(path), "--frontends", "3")
    with Running(models, tmp_path / "log", *options) as server:

        def post(headers: dict[str, str], body: bytes) -> None:
            with closing(http.client.HTTPConnection(server.http, timeout=120)) as link:
                link.request("POST", INFER, body, headers)
                reply = link.getresponse()
                reply.read()
                statuses[reply.status] += 1

        def received(key: str) -> float:
            with closing(http.client.HTTPConnection(server.http, timeout=60)) as link:
                link.request("GET", "/metrics", headers=watch)
                page = link.getresponse().read().decode()
            line = f'fastserve_key_requests_total{{key="{key}"}} '
            return float(next((one[len(line) :] for one in page.splitlines() if one.startswith(line)), "0"))

        for headers in (a, b) * 4:
            post(headers, of_rows(1))
        threads = [threading.Thread(target=post, args=(a, held_body()))]
        threads[0].start()
        until(lambda: is_held(tmp_path), "a batch")
        for number in range(each):
            for headers, at in ((a, 100), (b, 200)):
                threads.append(threading.Thread(target=post, args=(headers, of_rows(1, at + number))))
        for thread in threads[1:]:
            thread.start()
        until(lambda: received("a") == each + 5 and received("b") == each + 4, "all requests")
        (tmp_path / "go").touch()
        for thread in threads:
            thread.join(60)
    assert statuses == {200: 2 * each + 1 + 8}
    ran = order(tmp_path)
    assert sorted(ran) == sorted(at + n for at in (100.0, 200.0) for n in range(each))
    share = weights[0] / sum(weights)
    for count in range(16, int(each / max(share, 1 - share)) - 8):
        mine = sum(value < 200 for value in ran[8 : 8 + count])
        assert abs(mine - count * share) <= 8, (count, "".join("ab"[v >= 200] for v in ran))


def test_a_full_queue_turns_away_the_flood(tmp_path: Path) -> None:
    write_model(tmp_path, max_queue_rows=24)
    keys = Keys(tmp_path)
    flood, other = add(keys.path, "flood"), add(keys.path, "other")

    async def work() -> None:
        async with (
            serving(tmp_path, keys, load_models=("*",)) as server,
            httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client,
        ):
            url = "http://{}:{}".format(*server.front.http[0].address) + INFER
            for headers in (flood, other):
                await client.post(url, content=of_rows(1), headers=headers)
            first = asyncio.ensure_future(client.post(url, content=held_body(), headers=flood))
            await turns(lambda: is_held(tmp_path))
            floods = [
                asyncio.ensure_future(client.post(url, content=of_rows(1, 100 + n), headers=flood))
                for n in range(40)
            ]
            await turns(lambda: sum(one.done() for one in floods) == 16)
            mine = [
                asyncio.ensure_future(client.post(url, content=of_rows(1, 10 + n), headers=other))
                for n in range(4)
            ]
            await turns(lambda: sum(one.done() for one in floods) == 20)
            assert not any(one.done() for one in mine)
            (tmp_path / "go").touch()
            assert {reply.status_code for reply in await asyncio.gather(first, *mine)} == {200}
            got = Counter(reply.status_code for reply in await asyncio.gather(*floods))
            assert got == {200: 20, 503: 20}

    run(work())


def queue_of(server: Server) -> BatchQueue:
    version = server.front.engine.catalog.available("twice")
    assert version is not None
    queue = fast_queue_of(version)
    assert queue is not None
    return queue


# ---- clients that vanish


CLIENT = """
import socket, sys, time
host, port, count, head, body = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
links = [socket.create_connection((host, port)) for _ in range(count)]
for link in links:
    link.sendall((head.replace("|", "\\r\\n") + body).encode())
print("sent", flush=True)
time.sleep(600)
"""


def head_of(headers: dict[str, str], length: int) -> str:
    return (
        f"POST {INFER} HTTP/1.1|Host: a|Authorization: {headers['authorization']}|Content-Length: {length}||"
    )


@pytest.mark.parametrize("clients", [4, 64])
def test_clients_that_are_killed_give_their_places_back(tmp_path: Path, clients: int) -> None:
    write_model(tmp_path, max_queue_rows=1000)
    keys = Keys(tmp_path)
    headers = add(keys.path, "k", concurrency=clients)
    body = held_body()

    async def work() -> None:
        async with (
            serving(tmp_path, keys, load_models=("*",)) as server,
            httpx.AsyncClient(timeout=60) as client,
        ):
            host, port = server.front.http[0].address
            command = [sys.executable, "-c", CLIENT, host, str(port), str(clients)]
            for _ in range(2):
                process = await asyncio.create_subprocess_exec(
                    *command, head_of(headers, len(body)), body.decode(), stdout=subprocess.PIPE
                )
                assert process.stdout is not None
                assert await asyncio.wait_for(process.stdout.readline(), 60) == b"sent\n"
                await turns(lambda: running_of(server, "k") == clients)
                reply = await client.post(f"http://{host}:{port}{INFER}", content=body, headers=headers)
                assert reply.status_code == 429
                assert reply.json() == {"error": f"this API key may have {clients} requests under way"}
                process.send_signal(signal.SIGKILL)
                await process.wait()
                await turns(lambda: running_of(server, "k") == 0)
            (tmp_path / "go").touch()
            reply = await client.post(f"http://{host}:{port}{INFER}", content=body, headers=headers)
            assert reply.status_code == 200
            assert running_of(server, "k") == 0

    run(work())


def test_resets_and_cancelled_calls_give_their_places_back(tmp_path: Path) -> None:
    """HTTP/1.1 resets, HTTP/2 streams and gRPC calls that are cancelled, streams that are open."""
    write_model(tmp_path, max_queue_rows=1000)
    keys = Keys(tmp_path)
    headers = add(keys.path, "k", concurrency=16)
    body = held_body()
    v2 = load("kserve_v2")
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 2], "contents": {"fp32_contents": [HOLD, 1.0]}}]
    message = v2.ModelInferRequest(model_name="twice", inputs=inputs).SerializeToString()

    async def work() -> None:
        async with serving(tmp_path, keys, load_models=("*",)) as server:
            host, port = server.front.http[0].address
            url = f"http://{host}:{port}{INFER}"
            for _ in range(4):
                links = [socket.create_connection((host, port)) for _ in range(8)]
                for link in links:
                    head = head_of(headers, len(body)).replace("|", "\r\n")
                    await asyncio.to_thread(link.sendall, head.encode() + body)
                await turns(lambda: running_of(server, "k") == 8)
                for link in links:
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    link.close()
                await turns(lambda: running_of(server, "k") == 0)

                async with httpx.AsyncClient(http1=False, http2=True, timeout=60) as client:
                    sent = [client.post(url, content=body, headers=headers) for _ in range(8)]
                    tasks = [asyncio.ensure_future(one) for one in sent]
                    await turns(lambda: running_of(server, "k") == 8)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                await turns(lambda: running_of(server, "k") == 0)

                place = "{}:{}".format(*server.front.grpc[1].address)
                async with grpc.aio.insecure_channel(place) as channel:
                    given = tuple(headers.items())
                    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                    calls = [call(message, metadata=given, timeout=60) for _ in range(8)]
                    calls += [call(message, metadata=given, timeout=0.5) for _ in range(4)]
                    stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
                    open_ones = [stream(metadata=given) for _ in range(4)]
                    for one in open_ones:
                        await one.write(message)
                    await turns(lambda: running_of(server, "k") >= 12)
                    await turns(lambda: running_of(server, "k") == 12)  # four had a deadline
                    for one in (*calls, *open_ones):
                        one.cancel()
                    await turns(lambda: running_of(server, "k") == 0)

    run(work())


# ---- several front processes


@contextlib.contextmanager
def asking(
    place: str, headers: dict[str, str], threads: int, target: str = PREDICT, body: bytes = BODY
) -> Iterator[Counter[int]]:
    """Clients that ask one request after the other, over a new connection now and then; what they got."""
    got: Counter[int] = Counter()
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                closing(http.client.HTTPConnection(place, timeout=60)) as link,
            ):
                for _ in range(20):
                    link.request("POST", target, body, headers)
                    reply = link.getresponse()
                    reply.read()
                    got[reply.status] += 1
                    if reply.status != 200:  # as clients do who are told to come later
                        ended.wait(AGAIN_S)

    started = [threading.Thread(target=ask) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield got
    finally:
        ended.set()
        for thread in started:
            thread.join()


def test_the_rate_of_several_fronts(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    headers = add(path, "k", requests_per_second=40)
    with running(tmp_path, "--frontends", "3") as server:
        began = time.monotonic()
        with asking(server.http, headers, 6) as got:
            until(lambda: got[200] >= 160, "four seconds' worth")
        took_s = time.monotonic() - began
        most = 40 + 40 * took_s + 3
        assert 160 <= got[200] <= most
        assert set(got) == {200, 429}


def test_a_front_that_is_killed_gives_back_the_places_it_had(tmp_path: Path) -> None:
    """Eight clients of a key with eight places: each place that is lost with its front shows as a 429."""
    path = tmp_path / "keys.yaml"
    headers = add(path, "k", concurrency=8)
    with running(tmp_path, "--frontends", "3") as server:
        fronts = fronts_of(server)
        assert len(fronts) == 2
        with asking(server.http, headers, 8) as got:
            for pid in fronts:
                seen = got[200]
                until(lambda seen=seen: got[200] > seen + 100, "answers")
                os.kill(pid, signal.SIGKILL)
            seen = got[200]
            until(lambda: got[200] > seen + 100, "answers go on")
        with asking(server.http, headers, 8) as got:
            until(lambda: got[200] >= 400, "answers go on")
        assert got[429] == 0


@pytest.mark.parametrize("ends", [signal.SIGSTOP, signal.SIGKILL])
def test_turns_go_on_beside_a_front_that_stops_or_dies(tmp_path: Path, ends: signal.Signals) -> None:
    """Its requests wait in its lines, before those of others: they are not waited for."""
    models = tmp_path / "models"
    write_model(models, max_batch_size=1, parameters={"folder": str(tmp_path)})
    path = tmp_path / "keys.yaml"
    a, b = (add(path, name) for name in "ab")
    options = ("--keys", str(path), "--frontends", "3")
    with Running(models, tmp_path / "log", *options) as server:
        body = of_rows(1)
        with (
            asking(server.http, a, 8, INFER, body) as first,
            asking(server.http, b, 8, INFER, body) as second,
        ):
            for pid in fronts_of(server):
                seen = first[200], second[200]
                until(lambda seen=seen: first[200] > seen[0] + 100 and second[200] > seen[1] + 100, "answers")
                os.kill(pid, ends)
                seen = first[200], second[200]
                until(
                    lambda seen=seen: first[200] > seen[0] + 50 and second[200] > seen[1] + 50, "it goes on"
                )
                if ends is signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)
        assert {*first, *second} == {200}


def fronts_of(server: Running) -> list[int]:
    """The front processes besides the server's first: those that map a relay channel."""
    return [pid for pid in server.workers if "fastserve-relay" in links_of(pid)]


def links_of(pid: int) -> str:
    try:
        return " ".join(os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended meanwhile
        return ""


# ---- usage


CLIENTS, EACH = 4, 24  # connections or channels, and requests on each


def answer_to(body: bytes) -> float:
    found: float = json.loads(body)["outputs"][0]["data"][0]
    return found


async def pipelined(address: tuple[str, int], given: list[dict[str, str]]) -> int:
    """Requests on one connection, all before the first answer; each by its own key."""
    host = "{}:{}".format(*address)
    reader, writer = await asyncio.open_connection(*address)
    for number, headers in enumerate(given):
        body = of_rows(1, number)
        lines = f"Host: {host}\r\nAuthorization: {headers['authorization']}\r\nContent-Length: {len(body)}"
        writer.write(f"POST {INFER} HTTP/1.1\r\n{lines}\r\n\r\n".encode() + body)
    for number in range(len(given)):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        assert answer_to(await reader.readexactly(length)) == 2 * number
    writer.close()
    return len(given)


async def over_http2(address: tuple[str, int], given: list[dict[str, str]]) -> int:
    """Streams of one connection, at the same time."""
    url = "http://{}:{}{}".format(*address, INFER)
    async with httpx.AsyncClient(http1=False, http2=True, timeout=60) as client:

        async def ask(number: int, headers: dict[str, str]) -> None:
            reply = await client.post(url, content=of_rows(1, number), headers=headers)
            assert reply.status_code == 200
            assert answer_to(reply.content) == 2 * number

        await asyncio.gather(*(ask(number, headers) for number, headers in enumerate(given)))
    return len(given)


async def unary(address: tuple[str, int], given: list[dict[str, str]]) -> int:
    """Calls of one channel, at the same time."""
    async with grpc.aio.insecure_channel("{}:{}".format(*address)) as channel:
        call = channel.unary_unary(GRPC_INFER)
        calls = [call(message_of(1), metadata=tuple(headers.items()), timeout=60) for headers in given]
        assert all(await asyncio.gather(*calls))
    return len(given)


async def streams(address: tuple[str, int], given: list[dict[str, str]]) -> int:
    """A stream of each key, with its share of the messages: two requests."""
    answer_of = load("kserve_v2").ModelStreamInferResponse.FromString
    async with grpc.aio.insecure_channel("{}:{}".format(*address)) as channel:

        async def send(headers: dict[str, str]) -> None:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            stream = call(metadata=tuple(headers.items()), timeout=60)
            for _ in range(given.count(headers)):
                await stream.write(message_of(1))
                assert answer_of(await stream.read()).error_message == ""
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF

        await asyncio.gather(send(given[0]), send(given[1]))
    return 2


@pytest.mark.parametrize("send", [pipelined, over_http2, unary, streams])
def test_counts_are_exact_where_keys_share_connections(tmp_path: Path, send: Any) -> None:
    """Two keys take turns on the same connections: neither has a request or a row of the other's."""
    write_model(tmp_path)
    keys = Keys(tmp_path)
    pair = [add(keys.path, name) for name in ("one", "two")]
    no_infer = add(keys.path, "three", "metadata")
    at = 1 if send in (unary, streams) else 0

    async def work() -> None:
        async with serving(tmp_path, keys, load_models=("*",)) as server:
            front = server.front
            address: Any = (front.grpc[1] if at else front.http[0]).address
            sent = await asyncio.gather(*(send(address, pair * (EACH // 2)) for _ in range(CLIENTS)))
            for _ in range(3):
                if at:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await unary(address, [no_infer])
                else:
                    with pytest.raises(AssertionError, match="403"):
                        await over_http2(address, [no_infer])
            found = server.registry.read(names.KEY_REQUESTS)
            requests = {key: value for (key,), (value,) in found[0].items()}
            half = sum(sent) // 2
            assert requests == {"": 0, "one": half, "two": half, "three": 3} | {
                key: 0 for key in requests if key not in ("one", "two", "three")
            }
            front.look_twice_a_second()
            rows = {key: value for (key,), (value,) in server.registry.read(names.KEY_ROWS)[0].items()}
            assert (rows["one"], rows["two"]) == (CLIENTS * EACH // 2, CLIENTS * EACH // 2)
            assert sum(rows.values()) == CLIENTS * EACH

    run(work())


def test_the_metrics_page_and_the_audit_log(tmp_path: Path) -> None:
    path, audit = tmp_path / "keys.yaml", tmp_path / "audit.log"
    good = add(path, "good", "infer", "metrics", "admin")
    other = add(path, "other", "metadata")
    rare = add(path, "rare", requests_per_second=1 / 3600)

    def send(verb: str, target: str, headers: dict[str, str]) -> int:
        with closing(http.client.HTTPConnection(server.http, timeout=60)) as link:
            link.request(verb, target, BODY if verb == "POST" else None, headers)
            reply = link.getresponse()
            reply.read()
            return reply.status

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in audit.read_text().splitlines()]

    def used(key: str) -> tuple[int, Counter[str]]:
        found = [line for line in lines() if (line["event"], line["key"]) == ("usage", key)]
        errors: Counter[str] = Counter()
        for line in found:
            errors.update(line.get("errors", {}))
        return sum(line["requests"] for line in found), errors

    def ran(key: str, what: str) -> float:
        found = [line for line in lines() if (line["event"], line["key"]) == ("usage", key)]
        return sum(line.get(what, 0) for line in found)

    with running(tmp_path, "--frontends", "2", "--audit-log", str(audit)) as server:
        assert [send("POST", PREDICT, good) for _ in range(30)] == [200] * 30
        assert [send("POST", PREDICT, other) for _ in range(4)] == [403] * 4
        assert [send("GET", "/v2", other) for _ in range(4)] == [200] * 4
        assert [send("POST", PREDICT, rare) for _ in range(3)] == [200, 429, 429]
        assert [send("POST", PREDICT, {}) for _ in range(5)] == [401] * 5
        load_it = "/v2/repository/models/half_plus_two/load?x=secret"
        asked = [send("POST", load_it, headers) for headers in (good, other, {})]
        assert asked[1:] == [403, 401]
        until(lambda: used("good")[0] == 31, "the usage of a key")
        until(lambda: used("other") == (9, Counter({"403": 5})), "the usage of another")
        until(lambda: used("rare") == (3, Counter({"429": 2})), "a key over its limit")
        until(lambda: used("") == (0, Counter({"401": 6})), "requests without a key")
        until(lambda: (ran("good", "rows"), ran("rare", "rows")) == (30, 1), "the rows of keys")
        until(lambda: 0 < ran("good", "compute_s") < 90, "their compute")
        assert (ran("good", "tokens"), ran("other", "rows"), ran("", "rows")) == (0, 0, 0)
        admin = [(line["key"], line["call"], line["status"]) for line in lines() if line["event"] == "admin"]
        call = "POST /v2/repository/models/half_plus_two/load"
        assert sorted(admin) == sorted([("good", call, asked[0]), ("other", call, 403), ("", call, 401)])
        audit.rename(tmp_path / "audit.old")
        with closing(http.client.HTTPConnection(server.http, timeout=60)) as link:
            link.request("GET", "/metrics", headers=good)
            page = link.getresponse().read().decode()
        for line in (
            'fastserve_key_requests_total{key="good"} 32',
            'fastserve_key_requests_total{key="other"} 9',
            'fastserve_key_rows_total{key="good"} 30',
            'fastserve_key_rows_total{key="rare"} 1',
            'fastserve_key_compute_seconds_total{key="good"} 0.',
            'fastserve_key_errors_total{code="403",key="other"} 5',
            'fastserve_key_errors_total{code="429",key="rare"} 2',
            'fastserve_key_errors_total{code="401",key=""} 6',
        ):
            assert f"\n{line}" in page, [one for one in page.splitlines() if "_key_" in one]
        until(lambda: audit.exists() and used("good")[0] == 1, "a new file")
        text = audit.read_text() + (tmp_path / "audit.old").read_text()
        for headers in (good, other, rare):
            assert headers["authorization"].split()[1] not in text
    assert oct(audit.stat().st_mode)[-3:] == "600"


@pytest.mark.logs_errors
def test_lines_of_the_audit_log_wait_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes half a line, then nothing: all is there once it has room, of calls that may wait."""
    monkeypatch.setattr(audit_log, "MOST_WAITING", 3)
    registry, path, room = Registry(), tmp_path / "audit.log", 50

    async def work() -> None:
        file = audit_log.AuditLog(path, registry)
        file.open()
        file.note("ops", "POST /before", 200)
        size, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
        try:
            for number in range(5):
                file.note("ops", f"POST /{number}", 200)
            for _ in range(2):
                registry.counters(names.KEY_REQUESTS).of("team").add(2)
                file._turn()
            assert path.stat().st_size == size + room
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        file._turn()
        file.note("ops", "POST /after", 200)
        file.close()

    run(work())
    lines = path.read_text().splitlines()
    half = lines.pop(1)
    assert (len(half), half) == (room, lines[1][:room])
    told = [json.loads(line) for line in lines]
    calls = [f"POST /{name}" for name in ("before", 0, 1, 2, "after")]
    assert [line["call"] for line in told if line["event"] == "admin"] == calls
    assert [line["admin"] for line in told if line["event"] == "omitted"] == [2]
    assert [line["requests"] for line in told if line["event"] == "usage"] == [4]
    registry.close()


def test_refusals_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "MOST_REFUSED", 0)  # a busy machine refuses fewer than 100 a second
    write_model(tmp_path)
    keys, audit = Keys(tmp_path), tmp_path / "audit.log"

    async def work() -> None:
        async with serving(tmp_path, keys, audit_log=str(audit)) as server, httpx.AsyncClient() as client:
            url = "http://{}:{}/v2/repository/models/m/load".format(*server.front.http[0].address)
            for _ in range(300):
                assert (await client.post(url)).status_code == 401
            await turns(lambda: "omitted" in audit.read_text())
            place = "{}:{}".format(*server.front.grpc[1].address)
            async with grpc.aio.insecure_channel(place) as channel:
                path = "/inference.GRPCInferenceService/RepositoryModelLoad"
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(path)(b"", metadata=tuple(keys.headers("admin").items()))
        found = [json.loads(line) for line in audit.read_text().splitlines()]
        events = Counter(line["event"] for line in found)
        omitted = sum(line["admin"] for line in found if line["event"] == "omitted")
        assert events["admin"] + omitted == 301
        (line,) = (line for line in found if (line["event"], line.get("key")) == ("admin", "admin"))
        assert (line["call"], line["status"]) == (path, "INVALID_ARGUMENT")

    run(work())
