"""The life of versions under random folder changes and failing loads.

What must hold at every single change, not only in the end:
- a version leaves AVAILABLE only when as many versions are still available as were, or as are wanted;
- a fault in model.yaml changes nothing that is loaded;
- nothing ever takes a step that the table does not have (the catalog raises).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import parse_model_config
from fastserve.repository.version import TRANSITIONS, Version, VersionState, wanted_versions
from tests.effort import examples
from tests.repository.folders import BASE, LOADED, Stage, write_config, write_version

NUMBERS = st.integers(1, 4)
POLICIES: st.SearchStrategy[Any] = st.one_of(
    st.just("all"),
    st.builds(lambda n: {"latest": n}, st.integers(0, 3)),
    st.builds(lambda ns: {"specific": sorted(ns)}, st.sets(NUMBERS, min_size=1)),
)


def test_the_table_reaches_every_state_and_ends_only_at_the_end() -> None:
    reached = {to for targets in TRANSITIONS.values() for to in targets} | {VersionState.START}
    assert reached == set(VersionState)
    assert [state for state, targets in TRANSITIONS.items() if not targets] == [VersionState.END]
    assert VersionState.END not in TRANSITIONS[VersionState.AVAILABLE]  # requests drain first


def test_a_step_outside_the_table_is_refused(tmp_path: Path) -> None:
    catalog = Catalog()
    version = Version("m", 1, tmp_path, parse_model_config(BASE))
    catalog.put(version)
    with pytest.raises(ValueError, match="cannot become AVAILABLE"):
        catalog.move(version, VersionState.AVAILABLE)


def test_a_failing_callback_stops_neither_the_move_nor_the_other_callbacks(tmp_path: Path) -> None:
    catalog = Catalog()
    heard: list[Version] = []
    catalog.on_change += [lambda version: 1 / 0, heard.append]  # type: ignore[list-item,func-returns-value]
    version = Version("m", 1, tmp_path, parse_model_config(BASE))
    catalog.put(version)
    assert heard == [version]


class Lifecycle(RuleBasedStateMachine):
    """One model's folder changes at random; the repository polls now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp())
        self.stage = self.loop.run_until_complete(self.open())
        self.stage.catalog.on_change.append(self.check_change)
        self.policy: Any = None  # None: no model.yaml; "broken": one that cannot be read
        self.numbers: set[int] = set()
        self.edits = 0
        self.faults: list[str] = []
        self.least = 0

    async def open(self) -> Stage:
        stage = Stage(self.root, load_retries=1000)
        await stage.repository.open()
        return stage

    def teardown(self) -> None:
        self.least = 0
        self.loop.run_until_complete(self.stage.repository.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.root)

    def wanted(self) -> list[int]:
        policy = parse_model_config({**BASE, "version_policy": self.policy}).version_policy
        return wanted_versions(policy, self.numbers)

    def available(self) -> set[Version]:
        model = self.stage.catalog.models.get("m")
        return set(model.available()) if model else set()

    def check_change(self, version: Version) -> None:
        """Only takes notes: the catalog keeps a callback's exception from stopping a load."""
        available = self.available()
        if len(available) < self.least:
            self.faults.append(f"{version!r} left before its successor was available")
        if self.stage.catalog.available("m") is not max(available, key=lambda v: v.number, default=None):
            self.faults.append(f"the latest is wrong after {version!r}")

    @rule(policy=POLICIES)
    def set_policy(self, policy: Any) -> None:
        self.policy = policy
        write_config(self.root, "m", version_policy=policy, parameters={"edit": self.edits})

    @rule()
    def change_config(self) -> None:
        self.edits += 1
        if self.policy not in (None, "broken"):
            self.set_policy(self.policy)

    @rule()
    def break_config(self) -> None:
        self.policy = "broken"
        write_config(self.root, "m", max_batch_size="many")

    @rule(number=NUMBERS)
    def add_version(self, number: int) -> None:
        self.edits += 1
        self.numbers.add(number)
        write_version(self.root, "m", number, f"class Model: edit = {self.edits}\n")

    @rule(number=NUMBERS)
    def remove_version(self, number: int) -> None:
        self.numbers.discard(number)
        shutil.rmtree(self.root / "m" / str(number), ignore_errors=True)

    @rule(number=NUMBERS)
    def let_fail(self, number: int) -> None:
        self.stage.hooks.failing.add(("m", number))

    @rule(number=NUMBERS)
    def let_load(self, number: int) -> None:
        self.stage.hooks.failing.discard(("m", number))

    @rule()
    def poll(self) -> None:
        self.stage.clock.now += 1000  # past every back-off
        before = self.available()
        usable = self.policy not in (None, "broken")
        wanted = self.wanted() if usable else []
        named_by_policy = self.policy["specific"] if usable and "specific" in self.policy else []
        goal = len(set(wanted) | set(named_by_policy))
        self.least = min(len(before), goal) if usable else 0
        self.loop.run_until_complete(self.stage.repository.poll())
        after = self.available()
        self.least = 0
        assert self.faults == []
        if self.policy == "broken":
            assert after == before
        if usable:
            failing = {number for _, number in self.stage.hooks.failing}
            served = {version.number for version in after}
            assert set(wanted) - failing <= served
            if not set(wanted) & failing and goal == len(wanted):
                assert served == set(wanted)
        for version in after:
            assert LOADED.get(version)

    @invariant()
    def every_loaded_version_is_listed(self) -> None:
        loads = sum(event[0] == "load" for event in self.stage.hooks.events)
        unloads = sum(event[0] == "unload" for event in self.stage.hooks.events)
        assert loads >= unloads + len(self.available())


LifecycleTest = Lifecycle.TestCase
LifecycleTest.settings = examples(60, stateful_step_count=30)
