"""The openai package, unmodified, against /v1: shapes by its own models, errors by its own classes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from fastserve.codec.generation import Info
from fastserve.dialects.tfserving.spec import SPEC as TFSERVING
from fastserve.net.router import Router
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.likely import FIRST, Likely
from tests.dialects.text_common.rigs import HELLO
from tests.dialects.text_common.serving import Local
from tests.late import Late
from tests.text_rig import Scripted

openai, pydantic = Late("openai"), Late("pydantic")
USER: Any = [{"role": "user", "content": "hi"}]
SMALL = Info(vocab_size=1 << 20, tokenizer="words", max_prompt_tokens=8, max_tokens=16, max_new_tokens=6)


def models() -> dict[str, Any]:
    return {
        "m1": Likely(HELLO, eos={2}),
        "small": Scripted([(7, "x")], info=SMALL),
        "breaks": Scripted([(7, "x")], fail_after=2),
        "breaks-at-once": Scripted([(7, "x")], fail_after=0),
        "org/Llama-3:8b é": Scripted(HELLO, eos={2}),
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    with Local(models(), TextgenOptions(), beside=[TFSERVING]) as server:
        yield server


@pytest.fixture
def client(server: Local) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def strictly(kind: Any, found: Any) -> None:
    """Check a reply against the client's type, which the client does not do itself."""
    pydantic.TypeAdapter(kind).validate_python(found.model_dump(), strict=False)


def test_a_chat(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="m1", messages=USER)
    strictly(openai.types.chat.ChatCompletion, found)
    assert found.object == "chat.completion"
    assert found.id.startswith("chatcmpl-")
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert found.usage == openai.types.CompletionUsage(prompt_tokens=2, completion_tokens=3, total_tokens=5)


def test_an_answer_says_how_long_it_took(client: openai.OpenAI) -> None:
    began = monotonic()
    chat = client.chat.completions.with_raw_response.create(model="m1", messages=USER)
    completion = client.completions.with_raw_response.create(model="m1", prompt="hi")
    took_ms = (monotonic() - began) * 1000
    assert 0 <= sum(int(each.headers["openai-processing-ms"]) for each in (chat, completion)) <= took_ms


def test_a_chat_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="m1", messages=USER, stream=True))
    for chunk in chunks:
        strictly(openai.types.chat.ChatCompletionChunk, chunk)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    first, *rest = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert [each.delta.content for each in rest] == ["Hello", " world", None]
    assert [each.finish_reason for each in (first, *rest)] == [None, None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_for_those_who_ask(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="m1", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage == openai.types.CompletionUsage(prompt_tokens=2, completion_tokens=3, total_tokens=5)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_helper_that_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="m1", messages=USER) as stream:
        for _ in stream:
            pass
    message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", "Hello world")


def test_several_choices(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="m1", messages=USER, n=3)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (2, 9)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model="m1", messages=USER, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hello world"] * 3


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": "m1", "messages": USER, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    strictly(openai.types.chat.ChatCompletion, whole)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(each.token, each.logprob) for each in logprobs.content[:2]] == [
        ("Hello", FIRST),
        (" world", 2 * FIRST),
    ]
    assert bytes(logprobs.content[0].bytes or []) == b"Hello"
    assert [each.logprob for each in logprobs.content[0].top_logprobs] == [FIRST, FIRST - 1]
    told = []
    for chunk in client.chat.completions.create(stream=True, **asked):
        if chunk.choices[0].logprobs is not None:
            told += chunk.choices[0].logprobs.content or []
    assert told == logprobs.content


def test_a_completion_and_its_forms_of_prompts(client: openai.OpenAI) -> None:
    found = client.completions.create(model="m1", prompt="a b c")
    strictly(openai.types.Completion, found)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("Hello world", "stop")
    assert found.usage == openai.types.CompletionUsage(prompt_tokens=3, completion_tokens=3, total_tokens=6)
    many = client.completions.create(model="m1", prompt=["a", "b c"], n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.usage == openai.types.CompletionUsage(prompt_tokens=3, completion_tokens=12, total_tokens=15)
    assert client.completions.create(model="m1", prompt=[5, 6, 7]).usage.prompt_tokens == 3  # type: ignore[union-attr]
    assert client.completions.create(model="m1", prompt=[[5], [6, 7]]).usage.prompt_tokens == 3  # type: ignore[union-attr]


def test_a_completion_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="m1", prompt="a", stream=True, echo=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["a", "Hello", " world", ""]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_of_a_completion_and_of_its_prompt(client: openai.OpenAI) -> None:
    found = client.completions.create(model="m1", prompt="a b", logprobs=1, echo=True).choices[0]
    assert found.text == "a bHello world"
    assert found.logprobs is not None
    assert found.logprobs.token_logprobs == [None, -1.0, FIRST, 2 * FIRST, 3 * FIRST]  # type: ignore[comparison-overlap]
    assert found.logprobs.tokens[2:4] == ["Hello", " world"]  # type: ignore[index]
    assert found.logprobs.text_offset[3:] == [5, 11]  # type: ignore[index]
    assert [len(each or ()) for each in found.logprobs.top_logprobs or ()] == [0, 0, 1, 1, 1]


def prompt_tokens_of(said: Any, likeliest: int) -> None:
    """Check vLLM's prompt_logprobs of a prompt of three tokens, as `Likely` says them."""
    assert said[0] is None
    assert len(said) == 3
    for place, found in enumerate(said[1:], 1):
        ranks = [one["rank"] for one in found.values()]
        assert ranks == [7, *range(1, likeliest + 1)]
        assert [one["logprob"] for one in found.values()] == [-place, *(-0.5 * i for i in range(likeliest))]
        assert all(name.isdigit() and one["decoded_token"] for name, one in found.items())


def test_logprobs_of_a_prompt_in_vllms_form(client: openai.OpenAI, server: Local) -> None:
    engine: Any = server.models["m1"]
    before = len(engine.seen)
    found = client.completions.create(
        model="m1", prompt=["a b c", "d"], n=2, best_of=3, extra_body={"prompt_logprobs": 2}
    )
    for choice in found.choices[:2]:
        prompt_tokens_of(choice.model_extra["prompt_logprobs"], 2)
    assert [choice.model_extra["prompt_logprobs"] for choice in found.choices[2:]] == [[None], [None]]
    ranked = [one.note.sampling.prompt_best for one in engine.seen[before:]]
    assert ranked == [2, -1, -1, 2, -1, -1]  # a prompt is ranked once
    chat = client.chat.completions.create(
        model="m1", messages=[{"role": "user", "content": "a b"}], extra_body={"prompt_logprobs": 0}
    )
    assert chat.model_extra["prompt_logprobs"][0] is None
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="gives no log probabilities of its prompts"):
        client.completions.create(model="small", prompt="a", extra_body={"prompt_logprobs": 1})
    echoed = client.completions.create(
        model="m1", prompt="a b c", n=2, echo=True, logprobs=1, extra_body={"prompt_logprobs": 1}
    )
    for choice in echoed.choices:
        prompt_tokens_of(choice.model_extra["prompt_logprobs"], 1)
        assert choice.logprobs.token_logprobs[:3] == [None, -1.0, -2.0]


def test_the_likeliest_of_several(client: openai.OpenAI) -> None:
    found = client.completions.create(model="m1", prompt="a", n=1, best_of=3)
    assert len(found.choices) == 1
    assert found.choices[0].logprobs is None
    assert found.usage is not None
    assert found.usage.completion_tokens == 9


def test_what_ends_an_answer(client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(model="m1", messages=USER, max_completion_tokens=1)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("Hello", "length")
    stopped = client.chat.completions.create(model="m1", messages=USER, stop=["lo w"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("Hel", "stop")
    more: Any = {"include_stop_str_in_output": True}
    kept = client.chat.completions.create(model="m1", messages=USER, stop="lo w", extra_body=more)
    assert kept.choices[0].message.content == "Hello w"
    by_token = client.completions.create(model="m1", prompt="a", extra_body={"stop_token_ids": [101]})
    assert (by_token.choices[0].text, by_token.choices[0].finish_reason) == ("Hello world", "stop")
    on = client.completions.create(model="m1", prompt="a", max_tokens=5, extra_body={"ignore_eos": True})
    assert on.choices[0].finish_reason == "length"


def test_settings_reach_the_engine(client: openai.OpenAI, server: Local) -> None:
    client.chat.completions.create(
        model="m1", messages=USER, temperature=0.5, top_p=0.9, presence_penalty=0.5, frequency_penalty=-0.5,
        seed=-1, max_tokens=2, user="somebody",
        logit_bias={"5": -100, "7": 0.5},
        extra_body={"top_k": 7, "min_p": 0.25, "min_tokens": 2, "repetition_penalty": 1.5, "priority": 1,
                    "timeout": 5},
    )  # fmt: skip
    engine: Any = server.models["m1"]
    note = engine.seen[-1].note
    assert (note.sampling.temperature, note.sampling.top_p, note.sampling.top_k) == (0.5, 0.9, 7)
    assert (note.sampling.presence_penalty, note.sampling.frequency_penalty) == (0.5, -0.5)
    assert (note.sampling.min_p, note.sampling.min_new_tokens) == (0.25, 2)
    assert note.sampling.logit_bias == {5: -100, 7: 0.5}
    assert (note.sampling.repetition_penalty, note.sampling.seed) == (1.5, 2**64 - 1)
    assert (note.sampling.do_sample, note.sampling.max_new_tokens, note.priority) == (True, 2, 1)
    assert note.deadline_ns > 0
    client.chat.completions.create(model="m1", messages=USER, temperature=0)
    assert engine.seen[-1].note.sampling.do_sample is False


def test_models(client: openai.OpenAI) -> None:
    found = {model.id: model for model in client.models.list()}
    assert set(found) == set(models())
    for model in found.values():
        strictly(openai.types.Model, model)
        assert client.models.retrieve(model.id).created == model.created > 0
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    name = "org/Llama-3:8b é"
    assert client.chat.completions.create(model=name, messages=USER).model == name


def test_the_status_of_a_model_serves_both_clients(server: Local) -> None:
    told = server.ask("GET", "/v1/models/m1").json
    assert told["model_version_status"][0]["state"] == "AVAILABLE"
    assert (told["id"], told["object"], told["owned_by"]) == ("m1", "model", "fastserve")
    assert server.ask("GET", "/v1/models/m1/versions/1").json["id"] == "m1"
    assert server.post("/v1/models/m1:predict", {"instances": []}).status != 404  # the other's all the same


@pytest.mark.parametrize("order", [1, -1])
def test_who_answers_under_v1_in_any_order_of_the_two(server: Local, order: int) -> None:
    context = server.engine.context
    texts, tensors = server.dialect, TFSERVING.build(context, TFSERVING.options())
    router = Router([texts, tensors][::order])
    for method, target, owner in (
        ("GET", "/v1/models", texts),
        ("GET", "/v1/models/m1", tensors),
        ("POST", "/v1/models/m1:predict", tensors),
        ("POST", "/v1/chat/completions", texts),
        ("POST", "/v1/nothing", texts),  # 404; the other takes it for a malformed request of its own
    ):
        found = router.choose(method, target)
        assert found is not None
        assert found[0] is owner, target
    assert Router([texts]).choose("GET", "/v1/models/m1") is not None


def test_errors_become_the_clients_classes(client: openai.OpenAI) -> None:
    def chat(**more: Any) -> Any:
        return client.chat.completions.create(**{"model": "m1", "messages": USER, **more})

    with pytest.raises(openai.BadRequestError) as bad:
        chat(temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(model="nobody")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="small", prompt="a b c d e f g h i")
    assert long.value.code == "context_length_exceeded"
    assert ("9 tokens" in long.value.message, long.value.param) == (True, "prompt")
    with pytest.raises(openai.BadRequestError) as long:
        chat(model="small", messages=[{"role": "user", "content": "a b c d e f g h i"}])
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.InternalServerError):
        chat(model="breaks-at-once", stream=True)
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(tools=[{"type": "function", "function": {"name": "f"}}])


def test_there_are_no_embeddings(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="model 'm1' makes no embeddings") as none:
        client.embeddings.create(model="m1", input=["a", "b"])
    assert none.value.code == "not_supported"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody", input="a")
    with pytest.raises(openai.BadRequestError, match="input"):
        client.embeddings.create(model="m1", input=[])


def test_an_engine_that_fails_midway_raises(client: openai.OpenAI, server: Local) -> None:
    stream = client.completions.create(model="breaks", prompt="a", stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="the engine failed"):
        texts += [chunk.choices[0].text for chunk in stream]
    raw = server.post("/v1/completions", {"model": "breaks", "prompt": "a", "stream": True})
    *before, error, _ = raw.body.split(b"\n\n")
    assert raw.status == 200
    assert len(before) == 2
    assert b'"error":{"message":"the engine failed"' in error
    assert b"[DONE]" not in raw.body
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="breaks", prompt="a")


@pytest.mark.logs_errors
def test_what_nobody_foresaw_has_each_apis_form(server: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve.serving.text.models.TextModel.start_many", lambda *_: 1 / 0)
    asked = {"model": "m1", "prompt": "a"}
    for stream in (False, True):
        reply = server.post("/v1/completions", {**asked, "stream": stream})
        assert (reply.status, reply.json["error"]["message"]) == (500, "Internal error")
        assert server.post("/generate", {**asked, "stream": stream}).json["error"] == "Internal error"


def test_a_client_that_leaves_is_not_answered_on(server: Local) -> None:
    """The engine of this server says `x` for ever; it has ended when the server has none left."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        more: Any = {"max_tokens": 1 << 30, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(model="m1", prompt="a", stream=True, n=2, temperature=1, **more)
        next(iter(stream))
        stream.close()
    server.run(server.engine.idle())


def test_the_async_client(server: Local) -> None:
    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model="m1", messages=USER, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            assert set(await asyncio.gather(*(one() for _ in range(16)))) == {"Hello world"}
            whole = await client.chat.completions.create(model="m1", messages=USER)
            assert whole.choices[0].message.content == "Hello world"

    asyncio.run(work())


def test_mindies_flat_errors() -> None:
    with (
        Local({"m1": Scripted(HELLO, eos={2})}, TextgenOptions(openai_flavor="mindie")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            client.chat.completions.create(model="m1", messages=USER, temperature=3)
        assert refused.value.body == "`temperature` must be at most 2.0, got 3.0"
        reply = server.post("/v1/chat/completions", {"model": "nobody", "messages": USER})
        assert reply.status == 404
        assert list(reply.json) == ["error", "error_type"]
