"""The `text` section of model.yaml: bounds and settings of a model that generates text.

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

# What a text model is to clients who know tensors alone, as vLLM's backend is in Triton.
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
    """What may be set of it. 0 leaves a bound to the model."""

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
        int, Meta(ge=1, description="Tokens a client may be behind before its sequence stands still.")
    ] = 256
