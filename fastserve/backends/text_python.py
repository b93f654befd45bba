"""The text_python backend: an engine of one's own, a class in NAME/VERSION/model.py.

    class Model:
        def __init__(self, config): ...        # as of a python model, see docs/writing-a-backend.md
        def load(self): ...                    # optional: the slow part
        info = {...}                           # optional: fields of codec.text.Info
        def generate(self, request): ...       # a generator for each request: ids, texts, (id, text)
        def embed(self, requests): ...         # instead or besides: vectors of info["embeds"] numbers
        def close(self): ...                   # optional

A generator is asked for one token a step, among those of all other requests. A class that runs its sequences
itself, many in one forward pass say, has submit, cancel, step and pending instead: it is a TextEngine.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fastserve.backends.beside import forget_folder
from fastserve.backends.embedding import EmbedEngine
from fastserve.backends.generators import GeneratorEngine, read_prompt
from fastserve.backends.python import describe_model, import_class, must_take_one
from fastserve.backends.text_engine import Out, TextEngine, TextRequest
from fastserve.codec.text import Finish, Info
from fastserve.config.text import TextOptions
from fastserve.errors import ConfigError

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
        """Imports model.py, makes the model and loads it. Raises what the model raises, and ConfigError when
        the class does not fit."""
        factory = import_class(self._version_dir, str(self._config.get("class") or "Model"))
        must_take_one(factory, f"class {factory.__name__!r}", "def __init__(self, config)")
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
        must_take_one(model.generate, "generate", "def generate(self, request)")
        self._writer = GeneratorEngine(model.generate, info, self._options.ageing_s)

    def _make_embedder(self, model: Any, info: Info) -> EmbedEngine:
        must_take_one(model.embed, "embed", "def embed(self, requests)")
        if not info.embeds:
            raise ConfigError("info: embeds: given 0, allowed: the numbers in a vector that embed makes")

        def embed(requests: list[TextRequest]) -> Any:
            return model.embed([read_prompt(request) for request in requests])

        return EmbedEngine(embed, info, self._options, lambda: None)

    def submit(self, request: TextRequest) -> None:
        """See TextEngine. Raises ServeError for what this model does not do."""
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
        """Ends what still runs, and calls the model's close, if there is one."""
        model, self._model = self._model, None
        forget_folder(self._version_dir)
        engines, self._writer, self._embedder = self._engines, None, None
        for engine in engines:
            if engine is not model:
                engine.close()
        if hasattr(model, "close"):
            model.close()


def make_info(said: Mapping[str, Any] | Info, options: TextOptions) -> Info:
    """What the engine says of itself: model.yaml's bounds, and over them the model's own words. Raises
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
