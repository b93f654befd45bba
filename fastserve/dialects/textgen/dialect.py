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

TABLE = Table(PATHS)


class Textgen(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: TextgenOptions) -> None:
        self._service = Service(context, options)

    def route(self, method: str, target: str) -> Route | None:
        """The route of a target, None when no API of these has it, or not with this verb."""
        found = TABLE.find(method, target)
        if found is None:
            return None
        path, named = found
        return Route(path.make(self._service, named), path.row.scopes[method], path.gives_way)

    def refuse(self, call: Call, fault: ServeError) -> None:
        found = TABLE.find(call.method, call.target)
        refuse = errors.refuse if found is None else found[0].refuse
        refuse(self._service, call, fault)
