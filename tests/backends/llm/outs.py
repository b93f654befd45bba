"""Where the tests' engines put what they make."""

from __future__ import annotations

from collections.abc import Callable

from fastserve.backends.llm.protocols import TextEngine, TextRequest
from fastserve.codec.generation import Extra, Finish, Sampling, TextNote, read_extra


class Heard:
    """An Out that keeps everything, by rid; `blocked` readers have no room."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Finish] = {}
        self.extras: dict[int, list[Extra]] = {}
        self.took_us: dict[int, list[int]] = {}
        self.order: list[int] = []
        """The sequences whose first tokens came, in their order."""
        self.blocked: set[int] = set()

    def token(
        self, rid: int, token: int, finish: Finish = Finish.NONE, took_us: int = 0, extra: bytes = b""
    ) -> None:
        assert rid not in self.ended
        assert rid not in self.blocked
        if rid not in self.tokens:
            self.order.append(rid)
        self.tokens.setdefault(rid, []).append(token)
        self.took_us.setdefault(rid, []).append(took_us)
        if extra:
            self.extras.setdefault(rid, []).append(read_extra(extra))
        if finish:
            self.ended[rid] = finish

    def end(self, rid: int, finish: Finish, extra: bytes = b"") -> None:
        assert rid not in self.ended
        assert finish
        self.ended[rid] = finish
        if extra:
            self.extras.setdefault(rid, []).append(read_extra(extra))

    def room(self, rid: int) -> bool:
        return rid not in self.blocked


def ask(
    rid: int, ids: list[int], *, priority: int = 5, deadline_ns: int = 0, **settings: object
) -> TextRequest:
    """A request; `settings` are those of Sampling."""
    note = TextNote(sampling=Sampling(**settings), priority=priority, deadline_ns=deadline_ns)  # type: ignore[arg-type]
    return TextRequest(rid, ids, note)


def run(
    engine: TextEngine, requests: list[TextRequest], meanwhile: Callable[[int, Heard], None] | None = None
) -> Heard:
    """All of them to their ends. `meanwhile` is called before each step with its number."""
    heard, steps = Heard(), 0
    for request in requests:
        engine.submit(request)
    while engine.pending():
        if meanwhile is not None:
            meanwhile(steps, heard)
        engine.step(heard)
        steps += 1
        assert steps < 100_000
    return heard
