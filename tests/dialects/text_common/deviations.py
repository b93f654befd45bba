"""Where fastserve answers a conformance case in another way than it is written, on purpose: id -> why."""

DEVIATIONS: dict[str, str] = {}
