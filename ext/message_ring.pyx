"""Fixed-size messages from one process to one other, through shared memory and a doorbell.

    writer = MessageRing(memory, 64, doorbell); writer.push(kind=1, slot=3, seq=9)
    reader = MessageRing(memory, 64, doorbell); reader.wait(timeout_ns); reader.pop()

One writer, one reader, no lock: see include/message.h. The same verbs carry a batch's answers from a
worker to a front inside an arena (batch_ring). The memory is borrowed from the caller.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

cdef extern from "message.h" nogil:
    ctypedef struct Message:
        uint64_t seq
        uint32_t slot
        uint16_t kind
        uint64_t value
    ctypedef struct Ring "MessageRing":
        pass
    uint64_t message_ring_bytes(uint32_t)
    bint message_push(Ring*, uint32_t, const Message*)
    bint message_pop(Ring*, uint32_t, Message*)

cdef extern from "doorbell.h" nogil:
    void doorbell_ring(int fd)
    int doorbell_wait(int doorbell, int control, int64_t timeout_ns)


def ring_bytes(uint32_t capacity) -> int:
    """Bytes of zeroed shared memory a ring of `capacity` messages needs."""
    return message_ring_bytes(capacity)


cdef class MessageRing:
    """One end of a ring. `doorbell` is an eventfd the writer rings, -1 for none."""

    cdef object memory
    cdef Ring* ring
    cdef readonly uint32_t capacity
    cdef readonly int doorbell

    def __init__(self, uint8_t[::1] memory not None, uint32_t capacity, int doorbell=-1):
        if capacity == 0 or capacity & (capacity - 1):
            raise ValueError(f"capacity is a power of two, not {capacity}")
        if <uint64_t>memory.shape[0] < message_ring_bytes(capacity):
            raise ValueError(f"a ring of {capacity} messages needs {message_ring_bytes(capacity)} bytes")
        if <size_t>&memory[0] % 64:
            raise ValueError("a ring starts at a 64-byte boundary")
        self.memory = memory
        self.ring = <Ring*>&memory[0]
        self.capacity, self.doorbell = capacity, doorbell

    def push(self, *, uint16_t kind, uint32_t slot=0, uint64_t seq=0, uint64_t value=0) -> bool:
        """Add a message and ring; False when the ring is full and nothing was added."""
        cdef Message message
        memset(&message, 0, sizeof(Message))
        message.kind, message.slot, message.seq, message.value = kind, slot, seq, value
        if not message_push(self.ring, self.capacity, &message):
            return False
        if self.doorbell >= 0:
            doorbell_ring(self.doorbell)
        return True

    def pop(self) -> tuple[int, int, int, int] | None:
        """(kind, slot, seq, value) of the oldest message, None when there is none."""
        cdef Message message
        if not message_pop(self.ring, self.capacity, &message):
            return None
        return message.kind, message.slot, message.seq, message.value

    def wait(self, int64_t timeout_ns) -> bool:
        """Sleep until the doorbell rings, at most timeout_ns (negative: for ever). False on timeout."""
        cdef int why
        with nogil:
            why = doorbell_wait(self.doorbell, -1, timeout_ns)
        return why != 0
