"""Prompts that begin as a row does, running or left: what is computed of it is copied, not computed again.
What a beginning has computed is its own alone: nothing of the sequence in that row comes along.
"""

from __future__ import annotations

import numpy as np

from fastserve.backends.text.rows import Rows
from fastserve.backends.text.sequence import Sequence

LEAST = 16
"""Tokens below which a copy is not worth its while."""


def begin_row(rows: Rows, sequence: Sequence) -> None:
    """A row for the sequence, with as much of its prompt as another row has. The last token of a prompt is
    always computed: its logits are needed."""
    prompt = sequence.prompt
    source, count = _longest(rows, prompt)
    if count < LEAST or sequence.reads_all:
        rows.take(sequence)
    elif rows.sequences[source] is None:
        rows.take(sequence, source)
        rows.lengths[source] = count
    else:
        rows.take(sequence)
        rows.copy(source, sequence.row, count)
    rows.ids[sequence.row, : len(prompt)] = prompt


def _longest(rows: Rows, prompt: np.ndarray) -> tuple[int, int]:
    best, most = -1, 0
    limit = len(prompt) - 1
    for row in np.flatnonzero((rows.ids[:, :LEAST] == prompt[:LEAST]).all(1)) if limit >= LEAST else ():
        count = min(limit, int(rows.lengths[row]))
        differs = np.flatnonzero(rows.ids[row, :count] != prompt[:count])
        count = int(differs[0]) if len(differs) else count
        if count > most:
            best, most = int(row), count
    return best, most
