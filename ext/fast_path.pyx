"""The moving parts of the fast path and of the queue it goes through: what runs for each request, and no more.

    Lifecycle.start   reserve -> fill -> hold -> submit          or False, having left no trace
    TicketTable.finish   answered? -> Lifecycle.answer: read -> write -> release -> count, or refuse, or fail

The classes are bases: fastserve/serving/fast_path.py and engine/batch_queue.py say the rest, which seldom runs.
What was two dozen Python frames a request is C between the calls to the ring, the prepared request and the exchange;
see docs/decisions/0013.
"""

from contextvars import ContextVar

from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport int64_t, uint32_t, uint64_t

from starting cimport STARTING_CAPSULE, Starting

from fastserve._ext.shared_metrics import Counter


cdef extern from "arena.h" nogil:
    uint64_t monotonic_ns()


cdef extern from "shared_metrics.h" nogil:
    const char *METRIC_VALUES
    ctypedef struct MetricValues:
        uint64_t *slots
    void metric_add(uint64_t *, uint64_t)
    void metric_observe_ns(const MetricValues *, int64_t)


cdef tuple NO_SLAB = (0, 0)
# Deadlines are looked at when the first may have passed, and no sooner than this after the last look.
cdef int64_t TICK_NS = 25_000_000
DEADLINE_TICK_NS = TICK_NS
# How long a queue takes several accounts for active after two of them have sent rows one after the other.
cdef int64_t MIXED_NS = 30_000_000_000
ACCOUNTS_MIXED_NS = MIXED_NS


ACCOUNT = ContextVar("account", default=None)
"""The Account of the request that the running task works on, or None."""


cdef class Account:
    """The use of one client in this front process, since it was last added to counters. A subclass has `charge_rows`
    and `has_rows`, which are called where `charged`, and `board`, the numbers that fronts share."""

    cdef public int64_t rows            # that were given to batches
    cdef public double compute_ns       # of those that have run: the batch's, by its rows
    cdef public bint charged            # rows count against a limit
    cdef public double weight           # under overload
    cdef public object board

    def __cinit__(self, *args, **kwargs):
        self.weight = 1.0

    def check_rows(self) -> None:
        """Raise where the rows so far are over a limit: a subclass does."""


cdef Starting starting
starting.exchange = starting.account = NULL
_STARTING = PyCapsule_New(&starting, STARTING_CAPSULE, NULL)


cdef const MetricValues *lent(instrument) except NULL:
    return <const MetricValues *>PyCapsule_GetPointer(instrument.lend(), METRIC_VALUES)


cdef class CountedEndpoint:
    """An endpoint whose calls are those of `account`; `counter` counts each, before it."""

    cdef readonly object endpoint, counter
    cdef readonly Account account
    cdef const MetricValues *counted        # the counter's, where it is a Counter

    def __init__(self, Account account not None, counter, endpoint) -> None:
        self.account, self.counter, self.endpoint = account, counter, endpoint
        self.counted = lent(counter) if isinstance(counter, Counter) else NULL

    def __call__(self, *args):      # the call: this tuple is the endpoint's, too
        global starting
        cdef Starting before = starting
        (call,) = args
        if self.counted != NULL:
            metric_add(self.counted.slots, 1)
        else:
            self.counter.add()
        starting.exchange, starting.account = <PyObject*>call, <PyObject*>self.account
        try:
            return self.endpoint(*args)
        finally:
            starting = before


cdef class SampleCountdown:
    """Requests up to the next one that is traced, itself included."""

    cdef public int64_t left


def sample_endpoint(SampleCountdown countdown not None, endpoint, turn):
    """Return the endpoint for calls without a parent: it counts them down, and `turn` gets the one whose turn has come."""
    def sampled(call):
        countdown.left -= 1
        return endpoint(call) if countdown.left > 0 else turn(call)
    return sampled


def sample_start(SampleCountdown countdown not None, start, turn):
    """Return `start` of a method of gRPC, for calls without a parent. What it leaves to `run` is counted there."""
    def sampled(message, rpc):
        if countdown.left <= 1:
            return turn(message, rpc)
        if not start(message, rpc):
            return False
        countdown.left -= 1
        return True
    return sampled


cdef class FastSpan:
    """A traced request while the fast path has it: in `traced` until then, by its exchange. `span` is the RequestSpan
    (util/spans.py), and `end(exchange, span, error)` is called once."""

    cdef readonly object span
    cdef object exchange, end, leave, batch_ended, run
    cdef dict traced
    cdef int64_t answered_ns

    def __init__(self, span, exchange, end, dict traced not None) -> None:
        self.span, self.exchange, self.end, self.traced = span, exchange, end, traced
        traced[exchange] = self

    @property
    def under_way(self) -> bool:
        """Whether the fast path has taken the request."""
        return self.leave is not None

    cdef submitted(self, Lifecycle path, lease, rows):
        """The rows are in a batch, which no worker sees yet."""
        version = path.version
        self.run = self.span.begin_run(version.model, version.number)
        if self.run is not None:
            self.batch_ended = path.queue.trace_lease(self.run, lease, rows)

    cdef leaving(self, on_gone):
        """Return a replacement of `on_gone`, for when the client leaves."""
        self.leave = on_gone
        return self.gone

    cdef answered(self):
        """The batch has ended, and its slot is still held."""
        self.answered_ns = <int64_t>monotonic_ns()
        if self.batch_ended is not None:
            self.batch_ended()

    cpdef ended(self, exchange, error):
        """The request was answered, by the batch or from a cache."""
        if self.traced.pop(exchange, None) is None:
            return
        span, run = self.span, self.run
        children = <list?>span.children
        if run is not None:
            run.ended_ns = self.answered_ns
            children.append(("decode", span.started_ns, run.begun_ns, {}, ()))
            if error is not None:
                run.fail(error)
        if error is None:
            children.append(("encode", self.answered_ns, <int64_t>monotonic_ns(), {}, ()))
        self.end(exchange, span, error)

    def gone(self) -> None:
        leave, exchange = self.leave, self.exchange
        if leave is not None:
            leave()
        from asyncio import CancelledError
        self.ended(exchange, CancelledError())


cdef class Ticket:
    """One lease somebody waits for; `context` is the submitter's own. Calling it cancels it.

    `done` is None once it was called, or cancelled.
    """

    cdef readonly object queue
    cdef readonly int64_t lease, deadline_ns
    cdef readonly int64_t submitted_ns          # CLOCK_MONOTONIC; 0 of what no Lifecycle has submitted
    cdef readonly uint32_t rows
    cdef public object done, context
    cdef readonly Account account               # whose it is, where somebody counts

    def __call__(self) -> None:
        self.queue.cancel(self)


cdef class TicketTable:
    """The requests that wait for answers, by slot. A subclass has `ring`, `room`, `metrics`, and methods for the turns of
    its loop: wake_soon, watch, settle, failure, own_fault, undelivered, look_around."""

    cdef public object ring, room
    cdef public object metrics                  # BatchMetrics
    cdef public int64_t submitted               # so far
    cdef public int64_t waiting                 # submitted, and not yet answered or cancelled
    cdef public int64_t unreleased              # answers handed out whose memory is still read
    cdef public list by_slot                    # of Ticket
    cdef public list seqs                       # which opening of the slot they are in
    cdef public object wake_handle                  # the handle of what will wake the workers
    cdef public int64_t alarm_ns                # when deadlines are looked at; 0: nobody looks
    cdef public int64_t due_ns                  # no deadline is before it; 0 while nobody has one
    cdef public list idle                       # futures of who waits until nobody waits
    cdef public Account newest                  # whose rows came last
    cdef public int64_t mixed_ns                # when an account came that was not the one before; 0: never
    cdef public int64_t look_ns                 # when `look_around` is due: whether several accounts send requests
    cdef int64_t clock_ns                       # of the request that is being submitted; 0: nobody has looked

    def __init__(self, ring, slots: int, metrics) -> None:
        self.ring, self.metrics, self.room, self.wake_handle = ring, metrics, None, None
        self.by_slot, self.seqs, self.idle = [[] for _ in range(slots)], [0] * slots, []

    def submit(self, int64_t lease, uint32_t rows, done, int64_t deadline_ns=0, context=None, Account account=None):
        """The lease's inputs are written: let it run, for `account`. Workers are woken at the end of this loop turn,
        so that what arrives together runs together."""
        cdef Ticket ticket = Ticket.__new__(Ticket)
        cdef Py_ssize_t slot = <Py_ssize_t>(lease >> 16)
        ticket.queue, ticket.lease, ticket.rows, ticket.deadline_ns = self, lease, rows, deadline_ns
        ticket.done, ticket.context, ticket.account = done, context, account
        cdef list waiting_here = <list?>self.by_slot[slot]
        if not waiting_here:
            self.seqs[slot] = self.ring.seq(slot)
        waiting_here.append(ticket)
        try:
            self.ring.commit(lease, rows)
        except BaseException:
            waiting_here.remove(ticket)
            raise
        self.waiting += 1
        self.submitted += 1
        if account is not None:
            self.note(account, rows)
        if self.wake_handle is None:
            self.wake_soon()
        if deadline_ns:
            self.due_ns = min(deadline_ns, self.due_ns) if self.due_ns else deadline_ns
            if not self.alarm_ns or deadline_ns + TICK_NS < self.alarm_ns:
                self.watch()
        return ticket

    cdef note(self, Account account, uint32_t rows):
        """Rows of an account are in a batch."""
        cdef int64_t now_ns = self.clock_ns if self.clock_ns else <int64_t>monotonic_ns()
        self.clock_ns = 0
        account.rows += rows
        if account.charged:
            account.charge_rows(rows)
        if account is not self.newest:
            if self.newest is not None:
                if now_ns - self.mixed_ns > MIXED_NS:
                    self.look_ns = 0
                self.mixed_ns = now_ns
            self.newest = account
        if now_ns >= self.look_ns:
            self.look_around(account, now_ns)

    def release(self, Ticket ticket not None) -> None:
        """The outputs of an answered ticket have been read."""
        self.ring.release(ticket.lease, ticket.rows)
        self.unreleased -= 1
        if self.idle or self.room.anyone:
            self.settle()

    def finish(self, Py_ssize_t slot) -> None:
        """The slot's batch is done: answer every ticket that waits for it, exactly once."""
        cdef list waiting_here = <list?>self.by_slot[slot]
        cdef Ticket ticket
        cdef double row_ns = -1
        self.by_slot[slot] = []
        ended = <tuple?>self.ring.ended(slot)
        self.metrics.record(ended)
        failed = self.ring.failure(slot)
        error = None if failed is None else self.failure(failed)
        self.unreleased += len(waiting_here)
        for ticket in waiting_here:
            if ticket.account is not None:
                if row_ns < 0:
                    row_ns = ended[4]
                ticket.account.compute_ns += row_ns * ticket.rows
            done, fault = ticket.done, error
            ticket.done = None
            if fault is None:
                end = self.ring.answered(ticket.lease, ticket.rows)
                if end != 1:
                    fault = self.own_fault(ticket.lease, end)
            if fault is not None or done is None:
                self.release(ticket)
            if done is not None:
                self.deliver(done, ticket, fault)
        if self.idle or self.room.anyone:
            self.settle()

    def deliver(self, done, Ticket ticket not None, error) -> None:
        """Nobody's fault may cost the others of the batch their answers."""
        self.waiting -= 1
        try:
            if isinstance(done, Lifecycle):
                (<Lifecycle>done).answer(ticket, error)
            else:
                done(ticket, error)
        except Exception:
            self.undelivered()


cdef class Lifecycle:
    """One version's requests from start to end. `refusals`: the exceptions that a client may read. A subclass has
    `respond`, for answers without a writer, `answer_later`, for large ones, `refuse`, and `failed`, for what nobody foresaw;
    with `replies`, `reply` too."""

    cdef readonly object queue
    cdef object refusals, answered
    cdef tuple metrics                  # whose numbers these are:
    cdef const MetricValues *counted
    cdef const MetricValues *duration
    cdef const MetricValues *decode
    cdef const MetricValues *encode
    cdef bint replies
    cdef public bint accounted          # requests have accounts: those of their heads
    cdef Account account                # of the request that is being started, where `starting` does not say it
    cdef dict traced

    def __init__(self, queue, refusals: type, metrics: tuple, answered, dict traced not None, bint replies=False) -> None:
        """`metrics`: the Counter of requests, and the Histograms of how long each, its reading and its writing took;
        `answered` is called with the prepared request, how long it took, and how long it waited for its batch
        and ran; None: nobody wants to know. `traced` has the exchanges that are traced now, mostly none, and their
        FastSpans."""
        self.queue, self.refusals, self.replies, self.traced = queue, refusals, replies, traced
        self.metrics = metrics
        counted, duration, decode, encode = metrics
        self.counted, self.duration, self.decode, self.encode = lent(counted), lent(duration), lent(decode), lent(encode)
        self.answered = answered

    def start(self, exchange, prepared, source, request_id=None, int64_t deadline_ns=0) -> bool:
        """Take the request, or return False: nothing has happened then; the general path finds the words. Once its
        inputs are in their place it is taken, whatever follows."""
        try:
            if self.accounted and starting.exchange != <PyObject*>exchange and not self.find_account(exchange):
                return False
            reserved = self.fill(prepared, source, request_id)
            if reserved is None:
                return False
            held = None
            if prepared.outside:
                try:
                    held = prepared.hold()
                except BaseException:
                    prepared.layout_in.abandon(reserved, prepared.rows)
                    raise
        except self.refusals:
            return False
        except Exception as fault:
            self.failed(exchange, prepared, request_id, fault)
            return True
        try:
            try:
                self.submit(exchange, prepared, reserved, request_id, held, deadline_ns)
            except self.refusals as fault:  # told here: the source may be one that is read but once
                self.refuse(exchange, prepared, request_id, fault)
        except Exception as fault:
            self.failed(exchange, prepared, request_id, fault)
        return True

    def decoded(self, exchange) -> None:
        """Observe how long the reading of a request took that is not submitted."""
        metric_observe_ns(self.decode, <int64_t>monotonic_ns() - <int64_t>exchange.received_ns)

    def admits(self, exchange) -> bool:
        """Whether the account of a request has room for its rows. `submit` follows, for that account."""
        return starting.exchange == <PyObject*>exchange or self.find_account(exchange)

    cdef bint find_account(self, exchange) except -1:
        """Find the account of a request: its head's, or that of the stream it came in, whose rows nobody has asked for."""
        head = getattr(exchange, "head", None)
        if head is not None:
            self.account = head.usage
            return True
        self.account = ACCOUNT.get()
        return self.account is None or not self.account.charged or self.account.has_rows()

    cpdef tuple fill(self, prepared, source, request_id):
        """A lease with the inputs written; None when there is none, or they cannot be."""
        layout, rows = prepared.layout_in, prepared.rows
        reserved = layout.reserve(rows, prepared.note(request_id)) if prepared.noted else layout.reserve(rows)
        if reserved is None:
            return None
        try:
            if prepared.fill(source, (<tuple?>reserved)[1]):
                return <tuple>reserved
        except BaseException:
            layout.abandon(reserved, rows)
            raise
        layout.abandon(reserved, rows)
        return None

    cpdef submit(self, exchange, prepared, tuple reserved, request_id, held, int64_t deadline_ns):
        """Let it run; gives back what was reserved and held when that fails."""
        cdef int64_t received_ns = exchange.received_ns
        cdef int64_t now_ns = <int64_t>monotonic_ns()
        cdef Ticket ticket
        span = self.traced.get(exchange) if self.traced else None
        metric_observe_ns(self.decode, now_ns - received_ns)
        try:
            if (<tuple?>reserved[2])[0]:
                prepared.layout_in.settle(reserved)
            if span is not None:
                (<FastSpan?>span).submitted(self, reserved[0], prepared.rows)
            context = exchange, prepared, request_id, held
            if self.accounted:
                if starting.exchange == <PyObject*>exchange:
                    account = <object>starting.account
                else:
                    account, self.account = self.account, None
                (<TicketTable?>self.queue).clock_ns = 0 if account is None else now_ns
                ticket = self.queue.submit(reserved[0], prepared.rows, self, deadline_ns, context, account)
            else:
                ticket = self.queue.submit(reserved[0], prepared.rows, self, deadline_ns, context)
        except BaseException:
            prepared.layout_in.abandon(reserved, prepared.rows)
            if held is not None:
                held.close()
            raise
        ticket.submitted_ns = now_ns
        exchange.on_gone = ticket if held is None else Leaving(ticket, held)
        if span is not None:
            exchange.on_gone = (<FastSpan>span).leaving(exchange.on_gone)

    cdef answer(self, Ticket ticket, error):
        exchange, prepared, request_id, held = <tuple?>ticket.context
        exchange.on_gone = None     # and with it the circle exchange -> ticket -> exchange
        later = None
        span = self.traced.get(exchange) if self.traced else None
        try:
            if span is not None:
                (<FastSpan?>span).answered()
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
        elif span is not None:
            (<FastSpan?>span).ended(exchange, error)

    cdef write(self, exchange, prepared, Ticket ticket, request_id, held):
        """Write the answer; what is too large for one turn of the loop is a coroutine that does it."""
        cdef uint64_t began_ns = monotonic_ns()
        if self.replies:
            later = self.reply(exchange, prepared, ticket, request_id, held)
        else:
            found = prepared.layout_out.read(ticket.lease, ticket.rows)
            writer = None if found is None else prepared.writers.get((<tuple?>found)[0])
            if writer is None and found is not None:
                writer = prepared.add_writer((<tuple>found)[0])
            if writer is None:      # strings, outputs nobody declared, parameters, one request's error
                later = self.respond(exchange, prepared, ticket, request_id, held)
            else:
                later = prepared.write(exchange, writer, (<tuple>found)[1], request_id, held)
        if later is None:
            self.count(exchange, prepared, began_ns, <int64_t>began_ns - ticket.submitted_ns)
        return later

    cpdef count(self, exchange, prepared, uint64_t began_ns, int64_t ran_ns=0):
        """A request was answered well, whose answer was begun then; `ran_ns` from its being submitted to there."""
        cdef int64_t now_ns = <int64_t>monotonic_ns(), received_ns = exchange.received_ns
        metric_observe_ns(self.encode, now_ns - <int64_t>began_ns)
        metric_add(self.counted.slots, 1)
        metric_observe_ns(self.duration, now_ns - received_ns)
        if self.answered is not None:
            self.answered(prepared, now_ns - received_ns, ran_ns)


cdef class Columns:
    """Rows of fixed size, in columns of a batch. A subclass gives back what was reserved (`abandon`)."""

    cdef readonly object ring
    cdef list columns

    def __init__(self, ring, columns: list) -> None:
        self.ring, self.columns = ring, columns

    def reserve(self, uint32_t rows, bytes note=b""):
        """A lease, memory for its rows in each column, and no slab; None when there is no room."""
        lease = self.ring.reserve(rows)
        if <int64_t>lease < 0:
            return None
        try:
            return lease, [self.ring.input_rows(lease, rows, column) for column in self.columns], NO_SLAB
        except BaseException:       # no memory for a view: rows that nobody gives back would stop the batch
            self.abandon((lease, (), NO_SLAB), rows)
            raise

    def read(self, lease, uint32_t rows):
        """The rows, which are all that tells one answer from another, and views of the outputs."""
        return rows, [self.ring.output_rows(lease, rows, column) for column in self.columns]


cdef class Leaving:
    """What a client does that leaves while something is held for it."""

    cdef Ticket ticket
    cdef object held

    def __cinit__(self, Ticket ticket not None, held):
        self.ticket, self.held = ticket, held

    def __call__(self) -> None:
        self.ticket.queue.cancel(self.ticket)
        self.held.close()
