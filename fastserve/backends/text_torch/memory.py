"""How many sequences of how many tokens a cache has room for, decided once, at load: nothing runs out later.

Every sequence has a row of `max_tokens` to itself. What bounds the rows: `max_sequences`, and bytes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from fastserve.config.text import TextOptions
from fastserve.errors import ConfigError

log = logging.getLogger(__name__)

STRIDE = 32
"""A row's positions are a multiple of this: attention looks at whole strides."""
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class Room(NamedTuple):
    """Rows, and the tokens of each."""

    slots: int
    tokens: int


def host_bytes() -> int:
    """Memory of this machine, or what of it the control group leaves."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP:
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(found)


def find_room(options: TextOptions, model_tokens: int, token_bytes: int, memory_bytes: int) -> Room:
    """`token_bytes`: of one position in the cache, all layers. Raises ConfigError when what was asked for
    does not fit."""
    if options.max_tokens > model_tokens:
        raise ConfigError(f"text.max_tokens: given {options.max_tokens}, allowed: at most {model_tokens}")
    tokens = options.max_tokens or model_tokens
    budget = options.kv_bytes or memory_bytes // 4
    slots = min(options.max_sequences, budget // row_bytes(tokens, token_bytes))
    if not slots and not options.max_tokens:
        fits = budget // token_bytes // STRIDE * STRIDE
        if fits:
            log.warning(
                "the cache has room for %d of the model's %d tokens: text.kv_bytes", fits, model_tokens
            )
            return Room(1, fits)
    if not slots:
        need = row_bytes(tokens, token_bytes)
        raise ConfigError(
            f"text.kv_bytes: {budget} bytes hold no sequence of {tokens} tokens: allowed: at least {need}, "
            "or a lower text.max_tokens"
        )
    if slots < options.max_sequences:
        text = "the cache has room for %d sequences of %d tokens, not for %d: text.max_tokens, text.kv_bytes"
        log.warning(text, slots, tokens, options.max_sequences)
    return Room(slots, tokens)


def row_bytes(tokens: int, token_bytes: int) -> int:
    """Of one sequence."""
    return -(-tokens // STRIDE) * STRIDE * token_bytes
