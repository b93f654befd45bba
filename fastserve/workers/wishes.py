"""A model's wishes on the control line: JSON in pieces that fit a datagram, answered by one word.

    worker                                   owner
      | -- wish {id, text, more} ------------> |   until more is false; id 0 wants no answer
      | <- told {id, final, ...} ------------- |   with kind and message where it is refused

Once batches run the ControlLine carries them (line.py); before that nothing else comes from the owner, and
the model's own thread reads the answer.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from fastserve.workers.control import Control, PeerGone

PIECE = 16_000  # characters: of 1 to 3 bytes each


def in_pieces(number: int, wish: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages that carry one wish. Raises TypeError for values JSON has not."""
    text = msgspec.json.encode(wish).decode()
    for start in range(0, len(text), PIECE):
        more = start + PIECE < len(text)
        yield {"op": "wish", "id": number, "text": text[start : start + PIECE], "more": more}


class EarlyLine:
    """While the model loads."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._numbers = itertools.count(1)
        self._one_at_a_time = threading.Lock()

    def ask(self, wish: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises PeerGone when the server stops."""
        with self._one_at_a_time:
            number = next(self._numbers)
            self._send(number, wish)
            message = self._control.receive().message
            if message["op"] != "told" or message["id"] != number:
                raise PeerGone("the load was given up")
            return message

    def tell(self, wish: Mapping[str, Any]) -> None:
        self._send(0, wish)

    def _send(self, number: int, wish: Mapping[str, Any]) -> None:
        for piece in in_pieces(number, wish):
            self._control.send(piece)
