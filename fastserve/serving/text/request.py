"""A text request as a dialect passes it on, and the faults that a prompt can have.

Dialects check the bounds of their APIs (temperature in (0, 2], at most 4 stop strings); bounds that hold
for a model through every API are here: characters, tokens, vocabulary. Each fault is a class of its own
with its numbers, so that a dialect can report it in its own form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastserve.codec.generation import Sampling
from fastserve.errors import Kind, ServeError

MOST_CHARACTERS = 4 << 20
"""Characters of a prompt at most (spec mindie 1: 4 MB)."""
LEAST_CHARACTERS = 1 << 16
"""Characters that a prompt may have for every model, however few tokens it takes."""
MOST_TOGETHER = 300_000
"""Tokens of all prompts of one request, OpenAI's own bound; a model that takes longer prompts may get one of
them."""
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1024
MOST_STOP_IDS = 1024
"""Tokens that end an answer, of one request."""
TO_FIT = -1


@dataclass(slots=True, kw_only=True)
class TextAsk:
    """One request to a text model. `prompt` is text, or token ids."""

    prompt: str | Sequence[int]
    sampling: Sampling = Sampling()  # noqa: RUF009 -- frozen
    """Its `seed` is ignored: see below."""
    seed: int | None = None
    """64 bits; None: a random one, returned as `stream.seed`."""
    stop: Sequence[str] = ()
    include_stop: bool = False
    """The stop string, or the token of `sampling.stop_ids`, stays part of the text."""
    priority: int = 5
    deadline_ns: int = 0
    """Deadline in nanoseconds of time.monotonic_ns, 0 for none."""
    special: bool = False
    """Whether special tokens are part of the text."""
    truncate: int = 0
    """Keep this many tokens, the last ones. 0: all. TO_FIT (-1): as many as the model takes."""
    templated: bool = False
    """The prompt is a chat template's: the special tokens it begins with are written out."""
    request_id: str = ""
    images: Sequence[bytes] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Other parameters of the request, for engines of users' own."""


class PromptFault(ServeError):
    """A fault of a prompt. `prompt` is its index among those of an embedding, else -1; the dialect that read
    the body sets `field`, its place there."""

    prompt = -1
    field = ""

    def __init__(self, text: str) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, text)


class TextTooLong(PromptFault):
    """A prompt of no characters, or of more than `most`."""

    def __init__(self, got: int, most: int) -> None:
        super().__init__(f"the prompt has {got} characters, allowed: 1 to {most}")
        self.got, self.most = got, most


class PromptTooLong(PromptFault):
    """A prompt of no tokens, or of more than the model takes; with `more`, counting stopped there."""

    def __init__(self, got: int, most: int, *, more: bool = False) -> None:
        super().__init__(f"the prompt has {got} tokens{' or more' if more else ''}, allowed: 1 to {most}")
        self.got, self.most = got, most


class PromptsTooLong(PromptFault):
    """Prompts of one request that have too many tokens, or characters, together."""

    def __init__(self, got: int, most: int, what: str = "tokens") -> None:
        super().__init__(f"the prompts have {got} {what} together, allowed: at most {most}")


class UnknownToken(PromptFault):
    """A token id that is not one of the model's."""

    def __init__(self, token: int, place: int, vocab: int) -> None:
        super().__init__(f"token {place} of the prompt is {token}, allowed: 0 to {vocab - 1}")
        self.token, self.place, self.vocab = token, place, vocab


class BadStop(ServeError):
    """A stop string that cannot be one, or too many of them."""

    def __init__(self, why: str) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, f"stop: {why}")


class NoTokenizer(ServeError):
    """A model whose engine takes text: its tokens are not known here."""

    def __init__(self, model: str) -> None:
        super().__init__(Kind.UNIMPLEMENTED, f"model '{model}' has no tokenizer")


def check_text(text: str, most: int = MOST_CHARACTERS) -> None:
    """Raises TextTooLong."""
    if not 0 < len(text) <= most:
        raise TextTooLong(len(text), most)


def check_together(prompts: Sequence[str | Sequence[int]], most_tokens: int) -> None:
    """Hold all prompts of one request against what they may be together. Raises PromptsTooLong."""
    texts = [len(prompt) for prompt in prompts if isinstance(prompt, str)]
    characters = sum(size for size in texts if size <= MOST_CHARACTERS)  # a longer one is refused by itself
    if characters > MOST_CHARACTERS:
        raise PromptsTooLong(characters, MOST_CHARACTERS, "characters")
    count_together(sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)), most_tokens)


def count_together(tokens: int, most_tokens: int) -> None:
    """`most_tokens` may one prompt have. Raises PromptsTooLong."""
    most = max(MOST_TOGETHER, most_tokens)
    if tokens > most:
        raise PromptsTooLong(tokens, most)


def check_stops(stops: Sequence[str]) -> None:
    """Raises BadStop."""
    if len(stops) > MOST_STOPS:
        raise BadStop(f"{len(stops)} strings given, allowed: at most {MOST_STOPS}")
    for stop in stops:
        if not 0 < len(stop) <= MOST_STOP_CHARACTERS:
            raise BadStop(f"a string of {len(stop)} characters given, allowed: 1 to {MOST_STOP_CHARACTERS}")


def fit(ids: Sequence[int], truncate: int, most: int, vocab: int) -> list[int]:
    """The tokens to run. `vocab` 0: any. Raises PromptTooLong and UnknownToken."""
    keep = most if truncate == TO_FIT else truncate
    kept = list(ids[-keep:] if 0 < keep < len(ids) else ids)
    if not 0 < len(kept) <= most:
        raise PromptTooLong(len(kept), most)
    if min(kept) < 0 or (vocab and max(kept) >= vocab):
        place = next(i for i, token in enumerate(ids) if token < 0 or (vocab and token >= vocab))
        raise UnknownToken(ids[place], place, vocab or 1 << 31)
    return kept
