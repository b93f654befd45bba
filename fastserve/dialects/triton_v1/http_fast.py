"""The fast path of POST /api/infer: raw bytes, copied once, straight into the batch they will run in.

A header is understood once (see `prepared`); requests that bring the same bytes in it are known by them. For
a body of another length, and anything else, errors included, `start` returns False having left no trace, and
the general path finds the right words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastserve.dialects.triton_v1.header import (
    REMEMBERED_CHARS,
    REMEMBERED_HEADERS,
    RequestHeader,
    read_header,
)
from fastserve.dialects.triton_v1.inputs import Buffer
from fastserve.dialects.triton_v1.prepared import About, Outcome, PreparedHeader, PreparedHeaders
from fastserve.dialects.triton_v1.replies import HttpReplies
from fastserve.dialects.triton_v1.service import Service
from fastserve.errors import ConfigError
from fastserve.repository.version import Version
from fastserve.serving.fast_path import FastPath
from fastserve.serving.paths import open_path
from fastserve.serving.prepared import Described, Memory
from fastserve.wire.call import Call

Known = tuple["PreparedBody", RequestHeader]


class PreparedBody(PreparedHeader):
    """Inputs behind one another in a body. Replies without an id of the request's differ in their numbers
    and tensors alone, and are framed once."""

    replies: HttpReplies

    def fill(self, body: Buffer, memory: list[memoryview]) -> bool:
        if self.alone:
            memory[0][:] = body
            return True
        view = memoryview(body)
        for target, source in zip(memory, self.sources, strict=True):
            if source.place is None:
                target[:] = view[source.begin : source.end]
            else:
                self.fill_from(source.place, target)
        return True

    def make_writer(self, described: Described) -> Any | None:
        writer = super().make_writer(described)
        return None if writer is None else (*writer, *self.replies.frame(writer[0]))

    def write(
        self, call: Call, writer: Any, memory: Sequence[Memory], header: RequestHeader, held: Any
    ) -> None:
        forms, order, before, after, trailer = writer
        head = b"" if header.id else call.raw_head(b"")
        if not head:
            super().write(call, (forms, order), memory, header, held)
            return
        number, raws = b"%d" % self.replies.next_id(), map(memory.__getitem__, order)
        call.reply_raw(b"".join((head, before, number, after, *raws, trailer)))


class FastHttp:
    """The headers known of one version, for one target, before its fast path."""

    def __init__(self, path: FastPath, headers: PreparedHeaders) -> None:
        self.version = path.version
        self._path, self._headers = path, headers
        self._known: dict[bytes, Known] = {}

    @classmethod
    def open(cls, service: Service, version: Version, replies: HttpReplies) -> FastHttp | None:
        """That of a version; None for one that does more with a request than run or keep it."""
        served = service.serve(version)
        path = open_path(version, service.traffic, Outcome(service, served, replies))
        if path is None:
            return None
        return cls(path, PreparedHeaders(About(service, served, path.queue, replies), PreparedBody))

    def start(self, call: Call, given: bytes) -> bool:
        """Take the call whose header is `given`, or return False: nothing has happened then."""
        known = self._known.get(given) or self._meet(given)
        if known is None:
            return False
        prepared, header = known
        if len(call.body) != prepared.nbytes or (prepared.outside and not prepared.is_there()):
            return False
        return self._path.start(call, prepared, call.body, header)

    def _meet(self, given: bytes) -> Known | None:
        """Understand a header; None for one that is not for this path."""
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            return None
        prepared = self._headers.find(header)
        if prepared is None:
            return None
        assert isinstance(prepared, PreparedBody)
        if not header.id and len(given) <= REMEMBERED_CHARS:  # with an id it is used once
            if len(self._known) >= REMEMBERED_HEADERS:
                self._known.clear()
            self._known[given] = prepared, header
        return prepared, header
