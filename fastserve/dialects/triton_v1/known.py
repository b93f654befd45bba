"""Headers that were understood: where the bytes of a request go, and what stands round those of its answer.

A header is understood against one version and its lane; what it says besides tensors (id, flags, priority)
belongs to a request and is not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fastserve.dialects.triton_v1.answers import Answers
from fastserve.dialects.triton_v1.header import RequestHeader, SharedPlace
from fastserve.dialects.triton_v1.inputs import check_header, measure
from fastserve.dialects.triton_v1.plan import Plan, count_bytes
from fastserve.engine.direct import Intake, Outlet, open_intake, open_outlet
from fastserve.engine.lane import Lane
from fastserve.errors import ServeError
from fastserve.tensor import Tensor

MOST_FORMS = 32


@dataclass(frozen=True, slots=True)
class Written:
    """The answers of one form."""

    order: tuple[int, ...]  # which of the outlet's views, as wanted
    output_bytes: int
    line: bytes  # InferResponseHeader without an id
    binary: bytes
    lines: bytes


@dataclass(slots=True)
class Known:
    """What a header says of tensors."""

    header: RequestHeader
    nbytes: int  # of the body
    # Of each input, in the intake's order: its first byte in the body, its last + 1, or where else it is.
    sources: tuple[tuple[int, int, SharedPlace | None], ...]
    intake: Intake
    outlet: Outlet
    names: tuple[str, ...]  # of the outputs
    shared: bool  # something of it is in shared memory
    raw: bool  # every output is sent as it is
    _written: dict[Any, Written | None] = field(default_factory=dict)

    def written(self, answers: Answers, form: Any) -> Written | None:
        """How answers of the outlet's form are written; None for those only `Answers` can."""
        try:
            return self._written[form]
        except KeyError:
            if len(self._written) >= MOST_FORMS:
                self._written.clear()
            found = self._written[form] = self._learn(answers, form)
            return found

    def _learn(self, answers: Answers, form: Any) -> Written | None:
        given = {
            name: (at, dtype, shape) for at, (name, dtype, shape) in enumerate(self.outlet.describe(form))
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
        forms = answers.forms(self.header.batch_size, raws)
        nbytes = sum(one.nbytes for one in raws)
        return Written(tuple(order), nbytes, forms.line.encode(), forms.binary, forms.lines.encode())


def understand(plan: Plan, lane: Lane, header: RequestHeader) -> Known | None:
    """What a header says, or None when a request like it needs another look: errors, and strings."""
    try:
        check_header(plan, header)
        measured = {one.name: (one.shared, *measure(plan, one, header.batch_size)) for one in header.inputs}
    except ServeError:
        return None
    sources, at = {}, 0
    for name, (place, _, nbytes) in measured.items():
        sized = bool(plan.inputs[name].dtype.item_bytes) and nbytes > 0
        if not sized or (place is not None and place.byte_size != nbytes):
            return None
        sources[name] = (at, at + nbytes, None) if place is None else (0, 0, place)
        at += 0 if place is not None else nbytes
    if header.batch_size > lane.max_rows or sources.keys() != lane.inputs.keys():
        return None
    inputs = {name: Tensor(plan.inputs[name].dtype, measured[name][1], b"") for name in lane.inputs}
    names = tuple(one.name for one in header.outputs)
    try:
        intake = open_intake(lane, inputs, batching=plan.batching)
        outlet = open_outlet(lane, names)
    except ValueError:
        return None
    return Known(
        header=replace(header, id=0),
        nbytes=at,
        sources=tuple(sources[name] for name in lane.inputs),
        intake=intake,
        outlet=outlet,
        names=names,
        shared=any(one.shared for one in header.inputs) or any(one.shared for one in header.outputs),
        raw=not any(one.classes or one.shared for one in header.outputs),
    )
