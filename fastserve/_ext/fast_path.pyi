import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fastserve._ext.batch_ring import BatchRing
from fastserve._ext.shared_metrics import BatchMetrics, Counter, Histogram
from fastserve.util.spans import RequestSpan

DEADLINE_TICK_NS: int
ACCOUNTS_MIXED_NS: int
ACCOUNT: ContextVar[Account | None]

class Account:
    name: str
    rows: int
    compute_ns: float
    charged: bool
    weight: float
    board: Any
    def check_rows(self) -> None: ...

class CountedEndpoint:
    endpoint: Any
    counter: Any
    account: Account
    def __init__(self, account: Account, counter: Any, endpoint: Any) -> None: ...
    def __call__(self, call: Any) -> Any: ...

class SampleCountdown:
    left: int

def sample_endpoint(
    countdown: SampleCountdown, endpoint: Callable[[Any], Any], turn: Callable[[Any], Any]
) -> Callable[[Any], Any]: ...
def sample_start(
    countdown: SampleCountdown, start: Callable[[bytes, Any], bool], turn: Callable[[bytes, Any], bool]
) -> Callable[[bytes, Any], bool]: ...

class FastSpan:
    span: RequestSpan
    def __init__(
        self,
        span: RequestSpan,
        exchange: Any,
        end: Callable[[Any, RequestSpan, BaseException | None], None],
        traced: dict[Any, FastSpan],
    ) -> None: ...
    @property
    def under_way(self) -> bool: ...
    def ended(self, exchange: Any, error: BaseException | None) -> None: ...
    def gone(self) -> None: ...

class Ticket:
    queue: Any
    lease: int
    deadline_ns: int
    submitted_ns: int
    rows: int
    done: Callable[[Ticket, Any], object] | None
    context: Any
    account: Account | None
    def __call__(self) -> None: ...

class TicketTable:
    ring: BatchRing
    room: Any
    metrics: Any
    submitted: int
    waiting: int
    unreleased: int
    by_slot: list[list[Ticket]]
    seqs: list[int]
    wake_handle: asyncio.Handle | None
    alarm_ns: int
    due_ns: int
    idle: list[asyncio.Future[None]]
    newest: Account | None
    mixed_ns: int
    look_ns: int
    def __init__(self, ring: BatchRing, slots: int, metrics: BatchMetrics) -> None: ...
    def submit(
        self,
        lease: int,
        rows: int,
        done: Callable[[Ticket, Any], object] | Lifecycle,
        deadline_ns: int = 0,
        context: Any = None,
        account: Account | None = None,
    ) -> Ticket: ...
    def release(self, ticket: Ticket) -> None: ...
    def finish(self, slot: int) -> None: ...
    def deliver(self, done: Callable[[Ticket, Any], object], ticket: Ticket, error: Any) -> None: ...

class Lifecycle:
    queue: Any
    accounted: bool
    def __init__(
        self,
        queue: Any,
        refusals: type[Exception],
        metrics: tuple[Counter, Histogram, Histogram, Histogram],
        answered: Callable[[Any, int, int], None] | None,
        traced: dict[Any, Any],
        replies: bool = False,
    ) -> None: ...
    def start(
        self, exchange: Any, prepared: Any, source: Any, request_id: Any = None, deadline_ns: int = 0
    ) -> bool: ...
    def decoded(self, exchange: Any) -> None: ...
    def admits(self, exchange: Any) -> bool: ...
    def fill(self, prepared: Any, source: Any, request_id: Any) -> tuple[Any, ...] | None: ...
    def submit(
        self,
        exchange: Any,
        prepared: Any,
        reserved: tuple[Any, ...],
        request_id: Any,
        held: Any,
        deadline_ns: int,
    ) -> None: ...
    def count(self, exchange: Any, prepared: Any, began_ns: int, ran_ns: int = 0) -> None: ...

class Columns:
    ring: BatchRing
    def __init__(self, ring: BatchRing, columns: list[int]) -> None: ...
    def reserve(
        self, rows: int, note: bytes = b""
    ) -> tuple[int, list[memoryview], tuple[int, int]] | None: ...
    def read(self, lease: int, rows: int) -> tuple[Any, list[memoryview]]: ...

class Leaving:
    def __init__(self, ticket: Ticket, held: Any) -> None: ...
    def __call__(self) -> None: ...
