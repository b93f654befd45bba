"""The text backend: a model's folder, loaded, as an engine, in numpy or with torch, which load() imports."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fastserve.backends.llm.folder import check_folder, find_runtime
from fastserve.backends.llm.protocols import Out, TextEngine, TextRequest
from fastserve.backends.registry import find_backend
from fastserve.codec.generation import Finish, Info
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import TextOptions
from fastserve.util.memory import gc_paused

log = logging.getLogger(__name__)
_LOADING = "fastserve.backends.llm.loading"


class TransformersBackend:
    """Runs a language model of a Hugging Face style folder; a TextEngine once loaded."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.info = Info()
        self._config, self._folder = config, version_dir
        self._engine: TextEngine | None = None

    def load(self) -> None:
        """Read the weights and make the cache. Raises ConfigError when the folder or the settings cannot be
        served, ServeError when torch or transformers are missing or memory is short."""
        try:
            options = msgspec.convert(self._config.get("text") or {}, TextOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"text: {error}") from None
        said = check_folder(self._folder, options)  # before the frameworks are imported, which takes seconds
        device = str(self._config.get("device") or "cpu")
        if find_runtime(self._folder, said, options, device) == "numpy":
            from fastserve.backends.llm.numpy_model import open_engine as open_in_numpy

            self._engine = open_in_numpy(self._folder, options)
        else:
            self._engine = self._open_with_torch(options)
        self.info = self._engine.info

    def _open_with_torch(self, options: TextOptions) -> TextEngine:
        engine: TextEngine = import_loading().open_engine(self._folder, options, self._config)
        return engine

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


def import_loading() -> Any:
    """Return the module `loading`, which imports torch and transformers. Raises ServeError where they are
    missing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when the hub's client is imported
    began_s = 0.0
    if _LOADING not in sys.modules:  # a worker that was forked has it
        began_s = time.monotonic()
        log.info("imports torch and transformers, which takes seconds of a processor")
    try:
        with gc_paused():
            from fastserve.backends.llm import loading
    except ImportError as error:
        raise ServeError(Kind.FAILED_PRECONDITION, find_backend("text").missing_text) from error
    if began_s:
        log.info("imported them in %.1f s, reads the weights", time.monotonic() - began_s)
    return loading
