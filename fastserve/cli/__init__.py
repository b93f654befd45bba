"""The command line: a module for each command, or for several alike.

Modules are imported only when their command runs, and the one-line helps stand in the table below, so that
`fastserve --help` costs no more than click itself.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

import click

from fastserve.errors import ConfigError, check_system

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "serve": "Serve a model repository (or the built-in demo).",
    "run": "Serve the models of a script.",
    "new": "Write a folder to start from.",
    "models": "List the models of a running server.",
    "check": "Explain what would be served from a folder, and why not.",
    "infer": "Send one request to a running server and print the answer.",
    "generate": "Generate text with a model, from a running server or a folder.",
    "bench": "Put a running server under load and show latencies.",
    "key": "Make, list and revoke API keys.",
    "completion": "Print a script that completes commands in a shell.",
    "worker": "Run batches of a server on another machine.",
    "grps": "Serve a grps deployment.",
    "mindie": "Serve by MindIE's config.json.",
    "tensorflow-model-server": "Serve with TensorFlow Serving's own flags.",
    "tritonserver": "Serve with Triton's own flags.",
    "kserve-server": "Serve with the flags of KServe's Python servers.",
    "mlserver": "Serve by MLServer's settings.",
}


# Command -> its module, where that has another name.
MODULES = {
    "run": "serve",
    **dict.fromkeys(("models", "infer"), "client"),
    **dict.fromkeys(("grps", "mindie", "tensorflow-model-server", "tritonserver"), "compatible"),
    **dict.fromkeys(("kserve-server", "mlserver"), "predictive"),
}


# Commands that need no server on this machine, and so no Linux.
ANYWHERE = frozenset({"models", "new", "infer", "bench", "completion"})


class LazyGroup(click.Group):
    """A group that knows its commands' names and helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        if name not in ANYWHERE:
            try:
                check_system()
            except ConfigError as fault:
                raise click.ClickException(str(fault)) from None
        module = import_module(f"fastserve.cli.{MODULES.get(name, name)}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"No such command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and flags that begin so, without importing a command."""
        from click.shell_completion import CompletionItem

        named = [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def print_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"fastserve {version('fastserve')}")
        ctx.exit()


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_version,
    help="Show the version.",
)
def main() -> None:
    """A model inference server for the clients people already have.

    \b
    fastserve serve demo                        start a server with three small models
    fastserve run app.py                        start one with the functions of a script
    fastserve new hello                         write a folder to start from
    fastserve models                            what it serves
    fastserve infer half_plus_two "[1, 2, 5]"   ask it
    fastserve generate "LAWYER, n." --stream    have it write
    fastserve bench half_plus_two               measure it
    """
