"""Stop strings: where an answer ends, however its characters are spread over tokens.

    stops = StopStrings(["END"])
    stops.feed("the E")     -> "the "       the E may be the beginning of END: it is held back
    stops.feed("gg")        -> "Egg"
    stops.feed(" END!")     -> " "          and `stops.found` is "END"

The match that is complete first wins, of several that end together the longest: what is found depends on the
text only, never on its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Those of one sequence. Bounds: ask.check_stops."""

    __slots__ = ("_beginnings", "_include", "_stops", "found", "held")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._beginnings = _beginnings(self._stops)
        self.held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What may be passed on, now that `text` has come. After `found` is set nothing more may be fed."""
        text = self.held + text
        self.held = ""
        found = self._first(text)
        if found is not None:
            end, self.found = found
            return text[: end if self._include else end - len(self.found)]
        keep = self._held_back(text)
        if keep:
            self.held = text[-keep:]
            return text[:-keep]
        return text

    def flush(self) -> str:
        """What was held back: no more text comes."""
        held, self.held = self.held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = at + len(stop), stop
        return best

    def _held_back(self, text: str) -> int:
        """Characters at its end that a stop string begins with."""
        for beginning in self._beginnings.get(text[-1:], ()):
            if text.endswith(beginning):
                return len(beginning)
        return 0


def _beginnings(stops: Sequence[str]) -> dict[str, list[str]]:
    """Every beginning of a stop string by its last character, the longest first."""
    found: dict[str, set[str]] = {}
    for stop in stops:
        for size in range(1, len(stop)):
            found.setdefault(stop[size - 1], set()).add(stop[:size])
    return {last: sorted(some, key=len, reverse=True) for last, some in found.items()}
