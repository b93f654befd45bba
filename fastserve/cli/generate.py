"""`fastserve generate`: one prompt from the command line, its answer on the terminal as it comes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from fastserve.cli.rest import Server, url_option
from fastserve.cli.text import Question, Told, ask_folder, ask_server, only_model
from fastserve.cli.trust import Trust, with_trust

option = partial(click.option, show_default=True)


def read_prompt(text: str) -> str:
    """The prompt of an argument: itself, `@FILE`, or `-` for standard input."""
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
    told = Told()
    if folder is not None:
        pieces = ask_folder(folder, device, question, told)
    else:
        server = Server(url, trust)
        pieces = ask_server(server, model or only_model(server), question, told)
    if stream:
        for piece in pieces:
            click.echo(piece, nl=False)
        click.echo()
    else:
        click.echo("".join(pieces))
    click.echo(told.speed_line(), err=True)
