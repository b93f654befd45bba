"""Every request of a Python model ends with its answer or with an error, in whatever way it answers; and what
it writes into an input reaches nobody else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fastserve.errors import Kind, ServeError
from tests.backends.triton_api.rig import entry, model, run, serving

FLOATS = [entry("IN", "TYPE_FP32", -1)], [entry("OUT", "TYPE_FP32", -1)]
IN_PLACE = model("in_place", *FLOATS, max_batch_size=8)
UNENDED = "the model let go of this request without a final response: its answer may not be whole"
FAILED = "Failed to process the request(s) for model 'scatter_0', message: "


def scatter():
    return model("scatter", model_transaction_policy={"decoupled": True})


@pytest.mark.parametrize("how", [1, 2, 9])
def test_responses_sent_after_execute_has_returned(tmp_path, how):
    async def work() -> None:
        async with serving(tmp_path, scatter()) as at:
            asked = [at.listen("scatter", [how, number, number + 1]) for number in range(20)]
            found = await asyncio.gather(*asked)
            assert found == [[how, number, number + 1] for number in range(20)]

    run(work())


def test_an_end_without_a_response_is_what_the_model_said(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, scatter()) as at:
            assert await at.listen("scatter", [10]) == []

    run(work())


@pytest.mark.parametrize(
    ("how", "end"),
    [
        (3, UNENDED),
        (4, "the model gave no response to this request"),
        (5, UNENDED),
        (6, f"{FAILED}ValueError: kaboom"),
        (7, f"{FAILED}the model called exit('enough')"),
        (8, f"{FAILED}CancelledError"),
    ],
)
def test_a_request_that_is_let_go_of_ends_with_an_error(tmp_path, how, end):
    async def work() -> None:
        async with serving(tmp_path, scatter()) as at:
            for _ in range(3):  # the worker goes on
                found = await at.listen("scatter", [how, 30])
                assert found[:-1] == ([] if how == 4 else [how, 30])
                assert found[-1].startswith(end)
            assert await at.listen("scatter", [1, 30]) == [1, 30]

    run(work())


def test_a_text_that_cannot_travel_fails_its_own_caller_alone(tmp_path):
    async def work() -> None:
        sides = [entry("IN", "TYPE_STRING", 1)], [entry("OUT", "TYPE_STRING", 1)]
        async with serving(tmp_path, model("trouble", *sides, max_batch_size=4)) as at:
            asked = [at.ask("trouble", {"IN": [[word]]}) for word in (b"fine", b"SURROGATE", b"HUGE", b"too")]
            good, odd, huge, too = await asyncio.gather(*asked, return_exceptions=True)
            assert [good["OUT"].tolist(), too["OUT"].tolist()] == [[b"fine"], [b"too"]]
            assert (odd.kind, odd.message) == (Kind.INTERNAL, "the model says \\ud800")
            assert huge.kind is Kind.INTERNAL

    run(work())


# --- writing into inputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_inputs_can_be_written_into(tmp_path, size):
    async def work() -> None:
        async with serving(tmp_path, IN_PLACE) as at:
            rows = [np.full((1, size), 2.0 * n, np.float32) for n in range(20)]
            found = await asyncio.gather(*(at.ask("in_place", {"IN": row}) for row in rows))
            assert [out["OUT"][0, 0] for out in found] == list(range(20))

    run(work())


def test_a_batch_that_raised_is_not_seen_again_as_it_was_left(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, IN_PLACE) as at:
            asked = [at.ask("in_place", {"IN": np.full((1, 2), n, np.float32)}) for n in (-1, 8, 8, 8)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(found[0], ServeError)
            for out in found[1:]:  # failed with it, or run again without it
                assert isinstance(out, ServeError) or out["OUT"].tolist() == [[4, 4]]

    run(work())


def test_a_batch_whose_worker_died_runs_again_on_what_was_sent(tmp_path):
    async def work() -> None:
        dies = {"parameters": {"died": {"string_value": str(tmp_path / "died")}}}
        config = model("in_place", *FLOATS, max_batch_size=8, **dies)
        async with serving(tmp_path, config, instances=2) as at:
            found = await at.ask("in_place", {"IN": np.full((1, 3), -2, np.float32)})
            assert found["OUT"].tolist() == [[-1, -1, -1]]
            assert (tmp_path / "died").exists()

    run(work())


def test_another_model_writes_into_its_own(tmp_path):
    async def work() -> None:
        async with serving(tmp_path, IN_PLACE, model("passes_on", *FLOATS, max_batch_size=8)) as at:
            found = await at.ask("passes_on", {"IN": np.full((1, 2), 8, np.float32)})
            assert found["OUT"].tolist() == [[8, 8, 5, 5]]

    run(work())


def test_a_sample_is_the_same_at_every_run(tmp_path):
    """Of a warm-up: -1, halved, would be another number the second time."""

    async def work() -> None:
        sample = {"inputs": {"IN": {"dims": [2], "data": "zeros"}}, "rows": 1, "count": 3}
        async with serving(tmp_path, IN_PLACE, warmup=[sample]) as at:
            found = await at.ask("in_place", {"IN": np.full((1, 2), 8, np.float32)})
            assert found["OUT"].tolist() == [[4, 4]]

    run(work())
