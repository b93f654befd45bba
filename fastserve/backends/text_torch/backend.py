"""The text backend: a model's folder, loaded, as an engine. torch and transformers are imported by load()."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fastserve.backends.registry import find_backend
from fastserve.backends.text_engine import Out, TextEngine, TextRequest
from fastserve.codec.text import Finish, Info
from fastserve.config.text import TextOptions
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.garbage import unsearched


class TextBackend:
    """Runs a language model of a Hugging Face style folder; a text_engine.TextEngine once loaded."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.info = Info()
        self._config, self._folder = config, version_dir
        self._engine: TextEngine | None = None

    def load(self) -> None:
        """Reads the weights and makes the cache. Raises ConfigError when the folder or the settings are not
        to be served, ServeError when torch or transformers are missing or memory is."""
        try:
            options = msgspec.convert(self._config.get("text") or {}, TextOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"text: {error}") from None
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when the hub's client is imported
        try:
            with unsearched():
                from fastserve.backends.text_torch.loading import open_engine
        except ImportError as error:
            raise ServeError(Kind.FAILED_PRECONDITION, find_backend("text").missing_text) from error
        self._engine = open_engine(self._folder, options, self._config)
        self.info = self._engine.info

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
        return self._engine.pending() if self._engine else 0

    def close(self) -> None:
        """Gives memory back; also after a load that failed half-way."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def _loaded(self) -> TextEngine:
        if self._engine is None:
            raise ServeError(Kind.FAILED_PRECONDITION, "the model is not loaded")
        return self._engine
