"""Models of an app that call one another: through the server, in the time of who calls, without circles."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fastserve
from fastserve.app.models_folder import check_uses
from fastserve.backends.script.declaration import declare, model
from fastserve.errors import ConfigError
from tests.app.apps import RunningApp, write_app

pytestmark = pytest.mark.waits

Number = fastserve.Array[np.float32]
APP = """
    import asyncio
    import os
    import time

    import numpy as np


    @fastserve.model(batch=8, max_queue_delay_us=200_000)
    def double(x: fastserve.Array["float32", 2]) -> fastserve.Array["float32", 2]:
        return np.full_like(x, len(x)) if (x < 0).any() else x * 2


    @fastserve.model
    def name(first: str, last: str = "Lee") -> dict:
        return {"name": f"{first} {last}", "pid": os.getpid()}


    @fastserve.model
    def parts(to: int):
        yield from range(to)


    @fastserve.model
    def fails(how: str):
        if how == "sleep":
            time.sleep(60)
        raise ValueError("it broke")


    @fastserve.model(uses=[double, name, parts, "fails"], run_timeout_ms=1500, instances=2)
    def asks(what: str):
        if what == "array":
            return fastserve.remote(double)([1, 2])
        if what == "rows":
            return fastserve.remote(double)(x=[[1, 2], [3, 4]])
        if what == "alone":
            return fastserve.remote(double)([-1, -1])
        if what == "parts":
            return fastserve.remote(parts)(3)
        if what == "pid":
            return [os.getpid(), fastserve.remote(name)("Ann")["pid"]]
        if what == "undeclared":
            return fastserve.remote(waits)(1)
        return fastserve.remote(fails)(what)


    @fastserve.model(uses=name)
    async def waits(count: int):
        for found in await asyncio.gather(*(fastserve.remote(name)(str(n)) for n in range(count))):
            yield found["name"]


    fastserve.serve()
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = tmp_path_factory.mktemp("remote")
    with RunningApp(write_app(folder, APP), folder / "log") as server:
        yield server


def test_a_function_calls_others(app: RunningApp) -> None:
    assert app.ask("/asks", {"what": "array"}) == [2, 4]
    assert app.ask("/asks", {"what": "rows"}) == [[2, 4], [6, 8]]
    assert app.ask("/asks", {"what": "parts"}) == [0, 1, 2]
    own, other = app.ask("/asks", {"what": "pid"})
    assert own != other


def test_calls_of_several_callers_share_a_batch(app: RunningApp) -> None:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(app.ask("/asks", {"what": "alone"}))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[2, 2], [2, 2]]


def test_an_async_generator_awaits_others(app: RunningApp) -> None:
    assert app.post("/waits", {"count": 3})[2] == b'"0 Lee"\n"1 Lee"\n"2 Lee"\n'


def test_errors_of_the_other_are_the_callers(app: RunningApp) -> None:
    status, said = app.refusal("/asks", {"what": "raise"})
    assert (status, "it broke" in said) == (500, True), said
    status, said = app.refusal("/asks", {"what": "undeclared"})
    assert (status, "asks does not say that it calls waits: uses=[waits]" in said) == (500, True)


def test_a_call_has_the_time_that_is_left(app: RunningApp) -> None:
    status, said = app.refusal("/asks", {"what": "sleep"})
    assert (status, said.startswith("the model that was called took longer than the call's 1.3")) == (
        504,
        True,
    ), said


def test_outside_of_a_server_the_function_is_called() -> None:
    @model(name="outside_double")
    def double(x: float) -> float:
        return x * 2

    @model(name="outside_count")
    def count(to: int) -> Iterator[int]:
        yield from range(to)

    @model(name="outside_lengths", batch=4)
    def lengths(texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    @model(name="outside_sums")
    def sums(x: fastserve.Array[np.float32, -1]) -> tuple[Number, Number]:
        return x.sum(axis=1), x[:, 0] * 0 + len(x)

    async def ask() -> Any:
        return await fastserve.remote(double)(4)

    assert fastserve.remote(double)(3) == 6
    assert fastserve.remote(count)(2) == [0, 1]
    assert fastserve.remote(lengths)("abc") == 3
    assert fastserve.remote(sums)([1, 2]) == {"output_0": 3, "output_1": 1}
    assert fastserve.remote(sums)(x=[[1, 2], [3, 4]])["output_0"].tolist() == [3, 7]
    assert asyncio.run(ask()) == 8
    with pytest.raises(TypeError, match="'print' is no model"):
        fastserve.remote(print)


def test_circles_are_found_when_the_app_is_read() -> None:
    check_uses({"a": ["b", "c"], "b": ["c"], "c": []})
    with pytest.raises(ConfigError, match="a circle of calls: a -> b -> c -> a"):
        check_uses({"a": ["b"], "b": ["c"], "c": ["a"]})
    with pytest.raises(ConfigError, match="a circle of calls: a -> a"):
        check_uses({"a": ["a"]})
    with pytest.raises(ConfigError, match="there is no model 'b', allowed: a"):
        check_uses({"a": ["b"]})
    with pytest.raises(TypeError, match="f: uses: 'print' is no model"):
        declare(lambda x: x, name="f", uses=[print])
