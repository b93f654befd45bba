"""Placeholder until the configuration room is built: only the wire's limits live here yet."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one connection may cost. Bytes, seconds and counts, each named in the error it causes."""

    header_bytes: int = 65536
    header_count: int = 100
    target_bytes: int = 8192
    body_bytes: int = 134217728
    body_chunks: int = 65536
    inflated_bytes: int = 104857600
    inflate_ratio: int = 200
    pipelined_calls: int = 16
    connections: int = 10000
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    body_bytes_per_s: int = 1024
    write_stall_s: float = 30.0
