"""`fastserve run app.py`: the models of a script, with the flags of `fastserve serve`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from fastserve.cli.serve import NO_FLAG, ServeCommand, config_option, help_all_option, make_option, read_flags
from fastserve.errors import ConfigError
from fastserve.settings import Settings, list_fields, load_settings
from fastserve.settings.sources import read_environment

SCRIPT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=ServeCommand, short_help="Serve the models of a script.")
@click.argument("script", metavar="FILE.py", type=SCRIPT)
@config_option()
@help_all_option()
@click.option("--reload", is_flag=True, help="Load the models anew when the script or its modules change.")
def run(script: Path, config: Path | None, reload: bool, **flags: Any) -> None:
    """Serve the functions and classes that FILE.py declares with @fastserve.model.

    \b
    Examples:
      fastserve run app.py
      fastserve run app.py --reload
      fastserve run app.py --in-process
      fastserve run app.py --http 0.0.0.0:8000 --keys keys.yaml --frontends 2
    """
    from fastserve.app.serving import run_reloading, run_script

    start = run_reloading if reload else run_script
    try:
        sys.exit(start(script, load_settings(config, read_flags(flags), read_environment(os.environ))))
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


run.params.extend(make_option(field) for field in list_fields(Settings) if field.path not in NO_FLAG)
