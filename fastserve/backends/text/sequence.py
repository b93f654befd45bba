"""One sequence on its way: what was asked, where it lies, when it ends. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from fastserve.backends.text.pooling import Pool
from fastserve.backends.text_engine import TextRequest
from fastserve.codec.text import Finish, Info, Sampling
from fastserve.errors import invalid

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class State(IntEnum):
    """WAITING -> READING -> WRITING <-> STANDING, and ENDED from each of them."""

    WAITING = 0
    READING = 1
    """Its prompt is being read, in chunks."""
    WRITING = 2
    """A token a step."""
    STANDING = 3
    """Its reader is behind: it keeps its row."""
    ENDED = 4


@dataclass(slots=True, eq=False)
class Sequence:
    """`number` is its place in the order of arrival."""

    rid: int
    prompt: NDArray[np.int32]
    sampling: Sampling
    limit: int
    """Tokens it may draw."""
    ends: Mapping[int, Finish]
    """Tokens that are its last."""
    number: int = 0
    priority: int = 5
    deadline_ns: int = 0
    arrived_ns: int = 0
    last_ns: int = 0
    """When its last token was drawn; its arrival before the first."""
    state: State = State.WAITING
    row: int = -1
    slot: int = -1
    """Of the sampler."""
    drawn: int = 0
    scores: list[tuple[int, float | None]] | None = None
    """Of the prompt's tokens, when they were asked for."""
    pool: Pool | None = None
    """What makes a vector of its prompt, when that is what was asked for: no token is drawn then."""

    @property
    def reads_all(self) -> bool:
        """Something of every token of its prompt is wanted: none of them may come from elsewhere."""
        return self.scores is not None or self.pool is not None


def make_sequence(
    request: TextRequest, prompt: NDArray[np.int32], info: Info, eos: Mapping[int, Finish]
) -> Sequence:
    """Of a request that can run; raises ServeError for one that never can."""
    sampling, count = request.note.sampling, len(prompt)
    check_prompt(prompt, info)
    asked = min(sampling.max_new_tokens, info.max_new_tokens)
    return Sequence(
        rid=request.rid,
        prompt=prompt,
        sampling=sampling,
        limit=max(1, min(asked, info.max_tokens - count)),
        ends=_ends(sampling, eos),
        priority=min(5, max(1, request.note.priority)),
        deadline_ns=request.note.deadline_ns,
        scores=[(int(prompt[0]), None)] if sampling.prompt_logprobs else None,
    )


def check_prompt(prompt: NDArray[np.int32], info: Info) -> None:
    """Raises ServeError for tokens that the model does not take."""
    count = len(prompt)
    if not count:
        raise invalid("prompt: given 0 tokens, allowed: 1 or more")
    if count > info.max_prompt_tokens:
        raise invalid(f"prompt: given {count} tokens, allowed: at most {info.max_prompt_tokens}")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or (info.vocab_size and high >= info.vocab_size):
        given = low if low < 0 else high
        raise invalid(f"prompt: given token {given}, allowed: 0 to {info.vocab_size - 1}")


def _ends(sampling: Sampling, eos: Mapping[int, Finish]) -> Mapping[int, Finish]:
    if not sampling.stop_ids and not sampling.ignore_eos:
        return eos
    ends = dict.fromkeys(sampling.stop_ids, Finish.STOP)
    if not sampling.ignore_eos:
        ends.update(eos)
    return ends
