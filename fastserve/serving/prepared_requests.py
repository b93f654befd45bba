"""Prepared requests: everything validated for the first request of a given shape, cached so that identical
requests skip parsing and validation.

A dialect's subclass says where inputs come from (`fill`) and how answers are written (`make_writer`,
`write`); where they go, and everything that can go wrong on the way, is the fast path's.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol, TypeVar

from fastserve.engine import (
    BatchQueue,
    InputForm,
    InputLayout,
    OutputForm,
    OutputLayout,
    lay_out_inputs,
    lay_out_outputs,
    request_note,
)
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import DType, Tensor

Key = TypeVar("Key")

Value = TypeVar("Value")


class BoundedDict(dict[Key, Value]):
    """At most `most` entries; then it begins anew. A client that makes up ever new keys only costs itself."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


MOST_FORMS = 64  # of the answers to requests that are as one

Described = Sequence[tuple[str, DType, tuple[int, ...]]]

Memory = bytes | bytearray | memoryview

Later = Coroutine[Any, Any, None]


class HeldMemory(Protocol):
    """Client memory that a request holds until it is answered or given up."""

    def close(self) -> None:
        """Let go of it."""


class PreparedRequest:
    """The way in of such requests, and their way out. `rows` are those of the request at hand."""

    rows: int
    layout_in: InputLayout
    layout_out: OutputLayout
    wanted: tuple[str, ...]
    noted = False  # the model receives more than tensors
    outside = False  # some tensors are in memory of the client's
    seen_parameters: Mapping[str, object] = {}  # of the request, where the model sees them

    def lay_out(
        self, queue: BatchQueue, inputs: Mapping[str, Tensor], wanted: tuple[str, ...], *, batching: bool
    ) -> None:
        """Decide where tensors go. `inputs` have types and shapes, in the model's order, and no data.

        Raises ValueError for more axes than there is room for."""
        self.layout_in = lay_out_inputs(queue, inputs, batching=batching)
        self.layout_out = lay_out_outputs(queue, wanted or list(queue.outputs))
        self.wanted = wanted
        self.inputs, self.batching = inputs, batching
        self.writers: BoundedDict[Any, Any] = BoundedDict(MOST_FORMS)  # by the form of an answer
        self._kept: BoundedDict[Any, OutputForm] = BoundedDict(MOST_FORMS)
        self._heads: BoundedDict[int, bytes] = BoundedDict(MOST_FORMS)

    def lay_out_like(self, queue: BatchQueue, request: InferRequest, *, batching: bool) -> None:
        """Lay out requests like this one, and `tell` the model of them where it sees whole requests."""
        self.lay_out(queue, request.inputs, request.outputs, batching=batching)
        if queue.requests:
            self.tell(request)

    def tell(self, request: InferRequest) -> None:
        """Prepare the note for a model that sees requests: what this one has besides tensors and its id."""
        self.noted, self._told = True, replace(request, inputs={})
        self.seen_parameters = request.parameters
        self._note = request_note(self._told, [])

    # --- what a dialect says -----------------------------------------------------------------------

    def fill(self, source: Any, memory: list[memoryview]) -> bool:
        """Write the inputs; False when the request is not like the others after all. Raises ServeError.
        A source that can be read but once (`Arrived`) is read last: nothing may be wrong after that."""
        raise NotImplementedError

    def note(self, request_id: Any) -> bytes:
        """Return the request's note for the model, where it is `noted`. See `tell`."""
        told = self._told
        if request_id != told.request_id:
            told.request_id = request_id
            self._note = request_note(told, [])
        return self._note

    def hold(self) -> HeldMemory | None:
        """Client memory for outputs, where something is `outside`. Raises ServeError."""
        return None

    def make_writer(self, described: Described) -> Any | None:
        """Make the writer of answers with these outputs; None where `write_response` has to write them."""
        raise NotImplementedError

    def write(
        self, exchange: Any, writer: Any, memory: Sequence[Memory], request_id: Any, held: Any
    ) -> Later | None:
        """Answer with outputs in the order of `layout_out`. A large answer is written by the returned
        coroutine, in a thread, with a writer of its own. Raises ServeError."""
        raise NotImplementedError

    def write_response(
        self, exchange: Any, response: InferResponse, request_id: Any, held: Any
    ) -> Later | None:
        """Write any response, as the general path does. Raises ServeError."""
        raise NotImplementedError

    # --- what the paths ask ------------------------------------------------------------------------

    def add_writer(self, form: Any, described: Described | None = None) -> Any | None:
        """The writer of answers of this form, from now on in `writers`; None when there can be none."""
        if form not in self.writers:
            described = described or self.layout_out.describe(form)
            repeats = len({name for name, _, _ in described}) < len(described)
            self.writers[form] = None if repeats else self.make_writer(described)
        return self.writers[form]

    def kept_form(self, form: Any) -> OutputForm:
        """An answer's form as the cache keeps it."""
        found = self._kept.get(form)
        if found is None:
            described = self.layout_out.describe(form)
            found = self._kept[form] = tuple([(name, dtype.code, shape) for name, dtype, shape in described])
        return found

    def key_head(self, make: Any) -> bytes:
        """Return the head of these requests' cache keys, as `make` (of a CacheStage) writes it."""
        head = self._heads.get(self.rows)
        if head is None:
            made = make(self._sorts(), self.wanted, self.seen_parameters)
            head = self._heads[self.rows] = made
        return head

    def _sorts(self) -> tuple[InputForm, ...]:
        lead = (self.rows,) if self.batching else ()
        found = []
        for name, tensor in self.inputs.items():
            shape = (*lead, *tensor.shape[len(lead) :])
            found.append((name, tensor.dtype.code, shape, prod(shape) * tensor.dtype.item_bytes))
        return tuple(found)


def put_bytes(source: Memory | ArrivedBody, memory: list[memoryview]) -> bool:
    """`PreparedRequest.fill` of bodies that are nothing but the one input."""
    if isinstance(source, ArrivedBody):
        return source.read_into(memory)
    memory[0][:] = source
    return True


def ordinary_inputs(
    queue: BatchQueue, request: InferRequest, *, batching: bool
) -> tuple[int, dict[str, Tensor]] | None:
    """Rows and inputs of a request that others may be like: types and shapes alone, in the model's order,
    which may look at it. None for one with nothing in a tensor, or strings, which have no fixed size; with
    fewer inputs than columns, which are all filled; with more rows than a batch."""
    inputs = {name: request.inputs[name] for name in queue.inputs if name in request.inputs}
    if not inputs or len(inputs) < len(request.inputs) or (queue.dense and len(inputs) < len(queue.inputs)):
        return None
    rows = next(iter(inputs.values())).shape[0] if batching else 1
    if not 0 < rows <= queue.max_rows:
        return None
    if any(not prod(tensor.shape) * tensor.dtype.item_bytes for tensor in inputs.values()):
        return None
    return rows, {name: Tensor(tensor.dtype, tensor.shape, b"") for name, tensor in inputs.items()}
