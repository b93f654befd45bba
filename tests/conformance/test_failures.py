"""An exception at every step of a request's life: the client hears of it in its dialect's words, nothing
stays taken, nobody else is hurt, and the next request is answered.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator

import pytest

from fastserve.errors import Kind
from tests.conformance.models import FORMS, OWN, OWN_TEXT, PATHS, WRONG, WRONG_TEXT
from tests.conformance.rig import Rig, is_right
from tests.conformance.steps import FAULTS, INSIDE, LIMIT, OUTSIDE, STEPS, failing
from tests.conformance.ways import REGION, Answer, Way
from tests.faults.rig import INSIDES

STEP_NAMES = list(STEPS)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracebacks in caught log records would hold the frames of the requests that failed."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def steps_of(way: Way) -> list[str]:
    return [step for step in STEPS if way.outside or step not in OUTSIDE]


def is_told(answer: Answer, way: Way, step: str, fault: str) -> bool:
    """Whether the client was told of this fault as its dialect does, and of nothing inside the server."""
    if fault == "ServeError":
        return answer.status == way.status(LIMIT.kind) and LIMIT.message in answer.text
    if fault == "OSError" and step in OUTSIDE:  # it is the client's memory that cannot be had
        return answer.status == way.status(Kind.UNAVAILABLE) and REGION in answer.text
    hidden = INSIDE not in answer.text and os.strerror(errno.EMFILE) not in answer.text
    internal = answer.status == way.status(Kind.INTERNAL) and answer.text != ""
    return internal and hidden and not INSIDES.search(answer.text)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.torture)])
def test_a_step_that_fails(rig: Rig, way: Way, form: str, path: str, every: bool) -> None:
    """With every fault, or with one at each step: the next one with the next form and path."""
    model, faults = f"{form}-{path}", list(FAULTS)
    turn = FORMS.index(form) + 2 * PATHS.index(path)

    async def work(step: str) -> None:
        await rig.learn(way, model)
        for fault in faults if every else [faults[(turn + STEP_NAMES.index(step)) % len(faults)]]:
            rows = [rig.fresh()]
            sent = way.build(model, rows)
            with failing(step, fault) as armed:
                answer = await way.ask(rig, sent)
            assert armed.hits, f"{step} was not come to"
            good = step == "release" and is_right(answer, way, rows)  # by then the answer may be on its way
            assert good or is_told(answer, way, step, fault), (step, fault, answer)
            assert is_right(await way.ask(rig, sent), way, rows)
            await rig.settled()

    for step in steps_of(way):
        rig.run(work(step))


def test_who_is_in_the_same_batch_is_not_hurt(rig: Rig, way: Way, form: str, path: str) -> None:
    model = f"{form}-{path}"

    async def work(step: str) -> None:
        await rig.learn(way, model, 2)
        rows = [rig.fresh()], [rig.fresh()]
        lines = [await way.open(rig) for _ in rows]
        with failing(step, "OSError", times=1):
            for slot, (line, given) in enumerate(zip(lines, rows, strict=True)):
                line.send(way.build(model, given, slot=slot))
            answers = [await line.reply() for line in lines]
        for line in lines:
            line.leave()
        right = [is_right(answer, way, given) for answer, given in zip(answers, rows, strict=True)]
        assert any(right), (step, answers)
        for answer, good in zip(answers, right, strict=True):
            assert good or is_told(answer, way, step, "OSError"), (step, answer)

    for step in steps_of(way):
        rig.run(work(step))


def test_a_model_that_fails(rig: Rig, way: Way, form: str, path: str) -> None:
    """At one request's numbers: only that one fails."""
    model = f"{form}-{path}"

    async def work() -> None:
        await rig.learn(way, model, 3)
        wrong = [(WRONG, WRONG_TEXT)] + [(OWN, OWN_TEXT)] * (form in ("whole", "cached"))
        for value, text in wrong:
            lines = [await way.open(rig) for _ in range(3)]
            rows = [[rig.fresh()], [value], [rig.fresh()]]
            for slot, (line, given) in enumerate(zip(lines, rows, strict=True)):
                line.send(way.build(model, given, slot=slot))
            first, failed, last = [await line.reply() for line in lines]
            assert is_right(first, way, rows[0])
            assert is_right(last, way, rows[2])
            assert failed.status == way.status(Kind.INTERNAL), failed
            assert text in failed.text
            for line in lines:
                line.leave()

    rig.run(work())
