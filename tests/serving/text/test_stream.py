"""Streams of tokens: text, endings, stop strings, faults, readers that leave or stand still."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.serving.text import (
    BadStop,
    Finish,
    Info,
    PromptTooLong,
    Sampling,
    SettingFault,
    TextAsk,
    TextModel,
    TextModels,
    TextStream,
    TextTooLong,
    Token,
    UnknownToken,
    models,
    together,
)
from fastserve.serving.text.stream import TOKEN_BYTES, UNREAD_SHARE, unread
from fastserve.serving.text.tokenizer import load_tokenizer
from tests.text_rig import LocalEngine, Said, Scripted

HELLO: list[Said] = [(100, "Hello"), (101, " world"), (2, None)]
ONES: list[Said] = [(7, "x")]
WORDS = Info(vocab_size=1 << 20, tokenizer="words", max_prompt_tokens=8, max_tokens=16, max_new_tokens=6)


def run(work: Callable[[LocalEngine], Awaitable[None]]) -> None:
    async def whole() -> None:
        with LocalEngine() as engine:
            await asyncio.wait_for(work(engine), 30)
            await engine.idle()

    asyncio.run(whole())


def model_of(engine: LocalEngine, script: Iterable[Said] = ONES, **more: Any) -> TextModel:
    place = {key: more.pop(key) for key in ("reader_tokens", "steps") if key in more}
    engine.add("m1", Scripted(script, **more), **place)
    return TextModels(engine.context).find("m1")


async def read(stream: TextStream) -> list[Token]:
    found: list[Token] = []
    async with stream:
        async for tokens in stream:
            found += tokens
    assert stream.ending is not None
    return found


def ask(count: int = 20, **more: Any) -> TextAsk:
    sampling = Sampling(max_new_tokens=count, **more.pop("sampling", {}))
    return TextAsk(prompt=more.pop("prompt", "any"), sampling=sampling, **more)


def test_tokens_come_with_their_text_and_the_ending_has_the_whole() -> None:
    async def work(engine: LocalEngine) -> None:
        stream = await model_of(engine, HELLO, eos={2}).start(ask(seed=5))
        tokens = await read(stream)
        assert [(token.id, token.text, token.index, token.ms) for token in tokens] == [
            (100, "Hello", 0, 1.0),
            (101, " world", 1, 1.0),
            (2, "", 2, 1.0),
        ]
        assert [token.finish for token in tokens] == [Finish.NONE, Finish.NONE, Finish.EOS]
        ending = stream.ending
        assert ending is not None
        assert (ending.reason, ending.text, ending.generated) == (Finish.EOS, "Hello world", 3)
        assert (stream.seed, stream.prompt_tokens, ending.fault, ending.stop) == (5, 1, None, None)

    run(work)


def test_an_answer_is_as_long_as_is_wanted_allowed_and_fits() -> None:
    async def work(engine: LocalEngine) -> None:
        model = model_of(engine, info=WORDS)
        for count, prompt, expected in ((3, "a", 3), (100, "a", 6), (100, "a b c d e f g h", 6)):
            ending = await (await model.start(ask(count, prompt=prompt))).rest()
            assert (ending.reason, ending.generated) == (Finish.LENGTH, expected)
        tight = Info(vocab_size=1 << 20, tokenizer="words", max_prompt_tokens=8, max_tokens=10)
        engine.add("tight", Scripted(ONES, info=tight))
        stream = await TextModels(engine.context).find("tight").start(ask(9, prompt="a b c d e f g h"))
        assert (await stream.rest()).generated == 2

    run(work)


@pytest.mark.parametrize(
    ("asked", "kind", "numbers"),
    [
        ({"prompt": "w " * 9}, PromptTooLong, {"got": 9, "most": 8}),
        ({"prompt": [1] * 9}, PromptTooLong, {"got": 9, "most": 8}),
        ({"prompt": []}, PromptTooLong, {"got": 0, "most": 8}),
        ({"prompt": " "}, PromptTooLong, {"got": 0, "most": 8}),
        ({"prompt": ""}, TextTooLong, {"got": 0, "most": 4 << 20}),
        ({"prompt": "w" * ((4 << 20) + 1)}, TextTooLong, {"got": (4 << 20) + 1}),
        ({"prompt": [5, -1]}, UnknownToken, {"token": -1, "place": 1}),
        ({"prompt": [1 << 20]}, UnknownToken, {"token": 1 << 20, "place": 0, "vocab": 1 << 20}),
        ({"stop": [""]}, BadStop, {}),
        ({"stop": ["x"] * 65}, BadStop, {}),
        ({"images": [b"GIF"]}, ServeError, {}),
    ],
)
def test_what_a_model_does_not_take_is_refused_with_its_numbers(
    asked: dict[str, Any], kind: type[ServeError], numbers: dict[str, int]
) -> None:
    async def work(engine: LocalEngine) -> None:
        with pytest.raises(kind) as fault:
            await model_of(engine, info=WORDS).start(ask(**asked))
        assert fault.value.kind is Kind.INVALID_ARGUMENT
        assert {name: getattr(fault.value, name) for name in numbers} == numbers

    run(work)


@pytest.mark.parametrize(("truncate", "kept"), [(3, 3), (-1, 8), (0, 5), (20, 5)])
def test_a_prompt_is_cut_at_its_beginning(truncate: int, kept: int) -> None:
    async def work(engine: LocalEngine) -> None:
        model = model_of(engine, info=WORDS)
        prompt = list(range(5 if truncate in (0, 20) else 12))
        stream = await model.start(ask(1, prompt=prompt, truncate=truncate))
        assert stream.prompt_ids == prompt[-kept:]
        await stream.rest()

    run(work)


def test_a_stop_string_across_tokens_ends_it_and_its_text_is_not_shown() -> None:
    async def work(engine: LocalEngine) -> None:
        script = [(1, "the"), (2, " EN"), (3, "emy"), (4, " E"), (5, "N"), (6, "D of"), (7, "never")]
        stream = await model_of(engine, script).start(ask(stop=["END"]))
        tokens = await read(stream)
        assert [token.text for token in tokens] == ["the", " ", "ENemy", " ", "", ""]
        ending = stream.ending
        assert ending is not None
        assert (ending.reason, ending.stop, ending.text, ending.generated) == (
            Finish.STOP,
            "END",
            "the ENemy ",
            6,
        )

    run(work)


@pytest.mark.parametrize(("least", "text"), [(0, ""), (1, "a"), (2, "aa"), (3, "aaEND"), (5, "aaENDa")])
def test_no_stop_string_is_searched_in_the_least_tokens(least: int, text: str) -> None:
    async def work(engine: LocalEngine) -> None:
        script = [(1, "a"), (1, "a"), (2, "EN"), (3, "D"), (1, "a"), (1, "a")]
        asked = ask(6, stop=["a", "END"], sampling={"min_new_tokens": least})
        stream = await model_of(engine, script).start(asked)
        ending = await stream.rest()
        assert (ending.reason, ending.text) == (Finish.STOP, text)

    run(work)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"logit_bias": {1 << 20: 1.0}}, "`logit_bias` names token 1048576, allowed: 0 to 1048575"),
        ({"logit_bias": {-1: 1.0}}, "names token -1"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "has 1025 tokens, allowed: at most 1024"),
        (
            {"prompt_logprobs": True, "prompt_best": 1 << 16},
            "asks for 65537 log probabilities of a prompt of 1",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], words: str) -> None:
    async def work(engine: LocalEngine) -> None:
        with pytest.raises(SettingFault, match=words) as caught:
            await model_of(engine).start(ask(sampling=settings))
        assert caught.value.field in settings or caught.value.field == "prompt_logprobs"

    run(work)


def test_what_was_held_back_comes_with_the_last_token() -> None:
    async def work(engine: LocalEngine) -> None:
        stream = await model_of(engine, [(1, "a E"), (2, "N")]).start(ask(2, stop=["END"]))
        assert [token.text for token in await read(stream)] == ["a ", "EN"]

    run(work)


def test_stop_tokens_and_stop_strings_are_shown_where_that_is_wanted() -> None:
    async def work(engine: LocalEngine) -> None:
        model = model_of(engine, [(1, "a"), (2, "b"), (3, "c")])
        for more, text in (
            ({"stop": ["b"]}, "a"),
            ({"stop": ["b"], "include_stop": True}, "ab"),
        ):
            assert (await (await model.start(ask(**more))).rest()).text == text

    run(work)


def test_who_is_told_of_an_end_is_told_once() -> None:
    """The engine's own last word on a sequence that a stop string has ended comes later: no news."""

    async def work(engine: LocalEngine) -> None:
        stream = await model_of(engine, [(1, "a"), (2, "b"), (3, "c")]).start(ask(stop=["b"]))
        ends: list[bool] = []
        over = asyncio.Event()

        def told() -> None:
            ends.append(stream.ending is not None)
            if ends[-1]:
                over.set()

        stream.on_news = told
        await over.wait()
        await engine.idle()
        await asyncio.sleep(0)  # a turn of the loop, for what was to be called in the next
        assert ends.count(True) == 1
        stream.cancel()
        assert ends.count(True) == 1

    run(work)


@pytest.mark.parametrize("steps", [1, 7])
def test_tokens_after_a_stop_string_are_not_counted(steps: int) -> None:
    async def work(engine: LocalEngine) -> None:
        stream = await model_of(engine, [(1, "a"), (2, "b"), (3, "c")], steps=steps).start(ask(stop=["b"]))
        ending = await stream.rest()
        assert (ending.token_ids, ending.text) == ([1, 2], "a")

    run(work)


def test_a_model_that_fails_says_so_in_the_ending() -> None:
    async def work(engine: LocalEngine) -> None:
        stream = await model_of(engine, fail_after=2).start(ask())
        tokens = await read(stream)
        ending = stream.ending
        assert ending is not None
        assert ending.fault is not None
        assert (len(tokens), ending.text, ending.reason) == (2, "xx", Finish.FAILED)
        assert (ending.fault.kind, ending.fault.message) == (Kind.INTERNAL, "the engine failed")

    run(work)


def test_a_deadline_ends_it() -> None:
    async def work(engine: LocalEngine) -> None:
        deadline = time.monotonic_ns() + 5_000_000
        stream = await model_of(engine).start(ask(500, deadline_ns=deadline, prompt="w"))
        ending = await asyncio.wait_for(stream.rest(), 60)
        if ending.reason is not Finish.LENGTH:  # 500 tokens in 5 ms
            assert ending.fault is not None
            assert (ending.reason, ending.fault.kind) == (Finish.TIMEOUT, Kind.DEADLINE_EXCEEDED)
        past = await model_of(engine).start(ask(500, deadline_ns=1))
        assert (await past.rest()).reason is Finish.TIMEOUT

    run(work)


async def leave_by_exit(stream: TextStream) -> None:
    async with stream:
        async for _ in stream:
            break


async def leave_by_error(stream: TextStream) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with stream:
            async for _ in stream:
                raise ZeroDivisionError


async def leave_by_cancel(stream: TextStream) -> None:
    async def reading() -> None:
        async with stream:
            async for _ in stream:
                pass

    task = asyncio.ensure_future(reading())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_close(stream: TextStream) -> None:
    await anext(stream)
    await stream.aclose()


@pytest.mark.parametrize("leave", [leave_by_exit, leave_by_error, leave_by_cancel, leave_by_close])
def test_whoever_leaves_cancels(leave: Callable[[TextStream], Awaitable[None]]) -> None:
    async def work(engine: LocalEngine) -> None:
        info = Info(vocab_size=9, tokenizer="words", max_tokens=1 << 30, max_new_tokens=1 << 30)
        stream = await model_of(engine, info=info).start(ask(1 << 29, prompt=[1]))
        await leave(stream)
        await engine.idle()
        assert stream.ending is not None
        assert stream.ending.reason is Finish.CANCELLED

    run(work)


def test_a_stream_that_nobody_holds_is_cancelled() -> None:
    async def work(engine: LocalEngine) -> None:
        info = Info(vocab_size=9, tokenizer="words", max_tokens=1 << 30, max_new_tokens=1 << 30)
        stream = await model_of(engine, info=info).start(ask(1 << 29, prompt=[1]))
        await anext(stream)
        del stream
        gc.collect()
        await engine.idle()

    run(work)


def test_a_reader_that_stands_still_holds_its_sequence_up() -> None:
    async def work(engine: LocalEngine) -> None:
        model = model_of(engine, reader_tokens=10, info=Info(vocab_size=9, tokenizer="words"))
        stream = await model.start(ask(100, prompt=[1]))
        (loop,) = engine.loops.values()
        while any(loop.room(rid) for rid in loop.runs):
            await asyncio.sleep(0.001)
        assert len(await anext(stream)) == 10
        assert len(await anext(stream)) <= 10
        assert (await stream.rest()).generated == 100

    run(work)


def test_what_is_not_read_is_on_an_account() -> None:
    async def work(engine: LocalEngine) -> None:
        model = model_of(engine, reader_tokens=1000, info=Info(vocab_size=9, tokenizer="words"))
        assert unread.nbytes == 0
        stream = await model.start(ask(100, prompt=[1]))
        await engine.idle()
        assert unread.nbytes >= 100 * TOKEN_BYTES
        assert len(await anext(stream)) == 100
        assert unread.nbytes == 0
        left = await model.start(ask(100, prompt=[1]))
        await engine.idle()
        assert unread.nbytes > 0
        del left
        gc.collect()
        assert unread.nbytes == 0

    run(work)


def test_who_has_the_most_unread_ends_when_the_account_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "most", 3 * UNREAD_SHARE)

    async def work(engine: LocalEngine) -> None:
        info = Info(vocab_size=9, tokenizer="words", max_tokens=1 << 20, max_new_tokens=1 << 20)
        model = model_of(engine, reader_tokens=1 << 20, info=info)
        short = [await model.start(ask(100, prompt=[1])) for _ in range(8)]
        behind = [await model.start(ask(20_000, prompt=[1])) for _ in range(4)]
        reading = await model.start(ask(20_000, prompt=[1]))
        assert (await reading.rest()).generated == 20_000
        await engine.idle()
        assert unread.nbytes <= unread.most + 8 * 100 * 2 * TOKEN_BYTES
        for stream in behind:
            tokens = [token async for some in stream for token in some]
            assert stream.ending is not None
            fault = stream.ending.fault
            assert isinstance(fault, ServeError)
            assert (fault.kind, tokens) == (Kind.RESOURCE_EXHAUSTED, [])
            assert "read too slowly" in fault.message
        for stream in short:
            assert (await stream.rest()).fault is None
        assert unread.nbytes == 0

    run(work)


def test_several_sequences_of_one_request_have_seeds_that_follow() -> None:
    async def work(engine: LocalEngine) -> None:
        script = Scripted(lambda request: [(request.note.sampling.seed % 7, "x")])
        engine.add("m1", script)
        model = TextModels(engine.context).find("")
        streams = await model.start_many(ask(3, seed=(1 << 64) - 1), 3)
        assert [stream.seed for stream in streams] == [(1 << 64) - 1, 0, 1]
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for index, tokens in together(streams):
            found[index] += [token.id for token in tokens]
        assert found == {0: [1] * 3, 1: [0] * 3, 2: [1] * 3}

    run(work)


def test_all_sequences_of_a_request_start_or_none() -> None:
    async def work(engine: LocalEngine) -> None:
        model = model_of(engine)
        engine.loops[model.version].most_waiting = 2
        with pytest.raises(ServeError) as fault:
            await model.start_many(ask(), 3)
        assert fault.value.kind is Kind.UNAVAILABLE

    run(work)


def test_seeds_differ_where_none_is_given() -> None:
    async def work(engine: LocalEngine) -> None:
        model = model_of(engine)
        seeds = {(await model.start(ask())).seed for _ in range(3)}
        assert len(seeds) == 3

    run(work)


def test_models_are_found_by_name_and_forgotten_at_their_end() -> None:
    async def work(engine: LocalEngine) -> None:
        texts = TextModels(engine.context)
        with pytest.raises(ServeError, match="there is none"):
            texts.find("")
        version = engine.add("m1", Scripted(ONES))
        assert (texts.names(), texts.find("").name, texts.find("m1")) == (["m1"], "m1", texts.find("m1"))
        engine.add("m2", Scripted(ONES))
        with pytest.raises(ServeError, match="m1, m2"):
            texts.find("")
        assert TextModels(engine.context, "m2").find("").name == "m2"
        engine.remove(version)
        with pytest.raises(ServeError, match="Model m1 not found"):
            texts.find("m1")

    run(work)


def test_all_dialects_share_a_model_which_ends_with_its_version() -> None:
    async def work(engine: LocalEngine) -> None:
        first, second = TextModels(engine.context), TextModels(engine.context)
        version = engine.add("m1", Scripted(ONES))
        model = weakref.ref(first.find("m1"))
        assert model() is second.find("m1")
        engine.remove(version)
        await asyncio.sleep(0)
        gc.collect()
        assert model() is None

    run(work)


def test_a_tokenizer_is_read_beside_the_loop_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Thread] = []

    def slowly(*given: Any) -> Any:
        read.append(current_thread())
        assert go.wait(60)
        if len(read) == 1:
            raise ServeError(Kind.FAILED_PRECONDITION, "not yet")
        return load_tokenizer("words", tmp_path, "m1")

    async def work(engine: LocalEngine) -> None:
        texts = TextModels(engine.context)
        engine.add("m1", Scripted(ONES, info=Info(vocab_size=1 << 20)))
        starts = [asyncio.ensure_future(texts.find("m1").start(ask(2))) for _ in range(3)]
        while not read:  # begun by the version's coming, and the loop turns
            await asyncio.sleep(0.001)
        go.set()
        for start in starts:
            with pytest.raises(ServeError, match="not yet"):
                await start
        for _ in range(3):
            assert (await (await texts.find("m1").start(ask(2))).rest()).generated == 2
        assert len(read) == 2
        assert current_thread() not in read

    go = Event()
    monkeypatch.setattr(models, "load_tokenizer", slowly)
    run(work)
