"""InferRequest and InferResponse: the forms that all dialects share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from struct import Struct

from fastserve._ext.fast_path import ACCOUNT, Account
from fastserve.errors import ServeError
from fastserve.tensor import Tensor
from fastserve.util.spans import RunTrace


@dataclass(frozen=True, slots=True)
class Lent:
    """Client memory on a GPU: `handle` is its cudaIpcMemHandle_t, which a front process passes on to workers.

    `device` is CUDA's number in a process with this server's environment; `region` names it in errors."""

    handle: bytes
    device: int
    offset: int
    nbytes: int
    region: str = ""


@dataclass(slots=True, eq=False)
class BorrowedInputs:
    """Counts the batches that read a request's inputs, where the inputs' memory is used again. A request that
    has failed or was cancelled may still be on its way into a batch, where its rows stay, unused."""

    tensors: Sequence[Tensor] = ()
    readers: int = 0
    on_unread: Callable[[], object] | None = None
    """Called when the last reader has ended."""

    def begin(self) -> None:
        """A batch will read the inputs."""
        self.readers += 1

    def end(self) -> None:
        """A batch does not read them any more."""
        self.readers -= 1
        if not self.readers and self.on_unread is not None:
            self.on_unread()

    def drop(self) -> None:
        """Drop the views of the memory, however long the request itself is still referred to."""
        for tensor in self.tensors:
            tensor.data = b""


@dataclass(slots=True)
class InferRequest:
    """One request for one loaded version.

    `inputs` maps the model's own input names to tensors; with a batching model every tensor
    begins with the same number of rows. `outputs` names the wanted outputs, empty for all.
    `deadline_ns` is on the clock of time.monotonic_ns(), 0 for none. `timeout_us` is how long the request
    may wait in the queue, where the model's policy allows an override, 0 for the model's default; `priority`
    0 is the model's default level. `sequence_id` 0 or "" means the request is no part of a sequence. A list
    given as `times` is filled with the times of the request's batch, as BatchRing.times_ns returns them.
    `lent` and `placed` are inputs and outputs in client memory on a GPU, which workers read and write in
    place (engine/device_memory.py): `data` of such a tensor has the right size, but not the bytes.
    `borrowed` is set where the inputs' memory is used again (engine/relay/). `account` is what the request is
    counted for, and whose turn it needs under overload: that of the task that makes it. `trace` is set by the
    engine while a traced request runs, and filled with the batches that its rows were in; a step of an
    ensemble comes with the ensemble's.
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
    borrowed: BorrowedInputs | None = None
    account: Account | None = field(default_factory=ACCOUNT.get)
    trace: RunTrace | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A warm-up request, which a version's workers run `times` times before it is available; errors call it
    `origin`."""

    request: InferRequest
    origin: str
    times: int = 1


Repeated = Sequence[tuple[str, Tensor]]
"""All outputs of an answer in which a name comes twice, in order; empty for other answers."""


def by_name(told: Repeated) -> tuple[dict[str, Tensor], Repeated]:
    """Return the first output of each name, and the answer's `repeated`."""
    outputs = dict(told)
    if len(outputs) == len(told):
        return outputs, ()
    return outputs | dict(reversed(told)), told


RECORDED_LENGTH = Struct("<Q")
"""Length prefix of each recorded request in the file that workers read."""


@dataclass(slots=True)
class InferResponse:
    """Outputs by the model's own names: views of shared memory, valid until `release()`.

    `final` is false for a response that others of the same request may follow. `error` is set in a stream
    only, for an error that others may follow: there are no outputs then. `repeated` is empty unless the
    model answered with one name twice: then it has all outputs, in order; `outputs` has the first of each.
    """

    outputs: dict[str, Tensor]
    on_release: Callable[[], None] | None = None
    parameters: dict[str, object] = field(default_factory=dict)
    final: bool = True
    error: ServeError | None = None
    repeated: Repeated = ()

    def in_order(self) -> Iterable[tuple[str, Tensor]]:
        """Return all outputs in the model's order, repeated names included."""
        return self.repeated or self.outputs.items()

    @property
    def nbytes(self) -> int:
        """Size of all outputs in bytes."""
        return sum(memoryview(tensor.data).nbytes for _, tensor in self.in_order())

    def release(self) -> None:
        """Let go of the outputs' memory. Always called, also when the reply could not be written."""
        if self.on_release is not None:
            on_release, self.on_release = self.on_release, None
            self.outputs, self.repeated = {}, ()
            on_release()
