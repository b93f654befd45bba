"""The dialect textgen: the paths of all its APIs. What each means stands in the API's own files."""

from __future__ import annotations

from fastserve.config import TextgenOptions
from fastserve.dialects.textgen import errors
from fastserve.dialects.textgen.apis import PATHS
from fastserve.dialects.textgen.paths import Table
from fastserve.dialects.textgen.service import Service
from fastserve.errors import ServeError
from fastserve.serving.dialect import Dialect, ServingContext
from fastserve.wire.call import Call
from fastserve.wire.dialect import Route
from fastserve.wire.scope import Scope

TABLE = Table(PATHS)


class Textgen(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: TextgenOptions) -> None:
        self._service = Service(context, options)
        self._shows_metrics = context.settings.allow_metrics

    def route(self, method: str, target: str) -> Route | None:
        """The route of a target, None when no API of these has it, or not with this verb."""
        found = TABLE.find(method, target)
        if found is None:
            return None
        path, named = found
        scope, gives_way = path.row.scopes[method], path.gives_way
        if scope is Scope.METRICS:
            if not self._shows_metrics:
                return None
            gives_way = gives_way and self._service.options.metrics == "server"
        return Route(path.make(self._service, named), scope, gives_way)

    def hear(self, word: str) -> bool:
        """A request's id that is to be stopped, from another front process."""
        return self._service.running.stop(word)

    def refuse(self, call: Call, fault: ServeError) -> None:
        found = TABLE.find(call.method, call.target)
        refuse = errors.refuse if found is None else found[0].refuse
        refuse(self._service, call, fault)
