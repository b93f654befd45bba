"""One sequence as its reader sees it: lists of tokens with their text, and then how it ended.

    engine --records--> detokenizer --> stop strings --> [Token, Token] --> async for tokens in stream
      ^                                                                          |
      '----------------- taken(n): the reader is that much nearer <-------------'

A reader that stands still stops its sequence after TextOptions.reader_tokens: nothing is unbounded. One that
leaves, in whatever way, cancels it: with `async with`, with aclose(), or by letting go of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic_ns
from types import TracebackType
from typing import Any

import msgspec

from fastserve._ext.text_tokens import Flow, Frames, Token, take_plain
from fastserve.codec.text import Extra, Finish, Logprobs, Record, Run, read_extra
from fastserve.errors import DeadlineError, Kind, ModelError, ServeError
from fastserve.serving.exchange import unforeseen
from fastserve.serving.text.detokenize import Detokenizer
from fastserve.serving.text.stops import StopStrings

CANCELLED = "the request was cancelled"
TIMED_OUT = "the request's time was up"
FAILED = "the model failed"
NOT_THE_MODELS = (Kind.UNAVAILABLE, Kind.RESOURCE_EXHAUSTED)


class Ending(msgspec.Struct):
    """How a sequence ended. `text` is the whole of it: that of all tokens, in order. With a `fault`
    (cancelled, out of time, failed) it is what there was until then."""

    reason: Finish
    text: str
    token_ids: list[int]
    stop: str | None = None
    """The stop string, or None."""
    fault: ServeError | None = None

    @property
    def generated(self) -> int:
        """Tokens, the one that ended it too."""
        return len(self.token_ids)


class TextStream:
    """Made by TextModel.start. `seed` is the one it runs with."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
        specials: frozenset[int] = frozenset(),
        *,
        include_stop: bool = False,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.prompt_tokens = len(prompt_ids)
        """Where the engine takes text: 0 until it has counted them, with the first token."""
        self.prompt_logprobs: Sequence[tuple[int, float | None]] = ()
        self.seed = seed
        self.ending: Ending | None = None
        self.told: Callable[[], object] | None = None
        """Called on the loop when there is news, once for all that came together."""
        self._detokenizer, self._stops, self._specials = detokenizer, stops, specials
        self._include_stop = include_stop
        self._run: Run | None = None
        self._flow: Flow | None = None
        self._heard_ns = 0
        self._came: list[Token] = []
        self._records = 0  # heard and not taken
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._waiting: asyncio.Future[None] | None = None

    # --- the reader's side

    def __aiter__(self) -> AsyncIterator[list[Token]]:
        return self

    async def __anext__(self) -> list[Token]:
        """All tokens that came since; with the last of them `ending` is set. An ending without a token, as of
        a fault, comes with an empty list."""
        while not self._came and not self._records:
            if self.ending is not None:
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self.take()

    @property
    def has_news(self) -> bool:
        """Whether anything came that was not taken, or it is over."""
        return bool(self._came or self._records) or self.ending is not None

    def take(self) -> list[Token]:
        """The same at once: none when nothing came."""
        tokens, self._came = self._came, []
        records, self._records = self._records, 0
        if records and self._run is not None:
            self._run.taken(records)
        return tokens

    @property
    def heard_ns(self) -> int:
        """When something last came, as time.monotonic_ns counts; 0: nothing yet."""
        return self._heard_ns if self._flow is None else max(self._heard_ns, self._flow.heard_ns)

    @property
    def last(self) -> Token | None:
        """The last token of all that came."""
        if not self._ids:
            return None
        token = self._ids[-1]
        return Token(token, self._texts[-1], len(self._ids) - 1, 0, token in self._specials, Finish.NONE)

    def flow(self, frames: Frames, reply: Any, failed: Callable[[Exception], object]) -> Flow | None:
        """While it is `open`, plain tokens go as `frames` from the engine's step into the reply, and nobody
        here hears of them; None where each has to be looked at for stop strings. It may be open while
        nothing that came before waits to be taken."""
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

    def unflow(self) -> None:
        """It does not any more: who lets go of the stream now ends it, as ever."""
        self._heard_ns, self._flow = self.heard_ns, None
        if self._run is not None:
            self._run.flow = None

    async def rest(self) -> Ending:
        """Read to the end for the whole of it."""
        self.told = self.take
        while self.ending is None:
            self.take()
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self.take()
        return self.ending

    def cancel(self) -> None:
        """End it; whoever still reads gets an ending with a fault."""
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if self._run is not None:
            self._run.cancel()

    # --- the engine's side

    def bind(self, run: Run) -> None:
        """It runs."""
        self._run = run
        if self.ending is not None:
            self._leave()

    def heard(self, records: list[Record]) -> None:
        """Records came. The engine holds this weakly: a stream that nobody reads hears nothing more."""
        if self.ending is not None:  # they were under way when it ended here, and its reader knows
            return
        self._heard_ns = monotonic_ns()
        self._records += len(records)
        try:
            self._take(records)
        except Exception as error:  # of its tokenizer, or bytes of its engine that are none
            self._end(Finish.FAILED, fault=unforeseen(self, error))
        if self.ending is not None:
            self._leave()
        self._tell()

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
        if stops is not None:
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

    def _leave(self) -> None:
        """It is over for its reader; where the engine does not know yet, it is told."""
        run, self._run = self._run, None
        if run is not None:
            run.cancel(self.ending.reason if self.ending is not None else Finish.CANCELLED)

    def _tell(self) -> None:
        if self.told is not None:
            self.told()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def fault_of(reason: Finish, extra: Extra | None) -> ServeError | None:
    """What a client is told of an ending that is none of its answer's."""
    if reason is Finish.TIMEOUT:
        return DeadlineError(TIMED_OUT, queued=False)
    if reason is Finish.CANCELLED:
        return ServeError(Kind.CANCELLED, CANCELLED)
    if reason is not Finish.FAILED:
        return None
    if extra is None or not extra.message:
        return ModelError(Kind.INTERNAL, FAILED)
    kind = Kind(extra.kind) if extra.kind else Kind.INTERNAL
    # That its worker died, or that there was no room for it, is not the model's word.
    return (ServeError if kind in NOT_THE_MODELS else ModelError)(kind, extra.message)


async def together(streams: Sequence[TextStream]) -> AsyncIterator[tuple[int, list[Token]]]:
    """What comes of several streams, with whose it is, as it comes. Whoever leaves closes the streams."""
    news = asyncio.Event()
    for stream in streams:
        stream.told = news.set
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
