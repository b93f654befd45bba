"""Device regions of several front processes, whose messages are carried by hand; records in messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.serving.client_shared_memory import DeviceMemory, Range, Regions
from fastserve.serving.replication import ReplicatedState, StateRecord, write_records

MACHINE = SimpleNamespace(devices=lambda: [SimpleNamespace(memory_bytes=1 << 20)])


class Fronts:
    """The regions of an owner and of fronts 1 and 2."""

    def __init__(self) -> None:
        self.closed: list[bytes] = []
        self.states = [ReplicatedState() for _ in range(3)]
        self.regions = [Regions(True, state=state) for state in self.states]
        owner = self.states[0]
        owner.publish, owner.fronts = self.publish, lambda: frozenset({1, 2})
        for number in (1, 2):
            self.join(number)
        for regions in self.regions:
            regions.open(DeviceMemory(self.close, MACHINE))  # type: ignore[arg-type]

    def join(self, number: int) -> None:
        state, owner = self.states[number], self.states[0]
        state.ask = owner.carry_out
        state.note = lambda part, content: owner.noted(part, number, content)

    async def publish(self, part: str, records: Sequence[StateRecord]) -> None:
        for state in self.states[1:]:
            for message, fds in write_records([(part, record) for record in records], 252):
                state.apply(message["records"], fds)

    async def close(self, handle: bytes) -> None:
        self.closed.append(handle)

    def use(self, front: int, name: str) -> Any:
        return self.regions[front].hold(Range(name, 0, 16))


def test_a_device_region_is_closed_when_no_front_uses_it():
    async def work() -> None:
        fronts, handle = Fronts(), b"h" * 64
        await fronts.regions[1].register_device("gpu", handle, 0, 4096)
        assert [[r.name for r in one.list_devices()] for one in fronts.regions] == [["gpu"]] * 3
        with pytest.raises(ServeError) as caught:
            await fronts.regions[2].register_device("gpu", handle, 0, 4096)
        assert caught.value.kind is Kind.ALREADY_EXISTS
        used = [fronts.use(front, "gpu") for front in range(3)]
        done = fronts.regions[2].unregister("gpu")
        assert done is not None
        await done
        assert [one.list_devices() for one in fronts.regions] == [[]] * 3
        for number, one in enumerate(used):
            await asyncio.sleep(0)
            assert fronts.closed == [], number
            one.close()
        await fronts.regions[0].devices.closed()  # type: ignore[union-attr]
        assert fronts.closed == [handle]

    asyncio.run(work())


def test_a_front_that_ends_uses_nothing_any_more():
    async def work() -> None:
        fronts, handle = Fronts(), b"h" * 64
        await fronts.regions[0].register_device("gpu", handle, 0, 4096)
        fronts.use(1, "gpu")
        done = fronts.regions[0].unregister("gpu")
        assert done is not None
        await done
        assert fronts.closed == []
        fronts.states[0].front_ended(1)
        await fronts.regions[0].devices.closed()  # type: ignore[union-attr]
        assert fronts.closed == [handle]

    asyncio.run(work())


def test_a_handle_of_two_names_is_closed_with_the_second():
    async def work() -> None:
        fronts, handle = Fronts(), b"h" * 64
        for name in ("a", "b"):
            await fronts.regions[1].register_device(name, handle, 0, 4096)
        for name, closed in (("a", []), ("b", [handle])):
            done = fronts.regions[1].unregister(name)
            assert done is not None
            await done
            assert fronts.closed == closed

    asyncio.run(work())


class Noting:
    """A part that keeps what it applies."""

    def __init__(self) -> None:
        self.applied: list[tuple[Any, list[int]]] = []

    def apply(self, content: Any, fds: list[int]) -> None:
        self.applied.append((content, fds))


def test_descriptors_go_ahead_of_their_records_and_records_wait_for_their_part():
    state, part = ReplicatedState(), Noting()
    records = [
        ("a", StateRecord({"n": number, "text": "\udcff"}, tuple(range(number)))) for number in range(6)
    ]
    messages = list(write_records(records, 4))
    assert [len(fds) for _, fds in messages] == [4, 4, 4, 3]
    for message, fds in messages:
        state.apply(message["records"], fds)
    state.add("a", part)  # type: ignore[arg-type]
    counts, given = [0, 1, 2, 3, 4, 5], [fd for number in range(6) for fd in range(number)]
    assert [content for content, _ in part.applied] == [{"n": n, "text": "\udcff"} for n in counts]
    assert [len(fds) for _, fds in part.applied] == counts
    assert [fd for _, fds in part.applied for fd in fds] == given
