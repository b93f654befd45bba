"""Bodies of TGI's API (spec 7), and of MindIE's compatibility mode of it (spec 3.4): keys, bounds, messages.

    read_tgi(b'{"inputs": "", ...}', options, streams=False)
    -> InvalidBody("Input validation error: `inputs` cannot be empty")

    read_mindie(b'{"inputs": "a", "parameters": {"top_p": 1.0}}', options)
    -> ServeError("Parameter top_p must be in (0.0,1.0], got 1.")

null counts as absent everywhere. Bounds that depend on a model are checked by `fit_prompt`. In MindIE's mode
the keys of /infer have /infer's bounds and messages; other keys are read as TGI reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import getrandbits
from typing import Any, cast

import msgspec

from fastserve.codec.generation import Grammar, Sampling
from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.text_common.endpoint_parts import (
    BOUNDS,
    MOST_FLOAT,
    InvalidBody,
    read_json,
    read_typed,
)
from fastserve.dialects.text_common.mindie import (
    ABNORMAL,
    SEED_BITS,
    Rule,
    make_rules,
    read_inputs,
    read_parameters,
    read_sampling,
    take,
)
from fastserve.dialects.text_common.structured import read_tgi_grammar
from fastserve.errors import invalid
from fastserve.serving.text import Info
from fastserve.settings import TextgenOptions

PREFIX = "Input validation error: "
MOST_TOP_TOKENS = 5
MOST_SEED = 2**64 - 1
MOST_INT = 2**31 - 1
DEFAULT_NEW_TOKENS = 100


class TgiParameters(msgspec.Struct, kw_only=True):
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    adapter_id: str | None = None
    priority: int | None = None
    timeout: int | None = None


class TgiBody(msgspec.Struct, kw_only=True):
    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: the same, less what generation needs."""

    inputs: str
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class TgiRequest:
    """One request, as read."""

    inputs: str
    parameters: TgiParameters
    sampling: Sampling
    stop: Sequence[str]
    streams: bool
    best_of: int

    @property
    def details(self) -> bool:
        return bool(self.parameters.details or self.parameters.decoder_input_details)


_body: FreeJSON[TgiBody] = FreeJSON(TgiBody, BOUNDS)
_tokenize: FreeJSON[TokenizeBody] = FreeJSON(TokenizeBody, BOUNDS)


def read_tgi(data: bytes | bytearray, options: TextgenOptions, streams: bool | None = None) -> TgiRequest:
    """A body of any of the generating paths; `streams` None where the body says it. Raises InvalidBody."""
    body = read_typed(_body, data)
    return _make_ask(body, options, bool(body.stream) if streams is None else streams, options.max_best_of)


def _make_ask(body: TgiBody, options: TextgenOptions, streams: bool, most_best_of: int) -> TgiRequest:
    inputs, given = body.inputs, body.parameters or TgiParameters()
    sampling = does_sample(given)
    best_of = _check_best_of(given, most_best_of, sampling, streams)
    _check_ranges(given, options.most_timeout_s)
    _check(not (given.decoder_input_details and streams), PREFILL_STREAM)
    _check(bool(inputs), "`inputs` cannot be empty")
    stop = given.stop or []
    _check(
        len(stop) <= options.max_stops,
        f"`stop` supports up to {options.max_stops} stop sequences. Given: {len(stop)}",
    )
    _check(all(stop), "`stop` sequences cannot be empty")
    return TgiRequest(inputs, given, _read_sampling(given, sampling, streams), stop, streams, best_of)


def read_tokenize(data: bytes | bytearray) -> TokenizeBody:
    """Raises InvalidBody."""
    body = read_typed(_tokenize, data)
    _check(bool(body.inputs), "`inputs` cannot be empty")
    return body


def fit_prompt(ask: TgiRequest, tokens: list[int], info: Info, most: int) -> list[int]:
    """The prompt's tokens, cut where that is asked for; `most` may it have. Raises InvalidBody."""
    truncate = ask.parameters.truncate
    if truncate is not None:
        words = f"`truncate` must be strictly positive and less than {most + 1}. Given: {truncate}"
        _check(truncate <= most, words)
        tokens = tokens[-truncate:]
    size, asked = len(tokens), ask.parameters.max_new_tokens
    _check(size <= most, f"`inputs` must have less than {most + 1} tokens. Given: {size}")
    if asked is not None:
        words = f"`max_new_tokens` must be <= {info.max_new_tokens}. Given: {asked}"
        _check(asked <= info.max_new_tokens, words)
        words = (
            f"`inputs` tokens + `max_new_tokens` must be <= {info.max_tokens}. "
            f"Given: {size} `inputs` tokens and {asked} `max_new_tokens`"
        )
        _check(size + asked <= info.max_tokens, words)
    return tokens


def does_sample(given: TgiParameters) -> bool:
    """Return whether tokens are sampled: a sampling parameter turns it on."""
    ways = (given.temperature, given.top_k, given.top_p, given.typical_p)
    return bool(given.do_sample) or any(way is not None for way in ways)


PREFILL_STREAM = "`decoder_input_details` == true is not supported when streaming tokens"


class ValidationFault(InvalidBody):
    """A request that TGI's validation refuses, told with TGI's prefix."""

    def __init__(self, message: str) -> None:
        super().__init__(PREFIX + message)


def _check(good: bool, words: str) -> None:
    if not good:
        raise ValidationFault(words)


def _check_best_of(given: TgiParameters, most: int, sampling: bool, streams: bool) -> int:
    if given.best_of is None or given.best_of == 1:
        return 1
    words = f"`best_of` must be > 0 and <= {most}. Given: {given.best_of}"
    _check(0 < given.best_of <= most, words)
    _check(sampling, "you must use sampling when `best_of` is > 1")
    _check(given.seed is None, "`seed` must not be set when `best_of` > 1")
    _check(not streams, "`best_of` != 1 is not supported when streaming tokens")
    return given.best_of


def _check_ranges(given: TgiParameters, most_s: int) -> None:
    """Check bounds in the original's order."""
    _check(_within(given.temperature), "`temperature` must be strictly positive")
    _check(_within(given.repetition_penalty), "`repetition_penalty` must be strictly positive")
    penalty = given.frequency_penalty
    _check(penalty is None or -2 <= penalty <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0")
    for key, share in (("top_p", given.top_p), ("typical_p", given.typical_p)):
        _check(share is None or 0 < share < 1, f"`{key}` must be > 0.0 and < 1.0")
    for key, count in (("top_k", given.top_k), ("max_new_tokens", given.max_new_tokens)):
        _check(count is None or count > 0, f"`{key}` must be strictly positive")
        _check(count is None or count <= MOST_INT, f"`{key}` must be <= {MOST_INT}. Given: {count}")
    top = given.top_n_tokens
    _check(
        top is None or 0 <= top <= MOST_TOP_TOKENS,
        f"`top_n_tokens` must be >= 0 and <= {MOST_TOP_TOKENS}. Given: {top}",
    )
    _check(
        given.truncate is None or given.truncate > 0,
        f"`truncate` must be strictly positive. Given: {given.truncate}",
    )
    seed = given.seed
    _check(seed is None or 0 <= seed <= MOST_SEED, f"`seed` must be >= 0 and <= {MOST_SEED}. Given: {seed}")
    _check(given.priority is None or 1 <= given.priority <= 5, "`priority` must be >= 1 and <= 5")
    _check(given.timeout is None or 0 < given.timeout <= most_s, f"`timeout` must be > 0 and <= {most_s}")


def _within(value: float | None) -> bool:
    return value is None or 0 < value <= MOST_FLOAT


def _read_sampling(given: TgiParameters, sampling: bool, streams: bool) -> Sampling:
    """TGI tells how likely each token was in every event, and in details."""
    scored = streams or bool(given.details or given.decoder_input_details) or (given.best_of or 1) > 1
    return Sampling(
        max_new_tokens=given.max_new_tokens or DEFAULT_NEW_TOKENS,
        do_sample=sampling,
        temperature=given.temperature or 1.0,
        top_k=given.top_k or 0,
        top_p=given.top_p or 1.0,
        typical_p=given.typical_p or 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        grammar=_read_grammar(given.grammar),
        logprobs=(given.top_n_tokens or 0) if scored else -1,
        prompt_logprobs=scored and bool(given.decoder_input_details),
    )


def _read_grammar(raw: msgspec.Raw | msgspec.UnsetType) -> Grammar | None:
    try:
        return read_tgi_grammar(raw)
    except InvalidBody as fault:
        raise ValidationFault(fault.message) from None


MORE = (
    Rule("stop", "array"),
    Rule("truncate", "integer"),
    Rule("return_full_text", "boolean"),
    Rule("decoder_input_details", "boolean"),
    Rule("adapter_id", "string"),
)


def read_mindie(data: bytes | bytearray, options: TextgenOptions, streams: bool | None = None) -> TgiRequest:
    """A body of any of the generating paths; `streams` None where the body says it. Raises ServeError."""
    document = read_json(data, options.json_depth)
    body = document if isinstance(document, dict) else {}
    inputs = _read_text_inputs(body, options)
    rules = make_rules(options)
    given = take(body, "parameters", "object") or {}
    checked = read_parameters((*rules, *MORE), given)
    said = bool(take(body, "stream", "boolean"))
    others = {key: value for key, value in given.items() if key not in {rule.name for rule in rules}}
    rest = read_typed(_body, msgspec.json.encode({"inputs": inputs, "parameters": others}))
    ask = _make_ask(rest, options, said if streams is None else streams, 1)
    ask.parameters.details = checked.get("details")
    ask.parameters.seed = checked.get("seed", getrandbits(SEED_BITS))
    ask.parameters.priority = checked.get("priority")
    ask.parameters.timeout = checked.get("timeout")
    sampling = msgspec.structs.replace(
        read_sampling(checked),
        frequency_penalty=ask.sampling.frequency_penalty,
        grammar=ask.sampling.grammar,
    )
    return replace(ask, sampling=sampling)


def _read_text_inputs(body: Mapping[str, Any], options: TextgenOptions) -> str:
    """These paths take text alone."""
    if isinstance(body.get("inputs"), list):
        raise invalid(ABNORMAL)
    return cast(str, read_inputs({key: body[key] for key in ("inputs",) if key in body}, options).prompt)
