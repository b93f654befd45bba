"""What the models of one process may take of its devices, together: torch's allocator has one bound for a
process, and a worker that is shared has several models with a bound each.
"""

from __future__ import annotations

import threading
from typing import Any

_claims: dict[int, list[int]] = {}  # by device: a claim for each model there, 0 for one without a bound
_turn = threading.Lock()


def bound_memory(torch: Any, device: Any, nbytes: int) -> None:
    """Hold what this process allocates on the device to what its models claim (`device_memory_mb`); where one
    of them claims nothing there is no bound."""
    with _turn:
        if device.type == "cuda":
            _claims.setdefault(device.index, []).append(nbytes)
            _hold(torch, device)


def unbound_memory(torch: Any, device: Any, nbytes: int) -> None:
    """The way back; nothing for a claim that was not made."""
    with _turn:
        if device is not None and device.type == "cuda" and nbytes in _claims.get(device.index, ()):
            _claims[device.index].remove(nbytes)
            _hold(torch, device)


def _hold(torch: Any, device: Any) -> None:
    claims = _claims[device.index]
    total = torch.cuda.get_device_properties(device).total_memory
    share = min(sum(claims) / total, 1.0) if claims and all(claims) else 1.0
    torch.cuda.set_per_process_memory_fraction(share, device)
