"""How much of prompts a step may read."""

from __future__ import annotations

import pytest

from fastserve.backends.llm.scheduling import LEAST_READ, PrefillBudget

MS = 1_000_000


def run(
    pace: PrefillBudget, *, write_ms: float, token_ms: float, writing: int, reading: int = 1, steps: int = 30
) -> int:
    """Steps of a machine as fast as that; what the last of them read."""
    room = 0
    for _ in range(steps):
        pace.took(writing, 0, int(write_ms * MS))
        room = pace.room(128, writing, 1)
        pace.took(writing, room, int((write_ms + room * token_ms) * MS))
    return room


def test_a_step_takes_as_long_as_it_may() -> None:
    assert run(PrefillBudget(12), write_ms=5, token_ms=0.1, writing=16) == pytest.approx(70, abs=2)
    assert run(PrefillBudget(12), write_ms=1, token_ms=0.01, writing=16) == 112, "no more than step_tokens"


def test_a_slow_model_reads_for_as_long_as_it_writes() -> None:
    assert run(PrefillBudget(12), write_ms=100, token_ms=2, writing=4) == pytest.approx(50, abs=2)
    assert run(PrefillBudget(12), write_ms=100, token_ms=20, writing=4) == LEAST_READ
    assert PrefillBudget(12).room(8, 4, 1) == 8, "step_tokens may be less than that"


def test_those_who_wait_go_first_while_they_are_more() -> None:
    pace = PrefillBudget(12)
    run(pace, write_ms=5, token_ms=0.1, writing=16)
    assert pace.room(128, 16, 17) == 112
    assert pace.room(128, 16, 16) < 80
    assert pace.room(128, 0, 1) == pace.room(128, 0, 0) == 128, "nobody who writes waits"


def test_nothing_is_known_at_first_and_0_bounds_nothing() -> None:
    assert PrefillBudget(12).room(128, 16, 1) == 112
    assert run(PrefillBudget(0), write_ms=50, token_ms=5, writing=16) == 112


def test_a_busy_moment_is_forgotten() -> None:
    pace = PrefillBudget(12)
    run(pace, write_ms=5, token_ms=0.1, writing=16)
    pace.took(16, 70, 80 * MS)
    pace.took(16, 0, 60 * MS)
    assert run(pace, write_ms=5, token_ms=0.1, writing=16, steps=8) == pytest.approx(70, abs=3)


def test_writers_who_joined_since_are_not_taken_for_slow_reading() -> None:
    """Nobody only writes while many prompts are read: what is known of writing grows old."""
    pace = PrefillBudget(12)
    pace.took(1, 0, 3 * MS)
    for writing in range(1, 32):
        room = pace.room(128, writing, 1)
        pace.took(writing, room, int((3 + (writing + room) * 0.1) * MS))
    assert pace.room(128, 32, 1) == pytest.approx(60, abs=4), "12 ms less 3 and 32 times 0.1"


def test_writers_who_left_since() -> None:
    pace = PrefillBudget(12)
    run(pace, write_ms=6, token_ms=0.1, writing=32)
    assert pace.room(128, 16, 1) == pytest.approx(90, abs=2), "half of them write in 3 ms"
