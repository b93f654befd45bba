"""Turns of models that share resources; nothing is ever held by nobody."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.engine.schedulers.rate_limiter import RateLimiter, needs_of, read_pools
from fastserve.errors import ServeError
from fastserve.settings.model_options import Needs
from tests.engine.fakes import run
from tests.engine.schedulers.test_queued import Stage


def test_two_models_share_one_resource_and_priority_runs_twice_as_often():
    async def work():
        limiter = RateLimiter({})
        stages = [
            Stage(gate=limiter.open_gate(Needs(resources={"r": 2}, priority=priority))) for priority in (1, 2)
        ]
        asking = [[at.ask(i) for i in range(30)] for at in stages]
        ran = []
        while len(ran) < 30:
            await stages[0].turns()
            busy = [at for at in stages if at.hand.batches]
            assert len(busy) == 1  # never both
            ran.append(stages.index(busy[0]))
            await busy[0].hand.answer()
        assert ran.count(0) == 20
        for tasks in asking:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(work())


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["enter", "leave", "decline"])), max_size=60),
    st.booleans(),
)
def test_never_more_than_there_is_and_nothing_is_lost(events, fixed):
    limiter = RateLimiter({"a": 3} if fixed else {})
    needs = [{"a": 1}, {"a": 2, "b": 1}, {"a": 3}]
    gates = [limiter.open_gate(Needs(resources=need)) for need in needs]
    running = [0, 0, 0]
    for number, event in events:
        gate = gates[number]
        if event == "enter":
            running[number] += gate.enter(lambda: None)
        elif event == "leave" and running[number]:
            running[number] -= 1
            gate.leave()
        elif event == "decline":
            gate.decline()
        used = sum(gate.held * need["a"] for gate, need in zip(gates, needs, strict=True))
        assert used == limiter._used.get("a", 0) <= 3
        assert all(gate.held >= ran for gate, ran in zip(gates, running, strict=True))
    for gate, ran in zip(gates, running, strict=True):
        gate.decline()
        for _ in range(ran):
            gate.leave()
    for gate in gates:
        gate.decline()
    assert not any(limiter._used.values())


def test_configs_and_settings():
    needs = Needs(resources={"r": 2}, priority=3)
    assert needs_of([needs, needs]) == needs
    assert needs_of([]) == Needs()
    with pytest.raises(ServeError, match="given different ones"):
        needs_of([needs, Needs()])
    assert read_pools(["r:4"]) == {"r": 4}
    with pytest.raises(ValueError, match="allowed: NAME:COUNT"):
        read_pools(["r"])
    with pytest.raises(ServeError, match="given 5, allowed: up to 4"):
        RateLimiter({"r": 4}).open_gate(Needs(resources={"r": 5}))
