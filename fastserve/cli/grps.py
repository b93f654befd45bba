"""`fastserve grps`: a grps deployment as it is, by its conf/server.yml and conf/inference.yml.

Every flag of `fastserve serve` is one here too, and goes over what server.yml says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fastserve.cli.serve import NO_FLAG, SETTINGS_FILE, ServeCommand, make_option, read_flags
from fastserve.config import Settings, list_fields, load_settings
from fastserve.config.grps import grps_overrides
from fastserve.errors import ConfigError


@click.command("grps", cls=ServeCommand, short_help="Serve a grps deployment.")
@click.argument("folder", metavar="DEPLOYMENT", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--config", type=SETTINGS_FILE, help="More settings, in YAML.")
def grps(folder: Path, config: Path | None, **flags: Any) -> None:
    """Serve the grps deployment in a folder: conf/server.yml, conf/inference.yml and src/ are read.

    \b
    Examples:
      fastserve grps my_deployment
      fastserve grps my_deployment --http 127.0.0.1:7080=grps --grps-start-online
    """
    from fastserve.repository.grps_config import read_deployment
    from fastserve.server import run

    try:
        said, ignored = grps_overrides(read_deployment(folder).server)
        settings = load_settings(config, {**said, "deployment": str(folder.absolute()), **read_flags(flags)})
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    for name in ignored:
        click.echo(f"ignored: {name} of server.yml", err=True)
    sys.exit(run(settings))


grps.params.extend(make_option(field) for field in list_fields(Settings) if field.path not in NO_FLAG)
