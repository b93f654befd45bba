"""The scheduler of a sequence model over senders that the test moves by hand."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import numpy as np
import pytest

from fastserve.engine.schedulers.sequence import (
    LOST,
    SEQUENCE_DIED,
    SequenceInputs,
    SequenceScheduler,
    SequenceSignals,
    open_sequence_inputs,
    strategy_of,
    write_id,
)
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.repository.triton_config.messages import TritonConfig
from fastserve.repository.triton_config.reading import options_of
from fastserve.request import InferRequest
from fastserve.settings import convert
from fastserve.tensor import DTYPES, Tensor
from tests.engine.fakes import Hand, House, array, ints, io, run

KINDS = ("START", "READY", "END")
SEEN = ("IN", *KINDS, "CORRID")
CONTROLS = [
    {"name": kind, "control": [{"kind": f"CONTROL_SEQUENCE_{kind}", "int32_false_true": [0, 1]}]}
    for kind in KINDS
] + [{"name": "CORRID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64"}]}]
STATE = {"input_name": "S_IN", "output_name": "S_OUT", "data_type": "TYPE_INT32", "dims": [1]}


def config(rows=2, idle_us=1_000_000, state=(), **strategy):
    return {
        "input": [io("IN")],
        "output": [io("OUT")],
        "max_batch_size": rows,
        "sequence_batching": {
            "max_sequence_idle_microseconds": idle_us,
            "control_input": CONTROLS,
            "state": list(state),
            **(strategy or {"direct": {}}),
        },
    }


def sequences(triton):
    options = options_of(convert(triton, TritonConfig, "config.pbtxt")).sequences
    assert options is not None
    return options


def extras(triton, folder) -> SequenceInputs:
    return open_sequence_inputs(sequences(triton), folder, batching=triton.get("max_batch_size", 0) > 0)


class Stage:
    def __init__(self, triton, instances=1, tmp=None):
        self.now = 1_000
        self.house = House()
        self.hands = [Hand(triton["max_batch_size"]) for _ in range(instances)]
        strategy = strategy_of(sequences(triton), triton["max_batch_size"])
        self.scheduler = SequenceScheduler("seq", self.hands, extras(triton, tmp), strategy, lambda: self.now)
        self.version = self.house.put("seq", triton, self.scheduler)

    def ask(self, id, value=1, *, start=False, end=False, rows=1, deadline_ns=0):
        request = InferRequest({"IN": ints(*[value] * rows)}, deadline_ns=deadline_ns)
        request.sequence_id, request.sequence_start, request.sequence_end = id, start, end
        return asyncio.ensure_future(self._ask(request))

    async def _ask(self, request):
        response = await self.house.engine.infer(self.version, request)
        assert set(response.outputs) == {"OUT"}  # states are nobody's business
        try:
            return int(array(response.outputs["OUT"]).ravel()[0])
        finally:
            response.release()

    async def close(self):
        await asyncio.wait_for(self.scheduler.drain(), 60)
        self.scheduler.close()
        assert not any(hand.unreleased for hand in self.hands)


async def fails(task, text, kind=Kind.INVALID_ARGUMENT):
    with pytest.raises(ServeError) as caught:
        await task
    assert (caught.value.kind, caught.value.message) == (kind, text)


UNKNOWN = (
    "inference request for sequence {} to model 'seq' must specify the START flag "
    "on the first request of the sequence"
)


def test_direct_keeps_rows_and_says_who_is_ready():
    async def work():
        at = Stage(config(rows=3))
        hand = at.hands[0]
        first = [at.ask(7, 10, start=True), at.ask(8, 20, start=True), at.ask("abc", 30, start=True)]
        named = struct.unpack("<Q", write_id("abc", DTYPES["uint64"]))[0]
        assert await hand.seen(*SEEN) == [(10, 1, 1, 0, 7), (20, 1, 1, 0, 8), (30, 1, 1, 0, named)]
        await hand.answer()
        assert await asyncio.gather(*first) == [10, 20, 30]
        second = at.ask(8, 21, end=True)
        assert await hand.seen(*SEEN) == [(0, 0, 0, 0, 0), (21, 0, 1, 1, 8)]
        await hand.answer()
        assert await second == 21
        await fails(at.ask(8), UNKNOWN.format(8))
        third = at.ask(9, 40, start=True, end=True)  # takes the row that became free
        assert await hand.seen(*SEEN) == [(0, 0, 0, 0, 0), (40, 1, 1, 1, 9)]
        await hand.answer()
        assert await third == 40
        await at.close()

    run(work())


def test_requests_of_a_sequence_run_one_by_one_and_a_second_start_stays_in_its_slot():
    async def work():
        at = Stage(config(rows=2))
        hand = at.hands[0]
        asking = [at.ask(7, 1, start=True), at.ask(7, 2), at.ask(7, 3, start=True), at.ask(7, 4, end=True)]
        for row in [(1, 1, 1, 0, 7), (2, 0, 1, 0, 7), (3, 1, 1, 0, 7), (4, 0, 1, 1, 7)]:
            assert await hand.seen(*SEEN) == [row]
            await hand.answer()
        assert await asyncio.gather(*asking) == [1, 2, 3, 4]
        await at.close()

    run(work())


def test_what_is_refused():
    async def work():
        at = Stage(config())
        batch = (
            "inference request to model 'seq' must specify batch-size 1 "
            "due to requirements of sequence batcher"
        )
        await fails(at.ask(1, start=True, rows=2), batch)
        none = "inference request to model 'seq' must specify a non-zero or non-empty correlation ID"
        await fails(at.ask(0, start=True), none)
        await fails(at.ask("", start=True), none)
        await fails(at.ask(42), UNKNOWN.format(42))
        await at.close()

    run(work())


def test_backlog_waits_for_an_end_and_for_the_reaper():
    async def work():
        at = Stage(config(rows=1, idle_us=1000))
        hand = at.hands[0]
        first = at.ask(1, 1, start=True)
        await hand.answer()
        assert await first == 1
        parked = at.ask(2, 2, start=True)
        await asyncio.sleep(0)
        assert not hand.batches
        at.now += 1_000_000
        at.scheduler._reap()
        await hand.answer()
        assert await parked == 2
        await fails(at.ask(1), UNKNOWN.format(1))
        third, end = at.ask(3, 3, start=True), at.ask(2, 9, end=True)
        await hand.answer()
        assert await end == 9
        await hand.answer()
        assert await third == 3
        at.now += 1_000_000
        await at.close()

    run(work())


@pytest.mark.parametrize("running", [False, True])
def test_a_client_that_leaves_frees_its_slot_and_takes_its_state_along(running):
    async def work():
        at = Stage(config(rows=1, state=[STATE]))
        hand = at.hands[0]
        for start in (True, False):
            asked = at.ask(5, start=start)
            await hand.answer()
            last = await asked
        assert last == 2
        leaving, queued = at.ask(5), at.ask(5)
        if running:
            await hand.batch()
        else:
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await fails(queued, UNKNOWN.format(5))
        other = at.ask(6, start=True)
        while not other.done():  # what already ran for the client that left is answered to nobody
            if hand.batches:
                await hand.answer()
            await asyncio.sleep(0)
        assert await other == 1  # from the initial state, not from the other client's
        await fails(at.ask(5), UNKNOWN.format(5))
        again = at.ask(5, start=True)
        done = at.ask(6, end=True)
        await hand.answer()
        assert await done == 2
        await hand.answer()
        assert await again == 1
        await at.close()

    run(work())


def test_state_is_carried_reset_by_start_and_unharmed_by_errors():
    async def work():
        at = Stage(config(rows=1, state=[{**STATE, "initial_state": [{"dims": [1], "zero_data": True}]}]))
        hand = at.hands[0]
        for start, expected in ((True, 1), (False, 2), (False, 3), (True, 1), (False, 2)):
            asked = at.ask(5, start=start)
            await hand.answer()
            assert await asked == expected
        failing = at.ask(5)
        await hand.answer(ServeError(Kind.INTERNAL, "kaboom"))
        await fails(failing, "kaboom", Kind.INTERNAL)
        asked = at.ask(5)
        await hand.answer()
        assert await asked == 3
        await at.close()

    run(work())


def test_initial_state_from_a_file(tmp_path):
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "ten").write_bytes(np.array([10], np.int32).tobytes())
    state = {**STATE, "initial_state": [{"name": "i", "dims": [1], "data_file": "ten"}]}

    async def work():
        at = Stage(config(rows=1, state=[state]), tmp=tmp_path)
        asked = at.ask(5, start=True, end=True)
        await at.hands[0].answer()
        assert await asked == 11
        await at.close()

    run(work())
    for name, text in (
        ("../ten", "not the name of a file"),
        ("no", "cannot be read"),
        ("ten", "has 4 bytes"),
    ):
        bad = {**state, "initial_state": [{"dims": [2], "data_file": name}]}
        with pytest.raises(ServeError, match=text):
            extras(config(state=[bad]), tmp_path)


def test_a_worker_that_dies_ends_its_sequences_only():
    async def work():
        at = Stage(config(rows=1), instances=2)
        one, two = at.ask(1, start=True), at.ask(2, start=True)
        for hand in at.hands:
            await hand.answer()
        assert await asyncio.gather(one, two) == [1, 1]
        running, queued = at.ask(1), at.ask(1)
        await at.hands[0].batch()
        at.scheduler.instance_lost(0)
        await at.hands[0].answer(ServeError(Kind.UNAVAILABLE, "died"))
        await fails(running, "died", Kind.UNAVAILABLE)
        await fails(queued, SEQUENCE_DIED, Kind.UNAVAILABLE)
        await fails(at.ask(1), LOST.format(1, "seq"), Kind.UNAVAILABLE)
        at.scheduler.instance_back(0)
        still = at.ask(2, end=True)
        await at.hands[1].answer()
        assert await still == 1
        await at.close()

    run(work())


def test_a_deadline_while_parked():
    async def work():
        at = Stage(config(rows=1))
        first = at.ask(1, start=True)
        await at.hands[0].answer()
        await first
        with pytest.raises(DeadlineError) as caught:
            await at.ask(2, start=True, deadline_ns=1)
        assert caught.value.queued
        await fails(at.ask(2), UNKNOWN.format(2))
        await at.close()

    run(work())


def test_oldest_takes_the_oldest_of_more_candidates_than_rows():
    async def work():
        at = Stage(config(rows=2, oldest={"max_candidate_sequences": 4}))
        hand = at.hands[0]
        asking = []
        for id in (4, 3, 2, 1):
            asking.append(at.ask(id, id, start=True))
            at.now += 1
            await asyncio.sleep(0)
        seen = []
        while not all(task.done() for task in asking):
            seen.append([row[0] for row in await hand.seen(*SEEN)])
            assert all(row[2] for row in await hand.seen(*SEEN))  # nobody is absent
            await hand.answer()
            for _ in range(3):
                await asyncio.sleep(0)
        assert [id for batch in seen for id in batch] == [4, 3, 2, 1]
        assert max(map(len, seen)) == 2
        await at.close()

    run(work())


def test_waiting_for_company():
    async def work():
        at = Stage(config(rows=4, oldest={"preferred_batch_size": [2], "max_queue_delay_microseconds": 500}))
        hand = at.hands[0]
        one = at.ask(1, 1, start=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not hand.batches
        two = at.ask(2, 2, start=True)
        assert [row[0] for row in await hand.seen(*SEEN)] == [1, 2]
        await hand.answer()
        assert await asyncio.gather(one, two) == [1, 2]
        late = at.ask(1, 3)
        await asyncio.sleep(0)
        at.now += 500_000
        at.scheduler._pump(0)
        await hand.answer()
        assert await late == 3
        await at.close()

    run(work())


def test_closing_tells_everybody():
    async def work():
        at = Stage(config(rows=1))
        one, two = at.ask(1, start=True), at.ask(2, start=True)
        await at.hands[0].batch()
        at.scheduler.close()
        for task in (one, two):
            await fails(task, "the model version was unloaded", Kind.UNAVAILABLE)
        await at.hands[0].answer()
        assert not at.hands[0].unreleased

    run(work())


@pytest.mark.parametrize(
    ("data_type", "id", "expected"),
    [
        ("TYPE_UINT64", 2**64 - 1, b"\xff" * 8),
        ("TYPE_INT32", 2**32 + 5, b"\x05\0\0\0"),
        ("TYPE_STRING", "ab", b"\x02\0\0\0ab"),
        ("TYPE_STRING", 12, b"\x02\0\0\x0012"),
    ],
)
def test_ids_as_tensors(data_type, id, expected):
    control = {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": data_type}
    triton = {"sequence_batching": {"control_input": [{"name": "C", "control": [control]}]}}
    found = extras(triton, Path()).write(SequenceSignals(id=id), {})["C"]
    assert (found.shape, bytes(found.data)) == ((1,), expected)


def test_control_values():
    values = (
        {"fp32_false_true": [-1.0, 2.0]},
        {"bool_false_true": [True, False]},
        {"int32_false_true": [3, 4]},
    )
    triton = {
        "max_batch_size": 4,
        "sequence_batching": {
            "control_input": [
                {"name": kind, "control": [{"kind": f"CONTROL_SEQUENCE_{kind}", **value}]}
                for kind, value in zip(KINDS, values, strict=True)
            ]
        },
    }
    found = extras(triton, Path()).write(SequenceSignals(start=True, ready=False, end=True), {})
    assert [array(found[k]).tolist() for k in KINDS] == [[[2.0]], [[True]], [[4]]]
    assert isinstance(found["END"], Tensor)
