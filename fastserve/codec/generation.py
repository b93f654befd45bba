"""Text requests as they travel from a front to a worker, and their tokens back, one record each.

    front                                                       worker
      | -- TextNote, with the prompt's token ids or its text -->|    in the slab of its place
      | <-- records: token, Finish, when, a few bytes more -----|    several a message, one doorbell a step

A request has no trace of its API. It brings its settings and its seed: its tokens depend on these, never on
the other requests of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from fastserve._ext.text_tokens import Flow


class Finish(IntEnum):
    """Reason of a sequence's end; NONE while it goes on."""

    NONE = 0
    EOS = 1
    LENGTH = 2
    STOP = 3
    """One of `Sampling.stop_ids`; stop strings are found by the front, which then cancels."""
    CANCELLED = 4
    TIMEOUT = 5
    FAILED = 6


GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]
"""Language of a grammar's text: a JSON schema; a regular expression of the whole answer, in Rust's syntax
(crate regex); a JSON list of strings, of which the answer is one; Lark's syntax as of llguidance, or
llama.cpp's GBNF; Lark's alone, as the front writes it for calls of tools."""


class Grammar(msgspec.Struct, frozen=True, gc=False):
    """A language that an answer belongs to, once it has ended by itself."""

    kind: GrammarKind
    text: str


class Sampling(msgspec.Struct, omit_defaults=True, frozen=True, gc=False, kw_only=True):
    """Choice of the next token, and of the last one. The reader of a request checks the values."""

    max_new_tokens: int = 20
    do_sample: bool = False
    """False: the most likely token."""
    temperature: float = 1.0
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Least probability of a token, as a share of the likeliest one's; 0: any."""
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    """Covers the prompt too, as in transformers."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """64 bits. The front chooses one where the client gave none, and can tell it."""
    stop_ids: list[int] = []
    min_new_tokens: int = 0
    """So many tokens come before an end of sequence, a token of `stop_ids` or a stop string may."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens, before everything else."""
    ignore_eos: bool = False
    """Without effect beside a grammar, whose end is an end of sequence."""
    grammar: Grammar | None = None
    logprobs: int = -1
    """Of each token: -1 nothing, 0 its own, n also those of the n most likely."""
    prompt_logprobs: bool = False
    prompt_best: int = -1
    """Beside `prompt_logprobs`: -1 nothing, n the rank of each of the prompt's tokens and the n likeliest."""


class TextNote(msgspec.Struct, omit_defaults=True, gc=False, kw_only=True):
    """Everything about a request but its prompt's ids, which lie beside it as int32 where the front has a
    tokenizer for the model; `text` is the prompt where it has not."""

    sampling: Sampling = Sampling()
    text: str = ""
    priority: int = 5
    """1 (first) to 5."""
    turn: float = 0.0
    """Place among the waiting requests of its priority, lower first, then by arrival: of API keys' shares."""
    deadline_ns: int = 0
    """On the clock of time.monotonic_ns(), from the request's arrival; 0 for none."""
    request_id: str = ""
    parameters: dict[str, Any] = {}
    """Further parameters of the client, as plain values, for engines of users' own."""
    images: list[bytes] = []
    """Encoded images, checked by the front, for models that see."""
    adapter: str = ""
    """One of `Info.adapters`; empty: the model without one."""
    embeds: bool = False
    """The prompt's vector is wanted, and no token: its last record has `Extra.vector` and Finish.STOP."""


class Info(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """Limits and abilities of a loaded engine, by which the fronts check requests."""

    vocab_size: int = 0
    max_tokens: int = 2560
    """Prompt and answer together."""
    max_prompt_tokens: int = 2048
    max_new_tokens: int = 512
    """The most one request gets, whatever it asks for."""
    slots: int = 1
    """Sequences that run at a time."""
    kv_tokens: int = 0
    """Tokens that fit into the cache, all sequences together; 0: not told."""
    eos_ids: list[int] = []
    dtype: str = ""
    device: str = "cpu"
    tokenizer: str = "folder"
    """As in config.text."""
    vision: bool = False
    embeds: int = 0
    """Numbers in the vector of a prompt; 0: it makes none."""
    writes: bool = True
    """False of a model that makes vectors only."""
    grammars: bool = False
    """Whether it honours `Sampling.grammar`."""
    adapters: list[str] = []
    """Names of its LoRA adapters."""


class Logprobs(msgspec.Struct, omit_defaults=True, gc=False, array_like=True):
    """The bytes beside a token, as msgpack, when logprobs were asked for; natural logarithms."""

    own: float
    best: list[tuple[int, float]] = []


class Extra(msgspec.Struct, omit_defaults=True, gc=False):
    """The bytes beside a record, as msgpack; a plain token has none."""

    text: str | None = msgspec.field(name="t", default=None)
    """The token's own text, of engines that say it themselves."""
    logprobs: Logprobs | None = msgspec.field(name="l", default=None)
    prompt: list[tuple[int, float | None]] | None = msgspec.field(name="p", default=None)
    """With the first token, when prompt_logprobs were asked for: each prompt token and its own."""
    prompt_ranks: bytes = msgspec.field(name="b", default=b"")
    """With `prompt`, when prompt_best was asked for: `write_ranks` of its tokens but the first."""
    prompt_tokens: int = msgspec.field(name="n", default=0)
    """With the first record, where the engine has counted them: it took text."""
    message: str = msgspec.field(name="e", default="")
    """With Finish.FAILED: words for the client, and their kind (errors.pack_status)."""
    kind: int = msgspec.field(name="k", default=0)
    vector: bytes = msgspec.field(name="v", default=b"")
    """Of a prompt, where that was asked for: float32, little-endian."""


Record = tuple[int, int, int, bytes]
"""One record of a sequence: token (-1: none), Finish, microseconds since the one before, and the
bytes of an Extra or none. The last record of a sequence, and only that, has a Finish other than NONE."""
Heard = Callable[[list[Record]], None]
"""Called on the loop with all records of a sequence that came since, once a doorbell. May not raise."""


class GenerationRun(Protocol):
    """A sequence in the hands of the front that asked for it."""

    flow: Flow | None
    """Where its plain tokens go while that takes them; `heard` is then told of the others alone."""

    def taken(self, records: int) -> None:
        """So many records more have been passed on: its reader is that much nearer (reader_tokens)."""

    def cancel(self, why: Finish = Finish.CANCELLED) -> None:
        """End it. Its last record still comes. Nothing for one that has ended."""


PromptRank = tuple[int, list[tuple[int, float]]]
"""Rank of a prompt's token among all at its place, from 1, and the likeliest there with their log
probabilities."""
_encode = msgspec.msgpack.Encoder().encode
_read_ranks = msgspec.msgpack.Decoder(list[PromptRank]).decode
_read_note = msgspec.msgpack.Decoder(TextNote).decode
_read_extra = msgspec.msgpack.Decoder(Extra).decode


def write_text(note: TextNote | Extra) -> bytes:
    """Return a note's bytes."""
    return _encode(note)


def read_text(data: memoryview | bytes) -> TextNote:
    """Raises ValueError when these bytes are none."""
    return _read_note(data)


def read_extra(data: memoryview | bytes) -> Extra:
    """Raises ValueError when these bytes are none."""
    return _read_extra(data)


def write_ranks(ranks: list[PromptRank]) -> bytes:
    """Return the bytes of ranks, which are kept until they are printed: objects take ten times as much."""
    return _encode(ranks)


def read_ranks(data: bytes) -> list[PromptRank]:
    """Return the ranks of `write_ranks`; none of no bytes."""
    return _read_ranks(data) if data else []
