"""Request templates: a request that the general path has answered, with fields for what may differ.

    known = MessageTemplates(service, SCHEME)       gRPC; the dialect names the fields (message_skeleton)
    skeleton = known.read(data)                     None for a message without fields
    known.start(skeleton, exchange, deadline_ns)    False: no template fits it
    known.cache_template(skeleton, version, ...)    after the general path has answered

Equal skeletons make equal requests, whatever the number of rows. A dialect prepares what it has understood
(`MessageTemplate`); that no request is taken for another is checked here, once for all of them. JsonTemplates
are those of JSON texts (`_ext.request_template`), cached as long as they are met again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from fastserve._ext.message_skeleton import Scheme, Skeleton, TemplateFields, TemplatesPath
from fastserve._ext.request_template import RequestTemplate, RequestTemplates
from fastserve.net.grpc import GrpcExchange
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.repository.version import Version
from fastserve.request import InferRequest
from fastserve.serving.dialect import DialectService
from fastserve.serving.fast_path import Outcome, PreparedCache, open_path
from fastserve.serving.prepared_requests import PreparedRequest, ordinary_inputs
from fastserve.tensor import DType

MOST_TEMPLATES = 256


class FieldSource(NamedTuple):
    """Field that holds an input. Numbers of a packed field have the `width` that is kept of them."""

    placeholder: int
    width: int = 0
    truth: bool = False

    @classmethod
    def of(cls, placeholder: int, dtype: DType, *, varints: bool) -> FieldSource:
        """Return the field of an input of this type, as it lies in memory, or written as varints."""
        return cls(placeholder, dtype.item_bytes, dtype.name == "bool") if varints else cls(placeholder)


class MessageTemplate(TemplateFields, PreparedRequest):
    """Messages with one head. `sources` (of `Source`) are in the order of the inputs laid out; `find_version`
    finds the version that such a request asks for now. What is asked at each request is compiled."""


Prepared = TypeVar("Prepared", bound=MessageTemplate)

# What is known of a message, and where each input is, by the model's names. None: others cannot be like it.
Prepare = Callable[[], tuple[Prepared, Mapping[str, FieldSource]] | None]


class MessageTemplates(TemplatesPath, Generic[Prepared]):
    """Templates of one kind of messages of one dialect, in one front process."""

    def __init__(self, service: DialectService, scheme: Scheme) -> None:
        self._traffic, self.read, self.read_arrived = service.traffic, scheme.read, scheme.read_arrived
        self._heads: PreparedCache[Prepared] = PreparedCache(service.keepers, MOST_TEMPLATES)
        self.find, self.drop = self._heads.find, self._heads.drop

    def take(self, data: bytes, exchange: GrpcExchange) -> bool:
        """Take a request, or return False: nothing has happened then. For `Method.start`."""
        skeleton = self.read(data)
        return skeleton is not None and self.start(skeleton, exchange, exchange.deadline_ns)

    def take_arrived(self, exchange: GrpcExchange, body: ArrivedBody) -> bool:
        """Take a request whose last tensor is still in the socket, or return False. For `Method.take`."""
        skeleton = self.read_arrived(body)
        return skeleton is not None and self.start(skeleton, exchange, exchange.deadline_ns)

    def cache_template(
        self,
        skeleton: Skeleton,
        version: Version,
        request: InferRequest,
        outcome: Outcome,
        prepare: Prepare[Prepared],
    ) -> None:
        """Remember a request that the general path has answered, if others may be like it and its
        placeholders are all that its inputs have: a first axis each, which are all the rows or none is."""
        path = open_path(version, self._traffic, outcome)
        if path is None:
            return
        batching = version.batching
        found = ordinary_inputs(path.queue, request, batching=batching)
        known = None if found is None else prepare()
        if found is None or known is None or len(known[1]) != len(skeleton.sizes):
            return
        bare, (prepared, sources) = replace(request, inputs=found[1]), known
        if batching and len(skeleton.leads) != len(sources):
            return
        prepared.leads, prepared.sources = skeleton.leads, [sources[name] for name in bare.inputs]
        prepared.lay_out_like(path.queue, bare, batching=batching)
        if prepared.is_met_by(skeleton, path.queue):
            self._heads.cache_template(skeleton.head, path, prepared)


# Templates never met again, beyond which nothing is learned until so many requests have been missed.
MOST_UNUSED, CACHE_AGAIN = 8, 64


class JsonTemplates:
    """At most `most` of them."""

    def __init__(self, most: int) -> None:
        self._templates = RequestTemplates(most)
        self.find = self._templates.find
        self._missed = self._vain = 0  # requests without a template, and those of them that can have none

    def cache_template(self, make: Callable[[], RequestTemplate | None]) -> None:
        """Remember the template of a request that had none; `make` gives None for one that can have none."""
        self._missed += 1
        if self._templates.unused() + self._vain >= MOST_UNUSED:
            if self._missed % CACHE_AGAIN:
                return
            self._templates.forget_unused()
            self._vain = 0
        template = make()
        if template is None:
            self._vain += 1
        else:
            self._templates.add(template)
