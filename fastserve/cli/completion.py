"""`fastserve completion`: a script by which a shell completes commands, flags, values and paths.

The script asks `fastserve` itself at each press of the key (click's protocol, in _FASTSERVE_COMPLETE), so it
does not have to be printed again when there are new flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args, get_origin

import click

from fastserve.settings import ConfigField

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SHELLS = ("bash", "zsh", "fish")
COMMAND, VARIABLE = "fastserve", "_FASTSERVE_COMPLETE"

ShellComplete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


@click.command(short_help="Print a script that completes commands in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script by which a shell completes `fastserve`: commands, flags, values, files and folders.

    \b
    source <(fastserve completion bash)       in ~/.bashrc
    source <(fastserve completion zsh)        in ~/.zshrc, behind compinit
    fastserve completion fish > ~/.config/fish/completions/fastserve.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # click has these three
    click.echo(found(click.get_current_context().find_root().command, {}, COMMAND, VARIABLE).source())


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return what a server can be started with: files and folders, and `demo`."""
    from click.shell_completion import CompletionItem

    paths = [CompletionItem(incomplete, type="file")]
    return [*paths, *([CompletionItem("demo")] if "demo".startswith(incomplete) else [])]


def complete_values(field: ConfigField) -> ShellComplete | None:
    """Return what completes the values of a setting, None where any value may be given."""
    if get_origin(field.kind) is not Literal:
        return None
    values = [str(value) for value in get_args(field.kind)]

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(value) for value in values if value.startswith(incomplete)]

    return complete
