"""The abuse budget of a connection: how much useless work its client may cause. No clock and no timer.

A request that is answered earns more than the frames around it cost; resets, pings, settings, window updates
and empty frames are paid for. A burst of BURST points is free, and each look of the listener, about once a
second, gives PER_LOOK back. A client without points gets GOAWAY with ENHANCE_YOUR_CALM.

    rapid reset: a request and RST_STREAM cost RESET, 33 a second for good, as nghttp2 allows
    a window opened byte by byte costs UPDATE a byte; a frame of DATA that is worth one earns it back

A request and its RST_STREAM in one read of the socket never begin:

    [REQUEST 7, HEADERS 9, DATA 9, RST 9, RST 7]  -->  [RAPID_RESET 7, RAPID_RESET 9]

No model runs for them. Their header blocks still change the decoder's table, their bytes count against
windows, and they cost what they always cost.
"""

from __future__ import annotations

from typing import Any

from fastserve._ext import http2_frames as kinds

BURST = 1000
PER_LOOK = 100
A_TURN = 100  # spent in one turn of the loop, before all other clients have theirs
ANSWERED = 5  # earned
DATA_SENT = 2  # earned: a client sends two WINDOW_UPDATEs for it
USEFUL_BYTES = 1024  # a frame of DATA that is neither this long nor the end of something earns nothing
BOMB = 100  # a header list over the limit: it was read to its end for the table's sake
RESET, REFUSED, MALFORMED, SETTINGS = 3, 2, 3, 4
SETTINGS_PAIRS = 16  # of one SETTINGS: each so many more cost one; RFC 9113 knows six
BROKEN = 20  # a frame that is wrong on a stream whose request may have reached a model: no client means that
PING = UPDATE = PRIORITY = EMPTY = LATE = UNKNOWN = UNASKED = 1
TOO_MANY_PINGS = "too_many_pings"  # what clients of gRPC look for, to ping less often from then on
LINGER_BYTES = 1 << 20  # read off and dropped after the end, so that a reset cannot eat GOAWAY
MOST_UNSENT_ANSWERS = 1000  # acknowledgements and resets that wait for a client that does not read
RAPID_RESET = (
    32  # beside the kinds of http2_frames: (RAPID_RESET, cost, stream, header block, bytes of windows)
)
COSTS = {kinds.WINDOW_UPDATE: UPDATE, kinds.PRIORITY: PRIORITY}
FrameEvent = tuple[int, Any, int, Any, int]


def drop_rapid_resets(events: list[FrameEvent], last: int) -> list[FrameEvent]:
    """Return the events of one read with each request that it begins and resets as one RAPID_RESET.
    `last` is the highest stream begun before."""
    kept: list[FrameEvent | None] = []
    begun: dict[int, list[int]] = {}  # by stream: where its frames stand
    for event in events:
        kind, _, number, _, value = event
        if number in begun and kind == kinds.RST_STREAM:
            _take_back(kept, begun.pop(number))
            continue
        if number in begun and kind in (kinds.DATA, kinds.HEADERS, kinds.WINDOW_UPDATE, kinds.PRIORITY):
            begun[number].append(len(kept))
        elif number in begun:
            del begun[number]  # there is more to this one
        elif (
            number > last and number & 1 and (kind == kinds.REQUEST or (kind == kinds.HEADERS and not value))
        ):
            last = number
            begun[number] = [len(kept)]
        kept.append(event)
    return [event for event in kept if event is not None]


def _take_back(kept: list[FrameEvent | None], frames: list[int]) -> None:
    """Replace a request's frames by one event; trailers are another."""
    cost, counted = RESET, 0
    for at in reversed(frames):
        event = kept[at]
        assert event is not None
        kind, flags, number, payload, value = event
        kept[at] = None
        if kind in (kinds.REQUEST, kinds.HEADERS):
            kept[at] = (RAPID_RESET, cost, number, payload, counted + (value if kind == kinds.REQUEST else 0))
            cost = counted = 0
        elif kind == kinds.DATA:
            counted += value
            cost += EMPTY if not flags and not len(payload) else 0
        else:
            cost += COSTS[kind]


class FrameBacklog:
    """Input of one connection for a later turn of the loop: frames that were read, then bytes."""

    __slots__ = ("data", "events")

    def __init__(self, events: list[FrameEvent], data: bytes | memoryview) -> None:
        self.events = [_own(event) for event in events]
        self.data = memoryview(data)

    def __len__(self) -> int:
        return len(self.data)

    def add(self, scratch: bytearray, nbytes: int) -> None:
        """Append bytes."""
        self.data = memoryview(bytes(self.data) + scratch[:nbytes])


def _own(event: FrameEvent) -> FrameEvent:
    """Copy a payload that lies in the read buffer."""
    kind, flags, number, payload, value = event
    return (kind, flags, number, bytes(payload), value) if isinstance(payload, memoryview) else event
