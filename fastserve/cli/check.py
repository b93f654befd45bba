"""`fastserve check`: what a server would serve from a folder and with which settings, and what is wrong."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fastserve.cli.completion import complete_models
from fastserve.cli.serve import (
    NO_FLAG,
    FetchedPlaces,
    ServeCommand,
    config_option,
    make_option,
    read_flags,
    settle_models,
    show_all,
    single_options,
)
from fastserve.errors import ConfigError
from fastserve.settings import Settings, list_fields, load_settings
from fastserve.settings.sources import EffectiveSetting, list_effective, read_environment

if TYPE_CHECKING:
    from fastserve.repository.check import Report
    from fastserve.server.sizing import FrontCount

# Settings that are shown in any case: they say where to look and where to ask.
ALWAYS_SHOWN = ("repository", "http", "grpc")


@click.command(cls=ServeCommand, short_help="Explain what would be served from a folder.")
@click.argument("repository", metavar="[DIR|FILE|URI|demo]", required=False, shell_complete=complete_models)
@single_options
@config_option()
@click.option("--load/--no-load", default=True, help="Load the models, or only look at their files.")
@click.option("--all", "show_every", is_flag=True, help="Show settings that have their defaults too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: every setting and every model.")
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_all,
    help="Every flag there is.",
)
def check(
    repository: str | None,
    name: str,
    trust_pickle: bool,
    config: Path | None,
    load: bool,
    show_every: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Load the models in DIR as a server would, in worker processes, and tell what is wrong with them:
    versions, tensors, signatures, and every problem in a server's own words. Nothing listens. One model by
    its FILE or folder, and a repository in an object store, are taken as `fastserve serve` takes them; what a
    URI names is copied into a temporary folder, so that no server's copy changes.

    The settings of such a server come first, each with where it came from: a flag, a variable of the
    environment, the file, or the default. Secrets are not shown.

    With --no-load the files are looked at and no code of a model runs; less is found.

    Exit code 1 when a server would refuse to start. Tracebacks go to standard error.

    \b
    fastserve check models/
    fastserve check --config fastserve.yaml --all
    fastserve check models/ --no-load --http 0.0.0.0:8000 --keys keys.yaml
    fastserve check s3://bucket/models
    """
    overrides = read_flags(flags)
    if repository:
        overrides["repository"] = repository
    try:
        given = read_environment(os.environ)
        settings = load_settings(config, overrides, given)
        effective = list_effective(settings, config, overrides, given)
        if not settings.repository and not settings.models:
            raise click.UsageError("name the folder of a model repository, or `demo`")
        refuse_strangers(settings)
        check_traces(settings)
        sizing = count_fronts(settings)
        overrides.pop("repository", None)
        other = load_settings(config, overrides, given)
        with open_places(settings) as places:
            settings = settle_models(settings, other, places, repository, name, trust_pickle=trust_pickle)
            report = examine(settings, load=load)
    except ConfigError as fault:
        raise click.ClickException(str(fault)) from None
    if as_json:
        click.echo(write_json(effective, report, sizing))
    else:
        click.echo(write_settings(effective, sizing, every=show_every) + "\n" + report.text(), nl=False)
    sys.exit(0 if report.ok else 1)


@contextmanager
def open_places(settings: Settings) -> Iterator[FetchedPlaces]:
    """Give what fetches repositories of object stores into a temporary folder. A server's own cache is left
    alone: a new snapshot there would be served."""
    with tempfile.TemporaryDirectory(prefix="fastserve-check-") as folder:
        storage = msgspec.structs.replace(settings.storage, cache=folder)
        places = FetchedPlaces(msgspec.structs.replace(settings, storage=storage))
        try:
            yield places
        finally:
            if places.mirror is not None:
                places.mirror.close()


def examine(settings: Settings, *, load: bool) -> Report:
    """Return the report on all models. Raises ConfigError."""
    from fastserve.repository.check import explain

    report = explain(settings, settings.ray)
    if load:
        from fastserve.server.server import dry_run
        from fastserve.util.logs import setup_logs

        setup_logs("warning", settings.log.format)
        trial = dry_run(settings)
        report.take(trial.problems, trial.served)
    return report


def refuse_strangers(settings: Settings) -> None:
    """Raise ConfigError where a server would serve strangers though nobody has said so."""
    from fastserve.server.dialect_selection import refuse_open_places

    refuse_open_places(settings)


def check_traces(settings: Settings) -> None:
    """Raise ConfigError where a server could not send the traces that the settings ask for."""
    from fastserve.server.trace_export import read_trace_plan

    read_trace_plan(settings, os.environ)


def count_fronts(settings: Settings) -> FrontCount:
    """Return the number of front processes that a server here would have."""
    from fastserve.server.sizing import size_fronts

    return size_fronts(settings)


def write_settings(effective: Sequence[EffectiveSetting], sizing: FrontCount, *, every: bool) -> str:
    """Return the paragraph of the settings; without `every`, of those that somebody gave."""
    shown = [one for one in effective if every or one.source != "default" or one.name in ALWAYS_SHOWN]
    lines = ["settings", *(f"  {one.line()}" for one in shown)]
    left = len(effective) - len(shown)
    others = [f"  {left} others have their defaults (--all)"] if left else []
    return "\n".join([*lines, *([f"  {sizing.reason}"] if sizing.reason else []), *others, ""])


def write_json(effective: Sequence[EffectiveSetting], report: Report, sizing: FrontCount) -> str:
    """Return settings and report as one JSON object."""
    whole = {
        "ok": report.ok,
        "loaded": report.loaded,
        "front_processes": sizing.settings.front_count,
        "settings": {one.name: {"value": one.value, **one.source_fields()} for one in effective},
        "models": {model.name: model.fields() for model in report.models},
        "passed_over": report.passed_over,
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode()


check.params.extend(make_option(field) for field in list_fields(Settings) if field.path not in NO_FLAG)
