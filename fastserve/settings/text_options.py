"""Options of text generation: the `text` section of model.yaml, and the APIs in front of such models.

    backend: text                    # a Hugging Face style folder: config.json, *.safetensors, tokenizer.json
    text: {max_sequences: 32, max_new_tokens: 512}

Sizes are tokens unless a field says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

# The tensors of a text model, for clients of tensors, as vLLM's backend is in Triton.
INPUTS: Mapping[str, Any] = MappingProxyType(
    {
        "text_input": {"dtype": "bytes", "shape": [1]},
        "stream": {"dtype": "bool", "shape": [1]},
        "sampling_parameters": {"dtype": "bytes", "shape": [1]},
        "exclude_input_in_output": {"dtype": "bool", "shape": [1]},
    }
)

OPTIONAL_INPUTS = ("stream", "sampling_parameters", "exclude_input_in_output")
OUTPUTS: Mapping[str, Any] = MappingProxyType({"text_output": {"dtype": "bytes", "shape": [1]}})


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `text` section of model.yaml. 0 leaves a bound to the model."""

    max_sequences: Annotated[int, Meta(ge=1, le=1024)] = 32
    """Sequences that run at a time."""
    max_waiting: Annotated[int, Meta(ge=0)] = 1024
    """Requests that may wait besides."""
    max_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens of prompt and answer together; 0: what the model was made for."""
    max_prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens of a prompt; 0: one less than max_tokens."""
    max_new_tokens: Annotated[int, Meta(ge=1)] = 512
    """Tokens of an answer, whatever a request asks for."""
    step_tokens: Annotated[int, Meta(ge=1)] = 128
    """Tokens of one step: a long prompt is read in chunks, between steps of the others."""
    step_ms: Annotated[float, Meta(ge=0)] = 10.0
    """Milliseconds of a step that reads prompts while others write, or twice a step that only writes; as long
    as more wait to be read than write, and for 0, step_tokens alone counts."""
    kv_bytes: Annotated[int, Meta(ge=0)] = 0
    """Bytes of the KV cache; 0: max_sequences of max_tokens, at most a quarter of memory."""
    prefix_cache: bool = False
    """Prompts that begin as one before use what is computed of it."""
    ageing_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds after which a waiting request counts as one priority higher; 0: never."""
    runtime: Literal["auto", "torch", "numpy"] = "auto"
    """Library that computes the model; auto: torch where it is installed, else numpy where that can."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the model computes in; auto: float32 on a CPU, the weights' own on a GPU."""
    tokenizer: Literal["folder", "words", ""] = "folder"
    """tokenizer.json of the folder, one token a word, or none: the engine takes text."""
    pooling: Literal["", "mean", "last", "cls"] = ""
    """Vectors of texts (/v1/embeddings) are made of the states of all tokens, the last or the first; empty:
    as the folder's modules.json says, else mean of encoders and none of others."""
    normalize: bool | None = None
    """Vectors have length 1; null: as modules.json of the folder says, else true."""
    reader_tokens: Annotated[int, Meta(ge=1)] = 256
    """Tokens a client may be behind before its sequence stands still, while nobody waits for its row."""


MEGABYTE = 1 << 20


class TextgenOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text generation dialect: MindIE's API, TGI's, vLLM's and OpenAI's."""

    default_model: str = ""
    """The model of calls that name none; empty: the only one that generates text."""
    request_mb: Annotated[int, Meta(ge=1, le=1024)] = 40
    """MiB of a request's body at most (maxRequestLength)."""
    json_depth: Annotated[int, Meta(ge=10, le=100)] = 10
    """Objects and lists within each other in a body (maxJsonDepth)."""
    input_chars: Annotated[int, Meta(ge=1, le=4 * MEGABYTE)] = 4 * MEGABYTE
    """UTF-16 units of a prompt's text, in MindIE's API."""
    timeout_s: Annotated[int, Meta(ge=1)] = 600
    """Seconds of a request that names no timeout."""
    most_timeout_s: Annotated[int, Meta(ge=1, le=65535)] = 3600
    """Most seconds a request may name; MindIE's newer: 65535."""
    token_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds a request may wait for its next token (tokenTimeout)."""
    e2e_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds a request may take, whatever it names (e2eTimeout)."""
    seed_bits: Literal[64, 63] = 64
    """Bits of a seed; MindIE's newer: 63."""
    token_id_style: Literal["scalar", "list"] = "scalar"
    """A token's id in MindIE's events: a number, or a list of one (2.2 and newer)."""
    full_text: bool = False
    """The events of a stream hold the whole text so far (fullTextEnabled)."""
    generated_token_ids: bool = False
    """Token ids in the details of /infer, as MindIE's newer."""
    stream_errors: Literal["event", "raw"] = "event"
    """Form of errors in a stream of MindIE's: an event, or the bare text as there."""
    truncate: bool = False
    """Prompts that are too long lose their beginning (truncation)."""
    max_images: Annotated[int, Meta(ge=0, le=20)] = 1
    """Images of one request."""
    image_root: str = ""
    """The folder whose images requests may name by their paths; empty: none."""
    image_urls: bool = False
    """Fetch images that requests name by http(s) URLs."""
    image_urls_private: bool = False
    """Fetch images from private networks and from this machine too."""
    image_mb: Annotated[int, Meta(ge=1, le=100)] = 20
    """MiB of one image."""
    keepalive_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds without a token after which a stream has a comment; 0: none."""
    stop_service: bool = False
    """Let any client stop the server by GET /stopService."""
    any_model: bool | None = None
    """Whether a body's `model` that nobody serves means default_model, or the only one that can do it
    (OpenAI's API; clients send made-up ones). null: where there is one, and openai_flavor is openai."""
    openai_flavor: Literal["openai", "mindie"] = "openai"
    """Original that OpenAI's API follows where the two differ: errors, lists of models, the last piece of a
    chat."""
    max_stops: Annotated[int, Meta(ge=1, le=64)] = 4
    """Stop strings of a request (TGI's, OpenAI's and vLLM's)."""
    max_best_of: Annotated[int, Meta(ge=1, le=128)] = 4
    """Sequences a request of TGI's may start (best_of)."""
    metrics: Literal["server", "mindie"] = "server"
    """Names in /metrics on listeners that speak this: the server's or MindIE's."""
    tgi_flavor: Literal["tgi", "mindie"] = "tgi"
    """Original that /, /generate, /generate_stream and /info follow where the two differ."""
