"""What a body of OpenAI's API asks for (spec 3.6 and 8): what fits together, and what it comes to.

    wanted = read_completion(body, most_stops=4)
    wanted.prompts, wanted.sampling, wanted.choices ...

Nothing here knows a model: names, lengths and templates come after.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from msgspec import UNSET

from fastserve.codec.text import Sampling
from fastserve.dialects.textgen.openai_schema import (
    MOST_INT,
    ChatRequest,
    Common,
    CompletionRequest,
    EmbeddingRequest,
    Message,
    Part,
    Unheeded,
)
from fastserve.dialects.textgen.typed import Misread, check, is_nothing, read_typed

DEFAULT_MAX_TOKENS = 16
"""Of a completion; a chat may take what the model has."""
MOST_TEMPERATURE = 2.0
MOST_SEQUENCES = 256
"""That one request may start."""
MOST_INPUTS = 2048
"""Texts of one request for vectors, OpenAI's own bound."""
MOST_STOP_IDS = 1024
GIVEN = {"self", "messages", "tools", "documents"}

_read_chat = msgspec.json.Decoder(ChatRequest)
_read_completion = msgspec.json.Decoder(CompletionRequest)
_read_embedding = msgspec.json.Decoder(EmbeddingRequest)
UNHEEDED = tuple(each.name for each in msgspec.structs.fields(Unheeded))
_CHAT_UNHEEDED = (
    *UNHEEDED,
    *("functions", "audio", "web_search_options", "chat_template", "continue_final_message", "documents"),
)

Prompt = str | list[int]


@dataclass(slots=True, kw_only=True)
class Wanted:
    """One request of either API."""

    body: Common
    sampling: Sampling
    choices: int = 1
    candidates: int = 1
    """Sequences of which the best `choices` are told (best_of)."""
    stop: list[str] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    """Of a completion."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Of a chat."""
    template: dict[str, Any] = field(default_factory=dict)
    images: list[tuple[str, str]] = field(default_factory=list)
    """Where in the body they stand, and what names them."""
    logprobs: int = -1
    echo: bool = False
    names_model: bool = True
    """Whether the API wants the model to be named."""

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with how many tokens there were."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)


def read_chat(data: bytes | bytearray, most_stops: int) -> Wanted:
    """POST /v1/chat/completions. Raises Misread."""
    body = read_typed(_read_chat, data)
    refuse_unheeded(body, _CHAT_UNHEEDED)
    check(
        is_nothing(body.tools) or body.tool_choice == "none", "tools", "are not supported: answers are text"
    )
    _check_temperature(body)
    _check_modalities(body)
    logprobs = _chat_logprobs(body)
    images: list[tuple[str, str]] = []
    messages = [_read_message(message, f"messages[{i}]", images) for i, message in enumerate(body.messages)]
    most = body.max_completion_tokens or body.max_tokens or MOST_INT
    return Wanted(
        body=body,
        sampling=read_sampling(body, most, logprobs),
        choices=body.n or 1,
        candidates=check_choices(body, body.n or 1),
        stop=read_stop(body, most_stops),
        messages=messages,
        template=_read_template(body),
        images=images,
        logprobs=logprobs,
    )


def read_completion(data: bytes | bytearray, most_stops: int) -> Wanted:
    """POST /v1/completions. Raises Misread."""
    body = read_typed(_read_completion, data)
    refuse_unheeded(body, (*UNHEEDED, "suffix"))
    _check_temperature(body)
    prompts = read_prompts(body.prompt, "prompt")
    logprobs = -1 if body.logprobs is None else body.logprobs
    candidates = check_choices(body, body.best_of)
    most = len(prompts) * candidates
    check(
        most <= MOST_SEQUENCES, "prompt", f"would start {most} sequences, allowed: at most {MOST_SEQUENCES}"
    )
    return Wanted(
        body=body,
        sampling=read_sampling(
            body, body.max_tokens or DEFAULT_MAX_TOKENS, logprobs, scores=bool(body.echo) and logprobs >= 0
        ),
        choices=body.n or 1,
        candidates=candidates,
        stop=read_stop(body, most_stops),
        prompts=prompts,
        logprobs=logprobs,
        echo=bool(body.echo),
    )


def read_embedding(data: bytes | bytearray) -> tuple[EmbeddingRequest, list[Prompt]]:
    """POST /v1/embeddings. Raises Misread."""
    body = read_typed(_read_embedding, data)
    prompts = read_prompts(body.input, "input", MOST_INPUTS)
    for place, prompt in enumerate(prompts):
        check(
            bool(prompt), "input" if isinstance(body.input, str) else f"input[{place}]", "must not be empty"
        )
    return body, prompts


def read_prompts(given: str | list[Any], key: str, most: int = MOST_SEQUENCES) -> list[Prompt]:
    """A text, its tokens, or several of either. Raises Misread."""
    if isinstance(given, str):
        given = [given]
    check(bool(given), key, "must not be empty")
    if isinstance(given[0], int):
        return [_read_tokens(given, key)]
    check(len(given) <= most, key, f"has {len(given)} items, allowed: at most {most}")
    return [_read_prompt(item, f"{key}[{i}]") for i, item in enumerate(given)]


def _read_prompt(item: object, place: str) -> Prompt:
    if isinstance(item, str):
        return item
    check(isinstance(item, list), place, "must be a string or a list of tokens")
    return _read_tokens(cast("list[object]", item), place)


def _read_tokens(items: list[object], place: str) -> list[int]:
    check(bool(items), place, "must not be empty")
    for i, token in enumerate(items):
        if not (type(token) is int and 0 <= token <= MOST_INT):  # prompts are long: no call for each
            check(False, f"{place}[{i}]", f"must be a token, an integer from 0 to {MOST_INT}")
    return cast("list[int]", items)


def refuse_unheeded(body: Common, keys: tuple[str, ...]) -> None:
    """What would have a bearing on the answer, and cannot. Raises Misread."""
    for key in keys:
        given = getattr(body, key)
        if given is not UNSET:
            check(is_nothing(given), key, "is not supported")
    kind = body.response_format.type if body.response_format is not None else "text"
    check(kind == "text", "response_format", f"of type '{kind:.64}' is not supported: answers are text")


def _check_temperature(body: Common) -> None:
    """OpenAI's own bound; vLLM has none."""
    hot = body.temperature or 0.0
    check(hot <= MOST_TEMPERATURE, "temperature", f"must be at most {MOST_TEMPERATURE}, got {hot}")


def _read_template(body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template; what it is given anyway is not to be replaced."""
    given = body.chat_template_kwargs or {}
    for key in sorted(GIVEN & given.keys()):
        check(False, f"chat_template_kwargs.{key}", "cannot be set")
    key = "add_generation_prompt"
    check(isinstance(given.get(key, True), bool), f"chat_template_kwargs.{key}", "must be a boolean")
    return given


def _check_modalities(body: ChatRequest) -> None:
    others = [each for each in body.modalities or () if each != "text"]
    if others:
        raise Misread(f"`modalities`: '{others[0]:.64}' is not supported: answers are text", "modalities")


def _chat_logprobs(body: ChatRequest) -> int:
    if not body.logprobs:
        check(not body.top_logprobs, "top_logprobs", "wants `logprobs` to be true")
        return -1
    return body.top_logprobs or 0


def check_choices(body: Common, best_of: int | None) -> int:
    """How many sequences are run for one prompt (spec 3.6)."""
    choices = body.n or 1
    candidates = choices if best_of is None else best_of
    if body.stream:
        check(candidates == choices, "best_of", f"must be `n` ({choices}) in a stream, got {candidates}")
    check(candidates >= choices, "best_of", f"must be at least `n` ({choices}), got {candidates}")
    greedy = body.temperature == 0
    check(not greedy or choices == 1, "n", f"must be 1 when `temperature` is 0, got {choices}")
    check(not greedy or candidates == 1, "best_of", f"must be 1 when `temperature` is 0, got {candidates}")
    check(body.stream_options is None or bool(body.stream), "stream_options", "wants `stream` to be true")
    return candidates


def read_stop(body: Common, most: int) -> list[str]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check(len(stop) <= most, "stop", f"has {len(stop)} strings, allowed: at most {most}")
    return stop


def read_sampling(body: Common, max_tokens: int, logprobs: int, *, scores: bool = False) -> Sampling:
    """0 of `temperature` or `top_p` is the most likely token; -1 or 0 of `top_k`, all."""
    stop_ids = body.stop_token_ids or []
    check(
        len(stop_ids) <= MOST_STOP_IDS,
        "stop_token_ids",
        f"has {len(stop_ids)} items, allowed: at most {MOST_STOP_IDS}",
    )
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    return Sampling(
        max_new_tokens=max_tokens,
        do_sample=temperature > 0 and top_p > 0,
        temperature=temperature or 1.0,
        top_p=top_p or 1.0,
        top_k=max(0, body.top_k or 0),
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        stop_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=scores,
    )


def _read_message(message: Message, place: str, images: list[tuple[str, str]]) -> dict[str, Any]:
    """A message as templates know it: its content is a text."""
    content = message.content
    if isinstance(content, list):
        content = _read_parts(content, f"{place}.content", images)
    if content is None:
        good = message.role == "assistant" and bool(message.tool_calls)
        check(good, f"{place}.content", "is required")
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_calls:
        found["tool_calls"] = message.tool_calls
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _read_parts(parts: list[Part], place: str, images: list[tuple[str, str]]) -> str:
    """The texts of a content, a line each; its images are put into `images`."""
    texts = []
    for i, part in enumerate(parts):
        if part.type == "text":
            if part.text is None:
                raise Misread(f"`{place}[{i}].text` is required", f"{place}[{i}].text")
            texts.append(part.text)
        elif part.type == "image_url":
            images.append(_read_image(part, f"{place}[{i}].image_url"))
        else:
            check(False, f"{place}[{i}].type", f"'{part.type:.64}' is not supported")
    return "\n".join(texts)


def _read_image(part: Part, place: str) -> tuple[str, str]:
    """{"url": ...}, or the URL by itself."""
    given = None if part.image_url is UNSET else msgspec.json.decode(part.image_url)
    url = given.get("url") if isinstance(given, dict) else given
    check(isinstance(url, str), place, "must be a string, or an object with the string `url`")
    return place, cast(str, url)
