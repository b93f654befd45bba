"""Headers that become parameters of the request (spec 4): those whose names hold a configured pattern.

--http-header-forward-pattern '^X-'      X-User: ann  ->  parameters {"X-User": "ann"}
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fastserve.dialects.kserve_v2.errors import invalid
from fastserve.dialects.kserve_v2.parameters import MEANT, Parameters
from fastserve.wire.call import Call


class Forwarding:
    """One pattern; without one nothing is forwarded."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.IGNORECASE) if pattern else None

    def __bool__(self) -> bool:
        return self._pattern is not None

    def add(self, headers: Iterable[tuple[str, str | bytes]], parameters: Parameters) -> None:
        """Put what fits among the model's own parameters. Raises ServeError for a name that has a meaning."""
        assert self._pattern is not None
        for name, value in headers:
            if self._pattern.search(name) is None:
                continue
            if name in MEANT or name.startswith("triton_"):
                raise invalid(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
            parameters.own[name] = value.decode("latin-1") if isinstance(value, bytes) else value


def headers_as_sent(call: Call) -> list[tuple[str, str | bytes]]:
    """The call's headers with their names as the client spelled them."""
    spelled = {
        line.partition(b":")[0].lower(): line.partition(b":")[0] for line in call.head.raw.split(b"\r\n")
    }
    return [(spelled.get(name, name).decode("latin-1"), value) for name, value in call.headers]
