"""protobuf's own library as the oracle of proto_outline: a message without its id and its raw tensors."""

from __future__ import annotations

from typing import Any

from tests.oracles.proto_wire import FLAT


def take_apart(data: bytes) -> tuple[Any, str, list[bytes]]:
    """(the rest, id, raw tensors). Raises DecodeError."""
    rest = FLAT.ModelInferRequest.FromString(data)
    request_id, raws = rest.id, list(rest.raw_input_contents)
    rest.ClearField("id")
    rest.ClearField("raw_input_contents")
    return rest, request_id, raws


def read_head(head: bytes) -> Any:
    """A head as a message. Raises DecodeError."""
    return FLAT.ModelInferRequest.FromString(head)
