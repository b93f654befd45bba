"""How elements travel to workers: dataclasses and tensors as they are, and pickle where it is chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from fastserve import BatchedService, VectorTransformer
from fastserve.errors import Kind, ServeError
from tests.batching import models
from tests.warm import with_torch


@pytest.fixture(autouse=True)
def workers_have_torch() -> Iterator[None]:
    """Their classes are of this module, which imports it."""
    with with_torch():
        yield


@dataclass
class Point:
    """An element."""

    x: int
    weights: torch.Tensor


@dataclass(frozen=True)
class Moved:
    """A result."""

    by: int
    point: Point


class Moves(VectorTransformer):
    def transform(self, points):
        return [Moved(1, Point(point.x + 1, point.weights * 2)) for point in points]


class Odd:
    """An object that pickle alone takes; `broken` ones cannot be read."""

    def __init__(self, value, broken=""):
        self.value, self.broken = value, broken

    def __setstate__(self, state):
        if state["broken"] == "there":
            raise ValueError("this one is broken")
        self.__dict__.update(state)


class Turns(VectorTransformer):
    """Answers with objects; knows its argument by identity of type."""

    def __init__(self, odd):
        self.first = odd.value

    def transform(self, x):
        return [Odd((one.value, self.first)) for one in x]


class Service(BatchedService):
    worker_class = Moves


def test_dataclasses_and_tensors_travel_both_ways():
    with Service(4, 0.01) as service:
        found = service.map([Point(n, torch.full((2,), float(n))) for n in range(5)])
    assert [one.point.x for one in found] == [1, 2, 3, 4, 5]
    assert type(found[0]) is Moved
    assert [one.point.weights.tolist() for one in found] == [[2.0 * n] * 2 for n in range(5)]


def test_pickle_is_a_choice_of_the_service(loop):
    service = BatchedService(4, 0.01, transport="pickle")
    service.start(Turns, {"odd": Odd("first")})
    try:
        assert service.submit(Odd(1)).result(60).value == (1, "first")
        found = service.map([Odd(1), Odd(2, "there"), Odd(3)], return_exceptions=True)
        assert [found[0].value, found[2].value] == [(1, "first"), (3, "first")]
        assert found[1].kind is Kind.INVALID_ARGUMENT
        assert "this one is broken" in str(found[1])
        with pytest.raises(TypeError, match="cannot be pickled"):
            service.submit(lambda: None).result(60)
    finally:
        service.stop()
    with pytest.raises(TypeError, match="cannot travel"):
        BatchedService(4).start(Turns, {"odd": Odd("first")})
    with pytest.raises(ValueError, match="transport must be msgpack or pickle"):
        BatchedService(4, transport="json")


def test_pickle_travels_through_hooks():
    class Hooked(BatchedService):
        async def preprocess(self, x):
            return [{one} for one in x]

        async def postprocess(self, x):
            return [one[0] for one in x]

    async def main():
        service = Hooked(4, 0.01, transport="pickle")
        await service.start(models.Echo)
        try:
            assert await service.do_many([1 + 2j, 3]) == [{1 + 2j}, {3}]
        finally:
            await service.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_result_that_cannot_be_read_is_its_callers_error():
    class Echoing(BatchedService):
        worker_class = Marks

    with Echoing(4, 0.01, transport="pickle") as service:
        found = service.map([1, 2], return_exceptions=True)
    assert isinstance(found[0], ServeError)
    assert "cannot be read here" in str(found[0])
    assert found[1] == 2


class Marks(VectorTransformer):
    def transform(self, x):
        return [Unreadable() if one == 1 else one for one in x]


class Unreadable:
    """An object that is pickled, and read nowhere."""

    def __reduce__(self):
        return refuse, ()


def refuse():
    raise ValueError("not here")
