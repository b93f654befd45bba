"""Errors of models and devices: which kind they are, and what a client may read of them.

    out of memory      the batch fails, the worker goes on: the device's memory, and the host's
    a sticky error     the process's context is broken: every later call fails too, and nothing computed since
                       can be trusted. The worker is lost

No framework is imported: each has exceptions of its own, so errors are recognised by their texts. Sticky are
the errors of CUDA's runtime API ("Data types used by CUDA Runtime", cudaError) after which, it says, the
process must be terminated and relaunched.
"""

from __future__ import annotations

import re

from fastserve.backends import model_callbacks
from fastserve.errors import ConfigError, Kind, ServeError

# cudaGetErrorString of the sticky ones; cuBLAS and cuDNN have no such words, and what follows them has.
_STICKY = re.compile(
    "|".join(
        (
            "an illegal memory access was encountered",  # 700
            "the launch timed out and was terminated",  # 702
            "context is destroyed",  # 709
            "device-side assert triggered",  # 710
            "hardware stack error",  # 714
            "an illegal instruction was encountered",  # 715
            "misaligned address",  # 716
            "operation not supported on global/shared address space",  # 717
            "invalid program counter",  # 718
            "unspecified launch failure",  # 719
            "uncorrectable ECC error encountered",  # 214
            "uncorrectable NVLink error detected",  # 220
            "Invalid access of peer GPU memory over nvlink",  # 221
            "tensor memory not completely freed",  # 721
            "failed on a device that was removed|GPU is lost|fallen off the bus",
            r"CUDA error: unknown error",  # 999
        )
    ),
    re.IGNORECASE,
)

_MEMORY = re.compile(
    "|".join(
        (
            r"(CUDA|HIP) out of memory",  # torch
            r"cuda.*: out of memory",  # CUDA itself, and ONNX Runtime of it
            "CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
            "Failed to allocate memory for requested buffer",  # ONNX Runtime's arena
            r"std::bad_alloc|bad allocation",  # ONNX Runtime, of the host
            r"can't allocate memory|not enough memory",  # torch, of the host
            "OOM when allocating tensor",  # TensorFlow
        )
    ),
    re.I,
)

_SAID = 300


class DeviceLost(BaseException):
    """The device is unusable for this process. Not an Exception: a handler of a batch's failure must not
    catch it and answer from memory that cannot be trusted."""

    def __init__(self, error: BaseException | str) -> None:
        words = str(error).strip().partition("\n")[0]
        super().__init__(f"its GPU has failed, and it answers no more: {words[:_SAID]}")


def is_lost(error: BaseException) -> bool:
    """Return whether the error, or one it was raised from, is sticky."""
    return any(isinstance(one, DeviceLost) or bool(_STICKY.search(str(one))) for one in _chain(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a smaller batch might have gone through."""
    return any(
        isinstance(one, MemoryError)
        or type(one).__name__ == "OutOfMemoryError"
        or bool(_MEMORY.search(str(one)))
        for one in _chain(error)
    )


def is_host_memory_error(error: BaseException) -> bool:
    """Return whether it is Python's MemoryError: the model's own failure (an array of a wrong shape, say),
    not one of the server's capacity."""
    return any(isinstance(one, MemoryError) for one in _chain(error))


def end_if_lost(error: BaseException) -> None:
    """Raise DeviceLost for a sticky error."""
    if is_lost(error):
        raise DeviceLost(error) from error


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


# Most characters of an error in a log line, a control message and a reply.
MAX_TEXT = 2048
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?/(?:[^\s/'\"():,;<>\[\]]+/)+([^\s/'\"():,;<>\[\]]*)")
_POINTER = re.compile(r"0x[0-9a-fA-F]{4,}")
_PROCESS = re.compile(r"\b([Pp]rocess) \d+")  # torch says who has the memory that is missing


def explain(error: BaseException, *private: str) -> str:
    """Return an exception's text for clients and the log: its own words, without folders, pointers or
    traceback.

    `private` are texts that must not appear (the version's folder). Hardening I3, C5.
    """
    if isinstance(error, ServeError | ConfigError | DeviceLost):
        return clean(str(error), *private)
    if isinstance(error, SystemExit):
        return f"the model called exit({error.code!r})"
    text = str(error)
    return clean(f"{type(error).__name__}: {text}" if text else type(error).__name__, *private)


def clean(text: str, *private: str) -> str:
    """Return the text without absolute paths (their last part stays), pointers, process numbers and control
    characters, cut to MAX_TEXT characters."""
    text = text[: 4 * MAX_TEXT]
    for secret in filter(None, private):
        text = text.replace(secret + "/", "").replace(secret, "(the version's folder)")
    text = _PROCESS.sub(r"\1 …", _POINTER.sub("0x…", _PATH.sub(r"\1", text)))
    text = "".join(char if char.isprintable() else " " for char in text).strip()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def kind_of(error: BaseException) -> Kind:
    """Return the error kind of a failure in the model's own code."""
    if isinstance(error, ServeError):
        return error.kind
    if isinstance(error, DeviceLost):
        return Kind.UNAVAILABLE
    if is_out_of_memory(error) and not is_host_memory_error(error):
        return Kind.RESOURCE_EXHAUSTED
    return Kind.FAILED_PRECONDITION if isinstance(error, ConfigError) else Kind.INTERNAL


WORDS = "there is no memory for a batch of {} rows: {}"


def out_of_memory_error(rows: int, error: BaseException) -> ServeError:
    """Return the error of a batch that can be made no smaller. A MemoryError is the model's own failure, and
    not one of the server's capacity."""
    kind = Kind.INTERNAL if is_host_memory_error(error) else Kind.RESOURCE_EXHAUSTED
    return ServeError(kind, WORDS.format(rows, explain(error)))


def count_out_of_memory() -> None:
    """Count a batch that failed for want of memory, whatever becomes of it. Sent at once: no later batch may
    come to carry the count."""
    model_callbacks.notify("no_memory", batches=1)
