"""Chat templates: messages to a prompt, by the Jinja template that comes with a model.

    chat_template.jinja              the template; chat_templates/NAME.jinja are others
    tokenizer_config.json            chat_template, where there is no such file; special tokens it may name

The result is that of transformers' apply_chat_template. A template that cannot be compiled or exceeds its
budget (see `sandbox`) is the model's fault; every other exception is reported to the client, whose messages
caused it. Templates run in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fastserve.errors import Kind, ServeError

DEFAULT, TOOLS = "default", "tool_use"
MOST_TEXT = 500
NEEDS = "chat templates need the package jinja2, 3.1.6 or newer, which is not installed: pip install jinja2"


class ChatTemplate:
    """The chat templates of one model's folder, compiled on first use."""

    def __init__(self, folder: Path, model: str) -> None:
        self._model = model
        self._folder = folder
        self._sources: dict[str, str] | None = None
        self._specials: dict[str, str] = {}
        self._compiled: dict[str, Any] = {}
        self._tools: str | None = None

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. `variables` go before the special tokens. Raises ServeError: INVALID_ARGUMENT when the
        template refuses what it is given, UNIMPLEMENTED when there is none, else FAILED_PRECONDITION."""
        given = {
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return await asyncio.get_running_loop().run_in_executor(None, self._render, given)

    async def find_tools(self) -> str:
        """Return the text of the template that tools are given to; "" where that does not read them. Raises
        ServeError as `render`."""
        if self._tools is None:
            self._tools = await asyncio.get_running_loop().run_in_executor(None, self._read_tools)
        return self._tools

    def _read_tools(self) -> str:
        self._find(TOOLS)  # compiles it
        from jinja2.meta import find_undeclared_variables

        from fastserve.serving.text.sandbox import Sandbox

        sources = self._sources or {}
        source = sources.get(TOOLS) or sources[DEFAULT]
        return source if "tools" in find_undeclared_variables(Sandbox().parse(source)) else ""

    def _render(self, given: Mapping[str, Any]) -> str:
        template = self._find(TOOLS if given["tools"] else DEFAULT)
        from fastserve.serving.text.sandbox import STOPPED, render

        try:
            return render(template, {**self._specials, **given})
        except STOPPED as fault:
            raise self._broken(f"the chat template was stopped: {fault}") from None
        except Exception as fault:  # whatever its expressions raise on these messages
            said = str(fault)[:MOST_TEXT] or type(fault).__name__
            raise ServeError(Kind.INVALID_ARGUMENT, f"the chat template refuses this: {said}") from None

    def _find(self, name: str) -> Any:
        if self._sources is None:
            self._read()
        sources = self._sources or {}
        name = name if name in sources else DEFAULT
        if name not in sources:
            raise ServeError(Kind.UNIMPLEMENTED, f"model '{self._model}' has no chat template")
        if name not in self._compiled:
            self._compiled[name] = self._compile(sources[name])
        return self._compiled[name]

    def _compile(self, source: str) -> Any:
        try:
            from fastserve.serving.text.sandbox import Sandbox
        except ImportError:
            raise self._broken(NEEDS) from None
        try:
            return Sandbox().from_string(source)
        except Exception as fault:
            raise self._broken(f"its chat template cannot be read: {str(fault)[:MOST_TEXT]}") from None

    def _read(self) -> None:
        """Look at the folder. Threads may do so at once: they find the same."""
        try:
            config = read_object(self._folder / "tokenizer_config.json")
            older = read_object(self._folder / "special_tokens_map.json")
            self._specials = {**special_tokens(older), **special_tokens(config)}
            self._sources = find_templates(self._folder, config)
        except (OSError, ValueError) as fault:
            raise self._broken(f"its chat template cannot be read: {str(fault)[:MOST_TEXT]}") from None

    def _broken(self, why: str) -> ServeError:
        return ServeError(Kind.FAILED_PRECONDITION, f"model '{self._model}': {why}")


def read_object(path: Path) -> dict[str, Any]:
    """A file with a JSON object; empty where there is none. Raises ValueError."""
    if not path.is_file():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a config names: bos_token, eos_token, ..."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files go before what stands in the config: a text, or a list of named ones."""
    given = config.get("chat_template")
    found = {DEFAULT: given} if isinstance(given, str) else {}
    if isinstance(given, list):
        for one in given:
            found[str(one["name"])] = str(one["template"])
    file = folder / "chat_template.jinja"
    if file.is_file():
        found[DEFAULT] = file.read_text("utf-8")
    for file in sorted((folder / "chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text("utf-8")
    return found
