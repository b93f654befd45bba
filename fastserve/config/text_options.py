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

    max_sequences: Annotated[int, Meta(ge=1, le=1024, description="Sequences that run at a time.")] = 32
    max_waiting: Annotated[int, Meta(ge=0, description="Requests that may wait besides.")] = 1024
    max_tokens: Annotated[
        int, Meta(ge=0, description="Tokens of prompt and answer together; 0: what the model was made for.")
    ] = 0
    max_prompt_tokens: Annotated[
        int, Meta(ge=0, description="Tokens of a prompt; 0: one less than max_tokens.")
    ] = 0
    max_new_tokens: Annotated[
        int, Meta(ge=1, description="Tokens of an answer, whatever a request asks for.")
    ] = 512
    step_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens of one step: a long prompt is read in chunks, between steps of the others.",
        ),
    ] = 128
    step_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="Milliseconds of a step that reads prompts while others write, or twice a step that"
            " only writes; as long as more wait to be read than write, and for 0, step_tokens alone counts.",
        ),
    ] = 10.0
    kv_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of the KV cache; 0: max_sequences of max_tokens, at most a quarter of memory.",
        ),
    ] = 0
    prefix_cache: Annotated[
        bool, Meta(description="Prompts that begin as one before use what is computed of it.")
    ] = False
    ageing_s: Annotated[
        float,
        Meta(
            ge=0, description="Seconds after which a waiting request counts as one priority higher; 0: never."
        ),
    ] = 0.0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="What it computes in; auto: float32 on a CPU, the weights' own on a GPU."),
    ] = "auto"
    tokenizer: Annotated[
        Literal["folder", "words", ""],
        Meta(description="tokenizer.json of the folder, one token a word, or none: the engine takes text."),
    ] = "folder"
    pooling: Annotated[
        Literal["", "mean", "last", "cls"],
        Meta(
            description="Vectors of texts (/v1/embeddings) are made of the states of all tokens, the last or "
            "the first; empty: as the folder's modules.json says, else mean of encoders and none of others."
        ),
    ] = ""
    normalize: Annotated[
        bool | None,
        Meta(description="Vectors have length 1; null: as modules.json of the folder says, else true."),
    ] = None
    reader_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens a client may be behind before its sequence stands still, while nobody waits "
            "for its row.",
        ),
    ] = 256


MEGABYTE = 1 << 20


class TextgenOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text generation dialect: MindIE's API, TGI's, vLLM's and OpenAI's."""

    default_model: Annotated[
        str, Meta(description="The model of calls that name none; empty: the only one that generates text.")
    ] = ""
    request_mb: Annotated[
        int, Meta(ge=1, le=1024, description="MiB of a request's body at most (maxRequestLength).")
    ] = 40
    json_depth: Annotated[
        int, Meta(ge=10, le=100, description="Objects and lists within each other in a body (maxJsonDepth).")
    ] = 10
    input_chars: Annotated[
        int, Meta(ge=1, le=4 * MEGABYTE, description="UTF-16 units of a prompt's text, in MindIE's API.")
    ] = 4 * MEGABYTE
    timeout_s: Annotated[int, Meta(ge=1, description="Seconds of a request that names no timeout.")] = 600
    most_timeout_s: Annotated[
        int, Meta(ge=1, le=65535, description="Most seconds a request may name; MindIE's newer: 65535.")
    ] = 3600
    token_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a request may wait for its next token (tokenTimeout).")
    ] = 600.0
    e2e_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a request may take, whatever it names (e2eTimeout).")
    ] = 600.0
    seed_bits: Annotated[Literal[64, 63], Meta(description="Bits of a seed; MindIE's newer: 63.")] = 64
    token_id_style: Annotated[
        Literal["scalar", "list"],
        Meta(description="A token's id in MindIE's events: a number, or a list of one (2.2 and newer)."),
    ] = "scalar"
    full_text: Annotated[
        bool, Meta(description="The events of a stream hold the whole text so far (fullTextEnabled).")
    ] = False
    generated_token_ids: Annotated[
        bool, Meta(description="Token ids in the details of /infer, as MindIE's newer.")
    ] = False
    stream_errors: Annotated[
        Literal["event", "raw"],
        Meta(description="What goes wrong in a stream of MindIE's: an event, or its bare words as there."),
    ] = "event"
    truncate: Annotated[
        bool, Meta(description="Prompts that are too long lose their beginning (truncation).")
    ] = False
    max_images: Annotated[int, Meta(ge=0, le=20, description="Images of one request.")] = 1
    image_root: Annotated[
        str, Meta(description="The folder whose images requests may name by their paths; empty: none.")
    ] = ""
    image_urls: Annotated[bool, Meta(description="Fetch images that requests name by http(s) URLs.")] = False
    image_urls_private: Annotated[
        bool, Meta(description="Those of private networks and of this machine too.")
    ] = False
    image_mb: Annotated[int, Meta(ge=1, le=100, description="MiB of one image.")] = 20
    keepalive_s: Annotated[
        float, Meta(ge=0, description="Seconds without a token after which a stream has a comment; 0: none.")
    ] = 0.0
    stop_service: Annotated[
        bool, Meta(description="Whoever reaches GET /stopService may stop the server.")
    ] = False
    any_model: Annotated[
        bool | None,
        Meta(
            description="Whether a body's `model` that nobody serves means default_model, or the only one "
            "that can do it (OpenAI's API; clients send made-up ones). null: where there is one, and "
            "openai_flavor is openai."
        ),
    ] = None
    openai_flavor: Annotated[
        Literal["openai", "mindie"],
        Meta(
            description="Whose shape OpenAI's API has where the two differ: errors, lists of models, the "
            "last piece of a chat."
        ),
    ] = "openai"
    max_stops: Annotated[
        int, Meta(ge=1, le=64, description="Stop strings of a request (TGI's, OpenAI's and vLLM's).")
    ] = 4
    max_best_of: Annotated[
        int, Meta(ge=1, le=128, description="Sequences a request of TGI's may start (best_of).")
    ] = 4
    metrics: Annotated[
        Literal["server", "mindie"],
        Meta(description="What /metrics has on listeners that speak this: the server's names or MindIE's."),
    ] = "server"
    tgi_flavor: Annotated[
        Literal["tgi", "mindie"],
        Meta(description="Whose shape /, /generate, /generate_stream and /info have where the two differ."),
    ] = "tgi"
