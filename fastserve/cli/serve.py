"""`fastserve serve` and `fastserve run`: settings from flags and a file, then a server until a signal.

Every field of the settings is a flag; the ones scripts use have short names of their own here.

`fastserve run app.py` serves the models of a script, with the same flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fastserve.cli.completion import complete_models, complete_values
from fastserve.errors import ConfigError
from fastserve.repository.storage_sources import is_uri
from fastserve.settings import ConfigField, Settings, list_fields, load_settings
from fastserve.settings.sources import CONFIG_VARIABLE, read_environment, variable_of
from fastserve.util.logs import setup_logs

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from fastserve.repository.storage import Mirror


# Path of a setting -> how the flag is written; the rest are derived from the field's path.
NAMED: dict[str, dict[str, Any]] = {
    "listen": {"names": ["--listen"], "multiple": True, "metavar": "HOST:PORT[=DIALECT,...]"},
    "http": {"names": ["--http"], "multiple": True, "metavar": "HOST:PORT[=DIALECT,...]"},
    "grpc": {"names": ["--grpc"], "multiple": True, "metavar": "HOST:PORT[=DIALECT,...]"},
    "dialects": {"names": ["--dialect"], "multiple": True, "metavar": "MODULE:NAME"},
    "ray": {"metavar": "HOST:PORT|auto|local"},
    "load_models": {"names": ["--load-model"], "multiple": True, "metavar": "NAME|*"},
    "keep_going": {"names": ["--keep-going"], "is_flag": True},
    "rate_limit_resources": {"names": ["--rate-limit-resource"], "multiple": True, "metavar": "NAME:COUNT"},
    "triton.http_restricted_api": {"multiple": True, "metavar": "API,...:HEADER=VALUE"},
    "triton.grpc_restricted_protocol": {"multiple": True, "metavar": "API,...:KEY=VALUE"},
    "triton.trace_config": {"multiple": True, "metavar": "[MODE,]SETTING=VALUE"},
    "otel.endpoint": {"names": ["--otel"], "metavar": "URL"},
}
SETTINGS_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
BY_ENVIRONMENT = (
    "Every flag is a variable of the environment too, FASTSERVE_HTTP=HOST:PORT for --http; --help-all "
    "names them. A flag goes before a variable, a variable before the file of --config, and that before "
    "the default."
)
AS_ORIGINAL: dict[str, object] = {"insecure_public": True}
"""Settings of commands that take another server's place: they listen where that does, and warn."""
NO_FLAG = ("repository", "deployment", "models", "model_defaults", "dialect_options")
COMMON = (
    "listen",
    "http",
    "grpc",
    "frontends",
    "ray",
    "in_process",
    "model_control",
    "load_models",
    "keep_going",
    "keys",
    "insecure_public",
    "drain_delay_s",
    "drain_s",
    "log.level",
)


class SettingOption(click.Option):
    """The flag of a setting, whose help is read when it is shown."""

    setting: ConfigField

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        self.help = self.setting.help
        if ctx.params.get("help_all"):
            self.help += f"  [{variable_of(self.setting)}]"
        return super().get_help_record(ctx)


def make_option(field: ConfigField) -> click.Option:
    """Return the flag of a setting."""
    named = dict(NAMED.get(field.path, {}))
    flags = named.pop("names", [field.flag])
    if field.kind is bool:
        named["is_flag"], flags = True, [f"{flags[0]}/--no-{flags[0][2:]}"]
    else:
        named.setdefault("metavar", "VALUE")
    if field.kind is not bool:
        named["shell_complete"] = complete_values(field)
    hidden = field.path not in COMMON
    option = SettingOption([*flags, field.path.replace(".", "__")], default=None, hidden=hidden, **named)
    option.setting = field
    return option


def read_flags(flags: Mapping[str, Any]) -> dict[str, object]:
    """Return the given flags by the dotted paths of their settings."""
    return {path.replace("__", "."): value for path, value in flags.items() if value not in (None, ())}


class ServeCommand(click.Command):
    """A command whose `--help-all` also lists the flags that are rarely needed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as fault:
            if fault.option_name in ("--port", "--host", "--rest-port", "--grpc-port", "-p"):
                where = "listeners are given as --listen HOST:PORT, or --http HOST:PORT and --grpc HOST:PORT"
                raise click.UsageError(f"No such option {fault.option_name}; {where}", ctx) from None
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the flags that begin so; rare ones too where more than their dashes are given."""
        from click.shell_completion import CompletionItem

        flags = {
            flag: option
            for option in self.params
            if isinstance(option, SettingOption)
            for flag in (*option.opts, *option.secondary_opts)
        }
        found = super().shell_complete(ctx, incomplete)
        if incomplete.strip("-"):
            found += [
                CompletionItem(f) for f, one in flags.items() if one.hidden and f.startswith(incomplete)
            ]
        for item in found:
            if item.value in flags:
                item.help = flags[item.value].setting.help
        return found

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write_text(BY_ENVIRONMENT)

    def get_help(self, ctx: click.Context) -> str:
        rare: list[click.Option] = []
        if ctx.params.get("help_all"):
            rare = [one for one in self.params if isinstance(one, click.Option) and one.hidden]
        for option in rare:
            option.hidden = False
        try:
            return super().get_help(ctx)
        finally:  # the command may be asked again in this process
            for option in rare:
                option.hidden = True


class FetchedPlaces:
    """Local folders of addresses. `mirror` is that of the object store, where one was named."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.mirror: Mirror | None = None

    def __call__(self, place: str) -> Path:
        """Return a path, or the local copy of what an address names. Raises ConfigError."""
        if not is_uri(place):
            return Path(place)
        from fastserve.repository.storage import open_mirror

        setup_logs(self._settings.log.level, self._settings.log.format, access=False)
        self.mirror = open_mirror(place, self._settings.storage)
        return self.mirror.path


def settle_models(
    settings: Settings,
    other: Settings,
    fetched: FetchedPlaces,
    given: str | None,
    name: str,
    *,
    trust_pickle: bool,
) -> Settings:
    """Return settings with the models that a command is to serve: those of a repository, the same out of an
    object store, or one model by its file or folder.

    `given` is the repository that the command line names, and `other` the settings without it: another folder
    may be named by the file of --config. Raises ConfigError.
    """
    from fastserve.repository.single_model import find_single

    remote = is_uri(settings.repository)
    place = fetched(settings.repository) if remote else Path(given or "")
    single = find_single(place, name, trust_pickle=trust_pickle) if remote or given is not None else None
    if (name or trust_pickle) and single is None:
        raise ConfigError("--name, --trust-pickle: given with a repository, allowed: with one model")
    if single is not None:
        settings = settings if given is None else other
        settings = msgspec.structs.replace(settings, models=(*settings.models, single))
    if remote:
        root = "" if single is not None else str(place)
        settings = msgspec.structs.replace(settings, repository=root)
    return settings


def show_all(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.params["help_all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def config_option(help: str = "Settings in YAML.") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that adds `--config`."""
    return click.option("--config", type=SETTINGS_FILE, envvar=CONFIG_VARIABLE, help=help)


def single_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of one model by its file or folder."""
    trust = click.option(
        "--trust-pickle",
        "--allow-pickle",
        is_flag=True,
        help="Open a FILE that is a pickle, which runs its author's code.",
    )
    name = click.option(
        "--name", metavar="NAME", default="", help="What clients call the model of one FILE or folder."
    )
    return name(trust(command))


def help_all_option() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that adds `--help-all`, of a ServeCommand."""
    flag: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    return click.option("--help-all", callback=show_all, help="Every flag there is.", **flag)


@click.command(cls=ServeCommand, short_help="Serve a model repository.")
@click.argument("repository", metavar="[DIR|FILE|URI|demo]", required=False, shell_complete=complete_models)
@single_options
@config_option()
@help_all_option()
def serve(repository: str | None, name: str, trust_pickle: bool, config: Path | None, **flags: Any) -> None:
    """Serve the models in DIR, one model by its file or folder, the same out of an object store (s3://, gs://,
    az://, hf://, https:// of an archive), or the built-in demo models.

    \b
    Examples:
      fastserve serve demo
      fastserve serve models/ --listen 0.0.0.0:8000 --keys keys.yaml
      fastserve serve resnet.onnx --name resnet
      fastserve serve models/ --http 127.0.0.1:8501=tfserving --grpc off
      fastserve serve models/ --model-control explicit --load-model resnet
      fastserve serve s3://bucket/models --storage-poll-s 30
    """
    from fastserve.app.serving import with_app_api
    from fastserve.server import run

    overrides = read_flags(flags)
    try:
        environment = read_environment(os.environ)
        if repository is not None:
            overrides["repository"] = repository
        settings = load_settings(config, overrides, environment)
        fetched = FetchedPlaces(settings)
        overrides.pop("repository", None)
        other = load_settings(config, overrides, environment)
        settings = settle_models(settings, other, fetched, repository, name, trust_pickle=trust_pickle)
        settings = with_app_api(settings)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    if not (settings.repository or settings.models or settings.deployment):
        raise click.UsageError("name the folder of a model repository, or `demo`")
    sys.exit(run(settings, mirror=fetched.mirror))


serve.params.extend(make_option(field) for field in list_fields(Settings) if field.path not in NO_FLAG)


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
