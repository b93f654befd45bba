"""Every order of the steps of two producers, a worker and an owner over a batch ring, with a death at any.

What runs is the code of ext/include itself: `ring_actors.cpp` is compiled so that each load, store and
compare-and-swap stops, and `stepper.cpp` searches all orders of them (decision 0040). A run says that no row
is given to two, no caller gets another's answer, nobody waits for ever and every slot comes back, or shows
the steps that lead elsewhere. The same search finds the defects below, put into the code on purpose.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "ext" / "include"
COMPILER = os.environ.get("CXX", "g++")
PLAIN = ("-std=c++20", "-O2", "-U_FORTIFY_SOURCE")
STEPPED = ("-std=c++20", "-O1", "-fsanitize=thread", "-fno-builtin-memset", "-Wno-tsan")
RUN_S = 250
FIRST, SECOND, WORKER = 1, 2, 4  # bits of `deaths`


class Found(NamedTuple):
    """What a search says: "" or the promise that was broken, its figures, and the steps that led there."""

    broken: str
    figures: dict[str, Any]
    steps: str


class Search:
    """The compiled searches, by what was changed in the code."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, Path] = {}

    def _compile(self, *words: object) -> None:
        done = subprocess.run([COMPILER, *map(str, words)], capture_output=True, text=True, timeout=RUN_S)
        assert done.returncode == 0, done.stderr

    def _program(self, name: str, file: str, text: str, wrong: str) -> Path:
        if name in self._built:
            return self._built[name]
        folder = self._folder / f"build{len(self._built)}"
        shutil.copytree(INCLUDE, folder)
        for source in ("stepper.h", "stepper.cpp", "ring_actors.cpp"):
            shutil.copy(HERE / source, folder)
        if text:
            source = (folder / file).read_text()
            assert source.count(text) == 1, f"{file} has no longer once: {text}"
            (folder / file).write_text(source.replace(text, wrong))
        stepper = self._folder / "stepper.o"
        if not stepper.exists():
            self._compile(*PLAIN, "-c", folder / "stepper.cpp", "-o", stepper)
        self._compile(*STEPPED, "-c", folder / "ring_actors.cpp", "-o", folder / "actors.o")
        self._compile(stepper, folder / "actors.o", "-o", folder / "search")
        self._built[name] = folder / "search"
        return self._built[name]

    def run(
        self, scenario: dict[str, int], name: str = "", file: str = "", text: str = "", wrong: str = ""
    ) -> Found:
        program = self._program(name, file, text, wrong)
        words = [f"{word}={value}" for word, value in scenario.items()]
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=3000)
        assert done.returncode in (0, 1), done.stderr
        first, _, steps = done.stdout.partition("\n")
        figures = json.loads(first)
        return Found(figures["found"], figures, steps)


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    return Search(tmp_path_factory.mktemp("search"))


# Where not said otherwise: two slots of two rows, each producer asks once for a row and waits for the answer,
# no messages (who waits for a state is let go on once it is so), stops at every atomic access, any number
# of switches between actors. `switches` bounds those away from an actor that could go on; deaths cost none.
SHORT: dict[str, dict[str, int]] = {
    "nobody dies, every order": {},
    "one slot of one row, anybody may die, every order": {
        "slots": 1, "max_rows": 1, "deaths": FIRST | SECOND | WORKER,
    },
    "one producer and its worker, with messages, either may die, every order": {
        "words": 1, "requests1": 0, "deaths": FIRST | WORKER,
    },
    "anybody may die": {"deaths": FIRST | SECOND | WORKER, "switches": 1},
    "with messages": {"words": 1, "switches": 1},
    "one drops its request": {"gives_up1": 2, "deaths": SECOND | WORKER, "switches": 1},
    "one abandons its rows": {"gives_up1": 1, "deaths": FIRST | SECOND, "switches": 1},
    "slots go on to other requests": {"requests0": 2, "gives_up1": 2, "deaths": SECOND, "switches": 1},
    "a producer comes back": {"deaths": SECOND, "reborn": 1, "switches": 1},
}  # fmt: skip
# One dies in a run, so the first two are the whole: two producers, a worker and the death of any before each
# of its steps. Of what has more steps (two requests, messages) a switch more is five times as many states.
LONG: dict[str, dict[str, int]] = {
    "the second or the worker may die, every order": {"deaths": SECOND | WORKER},
    "the first may die, every order": {"deaths": FIRST},
    "one slot, one drops its request, every order": {"slots": 1, "gives_up1": 2, "deaths": 7},
    "one drops its request": {"gives_up1": 2, "deaths": 7, "switches": 3},
    "one abandons its rows": {"gives_up1": 1, "deaths": 7, "switches": 4},
    "a full batch": {"rows0": 2, "deaths": 7, "switches": 3},
    "three rows, two requests": {"max_rows": 3, "requests0": 2, "deaths": 7, "switches": 2},
    "abandoned again and again": {
        "max_rows": 3, "requests0": 3, "gives_up0": 1, "deaths": SECOND, "switches": 3,
    },
    "slots go on to other requests": {"requests0": 2, "gives_up1": 2, "deaths": 7, "switches": 2},
    "with messages, anybody may die": {"words": 1, "deaths": 7, "switches": 2},
    "with messages, one drops": {"words": 1, "gives_up1": 2, "deaths": 7, "switches": 2},
    "every access, anybody may die": {"every_access": 1, "deaths": 7, "switches": 2},
    "every access, one drops": {"every_access": 1, "gives_up1": 2, "deaths": 7, "switches": 2},
    "every access, with messages, every order": {"every_access": 1, "words": 1, "requests1": 0, "deaths": 5},
    "told apart by whole stacks": {"whole_stacks": 1, "deaths": 7, "switches": 2},
    "three slots": {"slots": 3, "deaths": 7, "switches": 2},
}  # fmt: skip
MOST_STATES = 60_000_000  # 1.5 GB


@pytest.mark.parametrize("name", SHORT)
def test_every_order_keeps_every_promise(search: Search, name: str) -> None:
    found = search.run(SHORT[name])
    assert found.broken == "", found
    assert found.figures["complete"]
    assert found.figures["states"] > 10_000
    assert found.figures["ends"] > 10


@pytest.mark.torture
@pytest.mark.parametrize("name", LONG)
def test_every_order_of_more(search: Search, name: str) -> None:
    found = search.run({**LONG[name], "states": MOST_STATES})
    assert found.broken == "", found
    assert found.figures["complete"], found.figures


class Wrong(NamedTuple):
    """A defect put into the code: `file` says `wrong` instead of `text`; what the search says of it."""

    file: str
    text: str
    wrong: str
    scenario: dict[str, int]
    broken: str


CAS = "return __atomic_compare_exchange_n(at, expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);"
CAS_END = "\n}\nstatic inline bool swap_row"
TWO_STEPS = """
    uint64_t now = load64(at);
    if (now != *expected) {
        *expected = now;
        return false;
    }
    __atomic_store_n(at, wanted, __ATOMIC_SEQ_CST);
    return true;"""
COMMITS = "    __atomic_store_n(&row->state, (uint32_t)ROW_COMMITTED, __ATOMIC_RELEASE);\n"
SETTLES = "    slot_settle(a, s, rows);\n"
WRITES = "    ring->entries[tail & (capacity - 1)] = *message;\n"
SHOWS = "    __atomic_store_n(&ring->tail, tail + 1, __ATOMIC_RELEASE);\n"
PUSHES = "    bool sent = message_push(ring_of(a, worker, front), a->ring_capacity, message);\n"
FLAGS = "    FrontFlags *flags = &a->header->front[front];\n"
RINGS = "    if (flag_exchange(&flags->rung, 1) == 0 && doorbell >= 0)\n        doorbell_ring(doorbell);\n"
FREED = "make_word(word_generation(w) + 1, NO_WORKER, SLOT_FREE"
LOOKS_AGAIN = "slot_take() only acquires\n    slot = slot_take(a, worker, &due);"
LOST_RACE = "if (!swap_word(&a->header->open, &seen, pointer)"
CLOSES = " && !slot_close(slot_at(a, i), opened))\n            slot_seal(a, i);"
FREES = ")\n            __atomic_store_n(&slot_at(a, i)->word, word_freed(opened), __ATOMIC_SEQ_CST);"
ALL = "a caller waits for ever|a slot never comes back"
ANOTHERS = "a caller cannot tell that the answer is its own|" + ALL
WRONG: dict[str, Wrong] = {
    "check and set are two steps": Wrong(
        "arena.h", CAS + CAS_END, TWO_STEPS + CAS_END, {"switches": 2}, "a row was given to two|" + ANOTHERS
    ),
    "the generation stays": Wrong(
        "arena.h",
        FREED,
        FREED.replace(" + 1", ""),
        {"requests0": 2, "gives_up1": 2, "switches": 2},
        ANOTHERS,
    ),
    "rows are settled before they are written": Wrong(
        "slots.h", COMMITS + SETTLES, SETTLES + COMMITS, {"switches": 2}, ALL
    ),
    "a message is shown before it is written": Wrong(
        "message.h", WRITES + SHOWS, SHOWS + WRITES, {"words": 1, "requests1": 0, "every_access": 1}, ALL
    ),
    "the doorbell rings before the message is there": Wrong(
        "notify.h",
        PUSHES + FLAGS,
        FLAGS + RINGS + PUSHES + "    return sent;\n",
        {"words": 1, "requests1": 0},
        ALL,
    ),
    "a worker sleeps without a second look": Wrong(
        "notify.h", LOOKS_AGAIN, "\n    due = 0;", {"words": 1, "requests1": 0}, ALL
    ),
    "a lost race closes a slot that somebody is in": Wrong(
        "slots.h",
        LOST_RACE + CLOSES,
        LOST_RACE + FREES,
        {"switches": 3, "rows0": 2, "rows1": 2, "requests0": 2},
        "a row was given to two|" + ALL,
    ),
    "nobody is told after a worker's death": Wrong(
        "ring_actors.cpp",
        "        request_rescan(a, front_bells, ~(uint64_t)0);\n",
        "",
        {"words": 1, "requests1": 0, "deaths": WORKER},
        ALL,
    ),
    "a front's remains are taken for its own in another's batch": Wrong(
        "reclaim.h",
        "if (state != ROW_EMPTY && state != ROW_DROPPED && ",
        "if (state != ROW_EMPTY && ",
        {"gives_up1": 2, "deaths": SECOND, "switches": 2},
        ANOTHERS,
    ),
    "rows are lost that were found once": Wrong(
        "ring_actors.cpp",
        "!still || before.rows != now.rows || before.word != now.word",
        "!still",
        {"deaths": SECOND, "switches": 4},
        ANOTHERS,
    ),
    "a look at a batch that is not sealed yet counts": Wrong(
        "ring_actors.cpp",
        "seen[i] = {0, now.generation, 0, true};",
        "seen[i] = now;",
        {"slots": 1, "deaths": SECOND},
        ANOTHERS,
    ),
    "a batch that moved during a look is taken for well": Wrong(
        "ring_actors.cpp",
        "(!still || now.rows)",
        "(still && now.rows)",
        {"deaths": SECOND, "switches": 2},
        ALL,
    ),
}
FEW = ("check and set are two steps", "a front's remains are taken for its own in another's batch")


def pick(names: Callable[[str], bool]) -> list[str]:
    return [name for name in WRONG if names(name)]


def check_found(search: Search, name: str) -> None:
    wrong = WRONG[name]
    found = search.run(wrong.scenario, name, wrong.file, wrong.text, wrong.wrong)
    assert found.broken in wrong.broken.split("|"), found
    assert found.steps


@pytest.mark.parametrize("name", FEW)
def test_a_defect_is_found(search: Search, name: str) -> None:
    check_found(search, name)


@pytest.mark.torture
@pytest.mark.parametrize("name", pick(lambda name: name not in FEW))
def test_every_defect_is_found(search: Search, name: str) -> None:
    check_found(search, name)
