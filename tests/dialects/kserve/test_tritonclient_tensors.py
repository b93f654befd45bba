"""tritonclient's tensors on their way to native, Triton, ensemble and ONNX models and back, in every form."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import numpy as np
import pytest

from tests.dialects.kserve.client_models import KINDS
from tests.dialects.kserve.client_rig import (
    BLOCKING,
    COUNT,
    FLAVOURS,
    ONES,
    Client,
    Refused,
    connected,
    module_of,
    region,
    run,
    shared_memory,
    tritonclient,
)
from tests.running import Running

ml_dtypes = pytest.importorskip("ml_dtypes")
WITHOUT_JSON = ("FP16", "BF16")
# A held-out zero of the digits data, a hexadecimal digit for each pixel.
ZERO = "005b410000ffaf5203f20bb004c008800580098004b01c7002e5ac00006da000"


def sample(kind: str) -> Any:
    """Three elements at the ends of what the type holds."""
    if kind == "BYTES":
        return np.array(["zw\u00f6lf".encode(), b"", b'"\\\n'], dtype=object)
    if kind == "BOOL":
        return np.array([True, False, True])
    if kind == "BF16":
        return np.array([1.5, -3.0e38, 0.0], ml_dtypes.bfloat16)
    dtype = np.dtype(KINDS[kind])
    bounds: Any = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    return np.array([bounds.min, bounds.max, 1], dtype)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("model", ["kinds", "types"])
def test_every_datatype(served: Running, flavour: str, model: str) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            samples = {kind: sample(kind) for kind in KINDS}
            given = [client.input(f"IN_{kind}", data, kind) for kind, data in samples.items()]
            wanted = [client.output(f"OUT_{kind}") for kind in KINDS]
            result = await client.infer(model, given, outputs=wanted)
            for kind, data in samples.items():
                found = result.as_numpy(f"OUT_{kind}")
                assert found.dtype == data.dtype
                assert found.tolist() == data.tolist(), kind

    run(work())


@pytest.mark.parametrize("flavour", ["http", "http.aio"])
@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_every_datatype_as_json(served: Running, flavour: str, sent: bool, asked: bool) -> None:
    """Bytes one way and JSON the other, or JSON both ways."""

    async def work() -> None:
        async with connected(flavour, served) as client:
            samples = {kind: sample(kind) for kind in KINDS if kind not in WITHOUT_JSON}
            given = [client.input(f"IN_{k}", data, k, binary_data=sent) for k, data in samples.items()]
            wanted = [client.output(f"OUT_{kind}", binary_data=asked) for kind in samples]
            result = await client.infer("types", given, outputs=wanted)
            for kind, data in samples.items():
                as_text = kind == "BYTES" and not asked
                wanted_list = [text.decode() for text in data] if as_text else data.tolist()
                assert result.as_numpy(f"OUT_{kind}").tolist() == wanted_list, kind

    run(work())


@pytest.mark.parametrize("flavour", BLOCKING)
def test_numbers_that_are_none(served: Running, flavour: str) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            data = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
            wanted = [client.output("OUT_FP32", **({"binary_data": False} if flavour == "http" else {}))]
            result = await client.infer("types", [client.input("IN_FP32", data)], outputs=wanted)
            found = result.as_numpy("OUT_FP32")
            assert np.array_equal(found, data, equal_nan=True)
            assert np.signbit(found[3])

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("shape", [(0,), (1000,), (150_528,)])
def test_any_length(served: Running, flavour: str, shape: tuple[int, ...]) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            data = np.random.default_rng(7).random(shape, np.float32)
            result = await client.infer(
                "types", [client.input("IN_FP32", data)], outputs=[client.output("OUT_FP32")]
            )
            assert np.array_equal(result.as_numpy("OUT_FP32"), data)

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("model", ["sums", "simple"])
def test_batches(served: Running, flavour: str, model: str) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            rows = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
            result = await client.infer(model, client.pair(rows, rows * 2))
            assert np.array_equal(result.as_numpy("OUTPUT0"), rows * 3)
            assert np.array_equal(result.as_numpy("OUTPUT1"), -rows)
            one = await client.infer(model, client.pair(), outputs=[client.output("OUTPUT1")])
            assert one.as_numpy("OUTPUT0") is None
            assert np.array_equal(one.as_numpy("OUTPUT1"), COUNT - ONES)

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_refusals(served: Running, flavour: str) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            rows = np.tile(COUNT, (9, 1))
            for given, options, words in (
                (client.pair()[:1], {}, "expected 2 inputs but got 1 inputs"),
                (client.pair(COUNT.astype(np.float32)), {}, "data-type is 'FP32'"),
                (client.pair(COUNT[:, :8]), {}, "unexpected shape for input 'INPUT0'"),
                (client.pair(rows, rows), {}, "batch-size must be <= 8 for 'simple'"),
                (client.pair(), {"model_version": "9"}, "is not found"),
                (client.pair(), {"outputs": [client.output("NOPE")]}, "unexpected inference output 'NOPE'"),
            ):
                with pytest.raises(Refused, match=words) as refused:
                    await client.infer("simple", given, **options)
                assert refused.value.status()

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(("model", "last"), [("simple", "label9"), ("sums", None)])
def test_classification(served: Running, flavour: str, model: str, last: str | None) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            rows = np.array([[0] * 9 + [7] + [0] * 6, [0] * 15 + [3]], np.int32)
            wanted = [client.output("OUTPUT0", class_count=1)]
            result = await client.infer(model, client.pair(rows, np.zeros_like(rows)), outputs=wanted)
            found = [item.decode() for item in result.as_numpy("OUTPUT0").ravel()]
            assert found == [f"7:9:{last}" if last else "7:9", "3:15"]

    run(work())


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_compression(served: Running, flavour: str, coding: str) -> None:
    """Each way by itself, and both."""

    async def work() -> None:
        async with connected(flavour, served) as client:
            ways: tuple[dict[str, str], ...] = ({"compression_algorithm": coding},)
            if client.kind == "http":
                out, back = (f"{way}_compression_algorithm" for way in ("request", "response"))
                ways = ({out: coding}, {back: coding}, {out: coding, back: coding})
            for options in ways:
                for binary in (True, False) if client.kind == "http" else (True,):
                    form = {"binary_data": binary} if client.kind == "http" else {}
                    outputs = [client.output("OUTPUT0", **form)]
                    result = await client.infer("simple", client.pair(**form), outputs=outputs, **options)
                    assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT + ONES)

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_ensemble_and_onnx(served: Running, flavour: str) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            result = await client.infer("double", [client.input("X", COUNT)], request_id="e1")
            assert np.array_equal(result.as_numpy("Y"), 2 * COUNT)
            image = np.array([int(pixel, 16) for pixel in ZERO], np.float32).reshape(1, 64)
            result = await client.infer("digits", [client.input("image", np.tile(image, (3, 1)))])
            assert result.as_numpy("digit").ravel().tolist() == [0, 0, 0]
            assert result.as_numpy("scores").shape == (3, 10)
            assert np.allclose(result.as_numpy("scores").sum(axis=1), 1, atol=1e-5)

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_what_a_model_is_told(served: Running, flavour: str) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            text = client.input("IN", np.array([b"x"], dtype=object))
            parameters = {"s": "t\u00e4xt", "i": -7, "b": True, "f": 0.5}
            result = await client.infer(
                "told", [text], request_id="r-1", priority=0, timeout=7_000_000, parameters=parameters,
                sequence_id=9, sequence_start=True, sequence_end=True,
            )  # fmt: skip
            said = json.loads(result.as_numpy("OUT")[0])
            assert said["parameters"] == parameters
            assert (said["id"], said["sequence"], said["flags"]) == ("r-1", 9, 3)
            response = result.get_response()
            if client.kind == "http":
                assert response["parameters"] == {"told": True}
            else:
                assert response.parameters["told"].bool_param is True

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_sequences(served: Running, flavour: str) -> None:
    """Two interleaved; one that was never started is refused, and one that ended has to start anew."""

    async def work() -> None:
        async with connected(flavour, served) as client:

            async def add(sequence: int, number: int, start: bool = False, end: bool = False) -> int:
                given = [client.input("IN", np.array([[number]], np.int32))]
                result = await client.infer(
                    "total", given, sequence_id=sequence, sequence_start=start, sequence_end=end
                )
                return int(result.as_numpy("OUT")[0, 0])

            big = 2**63 - 1
            assert [await add(5, 1, start=True), await add(big, 10, start=True)] == [1, 10]
            assert [await add(5, 2), await add(big, 20)] == [3, 30]
            assert [await add(5, 3, end=True), await add(big, 30, end=True)] == [6, 60]
            with pytest.raises(Refused, match="must specify the START flag"):
                await add(5, 1)
            with pytest.raises(Refused, match="non-zero or non-empty correlation ID"):
                await add(0, 1)

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("model", ["sums", "simple", "double"])
def test_shared_memory_in_and_out(served: Running, flavour: str, model: str) -> None:
    """One region for inputs and outputs, at offsets; then one tensor in memory and the others not."""
    names = (("X",), ("Y",)) if model == "double" else (("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1"))
    made = (2 * COUNT,) if model == "double" else (COUNT + ONES, COUNT - ONES)

    async def work() -> None:
        async with connected(flavour, served) as client:
            with region(4096) as (handle, name, key):
                shared_memory.set_shared_memory_region(handle, [COUNT, ONES])
                await client.register_system_shared_memory(name, key, 4096)
                given = [client.module.InferInput(n, [1, 16], "INT32") for n in names[0]]
                wanted = [client.output(n) for n in names[1]]
                for index, one in enumerate(given):
                    one.set_shared_memory(name, 64, offset=64 * index)
                for index, one in enumerate(wanted):
                    one.set_shared_memory(name, 64, offset=1024 + 64 * index)
                result = await client.infer(model, given, outputs=wanted)
                for index, array in enumerate(made):
                    assert result.get_output(names[1][index]) is not None
                    at = 1024 + 64 * index
                    found = shared_memory.get_contents_as_numpy(handle, np.int32, [1, 16], at)
                    assert np.array_equal(found, array)
                wanted[0].unset_shared_memory()
                result = await client.infer(model, given, outputs=wanted[:1])
                assert np.array_equal(result.as_numpy(names[1][0]), made[0])
                await client.unregister_system_shared_memory(name)

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_strings_and_large_tensors_in_shared_memory(served: Running, flavour: str) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            texts = np.array([b"one", b"", b"\xff\0" * 40], dtype=object)
            floats = np.random.default_rng(3).random(150_528, np.float32)
            with region(2 << 20) as (handle, name, key):
                packed = tritonclient.serialize_byte_tensor(texts)
                shared_memory.set_shared_memory_region(handle, [packed])
                shared_memory.set_shared_memory_region(handle, [floats], offset=4096)
                await client.register_system_shared_memory(name, key, 2 << 20)
                given = [
                    client.module.InferInput("IN_BYTES", [3], "BYTES"),
                    client.module.InferInput("IN_FP32", [floats.size], "FP32"),
                ]
                given[0].set_shared_memory(name, len(packed.item()))
                given[1].set_shared_memory(name, floats.nbytes, offset=4096)
                wanted = [client.output("OUT_BYTES"), client.output("OUT_FP32")]
                wanted[0].set_shared_memory(name, 4096, offset=1 << 20)
                wanted[1].set_shared_memory(name, floats.nbytes, offset=(1 << 20) + 4096)
                await client.infer("types", given, outputs=wanted)
                found = shared_memory.get_contents_as_numpy(handle, np.object_, [3], 1 << 20)
                assert found.tolist() == texts.tolist()
                found = shared_memory.get_contents_as_numpy(
                    handle, np.float32, [floats.size], (1 << 20) + 4096
                )
                assert np.array_equal(found, floats)
                await client.unregister_system_shared_memory(name)

    run(work())


@pytest.mark.parametrize("flavour", ["http.aio", "grpc.aio"])
def test_many_at_a_time(served: Running, flavour: str) -> None:
    """Each caller gets the answer to its own question."""

    async def work() -> None:
        async with connected(flavour, served) as client:

            async def ask(number: int) -> None:
                model = ("sums", "simple")[number % 2]
                result = await client.infer(model, client.pair(COUNT * number, ONES * number))
                assert np.array_equal(result.as_numpy("OUTPUT0"), (COUNT + ONES) * number)

            await asyncio.gather(*(ask(number) for number in range(100)))

    run(work())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_basic_authentication_is_let_through(served: Running, flavour: str) -> None:
    """Nobody asks for it here; a proxy in front may."""
    auth = pytest.importorskip(f"tritonclient.{flavour}.auth")

    async def work() -> None:
        async with connected(flavour, served) as client:
            await client.register_plugin(auth.BasicAuth("user", "secret"))
            assert await client.is_server_ready()
            result = await client.infer("simple", client.pair(), headers={"x-request-id": "abc"})
            assert np.array_equal(result.as_numpy("OUTPUT1"), COUNT - ONES)

    run(work())


def test_a_client_of_several_connections(served: Running) -> None:
    client = module_of("http").InferenceServerClient(served.http, concurrency=8)
    with contextlib.closing(client):
        rig = Client("http", served)
        asked = [client.async_infer("simple", rig.pair(COUNT + n)) for n in range(32)]
        for number, one in enumerate(asked):
            assert np.array_equal(one.get_result().as_numpy("OUTPUT0"), COUNT + ONES + number)
        rig.real.close()
