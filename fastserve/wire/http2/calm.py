"""How much work without use a client may cause: one number for each connection, no clock and no timer.

A request that is answered earns more than the frames around it cost; what a client sends beside that
(resets, pings, settings, updates of windows, empty frames) is paid from what it has. A burst of BURST is
free, and each look of the listener, about once a second, gives some back. Who is out of it is told
ENHANCE_YOUR_CALM.

    rapid reset: a request and RST_STREAM cost RESET, 33 a second for good, as nghttp2 allows (retract.py)
    a window opened byte by byte costs UPDATE a byte; a frame of DATA that is worth one earns it back
"""

from __future__ import annotations

BURST = 1000
PER_LOOK = 100
A_TURN = 100  # spent in one turn of the loop, before everybody else has theirs (behind.py)
ANSWERED = 5  # earned
DATA_SENT = 2  # earned: a client tells of two windows for it
USEFUL_BYTES = 1024  # a frame of DATA that is neither this long nor the end of something earns nothing
BOMB = 100  # a header list over the limit: it was read to its end for the table's sake
RESET, REFUSED, MALFORMED, SETTINGS = 3, 2, 3, 4
SETTINGS_PAIRS = 16  # of one SETTINGS: each so many more cost one; RFC 9113 knows six
BROKEN = 20  # a frame that is wrong on a stream whose request may have reached a model: no client means that
PING = UPDATE = PRIORITY = EMPTY = LATE = UNKNOWN = UNASKED = 1
TOO_MANY_PINGS = "too_many_pings"  # what clients of gRPC look for, to ping less often from then on
LINGER_BYTES = 1 << 20  # read off and dropped after the end, so that a reset cannot eat GOAWAY
MOST_UNSENT_ANSWERS = 1000  # acknowledgements and resets that wait for a client that does not read
