"""Every route and RPC of the server's own tables, over every transport, with every sort of key: one table of
what is answered. A new route or RPC is in it without a word here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from fastserve.app.json_api import SPEC as APP
from fastserve.dialects import SPECS as DIALECTS
from fastserve.net.access_control import Scope
from fastserve.net.api_keys import LACKS_SCOPE, WANTED
from fastserve.server import Server
from fastserve.settings import GrpsOptions, Listener, Settings, TFServingOptions
from fastserve.settings.key_file import changing, make_key
from tests.dialects.test_specs import targets
from tests.server.rig import run, write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe

SPECS = (APP, *DIALECTS)
EVERY = ("tfserving", "kserve_v2", "triton_v1", "grps", "textgen", "app", "mlflow")
BAD = ("none", "wrong", "expired", "revoked")
HEALTH_RPCS = {f"/grpc.health.v1.Health/{name}": Scope.HEALTH for name in ("Check", "Watch")}
REFLECTION = {
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": Scope.METADATA
    for version in ("v1", "v1alpha")
}
RPCS = {**{path: scope for spec in SPECS for path, scope in spec.rpcs.items()}, **HEALTH_RPCS, **REFLECTION}


class Keys:
    """A file of keys: one of each scope, one that has expired, one that was revoked, and one of another
    server."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.of: dict[str, str] = {"wrong": make_key("other", ("admin",))[0]}
        with changing(self.path) as entries:
            for scope in Scope:
                self.of[scope.value], entry = make_key(scope.value, (scope.value,))
                entries.append(entry)
            every = [scope.value for scope in Scope]
            self.of["expired"], entry = make_key("expired", every, "2020-01-01")
            entries.append(entry)
            self.of["revoked"], entry = make_key("revoked", every)
            entries.append(entry)
        with changing(self.path) as entries:
            entries.pop()

    def headers(self, sort: str) -> dict[str, str]:
        return {} if sort == "none" else {"authorization": f"Bearer {self.of[sort]}"}


def expected(scope: Scope | None, sort: str, *, health_asks: bool = False) -> str:
    """What a request gets: "in", 401 or 403. `scope` None: of what is not there."""
    if scope is Scope.HEALTH and not health_asks:
        return "in"
    if sort in BAD:
        return "401"
    return "in" if scope is None or scope.value == sort else "403"


@contextlib.asynccontextmanager
async def serving(folder: Path, keys: Keys, **changes: Any) -> AsyncIterator[Server]:
    """Every dialect on one port, over HTTP and gRPC, another port for gRPC alone, and a port for metrics."""
    place = Listener("127.0.0.1:0", EVERY)
    settings = Settings(
        repository=str(folder),
        http=(place, Listener("127.0.0.1:0", ("metrics",))),
        grpc=(place, Listener("127.0.0.1:0", EVERY[:4])),
        model_control="explicit",
        keys=str(keys.path),
        dialect_options={"app": {"paths": {"/m": "twice"}}},
        dialects=("fastserve.app.json_api:SPEC",),
        tfserving=TFServingOptions(monitoring=True, cors=True),
        grps=GrpsOptions(customized_path="/CUSTOMIZED-PATH", http_status="always_200"),
        **changes,
    )
    server = Server(settings)
    await server.open()
    try:
        yield server
    finally:
        await server.drain(5)


def routes(server: Server) -> Iterator[tuple[int, str, str, Scope | None]]:
    """(listener, verb, target, scope) of all there are, of a wrong verb for each path, and of what is not
    there."""
    seen: set[tuple[int, str, str]] = set()
    for spec in SPECS:
        for row in spec.routes:
            for target in targets(row.path):
                for verb in (*row.scopes, "PATCH"):
                    at = int(spec.name == "metrics")
                    if (at, verb, target) in seen:
                        continue
                    seen.add((at, verb, target))
                    found = server.front.http[at].router.choose(verb, target)
                    yield at, verb, target, None if found is None else found[1].scope
    for verb, target in (("GET", "/nowhere"), ("POST", "/v9/x"), ("GET", "//healthz/live")):
        found = server.front.http[0].router.choose(verb, target)
        yield 0, verb, target, None if found is None else found[1].scope


def outcome(status: int, told: str) -> str:
    """What a request got, by its status and WWW-Authenticate."""
    if status == 401:
        assert told == 'Bearer realm="fastserve"'
        return "401"
    if status == 403 and told:
        assert told == 'Bearer realm="fastserve", error="insufficient_scope"'
        return "403"
    assert not told
    return "in"


class Http2:
    """Clients of HTTP/2, by httpx."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(http1=False, http2=True, timeout=60)

    async def ask(self, verb: str, place: str, target: str, headers: dict[str, str]) -> str:
        content = b"{}" if verb == "POST" else None
        request = self._client.build_request(verb, f"http://{place}/", headers=headers, content=content)
        request.url = request.url.copy_with(raw_path=target.encode())  # as it is, "//" and all
        reply = await self._client.send(request, stream=True)  # only the head of a stream is wanted
        try:
            return outcome(reply.status_code, reply.headers.get("www-authenticate", ""))
        finally:
            await reply.aclose()

    async def close(self) -> None:
        await self._client.aclose()


class Http1:
    """Clients of HTTP/1.1, by hand: httpx takes several times the CPU of the server."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def ask(self, verb: str, place: str, target: str, headers: dict[str, str]) -> str:
        host, _, port = place.rpartition(":")
        reader, writer = self._kept.pop(place, None) or await asyncio.open_connection(host, int(port))
        body = b"{}" if verb == "POST" else b""
        said = {"Host": place, "Content-Length": str(len(body)), **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in said.items())
        writer.write(f"{verb} {target} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        first, *more = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        heard = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in more)}
        if heard.get("connection") == "close" or "content-length" not in heard:
            writer.close()  # a stream that was let in is one: only its head is wanted
        else:
            await reader.readexactly(0 if verb == "HEAD" else int(heard["content-length"]))
            self._kept[place] = reader, writer
        return outcome(int(first.split()[1]), heard.get("www-authenticate", ""))

    async def close(self) -> None:
        for _, writer in self._kept.values():
            writer.close()
            await writer.wait_closed()


def sorts_of(keys: Keys, scope: Scope | None, turn: int, *, every: bool) -> list[str]:
    """Every sort of key; or none, the right one, and of other scopes' and bad ones the next in turn."""
    sorts = ["none", *keys.of]
    if every:
        return sorts
    bad, others = BAD[1:], [one.value for one in Scope if one is not scope]
    mine = [] if scope is None else [scope.value]
    return ["none", *mine, others[turn % len(others)], bad[turn % len(bad)]]


@contextlib.asynccontextmanager
async def closing(client: Http1 | Http2) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("http2", "health_asks", "every"),
    [
        pytest.param(False, False, False, id="http1"),
        pytest.param(True, False, False, id="http2"),
        pytest.param(False, True, False, id="http1, keyed health"),
        pytest.param(False, False, True, id="http1, every key", marks=pytest.mark.torture),
        pytest.param(True, False, True, id="http2, every key", marks=pytest.mark.torture),
        pytest.param(False, True, True, id="http1, keyed health, every key", marks=pytest.mark.torture),
        pytest.param(True, True, True, id="http2, keyed health, every key", marks=pytest.mark.torture),
    ],
)
def test_http(tmp_path: Path, http2: bool, health_asks: bool, every: bool) -> None:
    write_model(tmp_path)
    keys = Keys(tmp_path)

    async def work() -> None:
        tried: set[Scope | None] = set()
        wrong: list[str] = []
        client = Http2() if http2 else Http1()
        async with serving(tmp_path, keys, keys_health=health_asks) as server, closing(client):
            for turn, (at, verb, target, scope) in enumerate(routes(server)):
                tried.add(scope)
                host = "{}:{}".format(*server.front.http[at].address)
                sorts = sorts_of(keys, scope, turn, every=every or scope is Scope.HEALTH)
                if health_asks and not every and scope is not Scope.HEALTH:
                    sorts = sorts[:2]  # the other tests have the others
                for sort in sorts:
                    want = expected(scope, sort, health_asks=health_asks)
                    got = await client.ask(verb, host, target, keys.headers(sort))
                    if got != want:
                        wrong.append(f"{verb} {target} ({scope}) with {sort}: {got}, expected {want}")
        assert not wrong, "\n".join(wrong)
        assert tried == {None, *Scope}

    run(work())


async def call(channel: grpc.aio.Channel, path: str, headers: dict[str, str]) -> str:
    given = channel.unary_stream(path)(b"", metadata=tuple(headers.items()), timeout=60)
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):  # its code is the call's
            if await given.read() is not grpc.aio.EOF:
                return "in"
        code, details = await given.code(), await given.details()
    finally:
        given.cancel()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        assert details == WANTED
        return "401"
    lacks = code is grpc.StatusCode.PERMISSION_DENIED and details.startswith(LACKS_SCOPE.format(""))
    return "403" if lacks else "in"


@pytest.mark.parametrize("health_asks", [False, True], ids=["open health", "keyed health"])
@pytest.mark.parametrize("port", [0, 1], ids=["shared port", "gRPC's own port"])
def test_grpc(tmp_path: Path, port: int, health_asks: bool) -> None:
    write_model(tmp_path)
    keys = Keys(tmp_path)

    async def work() -> None:
        wrong: list[str] = []
        async with serving(tmp_path, keys, keys_health=health_asks) as server:
            place = "{}:{}".format(*server.front.grpc[port].address)
            async with grpc.aio.insecure_channel(place) as channel:
                for path, scope in [*RPCS.items(), ("/no.Service/Call", None)]:
                    for sort in ("none", *keys.of):
                        want = expected(scope, sort, health_asks=health_asks)
                        got = await call(channel, path, keys.headers(sort))
                        if got != want:
                            wrong.append(f"{path} ({scope}) with {sort}: {got}, expected {want}")
        assert not wrong, "\n".join(wrong)
        assert set(RPCS.values()) == {*Scope} - {Scope.METRICS}

    run(work())


FORMS: dict[str, Any] = {
    "/v1/models/twice:predict": {"error": WANTED},  # TensorFlow Serving
    "/v2/models/twice/infer": {"error": WANTED},
    "/v1/chat/completions": {
        "error": {"message": WANTED, "type": "authentication_error", "param": None, "code": "invalid_api_key"}
    },
    "/v1/rerank": {
        "error": {"message": WANTED, "type": "authentication_error", "param": None, "code": "invalid_api_key"}
    },
    "/v1/messages": {"type": "error", "error": {"type": "authentication_error", "message": WANTED}},
    "/generate_stream": {"error": WANTED, "error_type": "unauthorized"},  # TGI
}


def test_forms_of_refusals(tmp_path: Path) -> None:
    """Each dialect's own, and none that depends on what was wrong."""
    write_model(tmp_path)
    keys = Keys(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, keys) as server, httpx.AsyncClient() as client:
            root = "http://{}:{}".format(*server.front.http[0].address)
            for target, form in FORMS.items():
                bodies = set()
                for sort in BAD:
                    reply = await client.post(root + target, headers=keys.headers(sort), content=b"{}")
                    assert reply.status_code == 401
                    bodies.add(reply.content)
                (body,) = bodies
                assert json.loads(body) == form, target
            reply = await client.post(f"{root}/grps/v1/infer/predict", content=b"{}")
            told = reply.json()["status"]  # with a status of its own, also where errors are answered 200
            assert (reply.status_code, told["code"], told["msg"]) == (401, 401, WANTED)
            reply = await client.post(f"{root}/api/infer/twice", content=b"{}")
            assert reply.status_code == 401
            assert WANTED in reply.headers["nv-status"]

    run(work())


def test_two_keys_of_one_connection_do_not_share_it(tmp_path: Path) -> None:
    """As a proxy sends its users' calls: on one connection, at the same time."""
    write_model(tmp_path)
    keys = Keys(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, keys) as server:
            place = "{}:{}".format(*server.front.grpc[1].address)
            async with grpc.aio.insecure_channel(place) as channel:
                path = "/inference.GRPCInferenceService/ModelMetadata"
                sorts = ["metadata", "none", "infer", "wrong"] * 50
                got = await asyncio.gather(*(call(channel, path, keys.headers(sort)) for sort in sorts))
        assert got == ["in", "401", "403", "401"] * 50

    run(work())
