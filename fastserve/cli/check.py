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
@click.option("--load/--no-load", default=True, help="Load the models, or only look at their files.")
def check(repository: str | None, config: Path | None, load: bool) -> None:
    """Load the models in DIR as a server would, in worker processes, and tell what is wrong with them:
    versions, tensors, signatures, and every problem in a server's own words. Nothing listens.

    With --no-load the files are looked at and no code of a model runs; less is found.

    Exit code 1 when a server would refuse to start. Tracebacks go to standard error.

    \b
    fastserve check models/
    fastserve check --config fastserve.yaml
    fastserve check models/ --no-load
    """
    from fastserve.config import load_settings
    from fastserve.errors import ConfigError
    from fastserve.repository.check import explain

    try:
        settings = load_settings(config, {"repository": repository} if repository else {})
        if not settings.repository and not settings.models:
            raise click.UsageError("name the folder of a model repository, or `demo`")
        report = explain(settings)
        if load:
            from fastserve.logs import setup_logs
            from fastserve.server.trial import try_loads

            setup_logs("warning", settings.log.format)
            trial = try_loads(settings)
            report.take(trial.problems, trial.served)
    except ConfigError as fault:
        raise click.ClickException(str(fault)) from None
    click.echo(report.text(), nl=False)
    sys.exit(0 if report.ok else 1)
