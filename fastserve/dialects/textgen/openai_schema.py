"""What the bodies of OpenAI's API are: keys, types and bounds (spec 3.6 and 8). openai_read says
what they come to.

Keys that are not here have no bearing on an answer, and are ignored; those that would have one, and that
nobody here can heed, are in `Unheeded`: they are refused by name unless they ask for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from fastserve.dialects.textgen.typed import MOST_FLOAT

MOST_CHOICES = 128
MOST_INT = 2**31 - 1
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=MOST_INT)]], Meta(max_length=1 << 20)]
Text = Annotated[str, Meta(min_length=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=MOST_INT)]
Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
Refused = Raw | UnsetType


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str


class Unheeded(msgspec.Struct, kw_only=True):
    """What nobody here can do."""

    logit_bias: Refused = UNSET
    min_p: Refused = UNSET
    min_tokens: Refused = UNSET
    use_beam_search: Refused = UNSET
    guided_json: Refused = UNSET
    guided_regex: Refused = UNSET
    guided_choice: Refused = UNSET
    guided_grammar: Refused = UNSET
    structured_outputs: Refused = UNSET
    allowed_token_ids: Refused = UNSET
    bad_words: Refused = UNSET
    logits_processors: Refused = UNSET
    prompt_logprobs: Refused = UNSET
    truncate_prompt_tokens: Refused = UNSET


class Common(Unheeded, kw_only=True):
    """What both APIs know, OpenAI's keys and then those of vLLM and MindIE."""

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
    repetition_penalty: Annotated[float, Meta(gt=0, le=MOST_FLOAT)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=1, le=5)] | None = None
    timeout: Annotated[int, Meta(ge=1, le=65535)] | None = None
    response_format: ResponseFormat | None = None


class Part(msgspec.Struct):
    """One part of a content. Which types are heeded, openai_read says."""

    type: str
    text: str | None = None
    image_url: Refused = UNSET


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    modalities: list[str] | None = None
    tools: Refused = UNSET
    functions: Refused = UNSET
    audio: Refused = UNSET
    web_search_options: Refused = UNSET
    chat_template: Refused = UNSET
    continue_final_message: Refused = UNSET
    documents: Refused = UNSET
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    """A text, its tokens, or several of either."""
    best_of: Choices | None = None
    echo: bool | None = None
    suffix: Refused = UNSET
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    model: str | None = None
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=1, le=5)] | None = None
    timeout: Annotated[int, Meta(ge=1, le=65535)] | None = None
