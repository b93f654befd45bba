"""What every backend is, and what it may say. No framework is imported here, and no numpy at run time:
the owner of the workers reads this file too.

A backend runs one loaded version inside a worker process. Its life:

    create(config, version_dir, instance) -> load() -> run(inputs) ... -> close()
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fastserve.backends.device_faults import DeviceLost, is_out_of_memory
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]

# What an error may cost a log line, a control message and a reply.
WORDS_MAX = 2048
_RANK_MAX = 64
# How an output of the wrong number of rows is told; a dialect with words of its own for it reads it back.
WRONG_ROWS = "output {name!r} has shape {shape}, but the batch has {rows} rows"
_WRONG_ROWS = re.compile(r"output .+ has shape \[(.*)\], but the batch has \d+ rows")
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?/(?:[^\s/'\"():,;<>\[\]]+/)+([^\s/'\"():,;<>\[\]]*)")
_POINTER = re.compile(r"0x[0-9a-fA-F]{4,}")
_PROCESS = re.compile(r"\b([Pp]rocess) \d+")  # torch says who has the memory that is missing


class CompletedConfig(ConfigError):
    """The model has completed fields of its configuration that its queue is made by: load it again with
    these. `fields` are of the Triton form."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        said = ", ".join(f"{name}: {value}" for name, value in fields.items())
        super().__init__(f"auto_complete_config sets {said}")
        self.fields = dict(fields)


class Backend(Protocol):
    """One loaded version on one device. `inputs` and `outputs` are true once `load` has returned."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]

    def load(self) -> None:
        """Loads the model; may take minutes. Whatever it raises fails the load, in those words."""

    def run(self, inputs: Arrays) -> Arrays:
        """Runs one batch: arrays by name in, arrays by name out.

        Shapes are `[rows, *spec.shape]`, or `spec.shape` when max_batch_size is 0. Numbers are arrays
        of the spec's dtype (bfloat16: uint16 holding its bits), strings are object arrays of bytes
        (in; out also of str). The inputs are read-only views of shared memory, valid only during the
        call. Every declared output is returned, exactly of its dtype, with as many rows as came in.
        A ServeError keeps its kind and words; anything else is INTERNAL.
        """

    def close(self) -> None:
        """Gives everything back; called once, also after a load that failed half-way."""


def read_specs(declared: Mapping[str, Any] | None) -> dict[str, TensorSpec]:
    """`{name: {dtype, shape}}`, as model.yaml and the control line have it, as specs.

    Raises ConfigError naming the tensor and the field.
    """
    return {name: _read_spec(name, spec) for name, spec in (declared or {}).items()}


def write_specs(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """The way back of `read_specs`."""
    return {
        name: {"dtype": spec.dtype.name, "shape": None if spec.shape is None else list(spec.shape)}
        for name, spec in specs.items()
    }


def explain(error: BaseException, *private: str) -> str:
    """What a client may read of an exception: its own words, without folders, pointers or traceback.

    `private` are texts that must not appear (the version's folder). Hardening I3, C5.
    """
    if isinstance(error, ServeError | ConfigError | DeviceLost):
        return clean(str(error), *private)
    if isinstance(error, SystemExit):
        return f"the model called exit({error.code!r})"
    text = str(error)
    return clean(f"{type(error).__name__}: {text}" if text else type(error).__name__, *private)


def clean(text: str, *private: str) -> str:
    """A text without absolute paths (their last part stays), pointers, numbers of processes and control
    characters, cut to WORDS_MAX characters."""
    text = text[: 4 * WORDS_MAX]
    for secret in filter(None, private):
        text = text.replace(secret + "/", "").replace(secret, "(the version's folder)")
    text = _PROCESS.sub(r"\1 …", _POINTER.sub("0x…", _PATH.sub(r"\1", text)))
    text = "".join(char if char.isprintable() else " " for char in text).strip()
    return text if len(text) <= WORDS_MAX else text[: WORDS_MAX - 1] + "…"


def wrong_rows_rank(words: str) -> int | None:
    """The rank of the output that WRONG_ROWS tells of; None when these are other words."""
    found = _WRONG_ROWS.fullmatch(words)
    return len(found[1].split(", ")) * bool(found[1]) if found else None


def kind_of(error: BaseException) -> Kind:
    """The kind a failure of the model's own code is told with."""
    if isinstance(error, ServeError):
        return error.kind
    if isinstance(error, DeviceLost):
        return Kind.UNAVAILABLE
    if is_out_of_memory(error):
        return Kind.RESOURCE_EXHAUSTED
    return Kind.FAILED_PRECONDITION if isinstance(error, ConfigError) else Kind.INTERNAL


def _read_spec(name: str, spec: Any) -> TensorSpec:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("dtype"), str):
        raise ConfigError(f"tensor {name!r} must have a dtype and a shape")
    if spec["dtype"] not in DTYPES:
        raise ConfigError(f"tensor {name!r}: dtype {spec['dtype']!r} is not one of {', '.join(DTYPES)}")
    shape = spec.get("shape")
    if shape is None:
        return TensorSpec(name, DTYPES[spec["dtype"]], None)
    if not isinstance(shape, list | tuple) or len(shape) > _RANK_MAX or not all(map(_is_length, shape)):
        raise ConfigError(f"tensor {name!r}: shape must be a list of lengths, -1 for any, or null")
    return TensorSpec(name, DTYPES[spec["dtype"]], tuple(shape))


def _is_length(length: Any) -> bool:
    return isinstance(length, int) and not isinstance(length, bool) and -1 <= length < 2**63
