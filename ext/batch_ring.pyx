"""The batch ring: leases for rows in batches that several processes fill and workers run.

    front:   lease = ring.reserve(2)             rows 5 and 6 of slot 0, say
             ring.input_rows(lease, 2, 0)[:] = ...      written in place, no copy later
             ring.commit(lease, 2); ring.wake_workers()
    worker:  slot = ring.take();  ...run...;  ring.publish(slot)
    front:   for slot, seq in ring.drain(): ...ring.output_rows(lease, 2, 0)...; ring.release(lease, 2)

The memory and the state machine are in include/arena.h, slots.h and runs.h, what guards a front in claims.h; this module
only makes them callable. Views are borrowed until the lease is committed (inputs) or released (outputs).
"""

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from os import urandom
from arena_layout cimport lay_out, slab_pages_bytes
from arena_reading cimport *
from slot_verbs cimport *

FULL, OVER = LEASE_FULL, LEASE_OVER
PART, RECORDS = -2, -3
STATES = ("free", "claimed", "open", "sealed", "ready", "running", "done")
TALLIES = ("success", "queue", "compute_input", "compute_infer", "compute_output", "REJECTED", "CANCELED", "BACKEND", "OTHER")
REJECTED, CANCELED, BACKEND, OTHER = 5, 6, 7, 8     # ends without an answer
EVENTS = ("claim", "open", "reserve", "settle", "seal", "close", "take", "return", "publish", "release", "leave")


def moves() -> dict[tuple[str, str], frozenset[str]]:
    """The state machine of a slot: (state, event) -> states it may lead to. What the C table says."""
    return read_moves(STATES, EVENTS)


def measure(*, int slots, int max_rows, inputs=(), outputs=(), int workers=1, int fronts=1, int slab_pages=0) -> int:
    """Bytes of an arena: `inputs` and `outputs` are the row bytes of each column."""
    cdef ArenaHeader header
    lay_out(&header, slots, max_rows, inputs, outputs, workers, fronts)
    return header.slabs_offset + slab_pages_bytes(slab_pages)


def format_arena(uint8_t[::1] memory not None, *, int slots, int max_rows, inputs=(), outputs=(), int workers=1,
                 int fronts=1, int slab_pages=0, uint64_t max_delay_ns=0, uint32_t max_queued=0) -> None:
    """Lay an empty ring out in zeroed `memory` of at least measure(...) bytes."""
    cdef ArenaHeader header
    lay_out(&header, slots, max_rows, inputs, outputs, workers, fronts)
    if <uint64_t>memory.shape[0] < header.slabs_offset + slab_pages_bytes(slab_pages):
        raise ValueError(f"the arena needs {header.slabs_offset + slab_pages_bytes(slab_pages)} bytes, got {memory.shape[0]}")
    header.max_delay_ns, header.max_queued = max_delay_ns, max_queued
    memcpy(&memory[0], &header, sizeof(ArenaHeader))
    arena_format(<ArenaHeader*>&memory[0], slab_pages)


cdef class BatchRing:
    """One process's view of an arena, as front number `front` or as worker number `worker`."""

    cdef Arena arena
    cdef object memory                  # holds the buffer: nobody unmaps it under the ring
    cdef readonly int front, worker, inputs, outputs
    cdef uint32_t owner                 # of slabs: us
    cdef readonly uint32_t slots, max_rows
    cdef int own_doorbell, control
    cdef int[MAX_WORKERS] worker_doorbells
    cdef int[MAX_FRONTS] front_doorbells
    cdef bint wake_due                      # rows were settled since the last wake_workers()
    cdef public bint line               # others wait for a slot: who comes now goes behind them
    cdef public int64_t ahead           # rows that may wait in slots beside a batch for every worker; -1: any number
    cdef Claims claims                  # what shared memory cannot tell; in lent memory tests can turn it back
    cdef object lent_claims
    cdef uint64_t turn_ns               # since when rows committed in this turn of the loop wait

    def __init__(self, uint8_t[::1] memory not None, *, int front=-1, int worker=-1, int own_doorbell=-1,
                 worker_doorbells=(), front_doorbells=(), int control=-1, uint64_t[::1] claims=None):
        cdef int i
        if not arena_attach(&self.arena, &memory[0], memory.shape[0]):
            raise ValueError("this memory holds no arena of this version")
        if front >= <int>self.arena.fronts or worker >= <int>self.arena.workers:
            raise ValueError("no such front or worker in this arena")
        self.lent_claims = None if claims is None else claims.base
        if not claims_open(&self.arena, &self.claims, <uint64_t*>NULL if claims is None else &claims[0], int.from_bytes(urandom(8), "little")):
            raise MemoryError
        self.memory, self.front, self.worker, self.own_doorbell, self.control = memory, front, worker, own_doorbell, control
        self.slots, self.max_rows, self.arena.front = self.arena.slots, self.arena.max_rows, max(front, 0)
        self.ahead = -1
        self.inputs, self.outputs = self.arena.inputs, self.arena.outputs
        self.owner = self.arena.owner = worker_owner(&self.arena, worker) if worker >= 0 else 1 + front
        for i in range(MAX_WORKERS):
            self.worker_doorbells[i] = worker_doorbells[i] if i < len(worker_doorbells) else -1
        for i in range(MAX_FRONTS):
            self.front_doorbells[i] = front_doorbells[i] if i < len(front_doorbells) else -1

    def __dealloc__(self):
        if self.lent_claims is None:
            free(self.claims.held)

    # --- fronts ---------------------------------------------------------------------------------

    def reserve(self, uint32_t rows, bint first=False) -> int:
        """A lease for 1..max_rows rows; FULL without a free slot or behind others (unless `first` of them), OVER: too many wait."""
        if rows < 1 or rows > self.max_rows:
            raise ValueError(f"a place has 1..{self.max_rows} rows, not {rows}")
        cdef bint behind = not first and (self.line or (self.ahead >= 0 and lines_stand(&self.arena)))
        if self.ahead >= 0 and not behind and not first:
            behind = not rows_near(&self.arena, rows, <uint32_t>self.ahead)
        cdef int64_t lease = FULL if behind else lease_reserve(&self.arena, rows, self.front)
        if lease >= 0 and not claim_rows(&self.arena, &self.claims, lease, rows):
            claim_refuse(&self.arena, lease, rows)      # a worker has freed rows that we hold: not these, then
            lease = FULL
        if self.arena.ready:    # a batch these rows did not fit in: wake_workers() may not be called
            self.notify()
        return lease

    def near(self, uint32_t rows, uint32_t spare=0) -> bool:
        """Whether so many rows more may be reserved under `ahead` and `spare` more."""
        return self.ahead < 0 or rows_near(&self.arena, rows, <uint32_t>self.ahead + spare)

    def set_lined(self, bint lined) -> None:
        """Tell all fronts whether requests wait in lines of this one."""
        flag_exchange(&self.arena.header.front[self.front].lined, lined)

    def nudge(self, int front) -> None:
        """Ring the doorbell of another front: it looks at its lines."""
        if 0 <= front < MAX_FRONTS and self.front_doorbells[front] >= 0:
            doorbell_ring(self.front_doorbells[front])

    def commit(self, int64_t lease, uint32_t rows) -> None:
        """The rows are written; wake_workers() when no more are coming right now."""
        self.check(lease, rows)
        if self.turn_ns == 0:       # one look at the clock a turn, and the batch's own where it has just looked
            self.turn_ns = monotonic_ns() if lease & 0xffff else slot_at(&self.arena, <uint32_t>(lease >> 16)).first_ns
        lease_commit(&self.arena, lease, rows, self.turn_ns, claim_of(&self.arena, &self.claims, lease))
        self.wake_due = True

    def backdate(self, int64_t lease, uint64_t queued_ns) -> None:
        """The request of a committed lease has waited since then, in a queue before this one; 0: it is no request."""
        self.check(lease, 1)
        claim_row(&self.arena, lease).queued_ns = queued_ns

    def abandon(self, int64_t lease, uint32_t rows) -> None:
        """The rows will not be written, or not run; a slab of theirs is given back."""
        self.check(lease, rows)
        claim_row(&self.arena, lease).tag = claim_of(&self.arena, &self.claims, lease)
        claim_end(&self.arena, &self.claims, lease, 0)
        lease_give_back(&self.arena, lease, rows)
        self.wake_due = True

    def drop(self, int64_t lease, uint32_t rows, uint32_t end=0) -> bool:
        """Nobody waits for these rows any more. True: it is counted as `end`, if any; forget the lease. False: release it when its batch is done."""
        self.check(lease, rows)
        cdef uint64_t queued_ns = claim_row(&self.arena, lease).queued_ns
        if claim_stands(&self.arena, &self.claims, lease) and not lease_drop(&self.arena, lease, rows):
            return False
        if end:
            self.count(end, since_ns(queued_ns, monotonic_ns()))
        claim_end(&self.arena, &self.claims, lease, LEFT)
        return True

    def release(self, int64_t lease, uint32_t rows) -> None:
        """The outputs have been read. Slabs of the lease are released with it."""
        self.check(lease, rows)
        if claim_stands(&self.arena, &self.claims, lease):
            lease_release(&self.arena, lease, rows)
        claim_end(&self.arena, &self.claims, lease, 0)

    def seal(self, int64_t lease) -> None:
        """Close the lease's batch to further rows, whatever the delay."""
        self.check(lease, 1)
        slot_seal(&self.arena, <uint32_t>(lease >> 16))
        self.notify()

    def wake_workers(self) -> None:
        """Wake sleeping workers if something was settled since the last call. Once per loop turn."""
        if self.wake_due:
            self.wake_due, self.turn_ns = False, 0
            self.notify()

    cdef void notify(self) noexcept nogil:
        notify_workers(&self.arena, self.worker_doorbells)

    def wake_all_workers(self) -> None:
        """Every worker looks for work and at its control socket."""
        notify_all_workers(&self.arena, self.worker_doorbells)

    def drain(self) -> list:
        """Slots done since the last call, as (slot, seq). (-1, 0) asks to look at every lease still waited for;
        (PART, (slot, seq, row, slab offset, bytes, final)) is one part of an answer to a lease of ours, and so is its slab;
        (RECORDS, (slab offset, bytes)) are tokens for a TokenReader, who gives the slab back."""
        cdef uint32_t w
        cdef FrontFlags* flags = &self.arena.header.front[self.front]
        found = []
        doorbell_clear(self.own_doorbell)
        flag_exchange(&flags.rung, 0)
        for w in range(self.arena.workers):
            read_ring(&self.arena, &self.claims, w, self.owner, ring_of(&self.arena, w, self.front), found)
        if flag_exchange(&flags.rescan, 0):
            found.append((-1, 0))
        return found

    def count_part(self, int64_t lease) -> None:
        """One more part of a lease still waited for has been read: its worker may send another."""
        self.check(lease, 1)
        cdef Row* row = claim_row(&self.arena, lease)
        flag_exchange(&row.parts_read, row.parts_read + 1)

    def is_done(self, uint32_t slot, uint64_t seq) -> bool:
        """Whether that opening of the slot has been published."""
        return self.slot(slot).seq == seq and word_state(load64(&slot_at(&self.arena, slot).word)) == SLOT_DONE

    def answered(self, int64_t lease, uint32_t rows) -> int:
        """1 when the outputs of a lease whose batch is done are its own, 2 when it failed by itself, 0 when shared memory was damaged."""
        self.check(lease, rows)
        return claim_answered(&self.arena, &self.claims, lease, rows) * (2 if claim_row(&self.arena, lease).status else 1)

    def failure(self, uint32_t slot) -> tuple | None:
        """(kind, text) when the whole batch failed, else None."""
        cdef Slot* s = self.slot(slot)
        if s.status == 0:
            return None
        return s.status, s.error[:min(s.error_bytes, <uint32_t>ERROR_BYTES)].decode("utf-8", "replace")

    def lease_status(self, int64_t lease) -> int:
        """0, or the kind of this lease's own failure; its text is then in its output slab."""
        self.check(lease, 1)
        return claim_row(&self.arena, lease).status

    def times_ns(self, uint32_t slot) -> tuple:
        """(first row reserved, taken, run started, run ended, done), CLOCK_MONOTONIC."""
        cdef Slot* s = self.slot(slot)
        cdef uint64_t now = monotonic_ns()      # nothing a worker wrote there lies in the future
        return min(s.first_ns, now), min(s.taken_ns, now), min(s.run_ns, now), min(s.ran_ns, now), min(s.done_ns, now)

    def ended(self, uint32_t slot) -> tuple:
        """(rows, rows settled, done, how long a worker had it, how long the backend worked on each row, stages) of a published
        batch, for BatchMetrics. Stages: how long it waited for a worker (-1: not known), formed, was gathered, run, and written;
        None where another front has recorded them."""
        cdef Slot* s = self.slot(slot)
        cdef uint64_t word = load64(&s.word), now = monotonic_ns()     # nothing a worker wrote there lies in the future
        cdef int64_t first = min(s.first_ns, now), taken = min(s.taken_ns, now), done = min(s.done_ns, now)
        cdef int64_t run = min(s.run_ns, now), ran = min(s.ran_ns, now)
        cdef uint32_t rows = word_reserved(word)
        run, ran = run if run else taken, ran if ran else done
        cdef double row_ns = <double>max(ran - run, 0) / (rows if rows else 1) if run else 0.0
        stages = None
        if slot_count_once(s):
            ran = max(ran, run)
            stages = (max(taken - first, 0) if first else -1, slot_formed_ns(s) if first else 0,
                      max(run - taken, 0), ran - run, max(done - ran, 0))
        return rows, word_settled(word), done, max(done - taken, 0), row_ns, stages

    def seq(self, uint32_t slot) -> int:
        """The number of the slot's present opening."""
        return self.slot(slot).seq

    def input_rows(self, int64_t lease, uint32_t rows, int column):
        """Writable bytes of the lease's rows in an input column."""
        return self.view(lease, rows, self.arena.input_offset[self.column(column, self.inputs)], self.arena.input_row_bytes[column], PyBUF_WRITE)

    def output_rows(self, int64_t lease, uint32_t rows, int column):
        """Bytes of the lease's rows in an output column."""
        return self.view(lease, rows, self.arena.output_offset[self.column(column, self.outputs)], self.arena.output_row_bytes[column], PyBUF_READ)

    cdef object view(self, int64_t lease, uint32_t rows, uint64_t at, uint64_t row_bytes, int flags):
        self.check(lease, rows)
        cdef char* start = <char*>slot_at(&self.arena, <uint32_t>(lease >> 16)) + at + (lease & 0xffff) * row_bytes
        return PyMemoryView_FromMemory(start, rows * row_bytes, flags)

    cdef inline int column(self, int column, int count) except -1:
        if not 0 <= column < count:
            raise IndexError(f"column {column} of {count}")
        return column

    cdef inline int check(self, int64_t lease, uint32_t rows) except -1:
        if lease < 0 or (lease >> 16) >= self.slots or (lease & 0xffff) + rows > self.max_rows:
            raise IndexError(f"no place {lease} of {rows} rows")
        return 0

    cdef inline Slot* slot(self, uint32_t slot) except NULL:
        if slot >= self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return slot_at(&self.arena, slot)

    # --- workers --------------------------------------------------------------------------------

    def take(self) -> int:
        """A batch to run, or -1; never waits."""
        cdef uint64_t due
        cdef int64_t slot = slot_take(&self.arena, self.worker, &due)
        return self.mark_taken(<uint32_t>slot) if slot >= 0 else -1

    def take_or_wait(self, int64_t spin_ns=0, int64_t longest_ns=-1) -> int:
        """A batch to run; or -1 after a doorbell or `longest_ns`, -2 when the control socket has something to say."""
        cdef int64_t slot
        cdef int why = 0
        with nogil:
            slot = take_or_wait(&self.arena, self.worker, self.own_doorbell, self.control, spin_ns, longest_ns, &why)
        return self.mark_taken(<uint32_t>slot) if slot >= 0 else -2 if why & 2 else -1

    cdef int64_t mark_taken(self, uint32_t slot):
        cdef Slot* s = slot_at(&self.arena, slot)
        claims_ran(&self.arena, &self.claims, slot)[0] = slot_see(&self.arena, s)
        s.attempts += 1
        s.taken_ns = monotonic_ns()
        s.status = 0
        self.arena.header.worker[self.worker].batches += 1
        return slot

    def batch_rows(self, uint32_t slot) -> int:
        """Rows of a batch when this worker took it, those nobody waits for included."""
        cdef uint64_t w = load64(&self.slot(slot).word)
        return min(word_reserved(w), self.max_rows) if self.worker < 0 else claims_ran(&self.arena, &self.claims, slot)[0]

    def leases(self, uint32_t slot, uint32_t most=0xffffffff) -> list:
        """(first row, rows, input slab offset, bytes) of each lease somebody waits for, or of the first so many."""
        return read_leases(&self.arena, self.slot(slot), self.batch_rows(slot), most)

    def start_run(self, uint32_t slot) -> None:
        """Mark the moment the backend begins."""
        self.slot(slot).run_ns = monotonic_ns()

    def end_run(self, uint32_t slot, uint64_t run_ns=0, uint64_t ran_ns=0) -> None:
        """Mark the moment the backend is done; what follows is handing out its outputs. A device tells when it began and ended."""
        slot_end_run(self.slot(slot), run_ns, ran_ns)

    def count_rerun(self, uint32_t slot, uint32_t rows, uint64_t began_ns) -> None:
        """The backend has run `rows` rows of a batch again, since then (CLOCK_MONOTONIC)."""
        counters_rerun(&self.arena, self.slot(slot), rows, since_ns(began_ns, monotonic_ns()))

    def column_span(self, uint32_t slot, int column, bint output=False) -> tuple:
        """(offset in the arena, bytes of one row) of a whole column of max_rows rows."""
        cdef uint64_t base = <uint64_t>(<uint8_t*>self.slot(slot) - self.arena.base)
        if output:
            return base + self.arena.output_offset[self.column(column, self.outputs)], self.arena.output_row_bytes[column]
        return base + self.arena.input_offset[self.column(column, self.inputs)], self.arena.input_row_bytes[column]

    def fail(self, uint32_t slot, uint32_t kind, str text) -> None:
        """Let the whole batch end in an error; publish() follows."""
        cdef bytes encoded = text.encode("utf-8", "replace")[:ERROR_BYTES]
        cdef Slot* s = self.slot(slot)
        memcpy(s.error, <const char*>encoded, len(encoded))
        s.error_bytes = len(encoded)
        s.status = kind

    def answer_lease(self, uint32_t slot, uint32_t row, uint32_t status, uint64_t offset, uint32_t nbytes) -> None:
        """Attach the output slab of one lease; it changes hands with publish()."""
        cdef Row* at = rows_of(self.slot(slot)) + min(row, self.max_rows - 1)
        release_slab(&self.arena, &at.out_offset, at.tag)   # of a worker that died after answering this lease
        at.status, at.out_offset, at.out_bytes = status, offset, nbytes
        if offset:
            slab_give(&self.arena.slabs, offset, self.owner, lease_owner(at.tag))

    def publish(self, uint32_t slot) -> bool:
        """The batch is done: tell every front that waits. False when this worker does not hold it."""
        # Under the GIL: another thread may be sending a part through the same one-writer ring.
        cdef uint64_t freed, seq = self.slot(slot).seq
        cdef uint64_t fronts = slot_publish(&self.arena, slot, self.worker, claims_ran(&self.arena, &self.claims, slot)[0], &freed)
        notify_done(&self.arena, self.worker, fronts, self.front_doorbells, slot, seq)
        request_rescan(&self.arena, self.front_doorbells, freed)
        return fronts != 0

    # --- workers whose answers come in parts: the batch stays theirs until the last part ---

    def waits(self, uint32_t slot, uint32_t row) -> bool:
        """Whether somebody still waits for this lease of a batch this worker runs."""
        return flag_load(&rows_of(self.slot(slot))[min(row, self.max_rows - 1)].state) == ROW_COMMITTED

    def parts_read(self, uint32_t slot, uint32_t row) -> int:
        """How many parts of this lease's answer the front has taken."""
        return parts_taken(&self.arena, slot % self.slots, row)

    def send_part(self, uint32_t slot, uint32_t row, uint64_t offset, uint32_t nbytes, bint final) -> bool:
        """One part of a lease's answer, in a slab of this worker's (0: none), which changes hands. False: no
        room in the ring now, the slab is still ours."""
        self.check(<int64_t>slot << 16 | row, 1)
        return part_send(&self.arena, self.worker, self.owner, self.front_doorbells, slot, row, offset, nbytes, final)

    def keep_inputs(self, uint32_t slot, uint32_t row) -> int:
        """Take a lease's input slab over, for a model that still looks at it; its offset, to be returned later."""
        self.check(<int64_t>slot << 16 | row, 1)
        return part_keep_inputs(&self.arena, self.owner, slot, row)

    # --- the owner, after a death ----------------------------------------------------------------

    def worker_died(self, uint32_t worker, uint32_t max_attempts, uint32_t kind, str text) -> tuple:
        """Give its batches to others; those tried max_attempts times fail with kind. Returns (retried, failed)."""
        cdef uint32_t i, retried = 0, failed = 0
        cdef uint64_t freed
        cdef Slot* s
        for i in range(self.slots):
            s = slot_at(&self.arena, i)
            if word_state(load64(&s.word)) != SLOT_RUNNING or word_worker(load64(&s.word)) != worker:
                continue
            if s.attempts < max_attempts:
                retried += slot_return(&self.arena, s, worker)
            else:
                self.fail(i, kind, text)
                slot_publish(&self.arena, i, worker, self.max_rows, &freed)
                failed += 1
        life_end(&self.arena, worker % self.arena.workers)
        flag_exchange(&self.arena.header.worker[worker].asleep, AWAKE)
        request_rescan(&self.arena, self.front_doorbells, ~<uint64_t>0)    # it may have died between publishing and telling them
        self.wake_all_workers()                                             # or been woken for what another must now take
        return retried, failed

    def fail_ready(self, uint32_t kind, str text) -> int:
        """No worker is left: end every batch that waits for one with an error. Returns how many."""
        cdef uint64_t due
        cdef int64_t slot
        cdef uint64_t fronts, freed
        cdef uint32_t i, tries, failed = 0
        for tries in range(2 * self.slots):     # a worker that writes over the words could make any number ready
            if open_due_ns(&self.arena, &i):
                slot_seal(&self.arena, i)
            slot = slot_take(&self.arena, NO_WORKER - 1, &due)
            if slot < 0:
                break
            self.slot(<uint32_t>slot).taken_ns = monotonic_ns()
            self.fail(<uint32_t>slot, kind, text)
            fronts = slot_publish(&self.arena, <uint32_t>slot, NO_WORKER - 1, self.max_rows, &freed)
            failed += 1
            request_rescan(&self.arena, self.front_doorbells, fronts | freed)
        return failed

    def reclaim_front(self, uint32_t front) -> int:
        """Let go of everything a dead front held. Call it again until it returns 0."""
        cdef uint32_t i, touched = 0
        for i in range(self.slots):
            touched += slot_reclaim(&self.arena, i, front)
        front_reclaim(&self.arena, front)
        self.wake_all_workers()     # it may have died between making a batch ready and waking a worker for it
        return touched

    def lost(self) -> list:
        """(slot, generation, rows) of rows that no process answers for; only a front that died leaves them so for long.
        Of a batch that others moved at each try, 0 rows: whether it has any is unknown."""
        return read_lost(&self.arena)

    def forgive(self, uint32_t slot, uint32_t generation, uint32_t rows) -> bool:
        """Let the batch go on without rows that were lost. False when it has ended meanwhile."""
        if slot >= self.slots or not slot_forgive(&self.arena, slot, generation, rows):
            return False
        self.notify()
        return True

    # --- slabs ----------------------------------------------------------------------------------

    def allocate_slab(self, uint64_t nbytes) -> int:
        """Offset of a slab of at least nbytes bytes, 0 when there is no room."""
        return slab_allocate(&self.arena.slabs, nbytes, self.owner) if self.arena.slabs.pages else 0

    def free_slab(self, uint64_t offset) -> None:
        """Give a slab back."""
        slab_release(&self.arena.slabs, offset)

    def give_worker(self, uint64_t offset, uint32_t worker) -> None:
        """A slab of ours becomes a worker's, who returns it; it goes with that worker."""
        slab_give(&self.arena.slabs, offset, self.owner, worker_owner(&self.arena, worker % self.arena.workers))

    def slab(self, uint64_t offset, uint64_t nbytes, bint writable=False):
        """The bytes of a leased slab; raises when offset and nbytes are no lease."""
        if not self.arena.slabs.pages or not slab_holds(&self.arena.slabs, offset, nbytes):
            raise ValueError("not the bytes of a leased slab")
        return PyMemoryView_FromMemory(<char*>self.arena.slabs.base + offset, nbytes, PyBUF_WRITE if writable else PyBUF_READ)

    def attach_slab(self, int64_t lease, uint64_t offset, uint32_t nbytes, uint64_t level=0) -> int:
        """A reserved lease's inputs are in this slab, released with it. Its tag. A batch of one goes by `level`, then by its age."""
        self.check(lease, 1)
        self.slot(<uint32_t>(lease >> 16)).seq += level << 56
        cdef Row* row = claim_row(&self.arena, lease)
        row.tag, row.in_offset, row.in_bytes = claim_of(&self.arena, &self.claims, lease), offset, nbytes
        slab_give(&self.arena.slabs, offset, self.owner, lease_owner(row.tag))
        return claim_of(&self.arena, &self.claims, lease)

    def answer_slab(self, int64_t lease) -> tuple:
        """(offset, bytes) of the outputs of a lease, (0, 0) when there are none."""
        self.check(lease, 1)
        cdef Row* row = claim_row(&self.arena, lease)
        cdef uint64_t offset = row.out_offset
        if offset == 0 or slab_owner(&self.arena.slabs, offset) != lease_owner(claim_of(&self.arena, &self.claims, lease)):
            return 0, 0
        return offset, row.out_bytes

    # --- counts, of all processes together since the arena was made ---------------------------------

    def count(self, uint32_t kind, uint64_t ns=0) -> None:
        """A request ended so (REJECTED .. OTHER), after `ns`."""
        if not COUNT_REJECTED <= kind < COUNT_KINDS:
            raise ValueError(f"no such end of a request: {kind}")
        counters_add(&self.arena, kind, 1, ns)

    def counters(self) -> tuple:
        """(count, ns) of each of TALLIES; rows of requests answered well; when the last of them was, CLOCK_MONOTONIC."""
        return read_counters(&self.arena)

    def runs(self) -> list:
        """(rows, runs, input ns, infer ns, output ns) of every size of batch that has run."""
        return read_runs(&self.arena)

    def spreads(self) -> tuple:
        """Buckets (arena.h: Spread) of success, queue, compute_input, compute_infer and compute_output, as bytes."""
        return read_spreads(&self.arena)

    # --- looking at it --------------------------------------------------------------------------

    def outstanding(self) -> int:
        """Rows reserved and not yet freed, over all slots; 0 when nobody waits for anything."""
        return read_outstanding(&self.arena)

    def queued(self) -> int:
        """Rows committed, waited for and not yet taken by a worker."""
        return read_queued(&self.arena)

    def rows_left(self) -> int:
        """How many more rows may wait for a worker."""
        return rows_left(&self.arena)

    def pending(self) -> int:
        """Requests committed and not yet taken by a worker."""
        return read_pending(&self.arena)

    def slab_pages_used(self) -> int:
        """Pages under lease; 0 when nothing leaks."""
        return slab_used(&self.arena.slabs)

    def describe(self, uint32_t slot) -> tuple:
        """(state, reserved, settled, worker) of a slot, for tests and debugging."""
        cdef uint64_t w = load64(&self.slot(slot).word)
        cdef uint32_t state = word_state(w)     # which a worker that scrawls may have made anything
        return STATES[state] if state < SLOT_STATES else "damaged", word_reserved(w), word_settled(w), word_worker(w)
