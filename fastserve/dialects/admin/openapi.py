"""The dialect `openapi`: what a listener serves, for programs and for people, on every HTTP listener.

    GET /openapi.json               OpenAPI 3.1: the operations of this listener that the caller may see
    GET /docs, /docs/docs.css, .js  a page that lists them, shows their schemas and sends requests
    GET /                           leads a browser to /docs; other clients get what another dialect answers

Other dialects have these paths where they want them: a model of a script may be called /docs.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import TYPE_CHECKING

from fastserve.dialects.admin.key_page import ask_for_key
from fastserve.dialects.admin.openapi_document import Document, Spoken
from fastserve.dialects.admin.page_files import PAGE_METHODS, PageFiles, page_headers
from fastserve.dialects.admin.probes import refuse_probe_method
from fastserve.errors import ServeError
from fastserve.net.access_control import NOTHING, Scope
from fastserve.net.limits import JSON, error_body
from fastserve.net.router import Route, Router, Yields, refuse_plainly
from fastserve.serving.dialect import (
    ALIVE,
    Dialect,
    DialectSpec,
    HttpRoute,
    ListenerPolicy,
    NoOptions,
    ServingContext,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from fastserve.net import Call
    from fastserve.net.request import Endpoint


SCOPES = dict.fromkeys(PAGE_METHODS, Scope.METADATA)
DOCUMENT = HttpRoute("document", "/openapi.json", SCOPES)
PAGE = HttpRoute("page", "/docs", SCOPES)
STYLE = HttpRoute("style", "/docs/docs.css", SCOPES)
SCRIPT = HttpRoute("script", "/docs/docs.js", SCOPES)
ROUTES = (DOCUMENT, PAGE, STYLE, SCRIPT)

_FILES = {PAGE.path: "docs.html", STYLE.path: "docs.css", SCRIPT.path: "docs.js"}
HEADERS = page_headers("img-src data: blob:", "frame-ancestors 'none'")


class OpenApi(Dialect):
    """Routes of the document and the page. Only `on_listener` makes one that describes something."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._context, self._shown = context, context.settings.allow_docs
        self._endpoints = {**PageFiles(_FILES, HEADERS).endpoints, DOCUMENT.path: self.show_document}
        self._bind(())

    def on_listener(self, spoken: Spoken) -> OpenApi:
        """Return the dialect of one listener, which describes what that speaks."""
        if not self._shown:
            return self
        made = OpenApi(self._context, NoOptions())
        made._bind([(spec, dialect) for spec, dialect in spoken if dialect is not self])
        return made

    def _bind(self, spoken: Spoken) -> None:
        self._document = Document(self._context, spoken) if spoken else None
        self._others = Router([dialect for _, dialect in spoken])

    def route(self, method: str, target: str) -> Route | None:
        path = target.partition("?")[0]
        if not self._shown:
            return None
        if path == ALIVE.path:
            return self._route_root(method, target)
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            return None
        return Route(endpoint if method in SCOPES else refuse_probe_method, Scope.METADATA, Yields.FIRST)

    def refuse(self, call: Call, fault: ServeError) -> None:
        if call.target.partition("?")[0] != PAGE.path or not ask_for_key(call, fault):
            refuse_plainly(call, fault)

    def _route_root(self, method: str, target: str) -> Route | None:
        """Return the route of / for browsers, where no dialect has it for itself. Its access is that of the
        route which answers other clients."""
        if method != "GET" or self._document is None:
            return None
        chosen = self._others.choose(method, target)
        if chosen is not None and chosen[1].gives_way is Yields.NEVER:
            return None
        other, _ = self._others.find(method, target)
        if chosen is None:
            return Route(lead_browsers(other), Scope.HEALTH, resources=NOTHING)
        return Route(lead_browsers(other), chosen[1].scope, resources=chosen[1].resources)

    async def show_document(self, call: Call) -> None:
        if self._document is None:
            call.reply(404, error_body("nothing is described here"), JSON)
            return
        found = await self._document.read(
            lambda secret: compare_digest(call.header(secret.header.encode()), secret.value)
        )
        call.reply(200, found, JSON, HEADERS)


def lead_browsers(other: Endpoint) -> Endpoint:
    """Return an endpoint that sends browsers to the page, and other clients to `other`."""

    def answer(call: Call) -> Coroutine[Any, Any, None] | None:
        if b"text/html" not in call.header(b"accept"):
            return other(call)
        call.reply(303, b"", b"text/plain", ((b"Location", b"docs"), (b"Vary", b"Accept")))
        return None

    return answer


SPEC = DialectSpec(
    name="openapi",
    options=NoOptions,
    build=OpenApi,
    routes=ROUTES,
    listeners=ListenerPolicy.EVERY_HTTP,
)
