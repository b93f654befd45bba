"""Sequences and their slots: who holds one, who waits for one, whose request may run next.

No clock, no loop, no tensors: events come in with the time of the caller's clock, answers go out. The shell
around it is `stateful`. A sequence belongs to an instance from its first request to its last:

    PARKED  --admit-->  QUEUED            a slot became free (backlog, first come first served)
    QUEUED  --take-->   RUNNING           its oldest request is in a batch; one at a time
    RUNNING --answer--> QUEUED | IDLE | GONE      more wait | none wait | that was its END
    IDLE    --ask-->    QUEUED
    IDLE    --reap-->   GONE              silent for longer than max_sequence_idle_microseconds
    any     --lose-->   GONE              its client left, or its instance's process died

A Sequence is never used again: the next one in its slot is another object with another `generation`, so a
late answer or a kept state cannot reach it. Texts are Triton's (spec/triton_v2 section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fastserve.errors import ServeError, invalid

SequenceId = int | str


class Phase(Enum):
    """Where a sequence is in its life."""

    PARKED = "parked"
    QUEUED = "queued"
    RUNNING = "running"
    IDLE = "idle"
    GONE = "gone"


P = Phase
# (phase, event) -> phases it may lead to. What is not here cannot happen.
MOVES: dict[tuple[Phase, str], frozenset[Phase]] = {
    (P.PARKED, "ask"): frozenset({P.PARKED}),
    (P.PARKED, "admit"): frozenset({P.QUEUED}),
    (P.PARKED, "lose"): frozenset({P.GONE}),
    (P.QUEUED, "ask"): frozenset({P.QUEUED}),
    (P.QUEUED, "take"): frozenset({P.RUNNING}),
    (P.QUEUED, "lose"): frozenset({P.GONE}),
    (P.RUNNING, "ask"): frozenset({P.RUNNING}),
    (P.RUNNING, "answer"): frozenset({P.QUEUED, P.IDLE, P.GONE}),
    (P.RUNNING, "lose"): frozenset({P.GONE}),
    (P.IDLE, "ask"): frozenset({P.QUEUED}),
    (P.IDLE, "reap"): frozenset({P.GONE}),
    (P.IDLE, "lose"): frozenset({P.GONE}),
}


@dataclass(slots=True, eq=False)
class Asked:
    """One request of a sequence. `what` is the shell's own."""

    sequence: Sequence
    start: bool
    end: bool
    what: Any
    arrived_ns: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence from START to END. `state` is the shell's: what its model carries between requests."""

    id: SequenceId
    generation: int
    phase: Phase = Phase.PARKED
    slot: int = -1
    ended: bool = False  # its END has been asked; nothing more may be
    last_ns: int = 0
    queue: deque[Asked] = field(default_factory=deque)
    state: dict[str, Any] = field(default_factory=dict)

    def move(self, event: str, to: Phase) -> None:
        """One step; ValueError for one that the table does not have."""
        if to not in MOVES.get((self.phase, event), ()):
            raise ValueError(f"a sequence that is {self.phase.value} cannot {event} to {to.value}")
        self.phase = to


class Sequences:
    """The sequences of one model: `instances` x `width` slots, and a backlog."""

    def __init__(self, model: str, instances: int, width: int, idle_ns: int) -> None:
        self.width = width
        self._model = model
        self._idle_ns = idle_ns
        self._slots: list[Sequence | None] = [None] * (instances * width)
        self._live: dict[SequenceId, Sequence] = {}  # by id, until END is asked
        self._backlog: deque[Sequence] = deque()
        self._down: set[int] = set()  # instances without a process
        self._born = 0

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, id: SequenceId, *, start: bool, end: bool, what: Any, now_ns: int) -> Asked:
        """Take a request in. Raises ServeError INVALID_ARGUMENT for one that belongs to no sequence."""
        if not id:
            raise invalid(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        sequence = self._live.get(id)
        if sequence is None:
            if not start:
                raise self.unknown(id)
            sequence = self._begin(id)
        asked = Asked(sequence, start, end, what, now_ns)
        sequence.queue.append(asked)
        sequence.last_ns = now_ns
        sequence.move("ask", Phase.QUEUED if sequence.phase is Phase.IDLE else sequence.phase)
        if end:
            sequence.ended = True
            del self._live[id]
        self._admit()
        return asked

    def unknown(self, id: SequenceId) -> ServeError:
        """What a request without START gets when there is no such sequence, or no more."""
        return invalid(
            f"inference request for sequence {id} to model '{self._model}' must specify the START flag "
            "on the first request of the sequence"
        )

    def ready(self, instance: int) -> list[Asked]:
        """The next request of each sequence of the instance that may run now, by slot."""
        return [s.queue[0] for s in self._of(instance) if s.phase is Phase.QUEUED]

    def take(self, asked: Asked) -> None:
        """It goes into a batch."""
        asked.sequence.move("take", Phase.RUNNING)

    def answer(self, asked: Asked, now_ns: int) -> None:
        """It has run; of no effect when its sequence is gone."""
        sequence = asked.sequence
        if sequence.phase is not Phase.RUNNING:
            return
        sequence.queue.popleft()
        sequence.last_ns = now_ns
        if asked.end:
            sequence.move("answer", Phase.GONE)
            self._leave(sequence)
        else:
            sequence.move("answer", Phase.QUEUED if sequence.queue else Phase.IDLE)

    # --- ends -------------------------------------------------------------------------------------

    def lose(self, sequence: Sequence) -> list[Asked]:
        """Its client left: its slot is free. Returns the requests that nobody will run any more."""
        if sequence.phase is Phase.GONE:
            return []
        sequence.move("lose", Phase.GONE)
        left = list(sequence.queue)
        sequence.queue.clear()
        self._leave(sequence)
        return left

    def lose_instance(self, instance: int) -> list[Asked]:
        """Its process died, and with it what its sequences had built up. While another instance has a
        process, no sequence begins here."""
        held = list(self._of(instance))
        self._down.add(instance)
        return [asked for sequence in held for asked in self.lose(sequence)]

    def regain_instance(self, instance: int) -> None:
        """It has a process again."""
        self._down.discard(instance)
        self._admit()

    def reap(self, now_ns: int) -> int:
        """Forget idle sequences whose time is up; how many."""
        late = [s for s in self._idle() if s.last_ns + self._idle_ns <= now_ns]
        for sequence in late:
            sequence.move("reap", Phase.GONE)
            self._leave(sequence)
        return len(late)

    def next_reap_ns(self) -> int:
        """When `reap` would next find one; 0 for never."""
        return min((s.last_ns + self._idle_ns for s in self._idle()), default=0)

    def everything(self) -> list[Asked]:
        """Every request not yet answered; all sequences are gone afterwards."""
        held = [s for s in self._slots if s is not None]
        return [asked for sequence in [*self._backlog, *held] for asked in self.lose(sequence)]

    @property
    def outstanding(self) -> int:
        """Requests not yet answered."""
        held = [s for s in self._slots if s is not None]
        return sum(len(sequence.queue) for sequence in [*self._backlog, *held])

    @property
    def waiting(self) -> int:
        """Requests not yet in a batch."""
        held = [s for s in self._slots if s is not None]
        return self.outstanding - sum(s.phase is Phase.RUNNING for s in held)

    # --- slots ------------------------------------------------------------------------------------

    def instance_of(self, sequence: Sequence) -> int:
        """The instance that runs it; -1 while it is parked."""
        return sequence.slot // self.width if sequence.slot >= 0 else -1

    def _begin(self, id: SequenceId) -> Sequence:
        self._born += 1
        sequence = self._live[id] = Sequence(id, self._born)
        self._backlog.append(sequence)
        return sequence

    def _admit(self) -> None:
        """Free slots go to the backlog's oldest, on the instance with the most room; with no process at all
        sequences wait in their slots, where somebody looks after what waits for a worker."""
        while self._backlog and (slot := self._free_slot()) >= 0:
            sequence = self._backlog.popleft()
            self._slots[slot] = sequence
            sequence.slot = slot
            sequence.move("admit", Phase.QUEUED)

    def _free_slot(self) -> int:
        free = [slot for slot, held in enumerate(self._slots) if held is None]
        if len(self._down) < len(self._slots) // self.width:
            free = [slot for slot in free if slot // self.width not in self._down]
        if not free:
            return -1
        room: dict[int, int] = {}
        for slot in free:
            room[slot // self.width] = room.get(slot // self.width, 0) + 1
        return max(free, key=lambda slot: (room[slot // self.width], -slot))

    def _leave(self, sequence: Sequence) -> None:
        if self._live.get(sequence.id) is sequence:
            del self._live[sequence.id]
        if sequence.slot >= 0:
            self._slots[sequence.slot] = None
        else:
            self._backlog.remove(sequence)
        sequence.state = {}
        self._admit()

    def _of(self, instance: int) -> Iterable[Sequence]:
        first = instance * self.width
        return (s for s in self._slots[first : first + self.width] if s is not None)

    def _idle(self) -> Iterable[Sequence]:
        return (s for s in self._slots if s is not None and s.phase is Phase.IDLE)
