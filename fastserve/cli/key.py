"""`fastserve key new|list|revoke`: the file of API keys. A running server reads it again by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_args

import click

from fastserve.errors import ConfigError
from fastserve.settings.key_file import KeyEntry, ScopeName, changing, make_key, read_expiry, read_keys

SCOPES: tuple[ScopeName, ...] = get_args(ScopeName)
DEFAULT_SCOPES = "infer,metadata"


def file_option(function: click.decorators.FC) -> click.decorators.FC:
    """Add `--file`, which the server's `keys` names by default."""
    kind = click.Path(dir_okay=False, path_type=Path)
    shown = "The file of keys."
    return click.option(
        "--file", "path", type=kind, required=True, envvar="FASTSERVE_KEYS", show_envvar=True, help=shown
    )(function)


def parse_scopes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[ScopeName, ...]:
    """Return the scopes of a list with commas."""
    words = dict.fromkeys(word.strip() for word in text.split(",") if word.strip())
    unknown = [word for word in words if word not in SCOPES]
    if unknown or not words:
        given = unknown[0] if unknown else text
        raise click.BadParameter(f"given {given!r}, allowed: {', '.join(SCOPES)}, with commas between")
    return tuple(scope for scope in SCOPES if scope in words)


def parse_models(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    """Return the patterns of a list with commas."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """End the command with a sentence about a file that cannot be used."""
    try:
        yield
    except (ConfigError, ValueError) as fault:
        raise click.ClickException(str(fault)) from None
    except OSError as fault:
        raise click.ClickException(f"{fault.filename or 'the file'}: {fault.strerror or fault}") from None


@click.group(short_help="Make, list and revoke API keys.")
def key() -> None:
    """Make, list and revoke the API keys of `fastserve serve --keys FILE`.

    \b
    Examples:
      fastserve key new search --scopes infer,metadata --file keys.yaml
      fastserve key new prometheus --scopes metrics --expires 90d --file keys.yaml
      fastserve key new team-a --models 'team-a-*,shared' --file keys.yaml
      fastserve key list --file keys.yaml
      fastserve key revoke search --file keys.yaml
    """


@key.command(short_help="Make a key, and print it once.")
@click.argument("name")
@click.option(
    "--scopes", callback=parse_scopes, default=DEFAULT_SCOPES, show_default=True, metavar="SCOPE,...",
    help=f"What it may do: {', '.join(SCOPES)}.",
)  # fmt: skip
@click.option("--expires", default="", metavar="DATE|DURATION", help="2027-01-31, or 30m, 12h, 90d from now.")
@click.option(
    "--models", callback=parse_models, default="", metavar="PATTERN,...",
    help="Models that it may use, as search-*; all without this.",
)  # fmt: skip
@click.option(
    "--requests-per-second", type=click.FloatRange(0, 1e6), default=0.0, metavar="NUMBER",
    help="Most requests a second.",
)  # fmt: skip
@click.option(
    "--rows-per-second", type=click.FloatRange(0, 1e9), default=0.0, metavar="NUMBER",
    help="Most rows a second that models run.",
)  # fmt: skip
@click.option(
    "--tokens-per-second", type=click.FloatRange(0, 1e9), default=0.0, metavar="NUMBER",
    help="Most tokens a second, of prompts and answers.",
)  # fmt: skip
@click.option(
    "--concurrency", type=click.IntRange(0, 1 << 20), default=0, metavar="NUMBER",
    help="Most requests under way.",
)  # fmt: skip
@click.option(
    "--weight", type=click.FloatRange(0.001, 1000), default=1.0, show_default=True, metavar="NUMBER",
    help="Its share of a model that has more requests than it can run.",
)  # fmt: skip
@file_option
def new(
    name: str, scopes: tuple[ScopeName, ...], expires: str, models: tuple[str, ...], path: Path, **limits: Any
) -> None:
    """Add a key for NAME, and print it: the file has its hash alone, so nobody can show it again."""
    with in_words():
        until = read_expiry(expires, datetime.now(timezone.utc)) if expires else ""
        with changing(path) as entries:
            if any(entry.name == name for entry in entries):
                raise ConfigError(f"{path}: there is a key of the name {name}; revoke it, or choose another")
            text, entry = make_key(name, scopes, until, models=models, **limits)
            entries.append(entry)
    of = f" of {', '.join(models)}" if models else ""
    click.echo(
        f"{name} may {', '.join(scopes)}{of}{f' until {until}' if until else ''}. Its key, shown once: {text}"
    )


@key.command("list", short_help="List the keys of a file.")
@file_option
def list_keys(path: Path) -> None:
    """List names, scopes and dates; keys themselves are not in the file."""
    with in_words():
        now = datetime.now(timezone.utc).timestamp()
        for entry in read_keys(path).keys:
            click.echo(describe(entry, now))


def describe(entry: KeyEntry, now: float) -> str:
    """Return the line of an entry."""
    who = f"subject {entry.subject}" if entry.subject else f"id {entry.id}"
    ends = "never" if not entry.expires else entry.expires + ("  expired" if entry.expires_at <= now else "")
    models = f"  models {','.join(entry.models)}" if entry.models else ""
    rates = entry.requests_per_second, entry.rows_per_second, entry.tokens_per_second
    named = zip(rates, ("requests", "rows", "tokens"), strict=True)
    rate = "".join(f"  {number:g} {what}/s" for number, what in named if number)
    rate += f"  weight {entry.weight:g}" if entry.weight != 1 else ""
    most = f"  {entry.concurrency} under way" if entry.concurrency else ""
    return f"{entry.name}  {','.join(entry.scopes)}{models}{rate}{most}  {who}  expires {ends}"


@key.command(short_help="Revoke a key.")
@click.argument("name")
@file_option
def revoke(name: str, path: Path) -> None:
    """Remove the key of NAME: a running server refuses it within a second."""
    with in_words(), changing(path) as entries:
        kept = [entry for entry in entries if entry.name != name]
        if len(kept) == len(entries):
            raise ConfigError(f"{path}: there is no key of the name {name}")
        entries[:] = kept
    click.echo(f"{name} has no key any more")
