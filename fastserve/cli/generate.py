"""`fastserve generate`: text from a running server over OpenAI's API, or from a folder in this process.

for piece in ask_server(server, model, question, told): ...     as they come; then `told` has how it went
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastserve.cli.client import ServerClient, Trust, url_option, with_trust

if TYPE_CHECKING:
    from fastserve.codec.generation import Record
    from fastserve.serving.text.stream import TextStream


CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@dataclass(kw_only=True)
class Question:
    """A prompt and its sampling parameters. `temperature` 0: the most likely tokens."""

    prompt: str
    chat: bool = False
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass
class AnswerProgress:
    """Progress of an answer. Times are the client's, in seconds since the request."""

    prompt_tokens: int = 0
    tokens: int = 0
    reason: str = ""
    first_s: float = 0.0
    last_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def take(self, event: dict[str, Any]) -> str:
        """Note an event of OpenAI's API, and return the text in it."""
        if usage := event.get("usage"):
            self.prompt_tokens, self.tokens = usage.get("prompt_tokens", 0), usage["completion_tokens"]
        piece = ""
        for choice in event["choices"]:
            self.reason = choice.get("finish_reason") or self.reason
            piece += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        return piece

    def heard(self) -> None:
        """Note that some text has come."""
        self.last_s = time.monotonic() - self.began
        self.first_s = self.first_s or self.last_s

    def speed_line(self) -> str:
        """Return a line for standard error."""
        after = self.last_s - self.first_s
        speed = f", then {(self.tokens - 1) / after:,.1f} tokens/s" if self.tokens > 1 and after > 0 else ""
        return (
            f"{self.prompt_tokens} tokens of prompt, {self.tokens} of answer ({self.reason}): "
            f"the first after {self.first_s * 1000:.1f} ms{speed}"
        )


def only_model(server: ServerClient) -> str:
    """Return the only text model of a server. Raises ClickException."""
    names = [model["id"] for model in json.loads(server.ask("/v1/models"))["data"]]
    if len(names) == 1:
        return str(names[0])
    has = f"it has {', '.join(names)}: choose with --model" if names else "it has none"
    raise click.ClickException(f"which model? {server.url} generates text with one at a time, and {has}")


def completion_body(question: Question, model: str) -> dict[str, Any]:
    """Return the JSON of a streamed request of OpenAI's API."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": question.max_new_tokens,
        "temperature": question.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if question.chat:
        body["messages"] = [{"role": "user", "content": question.prompt}]
    else:
        body["prompt"] = question.prompt
    given: dict[str, Any] = {
        "seed": question.seed,
        "stop": list(question.stop) or None,
        "top_k": question.top_k or None,
    }
    plain = {"top_p": (question.top_p, 1.0), "repetition_penalty": (question.repetition_penalty, 1.0)}
    given |= {name: None if value == usual else value for name, (value, usual) in plain.items()}
    return body | {name: value for name, value in given.items() if value is not None}


def ask_server(server: ServerClient, model: str, question: Question, told: AnswerProgress) -> Iterator[str]:
    """Yield a server's answer piece by piece. Raises ClickException, also for an incomplete answer."""
    body = json.dumps(completion_body(question, model)).encode()
    done = False
    for data in server.events(CHAT if question.chat else PLAIN, body):
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            raise click.ClickException(str(error["message"] if isinstance(error, dict) else error))
        piece = told.take(event)
        if piece:
            told.heard()
            yield piece
    if not done or not told.reason:
        raise click.ClickException("the answer broke off")


def ask_folder(folder: Path, device: str, question: Question, told: AnswerProgress) -> Iterator[str]:
    """Yield the answer of a model in this process, without a batch. Raises ClickException."""
    from fastserve.errors import ConfigError, ServeError

    try:
        yield from _run_folder(folder, device, question, told)
    except (ConfigError, ServeError) as fault:
        raise click.ClickException(str(fault)) from None


def _run_folder(folder: Path, device: str, question: Question, told: AnswerProgress) -> Iterator[str]:
    from fastserve._ext.stop_strings import StopStrings, StopTable
    from fastserve.backends.llm.backend import TransformersBackend
    from fastserve.backends.llm.protocols import TextRequest
    from fastserve.codec.generation import TextNote
    from fastserve.serving.text.models import fit
    from fastserve.serving.text.stream import TextStream
    from fastserve.serving.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("folder", folder, folder.name)
    prompt = _chat(folder, question.prompt) if question.chat else question.prompt
    engine = TransformersBackend({"device": device, "text": {"max_sequences": 1}}, folder, 0)
    engine.load()
    try:
        limits = engine.info
        ids = fit(tokenizer.encode(prompt, special=not question.chat), 0, limits.max_prompt_tokens, 0)
        stops = StopStrings(StopTable(question.stop)) if question.stop else None
        stream = TextStream(ids, 0, tokenizer.detokenizer(), stops, tokenizer.specials)
        told.began, told.prompt_tokens = time.monotonic(), len(ids)
        engine.submit(TextRequest(1, ids, TextNote(sampling=_sampling(question)), time.monotonic_ns()))
        collector = _Records()
        while stream.ending is None:
            engine.step(collector)
            yield from _pieces(stream, collector, told)
        _conclude(stream, told)
    finally:
        engine.close()


def _pieces(stream: TextStream, collector: _Records, told: AnswerProgress) -> Iterator[str]:
    stream.on_tokens(collector.take())
    text = "".join(token.text for token in stream.take())
    if text:
        told.heard()
        yield text


def _conclude(stream: TextStream, told: AnswerProgress) -> None:
    ending = stream.ending
    assert ending is not None
    if ending.fault is not None:
        raise ending.fault
    told.tokens, told.reason = ending.generated, ending.reason.name.lower()


def _chat(folder: Path, prompt: str) -> str:
    import asyncio

    from fastserve.serving.text.chat import ChatTemplate

    template = ChatTemplate(folder, folder.name)
    return asyncio.run(template.render([{"role": "user", "content": prompt}], None, True, {}))


def _sampling(question: Question) -> Any:
    import os

    from fastserve.codec.generation import Sampling

    seed = int.from_bytes(os.urandom(8), "little") if question.seed is None else question.seed
    return Sampling(
        max_new_tokens=question.max_new_tokens,
        do_sample=question.temperature > 0,
        temperature=question.temperature or 1.0,
        top_k=question.top_k,
        top_p=question.top_p,
        repetition_penalty=question.repetition_penalty,
        seed=seed,
    )


class _Records:
    """Collects the engine's records (llm.protocols.Out)."""

    def __init__(self) -> None:
        self._came: list[Record] = []

    def token(self, rid: int, token: int, finish: int = 0, took_us: int = 0, extra: bytes = b"") -> None:
        self._came.append((token, int(finish), took_us, extra))

    def end(self, rid: int, finish: int, extra: bytes = b"") -> None:
        self._came.append((-1, int(finish), 0, extra))

    def room(self, rid: int) -> bool:
        return True

    def take(self) -> list[Record]:
        came, self._came = self._came, []
        return came


option = partial(click.option, show_default=True)


def read_prompt(text: str) -> str:
    """Return the prompt of an argument: itself, `@FILE`, or `-` for standard input."""
    if text == "-":
        return sys.stdin.read()
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text("utf-8")
    except (OSError, ValueError) as fault:
        raise click.BadParameter(f"cannot read {text[1:]}: {fault}") from None


@click.command(short_help="Generate text with a model.")
@click.argument("prompt", metavar="[PROMPT|@FILE|-]")
@click.option("--stream", is_flag=True, help="Print tokens as they come, not the whole at its end.")
@click.option("--model", default="", help="Ask this model of the server; not needed where it has one.")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Run the model of this folder here, without a server.",
)
@option("--device", default="cpu", help="With --folder: where it runs, such as cuda.")
@click.option("--chat", is_flag=True, help="The prompt is a user's message: use the model's chat template.")
@option("-n", "--max-new-tokens", type=click.IntRange(1), default=128, help="Tokens of the answer, at most.")
@option("--temperature", type=click.FloatRange(0), default=0.0, help="0: the most likely tokens.")
@option("--top-k", type=click.IntRange(0), default=0, help="Choose among so many; 0: all.")
@option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Choose among so likely.")
@option("--repetition-penalty", type=click.FloatRange(0, min_open=True), default=1.0, help="1: none.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), help="Draws the same again.")
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@url_option
@with_trust
def generate(
    prompt: str, stream: bool, model: str, folder: Path | None, device: str, chat: bool, max_new_tokens: int,
    temperature: float, top_k: int, top_p: float, repetition_penalty: float, seed: int | None,
    stop: tuple[str, ...], url: str, trust: Trust,
) -> None:  # fmt: skip
    """Print the text with which a model goes on from PROMPT, and on standard error how fast it came.

    \b
    fastserve generate "In the beginning" --stream
    fastserve generate --chat "Why is the sky blue?" --model llm --temperature 0.7 --seed 1
    fastserve generate @story.txt --folder models/llm/1 -n 500
    """
    question = Question(
        prompt=read_prompt(prompt),
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    told = AnswerProgress()
    if folder is not None:
        pieces = ask_folder(folder, device, question, told)
    else:
        server = ServerClient(url, trust)
        pieces = ask_server(server, model or only_model(server), question, told)
    if stream:
        for piece in pieces:
            click.echo(piece, nl=False)
        click.echo()
    else:
        click.echo("".join(pieces))
    click.echo(told.speed_line(), err=True)
