"""The gRPC cases that are told in words: queues, priorities, deadlines, and sequences over time.

Each gives the status and details that the case expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import grpc.aio

from fastserve.engine.engine import scheduler_of
from fastserve.protos import load
from tests import proc
from tests.server.rig import Served

Told = tuple[str, str]
V2 = load("kserve_v2")
BUSY_MS = 500
REAPED_S = 2.5  # `seq` forgets a sequence after 2 s


def infer(channel: grpc.aio.Channel, model: str, number: int, timeout_s: float = 60, **said: Any) -> Any:
    """One request with an IN of one number, begun. `said` are its parameters."""
    message = V2.ModelInferRequest(model_name=model)
    shape = [1, 1]
    message.inputs.add(name="IN", datatype="INT32", shape=shape).contents.int_contents.append(number)
    for name, value in said.items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param"
        setattr(message.parameters[name], kind, value)
    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=V2.ModelInferResponse.FromString,
    )
    return asyncio.ensure_future(call(message, timeout=timeout_s))


async def told(call: Awaitable[Any]) -> Told:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


@contextlib.asynccontextmanager
async def busy(channel: grpc.aio.Channel, served: Served) -> AsyncIterator[Any]:
    """`slow` with a request that runs, and stands still for as long as this lasts."""
    (hosted,) = (one for key, one in served.server.host.hosted.items() if key[0] == "slow")
    (worker,) = hosted.group.pids
    proc.stop(worker)
    running = infer(channel, "slow", 1)
    try:
        await served.until(lambda: hosted.queue.ring.outstanding() == 1)
        yield running
    finally:
        os.kill(worker, signal.SIGCONT)


async def fill_the_queue(channel: grpc.aio.Channel, served: Served) -> Told:
    async with busy(channel, served) as running:
        calls = [running, *(infer(channel, "slow", 0) for _ in range(3))]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    answers = [await told(call) for call in calls]
    (refused,) = (answer for answer in answers if answer[0] != "OK")
    return refused


async def wait_too_long(channel: grpc.aio.Channel, served: Served) -> Told:
    async with busy(channel, served) as running:
        answer = await told(infer(channel, "slow", 0, timeout=20_000))
        assert not running.done()
    await running
    return answer


async def overtake(channel: grpc.aio.Channel, served: Served) -> Told:
    order: list[int] = []
    version: Any = served.server.catalog.available("slow")
    async with busy(channel, served) as running:
        calls = [running]
        for priority in (2, 1):
            calls.append(infer(channel, "slow", priority, priority=priority))
            calls[-1].add_done_callback(lambda _, which=priority: order.append(which))
            await served.until(lambda: scheduler_of(version).pending() == len(calls) - 1)
    answers = {await told(call) for call in calls}
    assert order == [1, 2]
    return answers.pop()[0], "priority 1 completes first"


async def lose_patience(channel: grpc.aio.Channel, served: Served) -> Told:
    status, _ = await told(infer(channel, "slow", BUSY_MS, timeout_s=0.05))
    await infer(channel, "slow", 0)  # and the model goes on
    return status, ""  # the words are the client's own


async def wait_for_a_slot(channel: grpc.aio.Channel, served: Served) -> Told:
    for id in (31, 32):
        await infer(channel, "seq", 1, sequence_id=id, sequence_start=True)
    third = infer(channel, "seq", 1, sequence_id=33, sequence_start=True, sequence_end=True)
    await infer(channel, "seq", 2, sequence_id=32)
    assert not third.done()
    await infer(channel, "seq", 2, sequence_id=31, sequence_end=True)
    await infer(channel, "seq", 3, sequence_id=32, sequence_end=True)
    return (await told(third))[0], "reply only after another sequence sends END (or is reaped)"


async def fall_silent(channel: grpc.aio.Channel, served: Served) -> Told:
    await infer(channel, "seq", 1, sequence_id=21, sequence_start=True)
    await asyncio.sleep(REAPED_S)  # the silence is what is tested
    return await told(infer(channel, "seq", 2, sequence_id=21))


async def play(channel: grpc.aio.Channel, served: Served) -> dict[str, Told]:
    """Every scenario; while one waits in silence, those of another model."""
    found = {"v2-grpc-152": await wait_for_a_slot(channel, served)}
    silent = asyncio.ensure_future(fall_silent(channel, served))
    found["v2-grpc-148"] = await fill_the_queue(channel, served)
    found["v2-grpc-149"] = await wait_too_long(channel, served)
    found["v2-grpc-150"] = await overtake(channel, served)
    found["v2-grpc-151"] = await lose_patience(channel, served)
    found["v2-grpc-153"] = await silent
    return found
