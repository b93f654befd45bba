"""The dialect `openapi`: what a listener serves, for programs and for people, on every HTTP listener.

    GET /openapi.json               OpenAPI 3.1: the operations of this listener that the caller may see
    GET /docs, /docs/docs.css, .js  a page that lists them, shows their schemas and sends requests
    GET /                           leads a browser to /docs; other clients get what another dialect answers

Other dialects have these paths where they want them: a model of a script may be called /docs.

The document has the operations of one listener's dialects, for one kind of caller. It is made on the event
loop a bit at a time, since 200 models of 100 tensors take a second: between two operations the loop has its
turn. A finished document is kept until a version changes its state. Callers who do not send the secrets of a
restricted API (`access_control.Restrictions`) do not see its operations.

The operator's page shows the document's example requests of a model:

    examples.of(facts)     [ExampleRequest("V2", "POST", "/v2/models/scale/infer", {"inputs": [...]}), ...]

The dialects' own descriptions are asked, so that the page and the document never differ.

PageFiles are the files of a page that a listener shows of itself: /docs, and the operator's console.

    files = PageFiles({"/console": "console.html", "/console/console.css": "console.css"}, HEADERS)
    files.endpoints["/console"]        replies with page/console.html

A page loads nothing from other servers: its content security policy forbids it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hmac import compare_digest
from importlib.resources import files
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve import __version__
from fastserve.dialects.admin.key_page import ask_for_key
from fastserve.dialects.admin.probes import PROBE_METHODS, refuse_probe_method
from fastserve.errors import ServeError
from fastserve.net.access_control import NOTHING, Restrictions, Scope, Secret
from fastserve.net.limits import JSON, error_body
from fastserve.net.router import Route, Router, Yields, refuse_plainly
from fastserve.repository.version import Version
from fastserve.serving.api_operations import JSON_TYPE, ApiOperation, ModelFacts
from fastserve.serving.dialect import (
    ALIVE,
    Dialect,
    DialectSpec,
    HttpRoute,
    ListenerPolicy,
    NoOptions,
    ServingContext,
)
from fastserve.serving.model_view import ModelViews
from fastserve.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from fastserve.net import Call
    from fastserve.net.request import Endpoint

Headers = Sequence[tuple[bytes, bytes]]
PAGE_METHODS = PROBE_METHODS
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
}


def page_headers(*policies: str) -> Headers:
    """Return the headers of a page's replies; `policies` go beside those which every page has."""
    policy = ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", *policies)
    return (
        (b"Content-Security-Policy", "; ".join((*policy, "base-uri 'none'", "form-action 'none'")).encode()),
        (b"X-Content-Type-Options", b"nosniff"),
        (b"Referrer-Policy", b"no-referrer"),
        (b"Cache-Control", b"no-store"),
    )


class PageFiles:
    """Endpoints of files, by their paths. A file is read when it is first wanted."""

    def __init__(self, names: Mapping[str, str], headers: Headers) -> None:
        self._headers = headers
        self._read: dict[str, bytes] = {}
        self.endpoints: dict[str, Endpoint] = {
            path: partial(self._show, name) for path, name in names.items()
        }

    def _show(self, name: str, call: Call) -> None:
        found = self._read.get(name)
        if found is None:
            found = self._read[name] = (files(__package__) / "page" / name).read_bytes()
        call.reply(200, found, _TYPES[name[name.rindex(".") :]], self._headers)


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


TURN_S = 0.001
MOST_BYTES = 8 << 20
MOST_NAMES = 1000
KEPT = 2
"""Documents of a listener that are kept: callers with a secret see another one than those without."""
ABOUT = "The models of this server, by every API that this address speaks."
SECURITY_SCHEMES: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key of this server."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
Granted = frozenset[Secret]
Spoken = Sequence[tuple[DialectSpec[Any], Dialect]]


class Document:
    """The documents of one listener."""

    def __init__(self, context: ServingContext, spoken: Spoken) -> None:
        self._context, self._spoken = context, tuple(spoken)
        self._router = Router([dialect for _, dialect in spoken])
        self._restrictions = Restrictions.over_http(context.settings.triton.restrictions_over_http)
        self._views = ModelViews(context.engine.catalog)
        self._made: dict[Granted, asyncio.Task[bytes]] = {}
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._turn = asyncio.Lock()
        context.catalog.on_change.append(self._changed)

    async def read(self, sends: Callable[[Secret], bool]) -> bytes:
        """Return the document of a caller; `sends` tells whether a secret came with the call. Callers at the
        same time share one making of it, which goes on when they leave."""
        granted = frozenset(filter(sends, self._restrictions.wanted_of(None, None)))
        making = self._made.get(granted)
        if making is None:
            while len(self._made) >= KEPT:
                del self._made[next(iter(self._made))]
            making = self._made[granted] = asyncio.create_task(self._make(granted))
            self._waiting.add(making)
            making.add_done_callback(self._look)
        return await asyncio.shield(making)

    def _look(self, made: asyncio.Task[bytes]) -> None:
        """Keep no failure."""
        self._waiting.discard(made)
        if made.cancelled() or made.exception() is not None:
            self._made = {granted: other for granted, other in self._made.items() if other is not made}

    def _changed(self, version: Version) -> None:
        """Forget the documents that have been begun: however often versions change, one is made at a time."""
        self._made = {granted: made for granted, made in self._made.items() if made in self._waiting}

    async def _make(self, granted: Granted) -> bytes:
        async with self._turn:
            self._waiting.discard(asyncio.current_task())
            return await self._write(granted)

    async def _write(self, granted: Granted) -> bytes:
        catalog, engine = self._context.catalog, self._context.engine
        versions = [model.latest for _, model in sorted(catalog.models.items()) if model.latest is not None]
        writer, models = DocumentWriter(bool(self._context.settings.keys)), []
        turn_ends = monotonic() + TURN_S
        for one in versions:
            models.append(ModelFacts(self._views.of(one), engine.text_info(one)))
            if monotonic() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = monotonic() + TURN_S
        for name, dialect, operation in self._describe(models):
            if not self._may_see(dialect, operation, granted):
                continue
            writer.add(name, operation)
            if monotonic() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = monotonic() + TURN_S
        return writer.finish()

    def _describe(self, models: Sequence[ModelFacts]) -> Iterator[tuple[str, Dialect, ApiOperation]]:
        """Yield every operation with the name of its model, "" for the server's own."""
        for spec, dialect in self._spoken:
            for operation in spec.describe_server(self._context.settings, models):
                yield "", dialect, operation
        for facts in models:
            for spec, dialect in self._spoken:
                for operation in spec.describe_model(facts):
                    yield facts.name, dialect, operation

    def _may_see(self, dialect: Dialect, operation: ApiOperation, granted: Granted) -> bool:
        chosen = self._router.choose(operation.method, operation.path)
        if chosen is None or chosen[0] is not dialect or chosen[1].scope is Scope.ADMIN:
            return False
        wanted = self._restrictions.wanted_of(chosen[1].scope, chosen[1].resources)
        return granted.issuperset(wanted)


class DocumentWriter:
    """Writes one document. Operations are encoded as they come; those of models past MOST_BYTES are left
    out, and their models are named."""

    def __init__(self, asks_for_keys: bool = False) -> None:
        self._asks_for_keys = asks_for_keys
        self._paths: dict[str, dict[str, msgspec.Raw]] = {}
        self._components: dict[str, msgspec.Raw] = {}
        self._names: set[str] = set()
        self._left_out: dict[str, None] = {}
        self._tags: dict[str, None] = {}
        self._size = 0

    def add(self, model: str, operation: ApiOperation) -> None:
        """Add an operation; `model` is "" for one of the server's."""
        method = operation.method.lower()
        if self._size > MOST_BYTES or model in self._left_out:
            self._left_out[model] = None
            return
        of_path = self._paths.setdefault(operation.path, {})
        if method in of_path:
            return
        text = msgspec.json.encode(operation.document(self._name(operation)))
        of_path[method] = msgspec.Raw(text)
        self._size += len(text) + len(operation.path)
        self._tags[operation.tag] = None
        for name, schema in operation.components.items():
            if name not in self._components:
                written = msgspec.Raw(msgspec.json.encode(schema))
                self._components[name] = written
                self._size += len(bytes(written))

    def finish(self) -> bytes:
        """Return the document."""
        about = ABOUT
        more: dict[str, Any] = {}
        if self._left_out:
            more["x-models-left-out"] = list(self._left_out)[:MOST_NAMES]
            about += f" {len(self._left_out)} models are left out: the document has a limit of 8 MiB."
        components: dict[str, Any] = {"schemas": self._components}
        if self._asks_for_keys:
            components["securitySchemes"] = SECURITY_SCHEMES
            more["security"] = [{name: []} for name in SECURITY_SCHEMES]
        return msgspec.json.encode(
            {
                "openapi": "3.1.0",
                "info": {"title": "fastserve", "version": __version__, "description": about},
                "tags": [{"name": tag} for tag in self._tags],
                "paths": self._paths,
                "components": components,
                **more,
            }
        )

    def _name(self, operation: ApiOperation) -> str:
        """Return a name that no other operation has."""
        made = re.sub(r"\W+", "_", f"{operation.method.lower()}{operation.path}", flags=re.ASCII).rstrip("_")
        name, number = made, 2
        while name in self._names:
            name, number = f"{made}_{number}", number + 1
        self._names.add(name)
        return name


MOST = 12
FIRST = ("app", "textgen", "kserve_v2", "tfserving")
"""Dialects whose requests come first, by name."""


class ExampleRequest(msgspec.Struct, kw_only=True):
    """A request of JSON. `body` is None where the values would be too many, or JSON has no word for them."""

    api: str
    method: str
    path: str
    body: Any


class Examples:
    """The example requests of one listener, which speaks these dialects."""

    def __init__(self, settings: Settings, spoken: Sequence[tuple[DialectSpec[Any], Dialect]]) -> None:
        ranks = {name: rank for rank, name in enumerate(FIRST)}
        self._settings = settings
        self._spoken = sorted(spoken, key=lambda pair: ranks.get(pair[0].name, len(ranks)))
        self._router = Router([dialect for _, dialect in spoken])

    def of(self, facts: ModelFacts) -> list[ExampleRequest]:
        """Return the requests that ask the model for an answer, those with a body first."""
        found = list(self._find(facts))
        return sorted(found, key=lambda one: one.body is None)[:MOST]

    def _find(self, facts: ModelFacts) -> Iterator[ExampleRequest]:
        for spec, dialect in self._spoken:
            described = spec.describe_model(facts)
            if facts.text is not None:  # its routes are the server's, and name the model in the body
                described = chain(spec.describe_server(self._settings, [facts]), described)
            for one in described:
                media = (one.body or {}).get(JSON_TYPE)
                if media is not None and self._asks(dialect, one):
                    body = media.get("example")
                    yield ExampleRequest(api=one.tag, method=one.method, path=one.path, body=body)

    def _asks(self, dialect: Dialect, operation: ApiOperation) -> bool:
        chosen = self._router.choose(operation.method, operation.path)
        return chosen is not None and chosen[0] is dialect and chosen[1].scope is Scope.INFER
