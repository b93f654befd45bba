"""The tensors of a sequence model that no client sends: control inputs, and states carried along.

    READY START END CORRID    one element a request, from `control_input`
    states                    what the last request of the sequence left, from `state`

Shapes here are without the batch axis where they describe the model, and with it in tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from fastserve.config.confined import read_confined
from fastserve.config.options import SequenceControl, SequenceOptions, SequenceState
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import DTYPES, DType, Tensor, TensorSpec

STATE_FOLDER = "initial_state"
STATE_BYTES = 16 << 20  # of a file of strings; others have as many as their dims say
_FORMS: dict[str, tuple[str, Callable[[float], float]]] = {
    "int32": ("<i", int),
    "float32": ("<f", float),
    "bool": ("<?", bool),
}


@dataclass(frozen=True, slots=True)
class Signals:
    """What a request's controls say. A slot without a request has `ready` false."""

    start: bool = False
    ready: bool = False
    end: bool = False
    id: int | str = 0


@dataclass(frozen=True, slots=True)
class Control:
    """One control input: its name, type and how its element comes from the signals."""

    name: str
    dtype: DType
    write: Callable[[Signals], bytes]


@dataclass(frozen=True, slots=True)
class State:
    """One state: the input that gets it, the output that leaves it, and what it begins with."""

    input: str
    output: str
    spec: TensorSpec
    first: Tensor


@dataclass(frozen=True, slots=True)
class Extras:
    """All of them. `hidden` outputs are no outputs of the model for clients."""

    controls: tuple[Control, ...]
    states: tuple[State, ...]
    hidden: frozenset[str]
    batching: bool

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """As model.yaml's inputs, for the worker."""
        found = {c.name: {"dtype": c.dtype.name, "shape": [1]} for c in self.controls}
        return found | {s.input: _described(s.spec) for s in self.states}

    @property
    def outputs(self) -> dict[str, dict[str, Any]]:
        """As model.yaml's outputs, for the worker."""
        return {s.output: _described(s.spec) for s in self.states}

    def write(self, signals: Signals, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of one request."""
        shape = (1, 1) if self.batching else (1,)
        found = {c.name: Tensor(c.dtype, shape, c.write(signals)) for c in self.controls}
        for one in self.states:
            fresh = signals.start or one.output not in state
            found[one.input] = one.first if fresh else state[one.output]
        return found

    def keep(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The states a request left behind, copied; hidden outputs are taken out of `outputs`."""
        kept = {}
        for one in self.states:
            if one.output in outputs:
                tensor = outputs[one.output]
                kept[one.output] = Tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
        for name in self.hidden:
            outputs.pop(name, None)
        return kept


def open_extras(options: SequenceOptions, folder: Path, *, batching: bool) -> Extras:
    """The extras of a model whose `folder` has its initial states. Raises ServeError INVALID_ARGUMENT."""
    controls = tuple(_open_control(given) for given in options.controls)
    states = tuple(_open_state(given, folder, batching) for given in options.states)
    return Extras(controls, states, frozenset(s.output for s in options.states if s.hidden), batching)


def _open_control(given: SequenceControl) -> Control:
    dtype, signal = DTYPES[given.dtype], given.signal
    if signal == "id":
        return Control(given.name, dtype, lambda signals: write_id(signals.id, dtype))
    if not given.values:
        text = f"sequence batching control '{given.name}' says no values"
        raise ServeError(Kind.INVALID_ARGUMENT, text)
    form, number = _FORMS[given.dtype]
    false, true = (struct.pack(form, number(value)) for value in given.values)
    return Control(given.name, dtype, lambda signals: true if getattr(signals, signal) else false)


def write_id(id: int | str, dtype: DType) -> bytes:
    """A sequence's id as one element. A string becomes a number that is the same each time and, short of a
    collision, nobody else's; a number too large for the type keeps its low bytes."""
    if dtype.item_bytes == 0:
        text = str(id).encode()
        return struct.pack("<I", len(text)) + text
    if isinstance(id, str):
        return blake2b(id.encode(), digest_size=dtype.item_bytes).digest()
    return (id & ((1 << (8 * dtype.item_bytes)) - 1)).to_bytes(dtype.item_bytes, "little")


def _open_state(given: SequenceState, folder: Path, batching: bool) -> State:
    dtype, first = DTYPES[given.dtype], tuple(given.first_shape)
    size = prod(first) * (dtype.item_bytes or 4)  # an empty string is its length, 0
    data = bytes(size)
    if given.first_file:
        data = _read_file(folder, given.first_file, size if dtype.item_bytes else STATE_BYTES)
        if dtype.item_bytes and len(data) != size:
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                f"initial state '{given.first_name}' for state input '{given.input}': "
                f"file {given.first_file} has {len(data)} bytes, its dims need {size}",
            )
    shape = (1, *first) if batching else first
    spec = TensorSpec(given.input, dtype, tuple(given.shape))
    return State(given.input, given.output, spec, Tensor(dtype, shape, data))


def _read_file(folder: Path, name: str, most_bytes: int) -> bytes:
    if Path(name).name != name:
        raise ServeError(Kind.INVALID_ARGUMENT, f"initial state file {name!r}: not the name of a file")
    try:
        return read_confined(folder, f"{STATE_FOLDER}/{name}", most_bytes)
    except ConfigError as fault:
        raise ServeError(Kind.INVALID_ARGUMENT, f"initial state file {fault}") from None


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype.name, "shape": list(spec.shape or ())}


def empty_like(tensor: Tensor) -> Tensor:
    """Zeros, or empty strings, of the same shape: what a slot without a request holds."""
    return Tensor(tensor.dtype, tensor.shape, bytes(prod(tensor.shape) * (tensor.dtype.item_bytes or 4)))
