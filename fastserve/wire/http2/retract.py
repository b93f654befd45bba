"""Requests that their client takes back in the same breath: HEADERS and RST_STREAM in one read of the socket.

    [REQUEST 7, HEADERS 9, DATA 9, RST 9, RST 7]  -->  [RETRACTED 7, RETRACTED 9]

They never begin: no model is asked to run what nobody waits for. Without this each costs as much as a request
that is answered, and a rapid reset keeps the loop from everybody else for as long as its points last. What
the header blocks do to the decoder's table, what the bytes do to windows, and what it all costs is as ever.
"""

from __future__ import annotations

from typing import Any

from fastserve._ext.http2_frames import (
    DATA,
    HEADERS,
    PRIORITY,
    REQUEST,
    RST_STREAM,
    WINDOW_UPDATE,
)
from fastserve.wire.http2 import calm

RETRACTED = 32  # beside the kinds of http2_frames: (RETRACTED, cost, stream, header block, bytes of windows)
COSTS = {WINDOW_UPDATE: calm.UPDATE, PRIORITY: calm.PRIORITY}

Event = tuple[int, Any, int, Any, int]


def retract(events: list[Event], last: int) -> list[Event]:
    """The events of one read without what is begun and reset in it. `last`: highest stream begun before."""
    kept: list[Event | None] = []
    begun: dict[int, list[int]] = {}  # by stream: where its frames stand
    for event in events:
        kind, _, number, _, value = event
        if number in begun and kind == RST_STREAM:
            _take_back(kept, begun.pop(number))
            continue
        if number in begun and kind in (DATA, HEADERS, WINDOW_UPDATE, PRIORITY):
            begun[number].append(len(kept))
        elif number in begun:
            del begun[number]  # there is more to this one
        elif number > last and number & 1 and (kind == REQUEST or (kind == HEADERS and not value)):
            last = number
            begun[number] = [len(kept)]
        kept.append(event)
    return [event for event in kept if event is not None]


def _take_back(kept: list[Event | None], frames: list[int]) -> None:
    """Make one event of a request's frames; trailers, if there are any, are another."""
    cost, counted = calm.RESET, 0
    for at in reversed(frames):
        event = kept[at]
        assert event is not None
        kind, flags, number, payload, value = event
        kept[at] = None
        if kind in (REQUEST, HEADERS):
            kept[at] = (RETRACTED, cost, number, payload, counted + (value if kind == REQUEST else 0))
            cost = counted = 0
        elif kind == DATA:
            counted += value
            cost += calm.EMPTY if not flags and not len(payload) else 0
        else:
            cost += COSTS[kind]
