"""Example requests of a model, for the operator's page: those of /openapi.json, of one listener's dialects.

    examples.of(facts)     [ExampleRequest("V2", "POST", "/v2/models/scale/infer", {"inputs": [...]}), ...]

The dialects' own descriptions are asked, so that the page and the document never differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from fastserve.net.access_control import Scope
from fastserve.net.router import Router
from fastserve.serving.dialect import Dialect, DialectSpec
from fastserve.serving.operations import JSON_TYPE, ApiOperation, ModelFacts
from fastserve.settings import Settings

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
