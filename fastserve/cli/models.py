"""`fastserve models` lists the models of a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from fastserve.cli.client import ServerClient, Trust, url_option, with_trust

HEAD = ("MODEL", "VERSION", "STATE", "WHY")
NEVER = "NOT_LOADED"  # the state of a model none of whose versions was ever tried


def describe(
    server: ServerClient, names: Sequence[str], known: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each version, or one for a model without any; `known` are readiness' models."""
    for name in names:
        versions = server.status(name)
        failed = known.get(name, {}).get("failed")
        for found in versions:
            why = found["status"].get("error_message", "")
            if failed and found["state"] == "AVAILABLE":
                why = f"what the folder has now failed to load, since {failed['since']}: {failed['reason']}"
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
    server = ServerClient(url, trust)
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
