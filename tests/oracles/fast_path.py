"""The fast path's moving parts in plain Python: what _ext.fast_path has to do, in that order."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

DEADLINE_TICK_NS = 25_000_000


class Account:
    rows = 0
    compute_ns = 0.0
    charged = False


class SampleCountdown:
    left = 0


def sample_endpoint(countdown: Any, endpoint: Any, turn: Any) -> Any:
    def sampled(call: Any) -> Any:
        countdown.left -= 1
        return endpoint(call) if countdown.left > 0 else turn(call)

    return sampled


def sample_start(countdown: Any, start: Any, turn: Any) -> Any:
    def sampled(message: bytes, rpc: Any) -> Any:
        if countdown.left <= 1:
            return turn(message, rpc)
        taken = start(message, rpc)
        countdown.left -= taken
        return taken

    return sampled


class Ticket:
    def __init__(
        self, queue: Any, lease: int, rows: int, done: Any, deadline_ns: int, context: Any, account: Any
    ) -> None:
        self.queue, self.lease, self.rows, self.done = queue, lease, rows, done
        self.deadline_ns, self.context = deadline_ns, context
        self.submitted_ns, self.account = 0, account

    def __call__(self) -> None:
        self.queue.cancel(self)


class TicketTable:
    def __init__(self, ring: Any, slots: int, metrics: Any) -> None:
        self.ring, self.metrics, self.room, self.wake_handle = ring, metrics, None, None
        self.by_slot: list[list[Ticket]] = [[] for _ in range(slots)]
        self.seqs, self.idle = [0] * slots, []
        self.submitted = self.waiting = self.unreleased = 0
        self.alarm_ns = self.due_ns = self.mixed_ns = self.look_ns = 0
        self.newest: Any = None

    def submit(
        self,
        lease: int,
        rows: int,
        done: Any,
        deadline_ns: int = 0,
        context: Any = None,
        account: Any = None,
    ) -> Ticket:
        ticket = Ticket(self, lease, rows, done, deadline_ns, context, account)
        if not self.by_slot[lease >> 16]:
            self.seqs[lease >> 16] = self.ring.seq(lease >> 16)
        self.ring.commit(lease, rows)
        self.by_slot[lease >> 16].append(ticket)
        self.waiting += 1
        self.submitted += 1
        if account is not None:
            self._note(account, rows)
        if self.wake_handle is None:
            self.wake_soon()
        if deadline_ns:
            self.due_ns = min(deadline_ns, self.due_ns or deadline_ns)
            if not self.alarm_ns or deadline_ns + DEADLINE_TICK_NS < self.alarm_ns:
                self.watch()
        return ticket

    def _note(self, account: Any, rows: int) -> None:
        now_ns = monotonic_ns()
        account.rows += rows
        if account.charged:
            account.charge_rows(rows)
        if self.newest not in (None, account):
            if now_ns - self.mixed_ns > 30_000_000_000:
                self.look_ns = 0
            self.mixed_ns = now_ns
        self.newest = account
        if now_ns >= self.look_ns:
            self.look_around(account, now_ns)

    def release(self, ticket: Ticket) -> None:
        self.ring.release(ticket.lease, ticket.rows)
        self.unreleased -= 1
        if self.idle or self.room.anyone:
            self.settle()

    def finish(self, slot: int) -> None:
        callers, self.by_slot[slot] = self.by_slot[slot], []
        ended = self.ring.ended(slot)
        self.metrics.record(ended)
        failed = self.ring.failure(slot)
        error = None if failed is None else self.failure(failed)
        self.unreleased += len(callers)
        for ticket in callers:
            if ticket.account is not None:
                ticket.account.compute_ns += ended[4] * ticket.rows
            done, ticket.done = ticket.done, None
            fault = error
            if fault is None and (end := self.ring.answered(ticket.lease, ticket.rows)) != 1:
                fault = self.own_fault(ticket.lease, end)
            if fault is not None or done is None:
                self.release(ticket)
            if done is not None:
                self.deliver(done, ticket, fault)
        if self.idle or self.room.anyone:
            self.settle()

    def deliver(self, done: Any, ticket: Ticket, error: Any) -> None:
        self.waiting -= 1
        try:
            done(ticket, error)
        except Exception:
            self.undelivered()


class Lifecycle:
    def __init__(
        self,
        queue: Any,
        refusals: Any,
        metrics: Any,
        answered: Any,
        traced: Any,
        replies: bool = False,
    ) -> None:
        assert not traced  # spans have tests of their own
        self.queue, self.refusals, self.replies = queue, refusals, replies
        self.counted, self.duration, self.decode, self.encode = metrics
        self.answered, self.accounted = answered, False

    def start(
        self, exchange: Any, prepared: Any, source: Any, request_id: Any = None, deadline_ns: int = 0
    ) -> bool:
        try:
            found = self._fill(prepared, source, request_id)
        except self.refusals:
            return False
        except Exception as fault:
            self.failed(exchange, prepared, request_id, fault)
            return True
        if found is None:
            return False
        try:
            try:
                self._submit(exchange, prepared, *found, request_id, deadline_ns)
            except self.refusals as fault:
                self.refuse(exchange, prepared, request_id, fault)
        except Exception as fault:
            self.failed(exchange, prepared, request_id, fault)
        return True

    def _fill(self, prepared: Any, source: Any, request_id: Any) -> tuple[Any, Any] | None:
        layout, rows = prepared.layout_in, prepared.rows
        reserved = layout.reserve(rows, prepared.note(request_id)) if prepared.noted else layout.reserve(rows)
        if reserved is None:
            return None
        held = None
        try:
            filled = prepared.fill(source, reserved[1])
            if filled and prepared.outside:
                held = prepared.hold()
        except BaseException:
            layout.abandon(reserved, rows)
            raise
        if not filled:
            layout.abandon(reserved, rows)
            return None
        return reserved, held

    def _submit(
        self, exchange: Any, prepared: Any, reserved: Any, held: Any, request_id: Any, deadline_ns: int
    ) -> None:
        layout, rows = prepared.layout_in, prepared.rows
        now_ns = monotonic_ns()
        self.decode.observe_ns(now_ns - exchange.received_ns)
        try:
            if reserved[2][0]:
                layout.settle(reserved)
            context = exchange, prepared, request_id, held
            account = exchange.head.usage if self.accounted else None
            ticket = self.queue.submit(reserved[0], rows, self, deadline_ns, context, account)
        except BaseException:
            layout.abandon(reserved, rows)
            if held is not None:
                held.close()
            raise
        ticket.submitted_ns = now_ns
        exchange.on_gone = ticket if held is None else lambda: (ticket(), held.close())

    def __call__(self, ticket: Ticket, error: Any) -> None:
        exchange, prepared, request_id, held = ticket.context
        exchange.on_gone = None
        later = None
        try:
            if error is None:
                try:
                    try:
                        later = self.write(exchange, prepared, ticket, request_id, held)
                    finally:
                        if later is None:
                            self.queue.release(ticket)
                except self.refusals as fault:
                    error = fault
            if error is not None:
                self.refuse(exchange, prepared, request_id, error)
        except Exception as fault:
            self.failed(exchange, prepared, request_id, fault)
        finally:
            if held is not None and later is None:
                held.close()
        if later is not None:
            self.answer_later(ticket, later)

    def write(self, exchange: Any, prepared: Any, ticket: Ticket, request_id: Any, held: Any) -> Any:
        began_ns = monotonic_ns()
        if self.replies:
            later = self.reply(exchange, prepared, ticket, request_id, held)
        else:
            found = prepared.layout_out.read(ticket.lease, ticket.rows)
            writer = None
            if found is not None:
                writer = prepared.writers.get(found[0]) or prepared.add_writer(found[0])
            if writer is None:
                later = self.respond(exchange, prepared, ticket, request_id, held)
            else:
                later = prepared.write(exchange, writer, found[1], request_id, held)
        if later is not None:
            return later
        now_ns = monotonic_ns()
        self.encode.observe_ns(now_ns - began_ns)
        self.counted.add()
        self.duration.observe_ns(now_ns - exchange.received_ns)
        if self.answered is not None:
            self.answered(prepared, now_ns - exchange.received_ns, began_ns - ticket.submitted_ns)
        return None
