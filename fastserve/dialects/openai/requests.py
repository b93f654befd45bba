"""Bodies of OpenAI's API (spec 3.6 and 8): keys, types and bounds, and the task they describe.

    task = read_completion(body, most_stops=4)
    task.prompts, task.sampling, task.choices ...

Every key of OpenAI's and vLLM's requests is one of three: a field with a type, which is used; a field of
type `Refused`, which would change the answer and is refused by name unless it asks for nothing (NEUTRAL
lists such values besides null, false, 0 and empty); or in IGNORED, which changes nothing.
docs/dialects/textgen.md has the table. `find_model` gives the model that a request names; lengths and
templates are checked later, by the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from fastserve.codec.generation import Sampling
from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.openai.tools import (
    CHAT_PLACES,
    FUNCTION_PLACES,
    CalledFunction,
    ToolPlaces,
    ToolUse,
    name_older_results,
    name_results,
    read_past_calls,
    read_tools,
    write_functions,
    write_past_call,
)
from fastserve.dialects.text_common.endpoint_parts import (
    BOUNDS,
    MOST_FLOAT,
    InvalidBody,
    TextService,
    check,
    is_neutral,
    read_typed,
)
from fastserve.dialects.text_common.structured import GrammarFields, read_grammar
from fastserve.errors import Kind, ServeError
from fastserve.serving.text import TextModel
from fastserve.serving.text.models import MOST_BIASES
from fastserve.settings import TextgenOptions

NO_NAME = {"openai": "`model` is required", "mindie": "Not found model."}
MOST_CHOICES = 128
MOST_INT = 2**31 - 1
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=MOST_INT)]], Meta(max_length=1 << 20)]
Text = Annotated[str, Meta(min_length=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=MOST_INT)]
Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
Biases = Annotated[
    dict[Annotated[int, Meta(ge=0, le=MOST_INT)], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MOST_BIASES),
]
PromptLogprobs = Annotated[int, Meta(ge=0, le=20)]
Refused = Raw | UnsetType
ToolKey = Annotated[Raw | UnsetType, Meta(description="read by `tools.read_tools`")]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class UnsupportedFields(GrammarFields, kw_only=True):
    """Keys that change the answer and are not supported."""

    use_beam_search: Refused = UNSET
    allowed_token_ids: Refused = UNSET
    bad_words: Refused = UNSET
    logits_processors: Refused = UNSET
    truncate_prompt_tokens: Refused = UNSET
    logprob_token_ids: Refused = UNSET
    return_token_ids: Refused = UNSET
    return_tokens_as_token_ids: Refused = UNSET
    detokenize: Refused = UNSET
    spaces_between_special_tokens: Refused = UNSET
    prompt_embeds: Refused = UNSET
    do_sample: Refused = UNSET
    typical_p: Refused = UNSET
    max_new_tokens: Refused = UNSET
    repetition_detection: Refused = UNSET
    tools: Refused = UNSET
    functions: Refused = UNSET
    tool_choice: Refused = UNSET
    function_call: Refused = UNSET


class CompletionFields(UnsupportedFields, kw_only=True):
    """Keys that both APIs share: OpenAI's, then vLLM's and MindIE's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=MOST_FLOAT)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    n: Choices | None = None
    stop: Text | list[Text] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    user: str | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MOST_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MOST_INT)] | None = None
    logit_bias: Biases | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=MOST_FLOAT)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=1, le=5)] | None = None
    timeout: Annotated[int, Meta(ge=1, le=65535)] | None = None
    add_special_tokens: bool | None = None


class ImageUrl(msgspec.Struct):
    """`detail`, which OpenAI has beside it, is a hint."""

    url: Any = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; `_read_parts` checks its type."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    """A call in OpenAI's older form."""


class ChatRequest(CompletionFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    modalities: list[str] | None = None
    tools: ToolKey = UNSET
    tool_choice: ToolKey = UNSET
    functions: ToolKey = UNSET
    function_call: ToolKey = UNSET
    parallel_tool_calls: bool | None = None
    audio: Refused = UNSET
    web_search_options: Refused = UNSET
    chat_template: Refused = UNSET
    continue_final_message: Refused = UNSET
    documents: Refused = UNSET
    echo: Refused = UNSET
    best_of: Refused = UNSET
    moderation: Refused = UNSET
    verbosity: Refused = UNSET
    thinking_token_budget: Refused = UNSET
    include_reasoning: Refused = UNSET
    mm_processor_kwargs: Refused = UNSET
    media_io_kwargs: Refused = UNSET
    add_generation_prompt: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(CompletionFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    """A text, its tokens, or several of either."""
    best_of: Choices | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    model: str | None = None
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=1, le=5)] | None = None
    timeout: Annotated[int, Meta(ge=1, le=65535)] | None = None
    truncate_prompt_tokens: Refused = UNSET
    add_special_tokens: Refused = UNSET
    embed_dtype: Refused = UNSET
    normalize: Refused = UNSET


NEUTRAL: dict[str, tuple[bytes, ...]] = {
    "detokenize": (b"true",),
    "spaces_between_special_tokens": (b"true",),
    "do_sample": (b"true",),
    "include_reasoning": (b"true",),
    "typical_p": (b"1", b"1.0"),
    "best_of": (b"1",),
    "tool_choice": (b'"none"', b'"auto"'),
    "function_call": (b'"none"', b'"auto"'),
    "verbosity": (b'"medium"',),
    "add_special_tokens": (b"true",),
    "normalize": (b"true",),
    "embed_dtype": (b'"float32"',),
}
"""Values of a refused key that equal its default, besides null, false, 0, "" and empty. Where that is true,
false has an effect."""
IGNORED = (
    "user",
    "safety_identifier",
    "store",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "prediction",
    "length_penalty",
    "early_stopping",
    "cache_salt",
    "max_tool_calls",
    "request_id",
    "kv_transfer_params",
    "access_programs",
    "cache_control",
    "diagnostics",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
)
"""Keys that do not change an answer here: identity of the client, storage, caching, place and price of the
computation, hints, options of beam search, and a bound on calls of tools that the server runs."""


def refused_keys(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the keys of a body that are refused by name."""
    taken = {each.name for each in msgspec.structs.fields(GrammarFields)}
    return tuple(
        each.name for each in msgspec.structs.fields(kind) if each.type == Refused and each.name not in taken
    )


DEFAULT_MAX_TOKENS = 16
"""Default of a completion; a chat may use all that the model has."""
MOST_TEMPERATURE = 2.0
MOST_SEQUENCES = 256
"""Sequences that one request may start."""
MOST_INPUTS = 2048
"""Texts of one request for vectors, OpenAI's own bound."""
MOST_STOP_IDS = 1024
GIVEN = {"self", "messages", "tools", "documents"}
_chat: FreeJSON[ChatRequest] = FreeJSON(ChatRequest, BOUNDS)
_completion: FreeJSON[CompletionRequest] = FreeJSON(CompletionRequest, BOUNDS)
_embedding: FreeJSON[EmbeddingRequest] = FreeJSON(EmbeddingRequest, BOUNDS)
Prompt = str | list[int]


@dataclass(slots=True, kw_only=True)
class CompletionTask:
    """One request of either API, as read."""

    body: CompletionFields
    sampling: Sampling
    choices: int = 1
    candidates: int = 1
    """Sequences of which the best `choices` are returned (best_of)."""
    stop: list[str] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    """The prompts of a completion."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The messages of a chat."""
    template: dict[str, Any] = field(default_factory=dict)
    images: list[tuple[str, str]] = field(default_factory=list)
    """The place of each image in the body, and its reference."""
    tools: ToolUse | None = None
    older: bool = False
    """Whether calls are written as OpenAI did before tools."""
    logprobs: int = -1
    echo: bool = False
    suffix: str = ""
    """Text behind the answers, where the model is to fill in."""
    names_model: bool = True
    """Whether the API requires `model`."""
    source: str = "messages"
    """The key of the body that has the conversation."""
    asked: Any = None
    """The body, for an API whose answer repeats it."""

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def adds_special(self) -> bool:
        """Whether the tokenizer adds special tokens around the prompt: a chat template writes its own."""
        given = self.body.add_special_tokens
        return not self.messages if given is None else given

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)


def read_chat(data: bytes | bytearray, most_stops: int) -> CompletionTask:
    """POST /v1/chat/completions. Raises InvalidBody."""
    body = read_typed(_chat, data)
    images: list[tuple[str, str]] = []
    messages = [_read_message(message, i, images) for i, message in enumerate(body.messages)]
    name_older_results(messages)
    name_results(messages)
    return make_chat_task(body, most_stops, messages, images)


def make_chat_task(
    body: ChatRequest,
    most_stops: int,
    messages: list[dict[str, Any]],
    images: list[tuple[str, str]],
    *,
    source: str = "messages",
    asked: Any = None,
    places: ToolPlaces = CHAT_PLACES,
) -> CompletionTask:
    """Return the task of a conversation, whose messages are those of templates. Raises InvalidBody."""
    refuse_unsupported(body)
    _check_temperature(body)
    _check_modalities(body)
    logprobs = _chat_logprobs(body)
    most = body.max_completion_tokens or body.max_tokens or MOST_INT
    older = _is_older(body)
    return CompletionTask(
        body=body,
        sampling=read_sampling(body, most, logprobs, ranks=_read_ranks(body, body.prompt_logprobs)),
        choices=body.n or 1,
        candidates=check_choices(body, body.n or 1),
        stop=read_stop(body, most_stops),
        messages=messages,
        template=_read_template(body),
        images=images,
        logprobs=logprobs,
        source=source,
        asked=asked,
        tools=_read_functions(body) if older else _read_tools(body, places),
        older=older,
    )


def _is_older(body: ChatRequest) -> bool:
    """Return whether a request has functions in the form that OpenAI had before tools. Raises InvalidBody."""
    older = not is_neutral(body.functions)
    check(not older or is_neutral(body.tools), "functions", "cannot be combined with `tools`")
    neutral = is_neutral(body.function_call, NEUTRAL["function_call"])
    check(older or neutral, "function_call", "wants `functions`")
    return older


def _read_functions(body: ChatRequest) -> ToolUse | None:
    tools = UNSET if isinstance(body.functions, UnsetType) else write_functions(body.functions)
    return read_tools(tools, body.function_call, parallel=False, places=FUNCTION_PLACES)


def _read_tools(body: ChatRequest, places: ToolPlaces) -> ToolUse | None:
    parallel = body.parallel_tool_calls is not False
    return read_tools(body.tools, body.tool_choice, parallel=parallel, places=places)


def read_completion(data: bytes | bytearray, most_stops: int) -> CompletionTask:
    """POST /v1/completions. Raises InvalidBody."""
    body = read_typed(_completion, data)
    refuse_unsupported(body)
    _check_temperature(body)
    prompts = read_prompts(body.prompt, "prompt")
    logprobs = -1 if body.logprobs is None else body.logprobs
    candidates = check_choices(body, body.best_of)
    most = len(prompts) * candidates
    check(
        most <= MOST_SEQUENCES, "prompt", f"would start {most} sequences, allowed: at most {MOST_SEQUENCES}"
    )
    return CompletionTask(
        body=body,
        sampling=read_sampling(
            body,
            body.max_tokens or DEFAULT_MAX_TOKENS,
            logprobs,
            scores=bool(body.echo) and logprobs >= 0,
            ranks=_read_ranks(body, body.prompt_logprobs),
        ),
        choices=body.n or 1,
        candidates=candidates,
        stop=read_stop(body, most_stops),
        prompts=prompts,
        logprobs=logprobs,
        echo=bool(body.echo),
        suffix=_read_suffix(body, prompts),
    )


def _read_suffix(body: CompletionRequest, prompts: list[Prompt]) -> str:
    if not body.suffix:
        return ""
    check(
        all(isinstance(prompt, str) for prompt in prompts), "suffix", "wants a `prompt` of text, not tokens"
    )
    check(not body.echo, "suffix", "cannot be combined with `echo`")
    return body.suffix


def read_embedding(data: bytes | bytearray) -> tuple[EmbeddingRequest, list[Prompt]]:
    """POST /v1/embeddings. Raises InvalidBody."""
    body = read_typed(_embedding, data)
    refuse_unsupported(body)
    prompts = read_prompts(body.input, "input", MOST_INPUTS)
    for place, prompt in enumerate(prompts):
        check(
            bool(prompt), "input" if isinstance(body.input, str) else f"input[{place}]", "must not be empty"
        )
    return body, prompts


def read_prompts(given: str | list[Any], key: str, most: int = MOST_SEQUENCES) -> list[Prompt]:
    """A text, its tokens, or several of either. Raises InvalidBody."""
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


@cache
def _unsupported(kind: type[msgspec.Struct]) -> tuple[tuple[str, tuple[bytes, ...]], ...]:
    return tuple((key, NEUTRAL.get(key, ())) for key in refused_keys(kind))


def refuse_unsupported(body: CompletionFields | EmbeddingRequest) -> None:
    """Refuse keys that would change the answer and are not supported. Raises InvalidBody."""
    for key, neutral in _unsupported(type(body)):
        given = getattr(body, key)
        if given is not UNSET:
            check(is_neutral(given, neutral), key, "is not supported")


def _check_temperature(body: CompletionFields) -> None:
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
    said = {key: body.add_generation_prompt, "reasoning_effort": body.reasoning_effort}
    return {**{name: value for name, value in said.items() if value is not None}, **given}


def _check_modalities(body: ChatRequest) -> None:
    others = [each for each in body.modalities or () if each != "text"]
    if others:
        raise InvalidBody(f"`modalities`: '{others[0]:.64}' is not supported: answers are text", "modalities")


def _chat_logprobs(body: ChatRequest) -> int:
    if not body.logprobs:
        check(not body.top_logprobs, "top_logprobs", "wants `logprobs` to be true")
        return -1
    return body.top_logprobs or 0


def _read_ranks(body: CompletionFields, prompt_logprobs: int | None) -> int:
    if prompt_logprobs is None:
        return -1
    check(not body.stream, "prompt_logprobs", "cannot be had in a stream")
    return prompt_logprobs


def check_choices(body: CompletionFields, best_of: int | None) -> int:
    """Return the number of sequences to run for one prompt (spec 3.6)."""
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


def read_stop(body: CompletionFields, most: int) -> list[str]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check(len(stop) <= most, "stop", f"has {len(stop)} strings, allowed: at most {most}")
    return stop


def read_sampling(
    body: CompletionFields, max_tokens: int, logprobs: int, *, scores: bool = False, ranks: int = -1
) -> Sampling:
    """0 of `temperature` or `top_p` is the most likely token; -1 or 0 of `top_k`, all."""
    stop_ids = body.stop_token_ids or []
    check(
        len(stop_ids) <= MOST_STOP_IDS,
        "stop_token_ids",
        f"has {len(stop_ids)} items, allowed: at most {MOST_STOP_IDS}",
    )
    least = body.min_tokens or 0
    check(least <= max_tokens, "min_tokens", f"must be at most `max_tokens` ({max_tokens}), got {least}")
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    return Sampling(
        max_new_tokens=max_tokens,
        do_sample=temperature > 0 and top_p > 0,
        temperature=temperature or 1.0,
        top_p=top_p or 1.0,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        min_new_tokens=least,
        logit_bias=body.logit_bias or {},
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        stop_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        grammar=read_grammar(body),
        logprobs=logprobs,
        prompt_logprobs=scores or ranks >= 0,
        prompt_best=ranks,
    )


def _read_message(message: ChatMessage, number: int, images: list[tuple[str, str]]) -> dict[str, Any]:
    """A message as templates know it: its content is a text."""
    place = f"messages[{number}]"
    content = message.content
    if isinstance(content, list):
        content = _read_parts(content, f"{place}.content", images)
    if content is None:
        good = message.role == "assistant" and bool(message.tool_calls or message.function_call)
        check(good, f"{place}.content", "is required")
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_calls:
        found["tool_calls"] = read_past_calls(message.tool_calls, f"{place}.tool_calls")
    elif message.function_call is not None:
        id = f"call{number:05}"  # 9 letters and digits, as templates of Mistral insist
        found["tool_calls"] = [write_past_call(id, message.function_call, f"{place}.function_call")]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _read_parts(parts: list[ContentPart], place: str, images: list[tuple[str, str]]) -> str:
    """The texts of a content, a line each; its images are put into `images`."""
    texts = []
    for i, part in enumerate(parts):
        if part.type == "text":
            if part.text is None:
                raise InvalidBody(f"`{place}[{i}].text` is required", f"{place}[{i}].text")
            texts.append(part.text)
        elif part.type == "image_url":
            images.append(_read_image(part, f"{place}[{i}].image_url"))
        else:
            check(False, f"{place}[{i}].type", f"'{part.type:.64}' is not supported")
    return "\n".join(texts)


def _read_image(part: ContentPart, place: str) -> tuple[str, str]:
    """{"url": ...}, or the URL by itself."""
    given = part.image_url
    url = given.url if isinstance(given, ImageUrl) else given
    check(isinstance(url, str), place, "must be a string, or an object with the string `url`")
    return place, cast(str, url)


def find_model(
    service: TextService, name: str, *, must_be_named: bool = True, embeds: bool = False
) -> TextModel:
    """The model that a body names, or whose adapter it names, to write or to make vectors; for a name that no
    model of any kind has, the one there is (any_model). Raises ServeError."""
    options, texts = service.options, service.texts
    if options.any_model:
        return texts.find_adapted(
            name if texts.serves(name) else options.default_model or texts.only(embeds=embeds)
        )
    if not name and must_be_named:
        raise InvalidBody(NO_NAME[options.openai_flavor], "model")
    try:
        return texts.find_adapted(name)
    except ServeError as fault:
        if not name or fault.kind is not Kind.NOT_FOUND:
            raise
    only = "" if texts.knows(name) or not takes_any(options) else texts.only(embeds=embeds)
    if not only:
        raise no_model(name)
    return texts.find(only)


def takes_any(options: TextgenOptions) -> bool:
    """Return whether an unknown name stands for the only model: MindIE checks names."""
    return options.any_model is None and options.openai_flavor == "openai"


def no_model(name: str) -> ServeError:
    """Return the fault of an unknown model."""
    return ServeError(Kind.NOT_FOUND, f"The model '{name}' does not exist.")
