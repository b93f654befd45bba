"""The unmodified tritonclient, every call it has, against a whole server on its real listeners.

Its gRPC channels and HTTP pools run in threads beside the server's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from fastserve.config import Listener, Settings
from fastserve.server import Server
from tests.dialects.triton_v1.rig import write_held, write_models

grpcclient = pytest.importorskip("tritonclient.grpc")
httpclient = pytest.importorskip("tritonclient.http")
grpc_aio = pytest.importorskip("tritonclient.grpc.aio")
http_aio = pytest.importorskip("tritonclient.http.aio")
utils = pytest.importorskip("tritonclient.utils")
shared_memory = pytest.importorskip("tritonclient.utils.shared_memory")

pytestmark = pytest.mark.lingers  # the clients keep threads and pools of their own
WAIT_S = 20.0
COUNT = np.arange(16, dtype=np.int32).reshape(1, 16)
ONES = np.ones((1, 16), dtype=np.int32)


class Served:
    """A server in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))
        self.http = self.grpc = ""
        self.go = folder
        self.error: BaseException | None = None

    async def _serve(self) -> None:
        settings = Settings(
            repository=str(self._folder),
            http=(Listener("127.0.0.1:0"),),
            grpc=(Listener("127.0.0.1:0"),),
            model_control="explicit",
            load_models=("*",),
            allow_client_shm=True,
            drain_s=5.0,
        )
        server = Server(settings)
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            await server.open()
            self.http = "{}:{}".format(*server.front.http[0].address)
            self.grpc = "{}:{}".format(*server.front.grpc[0].address)
            self._ready.set()
            await self._stop.wait()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._ready.set()
            await server.drain(5)

    def __enter__(self) -> Served:
        self._thread.start()
        self._ready.wait(WAIT_S)
        assert self.error is None
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    go = write_held(folder)
    with Served(folder) as running:
        running.go = go
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, served: Served) -> Iterator[Any]:
    """(module, client, "http" or "grpc")"""
    module = httpclient if request.param == "http" else grpcclient
    with contextlib.closing(module.InferenceServerClient(getattr(served, request.param))) as made:
        yield module, made, request.param


def inputs_of(module: Any, first: Any = COUNT, second: Any = ONES, **options: Any) -> list[Any]:
    given = []
    for name, data in (("INPUT0", first), ("INPUT1", second)):
        one = module.InferInput(name, list(data.shape), utils.np_to_triton_dtype(data.dtype))
        one.set_data_from_numpy(data, **options)
        given.append(one)
    return given


def test_health_and_metadata(client: Any) -> None:
    _, made, kind = client
    assert made.is_server_live()
    assert made.is_server_ready()
    assert made.is_model_ready("simple")
    assert made.is_model_ready("simple", "1")
    assert not made.is_model_ready("nope")
    plain = {} if kind == "http" else {"as_json": True}
    assert made.get_server_metadata(**plain)["name"] == "triton"
    metadata = made.get_model_metadata("simple", **plain)
    assert [one["name"] for one in metadata["inputs"]] == ["INPUT0", "INPUT1"]
    config = made.get_model_config("simple", **plain)
    assert (config if kind == "http" else config["config"])["max_batch_size"] == 8
    with pytest.raises(utils.InferenceServerException, match="unknown model: 'nope' is not found"):
        made.get_model_metadata("nope")


@pytest.mark.parametrize("binary", [True, False])
def test_infer(client: Any, binary: bool) -> None:
    module, made, kind = client
    options = {"binary_data": binary} if kind == "http" else {}
    wanted = [module.InferRequestedOutput(name, **options) for name in ("OUTPUT0", "OUTPUT1")]
    result = made.infer("simple", inputs_of(module, **options), outputs=wanted, request_id="r7")
    assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT + ONES)
    assert np.array_equal(result.as_numpy("OUTPUT1"), COUNT - ONES)
    assert (result.get_response()["id"] if kind == "http" else result.get_response().id) == "r7"


def test_all_outputs_and_batches(client: Any) -> None:
    module, made, _ = client
    rows = np.tile(COUNT, (8, 1))
    result = made.infer("simple", inputs_of(module, rows, rows), timeout=5_000_000)
    assert np.array_equal(result.as_numpy("OUTPUT0"), rows + rows)


def test_classification(client: Any) -> None:
    module, made, _ = client
    wanted = [module.InferRequestedOutput("OUTPUT0", class_count=2)]
    result = made.infer("simple", inputs_of(module), outputs=wanted)
    assert [item.decode() for item in result.as_numpy("OUTPUT0").ravel()] == ["16:15", "15:14"]


def test_strings(client: Any) -> None:
    module, made, _ = client
    data = np.array([[b"one", b""], ["zw\u00f6lf".encode(), b"\xff\0"]], dtype=object)
    given = module.InferInput("IN", [2, 2], "BYTES")
    given.set_data_from_numpy(data)
    assert made.infer("strings", [given]).as_numpy("OUT").tolist() == data.tolist()


def test_free_shapes(client: Any) -> None:
    module, made, _ = client
    data = np.linspace(0, 1, 1000, dtype=np.float32)
    given = module.InferInput("IN", [1000], "FP32")
    given.set_data_from_numpy(data)
    assert np.array_equal(made.infer("free", [given]).as_numpy("OUT"), data)


def test_errors(client: Any) -> None:
    module, made, _ = client
    with pytest.raises(utils.InferenceServerException, match="expected 2 inputs but got 1 inputs"):
        made.infer("simple", inputs_of(module)[:1])
    with pytest.raises(utils.InferenceServerException, match="data-type is 'FP32'"):
        made.infer("simple", inputs_of(module, COUNT.astype(np.float32)))
    with pytest.raises(utils.InferenceServerException, match="is not found"):
        made.infer("simple", inputs_of(module), model_version="9")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compression(client: Any, coding: str) -> None:
    module, made, kind = client
    if kind == "http":
        options = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    else:
        options = {"compression_algorithm": coding}
    result = made.infer("simple", inputs_of(module), **options)
    assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT + ONES)


def test_async_infer(client: Any) -> None:
    module, made, kind = client
    if kind == "http":
        with contextlib.closing(made):
            pending = [made.async_infer("simple", inputs_of(module)) for _ in range(4)]
            results = [one.get_result() for one in pending]
    else:
        found: queue.Queue[Any] = queue.Queue()
        for _ in range(4):
            made.async_infer("simple", inputs_of(module), lambda result, error: found.put((result, error)))
        answers = [found.get(timeout=WAIT_S) for _ in range(4)]
        assert all(error is None for _, error in answers)
        results = [result for result, _ in answers]
    assert all(np.array_equal(one.as_numpy("OUTPUT0"), COUNT + ONES) for one in results)


def test_repository_and_statistics(client: Any) -> None:
    module, made, kind = client
    plain = {} if kind == "http" else {"as_json": True}
    index = made.get_model_repository_index(**plain)
    models = index if kind == "http" else index["models"]
    assert {one["name"] for one in models} == {"free", "held", "simple", "strings"}
    made.unload_model("free")
    assert not made.is_model_ready("free")
    made.load_model("free")
    assert made.is_model_ready("free")
    with pytest.raises(utils.InferenceServerException, match="failed to load 'nope'"):
        made.load_model("nope")
    made.infer("simple", inputs_of(module))
    stats = made.get_inference_statistics("simple", **plain)["model_stats"][0]
    assert int(stats["inference_count"]) >= 1
    assert int(stats["inference_stats"]["success"]["count"]) >= 1


def test_trace_and_log_settings(client: Any) -> None:
    _, made, kind = client
    plain = {} if kind == "http" else {"as_json": True}
    assert "trace_rate" in str(made.get_trace_settings(**plain))
    changed = made.update_trace_settings("simple", {"trace_rate": "7"}, **plain)
    assert "7" in str(changed)
    made.update_trace_settings("simple", {"trace_rate": None}, **plain)
    assert "log_info" in str(made.get_log_settings(**plain))
    assert "log_verbose_level" in str(made.update_log_settings({"log_verbose_level": 0}, **plain))


def test_system_shared_memory(client: Any) -> None:
    module, made, kind = client
    key = f"/fastserve-test-{uuid.uuid4().hex}"
    region = shared_memory.create_shared_memory_region("both", key, 256)
    try:
        shared_memory.set_shared_memory_region(region, [COUNT, ONES])
        made.register_system_shared_memory("both", key, 256)
        status = made.get_system_shared_memory_status(**({} if kind == "http" else {"as_json": True}))
        assert "both" in str(status)
        given = [
            module.InferInput("INPUT0", [1, 16], "INT32"),
            module.InferInput("INPUT1", [1, 16], "INT32"),
        ]
        given[0].set_shared_memory("both", 64)
        given[1].set_shared_memory("both", 64, offset=64)
        wanted = module.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory("both", 64, offset=128)
        made.infer("simple", given, outputs=[wanted])
        found = shared_memory.get_contents_as_numpy(region, np.int32, [1, 16], 128)
        assert np.array_equal(found, COUNT + ONES)
        made.unregister_system_shared_memory("both")
        with pytest.raises(utils.InferenceServerException, match="Unable to find shared memory region"):
            made.infer("simple", given, outputs=[wanted])
    finally:
        shared_memory.destroy_shared_memory_region(region)
    made.unregister_system_shared_memory()
    made.get_cuda_shared_memory_status()
    with pytest.raises(utils.InferenceServerException):
        made.register_cuda_shared_memory("c", bytes(64) if kind == "grpc" else b"", 0, 64)
    made.unregister_cuda_shared_memory()


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_aio(served: Served, kind: str) -> None:
    module, aio = (httpclient, http_aio) if kind == "http" else (grpcclient, grpc_aio)

    async def ask() -> None:
        async with aio.InferenceServerClient(getattr(served, kind)) as made:
            assert await made.is_server_ready()
            assert await made.is_model_ready("simple")
            await made.get_model_metadata("simple")
            await made.get_model_config("simple")
            await made.get_inference_statistics("simple")
            asking = [made.infer("simple", inputs_of(module)) for _ in range(8)]
            for result in await asyncio.gather(*asking):
                assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT + ONES)
            with pytest.raises(utils.InferenceServerException, match="is not found"):
                await made.infer("nope", inputs_of(module))

    asyncio.run(ask())


def test_deadline_and_cancel(served: Served) -> None:
    given = grpcclient.InferInput("IN", [1, 1], "INT32")
    given.set_data_from_numpy(np.array([[1]], dtype=np.int32))
    with contextlib.closing(grpcclient.InferenceServerClient(served.grpc)) as made:
        with pytest.raises(utils.InferenceServerException) as late:  # in the client's words or the server's
            made.infer("held", [given], client_timeout=0.2)
        assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        found: queue.Queue[Any] = queue.Queue()
        handle = made.async_infer("held", [given], lambda result, error: found.put(error))
        handle.cancel()
        assert "cancelled" in str(found.get(timeout=WAIT_S)).lower()
        served.go.touch()
        assert made.infer("held", [given]).as_numpy("OUT").tolist() == [[1]]


def test_stream(served: Served) -> None:
    found: queue.Queue[Any] = queue.Queue()
    with contextlib.closing(grpcclient.InferenceServerClient(served.grpc)) as made:
        made.start_stream(lambda result, error: found.put((result, error)))
        for number in range(6):
            model = "nope" if number == 3 else "simple"
            made.async_stream_infer(model, inputs_of(grpcclient), request_id=str(number))
        answers = [found.get(timeout=WAIT_S) for _ in range(6)]
        made.stop_stream()
    assert [error is None for _, error in answers] == [True, True, True, False, True, True]
    ids = [result.get_response().id for result, _ in answers if result is not None]
    assert ids == ["0", "1", "2", "4", "5"]
