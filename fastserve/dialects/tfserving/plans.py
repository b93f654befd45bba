"""What is worked out once per signature: its reader, its names, whether it takes raw rows.

Plans belong to one loaded version and never outlive the sight of it: `Plans.of` starts anew when
it is handed another version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from fastserve._ext.json_reader import PredictReader
from fastserve.dialects.tfserving.explain import Shape
from fastserve.repository.signature import DEFAULT_SIGNATURE, Signature
from fastserve.repository.version import Version
from fastserve.tensor import DType, Tensor

_LOOKS_LIKE_JSON = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*["}]')


@dataclass(frozen=True, slots=True)
class RawRows:
    """How a body of bare numbers becomes the one input of a signature (an extension)."""

    name: str
    dtype: DType
    shape: Shape
    row_bytes: int
    batching: bool

    def read(self, body: bytes | bytearray) -> Tensor | None:
        """The body as a tensor over its own bytes, or None when it is no whole number of rows, or is JSON."""
        rows, rest = divmod(len(body), self.row_bytes)
        if rest or rows < 1 or (rows > 1 and not self.batching) or _LOOKS_LIKE_JSON.match(body):
            return None
        return Tensor(self.dtype, (rows, *self.shape) if self.batching else self.shape, body)


@dataclass(frozen=True, slots=True)
class PredictPlan:
    """How predict bodies of one signature are read and written."""

    signature: Signature
    reader: PredictReader
    dtypes: dict[str, DType]
    """The signature's own input names, in order."""
    outputs: tuple[tuple[str, str], ...]
    """The signature's output name, the model's."""
    wanted: tuple[str, ...]
    """The model's outputs to ask for; empty for all of them."""
    raw: RawRows | None


class Plans:
    """The predict plans of one version, made as they are first used."""

    def __init__(self, version: Version, max_depth: int) -> None:
        self.version = version
        self._max_depth = max_depth
        self._made: dict[str, PredictPlan] = {}
        # Every version has a default signature; one without inputs still reads, and always faults.
        self.default = make_plan(version, version.signatures[DEFAULT_SIGNATURE], max_depth)
        self._made[DEFAULT_SIGNATURE] = self.latest = self.default
        self.raw = self.default.raw

    def read_raw(self, body: bytes | bytearray) -> Tensor | None:
        """A body of bare rows for the default signature; None for one that is not, or may not be."""
        return None if self.raw is None else self.raw.read(body)

    def choose(self, name: str) -> PredictPlan | None:
        """The plan of a signature, "" for the default one, which becomes `latest`; None without one."""
        name = name or DEFAULT_SIGNATURE
        plan = self._made.get(name)
        if plan is None:
            signature = self.version.signatures.get(name)
            if signature is None:
                return None
            plan = self._made[name] = make_plan(self.version, signature, self._max_depth)
        self.latest = plan
        return plan


def make_plan(version: Version, signature: Signature, max_depth: int) -> PredictPlan:
    """The plan of one signature of a version."""
    dtypes = {alias: spec.dtype for alias, spec in signature.inputs.items()}
    outputs = tuple(signature.output_names.items())
    everything = {name for _, name in outputs} == version.outputs.keys()
    return PredictPlan(
        signature=signature,
        reader=PredictReader(
            [(alias, dtype.code) for alias, dtype in dtypes.items()],
            signature.name.encode("utf-8", "surrogateescape"),
            is_default=signature.name == DEFAULT_SIGNATURE,
            max_depth=max_depth,
        ),
        dtypes=dtypes,
        outputs=outputs,
        wanted=() if everything else tuple(dict.fromkeys(name for _, name in outputs)),
        raw=_raw_rows(version, signature),
    )


def _raw_rows(version: Version, signature: Signature) -> RawRows | None:
    if len(signature.inputs) != 1:
        return None
    spec = next(iter(signature.inputs.values()))
    if not spec.row_bytes or spec.shape is None or spec.dtype.name == "bool":
        return None
    return RawRows(
        name=next(iter(signature.input_names.values())),
        dtype=spec.dtype,
        shape=spec.shape,
        row_bytes=prod(spec.shape) * spec.dtype.item_bytes,
        batching=version.batching,
    )
