"""POST /, /generate and /generate_stream as TGI speaks them (spec 7).

read -> the prompt's tokens, which may be cut -> one sequence, or best_of -> whole answer, or events
"""

from __future__ import annotations

from functools import partial
from time import monotonic_ns

import msgspec

from fastserve.dialects.textgen.events import Headers, send_events
from fastserve.dialects.textgen.inputs import refuse_prompt
from fastserve.dialects.textgen.patience import deadline_ns
from fastserve.dialects.textgen.sequences import Sequences, likelihood
from fastserve.dialects.textgen.service import Service
from fastserve.dialects.textgen.sse import HEADERS, EventStream
from fastserve.dialects.textgen.tgi_mindie import read_mindie
from fastserve.dialects.textgen.tgi_read import PREFIX, Limits, TgiAsk, fit_prompt, read_tgi
from fastserve.dialects.textgen.tgi_write import (
    Generated,
    MindieShape,
    TgiShape,
    error_body,
    error_status,
)
from fastserve.dialects.textgen.typed import Misread
from fastserve.errors import Kind, ServeError
from fastserve.serving.text import TextAsk, TextModel, TextStream, Token
from fastserve.serving.text.answering import About
from fastserve.serving.text.ask import TO_FIT
from fastserve.wire.call import Call
from fastserve.wire.dialect import retry_after

JSON = b"application/json"
NS = 1e6


class Generate:
    """The endpoint. `streams` None where the body says it; `alone`, whether its answer is in no list."""

    def __init__(self, service: Service, *, streams: bool | None, alone: bool = True) -> None:
        self._service, self._streams, self._alone = service, streams, alone
        options = service.options
        self._flavor = options.tgi_flavor
        self._limits = Limits(options.max_stops, options.max_best_of, options.most_timeout_s)
        mindie = self._flavor == "mindie"
        self._read = partial(read_mindie, options=options) if mindie else read_tgi

    async def __call__(self, call: Call) -> None:
        await self._service.answer(call, partial(self._answer, call), refuse)

    async def _answer(self, call: Call, about: About) -> bool:
        service = self._service
        ask = await service.apart(len(call.body), self._read, call.body, self._limits, self._streams)
        model = about.model = service.texts.find("")
        one = Generation(service, call, model, ask, self._flavor)
        await one.prepare()
        if ask.streams:
            headers = one.stream_headers()
            return await send_events(service, call, model.name, one.send, self._tell, headers)
        body = await one.whole()
        call.reply(200, body if self._alone else b"[%b]" % body, JSON, one.headers())
        return True

    def _tell(self, fault: ServeError) -> bytes:
        frame = b"data:%b\n\n" if self._flavor == "tgi" else b"data: %b\n\n"
        return frame % error_body(in_words(fault, self._flavor), self._flavor)


class Generation:
    """One request on its way to its answer."""

    def __init__(self, service: Service, call: Call, model: TextModel, ask: TgiAsk, flavor: str) -> None:
        self._service, self._call, self._model, self._ask, self._flavor = service, call, model, ask, flavor
        self._prompt: str | list[int] = ask.inputs
        self._started_ns = self._first_ns = 0
        self._made: list[Generated] = []
        self._stream: TextStream
        self._shape = self._make_shape()

    def _make_shape(self) -> TgiShape:
        ask, text_of = self._ask, self._model.token_text
        if self._flavor == "mindie":
            in_list = self._service.options.token_id_style == "list"
            return MindieShape(text_of, details=ask.details, id_in_list=in_list)
        return TgiShape(text_of, details=ask.details, top_tokens=bool(ask.parameters.top_n_tokens))

    async def prepare(self) -> None:
        """Make tokens of the prompt, and check them against the model. Raises ServeError.

        MindIE cuts `max_new_tokens` to what the model has, and what is wrong with a prompt it finds later."""
        info = self._model.info
        if info.tokenizer and self._flavor == "tgi":
            tokens = await self._model.encode(self._ask.inputs)
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
        first, *others = sorted(self._made, key=lambda each: likelihood(each.tokens), reverse=True)
        return msgspec.json.encode(self._shape.whole(self._full(first.ending.text), first, others))

    async def send(self, out: EventStream) -> None:
        """An event a token; the last has the whole text. Raises ServeError."""
        async with await self._start() as sequences:
            await sequences.first()
            await sequences.pour(out, self._events, lambda _: self._shape.frames)

    def _events(self, index: int, tokens: list[Token]) -> bytes:
        shape, ending, stream = self._shape, self._stream.ending, self._stream
        if ending is None or ending.fault is not None:
            return shape.events(tokens)
        made = Generated(ending, stream, (), self._ask.sampling.do_sample)
        last = tokens[-1] if tokens else stream.last or Token(0, "", 0, 0)
        return shape.events(tokens) + shape.event(last, shape.ending(self._full(ending.text), made))

    async def _start(self) -> Sequences:
        ask, call, options = self._ask, self._call, self._service.options
        timeout_s = ask.parameters.timeout or options.timeout_s
        asked = TextAsk(
            prompt=self._prompt,
            sampling=ask.sampling,
            seed=ask.parameters.seed,
            stop=ask.stop,
            include_stop=self._flavor == "tgi",
            priority=ask.parameters.priority or 5,
            deadline_ns=deadline_ns(call.received_ns, timeout_s, options),
            truncate=self._truncate(),
            request_id=call.request_id,
        )
        self._service.read(call, self._model)
        self._started_ns = monotonic_ns()
        streams = await self._model.start_many(asked, ask.best_of)
        self._stream = streams[0]
        return Sequences(self._service, call, self._model, streams, timeout_s)

    def _truncate(self) -> int:
        """How many tokens of the prompt are kept, where that is not settled yet."""
        if self._flavor == "tgi":
            return 0
        return self._ask.parameters.truncate or (TO_FIT if self._service.options.truncate else 0)

    def _full(self, text: str) -> str:
        return self._ask.inputs + text if self._ask.parameters.return_full_text else text

    def stream_headers(self) -> Headers:
        """What is known before the first token."""
        return (*HEADERS, *self._compute_headers())

    def headers(self) -> Headers:
        """How long what took, in milliseconds; x-queue-time is up to the first token: waiting and reading
        the prompt are one here."""
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


def in_words(fault: ServeError, flavor: str = "tgi") -> ServeError:
    """Every fault of a request is a failed validation with TGI, and says so."""
    said = fault.message.startswith(PREFIX)
    if flavor == "mindie" or fault.kind is not Kind.INVALID_ARGUMENT or said:
        return fault
    return Misread(PREFIX + fault.message)


def refuse(service: Service, call: Call, fault: ServeError, model: str = "") -> None:
    """Reply with an error, and count it."""
    if service.options.tgi_flavor == "mindie":
        refuse_prompt(service, call, fault, model)
        return
    service.traffic.refused(model, fault.kind.name)
    body = error_body(in_words(fault), "tgi")
    call.reply(error_status(fault, "tgi"), body, JSON, headers=retry_after(fault))
