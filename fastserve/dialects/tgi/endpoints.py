"""TGI's endpoints (spec 7): POST /, /generate and /generate_stream, POST /tokenize, GET /ping.

    read -> the prompt's tokens, perhaps truncated -> one sequence, or best_of -> whole answer, or events

GET / yields to other APIs that have a page there; POST /generate and /tokenize are shared with vLLM
(dialects/textgen.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic_ns

import msgspec

from fastserve.dialects.text_common.endpoint_parts import (
    BodyUse,
    TargetParts,
    TextRoute,
    TextService,
    read_offloaded,
)
from fastserve.dialects.text_common.event_streams import (
    HEADERS,
    EventStream,
    Headers,
    SequenceGroup,
    deadline_ns,
    mean_logprob,
    send_events,
)
from fastserve.dialects.text_common.mindie import refuse_prompt
from fastserve.dialects.tgi.requests import (
    TgiRequest,
    ValidationFault,
    fit_prompt,
    read_mindie,
    read_tgi,
    read_tokenize,
)
from fastserve.dialects.tgi.responses import Generated, MindieTgiWriter, TgiWriter, error_body, error_status
from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import Scope
from fastserve.net.limits import JSON
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import Yields, fault_headers
from fastserve.serving.dialect import ALIVE, HttpRoute, show_alive
from fastserve.serving.text import TextAsk, TextModel, TextStream, Token
from fastserve.serving.text.models import TO_FIT, TextCall

NS = 1e6
AsyncEndpoint = Callable[[Call], Awaitable[None]]


class TgiGenerate:
    """The endpoint of a generating path. `streams` None: the body decides; `alone` false: the answer is in a
    list."""

    def __init__(self, service: TextService, *, streams: bool | None, alone: bool = True) -> None:
        self._service, self._streams, self._alone = service, streams, alone
        self._flavor = service.options.tgi_flavor
        self._read = read_mindie if self._flavor == "mindie" else read_tgi

    async def __call__(self, call: Call) -> None:
        await self._service.answer(call, partial(self._answer, call), refuse)

    async def _answer(self, call: Call, about: TextCall) -> bool:
        service = self._service
        ask = await read_offloaded(service, call, self._read, call.body, service.options, self._streams)
        model = about.model = service.texts.find("")
        if ask.parameters.adapter_id:
            model = about.model = service.texts.adapt(model, ask.parameters.adapter_id)
        one = GenerateCall(service, call, model, ask, self._flavor)
        await one.prepare()
        if ask.streams:
            headers = one.stream_headers()
            return await send_events(service, call, model.name, one.send, self._tell, headers)
        body = await one.whole()
        call.reply(200, body if self._alone else b"[%b]" % body, JSON, one.headers())
        return True

    def _tell(self, fault: ServeError) -> bytes:
        frame = b"data:%b\n\n" if self._flavor == "tgi" else b"data: %b\n\n"
        return frame % error_body(as_tgi_fault(fault, self._flavor), self._flavor)


class GenerateCall:
    """One request in progress."""

    def __init__(
        self, service: TextService, call: Call, model: TextModel, ask: TgiRequest, flavor: str
    ) -> None:
        self._service, self._call, self._model, self._ask, self._flavor = service, call, model, ask, flavor
        self._prompt: str | list[int] = ask.inputs
        self._started_ns = self._first_ns = 0
        self._made: list[Generated] = []
        self._stream: TextStream
        self._shape = self._make_shape()

    def _make_shape(self) -> TgiWriter:
        ask, text_of = self._ask, self._model.tokenizer.token_text
        if self._flavor == "mindie":
            in_list = self._service.options.token_id_style == "list"
            return MindieTgiWriter(text_of, details=ask.details, id_in_list=in_list)
        return TgiWriter(text_of, details=ask.details, top_tokens=bool(ask.parameters.top_n_tokens))

    async def prepare(self) -> None:
        """Make tokens of the prompt, and check them against the model. Raises ServeError.

        MindIE cuts `max_new_tokens` to what the model has, and what is wrong with a prompt it finds later."""
        info = self._model.info
        if info.tokenizer and self._flavor == "tgi":
            tokens = await self._model.encode(self._ask.inputs, keep=self._ask.parameters.truncate or 0)
            self._prompt = fit_prompt(self._ask, tokens, info, self._model.most_prompt_tokens)

    async def whole(self) -> bytes:
        """The whole answer. Raises ServeError."""
        ask = self._ask
        async with await self._start() as sequences:
            tokens = await sequences.rest(keep=ask.details or ask.best_of > 1)
            self._first_ns = sequences.first_ns
            self._made = [
                Generated(stream.ending, stream, made, ask.sampling.do_sample)
                for stream, made in zip(sequences.streams, tokens, strict=True)
                if stream.ending is not None
            ]
        first, *others = sorted(self._made, key=lambda each: mean_logprob(each.tokens), reverse=True)
        return msgspec.json.encode(self._shape.whole(self._full(first.ending.text), first, others))

    async def send(self, out: EventStream) -> None:
        """An event a token; the last has the whole text. Raises ServeError."""
        async with await self._start() as sequences:
            await sequences.first()
            await sequences.stream_to(out, self._events, lambda _: self._shape.frames)

    def _events(self, index: int, tokens: list[Token]) -> bytes:
        shape, ending, stream = self._shape, self._stream.ending, self._stream
        if ending is None or ending.fault is not None:
            return shape.events(tokens)
        made = Generated(ending, stream, (), self._ask.sampling.do_sample)
        last = tokens[-1] if tokens else stream.last or Token(0, "", 0, 0)
        return shape.events(tokens) + shape.event(last, shape.ending(self._full(ending.text), made))

    async def _start(self) -> SequenceGroup:
        ask, call, options = self._ask, self._call, self._service.options
        timeout_s = ask.parameters.timeout or options.timeout_s
        asked = TextAsk(
            prompt=self._prompt,
            sampling=ask.sampling,
            seed=ask.parameters.seed,
            stop=ask.stop,
            include_stop=self._flavor == "tgi",
            priority=ask.parameters.priority or 5,
            deadline_ns=deadline_ns(call, timeout_s, options),
            truncate=self._truncate(),
            request_id=call.request_id,
        )
        self._service.read(call, self._model)
        self._started_ns = monotonic_ns()
        streams = await self._model.start_many(asked, ask.best_of)
        self._stream = streams[0]
        return SequenceGroup(self._service, call, self._model, streams, timeout_s)

    def _truncate(self) -> int:
        """Return the number of prompt tokens to keep, where `prepare` has not cut it."""
        if self._flavor == "tgi":
            return 0
        return self._ask.parameters.truncate or (TO_FIT if self._service.options.truncate else 0)

    def _full(self, text: str) -> str:
        return self._ask.inputs + text if self._ask.parameters.return_full_text else text

    def stream_headers(self) -> Headers:
        """Return the headers of a stream, known before its first token."""
        return (*HEADERS, *self._compute_headers())

    def headers(self) -> Headers:
        """Return the timing headers, in milliseconds. x-queue-time ends with the first token: waiting and
        prefill are one here."""
        now_ns, first = monotonic_ns(), self._made[0]
        total = (now_ns - self._call.received_ns) / NS
        validation = (self._started_ns - self._call.received_ns) / NS
        queue = (self._first_ns - self._started_ns) / NS
        inference = total - validation - queue
        made = sum(each.ending.generated for each in self._made)
        return (
            *self._compute_headers(),
            (b"x-compute-time", b"%.6f" % (total / 1e3)),
            (b"x-total-time", b"%d" % total),
            (b"x-validation-time", b"%d" % validation),
            (b"x-queue-time", b"%d" % queue),
            (b"x-inference-time", b"%d" % inference),
            (b"x-time-per-token", b"%d" % (inference / max(1, made))),
            (b"x-prompt-tokens", b"%d" % first.stream.prompt_tokens),
            (b"x-generated-tokens", b"%d" % made),
        )

    def _compute_headers(self) -> Headers:
        device = self._model.info.device.partition(":")[0]
        return (
            (b"x-compute-type", b"gpu" if device == "cuda" else device.encode()),
            (b"x-compute-characters", b"%d" % len(self._ask.inputs)),
        )


def as_tgi_fault(fault: ServeError, flavor: str = "tgi") -> ServeError:
    """Return a fault of a request as a failed validation, with TGI's prefix."""
    if flavor == "mindie" or fault.kind is not Kind.INVALID_ARGUMENT or isinstance(fault, ValidationFault):
        return fault
    return ValidationFault(fault.message)


def refuse(service: TextService, call: Call, fault: ServeError, model: str = "") -> None:
    """Reply with an error, and count it."""
    if service.options.tgi_flavor == "mindie":
        refuse_prompt(service, call, fault, model)
        return
    service.count_fault(model, fault, call)
    body = error_body(as_tgi_fault(fault), "tgi")
    call.reply(error_status(fault, "tgi"), body, JSON, headers=fault_headers(fault))


INFER = {"POST": Scope.INFER}


def generate_stream(service: TextService, named: TargetParts) -> Endpoint:
    """POST /generate_stream."""
    return TgiGenerate(service, streams=True)


def generate_root(service: TextService, named: TargetParts) -> Endpoint:
    """POST /: whether it streams, the body says; an answer that does not is in a list."""
    return TgiGenerate(service, streams=None, alone=False)


def tokenize(service: TextService) -> AsyncEndpoint:
    """POST /tokenize: where each token of a text stands."""

    async def answer(call: Call) -> None:
        name = ""
        try:
            body = await read_offloaded(service, call, read_tokenize, call.body)
            model = service.texts.find("")
            name = model.name
            pieces = await model.pieces(body.inputs, special=body.add_special_tokens is not False)
        except ServeError as fault:
            refuse(service, call, fault, name)
            return
        call.reply(200, msgspec.json.encode(pieces))
        service.count(call, model)

    return answer


def ping(service: TextService, named: TargetParts) -> Endpoint:
    """GET /ping and /: 200 and nothing, or why it is not healthy. With KServe's replies / says as much in
    words, as where a dialect with KServe's own / is spoken."""
    fault = ServeError(Kind.UNAVAILABLE, "unhealthy")
    says_so = service.context.settings.kserve_replies and named.target.partition("?")[0] == "/"

    def answer(call: Call) -> None:
        if service.readiness.ready:
            if says_so:
                show_alive(call)
            else:
                call.reply(200, b"", b"")
        elif service.options.tgi_flavor == "tgi":
            call.reply(503, b'{"error":"unhealthy","error_type":"healthcheck"}')
        else:
            call.reply(error_status(fault, "mindie"), error_body(fault, "mindie"))

    return answer


PATHS = (
    TextRoute(
        HttpRoute("generate_stream", "/generate_stream", INFER), generate_stream, refuse, room=BodyUse.TEXT
    ),
    TextRoute(HttpRoute("generate_root", "/", INFER), generate_root, refuse, room=BodyUse.TEXT),
    TextRoute(HttpRoute("ping", "/ping", ALIVE.scopes), ping, refuse),
    TextRoute(ALIVE, ping, refuse, Yields.LAST),
)
