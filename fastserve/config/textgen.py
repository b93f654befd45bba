"""What may be set of the dialect textgen: where its originals differ, each may be had.

Of models that generate text `config.text` has the settings; these are of the APIs in front of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MEGABYTE = 1 << 20


class TextgenOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text generation dialect: MindIE's API, TGI's, vLLM's and OpenAI's."""

    default_model: Annotated[
        str, Meta(description="The model of calls that name none; empty: the only one that generates text.")
    ] = ""
    request_mb: Annotated[
        int, Meta(ge=1, le=1024, description="MiB of a request's body (maxRequestLength).")
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
        bool,
        Meta(
            description="A body's `model` that nobody serves means default_model (OpenAI's API; "
            "huggingface_hub sends made-up ones)."
        ),
    ] = False
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
