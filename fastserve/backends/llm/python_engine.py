"""The text_python backend: a user's own class in NAME/VERSION/model.py as a text engine.

    class Model:
        def __init__(self, config): ...        # as of a python model, see docs/writing-a-backend.md
        def load(self): ...                    # optional: the slow part
        info = {...}                           # optional: fields of codec.text.Info
        def generate(self, request): ...       # a generator for each request
        def embed(self, requests): ...         # instead or besides: vectors of info["embeds"] numbers
        def close(self): ...                   # optional

A class that runs its sequences itself, many in one forward pass say, has submit, cancel, step and pending
instead: it is a TextEngine. A generator is asked for one token a step, among those of all other requests:

    yield 5122              a token's id
    yield "Hello"           a piece of text without an id (its token is 0)
    yield 5122, "Hello"     both; a third value is its log probability
    yield None              nothing yet: it is asked again soon

A generator that returns ends its sequence (EOS). It is closed at max_new_tokens, after an end of sequence and
when its request is cancelled; cleanup belongs into a `finally`.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fastserve.backends.frameworks.python import check_takes_one, describe_model, forget_folder, import_class
from fastserve.backends.llm.embedding import EmbedEngine
from fastserve.backends.llm.protocols import Out, TextEngine, TextRequest
from fastserve.backends.model_errors import explain, kind_of
from fastserve.codec.generation import Extra, Finish, Info, Logprobs, Sampling, write_text
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import TextOptions

log = logging.getLogger(__name__)
NO_VECTORS = "this model makes no embeddings"

# Pause when no generator has a token.
NAP_S = 0.001


@dataclass(slots=True, eq=False)
class PromptRequest:
    """The argument of a model's `generate`, and an item of `embed`'s."""

    ids: list[int]
    """The prompt's tokens; empty where there is no tokenizer, and `text` is the prompt."""
    text: str
    sampling: Sampling
    """max_new_tokens and stop_ids are enforced by the engine; the rest is left to the model."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Other parameters of the request."""
    images: list[bytes] = field(default_factory=list)
    request_id: str = ""
    priority: int = 5


class GeneratorSequence:
    """One request, waiting or running."""

    __slots__ = ("asked", "last_ns", "made", "most", "request", "tokens", "why")

    def __init__(self, request: TextRequest, most: int) -> None:
        self.request, self.most = request, most
        self.asked = request.arrived_ns or time.monotonic_ns()
        self.last_ns, self.made = self.asked, 0
        self.tokens: Generator[Any, None, None] | None = None
        self.why = Finish.NONE  # it is to end

    def took_us(self) -> int:
        """Return the microseconds since the token before, or since arrival."""
        now_ns = time.monotonic_ns()
        took_us, self.last_ns = (now_ns - self.last_ns) // 1000, now_ns
        return min(max(took_us, 0), 0xFFFFFFFF)


class GeneratorEngine:
    """A TextEngine of generators, one for each sequence. `make` is the model's `generate`."""

    def __init__(
        self, make: Callable[[Any], Generator[Any, None, None]], info: Info, ageing_s: float = 0.0
    ) -> None:
        self.info = info
        self._make = make
        self._ageing_ns = int(ageing_s * 1e9)
        self._eos = frozenset(info.eos_ids)
        self._end = (min(info.eos_ids, default=0), "")  # of a generator that returns
        self._waiting: list[GeneratorSequence] = []
        self._running: list[GeneratorSequence] = []
        self._by_rid: dict[int, GeneratorSequence] = {}

    def submit(self, request: TextRequest) -> None:
        """Queue a request. Raises ServeError for a prompt that is too long, and for an embedding."""
        if request.note.embeds:
            raise ServeError(Kind.UNIMPLEMENTED, NO_VECTORS)
        info, given = self.info, len(request.ids)
        allowed = min(info.max_prompt_tokens, info.max_tokens - 1)
        if given > allowed:
            raise ServeError(Kind.INVALID_ARGUMENT, f"a prompt of {given} tokens, allowed: up to {allowed}")
        asked = request.note.sampling.max_new_tokens
        sequence = GeneratorSequence(request, min(asked, info.max_new_tokens, info.max_tokens - given))
        self._by_rid[request.rid] = sequence
        self._waiting.append(sequence)

    def cancel(self, rid: int, why: Finish) -> None:
        sequence = self._by_rid.get(rid)
        if sequence is not None and not sequence.why:
            sequence.why = why

    def pending(self) -> int:
        return len(self._by_rid)

    def step(self, out: Out) -> bool:
        self._end_cancelled(out)
        self._admit()
        ran = idle = False
        for sequence in list(self._running):
            if not out.room(sequence.request.rid):
                continue
            made = self._advance(sequence, out)
            ran, idle = ran or made, idle or not made
        if idle and not ran:
            time.sleep(NAP_S)
        return ran or idle

    def close(self) -> None:
        for sequence in list(self._by_rid.values()):
            self._forget(sequence)

    def _end_cancelled(self, out: Out) -> None:
        for sequence in [one for one in self._by_rid.values() if one.why]:
            self._forget(sequence)
            out.end(sequence.request.rid, sequence.why)

    def _admit(self) -> None:
        if not self._waiting or len(self._running) >= self.info.slots:
            return
        self._waiting.sort(key=self._rank)
        free = self.info.slots - len(self._running)
        admitted, self._waiting = self._waiting[:free], self._waiting[free:]
        self._running += admitted

    def _rank(self, sequence: GeneratorSequence) -> tuple[int, float, int]:
        waited_ns = time.monotonic_ns() - sequence.asked
        gained = waited_ns // self._ageing_ns if self._ageing_ns else 0
        note = sequence.request.note
        return note.priority - gained, note.turn, sequence.asked

    def _advance(self, sequence: GeneratorSequence, out: Out) -> bool:
        """Send the next token of a sequence, or its end. Return False when it has nothing yet."""
        rid = sequence.request.rid
        try:
            if sequence.tokens is None:
                sequence.tokens = self._make(read_prompt(sequence.request))
            said = next(sequence.tokens, self._end)
            if said is None:
                return False
            token, extra = self._read(said, sequence.request.note.sampling)
        # An exception of the model fails its own request alone.
        except Exception as error:
            if not isinstance(error, ServeError):
                log.exception("the model failed on a request", extra=_id_of(sequence))
            self._forget(sequence)
            out.end(rid, Finish.FAILED, write_text(Extra(message=explain(error), kind=kind_of(error).value)))
        else:
            sequence.made += 1
            finish = Finish.EOS if said is self._end else self._finish(sequence, token)
            if finish:
                self._forget(sequence)
            out.token(rid, token, finish, sequence.took_us(), extra)
        return True

    def _finish(self, sequence: GeneratorSequence, token: int) -> Finish:
        sampling = sequence.request.note.sampling
        if token in self._eos and not sampling.ignore_eos:
            return Finish.EOS
        if token in sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if sequence.made >= sequence.most else Finish.NONE

    def _read(self, said: Any, sampling: Sampling) -> tuple[int, bytes]:
        parts = said if isinstance(said, tuple) else (said,)
        if not 1 <= len(parts) <= 3:
            raise TypeError(
                f"generate yielded a tuple of {len(parts)}, not (id, text) or (id, text, logprob)"
            )
        token = next((part for part in parts[:1] if isinstance(part, int)), None)
        text = next((part for part in parts[:2] if isinstance(part, str)), None)
        if token is None and text is None:
            raise TypeError(f"generate yielded {type(said).__name__}, not an id, a text or (id, text)")
        own = float(parts[2]) if len(parts) == 3 else None
        if text is None and (own is None or sampling.logprobs < 0):
            return token or 0, b""
        logprobs = Logprobs(own) if own is not None and sampling.logprobs >= 0 else None
        return token or 0, write_text(Extra(text=text, logprobs=logprobs))

    def _forget(self, sequence: GeneratorSequence) -> None:
        del self._by_rid[sequence.request.rid]
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        if sequence.tokens is not None:
            try:
                sequence.tokens.close()
            except Exception:
                log.exception("the model failed to end a request", extra=_id_of(sequence))


def read_prompt(request: TextRequest) -> PromptRequest:
    """Return a request in the form of a model's class."""
    note = request.note
    return PromptRequest(
        ids=request.ids,
        text=note.text,
        sampling=note.sampling,
        parameters=note.parameters,
        images=note.images,
        request_id=note.request_id,
        priority=note.priority,
    )


def _id_of(sequence: GeneratorSequence) -> dict[str, str] | None:
    found = sequence.request.note.request_id
    return {"request_ids": found} if found else None


# Tokens of prompt and answer together, where neither model.yaml nor the model says.
MAX_TOKENS = 2560


class TextPythonBackend:
    """Runs the model's own class."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.info = Info()
        self._config, self._version_dir, self._instance = config, version_dir, instance
        self._options = msgspec.convert(config.get("text") or {}, TextOptions)
        self._model: Any = None
        self._writer: TextEngine | None = None
        self._embedder: EmbedEngine | None = None

    def load(self) -> None:
        """Import model.py, make the model and load it. Raises what the model raises, and ConfigError when
        the class does not fit."""
        factory = import_class(self._version_dir, str(self._config.get("class") or "Model"))
        check_takes_one(factory, f"class {factory.__name__!r}", "def __init__(self, config)")
        model = self._model = factory(describe_model(self._config, self._version_dir, self._instance))
        getattr(model, "load", lambda: None)()
        info = self.info = make_info(getattr(model, "info", {}), self._options)
        if callable(getattr(model, "embed", None)):
            self._embedder = self._make_embedder(model, info)
            if not hasattr(model, "step") and not hasattr(model, "generate"):
                self.info = self._embedder.info = msgspec.structs.replace(info, writes=False)
                return
        if callable(getattr(model, "step", None)):
            _check_engine(model)
            model.info = info
            self._writer = model
            return
        if not inspect.isgeneratorfunction(getattr(model, "generate", None)):
            raise ConfigError(
                f"class {factory.__name__!r} has neither a generator generate(self, request) "
                "nor a method step(self, out) or embed(self, requests)"
            )
        check_takes_one(model.generate, "generate", "def generate(self, request)")
        self._writer = GeneratorEngine(model.generate, info, self._options.ageing_s)

    def _make_embedder(self, model: Any, info: Info) -> EmbedEngine:
        check_takes_one(model.embed, "embed", "def embed(self, requests)")
        if not info.embeds:
            raise ConfigError("info: embeds: given 0, allowed: the numbers in a vector that embed makes")

        def embed(requests: list[TextRequest]) -> Any:
            return model.embed([read_prompt(request) for request in requests])

        return EmbedEngine(embed, info, self._options, lambda: None)

    def submit(self, request: TextRequest) -> None:
        """See TextEngine. Raises ServeError for a request that this model does not support."""
        engine = self._embedder if request.note.embeds and self._embedder else self._writer or self._embedder
        assert engine is not None
        engine.submit(request)

    def cancel(self, rid: int, why: Finish) -> None:
        """See TextEngine."""
        for engine in self._engines:
            engine.cancel(rid, why)

    def step(self, out: Out) -> bool:
        """See TextEngine."""
        ran = [engine.step(out) for engine in self._engines if engine.pending()]
        return any(ran)

    def pending(self) -> int:
        """See TextEngine."""
        return sum([engine.pending() for engine in self._engines])

    @property
    def _engines(self) -> list[TextEngine]:
        return [engine for engine in (self._writer, self._embedder) if engine is not None]

    def close(self) -> None:
        """End what still runs, and call the model's close, if there is one."""
        model, self._model = self._model, None
        forget_folder(self._version_dir)
        engines, self._writer, self._embedder = self._engines, None, None
        for engine in engines:
            if engine is not model:
                engine.close()
        if hasattr(model, "close"):
            model.close()


def make_info(said: Mapping[str, Any] | Info, options: TextOptions) -> Info:
    """Return the engine's Info: model.yaml's bounds, overridden by the model's `info`. Raises
    ConfigError."""
    if isinstance(said, Info):
        return said
    most = options.max_tokens or MAX_TOKENS
    bounds = {
        "max_tokens": most,
        "max_prompt_tokens": options.max_prompt_tokens or most - 1,
        "max_new_tokens": options.max_new_tokens,
        "slots": options.max_sequences,
        "tokenizer": options.tokenizer,
    }
    unknown = set(said) - set(Info.__struct_fields__)
    if unknown:
        fields = ", ".join(Info.__struct_fields__)
        raise ConfigError(f"info: given {', '.join(map(repr, sorted(unknown)))}, allowed: {fields}")
    try:
        return msgspec.convert({**bounds, **said}, Info)
    except msgspec.ValidationError as fault:
        raise ConfigError(f"info: {fault}") from None


def _check_engine(model: Any) -> None:
    for name, form in (
        ("submit", "submit(self, request)"),
        ("cancel", "cancel(self, rid, why)"),
        ("pending", "pending(self)"),
    ):
        if not callable(getattr(model, name, None)):
            raise ConfigError(f"class {type(model).__name__!r} has a step, and no method {form}")
