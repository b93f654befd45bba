"""The document of /openapi.json: operations of the dialects of one listener, for one kind of caller.

It is made on the event loop a bit at a time, since 200 models of 100 tensors take a second: between two
operations the loop has its turn. A finished document is kept until a version changes its state. Callers who
do not send the secrets of a restricted API (`access_control.Restrictions`) do not see its operations.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import msgspec

from fastserve import __version__
from fastserve.net.access_control import Restrictions, Scope, Secret
from fastserve.net.router import Router
from fastserve.repository.version import Version
from fastserve.serving.dialect import Dialect, DialectSpec, ServingContext
from fastserve.serving.model_view import ModelViews
from fastserve.serving.operations import ApiOperation, ModelFacts

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
