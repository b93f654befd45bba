"""What went wrong on a device, told by its words: no framework is imported, and each has exceptions of its
own.

    out of memory      the batch fails, the worker goes on: the device's, and the host's too
    a sticky error     the process's context is broken: every later call fails too, and what it has computed
                       since is not to be believed. The worker is lost

Which errors are sticky: CUDA's runtime API, "Data types used by CUDA Runtime", cudaError: those of which it
says that the process must be terminated and relaunched.
"""

from __future__ import annotations

import re

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
    """The device is of no use to this process any more. Not an Exception: nobody who handles a batch's
    failure may handle this, and answer from memory that cannot be trusted."""

    def __init__(self, error: BaseException | str) -> None:
        words = str(error).strip().partition("\n")[0]
        super().__init__(f"its GPU has failed, and it answers no more: {words[:_SAID]}")


def is_lost(error: BaseException) -> bool:
    """Whether this, or what it was raised from, is a sticky error."""
    return any(isinstance(one, DeviceLost) or bool(_STICKY.search(str(one))) for one in _chain(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might have gone through."""
    return any(
        isinstance(one, MemoryError)
        or type(one).__name__ == "OutOfMemoryError"
        or bool(_MEMORY.search(str(one)))
        for one in _chain(error)
    )


def end_if_lost(error: BaseException) -> None:
    """Raises DeviceLost for a sticky error."""
    if is_lost(error):
        raise DeviceLost(error) from error


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
