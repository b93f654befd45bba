"""The model behind `python -m bench.load frontends`: what it fits, and what it says of larger machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.load import scale
from bench.load.scale import Cell, Costs


def cell(fronts: int, front_us: float, sleeps: float = 0.1, worker_us: float = 4.0) -> Cell:
    return Cell("HTTP", "tiny", fronts, 1, 1000.0 * fronts, 0.0, front_us, worker_us, sleeps, 0.1)


def test_a_fit_finds_the_costs_that_made_the_figures() -> None:
    sleeps = {1: 0.02, 2: 0.1, 4: 0.2, 8: 0.4}
    cells = [cell(n, 20.0 + 90.0 * s + scale.lines_us(n, 1), s) for n, s in sleeps.items()]
    costs = Costs.fit(cells)
    found = (costs.front_us, costs.wake_us, costs.sleeps, costs.worker_us)
    assert found == pytest.approx((20.0, 90.0, 0.02, 4.0))


def test_sleeps_that_cost_nothing_count_as_nothing() -> None:
    assert Costs.fit([cell(1, 20.0, 0.1), cell(1, 15.0, 0.5)]).wake_us == 0.0
    assert Costs.fit([cell(1, 20.0)]).front_us == pytest.approx(20.0)


def test_lines_cost_more_with_more_fronts_and_between_sockets() -> None:
    assert scale.lines_us(1, 16) == 0.0
    assert scale.lines_us(2, 16) < scale.lines_us(8, 16) < scale.lines_us(8, 64)


@pytest.mark.parametrize(
    ("costs", "split", "limit"),
    [
        (Costs(20.0, 90.0, 0.01, 4.0), (1, 4, 16), "front processes"),
        (Costs(20.0, 90.0, 0.01, 40.0), (8, 2, 16), "workers"),
        (Costs(20.0, 90.0, 0.01, 4.0), (15, 15, 16), "cores"),
        (Costs(2.0, 9.0, 0.01, 0.5), (32, 16, 64), "words of the open slot"),
    ],
)
def test_the_limit_is_named(costs: Costs, split: tuple[int, int, int], limit: str) -> None:
    rate, found = costs.rate(*split)
    assert found == limit
    assert rate > 0


def test_the_best_split_is_the_best_of_all() -> None:
    costs = Costs(20.0, 90.0, 0.01, 10.0)
    fronts, workers, rate, _ = costs.best(16)
    assert fronts + workers == 16
    assert rate == max(costs.rate(f, 16 - f, 16)[0] for f in range(1, 16))


def test_costs_are_told_apart_by_process() -> None:
    """This process counts as a front process that has no workers."""

    class Own:
        process = type("P", (), {"pid": os.getpid()})()

    front_s, _, front_sleeps, _ = scale.spent(Own())  # type: ignore[arg-type]
    assert front_s > 0
    assert front_sleeps >= 0


def test_the_line_of_a_cell_says_what_a_request_cost() -> None:
    row = cell(2, 25.0).row(1000.0)
    assert (row.workload, row.value) == ("tiny HTTP, 2 x 1", 2.0)
    assert "CPU 25 + 4 us" in row.note


def test_models_of_the_table_are_there() -> None:
    assert all((Path(scale.workloads.REPOSITORY) / model).is_dir() for _, model in scale.LOADS)
