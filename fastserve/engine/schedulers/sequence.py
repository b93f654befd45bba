"""The sequence scheduler: batches of sequences, one request of each; control inputs and implicit states.

    direct   a sequence keeps its row in the batch; rows of free or silent slots say READY false
    oldest   the oldest waiting requests of the candidate sequences, in any row

One batch at a time runs on each instance. A client that leaves while its request waits or runs ends its
sequence: its state is dropped and its slot is free. SequenceInputs writes the tensors that no client sends.
SequenceSlots decides without clock, loop or tensors. A sequence belongs to one instance for its whole life:

    PARKED  --admit-->  QUEUED            a slot became free (backlog, first come first served)
    QUEUED  --take-->   RUNNING           its oldest request is in a batch; one at a time
    RUNNING --answer--> QUEUED | IDLE | GONE      more wait | none wait | that was its END
    IDLE    --ask-->    QUEUED
    IDLE    --reap-->   GONE              silent for longer than max_sequence_idle_microseconds
    any     --lose-->   GONE              its client left, or its instance's process died

A RequestSequence is never used again: the next one in its slot is another object with another `generation`,
so a late answer or a kept state cannot reach it. Texts are Triton's (spec/triton_v2 section 4).
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from fastserve.engine.batch_queue import queued_too_long, version_gone
from fastserve.engine.counters import CANCELED, OTHER, REJECTED, counters_of
from fastserve.engine.engine import Engine, Scheduler
from fastserve.engine.input_checks import check_inputs
from fastserve.engine.schedulers.batch_sender import NOBODY, BatchMember, BatchSender, MemberAnswer
from fastserve.errors import (
    ConfigError,
    DeadlineError,
    Kind,
    ServeError,
    internal,
    invalid,
    worker_lost,
)
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.settings.confined_file import read_confined
from fastserve.settings.model_options import SequenceControl, SequenceOptions, SequenceStateOptions
from fastserve.tensor import DTYPES, DType, Tensor, TensorSpec

STATE_FOLDER = "initial_state"

STATE_BYTES = 16 << 20  # of a file of strings; others have as many as their dims say

_FORMS: dict[str, tuple[str, Callable[[float], float]]] = {
    "int32": ("<i", int),
    "float32": ("<f", float),
    "bool": ("<?", bool),
}


@dataclass(frozen=True, slots=True)
class SequenceSignals:
    """Values of a request's control inputs. A slot without a request has `ready` false."""

    start: bool = False
    ready: bool = False
    end: bool = False
    id: int | str = 0


@dataclass(frozen=True, slots=True)
class ControlTensor:
    """One control input: its name, type and how its element comes from the signals."""

    name: str
    dtype: DType
    write: Callable[[SequenceSignals], bytes]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One state: the input that gets it, the output that leaves it, and what it begins with."""

    input: str
    output: str
    spec: TensorSpec
    first: Tensor


@dataclass(frozen=True, slots=True)
class SequenceInputs:
    """All of them. `hidden` outputs are no outputs of the model for clients."""

    controls: tuple[ControlTensor, ...]
    states: tuple[StateTensor, ...]
    hidden: frozenset[str]
    batching: bool

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """As model.yaml's inputs, for the worker."""
        found = {c.name: {"dtype": c.dtype.name, "shape": [1]} for c in self.controls}
        return found | {s.input: _described(s.spec) for s in self.states}

    @property
    def outputs(self) -> dict[str, dict[str, Any]]:
        """As model.yaml's outputs, for the worker."""
        return {s.output: _described(s.spec) for s in self.states}

    def write(self, signals: SequenceSignals, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the control and state tensors of one request."""
        shape = (1, 1) if self.batching else (1,)
        found = {c.name: Tensor(c.dtype, shape, c.write(signals)) for c in self.controls}
        for one in self.states:
            fresh = signals.start or one.output not in state
            found[one.input] = one.first if fresh else state[one.output]
        return found

    def keep(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The states a request left behind, copied; hidden outputs are taken out of `outputs`."""
        kept = {}
        for one in self.states:
            if one.output in outputs:
                tensor = outputs[one.output]
                kept[one.output] = Tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
        for name in self.hidden:
            outputs.pop(name, None)
        return kept


def open_sequence_inputs(options: SequenceOptions, folder: Path, *, batching: bool) -> SequenceInputs:
    """The extras of a model whose `folder` has its initial states. Raises ServeError INVALID_ARGUMENT."""
    controls = tuple(_open_control(given) for given in options.controls)
    states = tuple(_open_state(given, folder, batching) for given in options.states)
    return SequenceInputs(controls, states, frozenset(s.output for s in options.states if s.hidden), batching)


def _open_control(given: SequenceControl) -> ControlTensor:
    dtype, signal = DTYPES[given.dtype], given.signal
    if signal == "id":
        return ControlTensor(given.name, dtype, lambda signals: write_id(signals.id, dtype))
    if not given.values:
        text = f"sequence batching control '{given.name}' says no values"
        raise invalid(text)
    form, number = _FORMS[given.dtype]
    false, true = (struct.pack(form, number(value)) for value in given.values)
    return ControlTensor(given.name, dtype, lambda signals: true if getattr(signals, signal) else false)


def write_id(id: int | str, dtype: DType) -> bytes:
    """A sequence's id as one element. A string becomes a number that is the same each time and, short of a
    collision, nobody else's; a number too large for the type keeps its low bytes."""
    if dtype.item_bytes == 0:
        text = str(id).encode()
        return struct.pack("<I", len(text)) + text
    if isinstance(id, str):
        return blake2b(id.encode(), digest_size=dtype.item_bytes).digest()
    return (id & ((1 << (8 * dtype.item_bytes)) - 1)).to_bytes(dtype.item_bytes, "little")


def _open_state(given: SequenceStateOptions, folder: Path, batching: bool) -> StateTensor:
    dtype, first = DTYPES[given.dtype], tuple(given.first_shape)
    size = prod(first) * (dtype.item_bytes or 4)  # an empty string is its length, 0
    data = bytes(size)
    if given.first_file:
        data = _read_file(folder, given.first_file, size if dtype.item_bytes else STATE_BYTES)
        if dtype.item_bytes and len(data) != size:
            raise invalid(
                f"initial state '{given.first_name}' for state input '{given.input}': "
                f"file {given.first_file} has {len(data)} bytes, its dims need {size}"
            )
    shape = (1, *first) if batching else first
    spec = TensorSpec(given.input, dtype, tuple(given.shape))
    return StateTensor(given.input, given.output, spec, Tensor(dtype, shape, data))


def _read_file(folder: Path, name: str, most_bytes: int) -> bytes:
    if Path(name).name != name:
        raise invalid(f"initial state file {name!r}: not the name of a file")
    try:
        return read_confined(folder, f"{STATE_FOLDER}/{name}", most_bytes)
    except ConfigError as fault:
        raise invalid(f"initial state file {fault}") from None


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype.name, "shape": list(spec.shape or ())}


def empty_like(tensor: Tensor) -> Tensor:
    """Zeros, or empty strings, of the same shape: what a slot without a request holds."""
    return Tensor(tensor.dtype, tensor.shape, bytes(prod(tensor.shape) * (tensor.dtype.item_bytes or 4)))


SequenceId = int | str

# Sequences that were lost with their worker, and whose clients have not been told for long.
MOST_LOST = 4096

LOST = (
    "the worker process that held sequence {} of model '{}' is gone, and the sequence's state with it: "
    "begin it again, with the START flag"
)


class SequencePhase(Enum):
    """Where a sequence is in its life."""

    PARKED = "parked"
    QUEUED = "queued"
    RUNNING = "running"
    IDLE = "idle"
    GONE = "gone"


P = SequencePhase

# (phase, event) -> phases it may lead to. What is not here cannot happen.
MOVES: dict[tuple[SequencePhase, str], frozenset[SequencePhase]] = {
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
class SequenceRequest:
    """One request of a sequence. `what` is the shell's own."""

    sequence: RequestSequence
    start: bool
    end: bool
    what: Any
    arrived_ns: int


@dataclass(slots=True, eq=False)
class RequestSequence:
    """One sequence from START to END. `state` is the shell's: what its model carries between requests."""

    id: SequenceId
    generation: int
    phase: SequencePhase = SequencePhase.PARKED
    slot: int = -1
    ended: bool = False  # its END has been asked; nothing more may be
    last_ns: int = 0
    queue: deque[SequenceRequest] = field(default_factory=deque)
    state: dict[str, Any] = field(default_factory=dict)

    def move(self, event: str, to: SequencePhase) -> None:
        """Change the phase. Raises ValueError for a change that the table lacks."""
        if to not in MOVES.get((self.phase, event), ()):
            raise ValueError(f"a sequence that is {self.phase.value} cannot {event} to {to.value}")
        self.phase = to


class SequenceSlots:
    """The sequences of one model: `instances` x `width` slots, and a backlog."""

    def __init__(self, model: str, instances: int, width: int, idle_ns: int) -> None:
        self.width = width
        self._model = model
        self._idle_ns = idle_ns
        self._slots: list[RequestSequence | None] = [None] * (instances * width)
        self._live: dict[SequenceId, RequestSequence] = {}  # by id, until END is asked
        self._backlog: deque[RequestSequence] = deque()
        self._down: set[int] = set()  # instances without a process
        self._lost: dict[SequenceId, int] = {}  # with their worker: until when that is remembered
        self._born = 0

    @property
    def live(self) -> int:
        """Return how many sequences have begun and not ended."""
        return len(self._live)

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, id: SequenceId, *, start: bool, end: bool, what: Any, now_ns: int) -> SequenceRequest:
        """Take a request in. Raises ServeError INVALID_ARGUMENT for one that belongs to no sequence, and
        UNAVAILABLE for one whose sequence was lost with its worker."""
        if not id:
            raise invalid(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        sequence, lost = self._live.get(id), self._was_lost(id, now_ns)
        if sequence is None:
            if not start:
                if not lost:
                    raise self.unknown(id)
                self._remember_lost(id, now_ns)  # its client goes on, and may not have understood
                raise worker_lost(LOST.format(id, self._model))
            sequence = self._begin(id)
        asked = SequenceRequest(sequence, start, end, what, now_ns)
        sequence.queue.append(asked)
        sequence.last_ns = now_ns
        sequence.move("ask", SequencePhase.QUEUED if sequence.phase is SequencePhase.IDLE else sequence.phase)
        if end:
            sequence.ended = True
            del self._live[id]
        self._admit()
        return asked

    def unknown(self, id: SequenceId) -> ServeError:
        """Return the error of a request without START whose sequence does not exist."""
        return invalid(
            f"inference request for sequence {id} to model '{self._model}' must specify the START flag "
            "on the first request of the sequence"
        )

    def ready(self, instance: int) -> list[SequenceRequest]:
        """The next request of each sequence of the instance that may run now, by slot."""
        return [s.queue[0] for s in self._of(instance) if s.phase is SequencePhase.QUEUED]

    def take(self, asked: SequenceRequest) -> None:
        """Note that a request goes into a batch."""
        asked.sequence.move("take", SequencePhase.RUNNING)

    def answer(self, asked: SequenceRequest, now_ns: int) -> None:
        """Note that a request has run. No effect when its sequence is gone."""
        sequence = asked.sequence
        if sequence.phase is not SequencePhase.RUNNING:
            return
        sequence.queue.popleft()
        sequence.last_ns = now_ns
        if asked.end:
            sequence.move("answer", SequencePhase.GONE)
            self._leave(sequence)
        else:
            sequence.move("answer", SequencePhase.QUEUED if sequence.queue else SequencePhase.IDLE)

    # --- ends -------------------------------------------------------------------------------------

    def lose(self, sequence: RequestSequence) -> list[SequenceRequest]:
        """Free the slot of a sequence whose client left. Return its requests, which will not run."""
        if sequence.phase is SequencePhase.GONE:
            return []
        sequence.move("lose", SequencePhase.GONE)
        left = list(sequence.queue)
        sequence.queue.clear()
        self._leave(sequence)
        return left

    def lose_instance(self, instance: int, now_ns: int) -> list[SequenceRequest]:
        """Its process died, and with it what its sequences had built up. While another instance has a
        process, no sequence begins here."""
        held = list(self._of(instance))
        self._down.add(instance)
        for sequence in held:
            self._remember_lost(sequence.id, now_ns)
        return [asked for sequence in held for asked in self.lose(sequence)]

    def _was_lost(self, id: SequenceId, now_ns: int) -> bool:
        """Whether the sequence was lost with its worker, no longer ago than a sequence may be idle. It is
        forgotten."""
        return self._lost.pop(id, 0) > now_ns

    def _remember_lost(self, id: SequenceId, now_ns: int) -> None:
        self._lost.pop(id, None)
        while self._lost and (len(self._lost) >= MOST_LOST or next(iter(self._lost.values())) <= now_ns):
            del self._lost[next(iter(self._lost))]
        self._lost[id] = now_ns + self._idle_ns

    def regain_instance(self, instance: int) -> None:
        """Note that an instance has a process again."""
        self._down.discard(instance)
        self._admit()

    def reap(self, now_ns: int) -> int:
        """Forget idle sequences whose time is up; return how many."""
        late = [s for s in self._idle() if s.last_ns + self._idle_ns <= now_ns]
        for sequence in late:
            sequence.move("reap", SequencePhase.GONE)
            self._leave(sequence)
        return len(late)

    def next_reap_ns(self) -> int:
        """When `reap` would next find one; 0 for never."""
        return min((s.last_ns + self._idle_ns for s in self._idle()), default=0)

    def everything(self) -> list[SequenceRequest]:
        """End all sequences and return every request not yet answered."""
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
        return self.outstanding - sum(s.phase is SequencePhase.RUNNING for s in held)

    # --- slots ------------------------------------------------------------------------------------

    def _begin(self, id: SequenceId) -> RequestSequence:
        self._born += 1
        sequence = self._live[id] = RequestSequence(id, self._born)
        self._backlog.append(sequence)
        return sequence

    def _admit(self) -> None:
        """Free slots go to the backlog's oldest, on the instance with the most room; with no process at all
        sequences wait in their slots, where somebody looks after what waits for a worker."""
        while self._backlog and (slot := self._free_slot()) >= 0:
            sequence = self._backlog.popleft()
            self._slots[slot] = sequence
            sequence.slot = slot
            sequence.move("admit", SequencePhase.QUEUED)

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

    def _leave(self, sequence: RequestSequence) -> None:
        if self._live.get(sequence.id) is sequence:
            del self._live[sequence.id]
        if sequence.slot >= 0:
            self._slots[sequence.slot] = None
        else:
            self._backlog.remove(sequence)
        sequence.state = {}
        self._admit()

    def _of(self, instance: int) -> Iterable[RequestSequence]:
        first = instance * self.width
        return (s for s in self._slots[first : first + self.width] if s is not None)

    def _idle(self) -> Iterable[RequestSequence]:
        return (s for s in self._slots if s is not None and s.phase is SequencePhase.IDLE)


log = logging.getLogger(__name__)

SEQUENCE_DIED = "the worker process that held this sequence died"

_LOSING = (Kind.UNAVAILABLE, Kind.CANCELLED)


@dataclass(frozen=True, slots=True)
class SequenceStrategy:
    """How batches are formed. `preferred` sizes and `fill` (a share of the slots) end the wait early."""

    direct: bool
    width: int
    delay_ns: int
    preferred: frozenset[int]
    fill: float
    idle_ns: int
    most: int = 1 << 62  # requests that may wait


def strategy_of(options: SequenceOptions, max_batch_size: int, most: int = 1 << 62) -> SequenceStrategy:
    """How a model's sequences form batches, of at most so many requests that wait."""
    rows = max(1, max_batch_size)
    return SequenceStrategy(
        direct=options.direct,
        width=rows if options.direct else options.max_candidates or rows,
        delay_ns=options.delay_us * 1000,
        preferred=frozenset(options.preferred_sizes),
        fill=options.fill,
        idle_ns=options.idle_us * 1000,
        most=most,
    )


@dataclass(slots=True, eq=False)
class _Waiting:
    """A client's request and the future of its answer."""

    request: InferRequest
    answer: asyncio.Future[MemberAnswer]
    cancel: Callable[[], None] | None = None


class SequenceScheduler(Scheduler):
    """Scheduler of a sequence model. It runs on the event loop's thread only."""

    def __init__(
        self,
        model: str,
        senders: Sequence[BatchSender],
        extras: SequenceInputs,
        strategy: SequenceStrategy,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.sequences = SequenceSlots(model, len(senders), strategy.width, strategy.idle_ns)
        self._model = model
        self._senders = list(senders)
        self._extras, self._strategy, self._clock = extras, strategy, clock
        self._busy = [False] * len(senders)
        self._asked = 0
        self._most = strategy.most + strategy.width * len(senders)  # a request of each slot may run
        self._pumping: set[int] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._closed = False

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        if self._closed:
            raise version_gone()
        rows = check_inputs(version, request.inputs)
        if version.batching and rows != 1:
            raise invalid(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements "
                "of sequence batcher"
            )
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        counters, began_ns = counters_of(version), self._clock()
        try:
            if self._asked >= self._most:
                raise self._senders[0].full()
            asked = self.sequences.ask(
                request.sequence_id,
                start=request.sequence_start,
                end=request.sequence_end,
                what=waiting,
                now_ns=began_ns,
            )
        except ServeError:
            counters.end(REJECTED)
            raise
        self._look()
        self._asked += 1
        try:
            return (await self._answered(asked)).respond(request)
        except (ServeError, asyncio.CancelledError) as error:
            if waiting.cancel is None:  # else its queue counts it
                counters.end(_end_of(error), self._clock() - began_ns)
            raise
        finally:
            self._asked -= 1

    async def _answered(self, asked: SequenceRequest) -> MemberAnswer:
        """Raises what ended the request; a client that leaves ends its sequence."""
        waiting: _Waiting = asked.what
        request, timer = waiting.request, None
        if request.deadline_ns:
            left_s = max(request.deadline_ns - time.monotonic_ns(), 0) / 1e9
            timer = asyncio.get_running_loop().call_later(left_s, self._expire, asked)
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._give_up(asked)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def drain(self) -> None:
        while self.sequences.outstanding:
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        self._closed = True
        self._fail(self.sequences.everything(), version_gone())
        for timer in self._timers.values():
            timer.cancel()
        self._look()

    def pending(self) -> int:
        return self.sequences.waiting

    @property
    def busy(self) -> bool:
        return self.sequences.live > 0

    died_with_it = SEQUENCE_DIED

    def instance_lost(self, instance: int) -> None:
        """End the sequences of an instance whose process died. Requests under way fail with their batch."""
        lost = self.sequences.lose_instance(instance, self._clock())
        died = worker_lost(SEQUENCE_DIED)
        self._fail([a for a in lost if a.what.cancel is None], died)
        self._look()

    def instance_back(self, instance: int) -> None:
        """Let sequences begin on an instance that has a process again."""
        self.sequences.regain_instance(instance)
        self._look()

    # --- batches ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Form batches at the end of this turn of the loop, so that requests of one turn share a batch."""
        loop = asyncio.get_running_loop()
        for instance, busy in enumerate(self._busy):
            if not busy and instance not in self._pumping and self.sequences.ready(instance):
                self._pumping.add(instance)
                loop.call_soon(self._pump, instance)
        self._set_timer("reap", self.sequences.next_reap_ns(), self._reap)
        if not self.sequences.outstanding:
            self._idle.set()

    def _pump(self, instance: int) -> None:
        self._pumping.discard(instance)
        ready = self.sequences.ready(instance)
        if self._closed or self._busy[instance] or not ready:
            return
        chosen = sorted(ready, key=lambda asked: asked.arrived_ns)[: self._senders[instance].max_rows]
        due_ns = chosen[0].arrived_ns + self._strategy.delay_ns
        if not self._is_enough(len(chosen)) and self._clock() < due_ns:
            self._set_timer(f"batch {instance}", due_ns, lambda: self._pump(instance))
            return
        self._busy[instance] = True
        for asked in chosen:
            self.sequences.take(asked)
        try:
            members = self._rows_of(chosen) if self._strategy.direct else [self._member(a) for a in chosen]
        except Exception:  # an instance that is not given back its turn would never run again
            log.exception("a batch of sequences could not be formed")
            for asked in chosen:
                self._answer(asked, None, internal("the request failed"))
            self._finish(instance)
            return
        self._senders[instance].send(members, lambda: self._finish(instance))

    def _is_enough(self, count: int) -> bool:
        strategy = self._strategy
        if not strategy.delay_ns:
            return True
        if strategy.direct:
            return count / strategy.width >= strategy.fill
        return count in strategy.preferred or count >= self._senders[0].max_rows

    def _rows_of(self, chosen: Sequence[SequenceRequest]) -> list[BatchMember]:
        """A member for every slot up to the last that has a request."""
        width = self._strategy.width
        by_row = {asked.sequence.slot % width: asked for asked in chosen}
        return [
            self._member(by_row[row]) if row in by_row else self._absent(chosen[0])
            for row in range(max(by_row) + 1)
        ]

    def _member(self, asked: SequenceRequest) -> BatchMember:
        waiting: _Waiting = asked.what
        signals = SequenceSignals(asked.start, True, asked.end, asked.sequence.id)
        extra = self._extras.write(signals, asked.sequence.state)
        request = waiting.request
        if request.outputs and self._extras.states:  # a state is wanted by us, whatever the client wants
            states = (state.output for state in self._extras.states)
            request = replace(request, outputs=tuple(dict.fromkeys((*request.outputs, *states))))
        member = BatchMember(
            request,
            {**request.inputs, **extra},
            1,
            lambda answer, error: self._answer(asked, answer, error),
            queued_ns=asked.arrived_ns,
        )
        waiting.cancel = lambda: member.cancel()
        return member

    def _absent(self, like: SequenceRequest) -> BatchMember:
        inputs = like.what.request.inputs
        inputs = {name: empty_like(tensor) for name, tensor in inputs.items()}
        extra = self._extras.write(SequenceSignals(), {})
        return BatchMember(InferRequest({}), {**inputs, **extra}, 1, _drop, queued_ns=NOBODY)

    def _answer(self, asked: SequenceRequest, answer: MemberAnswer | None, error: ServeError | None) -> None:
        waiting: _Waiting = asked.what
        alive = asked.sequence.phase is not SequencePhase.GONE
        if answer is not None:
            kept = self._extras.keep(answer.outputs)
            if alive:
                asked.sequence.state.update(kept)
        if error is not None and (error.kind in _LOSING or isinstance(error, DeadlineError)):
            self._end(asked)  # what the request would have added is missing from now on
        self.sequences.answer(asked, self._clock())
        if waiting.answer.done():
            if answer is not None:
                answer.release()
        elif answer is not None:
            waiting.answer.set_result(answer)
        elif error is not None:
            waiting.answer.set_exception(error)

    def _finish(self, instance: int) -> None:
        self._busy[instance] = False
        self._look()

    # --- ends ---------------------------------------------------------------------------------------

    def _give_up(self, asked: SequenceRequest) -> None:
        waiting: _Waiting = asked.what
        if waiting.cancel is not None:
            waiting.cancel()
        if waiting.answer.done() and not waiting.answer.cancelled() and not waiting.answer.exception():
            waiting.answer.result().release()
        self._end(asked)
        self._look()

    def _expire(self, asked: SequenceRequest) -> None:
        """Fail a request whose deadline passed while it waited; the queue fails one that already runs."""
        waiting: _Waiting = asked.what
        if waiting.cancel is None and not waiting.answer.done():
            waiting.answer.set_exception(queued_too_long())
            self._end(asked)
            self._look()

    def _end(self, asked: SequenceRequest) -> None:
        lost = self.sequences.lose(asked.sequence)
        self._fail([a for a in lost if a is not asked], self.sequences.unknown(asked.sequence.id))

    def _fail(self, lost: Sequence[SequenceRequest], error: ServeError) -> None:
        for asked in lost:
            if not asked.what.answer.done():
                asked.what.answer.set_exception(error)

    def _reap(self) -> None:
        self.sequences.reap(self._clock())
        self._look()

    def _set_timer(self, name: str, when_ns: int, work: Callable[[], None]) -> None:
        known = self._timers.pop(name, None)
        if known is not None:
            known.cancel()
        if when_ns and not self._closed:
            left_s = max(when_ns - self._clock(), 0) / 1e9
            self._timers[name] = asyncio.get_running_loop().call_later(left_s, work)


def _end_of(error: BaseException) -> int:
    if isinstance(error, asyncio.CancelledError):
        return CANCELED
    return REJECTED if isinstance(error, DeadlineError) else OTHER


def _drop(answer: MemberAnswer | None, error: ServeError | None) -> None:
    if answer is not None:
        answer.release()
