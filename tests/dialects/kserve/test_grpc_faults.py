"""gRPC when things go wrong, over real sockets: deadlines, clients that leave, messages that lie, limits."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fastserve.settings import GrpcOptions
from tests.dialects.kserve.grpc_rig import SERVICE, V2, GrpcServed, Shared, numbers, refused, serving
from tests.ext.wire_strategies import field, varint
from tests.server.rig import HOLD, WAIT_S, release, run, seen, write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
SHORT_S = 0.2
PATIENCE_S = (1, 3, 9, 27)  # deadlines that leave time to begin: the first, on all but a busy machine


def running(folder: Path, value: float) -> Callable[[], bool]:
    return lambda: any(value in batch for batch in seen(folder))


async def held(served: GrpcServed, folder: Path) -> asyncio.Future[list[float]]:
    """A call that runs, with a deadline that is still to come."""
    for patience_s in PATIENCE_S:
        call = asyncio.ensure_future(served.infer(HOLD, timeout=patience_s))
        await served.until(lambda call=call: running(folder, HOLD)() or call.done())
        if not call.done():
            break
        assert (await refused(call))[0] == "DEADLINE_EXCEEDED"
    return call


@pytest.mark.parametrize("fast", [False, True])
def test_a_deadline_in_the_queue_and_while_running(tmp_path: Path, fast: bool) -> None:
    """A request that waited is not run; one that ran leaves its place."""
    write_model(tmp_path, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path) as served:
            if fast:
                assert await served.infer(4) == [8]  # the head is known from now on
            runs = await held(served, tmp_path)
            assert (await refused(served.infer(5, timeout=SHORT_S)))[0] == "DEADLINE_EXCEEDED"
            assert (await refused(runs))[0] == "DEADLINE_EXCEEDED"
            release(tmp_path)
            assert await served.infer(6) == [12]
            assert not running(tmp_path, 5)()

    run(work())


@pytest.mark.parametrize("fast", [False, True])
def test_a_cancelled_call_leaves_the_queue(tmp_path: Path, fast: bool) -> None:
    write_model(tmp_path, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path) as served:
            if fast:
                assert await served.infer(4) == [8]
            queue = next(iter(served.server.host.hosted.values())).queue
            runs = asyncio.ensure_future(served.infer(HOLD))
            await served.until(running(tmp_path, HOLD))
            waits = asyncio.ensure_future(served.infer(5))
            await served.until(lambda: queue.waiting == 2)
            waits.cancel()
            await served.until(lambda: queue.waiting == 1)
            runs.cancel()
            await served.until(lambda: queue.waiting == 0)
            release(tmp_path)
            assert await served.infer(6) == [12]
            assert not running(tmp_path, 5)()

    run(work())


def test_a_client_that_dies_in_a_stream(tmp_path: Path) -> None:
    """Its connection is cut with a request running and another waiting."""
    write_model(tmp_path, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path) as served:
            queue = next(iter(served.server.host.hosted.values())).queue
            other = await connect(served)
            other.write(open_stream("ModelStreamInfer", numbers(HOLD), numbers(5)))
            await served.until(running(tmp_path, HOLD))
            await served.until(lambda: queue.waiting == 2)
            other.transport.abort()
            await served.until(lambda: queue.waiting == 0)
            release(tmp_path)
            assert await served.infer(6) == [12]
            assert not running(tmp_path, 5)()

    run(work())


async def connect(served: GrpcServed) -> asyncio.StreamWriter:
    host, port = served.server.front.grpc[0].address
    _, writer = await asyncio.open_connection(host, port)
    return writer


def open_stream(name: str, *messages: bytes) -> bytes:
    """HTTP/2 by hand: a call that has sent these messages and goes on."""
    path = (SERVICE + name).encode()
    head = b"\x83\x86\x04" + bytes([len(path)]) + path + b"\x01\x01a\x00\x02te\x08trailers"
    head += b"\x0f\x10\x10application/grpc"
    data = b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, b"")
        + frame(1, 4, 1, head)
        + frame(0, 0, 1, data)
    )


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


MANY = field(5, 2, b"") * 1_000_000
DEEP = b""
for _ in range(150):
    DEEP = field(4, 2, field(2, 2, DEEP))
LIES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda whole: whole[:-3],
    "past the end": lambda whole: whole + b"\x3a\xff\xff\xff\x7f",
    "a negative length": lambda whole: whole + b"\x3a" + varint(2**64 - 1),
    "no end": lambda whole: b"\xff" * 11,
    "field 0": lambda whole: b"\x00\x00",
    "a group without an end": lambda whole: b"\x0b" * 200,
    "no text": lambda whole: field(1, 2, b"\xff\xfe") + whole,
}
both_paths = pytest.mark.parametrize("model", ["slow", "twice"], ids=["general", "fast"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with Shared(tmp_path_factory.mktemp("shared")) as one:
        yield one


@both_paths
@pytest.mark.parametrize("name", LIES)
def test_messages_that_are_none(shared: Shared, name: str, model: str) -> None:
    async def work(served: GrpcServed) -> None:
        assert await served.infer(1, model=model) == [2]
        code, text = await refused(served.send(LIES[name](numbers(1, model=model))))
        assert (code, text.partition(":")[0]) == ("INTERNAL", "malformed ModelInferRequest")
        assert await served.infer(3, model=model) == [6]

    shared.run(work)


def test_a_million_inputs_are_refused_by_their_number(shared: Shared) -> None:
    async def work(served: GrpcServed) -> None:
        code, text = await refused(served.send(MANY))
        assert code == "INVALID_ARGUMENT"
        assert text.startswith("ModelInferRequest: at most 16384 inputs, outputs, parameters")
        assert await served.infer(3) == [6]

    shared.run(work)


def test_what_nests_deep_is_unknown_fields(shared: Shared) -> None:
    """Unknown fields within unknown fields are passed over in one step, parameters nest once."""

    async def work(served: GrpcServed) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.send(DEEP + numbers(1))
        assert caught.value.code().name in ("INTERNAL", "INVALID_ARGUMENT")
        assert await served.infer(3) == [6]

    shared.run(work)


def tensors_that_lie(model: str) -> Iterator[tuple[bytes, str]]:
    """Requests of another size than the shape says, with contents beside raw tensors, with a tensor less, and
    with what is said of them."""
    whole = numbers(1, model=model)
    mixed, short, none, huge = (V2.ModelInferRequest.FromString(whole) for _ in range(4))
    mixed.inputs[0].contents.fp32_contents.extend([1, 2])
    short.raw_input_contents[0] = b"\0" * 7
    del none.raw_input_contents[:]
    huge.inputs[0].shape[:] = [2**62, 2**62]
    yield mixed.SerializeToString(), "contents field must not be specified"
    yield short.SerializeToString(), "Expected 8, got 7"
    yield none.SerializeToString(), "unable to find data for input tensor 'x'"
    yield huge.SerializeToString(), ""


@both_paths
def test_tensors_that_lie(shared: Shared, model: str) -> None:
    async def work(served: GrpcServed) -> None:
        assert await served.infer(1, model=model) == [2]
        for request, said in tensors_that_lie(model):
            code, text = await refused(served.send(request))
            assert code == "INVALID_ARGUMENT"
            assert said in text
            assert await served.infer(3, model=model) == [6]

    shared.run(work)


def test_limits_of_messages(tmp_path: Path) -> None:
    """One that is too large, or unpacks to it."""
    write_model(tmp_path, max_batch_size=1000)

    async def work() -> None:
        async with serving(tmp_path, grpc_options=GrpcOptions(message_bytes=4000)) as served:
            assert await served.infer(*[1.0] * 480) == [2.0] * 480
            large = numbers(*[1.0] * 900)
            code, text = await refused(served.send(large))
            assert (code, f"({len(large)} vs. 4000)" in text) == ("RESOURCE_EXHAUSTED", True), text
            code, text = await refused(served.send(large, compression=grpc.Compression.Gzip))
            assert (code, text[:13]) == ("RESOURCE_EXHAUSTED", "Decompressed "), text
            bomb = bytes(50_000_000)  # 50 kB packed
            assert (await refused(served.send(bomb, compression=grpc.Compression.Gzip)))[0] == code
            assert await served.infer(3) == [6]

    run(work())


@pytest.mark.parametrize("coding", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(tmp_path: Path, coding: grpc.Compression) -> None:
    write_model(tmp_path, max_batch_size=1000)

    async def work() -> None:
        async with serving(tmp_path) as served:
            for _ in range(2):
                assert await served.infer(*[1.0] * 500, compression=coding) == [2.0] * 500

    run(work())


def test_unknown_methods(shared: Shared) -> None:
    async def work(served: GrpcServed) -> None:
        for path in (SERVICE + "ModelInfers", "/inference.Other/ModelInfer", SERVICE):
            assert (await refused(served.channel.unary_unary(path)(numbers(1))))[0] == "UNIMPLEMENTED"

    shared.run(work)


def test_a_stream_closed_half_is_answered_whole(tmp_path: Path) -> None:
    """The client says that it sends no more while its requests still run."""
    write_model(tmp_path, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path) as served:
            call = served.stream(None)
            for row in (HOLD, 2, 3):
                await call.write(numbers(row, id=str(row)))
            await call.done_writing()
            await served.until(running(tmp_path, HOLD))
            release(tmp_path)
            found = [reply.infer_response.id async for reply in call]
            assert found == [str(HOLD), "2", "3"]

    run(work())


def test_what_is_no_message_ends_its_stream_alone(shared: Shared) -> None:
    async def work(served: GrpcServed) -> None:
        good, bad = served.stream(None), served.stream(None)
        await good.write(numbers(2))
        assert (await good.read()).infer_response.model_name == "twice"
        await bad.write(b"\xff" * 11)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(bad.read(), WAIT_S)
        assert caught.value.code().name == "INTERNAL"
        await good.write(numbers(3))
        assert (await good.read()).error_message == ""
        await good.done_writing()
        assert await good.read() is grpc.aio.EOF

    shared.run(work)
