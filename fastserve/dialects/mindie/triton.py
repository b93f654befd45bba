"""MindIE's Triton endpoints (spec 3.2, 3.3): generation of a named model, and stopping a request by its id.

The routes yield to KServe V2 on a listener that speaks it: the same models have tensors there. Errors are
reported as by /infer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec

from fastserve.config import TextgenOptions
from fastserve.dialects.mindie.generation import FINISH_REASON, MindieCall, milliseconds, quote
from fastserve.dialects.text_common.bodies import WORK, is_integer, read_body
from fastserve.dialects.text_common.mindie import (
    MOST_INT,
    MOST_TOKEN,
    MindieRequest,
    PromptInputs,
    Rule,
    check_length,
    check_tokens,
    make_request,
    make_rules,
    read_parameters,
    refuse,
    take,
)
from fastserve.dialects.text_common.routes import BodyUse, TargetParts, TextRoute
from fastserve.dialects.text_common.service import NAME, TextService
from fastserve.errors import Kind, ServeError, invalid
from fastserve.net.access_control import Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Yields
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import Ending, Frames, Hole, TextModel, Token

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
class TokenInferRequest:
    """A token infer: the request, and what its output is called."""

    asked: MindieRequest
    output: str


@lru_cache(maxsize=8)
def triton_rules(options: TextgenOptions) -> tuple[Rule, ...]:
    """Return the rules of /infer, with 0 and 1.0 allowed for off, and two parameters without effect."""
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


def read_text(body: Any, options: TextgenOptions, *, stream: bool) -> MindieRequest:
    """A generate or generate_stream. Raises ServeError."""
    body = body if isinstance(body, dict) else {}
    request_id, text = read_id(body), body.get("text_input")
    if text is None:
        raise invalid("The text_input not found.")
    if not isinstance(text, str):
        raise invalid("text_input must be string type.")
    check_length(text, options.input_chars)
    given = read_parameters(triton_rules(options), take(body, "parameters", "object") or {})
    return make_request(PromptInputs(text), given, options, stream=stream, request_id=request_id)


def read_tokens(body: Any, options: TextgenOptions) -> TokenInferRequest:
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
    return TokenInferRequest(
        make_request(PromptInputs(tokens), given, options, stream=False, request_id=request_id), output
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


COSTS = b'"first_token_cost":null,"decode_cost":null'


class TritonCall(MindieCall[MindieRequest]):
    """Common part of the two calls: the model is named, and requests have ids."""

    def __init__(self, service: TextService, call: Call, model: str) -> None:
        super().__init__(service, call)
        self._name = model

    async def read(self) -> tuple[TextModel, MindieRequest]:
        model = self.service.texts.find(self._name)
        body = await read_body(self.service, self.call)
        return model, await self.service.offload(len(self.call.body) * WORK, self.read_asked, body)

    def read_asked(self, body: Any) -> MindieRequest:
        """Raises ServeError."""
        raise NotImplementedError


class TritonGenerate(TritonCall):
    """One generate or generate_stream. `batch_size` is the number of running requests of the model in this
    process, and `queue_wait_time` 0: only the engine knows how a step was filled."""

    def __init__(self, service: TextService, call: Call, model: str, *, stream: bool) -> None:
        super().__init__(service, call, model)
        self._stream = stream

    def read_asked(self, body: Any) -> MindieRequest:
        return read_text(body, self.service.options, stream=self._stream)

    def _head(self, text: str) -> bytes:
        names = (quote(self.asked.request_id), quote(self.model.name), quote(text))
        return b'{"id":%b,"model_name":%b,"model_version":null,"text_output":%b' % names

    def write(self, ending: Ending) -> bytes:
        if not self.asked.details:
            return self._head(ending.text) + b"}"
        count, batch = ending.generated, self.service.running.count(self.model.name)
        return b'%b,"details":{"finish_reason":"%b","generated_tokens":%d,%b,%b,%b}}' % (
            self._head(ending.text),
            FINISH_REASON[ending.reason].encode(),
            count,
            COSTS,
            b'"batch_size":[%b]' % b",".join([b"%d" % batch] * count),
            b'"queue_wait_time":[%b]' % b",".join([b"0"] * count),
        )

    def write_tokens(self, tokens: list[Token]) -> bytes:
        return b"".join(
            self._write_event(token.text, token.index, token.ms, b"") for token in tokens if not token.finish
        )

    def frames(self) -> Frames | None:
        if self.asked.details:
            return None
        before, after = self._head("").rsplit(b'""', 1)
        return Frames((b"data:" + before, Hole.TEXT, after + b"}\n\n"), bare=True, strip=True)

    def write_last(self, ending: Ending, token: Token | None) -> bytes:
        reason = b'"finish_reason":"%b",' % FINISH_REASON[ending.reason].encode()
        if token is None:
            return self._write_event("", max(0, ending.generated - 1), 0.0, reason)
        return self._write_event(token.text, token.index, token.ms, reason)

    def _write_event(self, text: str, index: int, ms: float, reason: bytes) -> bytes:
        if not self.asked.details:
            return b"data:%b}\n\n" % self._head(text)
        details = b'{%b"generated_tokens":%d,%b,"batch_size":%d,"queue_wait_time":0}' % (
            reason,
            index + 1,
            COSTS,
            self.service.running.count(self.model.name),
        )
        prefill, decode = milliseconds(index, ms)
        return b'data:%b,"details":%b,"prefill_time":%b,"decode_time":%b}\n\n' % (
            self._head(text),
            details,
            prefill,
            decode,
        )


class TokenInfer(TritonCall):
    """One token infer."""

    output = OUTPUT

    def read_asked(self, body: Any) -> MindieRequest:
        read = read_tokens(body, self.service.options)
        self.output = read.output
        return read.asked

    def write(self, ending: Ending) -> bytes:
        ids = msgspec.json.encode(ending.token_ids)
        head = b'{"id":%b,"outputs":[{"name":%b' % (quote(self.asked.request_id), quote(self.output))
        return b'%b,"shape":[1,%d],"datatype":"UINT32","data":%b}]}' % (head, ending.generated, ids)

    def write_tokens(self, tokens: list[Token]) -> bytes:
        raise NotImplementedError("a token infer is no stream")

    def write_last(self, ending: Ending, token: Token | None) -> bytes:
        raise NotImplementedError("a token infer is no stream")


def generate(service: TextService, named: TargetParts, *, stream: bool = False) -> Endpoint:
    def run(call: Call) -> Coroutine[Any, Any, None]:
        return TritonGenerate(service, call, named.model, stream=stream).run()

    return run


def infer(service: TextService, named: TargetParts) -> Endpoint:
    def run(call: Call) -> Coroutine[Any, Any, None]:
        return TokenInfer(service, call, named.model).run()

    return run


def stop(service: TextService, named: TargetParts) -> Endpoint:
    """Return the endpoint that stops the request of an id."""

    async def run(call: Call) -> None:
        try:
            service.texts.find(named.model)
            body = await read_body(service, call)
            given = body.get("id") if isinstance(body, dict) else None
            if not isinstance(given, str) or not given:
                raise invalid("The id must be non-empty string.")
            if not (service.running.stop(given) or await service.context.spread(NAME, given)):
                raise ServeError(Kind.NOT_FOUND, f"RequestId is {given} not found.")
        except ServeError as fault:
            refuse(service, call, fault, named.model)
        else:
            call.reply(200, b'{"id":%b}' % quote(given))

    return run


_INFER = {"POST": Scope.INFER}
PATHS = (
    TextRoute(
        HttpRoute("generate", "/v2/models/MODEL/generate", _INFER),
        generate,
        refuse,
        Yields.FIRST,
        BodyUse.TEXT,
    ),
    TextRoute(
        HttpRoute("generate_stream", "/v2/models/MODEL/generate_stream", _INFER),
        partial(generate, stream=True),
        refuse,
        Yields.FIRST,
        BodyUse.TEXT,
    ),
    TextRoute(
        HttpRoute("infer_tokens", "/v2/models/MODEL/infer", _INFER), infer, refuse, Yields.FIRST, BodyUse.TEXT
    ),
    TextRoute(HttpRoute("stop", "/v2/models/MODEL/stopInfer", _INFER), stop, refuse, room=BodyUse.TEXT),
)
