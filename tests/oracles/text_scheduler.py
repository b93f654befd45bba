"""The scheduler of text sequences, plainly: lists, sorted at each step. Only who gets on by how much."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PlainSequence:
    rid: int
    unread: int
    limit: int
    priority: int
    begun: bool = False
    drawn: int = 0


class PlainScheduler:
    """The text scheduler in plain Python: `step` returns rids that get a token, and rids that end without."""

    def __init__(self, slots: int, step_tokens: int) -> None:
        self.slots, self.step_tokens = slots, step_tokens
        self.alive: list[PlainSequence] = []
        self.cancelled: set[int] = set()

    def submit(self, rid: int, prompt: int, limit: int, priority: int) -> None:
        self.alive.append(PlainSequence(rid, prompt, limit, priority))

    def cancel(self, rid: int) -> None:
        self.cancelled.add(rid)

    def step(self, blocked: set[int]) -> tuple[set[int], set[int]]:
        ended = {one.rid for one in self.alive if one.rid in self.cancelled}
        self.alive = [one for one in self.alive if one.rid not in ended]
        writing = [one for one in self.alive if not one.unread and one.rid not in blocked]
        tokens = {one.rid for one in writing} | self._read(len(writing))
        for one in self.alive:
            one.drawn += one.rid in tokens
        self.alive = [one for one in self.alive if one.drawn < one.limit]
        return tokens, ended

    def _read(self, writing: int) -> set[int]:
        left = max(self.step_tokens - writing, min(16, self.step_tokens))
        done = set()
        for one in sorted(self.alive, key=lambda one: one.priority):  # stable: arrival after priority
            full = sum(other.begun for other in self.alive) >= self.slots
            if not one.unread or left <= 0 or (full and not one.begun):
                continue
            one.begun = True
            count = min(one.unread, left)
            one.unread, left = one.unread - count, left - count
            if not one.unread:
                done.add(one.rid)
        return done
