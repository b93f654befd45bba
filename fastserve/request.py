"""The neutral pair every dialect reads into and writes from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from struct import Struct

from fastserve.errors import ServeError
from fastserve.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Lent:
    """Memory of a client's on a GPU: `handle` is its cudaIpcMemHandle_t, which a front process passes on.

    `device` is CUDA's number in a process with this server's environment; `region` is for words."""

    handle: bytes
    device: int
    offset: int
    nbytes: int
    region: str = ""


Carry = Callable[[memoryview], Awaitable[None]]
"""Fills memory, as long as an input is, with the input. It is not touched after that, nor after a failure.
Raises ServeError."""


@dataclass(slots=True)
class InferRequest:
    """One request for one loaded version.

    `inputs` maps the model's own input names to tensors; with a batching model every tensor
    begins with the same number of rows. `outputs` names the wanted outputs, empty for all.
    `deadline_ns` is on the clock of time.monotonic_ns(), 0 for none. `timeout_us` is how long the request
    may wait in the queue of a model whose policy lets it say so, 0 for the model's own default; `priority`
    0 is the model's default level. `sequence_id` 0 or "" means the request is no part of a sequence. A list
    given as `times` is filled with the moments of the request's batch, as BatchRing.times_ns has them. `lent`
    and `placed` are inputs and outputs that its workers read and write on their GPU (engine/lending.py): of
    such an input `data` has the size and not the bytes, of such an output the response has no more. The same
    of inputs that are `carried`: their bytes are put where the worker looks once there is a place for them.
    """

    inputs: dict[str, Tensor]
    outputs: tuple[str, ...] = ()
    request_id: str = ""
    priority: int = 0
    deadline_ns: int = 0
    parameters: dict[str, object] = field(default_factory=dict)
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    timeout_us: int = 0
    times: list[int] | None = None
    lent: dict[str, Lent] = field(default_factory=dict)
    placed: dict[str, Lent] = field(default_factory=dict)
    carried: dict[str, Carry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request that a version's workers run so many times before it is available; `origin` is what an error
    calls it."""

    request: InferRequest
    origin: str
    times: int = 1


RECORDED_LENGTH = Struct("<Q")
"""What stands before each recorded request where a version's workers read them."""


@dataclass(slots=True)
class InferResponse:
    """Outputs by the model's own names: views of shared memory, valid until `release()`.

    `final` is false for a response that others of the same request may follow. `error` is set in a stream
    only, for an error that others may follow: there are no outputs then.
    """

    outputs: dict[str, Tensor]
    on_release: Callable[[], None] | None = None
    parameters: dict[str, object] = field(default_factory=dict)
    final: bool = True
    error: ServeError | None = None

    @property
    def nbytes(self) -> int:
        """Of all outputs."""
        return sum(memoryview(tensor.data).nbytes for tensor in self.outputs.values())

    def release(self) -> None:
        """Let go of the outputs' memory. Always called, also when the reply could not be written."""
        if self.on_release is not None:
            on_release, self.on_release = self.on_release, None
            self.outputs = {}
            on_release()
