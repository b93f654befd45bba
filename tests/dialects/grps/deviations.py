"""Where fastserve answers a conformance case in another way than it is written, on purpose: id -> why.

There are none: every case of profile `recommended` holds with the defaults, those of `py-ref` with the
settings that test_vectors gives them.
"""

DEVIATIONS: dict[str, str] = {}
