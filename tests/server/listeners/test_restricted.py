"""Restricted APIs over every route and RPC of every dialect of one port: what a header is wanted for, and
that no dialect leads around it. The routes are those the server's own specs list."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio

from fastserve.dialects import SPECS
from fastserve.net.access_control import Resource, resources_of
from fastserve.server import Server
from fastserve.server.dialect_selection import list_exposures, list_half_restricted
from fastserve.settings import GrpsOptions, Listener, Settings, TFServingOptions, TritonOptions
from tests.dialects.test_specs import targets
from tests.server.rig import run, write_model

EVERY = ("tfserving", "kserve_v2", "triton_v1", "grps", "textgen")
PREFIX = "triton-grpc-protocol-"
KEYS = {resource: f"key-{resource.value}" for resource in Resource}
RULES = tuple(f"{resource.value}:{key}=secret" for resource, key in KEYS.items())
RPCS = {path: spec for spec in SPECS for path in spec.rpcs}
HEALTH = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")


@contextlib.asynccontextmanager
async def serving(folder: Path, rules: tuple[str, ...]) -> AsyncIterator[Server]:
    """Every dialect on one port, over HTTP and gRPC."""
    place = (Listener("127.0.0.1:0", EVERY),)
    settings = Settings(
        repository=str(folder),
        http=place,
        grpc=place,
        model_control="explicit",
        triton=TritonOptions(http_restricted_api=rules, grpc_restricted_protocol=rules),
        tfserving=TFServingOptions(monitoring=True),
        grps=GrpsOptions(customized_path="/CUSTOMIZED-PATH"),
    )
    server = Server(settings)
    await server.open()
    try:
        yield server
    finally:
        await server.drain(5)


async def ask(server: Server, verb: str, target: str, keys: dict[str, str]) -> tuple[int, str]:
    """Status, and all that was answered."""
    reader, writer = await asyncio.open_connection(*server.front.http[0].address)
    sent = "".join(f"{name}: {value}\r\n" for name, value in keys.items())
    head = f"{verb} {target} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: 0\r\n{sent}\r\n"
    writer.write(head.encode())
    try:
        answer = (await asyncio.wait_for(reader.read(), 60)).decode("latin-1")
    finally:
        writer.close()
    return int(answer.split(" ", 2)[1]), answer


async def call(channel: grpc.aio.Channel, path: str, keys: dict[str, str]) -> tuple[grpc.StatusCode, str]:
    """The status of an RPC that is sent one empty message; a stream is left after its first answer."""
    given = channel.unary_stream(path)(b"", metadata=tuple(keys.items()), timeout=60)
    try:
        await given.read()
        return grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError as fault:
        return fault.code(), fault.details() or ""
    finally:
        given.cancel()


def all_but(left_out: Resource, prefix: str = "") -> dict[str, str]:
    return {prefix + key: "secret" for resource, key in KEYS.items() if resource is not left_out}


def test_every_route_wants_the_header_of_each_resource_it_reaches(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        tried: set[Resource] = set()
        async with serving(tmp_path, RULES) as server:
            everything = dict.fromkeys(KEYS.values(), "secret")
            listed = [(verb, row) for spec in SPECS for row in spec.routes for verb in row.scopes]
            for verb, target in {(verb, target) for verb, row in listed for target in targets(row.path)}:
                found = server.front.http[0].router.choose(verb, target)
                if found is None:  # the metrics port's
                    continue
                route = found[1]
                for resource in resources_of(route.scope, route.resources):
                    tried.add(resource)
                    for keys in (all_but(resource), all_but(resource) | {KEYS[resource]: "Secret"}):
                        status, answer = await ask(server, verb, target, keys)
                        assert status == 403, (verb, target, answer)
                        if verb != "HEAD":
                            assert f"expecting header '{KEYS[resource]}'" in answer, (verb, target, answer)
                _, answer = await ask(server, verb, target, everything)
                assert "expecting header" not in answer, (verb, target, answer)
        assert tried == set(Resource)

    run(work())


def test_every_rpc_wants_the_metadata_of_each_resource_it_reaches(tmp_path: Path) -> None:
    async def work() -> None:
        tried: set[Resource] = set()
        async with serving(tmp_path, RULES) as server:
            everything = {PREFIX + key: "secret" for key in KEYS.values()}
            async with grpc.aio.insecure_channel("{}:{}".format(*server.front.grpc[0].address)) as channel:
                for path in (*RPCS, *HEALTH):
                    spec = RPCS.get(path)
                    declared = (Resource.HEALTH,) if spec is None else spec.rpc_resources.get(path)
                    for resource in resources_of(spec.rpcs[path] if spec else None, declared):
                        tried.add(resource)
                        refusal = f"This protocol is restricted, expecting header '{PREFIX}{KEYS[resource]}'"
                        for keys in ({}, {PREFIX + KEYS[resource]: "Secret"}):
                            given = all_but(resource, PREFIX) | keys
                            answer = await call(channel, path, given)
                            assert answer == (grpc.StatusCode.UNAVAILABLE, refusal), path
                    assert "restricted" not in (await call(channel, path, everything))[1], path
        assert tried == set(Resource)

    run(work())


def test_model_control_of_v1_wants_what_that_of_v2_wants(tmp_path: Path) -> None:
    """The documented command; the other dialects of its port were open."""
    write_model(tmp_path)
    rules = ("model-repository,shared-memory:admin-key=SECRET",)

    async def work() -> None:
        async with serving(tmp_path, rules) as server:
            for target in (
                "/v2/repository/models/twice/load",
                "/api/modelcontrol/load/twice",
                "/api/sharedmemorycontrol/register/r//x/0/8",
                "/api/sharedmemorycontrol/unregisterall",
            ):
                assert (await ask(server, "POST", target, {}))[0] == 403
            assert server.catalog.available("twice", None) is None
            status, _ = await ask(server, "POST", "/api/modelcontrol/load/twice", {"Admin-Key": "SECRET"})
            assert status == 200
            assert server.catalog.available("twice", None) is not None
            assert (await ask(server, "GET", "/v1/models/twice", {}))[0] == 200  # no such resource

    run(work())


def settings(**options: tuple[str, ...]) -> Settings:
    both = (Listener("0.0.0.0:1"),)
    return Settings(http=both, grpc=both, model_control="explicit", triton=TritonOptions(**options))


def test_what_is_restricted_over_one_transport_alone_is_said() -> None:
    rule = ("model-repository,health:k=v",)
    assert list_half_restricted(settings()) == []
    assert list_half_restricted(settings(http_restricted_api=rule, grpc_restricted_protocol=rule)) == []
    assert list_half_restricted(settings(http_restricted_api=rule)) == [
        "triton.http_restricted_api: model-repository, health want a header over HTTP, and over gRPC "
        "(0.0.0.0:1) nothing; set triton.grpc_restricted_protocol too"
    ]
    assert list_half_restricted(settings(grpc_restricted_protocol=rule)) == [
        "triton.grpc_restricted_protocol: model-repository, health want metadata over gRPC, and over HTTP "
        "(0.0.0.0:1) nothing; set triton.http_restricted_api too"
    ]
    alone = Settings(http=(Listener("0.0.0.0:1"),), grpc=(), triton=TritonOptions(http_restricted_api=rule))
    assert list_half_restricted(alone) == []


def test_what_wants_a_header_over_both_transports_is_no_exposure() -> None:
    rule = ("model-repository:k=v",)
    assert list_exposures(settings(http_restricted_api=rule, grpc_restricted_protocol=rule)) == []
    assert list_exposures(settings(http_restricted_api=rule))
