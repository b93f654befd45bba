"""A lane whose batches are formed in this process: what is sent together runs together, and nothing joins it.

The arena must be made with `NEVER_US` as its delay (`sealed_config`), so that no worker takes a batch before
it was sealed here. The doors that need to choose what runs next (sequences, priorities) send through this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from fastserve.engine.engine import submit_request
from fastserve.engine.forms import form_of
from fastserve.engine.lane import Lane, Ticket
from fastserve.errors import Kind, ServeError
from fastserve.request import InferRequest
from fastserve.tensor import Tensor

NOBODY = -1  # `queued_ns` of a row that fills a place in its batch and is counted nowhere
NEVER_US = 1 << 50  # times 1000 it still fits the arena's nanoseconds


@dataclass(slots=True, eq=False)
class Answer:
    """What a member of a batch came to. `outputs` are views until `release()`."""

    outputs: dict[str, Tensor]
    release: Callable[[], None]
    parameters: Mapping[str, object] = field(default_factory=dict)


Done = Callable[["Answer | None", "ServeError | None"], None]


@dataclass(slots=True, eq=False)
class Member:
    """One request of a batch. `done` is called once, never from inside `send`, unless `cancel` came first."""

    request: InferRequest
    inputs: Mapping[str, Tensor]
    rows: int
    done: Done
    cancel: Callable[[], None] = lambda: None
    queued_ns: int = 0  # since when it waits, before this batch too; CLOCK_MONOTONIC; NOBODY: no request


class Sender(Protocol):
    """Where batches go: a Sealed lane, or what a test puts in its place."""

    max_rows: int

    def send(self, members: Sequence[Member], finished: Callable[[], None]) -> None:
        """Run these as one batch; `finished` is called when every one is answered or given up."""


def sealed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The worker's config for an arena that is sealed by hand."""
    return {**config, "max_queue_delay_us": NEVER_US}


class Sealed:
    """The sender over a lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.max_rows = lane.max_rows
        self._form = form_of(lane)

    def send(self, members: Sequence[Member], finished: Callable[[], None]) -> None:
        left = len(members)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                finished()

        last, full = -1, None
        for member in members:
            try:
                if full is None:
                    last = self._send_one(member, one_less)
            except ServeError as error:
                full = error  # the rest would be in rows that are not theirs
            if full is not None:
                asyncio.get_running_loop().call_soon(_refuse, member, full, one_less)
        if last >= 0:
            self.lane.ring.seal(last)

    def _send_one(self, member: Member, one_less: Callable[[], None]) -> int:
        """The member's place. Raises ServeError when there is no room for it."""
        answer, ticket = submit_request(
            self.lane, self._form, member.request, dict(member.inputs), member.rows
        )

        def settle(_: object) -> None:
            if not answer.cancelled():
                error = answer.exception()
                if error is None:
                    self._read(member, answer.result())
                else:
                    member.done(None, error if isinstance(error, ServeError) else _internal())
            one_less()

        def cancel() -> None:
            self.lane.cancel(ticket)
            if not answer.done():
                answer.cancel()

        answer.add_done_callback(settle)
        member.cancel = cancel
        if member.queued_ns:
            self.lane.ring.backdate(ticket.place, max(member.queued_ns, 0))
        return ticket.place

    def _read(self, member: Member, ticket: Ticket) -> None:
        if member.request.times is not None:
            member.request.times.extend(self.lane.ring.times_ns(ticket.place >> 16))
        try:
            outputs, parameters = self._form.read(self.lane, ticket.place, ticket.rows)
        except ServeError as error:
            self.lane.release(ticket)
            member.done(None, error)
            return
        member.done(Answer(outputs, partial(self.lane.release, ticket), parameters), None)


def _refuse(member: Member, error: ServeError, one_less: Callable[[], None]) -> None:
    member.done(None, error)
    one_less()


def _internal() -> ServeError:
    return ServeError(Kind.INTERNAL, "the request failed")
