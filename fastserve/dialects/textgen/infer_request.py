"""A body of /infer and /infer_token as what is asked of the model (spec 1).

What is wrong is told in the order and the words of the original: inputs, parameters, `stream`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastserve.codec.text import Sampling
from fastserve.config import TextgenOptions
from fastserve.dialects.textgen.inputs import Inputs, read_inputs
from fastserve.dialects.textgen.parameters import Rule, read_parameters, take

CHOOSING = ("temperature", "top_p")
"""Of whom one asks, asks for sampling, unless do_sample says otherwise."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as read."""

    inputs: Inputs
    sampling: Sampling
    seed: int | None = None
    priority: int = 5
    timeout_s: int = 600
    details: bool = False
    stream: bool = False
    request_id: str = ""
    """The client's own, "" for none."""


def read_infer(body: Any, rules: tuple[Rule, ...], options: TextgenOptions) -> Asked:
    """Raises ServeError."""
    body = body if isinstance(body, dict) else {}
    inputs = read_inputs(body, options)
    given = read_parameters(rules, take(body, "parameters", "object") or {})
    return make_asked(inputs, given, options, stream=bool(take(body, "stream", "boolean")))


def make_asked(
    inputs: Inputs, given: dict[str, Any], options: TextgenOptions, *, stream: bool, request_id: str = ""
) -> Asked:
    """A request of parameters that are right."""
    return Asked(
        inputs,
        read_sampling(given),
        seed=given.get("seed"),
        priority=given.get("priority", 5),
        timeout_s=given.get("timeout", min(options.timeout_s, options.most_timeout_s)),
        details=given.get("details", False),
        stream=stream,
        request_id=request_id,
    )


def read_sampling(given: dict[str, Any]) -> Sampling:
    """typical_p and watermark are checked and do nothing, as in the original."""
    top_k = max(0, given.get("top_k", 0))
    chosen = any(name in given for name in CHOOSING) or top_k > 0
    return Sampling(
        max_new_tokens=given.get("max_new_tokens", 20),
        do_sample=given.get("do_sample", chosen),
        temperature=float(given.get("temperature", 1.0)),
        top_k=top_k,
        top_p=float(given.get("top_p", 1.0)),
        repetition_penalty=float(given.get("repetition_penalty", 1.0)),
    )
