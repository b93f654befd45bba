"""Frames of JSON texts (`_ext.infer_frame`), learned as long as that is of use.

A client whose every text is another costs no more than a look.
"""

from __future__ import annotations

from collections.abc import Callable

from fastserve._ext.infer_frame import InferFrame, InferFrames

# Frames never met again, beyond which nothing is learned until so many requests have been missed.
MOST_UNUSED, LEARN_AGAIN = 8, 64


class LearnedFrames:
    """At most `most` of them."""

    def __init__(self, most: int) -> None:
        self._frames = InferFrames(most)
        self.find = self._frames.find
        self._missed = self._vain = 0  # requests without a frame, and those of them that can have none

    def learn(self, make: Callable[[], InferFrame | None]) -> None:
        """Remember the frame of a request that had none; `make` gives None for one that can have none."""
        self._missed += 1
        if self._frames.unused() + self._vain >= MOST_UNUSED:
            if self._missed % LEARN_AGAIN:
                return
            self._frames.forget_unused()
            self._vain = 0
        frame = make()
        if frame is None:
            self._vain += 1
        else:
            self._frames.add(frame)
