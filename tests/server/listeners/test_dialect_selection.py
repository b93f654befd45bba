"""Which dialects a listener speaks, what it says where none has a route, and dialects of one's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from fastserve.errors import ConfigError
from fastserve.net.access_control import Scope
from fastserve.server import Server
from fastserve.server.dialect_selection import choose_grpc, choose_http, find_specs
from fastserve.serving.dialect import Dialect, DialectSpec, ListenerPolicy, NoOptions
from fastserve.settings import Listener, Settings
from tests.server.rig import Client, run, write_model

FREE = "127.0.0.1:0"
ECHO = "tests.server.listeners.echo_dialect"
PLAIN = (404, "application/json", b'{"error":"no API of this listener has this path"}')
PAGE = b"<HTML><HEAD>\n<TITLE>404 Not Found</TITLE>\n</HEAD><BODY>\n<H1>Not Found</H1>\n</BODY></HTML>\n"
HTML = (404, "text/html", PAGE)
# What a listener speaks -> its answer to a path that is nobody's, and the status of a method that is none.
UNKNOWN: dict[tuple[str, ...], tuple[Any, int]] = {
    (): (PLAIN, 501),
    ("ops",): (PLAIN, 501),
    ("echo",): (PLAIN, 501),
    ("kserve_v2", "tfserving"): (PLAIN, 501),
    ("tfserving",): (HTML, 501),
    ("ops", "tfserving"): (HTML, 501),
    ("kserve_v2",): ((404, "text/plain", b'{"error":"Not Found"}'), 404),
    ("triton_v1",): ((400, None, b""), 501),
    ("metrics",): ((200, "text/plain; charset=utf-8", b""), 405),
}


@contextlib.asynccontextmanager
async def speaking(folder: Path, *spoken: tuple[str, ...], **settings: Any) -> AsyncIterator[Server]:
    """A server with an HTTP listener for each."""
    http = tuple(Listener(FREE, names) for names in spoken)
    grpc_listeners = settings.pop("grpc", ())
    server = Server(
        Settings(
            repository=str(folder),
            model_control="explicit",
            http=http,
            grpc=grpc_listeners,
            dialects=(f"{ECHO}:SPEC",),
            **settings,
        )
    )
    await server.open()
    try:
        yield server
    finally:
        await server.drain(5)


async def ask(place: tuple[str, int], head: str) -> tuple[int, Client, bytes]:
    """Send one head and read the reply; the client has its headers."""
    client = Client(*await asyncio.open_connection(*place))
    client.writer.write(f"{head}\r\nHost: {place[0]}:{place[1]}\r\n\r\n".encode())
    status, body = await client.page()
    client.close()
    return status, client, body


def test_what_is_nobodys(tmp_path: Path) -> None:
    async def work() -> None:
        async with speaking(tmp_path, *UNKNOWN) as server:
            for listener, (names, (answer, status)) in zip(server.front.http, UNKNOWN.items(), strict=True):
                for path in ("/nowhere", "/v1", "/apis"):
                    got, client, body = await ask(listener.address, f"GET {path} HTTP/1.1")
                    assert (got, client.headers.get("content-type"), body) == answer, (names, path)
                got, client, body = await ask(listener.address, "FOO /nowhere HTTP/1.1")
                assert (got, client.headers["connection"]) == (status, "close"), names
                assert (b"<HTML>" in body) == ("tfserving" in names and len(names) < 3 and answer is HTML)

    run(work())


def test_a_path_under_v1_that_nobody_has_is_not_found_where_openais_api_is_spoken(tmp_path: Path) -> None:
    """TensorFlow Serving's catch-all has the rest: what is under /v1/models, and preflights."""

    async def work() -> None:
        async with speaking(tmp_path, (), ("textgen",), ("tfserving",)) as server:
            mixed, text, tfserving = (listener.address for listener in server.front.http)
            for path in ("/v1/batches", "/v1/audio/speech?x=1", "/v1/responses/r_1"):
                for place in (mixed, text):
                    status, _, body = await ask(place, f"POST {path} HTTP/1.1\r\nContent-Length: 0")
                    told = f"Invalid URL (POST {path.partition('?')[0]})"
                    assert (status, json.loads(body)["error"]["message"]) == (404, told)
                status, _, body = await ask(tfserving, f"POST {path} HTTP/1.1\r\nContent-Length: 0")
                assert (status, json.loads(body)["error"]) == (400, f"Malformed request: POST {path}")
            for path in ("/v1/models/m:x", "/v1/models/m/versions/x:predict"):
                status, _, body = await ask(mixed, f"POST {path} HTTP/1.1\r\nContent-Length: 0")
                assert (status, json.loads(body)["error"]) == (400, f"Malformed request: POST {path}")
            preflight = "OPTIONS /v1/responses HTTP/1.1\r\nOrigin: http://a.b"
            assert (await ask(mixed, preflight))[0] == 200

    run(work())


def test_malformed_requests_get_the_words_of_no_dialect(tmp_path: Path) -> None:
    async def work() -> None:
        async with speaking(tmp_path, *UNKNOWN) as server:
            for listener in server.front.http:
                for head, status in (("GET  / HTTP/1.1", 400), ("GET / HTTP/1.7", 400), ("GET x", 400)):
                    got, client, body = await ask(listener.address, head)
                    assert (got, client.headers["content-type"]) == (status, "application/json")
                    assert json.loads(body)["error"].startswith("Malformed request")

    run(work())


def test_a_dialect_of_ones_own_on_every_listener_that_names_none(tmp_path: Path) -> None:
    write_model(tmp_path)
    settings = {"dialect_options": {"echo": {"greeting": "hi"}}, "load_models": ("*",)}

    async def work() -> None:
        async with speaking(tmp_path, (), ("tfserving",), grpc=(Listener(FREE),), **settings) as server:
            mixed, other = (listener.address for listener in server.front.http)
            status, _, body = await ask(mixed, "GET /echo/you HTTP/1.1")
            assert (status, body.split(b" from ")[0]) == (200, b"hi you of twice")
            assert (await ask(mixed, "GET /v2/health/live HTTP/1.1"))[0] == 200
            assert (await ask(mixed, "DELETE /echo HTTP/1.1"))[2] == b"forgotten"
            from_a_page = "DELETE /echo HTTP/1.1\r\nOrigin: http://evil.example"
            status, client, body = await ask(mixed, from_a_page)
            assert (status, client.headers["content-type"]) == (403, "application/json")
            assert b"pages of another site" in body
            assert (await ask(other, "GET /echo/you HTTP/1.1"))[0] == 404
            await check_rpcs("{}:{}".format(*server.front.grpc[0].address))
            echo: Any = server.front.dialects["echo"]
            assert not echo.closed
        assert echo.closed

    run(work())


async def check_rpcs(place: str) -> None:
    async with grpc.aio.insecure_channel(place) as channel:
        assert await channel.unary_unary("/echo.Echo/Say")(b"you") == b"hi you"
        assert await channel.unary_unary("/echo.Echo/Forget")(b"you") == b"hi you"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/echo.Echo/Forget")(b"", metadata=(("origin", "http://evil.example"),))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert await health(channel, "echo.Echo") == health_pb2.HealthCheckResponse.SERVING


async def health(channel: grpc.aio.Channel, service: str) -> int:
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    reply = await check(health_pb2.HealthCheckRequest(service=service).SerializeToString())
    return int(health_pb2.HealthCheckResponse.FromString(reply).status)


def test_health_knows_the_services_of_its_own_listener(tmp_path: Path) -> None:
    listeners = (Listener(FREE, ("triton_v1",)), Listener(FREE, ("kserve_v2",)))
    v1, v2 = "nvidia.inferenceserver.GRPCService", "inference.GRPCInferenceService"

    async def work() -> None:
        async with speaking(tmp_path, grpc=listeners) as server:
            first, second = ("{}:{}".format(*listener.address) for listener in server.front.grpc)
            async with grpc.aio.insecure_channel(first) as channel:
                assert await health(channel, v1) == health_pb2.HealthCheckResponse.SERVING
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await health(channel, v2)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            async with grpc.aio.insecure_channel(second) as channel:  # as the original, under any name
                assert await health(channel, "whatever") == health_pb2.HealthCheckResponse.SERVING

    run(work())


def test_other_front_processes_speak_it_too(tmp_path: Path) -> None:
    async def work() -> None:
        async with speaking(tmp_path, (), frontends=2) as server:
            answered: set[bytes] = set()
            while len(answered) < 2:
                reply = await ask(server.front.http[0].address, "GET /echo/you HTTP/1.1")
                answered.add(reply[2].split(b" from ")[1])

    run(work())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dialects": ("no.such:SPEC",)}, "dialects: no.such:SPEC: No module named 'no'"),
        ({"dialects": (f"{ECHO}:NOTHING",)}, "has no attribute 'NOTHING'"),
        ({"dialects": (f"{ECHO}:NOT_A_SPEC",)}, "given a EchoOptions, allowed: a DialectSpec"),
        ({"dialects": (f"{ECHO}:TWICE",)}, "dialects: there are two of the name 'tfserving'"),
        ({"dialect_options": {"echo": {}}}, "dialect_options: given 'echo', allowed: "),
        ({"dialect_options": {"tfserving": {}}}, "dialect_options: given 'tfserving', allowed: "),
        (
            {"dialects": (f"{ECHO}:SPEC",), "dialect_options": {"echo": {"greeting": 3}}},
            "dialect_options.echo: greeting: given 3, allowed: text",
        ),
        (
            {"dialects": (f"{ECHO}:SPEC",), "dialect_options": {"echo": {"geeting": "a"}}},
            "dialect_options.echo: geeting: unknown field, did you mean greeting?",
        ),
    ],
)
def test_what_is_wrong_with_a_dialect_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_specs(Settings(**settings))
    assert told in str(caught.value)


@pytest.mark.parametrize("names", [("nope",), ("tfserving", "metrics")])
def test_what_a_listener_cannot_speak(names: tuple[str, ...]) -> None:
    specs = find_specs(Settings())
    known = "ops, console, openapi, traffic, textgen, tfserving, kserve_v2, triton_v1, grps, mlflow"
    allowed = f"allowed: {known}, or metrics alone"
    for choose in (choose_http, choose_grpc):
        with pytest.raises(ConfigError) as caught:
            choose(specs, Listener(FREE, names))
        assert str(caught.value) == f"{FREE}: dialects: given {names[-1]!r}, {allowed}"


@pytest.mark.parametrize(
    ("named", "http", "grpc"),
    [
        ((), "default original every", "default original"),
        (("default",), "default every", "default"),
        (("original",), "original", "original"),
        (("original", "opt_in"), "original opt_in every", "original opt_in"),
        (("opt_in",), "opt_in every", "opt_in"),
        (("exclusive",), "exclusive", "exclusive"),
        (("every",), "every", "every"),
    ],
)
def test_a_listeners_dialects_follow_from_their_policies(
    named: tuple[str, ...], http: str, grpc: str
) -> None:
    policies = {
        "default": ListenerPolicy.DEFAULT,
        "original": ListenerPolicy.REPLACES_ORIGINAL,
        "opt_in": ListenerPolicy.OPT_IN,
        "exclusive": ListenerPolicy.EXCLUSIVE,
        "every": ListenerPolicy.EVERY_HTTP,
    }
    assert set(policies.values()) == set(ListenerPolicy)
    rpcs = {"/a.B/C": Scope.INFER}
    specs: list[DialectSpec[Any]] = [
        DialectSpec(name=name, options=NoOptions, build=lambda *_: Dialect(), rpcs=rpcs, listeners=policy)
        for name, policy in policies.items()
    ]
    assert [spec.name for spec in choose_http(specs, Listener(FREE, named))] == http.split()
    assert [spec.name for spec in choose_grpc(specs, Listener(FREE, named))] == grpc.split()


@pytest.mark.parametrize(
    ("named", "spoken"),
    [
        ((), ["ops", "console", "openapi", "traffic", "textgen", "tfserving", "kserve_v2", "triton_v1"]),
        (("kserve_v2",), ["kserve_v2"]),
        (("triton_v1", "tfserving"), ["ops", "console", "openapi", "traffic", "tfserving", "triton_v1"]),
        (("tfserving",), ["ops", "console", "openapi", "traffic", "tfserving"]),
        (("metrics",), ["metrics"]),
        (("ops",), ["ops", "console", "openapi", "traffic"]),
        (("grps",), ["ops", "console", "openapi", "traffic", "grps"]),
        (("mlflow",), ["ops", "console", "openapi", "traffic", "mlflow"]),
        (("textgen",), ["ops", "console", "openapi", "traffic", "textgen"]),
    ],
)
def test_what_a_listener_speaks(named: tuple[str, ...], spoken: list[str]) -> None:
    specs = find_specs(Settings())
    assert [spec.name for spec in choose_http(specs, Listener(FREE, named))] == spoken
    with_rpcs = [name for name in spoken if name in ("tfserving", "kserve_v2", "triton_v1", "grps")]
    assert [spec.name for spec in choose_grpc(specs, Listener(FREE, named))] == with_rpcs
