"""Keys for some models, on a server of every dialect: other models are refused, and are in no list."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from fastserve.net.access_control import Scope
from fastserve.protos import load
from fastserve.repository.catalog import OTHER_MODEL
from fastserve.server import Server
from fastserve.settings.key_file import changing, make_key
from tests.dialects.test_specs import targets
from tests.server.listeners.test_key_matrix import SPECS, Keys, serving
from tests.server.rig import run, write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe

WORDS = Path(__file__).parents[2] / "text" / "rigs" / "llm-eos" / "m1"
MINE, THEIRS = "mine-1", "theirs"
TALKS, THEIR_TALKS = "mine-talks", "theirs-talks"
ABSENT = "no-such-model"


class TeamKeys(Keys):
    """The keys of the matrix, one of `mine-*`, and one of everything."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.add("mine", ("mine-*",))
        self.add("all", ())

    def add(self, name: str, models: Sequence[str]) -> None:
        with changing(self.path) as entries:
            self.of[name], entry = make_key(name, ("infer", "metadata"), models=tuple(models))
            entries[:] = [one for one in entries if one.name != name]
            entries.append(entry)

    def choose(self, name: str, models: Sequence[str]) -> None:
        """Write other models for a key that stays the same."""
        with changing(self.path) as entries:
            entries[:] = [
                type(one)(one.name, one.scopes, one.id, one.hash, models=tuple(models))
                if one.name == name
                else one
                for one in entries
            ]


@pytest.fixture
def keys(tmp_path: Path) -> TeamKeys:
    for name in (MINE, THEIRS):
        write_model(tmp_path, name)
    for name in (TALKS, THEIR_TALKS):
        shutil.copytree(WORDS, tmp_path / name)
    return TeamKeys(tmp_path)


X = [[1.0, 2.0]]
V2 = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": X}]}


def bodies(name: str) -> list[tuple[str, dict[str, Any]]]:
    """POSTs whose body, or path, names a model: of numbers, or of text."""
    chat = [{"role": "user", "content": "hi"}]
    if "talks" in name:
        return [
            ("/v1/chat/completions", {"model": name, "messages": chat}),
            ("/v1/completions", {"model": name, "prompt": "hi"}),
            (f"/v2/models/{name}/generate", {"text_input": "hi"}),
            (f"/v2/models/{name}/generate_stream", {"text_input": "hi"}),
        ]
    return [
        (f"/v1/models/{name}:predict", {"instances": X}),
        (f"/v2/models/{name}/infer", V2),
        (f"/v2/models/{name}/versions/1/infer", V2),
        ("/grps/v1/infer/predict", {"model": f"{name}-1", "ndarray": X}),
        (f"/grps/v1/infer/predict?model={name}-1&return-ndarray=true", {"ndarray": X}),
    ]


@contextmanager
def collected() -> Iterator[list[str]]:
    wrong: list[str] = []
    yield wrong
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
def test_http(tmp_path: Path, keys: TeamKeys, http2: bool) -> None:
    """Three times each: the first is answered by the general path, later ones by templates and fast paths."""

    async def work() -> None:
        async with (
            serving(tmp_path, keys, load_models=("*",)) as server,
            httpx.AsyncClient(http1=not http2, http2=http2, timeout=60) as client,
        ):
            root = "http://{}:{}".format(*server.front.http[0].address)
            with collected() as wrong:
                for name in (MINE, TALKS, THEIRS, THEIR_TALKS, ABSENT):
                    for target, body in bodies(name):
                        for sort in ("all", "mine", "all", "mine", "all", "mine"):
                            if name == ABSENT and sort == "all":
                                continue
                            allowed = sort == "all" or name.startswith("mine")
                            reply = await client.post(root + target, json=body, headers=keys.headers(sort))
                            want = 200 if allowed else 403
                            if reply.status_code != want or (not allowed and OTHER_MODEL not in reply.text):
                                got = f"{reply.status_code} {reply.text}"
                                wrong.append(f"{target} of {name} with {sort}: {got}, expected {want}")
            told = (await client.post(
                f"{root}/v1/chat/completions", json=bodies(THEIR_TALKS)[0][1], headers=keys.headers("mine")
            )).json()["error"]  # fmt: skip
            assert told == {"message": OTHER_MODEL, "type": "permission_error", "param": None, "code": None}

    run(work())


def test_every_route_that_names_a_model(tmp_path: Path, keys: TeamKeys) -> None:
    """From the server's own tables: a new one is here without a word."""

    async def work() -> None:
        count = 0
        async with (
            serving(tmp_path, keys, load_models=("*",), keys_health=True) as server,
            httpx.AsyncClient(timeout=60) as client,
        ):
            root = "http://{}:{}".format(*server.front.http[0].address)
            everything = [scope.value for scope in Scope if scope not in (Scope.METRICS, Scope.ADMIN)]
            with changing(keys.path) as entries:
                keys.of["mine"], entry = make_key("mine", everything, models=("mine-*",))
                entries[:] = [one for one in entries if one.name != "mine"]
                entries.append(entry)
            server.front.renew_files()
            with collected() as wrong:
                for spec in SPECS:
                    for row in spec.routes:
                        if not re.search("NAME|MODEL", row.path) or spec.name == "app":
                            continue
                        for name in (THEIRS, THEIR_TALKS, ABSENT):
                            row_targets = targets(row.path.replace("NAME", "@").replace("MODEL", "@"))
                            for verb, scope in row.scopes.items():
                                if scope is Scope.ADMIN:
                                    continue
                                for target in (one for one in row_targets if "@" in one):
                                    count += 1
                                    url = root + target.replace("@", name)
                                    text = await ask(client, verb, url, keys.headers("mine"))
                                    # 405: another API of this listener has the path, without the verb
                                    if not text.startswith(("403", "405") if verb == "HEAD" else "403"):
                                        wrong.append(f"{verb} {url}: {text}")
        assert count > 60

    run(work())


async def ask(client: httpx.AsyncClient, verb: str, url: str, headers: dict[str, str]) -> str:
    """Send a body that is good for the API, as far as one is wanted."""
    body: dict[str, Any] | None = None
    if verb == "POST":
        body = {**V2, "instances": X, "examples": [{"x": [1.0, 2.0]}], "text_input": "hi", "id": "7"}
        if url.endswith("infer"):
            body = V2
        elif ":" in url.rpartition("/")[2]:
            body = {"instances": X} if url.endswith("predict") else {"examples": [{"x": [1.0, 2.0]}]}
    more = {"NV-InferRequest": 'batch_size: 1 input { name: "x" } output { name: "y" }'}
    content = b"\0" * 8 if "/api/infer" in url else None
    if content is not None:
        reply = await client.request(verb, url, content=content, headers={**headers, **more})
    else:
        reply = await client.request(verb, url, json=body, headers=headers)
    return f"{reply.status_code} {reply.text[:200]}"


def spoken(name: str) -> list[tuple[str, bytes]]:
    """RPCs and their messages about a model."""
    tf, v2, v1, grps = (load(one) for one in ("tfserving", "kserve_v2", "triton_v1", "grps"))
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 2], "contents": {"fp32_contents": X[0]}}]
    infer = {"model_name": name, "inputs": inputs}
    spec = {"model_spec": {"name": name}}
    tensor = {"dtype": 1, "tensor_shape": {"dim": [{"size": 1}, {"size": 2}]}, "float_val": X[0]}
    predict, service = "/tensorflow.serving.PredictionService/", "/inference.GRPCInferenceService/"
    grps_v1, old = "/grps.protos.v1.GrpsService/", "/nvidia.inferenceserver.GRPCService/"
    given = [
        (predict + "Predict", tf.PredictRequest(**spec, inputs={"x": tensor})),
        (predict + "Classify", tf.ClassificationRequest(**spec)),
        (predict + "Regress", tf.RegressionRequest(**spec)),
        (predict + "MultiInference", tf.MultiInferenceRequest(tasks=[{**spec, "method_name": "a"}])),
        (predict + "GetModelMetadata", tf.GetModelMetadataRequest(**spec, metadata_field=["signature_def"])),
        ("/tensorflow.serving.ModelService/GetModelStatus", tf.GetModelStatusRequest(**spec)),
        (service + "ModelInfer", v2.ModelInferRequest(**infer)),
        (service + "ModelConfig", v2.ModelConfigRequest(name=name)),
        (service + "ModelMetadata", v2.ModelMetadataRequest(name=name)),
        (service + "ModelStatistics", v2.ModelStatisticsRequest(name=name)),
        (service + "ModelStreamInfer", v2.ModelInferRequest(**infer)),
        (old + "Status", v1.StatusRequest(model_name=name)),
        (old + "Infer", v1.InferRequest(model_name=name, model_version=-1)),
        (old + "StreamInfer", v1.InferRequest(model_name=name, model_version=-1)),
        (grps_v1 + "Predict", grps.GrpsMessage(model=f"{name}-1", gtensors={"tensors": []})),
        (grps_v1 + "PredictStreaming", grps.GrpsMessage(model=f"{name}-1", gtensors={"tensors": []})),
        (grps_v1 + "ModelMetadata", grps.GrpsMessage(str_data=name)),
    ]
    return [(path, message.SerializeToString()) for path, message in given]


ANSWERED = ("/inference.GRPCInferenceService/ModelInfer", "/tensorflow.serving.PredictionService/Predict")
"""RPCs whose messages here are whole."""


async def call(channel: grpc.aio.Channel, path: str, message: bytes, headers: dict[str, str]) -> str:
    given = channel.unary_stream(path)(message, metadata=tuple(headers.items()), timeout=60)
    try:
        answer = await given.read()
        if answer is grpc.aio.EOF:
            return f"{(await given.code()).name} {await given.details()}"
        return "PERMISSION_DENIED in band" if OTHER_MODEL.encode() in answer else "OK"
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}"
    finally:
        given.cancel()


@pytest.mark.parametrize("port", [0, 1], ids=["shared port", "gRPC's own port"])
def test_grpc(tmp_path: Path, keys: TeamKeys, port: int) -> None:
    async def work() -> None:
        async with serving(tmp_path, keys, load_models=("*",)) as server:
            place = "{}:{}".format(*server.front.grpc[port].address)
            async with grpc.aio.insecure_channel(place) as channel:
                with collected() as wrong:
                    for name in (MINE, THEIRS, ABSENT):
                        for path, message in spoken(name):
                            for sort in ("all", "mine", "all", "mine"):
                                got = await call(channel, path, message, keys.headers(sort))
                                refused = sort == "mine" and name != MINE
                                if refused != got.startswith("PERMISSION_DENIED"):
                                    wrong.append(f"{path} of {name} with {sort}: {got}")
                                if name == MINE and path in ANSWERED and got != "OK":
                                    wrong.append(f"{path} of {name} with {sort}: {got}")

    run(work())


async def lists(server: Server, keys: TeamKeys, sort: str) -> dict[str, str]:
    """Every list of models, by where it is."""
    found = {}
    root, headers = "http://{}:{}".format(*server.front.http[0].address), keys.headers(sort)
    async with httpx.AsyncClient(timeout=60, headers=headers) as client:
        for verb, target in (
            ("GET", "/v1/models"), ("POST", "/v2/repository/index"), ("GET", "/v2/models/stats"),
            ("GET", "/api/status"), ("GET", "/api/repository/index"), ("GET", "/grps/v1/metadata/server"),
            ("GET", "/openapi.json"), ("GET", "/info"), ("GET", "/v1/config"), ("GET", "/v2/status"),
        ):  # fmt: skip
            reply = await client.request(verb, root + target)
            assert reply.status_code == 200, target
            found[target] = reply.text
    place = "{}:{}".format(*server.front.grpc[1].address)
    v2, v1, grps = (load(one) for one in ("kserve_v2", "triton_v1", "grps"))
    async with grpc.aio.insecure_channel(place) as channel:
        for path, message in (
            ("/inference.GRPCInferenceService/RepositoryIndex", v2.RepositoryIndexRequest()),
            ("/inference.GRPCInferenceService/ModelStatistics", v2.ModelStatisticsRequest()),
            ("/nvidia.inferenceserver.GRPCService/Status", v1.StatusRequest()),
            ("/grps.protos.v1.GrpsService/ServerMetadata", grps.GrpsMessage()),
        ):
            answer = await channel.unary_unary(path)(
                message.SerializeToString(), metadata=tuple(headers.items()), timeout=60
            )
            found[path] = answer.decode("latin-1")
    return found


def test_lists_have_what_the_key_may_see(tmp_path: Path, keys: TeamKeys) -> None:
    async def work() -> None:
        async with serving(tmp_path, keys, load_models=("*",)) as server:
            everything, mine = await lists(server, keys, "all"), await lists(server, keys, "mine")
            for where, text in mine.items():
                assert "theirs" not in text, where
                assert ("mine" in text) >= ("mine" in everything[where]), where
            assert sum("theirs" in text for text in everything.values()) > 8

    run(work())


def test_other_models_of_a_key_hold_at_once(tmp_path: Path, keys: TeamKeys) -> None:
    """On open connections, with heads that were let in, and for a stream that is open."""

    async def work() -> None:
        async with (
            serving(tmp_path, keys, load_models=("*",)) as server,
            httpx.AsyncClient(timeout=60, headers=keys.headers("mine")) as client,
        ):
            root = "http://{}:{}".format(*server.front.http[0].address)

            async def statuses() -> list[int]:
                sent = [client.post(f"{root}/v2/models/{name}/infer", json=V2) for name in (MINE, THEIRS)]
                return [reply.status_code for reply in await asyncio.gather(*sent)]

            place = "{}:{}".format(*server.front.grpc[1].address)
            async with grpc.aio.insecure_channel(place) as channel:
                stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(
                    metadata=tuple(keys.headers("mine").items()), timeout=60
                )
                await stream.write(dict(spoken(MINE))["/inference.GRPCInferenceService/ModelInfer"])
                assert OTHER_MODEL.encode() not in await stream.read()
                assert [await statuses() for _ in range(3)] == [[200, 403]] * 3
                for models, want in (((THEIRS,), [403, 200]), ((), [200, 200]), (("mine*",), [200, 403])):
                    keys.choose("mine", models)
                    server.front.renew_files()
                    assert [await statuses() for _ in range(3)] == [want] * 3
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stream.read()
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert len(server.front._compartments) == 1  # those of patterns that nobody has any more are gone

    run(work())


def test_models_come_and_go(tmp_path: Path, keys: TeamKeys) -> None:
    async def work() -> None:
        admin = keys.headers("admin")
        async with serving(tmp_path, keys, load_models=(MINE,)) as server, httpx.AsyncClient() as client:
            root = "http://{}:{}".format(*server.front.http[0].address)

            async def names(sort: str) -> list[str]:
                reply = await client.post(f"{root}/v2/repository/index", headers=keys.headers(sort))
                return sorted(one["name"] for one in reply.json() if one.get("state") == "READY")

            async def infer(name: str) -> int:
                sent = client.post(f"{root}/v2/models/{name}/infer", json=V2, headers=keys.headers("mine"))
                return (await sent).status_code

            assert await names("mine") == [MINE]
            write_model(tmp_path, "mine-new")
            for name in ("mine-new", THEIRS):
                sent = client.post(f"{root}/v2/repository/models/{name}/load", headers=admin, timeout=60)
                assert (await sent).status_code == 200
            assert await names("mine") == [MINE, "mine-new"]
            assert await names("all") == [MINE, "mine-new", THEIRS]
            assert [await infer("mine-new") for _ in range(3)] == [200] * 3
            await client.post(f"{root}/v2/repository/models/mine-new/unload", headers=admin, timeout=60)
            assert await names("mine") == [MINE]
            assert await infer("mine-new") == 404

    run(work())


@pytest.mark.parametrize("scope", ["metrics", "admin"])
def test_scopes_of_the_whole_server_are_not_for_some_models(scope: Any) -> None:
    with pytest.raises(ValueError, match=f"models: given with the scope {scope}"):
        make_key("x", ("infer", scope), models=("a",))
