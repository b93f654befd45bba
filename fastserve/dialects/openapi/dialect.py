"""The dialect `openapi`: what a listener serves, for programs and for people, on every HTTP listener.

    GET /openapi.json               OpenAPI 3.1: the operations of this listener that the caller may see
    GET /docs, /docs/docs.css, .js  a page that lists them, shows their schemas and sends requests
    GET /                           leads a browser to /docs; other clients get what another dialect answers

The page loads nothing from other servers: its content security policy forbids it. Other dialects have these
paths where they want them: a model of a script may be called /docs.
"""

from __future__ import annotations

from hmac import compare_digest
from importlib.resources import files
from typing import TYPE_CHECKING

from fastserve.dialects.openapi.document import Document, Spoken
from fastserve.net.access_control import NOTHING, Scope
from fastserve.net.limits import JSON, error_body
from fastserve.net.router import Route, Router, Yields
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


SCOPES = dict.fromkeys(("GET", "HEAD"), Scope.METADATA)
DOCUMENT = HttpRoute("document", "/openapi.json", SCOPES)
PAGE = HttpRoute("page", "/docs", SCOPES)
STYLE = HttpRoute("style", "/docs/docs.css", SCOPES)
SCRIPT = HttpRoute("script", "/docs/docs.js", SCOPES)
ROUTES = (DOCUMENT, PAGE, STYLE, SCRIPT)

_FILES = {
    PAGE.path: ("docs.html", b"text/html; charset=utf-8"),
    STYLE.path: ("docs.css", b"text/css; charset=utf-8"),
    SCRIPT.path: ("docs.js", b"text/javascript; charset=utf-8"),
}

POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = (
    (b"Content-Security-Policy", POLICY),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cache-Control", b"no-store"),
)


class OpenApi(Dialect):
    """Routes of the document and the page. Only `on_listener` makes one that describes something."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self._context, self._shown = context, context.settings.allow_docs
        self._pages: dict[str, bytes] = {}
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
        if path != DOCUMENT.path and path not in _FILES:
            return None
        if method not in SCOPES:
            return Route(refuse_method, Scope.METADATA, Yields.FIRST)
        endpoint = self.show_document if path == DOCUMENT.path else self._shower(path)
        return Route(endpoint, SCOPES[method], Yields.FIRST)

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

    def _shower(self, path: str) -> Endpoint:
        return lambda call: call.reply(200, self._read(path), _FILES[path][1], HEADERS)

    def _read(self, path: str) -> bytes:
        """Return a file of the page, cached from the first time on."""
        found = self._pages.get(path)
        if found is None:
            found = self._pages[path] = (files(__package__) / "page" / _FILES[path][0]).read_bytes()
        return found


def lead_browsers(other: Endpoint) -> Endpoint:
    """Return an endpoint that sends browsers to the page, and other clients to `other`."""

    def answer(call: Call) -> Coroutine[Any, Any, None] | None:
        if b"text/html" not in call.header(b"accept"):
            return other(call)
        call.reply(303, b"", b"text/plain", ((b"Location", b"docs"), (b"Vary", b"Accept")))
        return None

    return answer


def refuse_method(call: Call) -> None:
    call.reply(405, error_body("use GET or HEAD"), JSON, ((b"Allow", b"GET, HEAD"),))


SPEC = DialectSpec(
    name="openapi",
    options=NoOptions,
    build=OpenApi,
    routes=ROUTES,
    listeners=ListenerPolicy.EVERY_HTTP,
)
