"""One sequence as its reader sees it: lists of tokens with their text, and then how it ended.

    engine --records--> detokenizer --> stop strings --> [Token, Token] --> async for tokens in stream
      ^                                                                          |
      '----------------- taken(n): so many records were read <------------------'

A reader that is behind stalls its sequence after TextOptions.reader_tokens while nobody waits for its row;
else the sequence writes to its end, and unread tokens are kept here, on the account of `unread`. A reader
that leaves cancels its sequence: with `async with`, with aclose(), or by dropping the stream.

    async with stream:
        ending = await stream_to(stream, reply, write, frames)   write([Token, ...]) -> bytes, b"" for nothing

`stream_to` copies a stream into the reply of a call. While the client reads, tokens are written in the turn
of the loop that received them, all that came together as one piece; the calling task sleeps until the end, or
until a client that had stopped reading reads again. Meanwhile tokens stay with the engine, which stalls the
sequence. With `frames`, all tokens but the first and the last pass through compiled code (text_tokens.Flow):
one step of the engine is written at once, for all streams together.

An embedding is a sequence without tokens for each text, whose only record has its vector. A request of many
texts queues a few of them at a time, so that others come between:

    async with Embedding(start, prompts, note) as embedding:
        vectors = await embedding.run()           in the order of the prompts
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

import msgspec

from fastserve._ext.stop_strings import StopStrings
from fastserve._ext.text_tokens import EventTemplate, Flow, Token, take_plain
from fastserve.codec.generation import Extra, Finish, GenerationRun, Logprobs, Record, TextNote, read_extra
from fastserve.errors import DeadlineError, Kind, ModelError, Reason, ServeError, unpack_status, worker_lost
from fastserve.serving.exchange import internal_error
from fastserve.serving.text.tokenizer import Detokenizer
from fastserve.util.spans import Attributes, RequestSpan

CANCELLED = "the request was cancelled"
TIMED_OUT = "the request's time was up"
FAILED = "the model failed"
NOT_THE_MODELS = (Kind.UNAVAILABLE, Kind.RESOURCE_EXHAUSTED)
UNREAD_BYTES = 64 << 20
"""Bytes of tokens that readers have not taken, for all streams of a front process."""
UNREAD_SHARE = 256 << 10
"""Bytes of unread tokens that every stream may have."""
TOKEN_BYTES, CHARACTER_BYTES, LIKELY_BYTES = 256, 2, 128
"""Bytes of a token with its place in the answer, of a character, and of one alternative."""
TOO_SLOW = (
    "the answer is read too slowly: {} of its tokens wait to be read, and {} bytes those of all answers"
)


class Ending(msgspec.Struct):
    """The end of a sequence. `text` is the whole text of all tokens. With a `fault` (cancelled, timed out,
    failed) it is the text until then."""

    reason: Finish
    text: str
    token_ids: list[int]
    stop: str | None = None
    """The stop string, or None."""
    fault: ServeError | None = None

    @property
    def generated(self) -> int:
        """The number of tokens, with the one that ended it."""
        return len(self.token_ids)


class Unread:
    """The account of bytes that streams keep for slow readers."""

    def __init__(self, most: int = UNREAD_BYTES) -> None:
        self.most = most
        self.nbytes = 0

    def takes(self, nbytes: int, own: int) -> bool:
        """Charge so many bytes more. Return False when a stream with `own` bytes has to end."""
        self.nbytes += nbytes
        return self.nbytes <= self.most or own <= UNREAD_SHARE


unread = Unread()
"""The account of this process."""


class SequenceTrace:
    """One sequence of a traced request: a span from its start to its last token."""

    __slots__ = ("_begun_ns", "_first_ns", "_model", "_span")

    def __init__(self, span: RequestSpan, model: str, version: int) -> None:
        self._span, self._model = span, model
        self._begun_ns, self._first_ns = monotonic_ns(), 0
        if span.attributes.setdefault("fastserve.model", model) == model:
            span.attributes.setdefault("fastserve.model.version", version)
        span.attributes.setdefault("gen_ai.request.model", model)

    def heard(self) -> None:
        """Note that tokens have come."""
        self._first_ns = self._first_ns or monotonic_ns()

    def end(self, stream: TextStream, ending: Ending) -> None:
        """Add the span of the sequence, and its tokens to those of its request."""
        totals, now_ns = self._span.attributes, monotonic_ns()
        tokens = {
            "gen_ai.usage.input_tokens": stream.prompt_tokens,
            "gen_ai.usage.output_tokens": ending.generated,
        }
        for name, count in tokens.items():
            before = totals.get(name, 0)
            totals[name] = count + (before if isinstance(before, int) else 0)
        finish = ending.reason.name.lower()
        about: Attributes = {**tokens, "gen_ai.request.model": self._model}
        about["gen_ai.response.finish_reasons"] = [finish]
        totals["gen_ai.response.finish_reasons"] = [finish]
        moments = [("first token", self._first_ns)] if self._first_ns else []
        self._span.add("generate", self._begun_ns, now_ns, about, moments)
        if ending.fault is not None:
            self._span.fail(ending.fault.message)


class TextStream:
    """One sequence, made by TextModel.start. `seed` is the one it runs with; in the text of its first
    `least_tokens` tokens no stop string is searched."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
        specials: frozenset[int] = frozenset(),
        *,
        include_stop: bool = False,
        least_tokens: int = 0,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.prompt_tokens = len(prompt_ids)
        """Tokens of the prompt; where the engine takes text, 0 until its first record."""
        self.prompt_logprobs: Sequence[tuple[int, float | None]] = ()
        self.prompt_ranks = b""
        """Of codec.generation.write_ranks, with the first token."""
        self.seed = seed
        self.ending: Ending | None = None
        self.on_news: Callable[[], object] | None = None
        """Called on the loop for new tokens, once for all that came together."""
        self._detokenizer, self._stops, self._specials = detokenizer, stops, specials
        self._include_stop, self._least_tokens = include_stop, least_tokens
        self.trace: SequenceTrace | None = None  # of a request that is traced
        self._run: GenerationRun | None = None
        self._flow: Flow | None = None
        self._taken_ns = 0
        self._came: list[Token] = []
        self._records = 0  # received and not taken
        self._unread = 0  # bytes charged for them
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._waiting: asyncio.Future[None] | None = None

    # --- the reader's side

    def __aiter__(self) -> AsyncIterator[list[Token]]:
        return self

    async def __anext__(self) -> list[Token]:
        """Return all new tokens; with the last of them `ending` is set. An ending without a token, as of a
        fault, comes with an empty list."""
        while not self._came and not self._records:
            if self.ending is not None:
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self.take()

    @property
    def has_news(self) -> bool:
        """Whether tokens wait to be taken, or the sequence has ended."""
        return bool(self._came or self._records) or self.ending is not None

    def take(self) -> list[Token]:
        """Return all new tokens, without waiting."""
        tokens, self._came = self._came, []
        records, self._records = self._records, 0
        if self._unread:
            self._forgive()
        if records and self._run is not None:
            self._run.taken(records)
        return tokens

    @property
    def taken_ns(self) -> int:
        """The time of the last record, in nanoseconds of time.monotonic_ns; 0 before the first."""
        return self._taken_ns if self._flow is None else max(self._taken_ns, self._flow.taken_ns)

    @property
    def last(self) -> Token | None:
        """The last token so far."""
        if not self._ids:
            return None
        token = self._ids[-1]
        return Token(token, self._texts[-1], len(self._ids) - 1, 0, token in self._specials, Finish.NONE)

    def pass_through(
        self, frames: EventTemplate, reply: Any, failed: Callable[[Exception], object]
    ) -> Flow | None:
        """Return a Flow. While it is `open`, plain tokens go from the engine's step into the reply as
        `frames`, without a call here. None where stop strings have to be searched. Open it only while no
        earlier token waits to be taken."""
        if self._stops is not None or self._run is None:
            return None
        self._flow = self._run.flow = Flow(
            self._detokenizer,
            self._specials,
            Finish.NONE,
            self._ids,
            self._texts,
            frames,
            reply,
            failed,
        )
        return self._flow

    def end_pass_through(self) -> None:
        """End the pass-through: dropping the stream cancels its sequence again."""
        self._taken_ns, self._flow = self.taken_ns, None
        if self._run is not None:
            self._run.flow = None

    async def rest(self) -> Ending:
        """Read to the end and return it."""
        self.on_news = self.take
        while self.ending is None:
            self.take()
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self.take()
        return self.ending

    def cancel(self) -> None:
        """End the sequence; its reader gets an ending with a fault."""
        if self.ending is None:
            self._end(Finish.CANCELLED, fault=ServeError(Kind.CANCELLED, CANCELLED))
            self._tell()
        run, self._run = self._run, None
        if run is not None:
            run.cancel()

    async def aclose(self) -> None:
        """Cancel what still runs."""
        self.cancel()

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._forgive()
        if self._run is not None:
            self._run.cancel()

    # --- the engine's side

    def bind(self, run: GenerationRun) -> None:
        """Attach the engine's run."""
        self._run = run
        if self.ending is not None:
            self._leave()

    def on_tokens(self, records: list[Record]) -> None:
        """Take records of the engine, which holds this method weakly: a dropped stream gets no more."""
        if self.ending is not None:  # sent before the engine knew of the end
            return
        self._taken_ns = monotonic_ns()
        self._records += len(records)
        try:
            self._take(records)
        except Exception as error:  # of the tokenizer, or of malformed records
            self._end(Finish.FAILED, fault=internal_error(self, error))
        if self.ending is not None:
            self._leave()
        self._tell()
        if self._records:
            self._charge(self._came[-len(records) :])

    def _charge(self, tokens: list[Token]) -> None:
        """Charge unread tokens. Beyond the account's limit the stream ends, and its reader gets the reason
        alone."""
        nbytes = sum([bytes_of(token) for token in tokens])
        self._unread += nbytes
        if unread.takes(nbytes, self._unread):
            return
        text = TOO_SLOW.format(self._records, unread.nbytes)
        self._came.clear()
        self._forgive()
        if self.ending is None or self.ending.fault is None:
            self._end(Finish.FAILED, fault=ServeError(Kind.RESOURCE_EXHAUSTED, text))
            self._leave()
            self._tell()

    def _forgive(self) -> None:
        unread.nbytes -= self._unread
        self._unread = 0

    def _take(self, records: list[Record]) -> None:
        plain = 0
        if self._stops is None:
            plain = take_plain(
                records,
                self._detokenizer,
                self._specials,
                Finish.NONE,
                self._came,
                self._ids,
                self._texts,
            )
        for i in range(plain, len(records)):
            self._take_in(*records[i])
            if self.ending is not None:
                break

    def _take_in(self, token: int, finish: int, took_us: int, data: bytes) -> None:
        extra = read_extra(data) if data else None
        if extra is not None:
            self.prompt_tokens = extra.prompt_tokens or self.prompt_tokens
            self.prompt_logprobs = extra.prompt or self.prompt_logprobs
            self.prompt_ranks = extra.prompt_ranks or self.prompt_ranks
        if token >= 0 or (extra is not None and extra.text is not None):  # or text of no token
            self._take_token(token, finish, took_us, extra)
        elif finish:
            self._end(Finish(finish), fault=fault_of(Finish(finish), extra))

    def _take_token(self, token: int, finish: int, took_us: int, extra: Extra | None) -> None:
        logprobs: Logprobs | None = None
        if extra is not None and extra.text is not None:
            text, logprobs = extra.text, extra.logprobs
        else:
            text = self._text_of(token, finish)
            if extra is not None:
                logprobs = extra.logprobs
        found = Token(token, text, len(self._ids), took_us, token in self._specials, Finish.NONE)
        if logprobs is not None:
            found.logprob, found.best = logprobs.own, logprobs.best
        self._ids.append(token)
        self._came.append(found)
        self._cut(found, finish, extra)

    def _text_of(self, token: int, finish: int) -> str:
        """The token that ended a sequence is no text, as little as a stop string is."""
        if finish == Finish.STOP and not self._include_stop:
            return ""
        return self._detokenizer.add(token)

    def _cut(self, found: Token, finish: int, extra: Extra | None) -> None:
        """End the text at a stop string, or hold back what may be one."""
        stops, last = self._stops, bool(finish)
        if last:
            found.text += self._detokenizer.end()
        if stops is not None and len(self._ids) > self._least_tokens:
            text = stops.feed(found.text)
            if stops.found is not None:
                last, finish = True, Finish.STOP
            elif last:
                text += stops.flush()
            found.text = text
        self._texts.append(found.text)
        if last:
            found.finish = Finish(finish)
            stop = None if stops is None else stops.found
            self._end(found.finish, stop, fault_of(found.finish, extra))

    def _end(self, reason: Finish, stop: str | None = None, fault: ServeError | None = None) -> None:
        self.ending = Ending(reason, "".join(self._texts), self._ids, stop, fault)
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.end(self, self.ending)

    def _leave(self) -> None:
        """Detach from the engine, and cancel its run if that still goes on."""
        run, self._run = self._run, None
        if run is not None:
            run.cancel(self.ending.reason if self.ending is not None else Finish.CANCELLED)

    def _tell(self) -> None:
        if self.on_news is not None:
            self.on_news()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def bytes_of(token: Token) -> int:
    """Return the bytes of a token that waits to be read."""
    return TOKEN_BYTES + CHARACTER_BYTES * len(token.text) + LIKELY_BYTES * len(token.best)


def fault_of(reason: Finish, extra: Extra | None) -> ServeError | None:
    """Return the fault of an ending for the client; None for a successful one."""
    if reason is Finish.TIMEOUT:
        return DeadlineError(TIMED_OUT, queued=False)
    if reason is Finish.CANCELLED:
        return ServeError(Kind.CANCELLED, CANCELLED)
    if reason is not Finish.FAILED:
        return None
    if extra is None or not extra.message:
        return ModelError(Kind.INTERNAL, FAILED)
    kind, cause = unpack_status(extra.kind)
    if cause is Reason.WORKER_LOST:
        return worker_lost(extra.message)
    # A dead worker or a full queue is not the model's error.
    return (ServeError if kind in NOT_THE_MODELS else ModelError)(kind, extra.message)


async def together(streams: Sequence[TextStream]) -> AsyncIterator[tuple[int, list[Token]]]:
    """Yield the new tokens of several streams with the stream's index, as they come. Leaving the loop closes
    nothing."""
    news = asyncio.Event()
    for stream in streams:
        stream.on_news = news.set
    open_ = set(range(len(streams)))
    while open_:
        news.clear()
        for index in sorted(open_):
            tokens, over = streams[index].take(), streams[index].ending is not None
            if over:
                open_.discard(index)
            if tokens or over:
                yield index, tokens
        if open_:
            await news.wait()


class ReplySink(Protocol):
    """A streamed reply: the target of stream_to."""

    @property
    def ready(self) -> bool: ...

    async def wait(self) -> None: ...

    def send(self, data: bytes) -> None: ...


class TokenWriter:
    """One stream that is copied to a reply."""

    __slots__ = ("_news", "_reply", "_stream", "_write", "fault", "flow", "stalled")

    def __init__(self, stream: TextStream, reply: ReplySink, write: Callable[[list[Token]], bytes]) -> None:
        self._stream, self._reply, self._write = stream, reply, write
        self._news: asyncio.Future[None] | None = None
        self.fault: Exception | None = None
        self.flow: Flow | None = None
        self.stalled = False  # the client does not read

    def on_tokens(self) -> None:
        """Write new tokens; on_news of the stream. May not raise: `run` raises the fault."""
        stream = self._stream
        if self.stalled:
            return
        if not self._reply.ready:
            self.stalled = True
            self._set_pass_through(False)
            self._wake()
            return
        try:
            data = self._write(stream.take())
            if data:
                self._reply.send(data)
            self._set_pass_through(True)
        except Exception as fault:
            self.fail(fault)
        if stream.ending is not None:
            self._wake()

    def fail(self, fault: Exception) -> None:
        """Stop writing: `run` raises the fault."""
        self.fault = fault
        self._set_pass_through(False)
        self._wake()

    def _set_pass_through(self, flows: bool) -> None:
        if self.flow is not None:
            self.flow.open = flows

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def close(self) -> None:
        """End the pass-through."""
        self._set_pass_through(False)
        self.flow = None
        self._stream.end_pass_through()

    async def run(self) -> Ending:
        """Write to the end and return it."""
        stream = self._stream
        self.on_tokens()
        while True:
            if self.fault is not None:
                raise self.fault
            if self.stalled:
                await self._reply.wait()
                self.stalled = False
                self.on_tokens()
            elif stream.ending is not None:
                return stream.ending
            else:
                self._news = asyncio.get_running_loop().create_future()
                await self._news


async def stream_to(
    stream: TextStream,
    reply: ReplySink,
    write: Callable[[list[Token]], bytes],
    frames: EventTemplate | None = None,
) -> Ending:
    """Write every token to the reply, and return the ending, which the caller writes. `write` is called
    without tokens too, where the ending has none. `frames` are the encoding of plain tokens, where `write`
    does nothing else. Raises ConnectionResetError when the client has gone, and what `write` raises."""
    writer = TokenWriter(stream, reply, write)
    stream.on_news = writer.on_tokens
    if frames is not None:
        writer.flow = stream.pass_through(frames, reply, writer.fail)
    try:
        return await writer.run()
    finally:
        stream.on_news = None
        writer.close()


AT_A_TIME = 64
AGAIN_S = 0.01
"""Pause before the queue is tried again when none of the request's texts runs. Slots become free a moment
after their last record; finished vectors are kept meanwhile."""
Start = Callable[[Sequence[int], TextNote, Callable[[list[Record]], None]], GenerationRun]
NO_VECTOR = "the model made no vector of this text"


class EncodedPrompt(NamedTuple):
    """A text for the engine: its tokens, or itself where the engine takes text."""

    ids: list[int]
    text: str = ""


class Vector(NamedTuple):
    """The embedding of one text, float32 little-endian, and its number of tokens."""

    data: bytes
    tokens: int


class Embedding:
    """The texts of one request. `start` is the engine's, of one version."""

    def __init__(
        self,
        start: Start,
        prompts: Sequence[EncodedPrompt],
        note: Callable[[EncodedPrompt], TextNote],
    ) -> None:
        self._start, self._prompts, self._note = start, prompts, note
        self.taken_ns = 0
        """The time of the last record, in nanoseconds of time.monotonic_ns."""
        self._begun = 0  # texts
        self._runs: dict[int, GenerationRun] = {}
        self._vectors: dict[int, Vector] = {}
        self._fault: ServeError | None = None
        self._news = asyncio.Event()

    async def run(self) -> list[Vector]:
        """Return the vectors in order. Raises ServeError: the queue's refusal, or the fault of the first
        text that failed."""
        while True:
            if self._fault is not None:
                raise self._fault
            self._fill()
            if self._runs:
                self._news.clear()
                await self._news.wait()
            elif self._begun < len(self._prompts):
                await asyncio.sleep(AGAIN_S)
            else:
                return [self._vectors[at] for at in range(len(self._prompts))]

    def cancel(self) -> None:
        """End it; `run` raises."""
        self._fail(ServeError(Kind.CANCELLED, CANCELLED))
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.cancel()

    async def __aenter__(self) -> Embedding:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.cancel()

    def _fill(self) -> None:
        """Queue as many texts as fit. Raises ServeError when the queue has no place for the first, with
        retry_after_s where the queue knows it."""
        while self._begun < len(self._prompts) and len(self._runs) < AT_A_TIME:
            try:
                self._begin(self._begun)
            except ServeError as fault:
                if fault.retry_after_s is None or not self._begun:
                    raise
                return
            self._begun += 1

    def _begin(self, at: int) -> None:
        prompt = self._prompts[at]

        def heard(records: list[Record]) -> None:
            self._hear(at, records)

        self._runs[at] = self._start(prompt.ids, self._note(prompt), heard)

    def _hear(self, at: int, records: list[Record]) -> None:
        """Take the last record of a text; records of tokens before it are ignored."""
        _, finish, _, data = records[-1]
        run = self._runs.get(at)
        if run is None:
            return
        run.taken(len(records))
        if finish:
            del self._runs[at]
            self._end(at, finish, data)

    def _end(self, at: int, finish: int, data: bytes) -> None:
        try:
            self._vectors[at] = _read_vector(finish, data, len(self._prompts[at].ids))
        except ServeError as fault:
            self._fail(fault)
        except Exception as error:  # malformed records
            self._fail(internal_error(self, error))
        self.taken_ns = monotonic_ns()
        self._news.set()

    def _fail(self, fault: ServeError) -> None:
        self._fault = self._fault or fault
        self._news.set()


def _read_vector(finish: int, data: bytes, tokens: int) -> Vector:
    """Return the vector of a last record. Raises ServeError with the engine's fault."""
    extra = read_extra(data) if data else Extra()
    if extra.vector and finish == Finish.STOP:
        return Vector(extra.vector, tokens or extra.prompt_tokens)
    raise fault_of(Finish(finish), extra) or ServeError(Kind.INTERNAL, NO_VECTOR)
