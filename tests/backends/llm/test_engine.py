"""The scheduler on a scripted model: who gets on when, against a plain one, and that no rows are mixed up."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.backends import model_callbacks
from fastserve.backends.llm import engine as engines
from fastserve.backends.llm.engine import FAULTS_MAX, BatchEngine
from fastserve.backends.llm.scheduling import PrefillBudget
from fastserve.backends.model_errors import DeviceLost
from fastserve.codec.generation import Finish, Info
from fastserve.errors import Kind, ServeError
from fastserve.settings.model_options import TextOptions
from tests.backends.llm.outs import Heard, ask, run
from tests.backends.llm.scripted import POISON, VOCAB, ScriptedModel, continue_plainly
from tests.effort import examples
from tests.oracles.text_scheduler import PlainScheduler

LENGTH = 64


def make(slots: int = 4, **options: Any) -> tuple[BatchEngine, ScriptedModel]:
    model = ScriptedModel(slots, LENGTH)
    info = Info(
        vocab_size=VOCAB, max_tokens=LENGTH, max_prompt_tokens=LENGTH - 1, max_new_tokens=40, slots=slots
    )
    return BatchEngine(model, info, TextOptions(**{"step_tokens": 16, "step_ms": 0, **options})), model


def is_empty(engine: BatchEngine) -> bool:
    rows, drawing = engine._rows, engine._drawing
    return (
        rows.free == len(rows.sequences) == len(drawing._free) and not rows.writing and not engine.pending()
    )


def random_prompt(dice: random.Random, longest: int = 40) -> list[int]:
    return [dice.randrange(POISON) for _ in range(dice.randint(1, longest))]


def play(seed: int, turns: int, *, slots: int, step_tokens: int, prefix_cache: bool) -> None:
    """Random submits, cancels and blocked readers; each step is compared with the plain scheduler's."""
    dice = random.Random(seed)
    engine, _ = make(slots, step_tokens=step_tokens, prefix_cache=prefix_cache)
    plain, heard = PlainScheduler(slots, step_tokens), Heard()
    asked: dict[int, list[int]] = {}
    stems = [random_prompt(dice) for _ in range(3)]
    for turn in range(turns):
        for _ in range(dice.choice((0, 0, 1, 3)) if turn < turns * 0.8 else 0):
            rid, priority, limit = len(asked), dice.randint(1, 5), dice.randint(1, 12)
            asked[rid] = (dice.choice(stems)[: dice.randint(1, 40)] + random_prompt(dice, 10))[:40]
            engine.submit(ask(rid, asked[rid], priority=priority, max_new_tokens=limit))
            plain.submit(rid, len(asked[rid]), limit, priority)
        alive = [one.rid for one in plain.alive]
        for rid in alive if dice.random() < 0.2 else ():
            if dice.random() < 0.2:
                engine.cancel(rid, Finish.CANCELLED)
                plain.cancel(rid)
        begun = {one.rid for one in plain.alive if one.begun and not one.unread}
        heard.blocked = {rid for rid in begun if dice.random() < 0.2}
        before = {rid: len(tokens) for rid, tokens in heard.tokens.items()}
        ended = set(heard.ended)
        tokens, gone = plain.step(heard.blocked) if not prefix_cache else (set(), set())
        engine.step(heard)
        if prefix_cache:
            continue
        assert {rid for rid, said in heard.tokens.items() if len(said) > before.get(rid, 0)} == tokens
        assert {rid for rid in set(heard.ended) - ended if heard.ended[rid] == Finish.CANCELLED} == gone
        assert engine.pending() == len(plain.alive)
    heard.blocked = set()
    while engine.pending():
        engine.step(heard)
    assert set(heard.ended) == set(asked)
    for rid, tokens in heard.tokens.items():
        assert tokens == continue_plainly(asked[rid], len(tokens))
    assert is_empty(engine)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([1, 5, 16, 40, 200]))
@examples(60)
def test_each_step_is_the_plain_schedulers(seed: int, slots: int, step_tokens: int) -> None:
    play(seed, 40, slots=slots, step_tokens=step_tokens, prefix_cache=False)


@given(st.integers(0, 2**32), st.integers(1, 6))
@examples(30)
def test_copied_prefixes_change_no_token(seed: int, slots: int) -> None:
    engine, model = make(slots, prefix_cache=True)
    dice = random.Random(seed)
    stem = random_prompt(dice, 30) + list(range(20))
    asked = [stem[: dice.randint(1, 50)] + random_prompt(dice, 5) for _ in range(20)]
    heard = run(engine, [ask(rid, ids, max_new_tokens=8) for rid, ids in enumerate(asked)])
    for rid, ids in enumerate(asked):
        assert heard.tokens[rid] == continue_plainly(ids, 8)
    read = sum(chunk.count for plan in model.plans for chunk in plan.chunks)
    assert read < sum(map(len, asked))


def test_a_conversation_is_read_once() -> None:
    engine, model = make(3, prefix_cache=True)
    said = [1, 2, 3] * 5
    for turn in range(4):
        model.plans.clear()
        said += run(engine, [ask(turn, said, max_new_tokens=9)]).tokens[turn] + [7]
        if turn:  # the last answer's last token, which was drawn and not computed, and the 7
            assert sum(chunk.count for plan in model.plans for chunk in plan.chunks) == 2
    long, more = [9] * 40, [9] * 30 + [8] * 10  # one is still being read when the other comes
    heard = run(engine, [ask(10, long), ask(11, more)])
    assert heard.tokens[10] == continue_plainly(long, 20)
    assert heard.tokens[11] == continue_plainly(more, 20)


def test_thousands_come_and_leave() -> None:
    play(1, 3000, slots=6, step_tokens=24, prefix_cache=False)
    play(2, 1000, slots=6, step_tokens=24, prefix_cache=True)


def test_priority_then_arrival() -> None:
    engine, _ = make(1)
    dice = random.Random(0)
    priorities = [5, 3, 5, 1, 3, 1, 4, 2]
    asked = [ask(rid, random_prompt(dice), priority=level) for rid, level in enumerate(priorities)]
    heard = run(engine, asked)
    assert heard.order == sorted(range(8), key=lambda rid: (priorities[rid], rid))


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one() -> None:
    engine, _ = make(2)
    heard = Heard()
    engine.submit(ask(1, [1] * 60))
    engine.step(heard)
    engine.submit(ask(2, [2] * 10, priority=1))
    engine.step(heard)
    assert heard.order == [2]


def test_ageing_lets_who_waited_long_go_first() -> None:
    second = 1_000_000_000
    now = time.monotonic_ns()
    for ageing_s, expected in ((0.0, [1, 2, 0]), (60.0, [0, 1, 2])):
        engine, _ = make(1, ageing_s=ageing_s)
        old, new, newer = ask(0, [1], priority=5), ask(1, [1], priority=2), ask(2, [1], priority=2)
        old.arrived_ns, new.arrived_ns, newer.arrived_ns = now - 200 * second, now, now
        assert run(engine, [old, new, newer]).order == expected


def test_a_cancelled_sequence_is_gone_after_one_step() -> None:
    engine, _ = make(2)
    heard = Heard()
    for rid in range(4):  # two write, two wait
        engine.submit(ask(rid, [3, 4], max_new_tokens=30))
    engine.step(heard)
    for rid in (0, 3, 77):
        engine.cancel(rid, Finish.CANCELLED)
    engine.cancel(0, Finish.TIMEOUT)
    engine.step(heard)
    assert heard.ended == {0: Finish.CANCELLED, 3: Finish.CANCELLED}
    assert engine.pending() == 2
    assert len(heard.tokens[2]) == 1  # the row is taken in the same step


def test_deadlines_count_while_waiting_and_while_writing() -> None:
    engine, _ = make(1)
    heard, soon = Heard(), time.monotonic_ns() + 30_000_000
    engine.submit(ask(0, [1], max_new_tokens=40, deadline_ns=soon))
    engine.submit(ask(1, [1], max_new_tokens=40, deadline_ns=soon))
    engine.submit(ask(2, [1], max_new_tokens=2, deadline_ns=soon + 10**15))
    engine.step(heard)
    while time.monotonic_ns() <= soon:
        pass
    while engine.pending():
        engine.step(heard)
    assert heard.ended == {0: Finish.TIMEOUT, 1: Finish.TIMEOUT, 2: Finish.LENGTH}


def test_deadlines_of_the_ended_are_forgotten() -> None:
    engine, _ = make(4)
    far = time.monotonic_ns() + 10**15
    for base in range(0, 6000, 100):
        run(engine, [ask(base + n, [1], max_new_tokens=1, deadline_ns=far) for n in range(100)])
    assert len(engine._deadlines._heap) <= 1024


def test_a_reader_who_is_behind_holds_nobody_up() -> None:
    engine, _ = make(3)

    def block(step: int, heard: Heard) -> None:
        heard.blocked = {1} if 2 <= step < 20 else set()

    heard = run(engine, [ask(rid, [rid + 1] * 5, max_new_tokens=15) for rid in range(3)], block)
    for rid in range(3):
        assert heard.tokens[rid] == continue_plainly([rid + 1] * 5, 15)
    assert list(heard.ended) == [0, 2, 1]


def test_a_step_says_when_nobody_can_go_on() -> None:
    engine, _ = make(2)
    heard = Heard()
    assert not engine.step(heard)
    engine.submit(ask(1, [1]))
    assert engine.step(heard)
    heard.blocked = {1}
    assert not engine.step(heard)
    heard.blocked = set()
    assert engine.step(heard)


def test_nan_fails_its_own_sequence_and_leaves_nothing() -> None:
    engine, model = make(3)
    asked = [[1, 2, 3], [4, POISON, 5], [6] * 30, [7, 8]]
    heard = run(engine, [ask(rid, ids, max_new_tokens=9) for rid, ids in enumerate(asked)])
    assert heard.ended[1] == Finish.FAILED
    assert "NaN" in heard.extras[1][0].message
    assert Kind(heard.extras[1][0].kind) is Kind.INTERNAL
    for rid in (0, 2, 3):
        assert heard.tokens[rid] == continue_plainly(asked[rid], 9)
    engine.submit(ask(9, [POISON] * 40))  # cancelled while it is read: nobody has seen its NaN
    engine.step(heard)
    engine.cancel(9, Finish.CANCELLED)
    engine.step(heard)
    assert np.isfinite(model.data).all()


def test_nan_among_scored_tokens_fails_the_sequence_alone() -> None:
    engine, _ = make(2)
    asked = [ask(1, [1, POISON, 3], prompt_logprobs=True), ask(2, [5] * 3, max_new_tokens=3)]
    heard = run(engine, asked)
    assert heard.ended == {1: Finish.FAILED, 2: Finish.LENGTH}


def test_without_memory_prompts_are_read_more_slowly() -> None:
    engine, model = make(4, step_tokens=40)
    model.room = 7
    asked = [[rid + 1] * 30 for rid in range(4)]
    heard = run(engine, [ask(rid, ids, max_new_tokens=5) for rid, ids in enumerate(asked)])
    for rid, ids in enumerate(asked):
        assert heard.tokens[rid] == continue_plainly(ids, 5)


def test_when_memory_is_back_steps_grow_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "STEPS_BETWEEN_TRIES", 1)
    engine, model = make(1, step_tokens=40)
    model.room = 7
    run(engine, [ask(1, [1] * 60, max_new_tokens=1)])
    assert engine._step_tokens < 10
    model.room = 1 << 30
    run(engine, [ask(rid, [1], max_new_tokens=20) for rid in range(3)])
    assert engine._step_tokens == 40


class OutOfMemoryError(RuntimeError):
    """As torch's, which is no MemoryError."""


def test_a_shortage_is_known_by_its_words_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(model_callbacks, "notify", lambda do, **fields: counted.append(do))
    engine, model = make(1)
    engine.submit(ask(0, [1, 2, 3, 4], max_new_tokens=3))
    heard = Heard()
    for text in ("CUDA out of memory.", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"):
        model.fault = OutOfMemoryError(text)
        engine.step(heard)
        model.fault = None
    while engine.pending():
        engine.step(heard)
    assert heard.ended == {0: Finish.LENGTH}
    assert counted == ["no_memory"] * 2
    assert is_empty(engine)


def test_without_memory_for_all_the_last_of_the_lowest_priority_fails() -> None:
    engine, model = make(4)
    heard = Heard()
    for rid, priority in enumerate((5, 1, 5, 2)):
        engine.submit(ask(rid, [1], priority=priority, max_new_tokens=6))
    engine.step(heard)
    model.room = 2
    while engine.pending():
        engine.step(heard)
    assert [rid for rid, why in heard.ended.items() if why == Finish.FAILED] == [2, 0]
    assert Kind(heard.extras[2][0].kind) is Kind.RESOURCE_EXHAUSTED
    assert heard.tokens[1] == heard.tokens[3] == continue_plainly([1], 6)
    assert is_empty(engine)


@pytest.mark.logs_errors
def test_a_step_that_fails_fails_whom_it_was_for_and_a_broken_engine_ends() -> None:
    engine, model = make(2)
    heard = Heard()
    for rid in range(5):
        engine.submit(ask(rid, [1]))
    model.fault = RuntimeError("a device is lost at 0xdeadbeef01")
    engine.step(heard)
    assert heard.ended == {0: Finish.FAILED, 1: Finish.FAILED}
    assert heard.extras[0][0].message == "RuntimeError: a device is lost at 0x…"
    model.fault = None
    engine.step(heard)
    model.fault = RuntimeError("again")
    for rid in range(100, 100 + FAULTS_MAX - 1):
        engine.submit(ask(rid, [1]))
        engine.step(heard)
    engine.submit(ask(200, [1]))
    with pytest.raises(RuntimeError, match="again"):
        engine.step(heard)


@pytest.mark.logs_errors
def test_a_lost_device_ends_the_worker_at_once() -> None:
    engine, model = make(2)
    engine.submit(ask(0, [1]))
    model.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLost):
        engine.step(Heard())


@pytest.mark.parametrize(
    ("ids", "settings", "words"),
    [
        ([], {}, "prompt: given 0 tokens"),
        ([1] * LENGTH, {}, "prompt: given 64 tokens, allowed: at most 63"),
        ([1, VOCAB], {}, "prompt: given token 50, allowed: 0 to 49"),
        ([-1], {}, "prompt: given token -1"),
        ([2**40], {}, "integers of 32 bits"),
        ([1], {"temperature": 0.0}, "temperature: given 0"),
        ([1], {"top_k": 2**40}, "top_k|too large"),
        ([1], {"top_p": float("nan")}, "top_p: given nan"),
    ],
)
def test_what_can_never_run_is_refused(ids: list[int], settings: dict[str, Any], words: str) -> None:
    engine, _ = make()
    with pytest.raises(ServeError, match=words) as caught:
        engine.submit(ask(1, ids, **settings))
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert not engine.pending()


def test_the_line_is_bounded() -> None:
    engine, _ = make(2, max_waiting=3)
    for rid in range(5):
        engine.submit(ask(rid, [1]))
    with pytest.raises(ServeError) as caught:
        engine.submit(ask(5, [1]))
    assert caught.value.kind is Kind.RESOURCE_EXHAUSTED
    with pytest.raises(ValueError, match="here already"):
        engine.submit(ask(4, [1]))


def test_times_are_from_arrival_and_from_the_token_before() -> None:
    engine, _ = make(1)
    request = ask(1, [1], max_new_tokens=3)
    request.arrived_ns = time.monotonic_ns() - 5_000_000_000
    took = run(engine, [request]).took_us[1]
    assert took[0] >= 5_000_000
    assert max(took[1:]) < 5_000_000


def test_what_is_read_for_vectors_does_not_go_before_those_who_write() -> None:
    """However many there are, they are not counted among those who are to write; each leaves as it came."""
    engine, _ = make(8, pooling="mean")
    engine.info = msgspec.structs.replace(engine.info, embeds=2)
    seen: list[tuple[int, int]] = []

    class Seen(PrefillBudget):
        def room(self, most: int, writing: int, reading: int) -> int:
            seen.append((writing, reading))
            return super().room(most, writing, reading)

    engine._pace = Seen(0)
    heard = Heard()
    engine.submit(ask(0, [1, 2], max_new_tokens=30))
    engine.step(heard)
    for rid in range(1, 7):
        request = ask(rid, [3] * 30)
        request.note = msgspec.structs.replace(request.note, embeds=True)
        engine.submit(request)
    engine.submit(ask(7, [4] * 30, max_new_tokens=3))
    engine.cancel(6, Finish.CANCELLED)
    while engine.pending():
        engine.step(heard)
    assert seen[:2] == [(0, 1), (1, 1)]
    assert max(reading for _, reading in seen) == 1
    assert (seen[-1], engine._pooled) == ((1, 0), 0)


def test_what_was_read_for_a_vector_is_kept_as_far_as_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = make(2, prefix_cache=True, pooling="mean")
    engine.info = msgspec.structs.replace(engine.info, embeds=2)

    def embed(rid: int, ids: list[int]) -> Finish:
        request = ask(rid, ids)
        request.note = msgspec.structs.replace(request.note, embeds=True)
        return run(engine, [request]).ended[rid]

    def reads(rid: int, ids: list[int]) -> int:
        """How much of such a prompt is computed."""
        model.plans.clear()
        assert run(engine, [ask(rid, ids, max_new_tokens=3)]).tokens[rid] == continue_plainly(ids, 3)
        return sum(chunk.count for plan in model.plans for chunk in plan.chunks)

    assert embed(0, [5] * 30) == Finish.STOP
    assert reads(1, [5] * 30 + [6]) == 1
    monkeypatch.setattr(model, "states", lambda: np.full((len(model.plans[-1].tokens), 2), np.nan))
    assert embed(2, [7] * 30) == Finish.FAILED
    assert reads(3, [7] * 30 + [6]) == 31
