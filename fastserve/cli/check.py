"""`fastserve check`: what would be served, and why not the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command(short_help="Explain what would be served from a folder.")
@click.argument("repository", metavar="[DIR|demo]", required=False)
@click.option(
    "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Settings in YAML."
)
def check(repository: str | None, config: Path | None) -> None:
    """Look at the models in DIR without loading any: versions, tensors, signatures, and what is wrong.

    Exit code 1 when a server would refuse to start.

    \b
    fastserve check models/
    fastserve check --config fastserve.yaml
    """
    from fastserve.config import load_settings
    from fastserve.errors import ConfigError
    from fastserve.repository.check import explain

    try:
        settings = load_settings(config, {"repository": repository} if repository else {})
        if not settings.repository and not settings.models:
            raise click.UsageError("name the folder of a model repository, or `demo`")
        report = explain(settings)
    except ConfigError as fault:
        raise click.ClickException(str(fault)) from None
    click.echo(report.text(), nl=False)
    sys.exit(0 if report.ok else 1)
