"""State that clients change and that all front processes have alike, such as regions of client memory.

    a front's part      state.ask("regions", change) -----> owner: part.carry_out(change), or a ServeError
    every front's part  apply(content, fds) <-- replicate   state.publish("regions", records)
                        the reply to `ask` <-- settle      every front has applied them, or is replaced
    a front's part      state.note("regions", content) ---> owner: part.noted(front, content)
    any front           state.show("console", question) --> owner: part.answer(question), or a ServeError

The owner of the models decides every change, so that two clients who ask through two fronts get one order. It
keeps the state; what a new front process has to apply first are `records`. A front that is stopped holds
others up for as long as it does when a model is loaded: until it is ended for giving no sign of life.
A change reaches all fronts before its client gets an answer, and nobody is asked when state is read. What
only the owner keeps, such as the history of the operator's page, it shows to the clients of all fronts.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fastserve.errors import unsupported

Content = Mapping[str, Any]


class StateRecord(NamedTuple):
    """One change that was decided; `fds` travel beside it and stay the sender's."""

    content: Content
    fds: Sequence[int] = ()


class ReplicatedPart:
    """One part of the state of a front process."""

    async def carry_out(self, change: Content) -> None:
        """In the owner: do what a client of another front process asked for. Raises ServeError."""

    async def answer(self, question: Content) -> str:
        """In the owner: answer a client of any front process. Raises ServeError."""
        raise unsupported("there is nothing to show")

    def apply(self, content: Content, fds: list[int]) -> None:
        """In another front: take over a record of the owner's; the descriptors are this part's now."""

    def records(self) -> Iterator[StateRecord]:
        """In the owner: what brings a new front process to the present state."""
        return iter(())

    def noted(self, front: int, content: Content) -> None:
        """In the owner: take a note of a front process."""

    def front_ended(self, front: int) -> None:
        """In the owner: a front process has ended, with all that it used."""

    def fronts_ended(self) -> None:
        """In the owner: every other front process has ended, and this one has drained."""


Publish = Callable[[str, Sequence[StateRecord]], Awaitable[None]]
Ask = Callable[[str, Content], Awaitable[None]]
Note = Callable[[str, Content], None]
Show = Callable[[str, Content], Awaitable[str]]


class ReplicatedState:
    """The parts of one front process by name.

    With one front process there is neither `publish` nor `ask`. The owner of several has `publish`, every
    other one `ask`, `note` and `show_from_owner`.
    """

    def __init__(self) -> None:
        self.publish: Publish | None = None
        self.ask: Ask | None = None
        self.note: Note | None = None
        self.show_from_owner: Show | None = None
        self.front = 0
        """The number of this front process."""
        self.fronts: Callable[[], frozenset[int]] = frozenset
        """In the owner: the numbers of the other front processes that run now."""
        self._parts: dict[str, ReplicatedPart] = {}
        self._early: dict[str, list[tuple[Content, list[int]]]] = {}
        self._ahead: list[int] = []  # descriptors of records that are still to come

    def add(self, name: str, part: ReplicatedPart) -> None:
        """Begin to replicate a part. What came for it before is applied now."""
        self._parts[name] = part
        for content, fds in self._early.pop(name, ()):
            part.apply(content, fds)

    async def carry_out(self, name: str, change: Content) -> None:
        """In the owner: do what a client of another front process asked for. Raises ServeError."""
        await self._parts[name].carry_out(change)

    @property
    def owned(self) -> bool:
        """Whether this process decides."""
        return self.ask is None

    async def show(self, name: str, question: Content) -> str:
        """Answer a question as the owner does. Raises ServeError."""
        if self.show_from_owner is not None:
            return await self.show_from_owner(name, question)
        return await self._parts[name].answer(question)

    def noted(self, name: str, front: int, content: Content) -> None:
        """In the owner: take a note of a front process."""
        self._parts[name].noted(front, content)

    def front_ended(self, front: int) -> None:
        """In the owner: a front process has ended."""
        for part in self._parts.values():
            part.front_ended(front)

    def fronts_ended(self) -> None:
        """In the owner: every other front process has ended, and this one has drained."""
        for part in self._parts.values():
            part.fronts_ended()

    def records(self) -> list[tuple[str, StateRecord]]:
        """In the owner: what a new front process has to apply."""
        return [(name, record) for name, part in self._parts.items() for record in part.records()]

    def apply(self, written: str, fds: list[int]) -> None:
        """In another front: apply records as `write_records` wrote them; those of a part that is not there
        yet wait for it."""
        fds = self._ahead + fds
        self._ahead = [] if written else fds
        for name, content, count in json.loads(written) if written else ():
            own, fds = fds[:count], fds[count:]
            part = self._parts.get(name)
            if part is None:
                self._early.setdefault(name, []).append((content, own))
            else:
                part.apply(content, own)


def write_records(
    records: Sequence[tuple[str, StateRecord]], most_fds: int
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield the messages that bring records to a front, with at most `most_fds` descriptors each.

    Those of many records go ahead of them: a line takes few long messages that nobody reads yet, and many
    short ones. Records are ASCII text within a message: what clients write need not be Unicode.
    """
    fds = [fd for _, record in records for fd in record.fds]
    while len(fds) > most_fds:
        ahead, fds = fds[:most_fds], fds[most_fds:]
        yield {"op": "replicate", "records": ""}, ahead
    written = json.dumps([[name, one.content, len(one.fds)] for name, one in records])
    yield {"op": "replicate", "records": written}, fds
