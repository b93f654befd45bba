"""What HTTP and gRPC share: what is kept of versions, and the status of every reply."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns

from fastserve.dialects.triton_v1.answers import Answers
from fastserve.dialects.triton_v1.names import STATUS_OF, SUCCESS
from fastserve.dialects.triton_v1.statistics import Counts, Statistics
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.protos import load
from fastserve.protos.text import quote
from fastserve.repository.version import Version
from fastserve.serving.dialect import ServingContext
from fastserve.serving.model_view import ModelView, find_version
from fastserve.serving.paths import Kept
from fastserve.serving.service import DialectService

SERVER_ID = "inference:0"
GOOD = f'code: {SUCCESS} server_id: "{SERVER_ID}" request_id: '.encode()
QUEUE_FULL = "Exceeds maximum queue size"
NO_SEQUENCE = "non-zero or non-empty correlation ID"  # V1 has no sequences named by a string
_V2_PREFIX = re.compile(r"\A\[request id: [^\]]*\] ")
TOO_LATE = "Request timeout expired"


@dataclass(slots=True)
class Served:
    """A version this API has been asked for: what it says of it, and its counts."""

    view: ModelView
    answers: Answers
    counts: Counts


class Service(DialectService):
    """One per front process, shared by all listeners."""

    def __init__(self, context: ServingContext) -> None:
        super().__init__(context, "triton_v1")
        self.statistics = Statistics()
        self._codes: dict[str, int] = dict(load("triton_v1").RequestStatusCode.items())
        self.started_ns = monotonic_ns()
        self.next_id: Callable[[], int] = itertools.count(1).__next__
        self.served = Kept(self.keepers, self._serve)

    def _serve(self, version: Version) -> Served:
        view = self.views.of(version)
        return Served(view, Answers(view), self.statistics.of(version))

    def find(self, model: str, number: int | None) -> Served:
        """The available version, the highest for None. Raises ServeError UNAVAILABLE (spec 3.4)."""
        try:
            return self.served.of(find_version(self.catalog, model, number))
        except ServeError as fault:
            raise ServeError(Kind.UNAVAILABLE, fault.message) from None

    def count_failure(self, served: Served, batch_size: int, since_ns: int, fault: ServeError) -> None:
        """One request to a version was answered with an error."""
        self.traffic.refused(served.view.model, fault.kind.name)
        if 1 <= batch_size <= max(1, served.view.max_batch_size):  # clients choose no counters
            served.counts[batch_size].failed.add(monotonic_ns() - since_ns)

    def status_line(self, fault: ServeError | None) -> bytes:
        """RequestStatus in one line of text: the value of NV-Status."""
        if fault is None:
            return b"%b%d" % (GOOD, self.next_id())
        text = quote(fault.message)
        word = STATUS_OF[fault.kind]
        return f'code: {word} msg: {text} server_id: "{SERVER_ID}" request_id: {self.next_id()}'.encode()

    def status(self, fault: ServeError | None) -> tuple[int, str, str, int]:
        """RequestStatus as its fields: code, msg, server_id, request_id."""
        if fault is None:
            return self._codes[SUCCESS], "", SERVER_ID, self.next_id()
        text = fault.message.encode("utf-8", "replace").decode()
        return self._codes[STATUS_OF[fault.kind]], text, SERVER_ID, self.next_id()


def as_v1(fault: ServeError) -> ServeError:
    """The engine's faults that the original has words of its own for (spec 3.4)."""
    if isinstance(fault, DeadlineError) and fault.queued:
        return ServeError(Kind.UNAVAILABLE, TOO_LATE)
    if fault.kind is Kind.UNAVAILABLE and fault.retry_after_s is not None:
        return ServeError(Kind.UNAVAILABLE, QUEUE_FULL)
    text = _V2_PREFIX.sub("", fault.message)
    return ServeError(fault.kind, text.replace(NO_SEQUENCE, "non-zero correlation ID"))
