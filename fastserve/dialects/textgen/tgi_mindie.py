"""MindIE's likeness of TGI's requests (spec 3.4): the bounds and words of /infer, and TGI's keys besides.

    read_mindie(b'{"inputs": "a", "parameters": {"top_p": 1.0}}', limits, None, options)
    -> ServeError("Parameter top_p must be in (0.0,1.0], got 1.")

Keys that /infer has not are read as TGI reads them: what this server cannot do is refused there, by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import getrandbits
from typing import Any, cast

import msgspec

from fastserve.config import TextgenOptions
from fastserve.dialects.textgen.asking import SEED_BITS
from fastserve.dialects.textgen.bodies import read_json
from fastserve.dialects.textgen.infer_request import read_sampling
from fastserve.dialects.textgen.inputs import ABNORMAL, read_inputs
from fastserve.dialects.textgen.parameters import Rule, make_rules, read_parameters, take
from fastserve.dialects.textgen.tgi_read import Limits, TgiAsk, read_rest
from fastserve.errors import invalid

MORE = (
    Rule("stop", "array"),
    Rule("truncate", "integer"),
    Rule("return_full_text", "boolean"),
    Rule("decoder_input_details", "boolean"),
    Rule("adapter_id", "string"),
)


def read_mindie(
    data: bytes | bytearray, limits: Limits, streams: bool | None, options: TextgenOptions
) -> TgiAsk:
    """A body of any of the generating paths; `streams` None where the body says it. Raises ServeError."""
    document = read_json(data, options.json_depth)
    body = document if isinstance(document, dict) else {}
    inputs = _read_text(body, options)
    rules = make_rules(options)
    given = take(body, "parameters", "object") or {}
    checked = read_parameters((*rules, *MORE), given)
    said = bool(take(body, "stream", "boolean"))
    others = {key: value for key, value in given.items() if key not in {rule.name for rule in rules}}
    ask = read_rest(inputs, others, limits._replace(best_of=1), said if streams is None else streams)
    ask.parameters.details = checked.get("details")
    ask.parameters.seed = checked.get("seed", getrandbits(SEED_BITS))
    ask.parameters.priority = checked.get("priority")
    ask.parameters.timeout = checked.get("timeout")
    sampling = msgspec.structs.replace(
        read_sampling(checked), frequency_penalty=ask.sampling.frequency_penalty
    )
    return replace(ask, sampling=sampling)


def _read_text(body: Mapping[str, Any], options: TextgenOptions) -> str:
    """These paths take text alone."""
    if isinstance(body.get("inputs"), list):
        raise invalid(ABNORMAL)
    return cast(str, read_inputs({key: body[key] for key in ("inputs",) if key in body}, options).prompt)
