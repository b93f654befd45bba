"""The text_python backend: an engine of one's own, a class in NAME/VERSION/model.py.

    class Model:
        def __init__(self, config): ...        # as of a python model, see docs/writing-a-backend.md
        def load(self): ...                    # optional: the slow part
        info = {...}                           # optional: fields of codec.text.Info
        def generate(self, request): ...       # a generator for each request: ids, texts, (id, text)
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

from fastserve.backends.generators import GeneratorEngine
from fastserve.backends.python import describe_model, forget_folder, import_class, must_take_one
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
        self._engine: TextEngine | None = None

    def load(self) -> None:
        """Imports model.py, makes the model and loads it. Raises what the model raises, and ConfigError when
        the class does not fit."""
        factory = import_class(self._version_dir, str(self._config.get("class") or "Model"))
        must_take_one(factory, f"class {factory.__name__!r}", "def __init__(self, config)")
        model = self._model = factory(describe_model(self._config, self._version_dir, self._instance))
        getattr(model, "load", lambda: None)()
        info = self.info = make_info(getattr(model, "info", {}), self._options)
        if callable(getattr(model, "step", None)):
            _check_engine(model)
            model.info = info
            self._engine = model
            return
        if not inspect.isgeneratorfunction(getattr(model, "generate", None)):
            raise ConfigError(
                f"class {factory.__name__!r} has neither a generator generate(self, request) "
                "nor a method step(self, out)"
            )
        must_take_one(model.generate, "generate", "def generate(self, request)")
        self._engine = GeneratorEngine(model.generate, info, self._options.ageing_s)

    def submit(self, request: TextRequest) -> None:
        """See TextEngine."""
        self._loaded.submit(request)

    def cancel(self, rid: int, why: Finish) -> None:
        """See TextEngine."""
        self._loaded.cancel(rid, why)

    def step(self, out: Out) -> bool:
        """See TextEngine."""
        return self._loaded.step(out)

    def pending(self) -> int:
        """See TextEngine."""
        return self._loaded.pending()

    @property
    def _loaded(self) -> TextEngine:
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        """Ends what still runs, and calls the model's close, if there is one."""
        model, self._model = self._model, None
        forget_folder(self._version_dir)
        engine, self._engine = self._engine, None
        if engine is not None and engine is not model:
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
