"""One text request as a dialect hands it over, and what can be wrong with it, with the numbers.

The dialects check what their APIs bound (temperature in (0, 2], at most 4 stop strings); here is what holds
for a model whoever asks: characters, tokens, vocabulary. Each fault is a class of its own, so that a dialect
may say it in its own words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastserve.codec.text import Sampling
from fastserve.errors import Kind, ServeError

MOST_CHARACTERS = 4 << 20
"""Of a prompt (spec mindie 1: 4 MB)."""
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1024
TO_FIT = -1


@dataclass(slots=True, kw_only=True)
class TextAsk:
    """One request. `prompt` is text, or token ids that somebody else made of it."""

    prompt: str | Sequence[int]
    sampling: Sampling = Sampling()  # noqa: RUF009 -- frozen
    """Its seed is not looked at: `seed` is."""
    seed: int | None = None
    """64 bits; None: chosen here, and told as `stream.seed`."""
    stop: Sequence[str] = ()
    include_stop: bool = False
    """The stop string, or the token of `sampling.stop_ids`, stays part of the text."""
    priority: int = 5
    deadline_ns: int = 0
    """As time.monotonic_ns counts, 0 for none."""
    special: bool = False
    """Special tokens are text too."""
    truncate: int = 0
    """Keep this many tokens, the last ones. 0: all. TO_FIT (-1): as many as the model takes."""
    templated: bool = False
    """The prompt is a chat template's: the special tokens it begins with are written out."""
    request_id: str = ""
    images: Sequence[bytes] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What the client said besides, for engines of users' own."""


class PromptFault(ServeError):
    """What is wrong with a prompt. `prompt` is its number among those of an embedding, else -1. `field`,
    where it stands in a body, is for the dialect that read it to say."""

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
    """A prompt of no tokens, or of more than the model takes."""

    def __init__(self, got: int, most: int) -> None:
        super().__init__(f"the prompt has {got} tokens, allowed: 1 to {most}")
        self.got, self.most = got, most


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
    """The model's engine takes text: here nobody knows its tokens."""

    def __init__(self, model: str) -> None:
        super().__init__(Kind.UNIMPLEMENTED, f"model '{model}' has no tokenizer")


def check_text(text: str) -> None:
    """Raises TextTooLong."""
    if not 0 < len(text) <= MOST_CHARACTERS:
        raise TextTooLong(len(text), MOST_CHARACTERS)


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
