"""`fastserve mindie`: what MindIE's config.json serves, on its ports.

Every flag of `fastserve serve` is one here too, and goes over what config.json says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fastserve.cli.serve import NO_FLAG, SETTINGS_FILE, ServeCommand, make_option, read_flags
from fastserve.config import Settings, list_fields, load_settings
from fastserve.config.mindie import mindie_overrides, read_config
from fastserve.errors import ConfigError


@click.command("mindie", cls=ServeCommand, short_help="Serve by MindIE's config.json.")
@click.argument("file", metavar="CONFIG", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--config", type=SETTINGS_FILE, help="More settings, in YAML.")
def mindie(file: Path, config: Path | None, **flags: Any) -> None:
    """Serve the models of MindIE's config.json on its ports, with its limits.

    \b
    Examples:
      fastserve mindie conf/config.json
      fastserve mindie conf/config.json --textgen-stop-service --textgen-token-id-style list
    """
    from fastserve.server import run

    try:
        given = read_config(file)
        settings = load_settings(config, {**mindie_overrides(given), **read_flags(flags)})
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    for key in given.ignored:
        click.echo(f"ignored: {key} of config.json", err=True)
    sys.exit(run(settings))


mindie.params.extend(make_option(field) for field in list_fields(Settings) if field.path not in NO_FLAG)
