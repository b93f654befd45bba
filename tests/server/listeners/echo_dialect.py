"""A third-party dialect: HTTP and gRPC, options of its own, an administrative route."""

from __future__ import annotations

import os

import msgspec

from fastserve.net import Call, Route
from fastserve.net.access_control import Scope
from fastserve.net.grpc import Method, Rpc
from fastserve.serving.dialect import Dialect, DialectSpec, HttpRoute, ServingContext

SAY = HttpRoute("say", "/echo/WORD", {"GET": Scope.INFER})
FORGET = HttpRoute("forget", "/echo", {"DELETE": Scope.ADMIN})
RPCS = {"/echo.Echo/Say": Scope.INFER, "/echo.Echo/Forget": Scope.ADMIN}


class EchoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    greeting: str = "hello"


class Echo(Dialect):
    def __init__(self, context: ServingContext, options: EchoOptions) -> None:
        self._greeting = options.greeting
        self._catalog = context.engine.catalog
        self.closed = False

    def route(self, method: str, target: str) -> Route | None:
        if target == "/echo" and method in FORGET.scopes:
            return Route(self.forget, FORGET.scopes[method])
        if target.startswith("/echo/") and method in SAY.scopes:
            return Route(self.say, SAY.scopes[method])
        return None

    def say(self, call: Call) -> None:
        models = ",".join(sorted(self._catalog.models))
        text = f"{self._greeting} {call.target[6:]} of {models} from {os.getpid()}"
        call.reply(200, text.encode(), b"text/plain")

    def forget(self, call: Call) -> None:
        call.reply(200, b"forgotten", b"text/plain")

    def grpc_methods(self) -> list[Method]:
        async def say(word: bytes, rpc: Rpc) -> bytes:
            return self._greeting.encode() + b" " + word

        return [Method(path, bytes, say, bytes, scope=scope) for path, scope in RPCS.items()]

    def close(self) -> None:
        self.closed = True


SPEC = DialectSpec(name="echo", options=EchoOptions, build=Echo, routes=(SAY, FORGET), rpcs=RPCS)
NOT_A_SPEC = EchoOptions()
TWICE = DialectSpec(name="tfserving", options=EchoOptions, build=Echo)
