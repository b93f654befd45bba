"""Requests to text models, and text models by name, with the tokenizer and chat template of each version.

Dialects check the bounds of their APIs (temperature in (0, 2], at most 4 stop strings); bounds that hold
for a model through every API are here: characters, tokens, vocabulary. Each fault is a class of its own
with its numbers, so that a dialect can report it in its own form.

A version's tokenizer is loaded when the version becomes available, in a thread: a large vocabulary takes a
second. All dialects of a front process share it; it ends with the version.

`model_card` is the version as OpenAI's API names a model. `answer_text` runs one call of any text API:

    async def answer(call: TextCall) -> bool:        replies, or sends a stream
        call.model = texts.find(name)
        ...
        return True

    await answer_text(call, service.traffic, answer, refuse)
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic_ns
from typing import Any

import msgspec

from fastserve._ext.stop_strings import StopStrings, StopTable
from fastserve.codec.generation import Grammar, Info, Record, Sampling, TextNote
from fastserve.engine import Engine
from fastserve.errors import Kind, ServeError, install_text, server_starting
from fastserve.metrics.names import Traffic
from fastserve.net.request import Call
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Attachment, Version, VersionState
from fastserve.serving.dialect import ServingContext
from fastserve.serving.exchange import internal_error
from fastserve.serving.text.chat import ChatTemplate
from fastserve.serving.text.stream import Embedding, EncodedPrompt, SequenceTrace, TextStream
from fastserve.serving.text.tokenizer import LEAST_LONGEST, MOST_CHARACTERS, Piece, Tokenizer, load_tokenizer
from fastserve.util.offload import Offload
from fastserve.util.spans import current_span

LEAST_CHARACTERS = 1 << 16
"""Characters that a prompt may have for every model, however few tokens it takes."""
MOST_TOGETHER = 300_000
"""Tokens of all prompts of one request, OpenAI's own bound; a model that takes longer prompts may get one of
them."""
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1024
MOST_GRAMMAR_CHARACTERS = 64 << 10
MOST_STOP_IDS = 1024
"""Tokens that end an answer, of one request."""
MOST_BIASES = 1024
"""Tokens whose logits one request may bias."""
MOST_PROMPT_SCORES = 1 << 16
"""Log probabilities of one prompt's tokens and the likeliest in their places."""
TO_FIT = -1


@dataclass(slots=True, kw_only=True)
class TextAsk:
    """One request to a text model. `prompt` is text, or token ids."""

    prompt: str | Sequence[int]
    sampling: Sampling = Sampling()  # noqa: RUF009 -- frozen
    """Its `seed` is ignored: see below."""
    seed: int | None = None
    """64 bits; None: a random one, returned as `stream.seed`."""
    stop: Sequence[str] = ()
    include_stop: bool = False
    """The stop string, or the token of `sampling.stop_ids`, stays part of the text."""
    priority: int = 5
    deadline_ns: int = 0
    """Deadline in nanoseconds of time.monotonic_ns, 0 for none."""
    special: bool = False
    """Whether special tokens are part of the text."""
    shown: Sequence[str] = ()
    """Special tokens that are part of the text all the same."""
    truncate: int = 0
    """Keep this many tokens, the last ones. 0: all. TO_FIT (-1): as many as the model takes."""
    templated: bool = False
    """The prompt is a chat template's: the special tokens it begins with are written out."""
    request_id: str = ""
    images: Sequence[bytes] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Other parameters of the request, for engines of users' own."""


class PromptFault(ServeError):
    """A fault of a prompt. `prompt` is its index among those of an embedding, else -1; the dialect that read
    the body sets `field`, its place there."""

    prompt = -1
    field = ""

    def __init__(self, text: str) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, text)


class TextTooLong(PromptFault):
    """A prompt of no characters, or of more than `most`."""

    def __init__(self, got: int, most: int) -> None:
        super().__init__(f"the prompt has {got} characters, allowed: 1 to {most}")
        self.got, self.most = got, most


class PromptTooLong(PromptFault):
    """A prompt of no tokens, or of more than the model takes; with `more`, counting stopped there."""

    def __init__(self, got: int, most: int, *, more: bool = False) -> None:
        super().__init__(f"the prompt has {got} tokens{' or more' if more else ''}, allowed: 1 to {most}")
        self.got, self.most = got, most


class PromptsTooLong(PromptFault):
    """Prompts of one request that have too many tokens, or characters, together."""

    def __init__(self, got: int, most: int, what: str = "tokens") -> None:
        super().__init__(f"the prompts have {got} {what} together, allowed: at most {most}")


class UnknownToken(PromptFault):
    """A token id that is not one of the model's."""

    def __init__(self, token: int, place: int, vocab: int) -> None:
        super().__init__(f"token {place} of the prompt is {token}, allowed: 0 to {vocab - 1}")
        self.token, self.place, self.vocab = token, place, vocab


class BadStop(ServeError):
    """A stop string that cannot be one, or too many of them."""

    def __init__(self, why: str) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, f"stop: {why}")


class SettingFault(ServeError):
    """A setting that does not fit the model or the prompt. `field` is its name for OpenAI and vLLM."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, f"`{field}` {text}")
        self.field = field


def check_text(text: str, most: int = MOST_CHARACTERS) -> None:
    """Raises TextTooLong."""
    if not 0 < len(text) <= most:
        raise TextTooLong(len(text), most)


def check_together(prompts: Sequence[str | Sequence[int]], most_tokens: int) -> None:
    """Hold all prompts of one request against what they may be together. Raises PromptsTooLong."""
    texts = [len(prompt) for prompt in prompts if isinstance(prompt, str)]
    characters = sum(size for size in texts if size <= MOST_CHARACTERS)  # a longer one is refused by itself
    if characters > MOST_CHARACTERS:
        raise PromptsTooLong(characters, MOST_CHARACTERS, "characters")
    count_together(sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)), most_tokens)


def count_together(tokens: int, most_tokens: int) -> None:
    """`most_tokens` may one prompt have. Raises PromptsTooLong."""
    most = max(MOST_TOGETHER, most_tokens)
    if tokens > most:
        raise PromptsTooLong(tokens, most)


def check_grammar(grammar: Grammar, sampling: Sampling, info: Info, model: str) -> None:
    """Raises ServeError: UNIMPLEMENTED for a model without grammars, INVALID_ARGUMENT for a long grammar, and
    for least tokens beside one, whose end is not to be held back."""
    if not info.grammars:
        missing = install_text("llguidance", "structured")
        raise ServeError(Kind.UNIMPLEMENTED, f"model '{model}' has no structured answers: {missing}")
    if sampling.min_new_tokens:
        raise SettingFault("min_tokens", "cannot be combined with a grammar, which ends its answers itself")
    if len(grammar.text) > MOST_GRAMMAR_CHARACTERS:
        text = f"a grammar of {len(grammar.text)} characters, allowed: at most {MOST_GRAMMAR_CHARACTERS}"
        raise ServeError(Kind.INVALID_ARGUMENT, text)


def check_bias(bias: Mapping[int, float], info: Info) -> None:
    """Hold the tokens of a bias against the model. Raises SettingFault."""
    if len(bias) > MOST_BIASES:
        raise SettingFault("logit_bias", f"has {len(bias)} tokens, allowed: at most {MOST_BIASES}")
    odd = next((token for token in bias if token < 0 or (info.vocab_size and token >= info.vocab_size)), None)
    if odd is not None:
        most = (info.vocab_size or 1 << 31) - 1
        raise SettingFault("logit_bias", f"names token {odd}, allowed: 0 to {most}")


def check_prompt_scores(sampling: Sampling, tokens: int) -> None:
    """Hold what is asked of a prompt's tokens against what one record can have. Raises SettingFault."""
    asked = tokens * (sampling.prompt_best + 1)
    if asked > MOST_PROMPT_SCORES:
        text = (
            f"asks for {asked} log probabilities of a prompt of {tokens} tokens, "
            f"allowed: at most {MOST_PROMPT_SCORES}"
        )
        raise SettingFault("prompt_logprobs", text)


def check_stops(stops: Sequence[str]) -> None:
    """Raises BadStop."""
    if len(stops) > MOST_STOPS:
        raise BadStop(f"{len(stops)} strings given, allowed: at most {MOST_STOPS}")
    for stop in stops:
        if not 0 < len(stop) <= MOST_STOP_CHARACTERS:
            raise BadStop(f"a string of {len(stop)} characters given, allowed: 1 to {MOST_STOP_CHARACTERS}")


def fit(ids: Sequence[int], truncate: int, most: int, vocab: int) -> list[int]:
    """The tokens to run. `vocab` 0: any. Raises PromptTooLong and UnknownToken."""
    keep = most if truncate == TO_FIT else truncate
    kept = list(ids[-keep:] if 0 < keep < len(ids) else ids)
    if not 0 < len(kept) <= most:
        raise PromptTooLong(len(kept), most)
    if min(kept) < 0 or (vocab and max(kept) >= vocab):
        place = next(i for i, token in enumerate(ids) if token < 0 or (vocab and token >= vocab))
        raise UnknownToken(ids[place], place, vocab or 1 << 31)
    return kept


INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    # DeepSeek
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)
"""Tokens of models that fill in a text: before the prefix, between it and the suffix, and before the middle,
which the model writes."""
OWNER = "fastserve"


def created_of(version: Version) -> int:
    """Return the modification time of a version's folder, in seconds of the epoch: the same in every
    process."""
    try:
        return int(version.folder.stat().st_mtime)
    except OSError:
        return 0


def model_card(version: Version) -> dict[str, Any]:
    """Return the four keys of OpenAI's model object."""
    return {"id": version.model, "object": "model", "created": created_of(version), "owned_by": OWNER}


def card_of(engine: Engine, catalog: Catalog, name: str) -> dict[str, Any]:
    """Return the model card of a name's newest version; empty where that is no text model."""
    version = catalog.available(name)
    return {} if version is None or engine.text_info(version) is None else model_card(version)


WORK = 128
"""Cost of a character in bytes of offloaded work: a token has three or four of them, one where the text is
odd, and takes 2 us."""
ID_WORK = 16
"""Cost of a given token id: it is looked at three times."""
SEEDS = 1 << 64
EASY_CHARACTERS = 1 << 14
"""Length of a text that is tokenized at once, without an estimate of its tokens."""
MOST_PIECES = 1 << 14
"""Tokens of a text that are counted and shown, though its model may take fewer."""
SLACK = 64
"""Tokens by which the beginning of a text may differ from the same in the whole of it."""
_MODEL: Attachment[TextModel] = Attachment()


class TextModels:
    """The text models of one front process, for one dialect."""

    def __init__(self, context: ServingContext, default: str = "") -> None:
        self._engine = context.engine
        self._catalog = context.catalog
        self._default = default
        self._catalog.on_change.append(self._changed)

    def names(self) -> list[str]:
        """The models that can be asked, in order."""
        return sorted(name for name in self._catalog.models if self._available(name) is not None)

    @property
    def most_characters(self) -> int:
        """Characters of the longest prompt that any model takes."""
        return max([LEAST_CHARACTERS, *(self.find(name).most_characters for name in self.names())])

    @property
    def see(self) -> bool:
        """Whether any model takes images."""
        return any(self.find(name).info.vision for name in self.names())

    def serves(self, name: str) -> bool:
        """Return whether a name is that of a model that can be asked, or of an adapter."""
        return name in self.names() or bool(self._with_adapter(name))

    def knows(self, name: str) -> bool:
        """Return whether a model of any kind has this name, ready or not."""
        return name in self._catalog.models

    def only(self, *, embeds: bool = False) -> str:
        """Return the only model that writes, or makes embeddings; "" where there is none, or several. Raises
        ServeError UNAVAILABLE while the server starts."""
        self._check_started()
        infos = {name: self.find(name).info for name in self.names()}
        found = [name for name, info in infos.items() if (info.embeds if embeds else info.writes)]
        return found[0] if len(found) == 1 else ""

    def find(self, name: str) -> TextModel:
        """Return the newest version of a model; for "" the default model, or the only one that writes.
        Raises ServeError NOT_FOUND, UNAVAILABLE for one that the server's start has not loaded yet."""
        if not name:
            name = self._default or self._only()
        version = self._available(name)
        if version is None:
            self._catalog.explain_absence(name)
            raise ServeError(Kind.NOT_FOUND, f"Model {name} not found.")
        return self.of(version)

    def find_adapted(self, name: str) -> TextModel:
        """Return the model of a name as `find`; or, where no model has it, the model with its adapter of that
        name. A client needs leave for both names. Raises ServeError, INVALID_ARGUMENT where several models
        have such an adapter."""
        found = [] if not name or self.knows(name) else self._with_adapter(name)
        if len(found) > 1:
            text = f"the models {' and '.join(found)} each have an adapter '{name}'"
            raise ServeError(Kind.INVALID_ARGUMENT, text)
        return self.adapt(self.find(found[0]), name) if found else self.find(name)

    def adapt(self, model: TextModel, adapter: str) -> TextModel:
        """Return a model with one of its adapters. Raises ServeError NOT_FOUND, PERMISSION_DENIED."""
        self._catalog.check_allowed(adapter)
        return model.adapted(adapter)

    def adapters(self, model: TextModel) -> list[str]:
        """Return the adapters of a model that clients may name as a model: nothing else has the name."""
        given = [name for name in model.info.adapters if self._catalog.allows(name)]
        return [name for name in given if not self.knows(name) and len(self._with_adapter(name)) == 1]

    def _with_adapter(self, name: str) -> list[str]:
        return [model for model in self.names() if name in self.find(model).info.adapters]

    def of(self, version: Version) -> TextModel:
        """Return the text model of a version."""
        found = _MODEL.get(version)
        if found is None:
            info = self._engine.text_info(version)
            assert info is not None
            found = _MODEL.put(version, TextModel(self._engine, version, info))
        return found

    def _changed(self, version: Version) -> None:
        if version.state is VersionState.AVAILABLE and self._engine.text_info(version) is not None:
            self.of(version).load()

    def _check_started(self) -> None:
        """Raise ServeError UNAVAILABLE while another text model may still come: which one is the only one is
        not known yet."""
        for name, may_write in self._catalog.starting.items():
            if may_write:
                raise server_starting(name)

    def _only(self) -> str:
        self._check_started()
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
    """One version of a model that generates text. The version owns it: do not keep it past a request."""

    def __init__(self, engine: Engine, version: Version, info: Info) -> None:
        self._engine, self._offload = engine, Offload()
        self.version, self.info = version, info
        self.name = version.model
        self.adapter = ""
        """The adapter that it writes with; empty: none."""
        self._adapted: dict[str, TextModel] = {}
        self._tokenizer: Tokenizer | None = None
        self._loading: asyncio.Future[Tokenizer] | None = None
        self._chat: ChatTemplate | None = None

    @property
    def shown_name(self) -> str:
        """The name that answers have: the adapter's, or its own."""
        return self.adapter or self.name

    def adapted(self, adapter: str) -> TextModel:
        """Return it with one of its adapters. Raises ServeError NOT_FOUND."""
        if adapter not in self.info.adapters:
            raise ServeError(Kind.NOT_FOUND, f"model '{self.name}' has no adapter '{adapter}'")
        made = self._adapted.get(adapter)
        if made is None:
            made = self._adapted[adapter] = copy(self)
            made.adapter, made._adapted = adapter, {}
        return made

    def load(self) -> None:
        """Begin to load the tokenizer, where a loop runs."""
        if self.info.tokenizer != "folder":  # there is nothing to read
            self._tokenizer = self._read_tokenizer()
        if self._tokenizer is None and self._loading is None:
            with suppress(RuntimeError):
                self._loading = asyncio.get_running_loop().run_in_executor(None, self._read_tokenizer)
                self._loading.add_done_callback(_look)

    def _read_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.info.tokenizer, self.version.folder, self.name)

    async def _ready(self) -> Tokenizer:
        """Return the tokenizer once it is loaded. Raises ServeError; the next call tries again."""
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
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, for callers that cannot wait: it is loaded once a stream has begun."""
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    @property
    def most_prompt_tokens(self) -> int:
        """Tokens that a prompt may have."""
        return max(0, min(self.info.max_prompt_tokens, self.info.max_tokens - 1))

    @property
    def most_characters(self) -> int:
        """Characters that a prompt may have, as many as its tokens can stand for."""
        return self.characters_of(self.most_prompt_tokens)

    def characters_of(self, tokens: int) -> int:
        """Return the most characters that so many tokens can stand for."""
        longest = LEAST_LONGEST if self._tokenizer is None else self._tokenizer.longest
        return min(MOST_CHARACTERS, max(LEAST_CHARACTERS, tokens * longest))

    # --- text and tokens

    async def encode(self, text: str, *, special: bool = True, keep: int = 0) -> list[int]:
        """Return the tokens of a text, with the special ones around it. A text that is to be cut to `keep`
        tokens is encoded from its end, as far as needed. Raises TextTooLong, PromptTooLong, NoTokenizer."""
        await self._ready()
        return await self._offload(len(text) * WORK, self._encode, text, special, keep)

    async def pieces(self, text: str, *, special: bool = True) -> list[Piece]:
        """Return the tokens of a text with their places in it. Raises as `encode`."""
        await self._ready()
        return await self._offload(len(text) * WORK, self._pieces, text, special)

    async def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text that need not be a prompt: up to MOST_PIECES where prompts are shorter.
        Raises as `encode`."""
        await self._ready()
        most = max(self.most_prompt_tokens, MOST_PIECES)
        check_text(text, self.characters_of(most))
        return await self._offload(len(text) * WORK, self._encode_within, text, special, most)

    async def infill(self, prefixes: Sequence[str], suffix: str, *, special: bool = True) -> list[list[int]]:
        """Return prompts after which the model writes what stands between each prefix and the suffix; with
        `special`, begun as the tokenizer begins a text. Raises SettingFault where the vocabulary has no
        tokens for it, and as `encode`, of a prefix with `prompt` set to its place."""
        tokenizer = await self._ready()
        marks = next(
            (each for each in (_marks(tokenizer, names) for names in INFILL) if None not in each), None
        )
        if marks is None:
            names = ", ".join(INFILL[0])
            text = f"is not supported: the vocabulary of model '{self.name}' has no infill tokens, as {names}"
            raise SettingFault("suffix", text)
        begun = tokenizer.encode("", special=special)[:1]
        after = await self.encode(suffix, special=False)
        found: list[list[int]] = []
        for number, prefix in enumerate(prefixes):
            await asyncio.sleep(0)
            try:
                before = await self.encode(prefix, special=False) if prefix else []
            except PromptFault as fault:
                fault.prompt = number
                raise
            found.append([*begun, marks[0], *before, marks[1], *after, marks[2]])
            count_together(sum(map(len, found)), self.most_prompt_tokens)
        return found

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of up to as many tokens, special ones among them. Raises PromptTooLong,
        UnknownToken, and UNIMPLEMENTED where there is no tokenizer that could."""
        await self._ready()
        most = max(self.most_prompt_tokens, MOST_PIECES)
        if ids:
            fit(ids, 0, most, self.info.vocab_size)
        return await self._offload(len(ids) * WORK, self.tokenizer.decode, ids, special=True)

    def _pieces(self, text: str, special: bool) -> list[Piece]:
        most = max(self.most_prompt_tokens, MOST_PIECES)
        check_text(text, self.characters_of(most))
        if len(text) > EASY_CHARACTERS:  # what a token takes here is some hundred bytes
            found = len(self._encode_within(text, special, most))
            if found > most:
                raise PromptTooLong(found, most)
        return self.tokenizer.pieces(text, special=special)

    def _encode(self, text: str, special: bool, keep: int = 0) -> list[int]:
        """Raises TextTooLong, and PromptTooLong where that shows before all of it was read."""
        most = self.most_prompt_tokens
        if not 0 < keep <= most:
            check_text(text, self.most_characters)
            return self._encode_within(text, special, most)
        check_text(text)
        size, enough = max(EASY_CHARACTERS, keep), keep + SLACK
        while True:  # doubles the part at its end
            found = self.tokenizer.encode(text[-size:], special=special)
            if size >= len(text) or len(found) >= enough:
                return found
            size *= 2

    def _encode_within(self, text: str, special: bool, most: int) -> list[int]:
        """A text that has too many tokens takes no more time and memory than twice of what is allowed. Raises
        PromptTooLong."""
        size = max(EASY_CHARACTERS, most)
        while True:  # doubles the part at its beginning
            found = self.tokenizer.encode(text[:size], special=special)
            if size >= len(text):
                return found
            if len(found) > most + SLACK:
                raise PromptTooLong(len(found) - SLACK, most, more=True)
            size *= 2

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt that the model's chat template makes of messages; start it with `templated`.
        Raises ServeError: INVALID_ARGUMENT when the template refuses them or there is none."""
        await self._ready()
        characters = sum(len(message.get("content") or "") for message in messages)
        if characters > self.most_characters:
            raise TextTooLong(characters, self.most_characters)
        return await self._template().render(messages, tools, add_generation_prompt, variables)

    async def tool_template(self) -> str:
        """Return the text of the chat template that tools are given to; "" where it has no place for tools.
        The tokenizer is loaded then. Raises ServeError as `chat`."""
        await self._ready()
        return await self._template().find_tools()

    @property
    def tool_parser(self) -> str:
        """TextOptions.tool_parser of the model."""
        options = self.version.config.text
        return "auto" if options is None else options.tool_parser

    def _template(self) -> ChatTemplate:
        if self._chat is None:
            self._chat = ChatTemplate(self.version.folder, self.name)
        return self._chat

    # --- sequences

    async def start(self, ask: TextAsk) -> TextStream:
        """Start one sequence. Raises ServeError: TextTooLong, PromptTooLong, UnknownToken, BadStop;
        UNAVAILABLE or RESOURCE_EXHAUSTED when the queue is full."""
        return (await self.start_many(ask, 1))[0]

    async def start_many(self, ask: TextAsk, count: int) -> list[TextStream]:
        """Start `count` sequences of one prompt, with consecutive seeds; all of them, or it raises. The
        first alone ranks the prompt's tokens (`prompt_best`)."""
        if not self.info.writes:
            text = f"model '{self.name}' makes vectors of texts, and writes none"
            raise ServeError(Kind.UNIMPLEMENTED, text)
        check_stops(ask.stop)
        if ask.sampling.grammar is not None:
            check_grammar(ask.sampling.grammar, ask.sampling, self.info, self.name)
        if ask.sampling.logit_bias:
            check_bias(ask.sampling.logit_bias, self.info)
        if ask.images and not self.info.vision:
            raise ServeError(Kind.INVALID_ARGUMENT, f"model '{self.name}' takes text only, not images")
        await self._ready()
        ids, text = await self._offload(_work_of(ask), self._read, ask)
        check_prompt_scores(ask.sampling, len(ids))
        if (traced := current_span()) is not None:
            traced.add("decode", traced.started_ns, monotonic_ns())
        seed = int.from_bytes(os.urandom(8), "little") if ask.seed is None else ask.seed
        stops = StopTable(ask.stop) if ask.stop else None
        streams: list[TextStream] = []
        try:
            while len(streams) < count:
                streams.append(self._start(ask, ids, text, (seed + len(streams)) % SEEDS, stops))
                if ask.sampling.prompt_best >= 0:
                    unranked = msgspec.structs.replace(ask.sampling, prompt_logprobs=False, prompt_best=-1)
                    ask = replace(ask, sampling=unranked)
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def _read_all(self, asks: Sequence[TextAsk]) -> list[EncodedPrompt]:
        found: list[EncodedPrompt] = []
        tokens = 0
        for number, ask in enumerate(asks):
            try:
                found.append(self._read(ask))
            except PromptFault as fault:
                fault.prompt = number
                raise
            tokens += len(found[-1].ids)
            count_together(tokens, self.most_prompt_tokens)
        return found

    def _read(self, ask: TextAsk) -> EncodedPrompt:
        """The tokens of its prompt; or the prompt itself, where the engine takes text."""
        prompt = ask.prompt
        if isinstance(prompt, str):
            if not self.info.tokenizer:
                check_text(prompt)
                return EncodedPrompt([], prompt)
            keep = self.most_prompt_tokens if ask.truncate == TO_FIT else ask.truncate
            prompt = self._encode(prompt, not ask.templated, keep)
        return EncodedPrompt(fit(prompt, ask.truncate, self.most_prompt_tokens, self.info.vocab_size))

    async def embedding(self, asks: Sequence[TextAsk]) -> Embedding:
        """Return the embedding of several prompts; their priority, deadline and id are the first's. Raises
        ServeError: UNIMPLEMENTED where the model makes no embeddings, and as `start`."""
        if not self.info.embeds:
            raise ServeError(Kind.UNIMPLEMENTED, f"model '{self.name}' makes no embeddings")
        await self._ready()
        check_together([ask.prompt for ask in asks], self.most_prompt_tokens)
        # As one piece of work: many small texts add up.
        prompts = await self._offload(sum(map(_work_of, asks)), self._read_all, asks)
        first = asks[0]

        def note(prompt: EncodedPrompt) -> TextNote:
            return TextNote(
                text=prompt.text,
                priority=first.priority,
                deadline_ns=first.deadline_ns,
                request_id=first.request_id,
                adapter=self.adapter,
                embeds=True,
            )

        return Embedding(partial(self._engine.generate, self.version), prompts, note)

    def _start(
        self, ask: TextAsk, ids: list[int], text: str, seed: int, stops: StopTable | None
    ) -> TextStream:
        info, tokenizer = self.info, self.tokenizer
        most = min(ask.sampling.max_new_tokens, info.max_new_tokens, info.max_tokens - len(ids))
        stream = TextStream(
            ids,
            seed,
            tokenizer.detokenizer(special=ask.special, shown=ask.shown),
            None if stops is None else StopStrings(stops, include_stop=ask.include_stop),
            tokenizer.specials,
            include_stop=ask.include_stop,
            least_tokens=ask.sampling.min_new_tokens,
        )
        note = TextNote(
            sampling=msgspec.structs.replace(ask.sampling, seed=seed, max_new_tokens=most),
            text=text,
            priority=ask.priority,
            deadline_ns=ask.deadline_ns,
            request_id=ask.request_id,
            parameters=dict(ask.parameters),
            images=list(ask.images),
            adapter=self.adapter,
        )
        reader, span = weakref.ref(stream), current_span()
        if span is not None:
            stream.trace = SequenceTrace(span, self.name, self.version.number)

        def heard(records: list[Record]) -> None:
            there = reader()
            if there is not None:
                if there.trace is not None:
                    there.trace.heard()
                there.on_tokens(records)

        stream.bind(self._engine.generate(self.version, ids, note, heard))
        return stream


def _marks(tokenizer: Tokenizer, names: Sequence[str]) -> list[Any]:
    return [tokenizer.token_id(name) for name in names]


def _work_of(ask: TextAsk) -> int:
    """Return the cost of reading a prompt, in bytes of offloaded work."""
    return len(ask.prompt) * (WORK if isinstance(ask.prompt, str) else ID_WORK)


def _look(loading: asyncio.Future[Tokenizer]) -> None:
    """Retrieve the exception of a load that nobody awaits yet; the next request raises it."""
    if not loading.cancelled():
        loading.exception()


class TextCall:
    """The state of one call."""

    model: TextModel | None = None

    @property
    def name(self) -> str:
        """The model's name; "" while it is not known."""
        return "" if self.model is None else self.model.name


async def answer_text(
    call: Call,
    traffic: Traffic,
    answer: Callable[[TextCall], Awaitable[bool]],
    refuse: Callable[[ServeError, str], None],
) -> None:
    """Answer a call.

    `answer` returns whether the call succeeded, and raises while nothing is sent; `refuse` replies with a
    fault and counts it for the model of that name."""
    about = TextCall()
    try:
        well = await answer(about)
    except ServeError as fault:
        refuse(fault, about.name)
    except ConnectionResetError:
        raise
    except Exception as error:
        try:
            refuse(internal_error(call, error), about.name)
        except Exception:  # the reply had begun
            call.fail(error)
    else:
        if well and about.model is not None:
            traffic.answered(about.name, about.model.version.number, call.received_ns)
