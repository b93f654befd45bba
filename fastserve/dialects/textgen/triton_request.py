"""Bodies of MindIE's Triton endpoints as what is asked of a model (spec 3.2, 3.3). What is wrong is told as
/infer does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastserve.config import TextgenOptions
from fastserve.dialects.textgen.bodies import is_integer
from fastserve.dialects.textgen.infer_request import Asked, make_asked
from fastserve.dialects.textgen.inputs import MOST_TOKEN, Inputs, check_length, check_tokens
from fastserve.dialects.textgen.parameters import MOST_INT, Rule, make_rules, read_parameters, take
from fastserve.errors import invalid

_ID = re.compile(r"[a-zA-Z0-9_-]{1,256}\Z")
OUTPUT = "output0"
_ALLOWED_HERE = {
    "top_k": Rule(
        "top_k",
        "integer",
        lambda value: -1 <= value <= MOST_INT,
        f"Parameter top_k must be in -1 || [0,{MOST_INT}], got {{}}",
    ),
    "top_p": Rule(
        "top_p", "float", lambda value: 0 < value <= 1, "Parameter top_p must be in (0.0,1.0], got {}."
    ),
}


@dataclass(frozen=True, slots=True)
class TokensAsked:
    """A token infer: the request, and what its output is called."""

    asked: Asked
    output: str


@lru_cache(maxsize=8)
def triton_rules(options: TextgenOptions) -> tuple[Rule, ...]:
    """Those of /infer, where 0 and 1.0 may be said for off; and two that do nothing here."""
    rules = (_ALLOWED_HERE.get(rule.name, rule) for rule in make_rules(options))
    return (*rules, Rule("batch_size", "unsigned"), Rule("perf_stat", "boolean"))


def read_id(body: Mapping[str, Any]) -> str:
    """The client's id, or one made here. Raises ServeError."""
    given = take(body, "id", "string")
    if given is None:
        return secrets.token_hex(8)
    if not _ID.match(given):
        raise invalid("Parameter id must match ^[a-zA-Z0-9_-]{1,256}$.")
    return str(given)


def read_text(body: Any, options: TextgenOptions, *, stream: bool) -> Asked:
    """A generate or generate_stream. Raises ServeError."""
    body = body if isinstance(body, dict) else {}
    request_id, text = read_id(body), body.get("text_input")
    if text is None:
        raise invalid("The text_input not found.")
    if not isinstance(text, str):
        raise invalid("text_input must be string type.")
    check_length(text, options.input_chars)
    given = read_parameters(triton_rules(options), take(body, "parameters", "object") or {})
    return make_asked(Inputs(text), given, options, stream=stream, request_id=request_id)


def read_tokens(body: Any, options: TextgenOptions) -> TokensAsked:
    """A token infer. Raises ServeError."""
    body = body if isinstance(body, dict) else {}
    request_id = read_id(body)
    inputs = take(body, "inputs", "array")
    if inputs is None or len(inputs) != 1:
        raise invalid("Inputs count must be 1.")
    if not isinstance(inputs[0], dict):
        raise invalid("inputs must be object type.")
    tokens, output = _read_input(inputs[0]), _read_output(take(body, "outputs", "array"))
    said = {**(take(inputs[0], "parameters", "object") or {}), **(take(body, "parameters", "object") or {})}
    given = read_parameters(triton_rules(options), said)
    return TokensAsked(
        make_asked(Inputs(tokens), given, options, stream=False, request_id=request_id), output
    )


def _read_input(part: Mapping[str, Any]) -> list[int]:
    name, shape, data = part.get("name"), part.get("shape"), part.get("data")
    if not isinstance(name, str) or not name:
        raise invalid("Inputs name must be non-empty string.")
    if part.get("datatype") != "UINT32":
        raise invalid("Inputs datatype must be UINT32.")
    if not isinstance(shape, list) or not all(map(is_integer, shape)):
        raise invalid("Inputs shape must be an array of integers.")
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1):
        raise invalid("Inputs shape must be [n] or [1,n].")
    if not isinstance(data, list):
        raise invalid("Inputs data must be an array.")
    if len(shape) == 2 and len(data) == 1 and isinstance(data[0], list):
        data = data[0]
    if len(data) != shape[-1]:
        raise invalid(f"Inputs data length must be equal to shape {shape[-1]}, but got {len(data)}.")
    if not all(is_integer(token) and 0 <= token <= MOST_TOKEN for token in data):
        raise invalid(f"Inputs data must be integers in [0, {MOST_TOKEN}].")
    check_tokens(len(data))
    return data


def _read_output(outputs: list[Any] | None) -> str:
    if outputs is None:
        return OUTPUT
    name = outputs[0].get("name") if len(outputs) == 1 and isinstance(outputs[0], dict) else None
    if len(outputs) != 1:
        raise invalid("Outputs count must be 1.")
    if not isinstance(name, str) or not name:
        raise invalid("Outputs name must be non-empty string.")
    return name
