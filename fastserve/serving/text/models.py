"""Text models as dialects find them: by name, with what is worked out once for each version.

A version's tokenizer is loaded when the version becomes available, in a thread: that of a large vocabulary
takes a second. All dialects of a front process share it; it ends with the version.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from fastserve.apart import Apart
from fastserve.codec.text import Info, Record, TextNote
from fastserve.errors import Kind, ServeError
from fastserve.repository.version import Version, VersionState
from fastserve.serving.dialect import EngineFace, ServingContext
from fastserve.serving.text.ask import PromptFault, TextAsk, check_stops, check_text, fit
from fastserve.serving.text.chat import ChatTemplate
from fastserve.serving.text.detokenize import Detokenizer
from fastserve.serving.text.embed import Embedding, Prompt
from fastserve.serving.text.stops import StopStrings
from fastserve.serving.text.stream import TextStream
from fastserve.serving.text.tokenizer import Piece, Tokenizer, load_tokenizer

WORK = 64
"""Times a character: a token is made of three or four of them, in a microsecond each."""
ID_WORK = 16
"""Times a token that somebody else has made: each is looked at thrice."""
SEEDS = 1 << 64


class Texts:
    """The text models of one front process, for one dialect."""

    def __init__(self, context: ServingContext, default: str = "") -> None:
        self._engine = context.engine
        self._catalog = context.engine.catalog
        self._default = default
        self._catalog.on_change.append(self._changed)

    def names(self) -> list[str]:
        """The models that can be asked, in order."""
        return sorted(name for name in self._catalog.models if self._available(name) is not None)

    def find(self, name: str) -> TextModel:
        """The newest version of a model; for "" the default one, or the only one that writes. Raises
        ServeError NOT_FOUND."""
        if not name:
            name = self._default or self._only()
        version = self._available(name)
        if version is None:
            raise ServeError(Kind.NOT_FOUND, f"Model {name} not found.")
        return self.of(version)

    def of(self, version: Version) -> TextModel:
        """A version that is a text model."""
        found = version.text_model
        if found is None:
            info = self._engine.text_info(version)
            assert info is not None
            found = version.text_model = TextModel(self._engine, version, info)
        assert isinstance(found, TextModel)
        return found

    def _changed(self, version: Version) -> None:
        if version.state is VersionState.AVAILABLE and self._engine.text_info(version) is not None:
            self.of(version).load()

    def _only(self) -> str:
        found = self.names()
        names = [name for name in found if self.find(name).info.writes] or found
        if len(names) != 1:
            has = f"there are {', '.join(names)}" if names else "there is none"
            raise ServeError(Kind.NOT_FOUND, f"no model was named, and {has}")
        return names[0]

    def _available(self, name: str) -> Version | None:
        version = self._catalog.available(name)
        return None if version is None or self._engine.text_info(version) is None else version


class TextModel:
    """One version of a model that generates text. Not kept past a request: the version does that."""

    def __init__(self, engine: EngineFace, version: Version, info: Info) -> None:
        self._engine, self._apart = engine, Apart()
        self.version, self.info = version, info
        self.name = version.model
        self.created = int(time.time())
        self._tokenizer: Tokenizer | None = None
        self._loading: asyncio.Future[Tokenizer] | None = None
        self._chat: ChatTemplate | None = None

    def load(self) -> None:
        """Begin to load its tokenizer, where there is a loop to do it beside."""
        if self.info.tokenizer != "folder":  # there is nothing to read
            self._tokenizer = self._read_tokenizer()
        if self._tokenizer is None and self._loading is None:
            with suppress(RuntimeError):
                self._loading = asyncio.get_running_loop().run_in_executor(None, self._read_tokenizer)
                self._loading.add_done_callback(_look)

    def _read_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.info.tokenizer, self.version.folder, self.name)

    async def _ready(self) -> Tokenizer:
        """Its tokenizer. Raises ServeError; whoever asks the next time tries again."""
        if self._tokenizer is None:
            self.load()
        if self._tokenizer is None:
            assert self._loading is not None
            try:
                self._tokenizer = await asyncio.shield(self._loading)
            except ServeError:
                self._loading = None
                raise
        return self._tokenizer

    @property
    def _known(self) -> Tokenizer:
        """The same for those who cannot wait: they ask after a stream began, and it is there."""
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    @property
    def most_prompt_tokens(self) -> int:
        """A prompt may have."""
        return max(0, min(self.info.max_prompt_tokens, self.info.max_tokens - 1))

    # --- text and tokens

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Its tokens, with those that the model wants around it. Raises TextTooLong, NoTokenizer."""
        check_text(text)
        encode = (await self._ready()).encode
        return await self._apart(len(text) * WORK, encode, text, special=special)

    async def pieces(self, text: str, *, special: bool = True) -> list[Piece]:
        """Its tokens, with where each stands in it."""
        check_text(text)
        pieces = (await self._ready()).pieces
        return await self._apart(len(text) * WORK, pieces, text, special=special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; without that of special ones, unless asked for."""
        return self._known.decode(ids, special=special)

    def token_text(self, token: int) -> str:
        """One token by itself, special ones too."""
        return self._known.token_text(token)

    def token_bytes(self, token: int) -> bytes:
        """What it adds to a text's bytes; b"" where nobody here knows."""
        return self._known.token_bytes(token)

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        """What makes text of the tokens of one sequence, as they come."""
        return self._known.detokenizer(special=special)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of messages: ask with `templated`. Raises
        ServeError: INVALID_ARGUMENT when the template refuses them or there is none."""
        if self._chat is None:
            self._chat = ChatTemplate(self.version.folder, self.name)
        return await self._chat.render(messages, tools, add_generation_prompt, variables)

    # --- sequences

    async def start(self, ask: TextAsk) -> TextStream:
        """Start it. Raises ServeError: TextTooLong, PromptTooLong, UnknownToken, BadStop, UNAVAILABLE or
        RESOURCE_EXHAUSTED where it cannot wait any more."""
        return (await self.start_many(ask, 1))[0]

    async def start_many(self, ask: TextAsk, count: int) -> list[TextStream]:
        """Start it so many times, with seeds that follow each other; all of them, or it raises."""
        if not self.info.writes:
            text = f"model '{self.name}' makes vectors of texts, and writes none"
            raise ServeError(Kind.UNIMPLEMENTED, text)
        check_stops(ask.stop)
        if ask.images and not self.info.vision:
            raise ServeError(Kind.INVALID_ARGUMENT, f"model '{self.name}' takes text only, not images")
        await self._ready()
        ids, text = await self._apart(_work_of(ask), self._read, ask)
        seed = int.from_bytes(os.urandom(8), "little") if ask.seed is None else ask.seed
        streams: list[TextStream] = []
        try:
            while len(streams) < count:
                streams.append(self._start(ask, ids, text, (seed + len(streams)) % SEEDS))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def _read_all(self, asks: Sequence[TextAsk]) -> list[Prompt]:
        found = []
        for number, ask in enumerate(asks):
            try:
                found.append(self._read(ask))
            except PromptFault as fault:
                fault.prompt = number
                raise
        return found

    def _read(self, ask: TextAsk) -> Prompt:
        """The tokens of its prompt; or the prompt itself, where the engine takes text."""
        prompt = ask.prompt
        if isinstance(prompt, str):
            check_text(prompt)
            if not self.info.tokenizer:
                return Prompt([], prompt)
            prompt = self._known.encode(prompt, special=not ask.templated)
        return Prompt(fit(prompt, ask.truncate, self.most_prompt_tokens, self.info.vocab_size))

    async def embedding(self, asks: Sequence[TextAsk]) -> Embedding:
        """What makes their vectors; of an ask its prompt counts, its priority, deadline and id. Raises
        ServeError: UNIMPLEMENTED where the model makes none, and as `start`."""
        if not self.info.embeds:
            raise ServeError(Kind.UNIMPLEMENTED, f"model '{self.name}' makes no embeddings")
        await self._ready()
        # As one piece of work: many small texts are as much as they are together.
        prompts = await self._apart(sum(map(_work_of, asks)), self._read_all, asks)
        first = asks[0]

        def note(prompt: Prompt) -> TextNote:
            return TextNote(
                text=prompt.text,
                priority=first.priority,
                deadline_ns=first.deadline_ns,
                request_id=first.request_id,
                embeds=True,
            )

        return Embedding(partial(self._engine.generate, self.version), prompts, note)

    def _start(self, ask: TextAsk, ids: list[int], text: str, seed: int) -> TextStream:
        info, tokenizer = self.info, self._known
        most = min(ask.sampling.max_new_tokens, info.max_new_tokens, info.max_tokens - len(ids))
        stream = TextStream(
            ids,
            seed,
            tokenizer.detokenizer(special=ask.special),
            StopStrings(ask.stop, include=ask.include_stop) if ask.stop else None,
            tokenizer.specials,
            include_stop=ask.include_stop,
        )
        note = TextNote(
            sampling=msgspec.structs.replace(ask.sampling, seed=seed, max_new_tokens=most),
            text=text,
            priority=ask.priority,
            deadline_ns=ask.deadline_ns,
            request_id=ask.request_id,
            parameters=dict(ask.parameters),
            images=list(ask.images),
        )
        reader = weakref.ref(stream)

        def heard(records: list[Record]) -> None:
            there = reader()
            if there is not None:
                there.heard(records)

        stream.bind(self._engine.generate(self.version, ids, note, heard))
        return stream


def _work_of(ask: TextAsk) -> int:
    """Of reading its prompt, as Apart counts."""
    return len(ask.prompt) * (WORK if isinstance(ask.prompt, str) else ID_WORK)


def _look(loading: asyncio.Future[Tokenizer]) -> None:
    """Whoever asks is told what went wrong; that nobody has asked yet is no mistake."""
    if not loading.cancelled():
        loading.exception()
