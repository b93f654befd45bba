"""A text engine that makes embeddings: a batch of whole texts each step, one record each.

    engine = EmbedEngine(embed, info, options)      embed([TextRequest, ...]) -> a vector each

An encoder (loading.Encoder) or a user's own `embed` (python_engine.py) computes them. Priorities, deadlines
and cancellation order the waiting texts; a running batch is done in one step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fastserve.backends.llm.pooling import finish_vector, tell_vector
from fastserve.backends.llm.protocols import Out, TextRequest
from fastserve.backends.llm.scheduling import (
    DecodeState,
    QueuedEngine,
    TextSequence,
    check_prompt,
)
from fastserve.backends.model_errors import (
    count_out_of_memory,
    end_if_lost,
    explain,
    is_out_of_memory,
    kind_of,
)
from fastserve.codec.generation import Extra, Finish, Info, write_text
from fastserve.errors import Kind, ServeError
from fastserve.settings.model_options import TextOptions

log = logging.getLogger(__name__)
MOST_TOKENS = 4096
"""Tokens of a batch, its shorter texts padded to the longest; one text alone may have more."""
NO_TEXT = "this model makes vectors of texts, and writes none"
Embed = Callable[[list[TextRequest]], Any]


class EmbedEngine(QueuedEngine):
    """A TextEngine. `embed` is called with up to `info.slots` texts."""

    def __init__(self, embed: Embed, info: Info, options: TextOptions, close: Callable[[], None]) -> None:
        super().__init__(options)
        self.info = info
        self._embed, self._close, self._normalize = embed, close, bool(options.normalize)
        self._most = info.slots + options.max_waiting
        self._requests: dict[int, TextRequest] = {}
        self._number = 0

    def submit(self, request: TextRequest) -> None:
        """Queue a text. Raises ServeError for one that can never run, or when the queue is full."""
        if not request.note.embeds:
            raise ServeError(Kind.UNIMPLEMENTED, NO_TEXT)
        if len(self._sequences) >= self._most:
            text = f"{len(self._sequences)} requests wait already"
            raise ServeError(Kind.RESOURCE_EXHAUSTED, text, retry_after_s=1)
        self._number += 1
        self._add(_make_sequence(request, self.info, self._number))
        self._requests[request.rid] = request

    def step(self, out: Out) -> bool:
        """The vectors of one batch."""
        now_ns = time.monotonic_ns()
        self._end_due(out, now_ns)
        batch = self._next_batch(now_ns)
        if batch:
            self._run(batch, out)
        return bool(batch)

    def close(self) -> None:
        """Gives memory back; texts that have not ended get no record."""
        self._sequences.clear()
        self._requests.clear()
        self._close()

    def _next_batch(self, now_ns: int) -> list[TextRequest]:
        batch: list[TextRequest] = []
        longest = 0
        while len(batch) < self.info.slots and (sequence := self._waiting.next(now_ns)) is not None:
            longest = max(longest, len(sequence.prompt))
            if batch and longest * (len(batch) + 1) > MOST_TOKENS:
                break
            self._waiting.remove(sequence)
            sequence.state = DecodeState.PREFILL
            batch.append(self._requests[sequence.rid])
        return batch

    def _run(self, batch: list[TextRequest], out: Out, *, again: bool = False) -> None:
        """Run a batch; one that fails is run text by text, to find the faulty one."""
        try:
            vectors = self._vectors(batch)
        except Exception as error:
            end_if_lost(error)
            if is_out_of_memory(error) and not again:
                count_out_of_memory()
            if len(batch) > 1:
                for request in batch:
                    self._run([request], out, again=True)
                return
            if not isinstance(error, ServeError):
                log.exception("the model failed on a text")
            extra = write_text(Extra(message=explain(error), kind=kind_of(error).value))
            self._end(self._sequences[batch[0].rid])
            out.end(batch[0].rid, Finish.FAILED, extra)
            return
        for request, vector in zip(batch, vectors, strict=True):
            self._end(self._sequences[request.rid])
            out.end(request.rid, *tell_vector(finish_vector(vector, normalize=self._normalize)))

    def _vectors(self, batch: list[TextRequest]) -> np.ndarray:
        made = np.asarray(self._embed(batch), np.float64)
        wanted = (len(batch), self.info.embeds)
        if made.shape != wanted:
            raise TypeError(
                f"embed returned an array of the shape {list(made.shape)}, allowed: {list(wanted)}"
            )
        return made

    def _end(self, sequence: TextSequence) -> None:
        del self._requests[sequence.rid]
        super()._end(sequence)


def _make_sequence(request: TextRequest, info: Info, number: int) -> TextSequence:
    """Return a text as the waiting queue has it. A text that the engine tokenizes has no tokens yet."""
    prompt, note = np.array(request.ids, np.int32), request.note
    if request.ids or not note.text:
        check_prompt(prompt, info)
    return TextSequence(
        rid=request.rid,
        prompt=prompt,
        sampling=note.sampling,
        limit=0,
        ends={},
        number=number,
        priority=min(5, max(1, note.priority)),
        turn=note.turn,
        deadline_ns=note.deadline_ns,
        arrived_ns=request.arrived_ns or time.monotonic_ns(),
    )
