"""What the sizes of a model's batches, queues and requests must be to one another."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from fastserve.config.fields import fault_text

if TYPE_CHECKING:
    from fastserve.repository.model_config import NativeConfig


def check_batches(config: NativeConfig) -> None:
    """Raises ValueError."""
    _check_batch_sizes(config.max_batch_size, config.allowed_batch_sizes)
    least = f"a whole number from max_batch_size {config.max_batch_size}"
    if config.max_queue_rows < config.max_batch_size:
        raise ValueError(fault_text("max_queue_rows", config.max_queue_rows, least))
    if 0 < config.max_request_rows < config.max_batch_size:
        raise ValueError(fault_text("max_request_rows", config.max_request_rows, f"0 or {least}"))


def _check_batch_sizes(max_batch_size: int, sizes: list[int] | None) -> None:
    if sizes is None:
        return
    if not sizes or any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ValueError(fault_text("allowed_batch_sizes", sizes, "whole numbers that increase"))
    if sizes[-1] != max_batch_size:  # the words of TensorFlow Serving, spec 6.3
        raise ValueError(
            "Last entry in allowed_batch_sizes must match max_batch_size; "
            f"last entry was {sizes[-1]}; expected {max_batch_size}"
        )
