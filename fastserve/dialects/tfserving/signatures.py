"""Which version and which signature a request is for, and what predict works out once for each signature.

version = find_version(catalog, target)
view = service.signatures.of(version).find(name)        view.reader, view.wanted, view.rows
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from fastserve._ext.json_reader import PredictReader
from fastserve.codec.client_text import to_bytes
from fastserve.dialects.tfserving.document import MAX_DEPTH
from fastserve.dialects.tfserving.routes import Target
from fastserve.errors import Kind, ServeError, invalid
from fastserve.repository.catalog import Catalog
from fastserve.repository.signature import DEFAULT_SIGNATURE, Signature
from fastserve.repository.version import Version
from fastserve.tensor import DType, Tensor
from fastserve.wire.arrived import Arrived

_LOOKS_LIKE_JSON = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*["}]')
_MAY_BE_JSON = re.compile(rb'[ \t\r\n]*(?:\Z|\{[ \t\r\n]*(?:\Z|["}]))')  # its beginning


def find_version(catalog: Catalog, target: Target) -> Version:
    """The available version a target names. Raises ServeError; an unknown label is 400 (spec 1.7)."""
    if target.label is not None:
        version = catalog.labelled(target.name, target.label)
        if version is None:
            raise invalid(f"Unrecognized servable version label: {target.label}")
        return version
    version = catalog.available(target.name, target.version)
    if version is None:
        which = "Latest({})" if target.version is None else "Specific({}, {})"
        wanted = which.format(target.name, target.version)
        raise ServeError(Kind.NOT_FOUND, f"Servable not found for request: {wanted}")
    return version


def find_signature(version: Version, name: str) -> Signature:
    """The signature of that name, "" for the default one. Raises ServeError in the words of Classify and
    Regress; Predict has its own."""
    signature = version.signatures.get(name or DEFAULT_SIGNATURE)
    if signature is None:
        raise invalid(f"No signature was found with the name: {name or DEFAULT_SIGNATURE}")
    return signature


@dataclass(frozen=True, slots=True)
class RawRows:
    """How a body of bare numbers becomes the one input of a signature (an extension)."""

    dtype: DType
    shape: tuple[int, ...]
    row_bytes: int
    batching: bool

    def count(self, body: bytes | bytearray) -> int:
        """The rows of a body; 0 when it is no whole number of them, or is JSON."""
        rows = self._divide(len(body))
        return 0 if rows and _LOOKS_LIKE_JSON.match(body) else rows

    def count_arrived(self, body: Arrived) -> int:
        """The same of a body whose beginning is known; 0 also when it may yet turn out to be JSON."""
        rows = self._divide(len(body))
        return 0 if rows and _MAY_BE_JSON.match(body.begin) else rows

    def _divide(self, nbytes: int) -> int:
        rows, rest = divmod(nbytes, self.row_bytes)
        return 0 if rest or (rows > 1 and not self.batching) else rows

    def read(self, body: bytes | bytearray) -> Tensor | None:
        """The body as a tensor over its own bytes; None when it is no rows."""
        rows = self.count(body)
        shape = (rows, *self.shape) if self.batching else self.shape
        return Tensor(self.dtype, shape, body) if rows else None


@dataclass(frozen=True, slots=True)
class SignatureView:
    """How predict bodies of one signature are read and written."""

    signature: Signature
    reader: PredictReader
    wanted: tuple[str, ...]
    """The model's outputs to ask for; empty for all of them."""
    rows: RawRows | None


class Signatures:
    """Those of one version as predict sees them, made as they are first asked for."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self._made: dict[str, SignatureView] = {}
        # Every version has a default signature; one without inputs still reads, and always faults.
        self.default = self.latest = self._make(version.signatures[DEFAULT_SIGNATURE])

    def find(self, name: str) -> SignatureView:
        """That of a name, "" for the default one, which becomes `latest`. Raises ServeError."""
        signature = self.version.signatures.get(name or DEFAULT_SIGNATURE)
        if signature is None:
            text = f'Serving signature name: "{name or DEFAULT_SIGNATURE}" not found in signature def'
            raise invalid(text)
        if not signature.inputs:
            raise invalid(f"Failed to get input map for signature: {name or 'DEFAULT'}")
        self.latest = self._made.get(signature.name) or self._make(signature)
        return self.latest

    def _make(self, signature: Signature) -> SignatureView:
        names = signature.output_names.values()
        view = self._made[signature.name] = SignatureView(
            signature,
            PredictReader(
                [(alias, spec.dtype.code) for alias, spec in signature.inputs.items()],
                to_bytes(signature.name),
                is_default=signature.name == DEFAULT_SIGNATURE,
                max_depth=MAX_DEPTH,
            ),
            () if set(names) == self.version.outputs.keys() else tuple(dict.fromkeys(names)),
            _raw_rows(signature, self.version.batching),
        )
        return view


def _raw_rows(signature: Signature, batching: bool) -> RawRows | None:
    if len(signature.inputs) != 1:
        return None
    spec = next(iter(signature.inputs.values()))
    if not spec.row_bytes or spec.shape is None or spec.dtype.name == "bool":
        return None
    return RawRows(spec.dtype, spec.shape, prod(spec.shape) * spec.dtype.item_bytes, batching)
