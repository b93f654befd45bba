"""A model that calls other models while it runs: results, errors, streams, deadlines; nothing is left."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from fastserve.errors import Kind, ServeError
from tests.backends.triton_api.rig import model, repeating, run, serving, until

ECHO = model("echo") | {"name": "double"}
REPEAT = repeating()
IN = {"IN": np.array([1, 2, 3], np.int32)}


def test_another_models_answer_is_passed_on(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("caller"), ECHO) as at:
            found = await at.ask("caller", IN, parameters={"to": "double"})
            assert found["OUT"].tolist() == [1, 2, 3]
            asked = (at.ask("caller", IN, parameters={"to": "double"}) for _ in range(50))
            assert len(await asyncio.gather(*asked)) == 50

    run(work())


@pytest.mark.parametrize(
    ("to", "text"),
    [
        (
            "nowhere",
            "Model nowhere - Error when running inference: "
            "Failed for execute the inference request. Model 'nowhere' is not ready.",
        ),
        ("trouble", "Failed to process the request(s) for model 'trouble_0', message: "),
        (
            "opt",
            "Model opt - Error when running inference: unexpected inference output 'OUT' for model 'opt'",
        ),
    ],
)
def test_errors_of_the_other_model(tmp_path, to, text):
    async def work() -> None:
        other = model("echo", outputs=[{"name": "OTHER", "data_type": "TYPE_INT32", "dims": [-1]}]) | {
            "name": "opt"
        }
        async with serving(tmp_path, model("caller"), model("trouble"), other) as at:
            with pytest.raises(ServeError) as caught:
                await at.ask("caller", IN, parameters={"to": to})
            assert caught.value.kind is Kind.INTERNAL
            assert caught.value.message.startswith(text)

    run(work())


def test_a_stream_of_responses(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("caller"), REPEAT) as at:
            many = {"to": "repeat", "many": True}
            found = await at.ask("caller", {"IN": np.array([-6], np.int32)}, parameters=many)
            assert found["OUT"].tolist() == list(range(1000))
            found = await at.ask("caller", {"IN": np.array([-6], np.int32)}, parameters={**many, "stop": 3})
            assert found["OUT"].tolist() == [0, 1, 2]
            found = await at.ask(
                "caller", {"IN": np.array([1, -3], np.int32)}, parameters={**many, "stop": 1}
            )
            assert found["OUT"].tolist() == [1]

    run(work())


def test_two_at_once_from_a_coroutine(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("async_caller"), ECHO) as at:
            assert (await at.ask("async_caller", IN))["OUT"].tolist() == [2, 4, 6]

    run(work())


def test_a_model_that_waits_for_itself_is_told_so(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("caller")) as at:
            start = time.monotonic()
            with pytest.raises(ServeError, match=r"took longer|time was up") as caught:
                await at.ask("caller", IN, parameters={"to": "caller", "timeout": 300_000})
            assert caught.value.kind is Kind.INTERNAL
            assert time.monotonic() - start < 30

    run(work())


def test_a_caller_who_leaves_and_a_worker_who_dies(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, model("caller"), REPEAT, model("told")) as at:
            many = {"to": "repeat", "many": True}
            asking = asyncio.ensure_future(
                at.ask("caller", {"IN": np.array([-3], np.int32)}, parameters=many)
            )
            await until(lambda: at.queue("repeat").ring.describe(0)[0] == "running")
            hosted = next(h for h in at.host.hosted.values() if h.version.model == "caller")
            hosted.group.kill(0, "killed by the test")
            with pytest.raises(ServeError, match="died"):
                await asking
            await until(lambda: at.leaks("repeat") == (0, 0, 0, 0))
            dying = at.ask("caller", {"IN": np.array([1, -4], np.int32)}, parameters=many)
            with pytest.raises(ServeError, match="died"):
                await dying

    run(work())
