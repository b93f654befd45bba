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

from fastserve.errors import Kind, ServeError
from fastserve.repository.triton_defaults import DTYPE_OF
from fastserve.tensor import DTYPES, DType, Tensor, TensorSpec

STATE_FOLDER = "initial_state"
_FALSE_TRUE = (
    ("int32_false_true", "int32", "<i"),
    ("fp32_false_true", "float32", "<f"),
    ("bool_false_true", "bool", "<?"),
)


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


def read_extras(triton: Mapping[str, Any], folder: Path) -> Extras:
    """The extras of a model whose `folder` has its initial states. Raises ServeError INVALID_ARGUMENT."""
    batching = int(triton.get("max_batch_size") or 0) > 0
    sequence = triton["sequence_batching"]
    controls = tuple(
        _read_control(raw["name"], control)
        for raw in sequence.get("control_input") or ()
        for control in raw.get("control") or ()
    )
    states = tuple(_read_state(raw, folder, batching) for raw in sequence.get("state") or ())
    seen = {output["name"] for output in triton.get("output") or ()}
    return Extras(controls, states, frozenset(s.output for s in states) - seen, batching)


def _read_control(name: str, raw: Mapping[str, Any]) -> Control:
    kind = raw.get("kind") or "CONTROL_SEQUENCE_START"
    if kind == "CONTROL_SEQUENCE_CORRID":
        dtype = DTYPES[DTYPE_OF[raw["data_type"]]]
        return Control(name, dtype, lambda signals: write_id(signals.id, dtype))
    for field, dtype_name, form in _FALSE_TRUE:
        values = raw.get(field)
        if values:
            false, true = (struct.pack(form, value) for value in values)
            return Control(name, DTYPES[dtype_name], _choice(kind, false, true))
    raise ServeError(Kind.INVALID_ARGUMENT, f"sequence batching control '{name}' says no values")


def _choice(kind: str, false: bytes, true: bytes) -> Callable[[Signals], bytes]:
    name = kind.removeprefix("CONTROL_SEQUENCE_").lower()
    return lambda signals: true if getattr(signals, name) else false


def write_id(id: int | str, dtype: DType) -> bytes:
    """A sequence's id as one element. A string becomes a number that is the same each time and, short of a
    collision, nobody else's; a number too large for the type keeps its low bytes."""
    if dtype.item_bytes == 0:
        text = str(id).encode()
        return struct.pack("<I", len(text)) + text
    if isinstance(id, str):
        return blake2b(id.encode(), digest_size=dtype.item_bytes).digest()
    return (id & ((1 << (8 * dtype.item_bytes)) - 1)).to_bytes(dtype.item_bytes, "little")


def _read_state(raw: Mapping[str, Any], folder: Path, batching: bool) -> State:
    dtype = DTYPES[DTYPE_OF[raw["data_type"]]]
    dims = tuple(int(size) for size in raw["dims"])
    initial = (raw.get("initial_state") or [{}])[0]
    first = tuple(int(size) for size in initial.get("dims") or (max(size, 1) for size in dims))
    size = prod(first) * (dtype.item_bytes or 4)  # an empty string is its length, 0
    data = bytes(size)
    if initial.get("data_file"):
        data = _read_file(folder / STATE_FOLDER / initial["data_file"], initial["data_file"])
        if dtype.item_bytes and len(data) != size:
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                f"initial state '{initial.get('name', '')}' for state input '{raw['input_name']}': "
                f"file {initial['data_file']} has {len(data)} bytes, its dims need {size}",
            )
    shape = (1, *first) if batching else first
    spec = TensorSpec(raw["input_name"], dtype, dims)
    return State(raw["input_name"], raw["output_name"], spec, Tensor(dtype, shape, data))


def _read_file(path: Path, name: str) -> bytes:
    if Path(name).name != name:
        raise ServeError(Kind.INVALID_ARGUMENT, f"initial state file {name!r}: not the name of a file")
    try:
        return path.read_bytes()
    except OSError as fault:
        raise ServeError(
            Kind.INVALID_ARGUMENT, f"initial state file {name!r} cannot be read: {fault.strerror}"
        ) from None


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype.name, "shape": list(spec.shape or ())}


def empty_like(tensor: Tensor) -> Tensor:
    """Zeros, or empty strings, of the same shape: what a slot without a request holds."""
    return Tensor(tensor.dtype, tensor.shape, bytes(prod(tensor.shape) * (tensor.dtype.item_bytes or 4)))
