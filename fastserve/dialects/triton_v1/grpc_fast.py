"""The fast path of Infer and StreamInfer: raw_input entries, copied once, straight into the batch.

The same headers are known as over HTTP (see `prepared`). `start` returns False, having left no trace, for
what needs another look; the general path finds the right words.
"""

from __future__ import annotations

from fastserve._ext.proto_wire_v1 import V1InferMessage
from fastserve.dialects.triton_v1.header import RequestHeader
from fastserve.dialects.triton_v1.lookup import LATEST
from fastserve.dialects.triton_v1.prepared import About, Outcome, PreparedHeader, PreparedHeaders
from fastserve.dialects.triton_v1.replies import RpcReplies
from fastserve.dialects.triton_v1.service import Service
from fastserve.repository.version import Version
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.fast_path import FastPath
from fastserve.serving.paths import Kept, open_path


class PreparedMessage(PreparedHeader):
    """Inputs in the raw_input entries of a message; entries beyond the last are nobody's."""

    def has_entries(self, message: V1InferMessage) -> bool:
        """Whether the entries have the sizes they need."""
        if message.raw_count < len(self.entries):
            return False
        return all(message.raw(index)[1] == nbytes for index, nbytes in enumerate(self.entries))

    def fill(self, message: V1InferMessage, memory: list[memoryview]) -> bool:
        for target, source in zip(memory, self.sources, strict=True):
            if source.place is None:
                message.copy_raw(source.entry, target)
            else:
                self.fill_from(source.place, target)
        return True


class FastRpc:
    """The headers known of one version, before its fast path."""

    def __init__(self, path: FastPath, headers: PreparedHeaders) -> None:
        self.version = path.version
        self._path, self._headers = path, headers

    def start(self, exchange: RpcExchange, message: V1InferMessage, header: RequestHeader) -> bool:
        """Take the request, or return False: nothing has happened then."""
        prepared = self._headers.find(header)
        if prepared is None:
            return False
        assert isinstance(prepared, PreparedMessage)
        if not prepared.has_entries(message) or (prepared.outside and not prepared.is_there()):
            return False
        return self._path.start(exchange, prepared, message, header)


class FastGrpc:
    """The fast paths of all versions. One per front process."""

    def __init__(self, service: Service, replies: RpcReplies) -> None:
        self._service, self._replies = service, replies
        self._paths: Kept[FastRpc | None] = Kept(service.keepers, self._open)

    def start(self, exchange: RpcExchange, message: V1InferMessage, header: RequestHeader) -> bool:
        """Take the request, or return False: nothing has happened then."""
        number = message.model_version
        version = self._service.catalog.available(message.model_name, None if number == LATEST else number)
        path = None if version is None else self._paths.of(version)
        return path is not None and path.start(exchange, message, header)

    def _open(self, version: Version) -> FastRpc | None:
        service, replies = self._service, self._replies
        served = service.serve(version)
        path = open_path(version, service.traffic, Outcome(service, served, replies))
        if path is None:
            return None
        return FastRpc(path, PreparedHeaders(About(service, served, path.queue, replies), PreparedMessage))
