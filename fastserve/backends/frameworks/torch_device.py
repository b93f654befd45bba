"""torch's devices in one process: opening one, the bound of its memory, and the lock of CUDA graph captures.

torch's allocator has one bound for a process, and a shared worker has several models with a bound each: the
process may take their sum.

CUDA graphs of one process are captured one at a time, under CAPTURING. A capture forbids unsafe calls to its
own thread alone (`thread_local`), but a thread that synchronises the device or the context while any stream
of it is capturing is refused, and may end that capture (CUDA's guide, "Prohibited and Unhandled Operations").
torch.cuda.graph does so before it begins, ONNX Runtime may when it opens a session, and in a shared worker
these are threads of one context. Runs of a model do not, nor wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.util.memory import gc_paused


def import_torch() -> Any:
    """Import torch. Raises ServeError saying what to install."""
    try:
        with gc_paused():
            import torch
    except ImportError as error:
        raise ServeError(Kind.FAILED_PRECONDITION, find_backend("torch").missing_text) from error
    return torch


def release_cached(torch: Any) -> None:
    """Return torch's cached memory to the device where allowed: not while a thread of this process captures a
    graph. An error of the device is left for the next run to raise."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def device_of(config: Mapping[str, Any]) -> str:
    """Return torch's name of an instance's device. Raises ConfigError."""
    name = str(config.get("device") or "cpu")
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return "cpu"
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"device must be cpu, cuda or cuda:N, not {name!r}")
    return f"cuda:{int(number or 0)}"


def open_device(torch: Any, name: str) -> Any:
    """Return the device, made current for this thread. Raises ConfigError when it does not exist."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "was built without CUDA" if not torch.version.cuda else "sees no GPU"
        raise ConfigError(f"device {name!r}: this PyTorch {torch.__version__} {why}")
    number, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= count:
        raise ConfigError(f"device {name!r}: there are {count} GPUs, counted from 0")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


_claims: dict[int, list[int]] = {}  # by device: a claim for each model there, 0 for one without a bound
_turn = threading.Lock()


def bound_memory(torch: Any, device: Any, nbytes: int) -> None:
    """Bound what this process allocates on the device to the sum of its models' claims (`device_memory_mb`);
    there is no bound while one of them claims nothing."""
    with _turn:
        if device.type == "cuda":
            _claims.setdefault(device.index, []).append(nbytes)
            _hold(torch, device)


def unbound_memory(torch: Any, device: Any, nbytes: int) -> None:
    """Withdraw a claim; nothing happens for one that was not made."""
    with _turn:
        if device is not None and device.type == "cuda" and nbytes in _claims.get(device.index, ()):
            _claims[device.index].remove(nbytes)
            _hold(torch, device)


def _hold(torch: Any, device: Any) -> None:
    claims = _claims[device.index]
    total = torch.cuda.get_device_properties(device).total_memory
    share = min(sum(claims) / total, 1.0) if claims and all(claims) else 1.0
    torch.cuda.set_per_process_memory_fraction(share, device)


CAPTURING = threading.Lock()
