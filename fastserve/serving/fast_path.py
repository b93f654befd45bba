"""The fast path: from a request that is known to the batch it runs in, and from the doorbell to its answer.

    start    reserve -> fill -> hold -> submit            or False, having left no trace
    _answer  read -> write -> release -> count            or refuse, or fail: the client always hears

The only place where this is done, for every dialect and transport. No task, no future, no object per number,
and nothing is checked again that preparing the request has found out. What raises on the way in gives the
rows back; what raises on the way out is told to the client, and the rows go back too.
"""

from __future__ import annotations

from functools import partial
from time import monotonic_ns
from typing import Any, Protocol

from fastserve.engine import BatchQueue, Pending, Reservation, read_response
from fastserve.errors import ServeError
from fastserve.metrics.traffic import Traffic
from fastserve.repository.version import Version
from fastserve.serving.exchange import Exchange
from fastserve.serving.prepared import Held, PreparedRequest


class Outcome(Protocol):
    """What a dialect does when a request has ended, beside what is counted for all of them."""

    def answered(self, prepared: Any, took_ns: int) -> None:
        """It was answered well."""

    def refused(self, exchange: Any, prepared: Any, request_id: Any, fault: ServeError) -> None:
        """Tell the client what is wrong, in the dialect's words, and count it."""


class FastPath:
    """That of one version. `patience_ns`: how long a batch may wait for more calls of a busy loop."""

    def __init__(
        self, version: Version, queue: BatchQueue, traffic: Traffic, outcome: Outcome, patience_ns: int = 0
    ) -> None:
        self.version, self.queue = version, queue
        self._outcome, self._patience_ns = outcome, patience_ns
        self._requests, self._duration = traffic.succeeded(version.model, version.number)
        self._decode, self._encode = traffic.stages(version.model, version.number)

    def start(
        self,
        exchange: Exchange,
        prepared: PreparedRequest,
        source: Any,
        request_id: Any = None,
        deadline_ns: int = 0,
    ) -> bool:
        """Take the request, or return False: nothing has happened then; the general path finds the words."""
        reserved = self._fill(prepared, source, request_id)
        if reserved is None:
            return False
        held = None
        if prepared.outside:
            try:
                held = prepared.hold()
            except BaseException as error:
                prepared.layout_in.abandon(reserved, prepared.rows)
                if isinstance(error, ServeError):
                    return False
                raise
        self._submit(exchange, prepared, reserved, request_id, held, deadline_ns)
        return True

    def _fill(self, prepared: PreparedRequest, source: Any, request_id: Any) -> Reservation | None:
        """A place with the inputs written; None when there is none, or they cannot be."""
        layout, rows = prepared.layout_in, prepared.rows
        reserved = layout.reserve(rows, prepared.note(request_id)) if prepared.noted else layout.reserve(rows)
        if reserved is None:
            return None
        try:
            if prepared.fill(source, reserved[1]):
                return reserved
        except ServeError:  # of client memory
            pass
        except BaseException:
            layout.abandon(reserved, rows)
            raise
        layout.abandon(reserved, rows)
        return None

    def _submit(
        self,
        exchange: Exchange,
        prepared: PreparedRequest,
        reserved: Reservation,
        request_id: Any,
        held: Held | None,
        deadline_ns: int,
    ) -> None:
        """Let it run; gives back what was reserved and held when that fails."""
        self._decode.observe_ns(monotonic_ns() - exchange.received_ns)
        layout, rows = prepared.layout_in, prepared.rows
        context = exchange, prepared, request_id, held
        try:
            if reserved[2][0]:
                layout.settle(reserved)
            pending = self.queue.submit(
                reserved[0], rows, self._answer, deadline_ns, context, self._patience_ns
            )
        except BaseException:
            layout.abandon(reserved, rows)
            if held is not None:
                held.close()
            raise
        exchange.on_gone = pending if held is None else partial(_leave, pending, held)

    def _answer(self, pending: Pending, error: ServeError | None) -> None:
        exchange, prepared, request_id, held = pending.context
        exchange.on_gone = None  # and with it the circle exchange -> pending -> exchange
        try:
            if error is not None:
                raise error
            try:
                self._reply(exchange, prepared, pending, request_id, held)
            finally:
                self.queue.release(pending)
        except ServeError as fault:
            self._outcome.refused(exchange, prepared, request_id, fault)
        except Exception as fault:
            exchange.fail(fault)
        finally:
            del error  # its traceback holds this frame, and the frame what the request brought
            if held is not None:
                held.close()

    def _reply(
        self, exchange: Exchange, prepared: PreparedRequest, pending: Pending, request_id: Any, held: Any
    ) -> None:
        began_ns = monotonic_ns()
        found = prepared.layout_out.read(pending.place, pending.rows)
        writer = None if found is None else prepared.writers.get(found[0]) or prepared.add_writer(found[0])
        if (
            found is None or writer is None
        ):  # strings, outputs nobody declared, parameters, one request's error
            response = read_response(self.queue, pending, prepared.wanted)
            prepared.write_response(exchange, response, request_id, held)
        else:
            prepared.write(exchange, writer, found[1], request_id, held)
        self._count(exchange, prepared, began_ns)

    def _count(self, exchange: Exchange, prepared: PreparedRequest, began_ns: int) -> None:
        now_ns = monotonic_ns()
        took_ns = now_ns - exchange.received_ns
        self._encode.observe_ns(now_ns - began_ns)
        self._requests.add()
        self._duration.observe_ns(took_ns)
        self._outcome.answered(prepared, took_ns)


def _leave(pending: Pending, held: Held) -> None:
    """The client is gone."""
    pending()
    held.close()
