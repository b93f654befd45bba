"""StreamInfer: order, errors in their place, half close, a client that leaves, bytes that are no request."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastserve.dialects.triton_v1.rpcs import AHEAD
from fastserve.engine.engine import scheduler_of
from tests.dialects.triton_v1 import models
from tests.dialects.triton_v1.rig import V1, make_request, read_response, rig, write_dense
from tests.server.rig import run

ONE = struct.pack("<i", 1)
ECHO = 'batch_size: 1 input { name: "IN" } output { name: "OUT" }'
ROW = struct.pack("<16i", *range(16))
PAIR = 'batch_size: 1 input { name: "INPUT0" } input { name: "INPUT1" } output { name: "OUTPUT0" }'


def test_order_and_errors_in_their_place(tmp_path: Path) -> None:
    """The second request waits for a busy model; those behind it, good and bad, wait their turn."""
    write_dense(tmp_path)
    models.write(tmp_path, "held")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            call = served.grpc.StreamInfer()
            requests = [
                make_request("simple", PAIR + " id: 1", ROW, ROW),
                make_request("held", ECHO + " id: 2", ONE),
                make_request("simple", PAIR + " id: 3", ROW),
                make_request("who", PAIR + " id: 4"),
                make_request("simple", PAIR + " id: 5", ROW, ROW),
            ]
            for request in requests:
                await call.write(request)
            first = await call.read()
            assert (first.meta_data.id, first.request_status.code) == (1, 1)
            await served.until_running(tmp_path, "held")
            models.release(tmp_path, "held")
            found = [await call.read() for _ in range(4)]
            assert [(r.meta_data.id, r.request_status.code) for r in found] == [
                (2, 1),
                (3, 5),
                (4, 6),
                (5, 1),
            ]
            await call.write(make_request("simple", PAIR + " id: 6", ROW, ROW))  # it goes on
            assert (await call.read()).meta_data.id == 6
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK

    run(ask())


def test_half_close_waits_for_the_last_answer(tmp_path: Path) -> None:
    models.write(tmp_path, "held")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            call = served.grpc.StreamInfer()
            await call.write(make_request("held", ECHO, ONE))
            await call.done_writing()
            await served.until_running(tmp_path, "held")
            models.release(tmp_path, "held")
            assert read_response(await call.read()).raws == [ONE]
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            empty = served.grpc.StreamInfer()
            await empty.done_writing()
            assert await empty.read() is grpc.aio.EOF
            assert await empty.code() is grpc.StatusCode.OK

    run(ask())


def test_a_client_that_leaves(tmp_path: Path) -> None:
    """Its requests that wait are given up; the server goes on (and holds nothing: the rig looks)."""
    models.write(tmp_path, "held")

    async def ask() -> None:
        async with rig(tmp_path) as served:
            version: Any = served.server.catalog.available("held")
            call = served.grpc.StreamInfer()
            for _ in range(4):
                await call.write(make_request("held", ECHO, ONE))
            await served.served.until(lambda: scheduler_of(version).queue.waiting == 4)
            call.cancel()
            await served.served.until(lambda: scheduler_of(version).queue.waiting == 0)
            models.release(tmp_path, "held")
            for ask in served.ways:
                assert (await ask("held", ECHO, ONE)).raws == [ONE]

    run(ask())


def test_steps_of_a_sequence_run_in_order(tmp_path: Path) -> None:
    models.write(tmp_path, "seq", "oldest")
    header = 'batch_size: 1 input { name: "INPUT" } output { name: "OUTPUT" } correlation_id: 3'

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for model in ("seq", "oldest"):
                flags = [1, *[0] * (2 * AHEAD), 2]
                values = [struct.pack("<i", 1 << n % 8) for n in range(len(flags))]
                requests = [
                    make_request(model, f"{header} flags: {flag}", value)
                    for flag, value in zip(flags, values, strict=True)
                ]
                replies = [read_response(r) async for r in served.grpc.StreamInfer(iter(requests))]
                totals = [struct.unpack("<i", reply.raws[0])[0] for reply in replies]
                assert totals == [sum(1 << m % 8 for m in range(n + 1)) for n in range(len(flags))]

    run(ask())


@pytest.mark.parametrize("garbage", [b"\xff", b"\x0a\x05ab", b"\x1a\x02\x12\x7f"])
def test_bytes_that_are_no_request(tmp_path: Path, garbage: bytes) -> None:
    """They end the call; what was asked before them is answered."""
    write_dense(tmp_path)

    async def ask() -> None:
        async with rig(tmp_path) as served:
            place = "{}:{}".format(*served.server.front.grpc[0].address)
            async with grpc.aio.insecure_channel(place) as channel:
                path = "/nvidia.inferenceserver.GRPCService/"
                good = make_request("simple", PAIR, ROW, ROW).SerializeToString()
                call = channel.stream_stream(path + "StreamInfer")()
                for sent in (
                    good,
                    garbage,
                ):  # a third could be on its way when the call ends: an error of its own
                    await call.write(sent)
                assert V1.InferResponse.FromString(await call.read()).request_status.code == 1
                with pytest.raises(grpc.aio.AioRpcError, match="malformed InferRequest"):
                    await call.read()
                with pytest.raises(grpc.aio.AioRpcError, match="malformed InferRequest"):
                    await channel.unary_unary(path + "Infer")(garbage)
                with pytest.raises(grpc.aio.AioRpcError, match="malformed StatusRequest"):
                    await channel.unary_unary(path + "Status")(b"\xff")

    run(ask())
