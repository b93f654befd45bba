"""huggingface_hub's InferenceClient and text-generation's Client, unmodified, against TGI's paths."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fastserve.settings import TextgenOptions
from tests.dialects.text_common.likely import FIRST, Likely
from tests.dialects.text_common.rigs import HELLO
from tests.dialects.text_common.serving import Local
from tests.late import Late

pydantic, text_generation = Late("pydantic"), Late("text_generation")
errors, types = Late("text_generation.errors"), Late("text_generation.types")
huggingface_hub, hub_errors = Late("huggingface_hub"), Late("huggingface_hub.errors")
hub = Late("huggingface_hub.inference._generated.types.text_generation")
TEXTS = ["Hello", " world"]
USER = [{"role": "user", "content": "hi"}]


def serving(flavor: str = "tgi", *, fail_after: int = -1) -> Local:
    options: Any = {"tgi_flavor": flavor}
    return Local({"m1": Likely(HELLO, eos={2}, fail_after=fail_after)}, TextgenOptions(**options))


@pytest.fixture(scope="module", params=["tgi", "mindie"])
def server(request: Any) -> Iterator[Local]:
    with serving(request.param) as server:
        yield server


@pytest.fixture(scope="module")
def tgi() -> Iterator[Local]:
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def hub_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the hub's client online, and close the connections that it keeps for all its users.

    A text model that an earlier test loaded in this process sets HF_HUB_OFFLINE. The client reads it
    once, when it is imported, so without this the outcome depends on the files that share a process.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield
    huggingface_hub.utils.close_session()


def strictly(kind: Any, found: Any) -> None:
    pydantic.TypeAdapter(kind).validate_python(found.__dict__ if hasattr(found, "__dict__") else found)


# --- huggingface_hub, against both flavours (spec 9)


def test_the_hubs_client_whole(server: Local) -> None:
    with huggingface_hub.InferenceClient(server.url) as client:
        assert client.text_generation("hi") == "Hello world"
        full = client.text_generation("hi", return_full_text=True, max_new_tokens=1)
        assert full == "hiHello"
        told = client.text_generation("hi", details=True)
        assert told.details is not None
        assert (told.details.finish_reason, told.details.generated_tokens) == ("eos_token", 3)


def test_the_hubs_client_in_pieces(server: Local) -> None:
    with huggingface_hub.InferenceClient(server.url) as client:
        assert list(client.text_generation("hi", stream=True))[:2] == TEXTS
        *_, last = client.text_generation("hi", stream=True, details=True)
        assert last.generated_text == "Hello world"
        assert last.details is not None
        assert (last.details.finish_reason, last.details.generated_tokens) == ("eos_token", 3)


def test_the_hubs_chat(server: Local) -> None:
    with huggingface_hub.InferenceClient(server.url) as client:
        whole = client.chat_completion(USER, max_tokens=5, logprobs=True, top_logprobs=1)
        assert whole.choices[0].message.content == "Hello world"
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.content[0].logprob == FIRST
        chunks = list(client.chat_completion(USER, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world"
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_hubs_async_client(server: Local) -> None:
    async def work() -> None:
        async with huggingface_hub.AsyncInferenceClient(server.url) as client:
            stream = await client.text_generation("hi", stream=True)
            assert [text async for text in stream][:2] == TEXTS

    asyncio.run(work())


def test_the_hubs_errors(tgi: Local) -> None:
    with huggingface_hub.InferenceClient(tgi.url) as client:
        with pytest.raises(hub_errors.ValidationError, match="`temperature` must be strictly positive"):
            client.text_generation("hi", temperature=0)
        with pytest.raises(hub_errors.ValidationError, match="`temperature` must be strictly positive"):
            list(client.text_generation("hi", temperature=-1, stream=True))


def test_the_hubs_shapes(tgi: Local) -> None:
    with huggingface_hub.InferenceClient(tgi.url) as client:
        events = list(client.text_generation("hi", stream=True, details=True, top_n_tokens=2, do_sample=True))
        whole = client.text_generation(
            "hi", details=True, decoder_input_details=True, best_of=2, do_sample=True
        )
    for index, event in enumerate(events):
        strictly(hub.TextGenerationStreamOutput, event)
        assert event.index == index + 1
        assert event.top_tokens is not None
        assert len(event.top_tokens) == 2
    assert [event.token.logprob for event in events] == [FIRST, 2 * FIRST, 3 * FIRST]
    assert whole.details is not None
    assert [each.generated_text for each in whole.details.best_of_sequences or ()] == ["Hello world"]
    assert len(whole.details.prefill) == 1
    strictly(hub.TextGenerationOutput, whole)


# --- text-generation, which wants the original's shapes


@pytest.fixture
def client(tgi: Local) -> text_generation.Client:
    return text_generation.Client(tgi.url)


def test_text_generations_client(client: text_generation.Client) -> None:
    found = client.generate("a b", decoder_input_details=True, top_n_tokens=1)
    assert found.generated_text == "Hello world"
    assert found.details.finish_reason is types.FinishReason.EndOfSequenceToken
    assert [(each.text, each.logprob, each.special) for each in found.details.tokens] == [
        ("Hello", FIRST, False), (" world", 2 * FIRST, False), ("", 3 * FIRST, True),
    ]  # fmt: skip
    assert [each.logprob for each in found.details.prefill] == [None, -1.0]
    assert [len(each) for each in found.details.top_tokens or ()] == [1, 1, 1]
    assert found.details.seed is None


def test_text_generations_stream(client: text_generation.Client) -> None:
    found = list(client.generate_stream("hi", do_sample=True, seed=5))
    assert "".join(each.token.text for each in found if not each.token.special) == "Hello world"
    last = found[-1]
    assert last.generated_text == "Hello world"
    assert last.details is not None
    assert (last.details.generated_tokens, last.details.seed) == (3, 5)


def test_text_generations_best_of_and_stops(client: text_generation.Client) -> None:
    best = client.generate("hi", best_of=3, do_sample=True)
    others = best.details.best_of_sequences or []
    assert len(others) == 2
    assert all(type(each) is types.BestOfSequence for each in others)
    stopped = client.generate("hi", stop_sequences=["lo"])
    assert stopped.generated_text == "Hello"  # with the stop sequence, as the original
    assert stopped.details.finish_reason is types.FinishReason.StopSequence
    cut = client.generate("hi", max_new_tokens=1)
    assert cut.details.finish_reason is types.FinishReason.Length


def test_text_generations_errors(client: text_generation.Client, tgi: Local) -> None:
    with pytest.raises(errors.ValidationError, match=r"supports up to 4 stop sequences. Given: 5"):
        client.generate("hi", stop_sequences=["a"] * 5)
    with pytest.raises(errors.ValidationError, match=r"must be <= 512. Given: 513"):
        client.generate("hi", max_new_tokens=513)
    tgi.run(_full(tgi, 0))
    with pytest.raises(errors.OverloadedError):
        client.generate("hi")
    tgi.run(_full(tgi, 1024))


def test_text_generations_chat(client: text_generation.Client) -> None:
    whole = client.chat(USER, max_tokens=5)
    assert whole.choices[0].message.content == "Hello world"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_what_text_generations_chat_wants_of_a_stream(tgi: Local) -> None:
    """A role and `tool_calls` in every piece, and no [DONE]: docs/moving-from-tgi.md. What it wants besides,
    each piece has."""
    reply = tgi.post("/v1/chat/completions", {"model": "tgi", "messages": USER, "stream": True})
    *lines, done = [line for line in reply.body.decode().split("\n\n") if line]
    assert done == "data: [DONE]"
    said = ""
    for line in lines:
        piece = json.loads(line.removeprefix("data:"))
        with pytest.raises(pydantic.ValidationError) as fault:
            types.ChatCompletionChunk(**piece)
        missing = {error["loc"][-1] for error in fault.value.errors()}
        assert missing <= {"role", "tool_calls"}
        (choice,) = piece["choices"]
        choice["delta"] = {"role": "assistant", "tool_calls": None, **choice["delta"]}
        said += types.ChatCompletionChunk(**piece).choices[0].delta.content or ""
    assert said == "Hello world"


async def _full(server: Local, most: int) -> None:
    for loop in server.engine.loops.values():
        loop.most_waiting = most


def test_text_generations_async_client(tgi: Local) -> None:
    async def work() -> None:
        client = text_generation.AsyncClient(tgi.url)
        found = [each.token.text async for each in client.generate_stream("hi")]
        assert found[:2] == TEXTS

    asyncio.run(work())


def test_an_engine_that_fails() -> None:
    with serving(fail_after=1) as server:
        with pytest.raises(errors.GenerationError, match="the engine failed"):
            text_generation.Client(server.url).generate("hi")
        with huggingface_hub.InferenceClient(server.url) as client:
            stream = client.text_generation("hi", stream=True)
            with pytest.raises(hub_errors.GenerationError, match="the engine failed"):
                list(stream)


def test_a_client_that_leaves(tgi: Local) -> None:
    with huggingface_hub.InferenceClient(tgi.url) as client:
        next(iter(client.text_generation("hi", stream=True, max_new_tokens=500)))
    tgi.run(tgi.engine.idle())
