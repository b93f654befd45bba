"""Headers that were understood: where the bytes of a request go, and what stands round those of its answer.

A header is understood against one version and its queue; what it says besides tensors (id, flags, priority)
belongs to a request and is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastserve.dialects.triton_v1.answers import Answer, Answers, HeaderForms
from fastserve.dialects.triton_v1.header import RequestHeader
from fastserve.dialects.triton_v1.inputs import check_header, count_bytes, measure
from fastserve.engine import (
    BatchQueue,
    InputLayout,
    OutputLayout,
    Pending,
    lay_out_inputs,
    lay_out_outputs,
    read_response,
)
from fastserve.errors import ServeError
from fastserve.serving.model_view import ModelView
from fastserve.serving.shared_memory import Destination
from fastserve.serving.shared_memory import Range as SharedPlace
from fastserve.serving.shared_memory import Regions as SharedMemory
from fastserve.tensor import Tensor

MOST_FORMS = 32
Rooms = Mapping[str, Destination]  # shared memory for outputs, by their names


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes of an input come from: the body, or the entry of that number; or shared memory."""

    begin: int
    end: int
    entry: int
    place: SharedPlace | None = None


@dataclass(slots=True)
class Known:
    """What a header says of tensors."""

    header: RequestHeader  # without the id
    nbytes: int  # of the body
    entries: tuple[int, ...]  # the bytes of each raw_input entry
    sources: tuple[Source, ...]  # of the inputs, in the layout_in's order
    layout_in: InputLayout
    layout_out: OutputLayout
    names: tuple[str, ...]  # of the outputs
    places: tuple[SharedPlace, ...]  # of inputs: where each ends, no bytes long
    alone: bool  # the body is nothing but the one input
    stores: bool  # outputs go into shared memory
    raw: bool  # every output is sent as it is
    _forms: dict[Any, tuple[HeaderForms, tuple[int, ...]] | None] = field(default_factory=dict)

    def read(
        self, answers: Answers, queue: BatchQueue, pending: Pending, number: int, rooms: Rooms
    ) -> Answer:
        """The answer of a place, for the request of that id; its views are good until the place is released.
        Raises ServeError when the place failed by itself, or its outputs cannot be sent."""
        found = self.layout_out.read(pending.place, pending.rows) if self.raw else None
        known = None if found is None else self._find_forms(answers, found[0])
        if found is None or known is None:  # classes, shared memory, strings, errors
            response = read_response(queue, pending, self.names)
            return answers.write(replace(self.header, id=number), response.outputs, rooms)
        forms, order = known
        views: list[Any] = found[1]
        if len(views) > 1 or not order:
            views = [views[at] for at in order]
        return Answer(forms, views, number)

    def look(self, shared: SharedMemory) -> None:
        """Raises ServeError when an input is not in shared memory as said. A header may claim any size, and
        memory is taken for it only after this."""
        for place in self.places:
            shared.read(place)

    def _find_forms(self, answers: Answers, form: Any) -> tuple[HeaderForms, tuple[int, ...]] | None:
        """The header of answers of the layout_out's form, and which of its views are sent, in order; None for
        answers that only `Answers` can write."""
        try:
            return self._forms[form]
        except KeyError:
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            found = self._forms[form] = self._learn(answers, form)
            return found

    def _learn(self, answers: Answers, form: Any) -> tuple[HeaderForms, tuple[int, ...]] | None:
        given = {
            name: (at, dtype, shape) for at, (name, dtype, shape) in enumerate(self.layout_out.describe(form))
        }
        order, raws = [], []
        for name in self.names:
            at, dtype, shape = given.get(name, (0, None, ()))
            if dtype is None or not dtype.item_bytes:  # missing, or of no known size
                return None
            order.append(at)
            try:
                raws.append(answers.describe(name, shape, count_bytes(shape, dtype)))
            except ServeError:
                return None
        return answers.forms(self.header.batch_size, raws), tuple(order)


def understand(plan: ModelView, queue: BatchQueue, header: RequestHeader) -> Known | None:
    """What a header says, or None when a request like it needs another look: errors, and strings."""
    try:
        check_header(plan, header)
        measured = {one.name: measure(plan, one, header.batch_size) for one in header.inputs}
    except ServeError:
        return None
    sources = _find_sources(plan, header, {name: nbytes for name, (_, nbytes) in measured.items()})
    if sources is None or header.batch_size > queue.max_rows or sources.keys() != queue.inputs.keys():
        return None
    inputs = {name: Tensor(plan.inputs[name].dtype, measured[name][0], b"") for name in queue.inputs}
    names = tuple(one.name for one in header.outputs)
    try:
        layout_in = lay_out_inputs(queue, inputs, batching=plan.batching)
        layout_out = lay_out_outputs(queue, names)
    except ValueError:  # more axes than a slab's table has room for
        return None
    entries = tuple(one.end - one.begin for one in sources.values() if one.place is None)
    return Known(
        header=replace(header, id=0),
        nbytes=sum(entries),
        entries=entries,
        sources=tuple(sources[name] for name in queue.inputs),
        layout_in=layout_in,
        layout_out=layout_out,
        names=names,
        places=tuple(_end_of(one.place) for one in sources.values() if one.place is not None),
        alone=len(entries) == len(sources) == 1,
        stores=any(one.shared for one in header.outputs),
        raw=not any(one.classes or one.shared for one in header.outputs),
    )


def _find_sources(
    plan: ModelView, header: RequestHeader, sizes: Mapping[str, int]
) -> dict[str, Source] | None:
    """Where each input is, in the header's order; None when one has no known size, or a place of another."""
    found: dict[str, Source] = {}
    at = entry = 0
    for one in header.inputs:
        nbytes, place = sizes[one.name], one.shared
        sized = bool(plan.inputs[one.name].dtype.item_bytes) and nbytes > 0
        if not sized or (place is not None and place.byte_size != nbytes):
            return None
        found[one.name] = Source(at, at + nbytes, entry, place)
        if place is None:
            at, entry = at + nbytes, entry + 1
    return found


def _end_of(place: SharedPlace) -> SharedPlace:
    return replace(place, offset=place.offset + place.byte_size, byte_size=0)
