"""X-Request-Timeout and clients that leave where a request is more than one run: ensembles, calls of models
by models, sequences, answers in parts, text; and a batch of several clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastserve.dialects.text_common.event_streams import RequestTimeout
from fastserve.net.deadlines import CallDeadlines
from fastserve.settings import Limits
from tests.server.rig import WAIT_S, Served, release, run, serving, write_model

pytestmark = pytest.mark.waits

HELD = -1000.0
"""This and what is below runs until `go`."""
MODEL = f"""
import pathlib, time
import fastserve

class Model:
    def __init__(self, config):
        self.folder = pathlib.Path(config["parameters"]["folder"])

    def run(self, inputs):
        x = inputs["x"]
        if x.any():
            with open(self.folder / "seen", "a") as seen:
                seen.write(",".join(str(v) for v in x[:, 0]) + "\\n")
        until = time.monotonic() + 60
        while (x <= {HELD}).any() and not (self.folder / "go").exists() and time.monotonic() < until:
            time.sleep(0.001)
            gone = fastserve.cancelled_rows()
            assert gone.shape == (len(x),) and fastserve.cancelled() == gone.all()
            if gone.any():
                (self.folder / "gone").write_text(",".join(map(str, gone.astype(int))))
        return {{"y": x}}
"""
CALLER = """
import json, pathlib
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        told = json.loads(args["model_config"])["parameters"]
        self.folder = pathlib.Path(told["folder"]["string_value"])

    SEND
"""
PLAIN_CALL = """
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        call = pb_utils.InferenceRequest(model_name="held", inputs=[x], requested_output_names=["y"])
        response = call.exec()
        if response.has_error():
            (self.folder / "called").write_text(response.error().message())
            return pb_utils.InferenceResponse(error=response.error())
        return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(response, "y")])
"""
ASYNC_CALL = PLAIN_CALL.replace("def execute", "async def execute").replace(
    "[self.one(request)", "[await self.one(request)"
)
ASYNC_CALL = ASYNC_CALL.replace("def one", "async def one").replace("call.exec()", "await call.async_exec()")
TENSORS = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
STEP = 'step {{ model_name: "{}" model_version: -1 input_map {{ key: "x" value: "{}" }} {} }}'
OUT = 'output_map {{ key: "y" value: "{}" }}'
CHAIN = f"""platform: "ensemble"
max_batch_size: 4
{TENSORS}
ensemble_scheduling {{
  {STEP.format("held", "x", OUT.format("t"))}
  {STEP.format("after", "t", OUT.format("y"))}
}}
"""
STEADY = f"""backend: "python"
max_batch_size: 4
{TENSORS}
sequence_batching {{ max_sequence_idle_microseconds: 60000000 }}
"""
STEADY_MODEL = f"""
import json, pathlib, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        told = json.loads(args["model_config"])["parameters"]
        self.folder = pathlib.Path(told["folder"]["string_value"])

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        with open(self.folder / "seen", "a") as seen:
            seen.write(str(x[0, 0]) + "\\n")
        while x[0, 0] <= {HELD} and not (self.folder / "go").exists():
            time.sleep(0.001)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""
PARTS = """
import fastserve, pathlib, time

class Model:
    def __init__(self, config):
        self.folder = pathlib.Path(config["parameters"]["folder"])

    def run(self, inputs):
        try:
            while not fastserve.cancelled():
                yield {"y": inputs["x"]}
                time.sleep(0.005)
        finally:
            (self.folder / "gone").write_text("1")
"""
TEXT = """
import time

class Model:
    info = {"max_tokens": 1 << 20}

    def __init__(self, config):
        pass

    def generate(self, request):
        while len(request.ids) > 1:
            yield None
        for token in range(1, 1 << 20):
            yield token, f"{token} "
            time.sleep(0.005)
"""


def write_triton(place: Path, model: str, config: str, folder: Path) -> None:
    (place / "1").mkdir(parents=True)
    (place / "1" / "model.py").write_text(model)
    parameters = f'parameters {{ key: "folder" value {{ string_value: "{folder}" }} }}'
    (place / "config.pbtxt").write_text(f"{config}\n{parameters}\n")


def write_models(folder: Path, *names: str) -> Path:
    """These models of this file; each has a folder of its own for what it has seen."""
    models = folder / "models"
    for name in ("held", "after", "joined"):
        (folder / name).mkdir()
        more: dict[str, Any] = {"max_queue_delay_us": 300_000} if name == "joined" else {}
        place = write_model(models, name, parameters={"folder": str(folder / name)}, warmup="off", **more)
        (place / "1" / "model.py").write_text(MODEL)
    (folder / "parts").mkdir()
    place = write_model(models, "parts", parameters={"folder": str(folder / "parts")}, warmup="off")
    (place / "1" / "model.py").write_text(PARTS)
    batched = f'backend: "python"\nmax_batch_size: 4\n{TENSORS}'
    for name, call in (("caller", PLAIN_CALL), ("caller_async", ASYNC_CALL)):
        write_triton(models / name, CALLER.replace("SEND", call.strip()), batched, folder)
    (folder / "steady").mkdir()
    write_triton(models / "steady", STEADY_MODEL, STEADY, folder / "steady")
    (models / "chain" / "1").mkdir(parents=True)
    (models / "chain" / "config.pbtxt").write_text(CHAIN)
    (models / "story" / "1").mkdir(parents=True)
    (models / "story" / "1" / "model.py").write_text(TEXT)
    text = "backend: text_python\ntext: {tokenizer: words, max_new_tokens: 1000000, max_tokens: 2000000}\n"
    (models / "story" / "model.yaml").write_text(text)
    for place in models.iterdir():
        if place.name not in names:  # each would be a worker that nobody asks
            shutil.rmtree(place)
    return models


def seen(folder: Path) -> list[float]:
    path = folder / "seen"
    return [float(v) for line in path.read_text().split() for v in line.split(",")] if path.exists() else []


def asked(value: float, **parameters: Any) -> dict[str, Any]:
    said = {"parameters": parameters} if parameters else {}
    return {**said, "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [value, 0.5]}]}


@contextlib.asynccontextmanager
async def opened(
    folder: Path, *names: str, **changes: Any
) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    async with contextlib.AsyncExitStack() as stack:
        at = await stack.enter_async_context(serving(write_models(folder, *names), **changes))
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{at.port}", timeout=WAIT_S)
        yield at, await stack.enter_async_context(client)
        for name in ("held", "after", "joined", "steady"):
            release(folder / name)


def infer(http: httpx.AsyncClient, model: str, value: float, time: str = "") -> asyncio.Task[httpx.Response]:
    headers = {"X-Request-Timeout": time} if time else {}
    return asyncio.ensure_future(http.post(f"/v2/models/{model}/infer", json=asked(value), headers=headers))


def test_steps_and_calls_end_with_their_request(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path, "held", "after", "chain", "caller", "caller_async") as (at, http):
            assert (await infer(http, "chain", 1.0)).status_code == 200
            for model in ("chain", "caller", "caller_async"):
                late = await infer(http, model, HELD, "0.3")
                assert late.status_code == 504, late.text
                assert "0.3 s" in late.json()["error"]
                if model != "chain":
                    path = tmp_path / "called"
                    await at.until(lambda path=path: path.exists() and "nobody waits" in path.read_text())
                    path.unlink()
                gone = tmp_path / "held" / "gone"
                await at.until(gone.exists)  # the step's model, too, knows that nobody waits
                release(tmp_path / "held")
                await at.until(at.is_clean)
                gone.unlink()
                (tmp_path / "held" / "go").unlink()
            assert seen(tmp_path / "after") == [1.0]
            # A client that leaves.
            left = infer(http, "caller", HELD)
            await at.until(lambda: seen(tmp_path / "held").count(HELD) == 4)
            left.cancel()
            await at.until(lambda: (tmp_path / "called").exists())
            await at.until((tmp_path / "held" / "gone").exists)

    run(work())


def test_rows_of_one_batch_are_told_apart(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path, "joined") as (at, http):
            stays, leaves = infer(http, "joined", HELD), infer(http, "joined", HELD - 1)
            folder = tmp_path / "joined"
            await at.until(lambda: len(seen(folder)) == 2)
            first = seen(folder)[0]
            leaves.cancel()
            gone, wanted = folder / "gone", "0,1" if first == HELD else "1,0"
            await at.until(lambda: gone.exists() and gone.read_text() == wanted)  # written again and again
            release(folder)
            assert (await stays).json()["outputs"][0]["data"] == [HELD, 0.5]

    run(work())


def test_answers_in_parts_end(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path, "parts") as (at, http):
            body, headers = {"x": [1.0, 2.0]}, {"X-Request-Timeout": "2"}
            path = "/v2/models/parts/generate_stream"
            async with http.stream("POST", path, json=body, headers=headers) as reply:
                assert reply.status_code == 200
                events = [line async for line in reply.aiter_lines() if line]
            assert len(events) > 1
            assert "error" in json.loads(events[-1].removeprefix("data: "))
            await at.until((tmp_path / "parts" / "gone").exists)

    run(work())


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/completions", {"model": "story", "prompt": "x", "max_tokens": 900000}, ("error", "message")),
        ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 900000}}, ("error",)),
        ("/infer", {"inputs": "x", "parameters": {"max_new_tokens": 900000}}, ("error",)),
        ("/v2/models/story/generate", {"text_input": "x", "max_tokens": 900000}, ("error",)),
    ],
)
def test_text_ends(tmp_path: Path, path: str, body: dict[str, Any], where: tuple[str, ...]) -> None:
    """In the API's own form, as one answer; a stream that has begun ends with an error in its form."""

    async def work() -> None:
        async with opened(tmp_path, "story") as (at, http):
            late = await http.post(path, json=body, headers={"X-Request-Timeout": "0.3"})
            assert late.status_code == 504, late.text
            told: Any = late.json()
            for name in where:
                told = told[name]
            assert "0.3 s" in told
            await at.until(at.is_clean)
            streams, target = {**body, "stream": True}, path.replace("/generate", "/generate_stream")
            headers = {"X-Request-Timeout": "2"}
            async with http.stream("POST", target, json=streams, headers=headers) as reply:
                lines = [line async for line in reply.aiter_lines() if line]
            assert reply.status_code == 200
            assert len(lines) > 1
            assert "error" in lines[-1], lines[-1]

    run(work())


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/infer"])
@pytest.mark.parametrize("first", ["endpoint", "engine"])
def test_text_ends_whoever_notices_first(
    tmp_path: Path, path: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener, the endpoint and the engine have one deadline; on a late loop any of them is first."""
    monkeypatch.setattr(CallDeadlines, "add", lambda *_: None)
    if first == "engine":
        monkeypatch.setattr(RequestTimeout, "__enter__", lambda timeout: timeout)
        monkeypatch.setattr(RequestTimeout, "__exit__", lambda *_: None)

    async def work() -> None:
        async with opened(tmp_path, "story") as (at, http):
            parameters = {"max_new_tokens": 900000}
            body = {"model": "story", "prompt": "x", "max_tokens": 900000}
            body = body if path.startswith("/v1") else {"inputs": "x", "parameters": parameters}
            late = await http.post(path, json=body, headers={"X-Request-Timeout": "0.3"})
            assert late.status_code == 504, late.text
            assert "the time of this request, 0.3 s, is up" in late.text
            await at.until(at.is_clean)

    run(work())


TENSOR_BODIES = {
    "/v2/models/held/infer": asked(1.0),
    "/v2/models/held/generate": {"x": [1.0, 0.5]},
    "/v2/models/held/generate_stream": {"x": [1.0, 0.5]},
    "/v1/models/held:predict": {"instances": [[1.0, 0.5]]},
    "/api/infer/held?format=binary": None,
}
V1_HEADER = 'batch_size: 1 input { name: "x" batch_byte_size: 8 } output { name: "y" }'


def test_tensors_end_whoever_notices_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is before the listener on a late loop: it tells what waits, and what runs."""
    monkeypatch.setattr(CallDeadlines, "add", lambda *_: None)

    async def work() -> None:
        async with opened(tmp_path, "held") as (at, http):

            async def ask(path: str, body: Any) -> tuple[str, int, str]:
                headers = {"X-Request-Timeout": "0.2", "NV-InferRequest": V1_HEADER}
                content = bytes(8) if body is None else json.dumps(body).encode()
                reply = await http.post(path, content=content, headers=headers)
                return path, reply.status_code, reply.headers.get("nv-status", reply.text)

            running = asyncio.ensure_future(ask("/v2/models/held/infer", asked(HELD)))
            await at.until(lambda: seen(tmp_path / "held") == [HELD])
            waiting = [ask(path, body) for path, body in TENSOR_BODIES.items()]
            for path, status, text in await asyncio.gather(running, *waiting):
                assert "the time of this request, 0.2 s, is up" in text, path
                assert status == (400 if path.startswith("/api") else 504), path

    run(work())


def test_a_late_request_ends_its_sequence(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path, "steady") as (at, http):
            folder, path = tmp_path / "steady", "/v2/models/steady/infer"
            first = asyncio.ensure_future(
                http.post(path, json=asked(HELD, sequence_id=7, sequence_start=True))
            )
            await at.until(lambda: seen(folder) == [HELD])
            headers = {"X-Request-Timeout": "0.2"}
            late = await http.post(path, json=asked(1.0, sequence_id=7), headers=headers)
            assert late.status_code == 504, late.text
            assert (await first).status_code == 400  # its sequence has lost a request, and has ended with it
            release(folder)
            last = await http.post(path, json=asked(2.0, sequence_id=7, sequence_end=True))
            assert last.status_code == 400, last.text
            anew = await http.post(path, json=asked(3.0, sequence_id=7, sequence_start=True))
            assert anew.status_code == 200, anew.text
            assert seen(folder) == [HELD, 3.0]

    run(work())


def test_the_server_sets_times(tmp_path: Path) -> None:
    limits = Limits(request_timeout_s=0.3, most_request_timeout_s=0.6)

    async def work() -> None:
        async with opened(tmp_path, "held", limits=limits) as (_, http):
            for asked_for, told in (("", "0.3 s"), ("60", "0.6 s")):
                late = await infer(http, "held", HELD, asked_for)
                assert late.status_code == 504
                error = late.json()["error"]
                assert told in error
                assert "limits.most_request_timeout_s" in error
            ready = await http.get("/v2/models/held", headers={"X-Request-Timeout": "no number"})
            assert ready.status_code == 200  # what does not infer has all the time it takes
            release(tmp_path / "held")

    run(work())
