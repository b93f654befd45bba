"""Looks at real counters, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastserve.dialects.admin import figures
from fastserve.dialects.admin.history import ALL, MODELS_MAX, POINTS, WINDOW, History
from fastserve.metrics import Registry, names

SECOND = 1_000_000_000


@pytest.fixture
def registry() -> Iterator[Registry]:
    found = Registry()
    yield found
    found.close()


def count(registry: Registry, model: str, status: str = "OK", times: int = 1) -> None:
    registry.counters(names.REQUESTS).of(model, "1", "tfserving", status).add(times)


def looks(history: History, count: int, begin: int = 0) -> None:
    for number in range(begin, begin + count):
        history.look(number * 2 * SECOND)


def test_the_first_look_is_no_point_and_the_second_is(registry: Registry) -> None:
    history = History(registry)
    assert (history.models(), history.causes(), history.growth(ALL)[0]) == ([], [], {})
    history.look(0)
    assert history.seen == 0
    count(registry, "m", times=6)
    history.look(2 * SECOND)
    assert history.seen == 1
    assert history.points("m", 0)["requests_per_s"] == [3.0]
    assert history.points(ALL, 0)["requests_per_s"] == [3.0]
    assert history.points(ALL, 0)["p50_ms"] == [None]


def test_now_is_the_window_and_not_before(registry: Registry) -> None:
    history = History(registry)
    history.look(0)
    count(registry, "m", times=1000)
    looks(history, WINDOW + 1, begin=1)
    count(registry, "m", times=20)
    looks(history, 1, begin=WINDOW + 2)
    growth, seconds = history.growth("m")
    assert growth["requests"] == (20.0,)
    assert seconds == 2.0 * WINDOW


def test_points_are_told_once_and_kept_as_many_as_said(registry: Registry) -> None:
    history = History(registry)
    count(registry, "m")
    looks(history, POINTS + 11)
    assert history.seen == POINTS + 10
    assert len(history.points("m", 0)["requests_per_s"]) == POINTS
    assert len(history.points("m", history.seen - 3)["queue_rows"]) == 3
    assert history.points("m", history.seen)["queue_rows"] == []
    assert history.points("nobody", 0) == {}


def test_causes_name_the_kind_the_model_and_the_rate(registry: Registry) -> None:
    history = History(registry)
    count(registry, "m", "INVALID_ARGUMENT", 3)
    history.look(0)
    count(registry, "m", "INVALID_ARGUMENT", 4)
    count(registry, "m", times=9)
    registry.counters(names.REJECTS).of("m", "1", "queue_rows").add(2)
    registry.counters(names.CANCELS).of("m", "1", "queued").add(1)
    registry.counters(names.WIRE_REJECTS).of("http", "framing").add(5)
    history.look(2 * SECOND)
    assert {key: (total, rate) for key, total, rate in history.causes()} == {
        ("status", "m", "INVALID_ARGUMENT"): (7.0, 2.0),
        ("wire", "", "framing"): (5.0, 2.5),
        ("reject", "m", "queue_rows"): (2.0, 1.0),
        ("cancel", "m", "queued"): (1.0, 0.5),
    }
    assert history.growth("m")[0]["errors"] == (4.0,)


def test_many_models_cost_a_bounded_number_of_histories(registry: Registry) -> None:
    history = History(registry)
    for number in range(MODELS_MAX + 5):
        count(registry, f"m{number:04}")
    looks(history, 3)
    kept = [name for name in history.models() if history.points(name, 0)]
    assert len(history.models()) == MODELS_MAX + 5
    assert len(kept) == MODELS_MAX
    assert history.points(ALL, 0)


def test_requests_for_nobody_count_in_the_servers_figures_alone(registry: Registry) -> None:
    history = History(registry)
    history.look(0)
    count(registry, "", "NOT_FOUND", 8)
    history.look(2 * SECOND)
    assert history.models() == []
    assert history.points(ALL, 0)["errors_per_s"] == [4.0]


def test_a_model_that_generates_text_has_figures_of_it(registry: Registry) -> None:
    history, who = History(registry), ("llm", "1")
    count(registry, "other")
    history.look(0)
    history.look(2 * SECOND)
    registry.counters(names.TEXT_TOKENS).of(*who).add(100)
    registry.counters(names.TEXT_PROMPT_TOKENS).of(*who).add(30)
    registry.gauges(names.TEXT_RUNNING).of(*who).set(3)
    registry.gauges(names.TEXT_WAITING).of(*who).set(2)
    registry.gauges(names.TEXT_KV_USED).of(*who).set(70)
    registry.gauges(names.TEXT_KV).of(*who).set(1000)
    for seconds in (0.004, 0.04):
        registry.histograms(names.TEXT_FIRST_TOKEN).of(*who).observe(seconds)
        registry.histograms(names.TEXT_TOKEN_GAP).of(*who).observe(seconds / 10)
    history.look(4 * SECOND)
    history.look(6 * SECOND)
    found = figures.describe_text(*history.growth("llm"))
    assert found is not None
    assert (found.tokens_per_s, found.prompt_tokens_per_s) == (100 / 6, 5.0)
    levels = (found.running, found.waiting, found.kv_used_tokens, found.kv_tokens)
    assert levels == (3, 2, 70, 1000)
    assert found.first_p50_ms is not None
    assert found.first_p99_ms is not None
    assert found.gap_p50_ms is not None
    assert 2.5 < found.first_p50_ms <= 5 < 25 < found.first_p99_ms <= 50
    assert 0.25 < found.gap_p50_ms <= 0.5
    points = history.points("llm", 0)
    assert points["tokens_per_s"] == [50.0, 0.0]
    assert points["running"] == [3.0, 3.0]
    assert points["first_p50_ms"][1] is None
    assert history.points("llm", 2)["tokens_per_s"] == [0.0]
    assert history.points(ALL, 0)["tokens_per_s"] == [50.0, 0.0]
    assert len(history.points(ALL, 0)["requests_per_s"]) == 3
    assert figures.describe_text(*history.growth("other")) is None
    assert "tokens_per_s" not in history.points("other", 0)
