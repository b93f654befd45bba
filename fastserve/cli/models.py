"""`fastserve models`: what a running server serves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from fastserve.cli.rest import Server, url_option
from fastserve.cli.trust import Trust, with_trust

HEAD = ("MODEL", "VERSION", "STATE", "WHY")


NEVER = "NOT_LOADED"  # the state of a model none of whose versions was ever tried


def describe(
    server: Server, names: Sequence[str], known: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
    """A row for each version, or one for a model that has none; `known` is what readiness says of models."""
    for name in names:
        versions = server.status(name)
        for found in versions:
            why = found["status"].get("error_message", "")
            yield name, found["version"], found["state"], why
        if not versions and name not in known:
            has = f"; it has {', '.join(sorted(known))}" if known else ""
            raise click.ClickException(f"the server knows no model {name}{has}")
        if not versions:
            yield name, "-", NEVER, known[name].get("reason", "")


def print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


@click.command(short_help="List the models of a running server.")
@click.argument("names", nargs=-1, metavar="[MODEL]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@url_option
@with_trust
def models(names: tuple[str, ...], as_json: bool, url: str, trust: Trust) -> None:
    """Show every version of the models a server knows, with its state.

    \b
    fastserve models
    fastserve models digits --url http://127.0.0.1:9000
    """
    server = Server(url, trust)
    # TF Serving's API has no call that lists models; the readiness probe names them all.
    readiness = server.readiness()
    known = readiness["models"]
    rows = list(describe(server, names or sorted(known), known))
    if as_json:
        click.echo(json.dumps([dict(zip(map(str.lower, HEAD), row, strict=True)) for row in rows], indent=2))
    elif rows:
        print_rows([HEAD, *rows])
    else:
        click.echo("no models")
    if not readiness["ready"]:
        click.echo(f"the server is not ready: {readiness['reason']}", err=True)
