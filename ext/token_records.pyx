"""Text generation across the process line: prompts to a worker, tokens back. Layout: include/token_records.h.

    worker:  rid = sender.admit(slot, deadline_ns)            a slot that was taken; the engine knows it by rid
             sender.token(rid, 5122); sender.end(rid, 4)      what a step makes: llm.protocols.Out
             for slot in sender.publish(): ring.publish(slot)
    front:   reader.listen(slot, ring.attach_slab(lease, offset, nbytes), run)
             for run, records in reader.read(messages): ...   (token, finish, took_us, extra) each

What a step makes for one front is one message and one doorbell. Nothing is pickled, and nobody waits for a lock.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from slot_verbs cimport *

cdef extern from "token_records.h" nogil:
    enum: PROMPT_MAGIC, EXTRA_MOST, FINISHES, ASLEEP_FULL
    ctypedef struct PromptHead:
        uint32_t magic, ids
        uint64_t note_bytes
    ctypedef struct RecordsHead:
        uint64_t nbytes
        uint32_t count
    ctypedef struct TokenRecord:
        uint64_t rid
        int32_t token
        uint32_t took_us, index
    ctypedef struct Seat:
        uint64_t rid, deadline_ns
        uint32_t sent
        int front
        bint end_sent, refused
    ctypedef struct Pile:
        uint64_t used
    ctypedef struct Sender:
        Seat* seats
        uint32_t* active
        uint32_t* ended
        uint32_t actives, endings
        Pile* piles
    ctypedef struct Listener:
        uint64_t rid
        uint32_t came, taken
    uint64_t rid_of(uint64_t tag, uint32_t slot)
    uint32_t record_extra(const TokenRecord*)
    uint32_t record_finish(const TokenRecord*)
    int64_t prompt_note(const uint8_t*, uint64_t, PromptHead*)
    bint sender_open(const Arena*, Sender*, uint32_t window)
    void sender_close(Sender*)
    uint64_t seat_take(const Arena*, Sender*, uint32_t slot, uint64_t deadline_ns)
    Seat* seat_of(const Arena*, const Sender*, uint64_t rid)
    bint seat_say(const Arena*, Sender*, uint32_t owner, Seat*, int32_t token, uint32_t finish, uint32_t took_us, const uint8_t* extra, uint32_t nbytes)
    bint seat_room(const Arena*, const Sender*, Seat*)
    bint pile_send(const Arena*, Sender*, uint32_t worker, uint32_t owner, uint32_t front, int doorbell)
    int sender_sleep(const Arena*, const Sender*, uint32_t worker, int doorbell, int control, int64_t most_ns, bint full)
    void sender_beat(const Arena*, const Sender*)
    bint records_sound(const uint8_t*, uint64_t, RecordsHead*)
    void wake_worker(const Arena*, const int* doorbells, uint32_t slot)
    void listener_taken(const Arena*, Listener*, const int* doorbells, uint32_t slot, uint32_t count, uint32_t window)

CANCELLED, TIMEOUT = 4, 5       # of codec.text.Finish, which tests hold to these


# --- prompts -------------------------------------------------------------------------------------

def prompt_bytes(ids, bytes note not None) -> int:
    """Bytes of a slab for this prompt."""
    return sizeof(PromptHead) + 4 * len(ids) + len(note)


def write_prompt(uint8_t[::1] slab not None, ids, bytes note not None) -> None:
    """Fill a slab of prompt_bytes() bytes. Raises OverflowError for an id beyond 32 bits."""
    cdef PromptHead head
    cdef int32_t one
    if <uint64_t>slab.shape[0] != <uint64_t>prompt_bytes(ids, note):
        raise ValueError("the slab is not of this prompt's size")
    cdef uint8_t* at = &slab[0]
    head.magic, head.ids, head.note_bytes = PROMPT_MAGIC, len(ids), PyBytes_GET_SIZE(note)
    memcpy(at, &head, sizeof(PromptHead))
    at += sizeof(PromptHead)
    for token in ids:
        one = token
        memcpy(at, &one, 4)
        at += 4
    memcpy(at, PyBytes_AS_STRING(note), PyBytes_GET_SIZE(note))


def read_prompt(const uint8_t[::1] slab not None) -> tuple:
    """(ids, note) as written. Raises ValueError when it is no prompt."""
    cdef PromptHead head
    cdef int64_t nbytes = prompt_note(&slab[0], slab.shape[0], &head) if slab.shape[0] else -1
    cdef int32_t one
    cdef uint32_t i
    if nbytes < 0:
        raise ValueError("this slab holds no prompt")
    cdef const uint8_t* at = &slab[0] + sizeof(PromptHead)
    cdef list ids = []
    for i in range(head.ids):
        memcpy(&one, at + 4 * <uint64_t>i, 4)
        ids.append(one)
    return ids, PyBytes_FromStringAndSize(<const char*>at + 4 * <uint64_t>head.ids, nbytes)


# --- the worker ----------------------------------------------------------------------------------

cdef class TokenSender:
    """The worker side of token records: llm.protocols.Out, and when it is sent.

    `window` records of a sequence may be unread; `statuses` are the kinds, by finish, that a lease ends with.
    """

    cdef Arena arena
    cdef object memory
    cdef Sender sender
    cdef uint32_t worker, owner
    cdef int doorbell, control
    cdef int[MAX_FRONTS] front_doorbells
    cdef uint32_t[FINISHES] statuses
    cdef readonly uint64_t tokens       # sent since it was made
    cdef public bint awaited            # somebody waits for a slot: nobody may stand still in one

    def __init__(self, uint8_t[::1] memory not None, *, uint32_t worker, int own_doorbell=-1, front_doorbells=(), int control=-1,
                 uint32_t window=256, statuses=()):
        cdef int i
        if not arena_attach(&self.arena, &memory[0], memory.shape[0]) or worker >= self.arena.workers:
            raise ValueError("this memory holds no arena with such a worker")
        if not sender_open(&self.arena, &self.sender, window):
            raise MemoryError
        self.memory, self.worker, self.doorbell, self.control = memory, worker, own_doorbell, control
        self.owner = worker_owner(&self.arena, worker)
        for i in range(MAX_FRONTS):
            self.front_doorbells[i] = front_doorbells[i] if i < len(front_doorbells) else -1
        for i in range(FINISHES):
            self.statuses[i] = statuses[i] if i < len(statuses) else 0

    def __dealloc__(self):
        sender_close(&self.sender)

    def admit(self, uint32_t slot, uint64_t deadline_ns=0) -> int:
        """The sequence of a slot this worker has just taken; what it is known by."""
        if slot >= self.arena.slots or self.sender.seats[slot].rid:
            raise ValueError(f"slot {slot} cannot be taken")
        return seat_take(&self.arena, &self.sender, slot, deadline_ns)

    def token(self, uint64_t rid, int32_t token, uint32_t finish=0, uint32_t took_us=0, bytes extra not None=b"") -> None:
        """One token; see llm.protocols.Out. Raises LookupError for a sequence that is not here."""
        self.say(rid, token, finish, took_us, extra)
        self.tokens += 1

    def end(self, uint64_t rid, uint32_t finish, bytes extra not None=b"") -> None:
        """A last record without a token. Raises as token()."""
        if finish == 0:
            raise ValueError("an end has a reason")
        self.say(rid, -1, finish, 0, extra)

    cdef int say(self, uint64_t rid, int32_t token, uint32_t finish, uint32_t took_us, bytes extra) except -1:
        cdef Seat* seat = seat_of(&self.arena, &self.sender, rid)
        if seat == NULL:
            raise LookupError(f"no sequence {rid}: it has ended, or was never here")
        if finish >= FINISHES or PyBytes_GET_SIZE(extra) > EXTRA_MOST:
            raise ValueError(f"finish {finish}, {PyBytes_GET_SIZE(extra)} extra bytes: at most {FINISHES - 1} and {EXTRA_MOST}")
        if not seat_say(&self.arena, &self.sender, self.owner, seat, token, finish, took_us,
                        <const uint8_t*>PyBytes_AS_STRING(extra), <uint32_t>PyBytes_GET_SIZE(extra)):
            raise MemoryError
        if finish and self.statuses[finish]:
            rows_of(slot_at(&self.arena, <uint32_t>(rid & 0xffff))).status = self.statuses[finish]
        return 0

    def room(self, uint64_t rid) -> bool:
        """Whether the reader of this sequence is near enough for one record more, or somebody waits for its slot."""
        cdef Seat* seat = seat_of(&self.arena, &self.sender, rid)
        return seat != NULL and (seat_room(&self.arena, &self.sender, seat) or self.awaited)

    @property
    def behind(self) -> bool:
        """Whether a sequence has found no room when its engine last asked."""
        cdef uint32_t i
        for i in range(self.sender.actives):
            if self.sender.seats[self.sender.active[i]].refused:
                return True
        return False

    @property
    def untaken(self) -> bool:
        """Whether a prompt is there that no worker has taken yet."""
        cdef uint32_t i
        for i in range(self.arena.slots):
            if word_state(load64(&slot_at(&self.arena, i).word)) == SLOT_READY:
                return True
        return False

    def gone(self) -> list:
        """(rid, finish) of sequences that are to end, each said once: nobody waits for it, or its time is up."""
        cdef uint64_t now = monotonic_ns()
        cdef uint32_t i
        cdef Seat* seat
        cdef list found = []
        for i in range(self.sender.actives):
            seat = self.sender.seats + self.sender.active[i]
            if seat.end_sent:
                continue
            if flag_load(&rows_of(slot_at(&self.arena, self.sender.active[i])).state) != ROW_COMMITTED:
                found.append((seat.rid, CANCELLED))
            elif seat.deadline_ns and seat.deadline_ns <= now:
                found.append((seat.rid, TIMEOUT))
            else:
                continue
            seat.end_sent = True
        return found

    def next_deadline_ns(self) -> int:
        """The first of all deadlines to come, 0 for none."""
        cdef uint64_t first = 0
        cdef uint32_t i
        cdef Seat* seat
        for i in range(self.sender.actives):
            seat = self.sender.seats + self.sender.active[i]
            if seat.deadline_ns and not seat.end_sent and (first == 0 or seat.deadline_ns < first):
                first = seat.deadline_ns
        return first

    def publish(self) -> list:
        """Send what was said since, and give every sequence's sign of life. Slots whose last record is sent:
        they are to be published."""
        cdef uint32_t f, i, kept = 0
        cdef uint32_t slot
        cdef list over = []
        for f in range(self.arena.fronts):
            if self.sender.piles[f].used:
                pile_send(&self.arena, &self.sender, self.worker, self.owner, f, self.front_doorbells[f])
        for i in range(self.sender.endings):
            slot = self.sender.ended[i]
            if self.sender.piles[self.sender.seats[slot].front].used:
                self.sender.ended[kept] = slot
                kept += 1
            else:
                over.append(slot)
        self.sender.endings = kept
        sender_beat(&self.arena, &self.sender)
        return over

    @property
    def unsent(self) -> bool:
        """Whether something said has found no room yet: publish() again."""
        cdef uint32_t f
        for f in range(self.arena.fronts):
            if self.sender.piles[f].used:
                return True
        return False

    @property
    def active(self) -> int:
        """Sequences that have not had their last record."""
        return self.sender.actives

    def sleep(self, int64_t most_ns, bint full=False) -> int:
        """Wait, at most so long (negative: any time), for a prompt (unless `full`), for a reader that was behind,
        for somebody who leaves. Bit 2: the control line has something to say."""
        cdef int why
        with nogil:
            why = sender_sleep(&self.arena, &self.sender, self.worker, self.doorbell, self.control, most_ns, full)
        return why


# --- the front -----------------------------------------------------------------------------------

cdef class TokenReader:
    """The front side of token records; one sequence at a time has a slot. A run is any object of the caller's."""

    cdef Arena arena
    cdef object memory
    cdef Listener* listeners
    cdef list runs, collected
    cdef uint32_t front, window
    cdef int[MAX_WORKERS] worker_doorbells

    def __init__(self, uint8_t[::1] memory not None, *, uint32_t front, worker_doorbells=(), uint32_t window=256):
        cdef int i
        if not arena_attach(&self.arena, &memory[0], memory.shape[0]) or front >= self.arena.fronts:
            raise ValueError("this memory holds no arena with such a front")
        self.listeners = <Listener*>calloc(self.arena.slots, sizeof(Listener))
        if self.listeners == NULL:
            raise MemoryError
        self.memory, self.front, self.window = memory, front, window
        self.runs, self.collected = [None] * self.arena.slots, [None] * self.arena.slots
        for i in range(MAX_WORKERS):
            self.worker_doorbells[i] = worker_doorbells[i] if i < len(worker_doorbells) else -1

    def __dealloc__(self):
        free(self.listeners)

    def listen(self, uint32_t slot, uint64_t tag, run) -> None:
        """Records of the lease with this tag, the slot's only one, are for `run` from now on."""
        self.check(slot)
        self.runs[slot] = run
        self.listeners[slot].rid, self.listeners[slot].came, self.listeners[slot].taken = rid_of(tag, slot), 0, 0

    def leave(self, uint32_t slot) -> None:
        """Nobody wants what may still come. Its worker is woken if it sleeps."""
        self.check(slot)
        self.runs[slot], self.listeners[slot].rid = None, 0
        wake_worker(&self.arena, self.worker_doorbells, slot)

    def taken(self, uint32_t slot, uint32_t count) -> None:
        """The reader is so many records nearer. Not after the last one has come, when the slot may be another's."""
        self.check(slot)
        if self.listeners[slot].rid:
            listener_taken(&self.arena, self.listeners + slot, self.worker_doorbells, slot, count, self.window)

    def read(self, list messages not None) -> list:
        """(run, records) of all that came with these (slab offset, bytes) of drain(); the slabs are given back. A record is
        (token, finish, took_us, extra). None for the records of a run that has lost some. The last record of a run ends
        its listening."""
        cdef list touched = [], found = []
        for offset, nbytes in messages:
            self.take(offset, nbytes, touched)
        for slot in touched:
            found.append(self.collected[<uint32_t>slot])
            self.collected[<uint32_t>slot] = None
        return found

    cdef int check(self, uint32_t slot) except -1:
        if slot >= self.arena.slots:
            raise IndexError(f"slot {slot} of {self.arena.slots}")
        return 0

    cdef int take(self, uint64_t offset, uint64_t nbytes, list touched) except -1:
        cdef RecordsHead head
        cdef uint32_t i
        if not slab_holds(&self.arena.slabs, offset, nbytes) or slab_owner(&self.arena.slabs, offset) != 1 + self.front:
            return 0    # no longer: somebody writes where nothing is theirs
        if not records_sound(self.arena.slabs.base + offset, nbytes, &head):
            slab_release(&self.arena.slabs, offset)
            return 0
        cdef const uint8_t* at = self.arena.slabs.base + offset + sizeof(RecordsHead)
        cdef const uint8_t* extra = at + head.count * sizeof(TokenRecord)
        cdef const uint8_t* end = self.arena.slabs.base + offset + nbytes
        cdef TokenRecord record     # a copy: what is shared may change after any look at it
        try:
            for i in range(head.count):
                memcpy(&record, at + i * sizeof(TokenRecord), sizeof(TokenRecord))
                if record_extra(&record) > <uint64_t>(end - extra):
                    break
                self.collect(&record, extra, touched)
                extra += record_extra(&record)
        finally:
            slab_release(&self.arena.slabs, offset)
        return 0

    cdef int collect(self, const TokenRecord* record, const uint8_t* extra, list touched) except -1:
        cdef uint32_t slot = record.rid & 0xffff, finish = record_finish(record)
        if slot >= self.arena.slots or record.rid == 0 or self.listeners[slot].rid != record.rid:
            return 0    # whose caller has left
        cdef Listener* listener = self.listeners + slot
        cdef tuple entry = <tuple>self.collected[slot]
        if entry is None:
            entry = self.runs[slot], []
            self.collected[slot] = entry
            touched.append(slot)
        if record.index != listener.came:
            self.collected[slot] = entry[0], None
            finish = CANCELLED
        else:
            said = PyBytes_FromStringAndSize(<const char*>extra, record_extra(record)) if record_extra(record) else b""
            (<list>entry[1]).append((record.token, finish, record.took_us, said))
            listener.came += 1
        if finish:
            self.runs[slot], listener.rid = None, 0
        return 0
