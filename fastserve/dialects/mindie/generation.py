"""MindIE's generation endpoints (spec 1 to 3): /infer, /infer_token, /v1/tokenizer; Triton's under /v2.

    read -> start -> [tokens ...] -> finish        errors before `start` are plain JSON, of streams too

    data: {"prefill_time":45.540,"decode_time":null,"token":{"id":626,"text":"am"}}

`MindieCall` is one request of any of MindIE's endpoints; subclasses read its body and write its replies.
Replies are compact JSON in raw UTF-8, with keys in the original's order and times in milliseconds. Control
characters of a text are left out, as there, but for tab and line ends.

Triton's endpoints (spec 3.2, 3.3) name a model, and their requests have ids, by which one is stopped. Their
routes yield to KServe V2 on a listener that speaks it: the same models have tensors there.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from random import getrandbits
from typing import Any, Generic, TypeVar

import msgspec

from fastserve.codec.generation import Finish
from fastserve.dialects.text_common.endpoint_parts import (
    NAME,
    WORK,
    BodyUse,
    RunningRequest,
    TargetParts,
    TextRoute,
    TextService,
    is_integer,
    read_body,
)
from fastserve.dialects.text_common.event_streams import EventStream, RequestTimeout, deadline_ns
from fastserve.dialects.text_common.mindie import (
    MOST_INT,
    MOST_TOKEN,
    NO_ANSWER,
    SEED_BITS,
    MindieRequest,
    PromptInputs,
    Rule,
    check_length,
    check_tokens,
    make_request,
    make_rules,
    read_infer,
    read_parameters,
    refuse,
    refuse_prompt,
    take,
    tell,
)
from fastserve.errors import DeadlineError, Kind, ServeError, invalid
from fastserve.net.access_control import Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Yields
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.exchange import internal_error
from fastserve.serving.text import (
    Ending,
    EventTemplate,
    Placeholder,
    TextAsk,
    TextModel,
    TextStream,
    Token,
)
from fastserve.serving.text.models import TO_FIT, TextCall
from fastserve.settings import TextgenOptions

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")
_find_control = _CONTROL.search
_encode = msgspec.json.Encoder().encode
FINISH_REASON = {
    Finish.EOS: "eos_token",
    Finish.STOP: "eos_token",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "stop_sequence",
    Finish.TIMEOUT: "stop_sequence",
    Finish.FAILED: "stop_sequence",
}


def quote(text: str) -> bytes:
    """A text as JSON."""
    return _encode(text if _find_control(text) is None else _CONTROL.sub("", text))


def milliseconds(index: int, ms: float) -> tuple[bytes, bytes]:
    """Return prefill_time and decode_time of a token."""
    return (b"%.3f" % ms, b"null") if index == 0 else (b"null", b"%.3f" % ms)


def details_of(ending: Ending, seed: int, options: TextgenOptions) -> bytes:
    """The object `details`."""
    ids = b""
    if options.generated_token_ids:
        ids = b',"generated_token_ids":%b' % _encode(ending.token_ids)
    return b'{"finish_reason":"%b","generated_tokens":%d%b,"seed":%d}' % (
        FINISH_REASON[ending.reason].encode(),
        ending.generated,
        ids,
        seed,
    )


def write_answer(ending: Ending, details: bytes) -> bytes:
    """The reply of a call that wants no stream; `details` b"" for none."""
    more = b',"details":%b' % details if details else b""
    return b'{"generated_text":%b%b}' % (quote(ending.text), more)


@lru_cache(maxsize=2)
def frames_of(style: str) -> EventTemplate:
    """The events of all tokens but the last."""
    before, after = (b"[", b"]") if style == "list" else (b"", b"")
    head = (b'data: {"prefill_time":', Placeholder.PREFILL, b',"decode_time":', Placeholder.DECODE)
    token = (b',"token":{"id":' + before, Placeholder.ID, after + b',"text":', Placeholder.TEXT, b"}}\n\n")
    return EventTemplate((*head, *token), bare=True, strip=True)


class EventWriter:
    """The events of one stream."""

    def __init__(self, options: TextgenOptions) -> None:
        self._frames = frames_of(options.token_id_style)
        self.frames = None if options.full_text else self._frames
        """The encoding of `tokens`, None where an event depends on those before."""
        self._id = b"[%d]" if options.token_id_style == "list" else b"%d"
        self._whole = options.full_text
        self._text = ""

    def tokens(self, tokens: list[Token]) -> bytes:
        """An event for each token, but for one that ends the sequence."""
        if self._whole:
            for token in tokens:
                self._text += token.text
                token.text = self._text
        return self._frames.write(tokens)

    def last(self, ending: Ending, token: Token | None, details: bytes) -> bytes:
        """The event that ends a stream; without a token of its own it has the id of the one before."""
        ms, index = (0.0, ending.generated) if token is None else (token.ms, token.index)
        first, other = milliseconds(index, ms)
        last = ending.token_ids[-1] if ending.token_ids else 0
        event = (
            b'data: {"prefill_time":%b,"decode_time":%b,"generated_text":%b,"details":%b,'
            b'"token":{"id":' + self._id + b',"text":null}}\n\n'
        )
        return event % (first, other, quote(ending.text), details or b"null", last)


Read = TypeVar("Read", bound=MindieRequest)


class MindieCall(ABC, Generic[Read]):
    """One call; a subclass reads and writes its API."""

    model: TextModel
    asked: Read
    stream: TextStream

    def __init__(self, service: TextService, call: Call) -> None:
        self.service, self.call = service, call

    @abstractmethod
    async def read(self) -> tuple[TextModel, Read]:
        """Return the model and the request. Raises ServeError."""

    @abstractmethod
    def write(self, ending: Ending) -> bytes:
        """Return the reply of a call that does not stream."""

    @abstractmethod
    def write_tokens(self, tokens: list[Token]) -> bytes:
        """Return the events of tokens; none for the one that ends the sequence, which `write_last`
        writes."""

    def frames(self) -> EventTemplate | None:
        """Return the encoding of `write_tokens`, None where it does more."""
        return None

    @abstractmethod
    def write_last(self, ending: Ending, token: Token | None) -> bytes:
        """Return the event that ends a stream; `token` is the last, None where the end has none of its
        own."""

    async def run(self) -> None:
        """Answer the call."""
        await self.service.answer(self.call, self._answer, refuse_prompt)

    async def _answer(self, about: TextCall) -> bool:
        about.model, self.asked = await self.read()
        self.model = about.model
        self.service.read(self.call, self.model)
        self.stream = await start(self.service, self.call, self.model, self.asked)
        held = self.service.running.hold(self.model.name, self.asked.request_id, self.stream)
        async with self.stream:
            with held as self._held:
                return await (self._send_events() if self.asked.stream else self._send_one())

    def _patience(self) -> RequestTimeout:
        return RequestTimeout(self.stream, self.call, self.asked.timeout_s, self.service.options)

    async def _send_one(self) -> bool:
        with self._patience() as patience:
            ending = await self.stream.rest()
        fault = fault_of(ending, patience, self._held)
        if fault is not None:
            raise fault
        self.call.reply(200, self.write(ending))
        return True

    async def _send_events(self) -> bool:
        service = self.service
        async with EventStream(self.call, service.options.keepalive_s) as out:
            fault = None
            try:
                fault = await self._pass_on(out)
            except ConnectionResetError:
                raise
            except Exception as error:
                fault = internal_error(self.call, error)
            if fault is not None:
                await out.write(tell(service, fault, self.model.name))
            await out.close()
        return fault is None

    async def _pass_on(self, out: EventStream) -> ServeError | None:
        """Send each token as it comes, and the end; return the fault, None for none."""
        last: Token | None = None
        with self._patience() as patience:

            def write(tokens: list[Token]) -> bytes:
                nonlocal last
                if tokens and tokens[-1].finish:
                    last = tokens[-1]
                return self.write_tokens(tokens)

            ending = await out.stream_to(self.stream, write, self.frames())
        fault = fault_of(ending, patience, self._held)
        if fault is None:
            await out.write(self.write_last(ending, last))
        return fault


async def start(service: TextService, call: Call, model: TextModel, asked: MindieRequest) -> TextStream:
    """Start the request's sequence. Raises ServeError."""
    options = service.options
    ask = TextAsk(
        prompt=asked.inputs.prompt,
        sampling=asked.sampling,
        seed=getrandbits(SEED_BITS) if asked.seed is None else asked.seed,
        priority=asked.priority,
        deadline_ns=deadline_ns(call, asked.timeout_s, options),
        truncate=TO_FIT if options.truncate else 0,
        request_id=asked.request_id or call.request_id,
        images=await service.images.load(model, asked.inputs.images),
    )
    return await model.start(ask)


def fault_of(ending: Ending, patience: RequestTimeout, held: RunningRequest) -> ServeError | None:
    """Return the fault of an ending, None for none. A request that was stopped by its id has succeeded."""
    if patience.fault is not None:
        return patience.fault
    if ending.fault is None or held.stopped:
        return None
    fault = patience.cause_of(ending.fault)
    if isinstance(fault, DeadlineError):
        return fault
    return ServeError(fault.kind, f"{NO_ANSWER}: {fault.message}")


class InferCall(MindieCall[MindieRequest]):
    """One call of /infer or /infer_token."""

    def __init__(self, service: TextService, call: Call) -> None:
        super().__init__(service, call)
        self._writer, self._rules = EventWriter(service.options), make_rules(service.options)

    async def read(self) -> tuple[TextModel, MindieRequest]:
        service = self.service
        body = await read_body(service, self.call)
        model = service.texts.find("")
        work = len(self.call.body) * WORK
        return model, await service.offload(work, read_infer, body, self._rules, service.options)

    def write(self, ending: Ending) -> bytes:
        return write_answer(ending, self._details(ending))

    def write_tokens(self, tokens: list[Token]) -> bytes:
        return self._writer.tokens(tokens)

    def frames(self) -> EventTemplate | None:
        return self._writer.frames

    def write_last(self, ending: Ending, token: Token | None) -> bytes:
        return self._writer.last(ending, token, self._details(ending))

    def _details(self, ending: Ending) -> bytes:
        return details_of(ending, self.stream.seed, self.service.options) if self.asked.details else b""


def infer(service: TextService, named: TargetParts) -> Endpoint:
    """The endpoint."""
    return lambda call: InferCall(service, call).run()


def tokenize(service: TextService, named: TargetParts) -> Endpoint:
    """The endpoint. `do_decode`: false leaves the tokens' texts out."""

    async def run(call: Call) -> None:
        name = ""
        try:
            body = await read_body(service, call)
            model = service.texts.find("")
            name = model.name
            text, shown = _read_tokenize(body, service.options.input_chars)
            tokens = [piece.text for piece in await model.pieces(text)] if shown else []
            number = len(tokens) if shown else len(await model.tokens(text))
        except ServeError as fault:
            refuse_prompt(service, call, fault, name)
        else:
            call.reply(200, msgspec.json.encode({"token_number": number, "tokens": tokens}))
            service.count(call, model)

    return run


def _read_tokenize(body: Any, most: int) -> tuple[str, bool]:
    body = body if isinstance(body, dict) else {}
    if "inputs" not in body:
        raise invalid("Not found inputs.")
    text = body["inputs"]
    if not isinstance(text, str):
        raise invalid("Inputs must not be null" if text is None else "inputs must be string type.")
    check_length(text, most)
    shown = take(body, "do_decode", "boolean")
    return text, shown is not False


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


def read_tokens(body: Any, options: TextgenOptions) -> MindieRequest:
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
    made = make_request(PromptInputs(tokens), given, options, stream=False, request_id=request_id)
    return replace(made, output=output)


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

    def frames(self) -> EventTemplate | None:
        if self.asked.details:
            return None
        before, after = self._head("").rsplit(b'""', 1)
        return EventTemplate((b"data:" + before, Placeholder.TEXT, after + b"}\n\n"), bare=True, strip=True)

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

    def read_asked(self, body: Any) -> MindieRequest:
        return read_tokens(body, self.service.options)

    def write(self, ending: Ending) -> bytes:
        ids = msgspec.json.encode(ending.token_ids)
        head = b'{"id":%b,"outputs":[{"name":%b' % (quote(self.asked.request_id), quote(self.asked.output))
        return b'%b,"shape":[1,%d],"datatype":"UINT32","data":%b}]}' % (head, ending.generated, ids)

    def write_tokens(self, tokens: list[Token]) -> bytes:
        raise NotImplementedError("a token infer is no stream")

    def write_last(self, ending: Ending, token: Token | None) -> bytes:
        raise NotImplementedError("a token infer is no stream")


def generate(service: TextService, named: TargetParts, *, stream: bool = False) -> Endpoint:
    return lambda call: TritonGenerate(service, call, named.model, stream=stream).run()


def infer_tokens(service: TextService, named: TargetParts) -> Endpoint:
    return lambda call: TokenInfer(service, call, named.model).run()


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
    TextRoute(HttpRoute("infer", "/infer", _INFER), infer, refuse, room=BodyUse.IMAGES),
    TextRoute(HttpRoute("infer_token", "/infer_token", _INFER), infer, refuse, room=BodyUse.IMAGES),
    TextRoute(HttpRoute("tokenizer", "/v1/tokenizer", _INFER), tokenize, refuse, room=BodyUse.TEXT),
    *(
        TextRoute(
            HttpRoute(name, f"/v2/models/MODEL/{word}", _INFER), make, refuse, Yields.FIRST, BodyUse.TEXT
        )
        for name, word, make in (
            ("generate", "generate", generate),
            ("generate_stream", "generate_stream", partial(generate, stream=True)),
            ("infer_tokens", "infer", infer_tokens),
        )
    ),
    TextRoute(HttpRoute("stop", "/v2/models/MODEL/stopInfer", _INFER), stop, refuse, room=BodyUse.TEXT),
)
