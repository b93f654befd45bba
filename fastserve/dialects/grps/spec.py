"""The grps API, as the server knows it: targets and their endpoints (spec 2). /grps/v1/ is all its own."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import msgspec

from fastserve.dialects.grps.json_messages import read_text_member
from fastserve.dialects.grps.predict import HttpPredictEndpoint
from fastserve.dialects.grps.routes import (
    CUSTOMIZED,
    PREDICT,
    ROOT,
    ROUTES,
    RPC_RESOURCES,
    RPCS,
    find_route,
    parse_query,
)
from fastserve.dialects.grps.service import (
    OK_JSON,
    GrpsService,
    NotReady,
    describe_model,
    describe_server,
    failure_json,
)
from fastserve.errors import ServeError, invalid
from fastserve.net.access_control import NOTHING, Scope
from fastserve.net.limits import JSON
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Route
from fastserve.protos import load
from fastserve.serving.dialect import Dialect, DialectSpec, HttpRoute, ListenerPolicy, ServingContext
from fastserve.settings import GrpsOptions

if TYPE_CHECKING:
    from fastserve.net.grpc import Method


HTTP = "http"
HTML, TEXT = b"text/html; charset=utf-8", b"text/plain"
_PAGE = b"<!doctype html>\n<title>%b</title>\n<h1>%b</h1>\n"


class Grps(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: GrpsOptions) -> None:
        self._service = GrpsService(context, options)
        self._shows_metrics = context.settings.allow_metrics
        self._endpoints: dict[str, Endpoint] = {
            "online": self._go_online,
            "offline": self._go_offline,
            "live": self._show_live,
            "ready": self._show_ready,
            "server": self._show_server,
            "model": self._show_model,
            "page": self._show_page,
            "series": self._show_series,
            "script": show_script,
        }

    def route(self, method: str, target: str) -> Route | None:
        """The route of a target, None when it is neither grps's nor the customised path."""
        options = self._service.options
        row = find_route(target, options)
        if row is not None and row.scopes.get("GET") is Scope.METRICS and not self._shows_metrics:
            row = None
        if row is None:
            unknown = Route(answer_not_found, Scope.METADATA, resources=NOTHING)
            return unknown if target.startswith(ROOT) else None
        if method not in row.scopes:
            refusal = Route(_refusal(row), Scope.METADATA, resources=NOTHING)
            return None if row.path == "/" else refusal
        if row.name in (PREDICT, CUSTOMIZED.name):
            key = options.streaming_ctrl_key if options.streaming_ctrl_mode == "query_param" else ""
            endpoint: Endpoint = HttpPredictEndpoint(
                self._service, parse_query(target, key), own=row is CUSTOMIZED
            )
        else:
            endpoint = self._endpoints[row.name]
        return Route(endpoint, row.scopes[method], resources=row.resources)

    def refuse(self, call: Call, fault: ServeError) -> None:
        self._service.refuse(call, fault)

    def grpc_methods(self) -> list[Method]:
        """The RPCs of grps.protos.v1.GrpsService."""
        from fastserve.dialects.grps.rpcs import make_methods

        return make_methods(self._service)

    def close(self) -> None:
        self._service.close()

    # --- health ---

    def _go_online(self, call: Call) -> None:
        self._service.online.set(HTTP, True)
        self._service.answer(call, OK_JSON + b"}")

    def _go_offline(self, call: Call) -> None:
        self._service.online.set(HTTP, False)
        self._service.answer(call, OK_JSON + b"}")

    def _show_live(self, call: Call) -> None:
        self._service.answer(call, OK_JSON + b"}")

    def _show_ready(self, call: Call) -> None:
        if self._service.online.is_ready(HTTP):
            self._service.answer(call, OK_JSON + b"}")
        else:
            fault = NotReady()
            self._service.answer(call, failure_json(503, fault.message), 503)

    # --- metadata ---

    def _show_server(self, call: Call) -> None:
        self._answer_text(call, describe_server(self._service))

    def _show_model(self, call: Call) -> None:
        try:
            if call.header(b"content-type").partition(b";")[0].strip().lower() != JSON:
                call.reply(415, _page(b"Unsupported Media Type"), HTML)
                return
            name = read_text_member(call.body)
            if not name:
                raise invalid("No model name.")
            text = describe_model(self._service, name)
        except ServeError as fault:
            self._service.refuse(call, fault)
        else:
            self._answer_text(call, text)

    def _answer_text(self, call: Call, text: str) -> None:
        self._service.answer(call, b'%b,"str_data":%b}' % (OK_JSON, msgspec.json.encode(text)))

    # --- metrics ---

    async def _show_page(self, call: Call) -> None:
        await self._show_numbers(call, None)

    async def _show_series(self, call: Call) -> None:
        await self._show_numbers(call, parse_qs(call.target.partition("?")[2]).get("name", [""])[0])

    async def _show_numbers(self, call: Call, name: str | None) -> None:
        try:
            found = await self._service.monitor.write(name)
        except ServeError as fault:
            self._service.refuse(call, fault)
        else:
            kind = HTML if name is None else JSON if found.startswith(b"{") else TEXT
            call.reply(200, found, kind)


def show_script(call: Call) -> None:
    """The libraries of the original's page, for what asks for them; the page here uses none."""
    call.reply(200, b"/* the page of this server uses no libraries */\n", b"text/javascript; charset=utf-8")


def answer_not_found(call: Call) -> None:
    call.reply(404, _page(b"Not Found"), HTML)


def _refusal(row: HttpRoute) -> Endpoint:
    allowed = ", ".join(row.scopes).encode()

    def refuse(call: Call) -> None:
        call.reply(405, _page(b"Method Not Allowed"), HTML, ((b"Allow", allowed),))

    return refuse


def _page(title: bytes) -> bytes:
    return _PAGE % (title, title)


SPEC = DialectSpec(
    name="grps",
    options=GrpsOptions,
    section="grps",
    build=Grps,
    routes=ROUTES,
    rpcs=RPCS,
    rpc_resources=RPC_RESOURCES,
    listeners=ListenerPolicy.OPT_IN,  # it has `/`
    descriptors=lambda: [load("grps").descriptor_set],
    exposes=lambda settings: ("take it offline, for load balancers",),
)
