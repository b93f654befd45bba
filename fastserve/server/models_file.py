"""A TensorFlow Serving list of models in a file, read again while the server runs (spec 6.2).

Whatever the file says takes the place of what is served, as a client's HandleReloadConfigRequest does. A file
that cannot be used changes nothing. What is wrong is said when it begins, not at every look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from fastserve.config import ModelEntry, TFServingOptions
from fastserve.config.fields import convert
from fastserve.config.tensorflow_files import StartFault, read_models
from fastserve.errors import ConfigError, ServeError
from fastserve.repository.repository import Repository

log = logging.getLogger(__name__)


class ModelsFile:
    """Looked at every `models_file_poll_s` seconds, in the process that owns the models."""

    def __init__(self, options: TFServingOptions, repository: Repository) -> None:
        self._options = options
        self._repository = repository
        self._told = ""
        self._watch: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to watch, if there is something to watch."""
        if self._options.models_file and self._options.models_file_poll_s:
            self._watch = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def look(self) -> None:
        """Once. What the file said last is not asked for again: models that failed are tried as all are."""
        path = self._options.models_file
        try:
            entries = await asyncio.to_thread(read_entries, path)
            if entries != self._repository.entries:
                await self._repository.reload_config(entries)
                log.info("%s: %d models are asked for", path, len(entries))
            self._told = ""
        except (ConfigError, OSError, ServeError) as fault:
            self._say(f"{path}: {_words(fault)}")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._options.models_file_poll_s)
            try:
                await self.look()
            except Exception:  # what nobody foresaw must not end the watch
                log.exception("%s could not be looked at", self._options.models_file)

    def _say(self, text: str) -> None:
        if text != self._told:
            log.error("%s", text)
        self._told = text


def read_entries(path: str) -> tuple[ModelEntry, ...]:
    """The models a file lists. Raises ConfigError, OSError."""
    entries, _ = read_models(path)
    return convert(entries, tuple[ModelEntry, ...], "model_config_list.config")


def _words(fault: Exception) -> str:
    if isinstance(fault, StartFault) and fault.detail:
        return fault.detail
    return str(getattr(fault, "strerror", None) or fault)
