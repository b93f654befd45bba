"""Text versions on real workers: tokens come whole and in order, whoever leaves, is late, slow or refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from fastserve._ext.fast_path import ACCOUNT, Account
from fastserve.codec.generation import Finish, read_extra
from fastserve.engine import text_queue
from fastserve.engine.share_board import ShareBoard
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.metrics import names
from fastserve.metrics.exposition import Metric
from fastserve.repository.version import Version
from tests import proc
from tests.text.serving import Heard, Served, run, serving, until

SEED = "am a French photographer based in Paris.\nI have been shooting since I was 15"
COUNTING = """
import itertools

class Model:
    info = {"tokenizer": "", "eos_ids": [999]}

    def __init__(self, config):
        pass

    def generate(self, request):
        yield from itertools.count(request.ids[0])
"""
# Says what it was asked, then what it was asked for.
TELLING = """
class Model:
    def __init__(self, config):
        pass

    def generate(self, request):
        said = request.parameters.get("raise")
        yield f"{request.ids} {request.text} {request.priority} {request.images} {request.request_id}"
        if said:
            raise ValueError(said)
        yield 7, "x", -0.5
        yield {"a": 1} if request.parameters.get("bad") else 8
"""


def counted(heard: Heard, first: int) -> bool:
    return heard.ids == list(range(first, first + len(heard.ids)))


def test_the_seeds_stream(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_rig("llm-seed1")
            heard = at.ask(version, max_new_tokens=20)
            assert await heard.end() is Finish.LENGTH
            assert heard.text == SEED
            assert heard.ids[-1] == 29945
            assert version.text is not None
            assert version.text.tokenizer == "words"

    run(work())


def test_many_at_once_each_in_order(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING)
            asked = [at.ask(version, [1000 * n], max_new_tokens=1 + n % 50) for n in range(300)]
            ends = await asyncio.gather(*(heard.end() for heard in asked))
            assert set(ends) == {Finish.LENGTH}
            assert [len(heard.ids) for heard in asked] == [1 + n % 50 for n in range(300)]
            assert all(counted(heard, 1000 * n) for n, heard in enumerate(asked))

    run(work())


def test_what_a_model_is_told_and_what_it_may_say(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(TELLING, text={"tokenizer": ""})
            heard = at.ask(
                version, [], text="hé", priority=2, images=[b"\x89PNG"], request_id="r1", logprobs=0
            )
            assert await heard.end() is Finish.EOS
            assert heard.text == "[] hé 2 [b'\\x89PNG'] r1x"
            assert [record[0] for record in heard.records] == [0, 7, 8, 0]
            logprobs = read_extra(heard.records[1][3]).logprobs
            assert logprobs is not None
            assert logprobs.own == -0.5
            bad = at.ask(version, [3], parameters={"bad": True})
            assert await bad.end() is Finish.FAILED
            assert "generate yielded dict" in bad.error

    run(work())


@pytest.mark.logs_errors
def test_a_model_that_raises_fails_its_own_request(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(TELLING)
            others = [at.ask(version, [n]) for n in range(8)]
            heard = at.ask(version, [1], parameters={"raise": "kaboom"})
            assert await heard.end() is Finish.FAILED
            assert heard.error == "ValueError: kaboom"
            assert heard.text.startswith("[1]")
            assert [await other.end() for other in others] == [Finish.EOS] * 8

    run(work())


def test_how_sequences_end(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"max_new_tokens": 6, "max_tokens": 16})
            ends = {
                Finish.STOP: at.ask(version, [5], stop_ids=[8]),
                Finish.EOS: at.ask(version, [997]),
                Finish.LENGTH: at.ask(version, [997], ignore_eos=True, max_new_tokens=50),
            }
            for finish, heard in ends.items():
                assert await heard.end() is finish
            assert [len(heard.ids) for heard in ends.values()] == [4, 3, 6]
            almost = at.ask(version, [1] * 15, max_new_tokens=50)
            assert (await almost.end(), almost.ids) == (Finish.LENGTH, [1])
            long = at.ask(version, [1] * 16)
            assert await long.end() is Finish.FAILED
            assert long.error == "a prompt of 16 tokens, allowed: up to 15"

    run(work())


def test_who_leaves_hears_one_record_more(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"max_new_tokens": 1 << 30, "max_tokens": 1 << 30})
            heard = at.ask(version, [0], max_new_tokens=1 << 30)
            await heard.until(10)
            assert heard.run is not None
            before = len(heard.records)
            heard.run.cancel(Finish.STOP)
            assert len(heard.records) == before, "not from inside"
            assert await heard.end() is Finish.STOP
            assert len(heard.records) == before + 1
            heard.run.cancel()
            heard.run.taken(3)
            early = at.ask(version, [0], max_new_tokens=1 << 30)
            assert early.run is not None
            early.run.cancel()
            assert await early.end() is Finish.CANCELLED
            await until(lambda: not any(at.left(version)))

    run(work())


def test_a_slow_reader_stands_still_and_stops_nobody(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(
                COUNTING, text={"reader_tokens": 8, "max_new_tokens": 4000, "max_tokens": 5000}
            )
            slow = at.ask(version, [0], reads=False, max_new_tokens=100)
            fast = [at.ask(version, [n], max_new_tokens=2000, ignore_eos=True) for n in range(4)]
            assert [await heard.end() for heard in fast] == [Finish.LENGTH] * 4
            assert len(slow.records) == 8
            await asyncio.sleep(0.05)  # the worker sleeps: nobody can go on
            assert len(slow.records) == 8
            assert slow.run is not None
            while not slow.ended.is_set():
                slow.news.clear()
                slow.run.taken(4)
                await asyncio.wait_for(slow.news.wait(), 30)
            assert slow.ids == list(range(100))

    run(work())


def test_all_readers_behind_and_one_comes(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"reader_tokens": 4, "max_sequences": 2})
            took_s = [await one_comes(at, version)]
            while took_s[-1] >= 0.9:  # a machine may be slow, but not whenever
                assert len(took_s) < 5, ("the worker is woken, it does not look by itself", took_s)
                took_s.append(await one_comes(at, version))

    run(work())


async def one_comes(at: Served, version: Version) -> float:
    """Both rows are readers' who never read: how long one takes who comes then."""
    behind = [at.ask(version, [100 * n], reads=False, max_new_tokens=100) for n in range(2)]
    await asyncio.gather(*(heard.until(4) for heard in behind))
    await asyncio.sleep(0.02)
    assert [len(heard.records) for heard in behind] == [4, 4], "nobody waits: they stand still"
    began = time.monotonic()
    assert await at.ask(version, [7], max_new_tokens=3).end() is Finish.LENGTH
    took_s = time.monotonic() - began
    assert Finish.LENGTH in {Finish(heard.records[-1][1]) for heard in behind}, "they have written on"
    for n, heard in enumerate(behind):
        assert heard.run is not None
        heard.run.cancel()
        await heard.end()
        assert heard.ids == list(range(100 * n, 100 * n + len(heard.ids)))
    await until(lambda: not any(at.left(version)))
    return took_s


def test_what_is_behind_stands_again_once_nobody_waits(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"reader_tokens": 4, "max_sequences": 2})
            short = at.ask(version, [0], reads=False, max_new_tokens=50)
            long = at.ask(version, [1], reads=False, max_new_tokens=1 << 20, ignore_eos=True)
            await asyncio.gather(short.until(4), long.until(4))
            assert await at.ask(version, [7], max_new_tokens=3).end() is Finish.LENGTH
            stood = len(long.records)
            await asyncio.sleep(0.05)
            assert 50 <= stood <= len(long.records) < stood + 50
            assert long.run is not None
            long.run.cancel()
            await long.end()

    run(work())


def test_deadlines_of_who_runs_and_who_waits(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_rig("llm-slow", parameters={"pause_s": 600})
            due = time.monotonic_ns() + 200_000_000
            heard = [at.ask(version, [1], deadline_ns=due) for _ in range(3)]
            assert [await one.end() for one in heard] == [Finish.TIMEOUT] * 3
            assert time.monotonic_ns() >= due
            assert [one.ids for one in heard] == [[], [], []]

    run(work())


def test_priority_orders_who_waits(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_rig("llm-slow", parameters={"pause_s": 0.05})
            order: list[int] = []

            async def ask(number: int, priority: int) -> None:
                heard = at.ask(version, [1], priority=priority)
                assert await heard.end() is Finish.EOS
                order.append(number)

            tasks = [asyncio.ensure_future(ask(0, 5))]
            ring = at.queue(version).ring
            await until(lambda: any(ring.describe(slot)[0] == "running" for slot in range(ring.slots)))
            (worker,) = at.pids(version)
            proc.stop(worker)  # until all the others wait
            tasks += [asyncio.ensure_future(ask(1 + at, n)) for at, n in enumerate((5, 1, 3))]
            await until(lambda: ring.outstanding() == 4 - len(order))
            os.kill(worker, signal.SIGCONT)
            await asyncio.gather(*tasks)
            assert order == [0, 2, 3, 1]

    run(work())


def test_waiting_has_a_bound(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_rig(
                "llm-slow", parameters={"pause_s": 60}, text={"max_sequences": 1, "max_waiting": 2}
            )
            held = [at.ask(version, [1]) for _ in range(3)]
            with pytest.raises(ServeError, match=r"3 sequences run or wait \(text.max_sequences") as refused:
                at.ask(version, [1])
            assert refused.value.kind is Kind.UNAVAILABLE
            assert refused.value.retry_after_s
            for heard in held:
                assert heard.run is not None
                heard.run.cancel()
            await until(lambda: not any(at.left(version)))
            at.ask(version, [1]).run.cancel()  # type: ignore[union-attr]

    run(work())


def test_prompts_that_wait_have_a_bound(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(
                COUNTING, max_queue_bytes=8 * 4096, text={"max_tokens": 1 << 20, "reader_tokens": 1}
            )
            with pytest.raises(ServeError, match=r"larger than all that may wait \(max_queue_bytes\)"):
                at.ask(version, [1] * 8 * 1024)
            begun = at.ask(version, [1] * 6000, reads=False)
            await begun.until(1)  # its prompt needs no memory any more
            assert at.queue(version).prompt_pages == 0
            assert at.queue(version).ring.slab_pages_used() == 0
            also = at.ask(version, [1] * 7000)
            with pytest.raises(ServeError, match="take all of their memory") as refused:
                at.ask(version, [1] * 2000)
            assert refused.value.kind is Kind.UNAVAILABLE
            for heard in (begun, also):
                assert heard.run is not None
                heard.run.cancel()

    run(work())


ENGINE = """
class Model:
    info = {"slots": 4, "tokenizer": ""}

    def __init__(self, config):
        self.running = {}

    def submit(self, request):
        self.running[request.rid] = request.note.sampling.max_new_tokens

    def cancel(self, rid, why):
        self.running[rid] = -why if rid in self.running else 0

    def step(self, out):
        for rid, left in list(self.running.items()):
            if left < 0:
                out.end(rid, -left)
                del self.running[rid]
            elif out.room(rid):
                out.token(rid, left, 2 if left == 1 else 0, 11)
                self.running[rid] -= 1
                if left == 1:
                    del self.running[rid]
        return True

    def pending(self):
        return len(self.running)
"""


def test_a_whole_engine_of_ones_own(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(ENGINE)
            heard = [at.ask(version, [1], max_new_tokens=n) for n in (1, 5, 9)]
            left = at.ask(version, [1], max_new_tokens=1 << 20)
            await left.until(3)
            assert left.run is not None
            left.run.cancel()
            assert [await one.end() for one in heard] == [Finish.LENGTH] * 3
            assert [one.ids for one in heard] == [[1], [5, 4, 3, 2, 1], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
            assert {record[2] for one in heard for record in one.records} == {11}

    run(work())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("class Model:\n    def __init__(self, config): pass", "has neither a generator"),
        (
            "class Model:\n    def __init__(self, config): pass\n    def generate(self): yield 1",
            "must take one",
        ),
        (
            "class Model:\n    def __init__(self, config): pass\n    def step(self, out): pass",
            "has a step, and no method submit",
        ),
        (COUNTING.replace('"eos_ids": [999]', '"slot": 3'), "info: given 'slot', allowed: vocab_size"),
        (COUNTING.replace("[999]", '"x"'), "info: Expected `array`"),
    ],
)
@pytest.mark.logs_errors
def test_classes_that_do_not_fit(tmp_path, code, words):
    async def work() -> None:
        async with serving(tmp_path) as at:
            with pytest.raises(ServeError, match=words):
                await at.load_code(code)

    run(work())


def test_what_model_yaml_may_not_say(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            tensors = {"x": {"dtype": "float32", "shape": [1]}}
            for fields, words in (
                ({"max_batch_size": 4}, "max_batch_size: given 4, allowed: 0"),
                ({"inputs": tensors}, "inputs: given tensors, allowed: nothing"),
                ({"text": {"max_sequences": 0}}, "text.max_sequences"),
                (
                    {"backend": "python", "text": {}},
                    "text: given settings, allowed: nothing with backend python",
                ),
            ):
                with pytest.raises(ConfigError, match=words):
                    await at.load_code(COUNTING, name=f"m{len(words)}", **fields)

    run(work())


def test_a_model_of_tensors_generates_nothing(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            tensor = {"dtype": "float32", "shape": [1]}
            version = await at.load_code(
                "class Model:\n    def __init__(self, c): pass\n    def run(self, inputs): return inputs",
                backend="python",
                inputs={"x": tensor},
                outputs={"x": tensor},
            )
            assert at.engine.text_info(version) is None
            with pytest.raises(ServeError, match="generates no text") as refused:
                at.ask(version, [1])
            assert refused.value.kind is Kind.UNIMPLEMENTED
            await at.unload(version)

    run(work())


def test_unload_lets_everybody_finish(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"max_sequences": 4})
            asked = [at.ask(version, [n], max_new_tokens=300) for n in range(20)]
            await asked[0].until(5)
            await at.unload(version)
            assert all(heard.ended.is_set() for heard in asked)
            assert [len(heard.ids) for heard in asked] == [300] * 20
            with pytest.raises(ServeError, match="is not available"):
                at.ask(version, [1])

    run(work())


def test_closing_ends_everybody(tmp_path):
    async def work() -> None:
        at = Served(tmp_path)
        version = await at.load_rig("llm-slow", parameters={"pause_s": 60})
        asked = [at.ask(version, [n]) for n in range(3)]
        await at.host.close()
        at.registry.close()
        assert [await heard.end() for heard in asked] == [Finish.FAILED] * 3
        assert {heard.error for heard in asked} == {"the model version was unloaded"}

    run(work())


def test_several_instances_share_what_comes(tmp_path):
    async def work() -> None:
        telling = COUNTING.replace("request.ids[0]", "self.first").replace(
            "pass", 'self.first = 1000 * config["instance"]'
        )
        async with serving(tmp_path) as at:
            version = await at.load_code(telling, instances=2, text={"max_sequences": 4})
            asked = [at.ask(version, [0], max_new_tokens=200) for _ in range(32)]
            assert {await heard.end() for heard in asked} == {Finish.LENGTH}
            by = [heard.ids[0] // 1000 for heard in asked]
            assert all(counted(heard, heard.ids[0]) for heard in asked)
            assert set(by) == {0, 1}, by

    run(work())


def test_what_is_counted(tmp_path):
    def read(at: Served, *metrics: Metric) -> list[float]:
        return [sum(values[0] for values in found.values()) for found in at.registry.read(*metrics)]

    async def work() -> None:
        async with serving(tmp_path) as at:
            four = COUNTING.replace(
                "itertools.count(request.ids[0])",
                "itertools.chain(itertools.repeat(5, 4), itertools.repeat(None))",  # and nothing for ever
            )
            version = await at.load_code(four, text={"max_sequences": 2})
            running = [at.ask(version, [1, 2], max_new_tokens=100) for _ in range(2)]
            waiting = at.ask(version, [1])
            await asyncio.gather(*(heard.until(4) for heard in running))
            levels = names.TEXT_RUNNING, names.TEXT_WAITING, names.TEXT_KV_USED
            assert read(at, *levels) == [2, 1, 2 * (2 + 4)]
            for heard in (*running, waiting):
                assert heard.run is not None
                heard.run.cancel()
            assert await at.ask(version, [1], max_new_tokens=3).end() is Finish.LENGTH
            assert read(at, *levels) == [0, 0, 0]
            assert read(at, names.TEXT_PROMPT_TOKENS, names.TEXT_TOKENS) == [5, 11]
            (ends,) = at.registry.read(names.TEXT_SEQUENCES)
            assert {labels[2]: values[0] for labels, values in ends.items() if values[0]} == {
                "cancelled": 3,
                "length": 1,
            }
            first, gap = at.registry.read(names.TEXT_FIRST_TOKEN, names.TEXT_TOKEN_GAP)
            assert [sum(next(iter(found.values()))[:-1]) for found in (first, gap)] == [3, 8]

    run(work())


def test_one_that_another_of_the_step_ends_is_counted_once(tmp_path):
    """Two whose records came together, each of whom ends the other when it hears."""

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"tokenizer": "", "reader_tokens": 2})
            queue, pair = at.queue(version), [at.ask(version, [n], reads=False) for n in (10, 50)]
            await asyncio.gather(*(heard.until(1) for heard in pair))
            runs = [heard.run for heard in pair]
            assert runs[0] is not None
            assert runs[1] is not None
            runs[0].cancel()
            runs[0].hear([(11, 0, 5, b""), (12, Finish.EOS, 5, b"")])  # type: ignore[attr-defined]
            runs[1].cancel()
            runs[1].hear(None)  # type: ignore[attr-defined]
            await asyncio.gather(*(heard.end() for heard in pair))
            (ends,) = at.registry.read(names.TEXT_SEQUENCES)
            assert {labels[2]: values[0] for labels, values in ends.items() if values[0]} == {"cancelled": 2}
            await until(lambda: not any(at.left(version)))
            levels = at.registry.read(names.TEXT_RUNNING, names.TEXT_WAITING, names.TEXT_KV_USED)
            assert [sum(values[0] for values in found.values()) for found in levels] == [0, 0, 0]
            assert queue.waiting == 0

    run(work())


class Team(Account):
    """An API key of a test: what was charged to it."""

    def __init__(self, name: str, board: ShareBoard, weight: float = 1.0) -> None:
        self.name, self.board, self.weight = name, board, weight
        self.tokens: list[int] = []

    def charge_tokens(self, tokens: int) -> None:
        self.tokens.append(tokens)


@contextlib.contextmanager
def working_for(team: Team) -> Iterator[None]:
    token = ACCOUNT.set(team)
    try:
        yield
    finally:
        ACCOUNT.reset(token)


def test_tokens_are_charged_to_their_account_as_they_come(tmp_path, monkeypatch):
    monkeypatch.setattr(text_queue, "CHARGE_NS", 0)

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"max_sequences": 1, "max_waiting": 8})
            team, other = Team("team", ShareBoard(0)), Team("other", ShareBoard(0))
            with working_for(team):
                heard = at.ask(version, [7, 0, 0], max_new_tokens=10**6)
                waits = at.ask(version, [1, 2], max_new_tokens=400)
            await heard.until(1)
            await until(lambda: sum(team.tokens) > 3)
            waits.run.cancel()
            heard.run.cancel()
            assert sum(team.tokens) == 3 + len(heard.ids)
            whole = Team("whole", ShareBoard(0))
            with working_for(whole):
                await at.ask(version, [7, 0, 0], max_new_tokens=400).end()
            assert sum(whole.tokens) == 3 + 400
            assert len(whole.tokens) > 1
            with working_for(other):
                left = at.ask(version, [9], max_new_tokens=10**6)
            await left.until(5)
            left.run.cancel()
            assert sum(other.tokens) == 1 + len(left.ids)
            assert team.rows == 2
            assert not at.queue(version).accounted

    run(work())


HOLDING = """
import itertools, os

class Model:
    info = {"tokenizer": "", "eos_ids": [999]}

    def __init__(self, config):
        self.go = config["parameters"]["go"]

    def generate(self, request):
        with open(self.go + ".ran", "a") as ran:
            ran.write(f"{request.ids[0]} ")
        yield 1
        while request.ids[0] == 0 and not os.path.exists(self.go):
            yield None
        yield from itertools.count(1)
"""


async def until_taken(queue: text_queue.TextQueue, count: int) -> None:
    """Wait until a worker has taken so many sequences, to run them or to have them wait in its engine."""
    ring = queue.ring
    await until(lambda: sum(ring.describe(slot)[0] == "running" for slot in range(ring.slots)) == count)


def test_waiting_sequences_of_accounts_take_turns_by_weight(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            go = tmp_path / "go"
            text = {"max_sequences": 1, "max_waiting": 60}
            version = await at.load_code(HOLDING, text=text, parameters={"go": str(go)})
            board = ShareBoard(0)
            heavy, light, late = Team("heavy", board, 3.0), Team("light", board), Team("late", board)
            first = at.ask(version, [0], max_new_tokens=2)
            await first.until(1)
            waiting = []
            teams = ((light, 12), (heavy, 24), (late, 2))
            for number, (team, count) in enumerate(teams, 1):
                for _ in range(count):
                    with working_for(team):
                        waiting.append(at.ask(version, [number], max_new_tokens=2))
            await until_taken(at.queue(version), 1 + len(waiting))
            go.touch()
            assert [await heard.end() for heard in waiting] == [Finish.LENGTH] * len(waiting)
            # As the model has it: on a late loop the ends of several come at once.
            _, *ran = (tmp_path / "go.ran").read_text().split()
            began = [teams[int(number) - 1][0].name for number in ran]
            assert len(began) == len(waiting)
            for count in range(5, 40):
                shares = Counter(began[:count])
                if shares["heavy"] < 24 and shares["light"] < 12:
                    assert abs(shares["heavy"] / 3 - shares["light"]) <= 2, began
            assert sorted(i for i, name in enumerate(began) if name == "late")[-1] < 12

    run(work())


@pytest.mark.parametrize("asks_for_more", [False, True])
def test_turns_cost_tokens(tmp_path, asks_for_more):
    """Of two accounts of one weight, one gets answers of 3 tokens and one of 20: it has a fifth as many
    turns, also where only earlier answers tell how long they are."""
    lengths = {"short": 3, "long": 20}

    async def work() -> None:
        async with serving(tmp_path) as at:
            go = tmp_path / "go"
            text = {"max_sequences": 1, "max_waiting": 100}
            version = await at.load_code(HOLDING, text=text, parameters={"go": str(go)})
            board = ShareBoard(0)
            turns, teams = board.of("m1"), {name: Team(name, board) for name in lengths}
            ended: list[str] = []

            async def ask(name: str) -> None:
                length = lengths[name]
                settings = {"max_new_tokens": 60, "stop_ids": [length - 1]} if asks_for_more else {}
                with working_for(teams[name]):
                    heard = at.ask(version, [1], **{"max_new_tokens": length, **settings})
                assert await heard.end() is (Finish.STOP if asks_for_more else Finish.LENGTH)
                assert len(heard.ids) == length
                ended.append(name)

            for name in lengths:
                await ask(name)
            before = {name: turns.position(name) for name in lengths}
            first = at.ask(version, [0], max_new_tokens=2)
            await first.until(1)  # it runs, and the others wait
            ended.clear()
            asked = [asyncio.ensure_future(ask(name)) for name in ["short"] * 40 + ["long"] * 10]
            await until_taken(at.queue(version), 1 + len(asked))
            go.touch()
            await asyncio.gather(*asked)
            for count in range(6, 48, 6):
                assert abs(Counter(ended[:count])["long"] - count / 6.25) <= 2, ended
            for name, count in Counter(ended).items():
                tokens = turns.position(name) - max(before.values())
                assert tokens == pytest.approx(count * (1 + lengths[name]), abs=lengths["long"] + 1)

    run(work())


def test_a_turn_costs_less_once_answers_are_shorter(tmp_path):
    """After one long answer and eight short ones, a turn is charged the mean in which each answer has an
    eighth of the weight."""
    long, short, shorts = 20, 3, 8

    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_code(COUNTING, text={"max_sequences": 1, "max_waiting": 8})
            board = ShareBoard(0)
            turns, team = board.of("m1"), Team("team", board)

            async def charge(length: int) -> float:
                """Return what a turn is charged before anybody knows that its answer has this length."""
                before = turns.position(team.name)
                with working_for(team):
                    heard = at.ask(version, [1], max_new_tokens=60, stop_ids=[length])
                charged = turns.position(team.name) - before
                assert await heard.end() is Finish.STOP
                assert len(heard.ids) == length
                return charged

            charged = [await charge(length) for length in (long, *[short] * shorts, short)]
            means = [short + (long - short) * (7 / 8) ** count for count in range(shorts + 1)]
            assert charged == pytest.approx([1 + 60, *(1 + mean for mean in means)])

    run(work())


def test_the_last_slots_are_for_accounts_that_have_few(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            text, parameters = {"max_sequences": 1, "max_waiting": 15}, {"go": str(tmp_path / "go")}
            version = await at.load_code(HOLDING, text=text, parameters=parameters)
            board = ShareBoard(0)
            many, few = Team("many", board), Team("few", board)

            def ask(team: Team) -> Heard:
                with working_for(team):
                    return at.ask(version, [0], max_new_tokens=2)

            asked = [ask(few), *(ask(many) for _ in range(16 - 3))]
            with pytest.raises(ServeError, match="queue of this model is full"):
                ask(many)
            asked += [ask(few), ask(few)]
            with pytest.raises(ServeError, match="queue of this model is full"):
                ask(few)
            position = board.of("m1").position("few")
            assert position == pytest.approx(3 * 3.0), "a request that was refused costs no turn"
            for heard in asked:
                heard.run.cancel()
            await until(lambda: at.queue(version).ring.outstanding() == 0)

    run(work())
