"""The fast path of a version whose responses are kept: a hit is answered where it is read.

    fill -> key -> kept?   yes: outputs -> write; the place goes back
                           no: the place runs, and what it answers is kept

Requests of the same key as one under way take the general path, which waits for it.
"""

from __future__ import annotations

from collections.abc import Coroutine
from time import monotonic_ns
from typing import Any

from fastserve.engine import CacheStage, Entry, Miss, Pending, keep_response, read_response, respond
from fastserve.errors import ServeError
from fastserve.metrics.traffic import Traffic
from fastserve.repository.version import Version
from fastserve.serving.exchange import Exchange
from fastserve.serving.fast_path import FastPath, Outcome
from fastserve.serving.prepared import PreparedRequest
from fastserve.tensor import DTYPE_BY_CODE


class CachedPath(FastPath):
    """The fast path before a cache stage."""

    def __init__(
        self, version: Version, stage: CacheStage, traffic: Traffic, outcome: Outcome, patience_ns: int = 0
    ) -> None:
        super().__init__(version, stage.queue, traffic, outcome, patience_ns, replies=True)
        self._stage = stage

    def takes_arrived(self, prepared: PreparedRequest) -> bool:
        """No: who waits for its like does so on the general path."""
        return False

    def start(
        self,
        exchange: Exchange,
        prepared: PreparedRequest,
        source: Any,
        request_id: Any = None,
        deadline_ns: int = 0,
    ) -> bool:
        """Take the request, or return False: nothing has happened then."""
        if prepared.outside:
            return False
        try:
            return self._start(exchange, prepared, source, request_id, deadline_ns)
        except ServeError:
            return False
        except Exception as error:
            self.failed(exchange, prepared, request_id, error)
            return True

    def _start(
        self, exchange: Exchange, prepared: PreparedRequest, source: Any, request_id: Any, deadline_ns: int
    ) -> bool:
        reserved = self.fill(prepared, source, request_id)
        if reserved is None:
            return False
        found: Entry | Miss | None = None
        try:
            found = self._stage.find(prepared.key_head(self._stage.head), reserved[1])
        finally:
            if not isinstance(found, Miss):
                prepared.layout_in.abandon(reserved, prepared.rows)
        if isinstance(found, Miss):
            self.submit(exchange, prepared, reserved, request_id, found, deadline_ns)
        elif found is not None:
            self.decoded(monotonic_ns() - exchange.received_ns)
            self._reply_kept(exchange, prepared, found, request_id)
        return found is not None

    def _reply_kept(
        self, exchange: Exchange, prepared: PreparedRequest, entry: Entry, request_id: Any
    ) -> None:
        began_ns = monotonic_ns()
        form = entry.form
        writer = prepared.writers.get(form) or prepared.add_writer(
            form, [(name, DTYPE_BY_CODE[code], shape) for name, code, shape in form]
        )
        try:
            if writer is None or entry.parameters:
                later = prepared.write_response(exchange, respond(entry), request_id, None)
            else:
                later = prepared.write(exchange, writer, entry.memory, request_id, None)
            if later is None:
                self.count(exchange, prepared, began_ns)
            else:
                self.write_later(exchange, prepared, request_id, later, lambda: None)
        except ServeError as fault:
            self.refuse(exchange, prepared, request_id, fault)
        except Exception as error:
            self.failed(exchange, prepared, request_id, error)

    def reply(
        self, exchange: Exchange, prepared: PreparedRequest, pending: Pending, request_id: Any, held: Any
    ) -> Coroutine[Any, Any, None] | None:
        """Answer, and keep the answer: what is held is the miss."""
        found = prepared.layout_out.read(pending.place, pending.rows)
        writer = None if found is None else prepared.writers.get(found[0]) or prepared.add_writer(found[0])
        if found is None or writer is None:
            response = read_response(self.queue, pending, prepared.wanted)
            keep_response(held, response)
            return prepared.write_response(exchange, response, request_id, None)
        held.keep(prepared.kept_form(found[0]), found[1])
        return prepared.write(exchange, writer, found[1], request_id, None)
