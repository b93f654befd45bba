"""Serving an app: from a script to a server with its models.

    serve_declared({"http": ":8000"})          python app.py: the models that are declared so far
    run_script(Path("app.py"), settings)       fastserve run app.py: the script is run in a process of its own
    run_reloading(Path("app.py"), settings)    the same, and again whenever it changes

They write a repository of the models into a temporary folder and run an ordinary server on it, with the API
of apps before the others.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fastserve.app.describe import describe_script
from fastserve.app.models_folder import configs_of, copy_app, list_paths, read_apps, stamp_app, write_models
from fastserve.app.reload import LOOK_S, Reloader, say_on_terminal
from fastserve.backends.script.declaration import declared
from fastserve.errors import ConfigError
from fastserve.settings import Settings, list_fields, load_settings
from fastserve.settings.fields import hint
from fastserve.settings.sources import read_environment

DIALECT = "fastserve.app.json_api:SPEC"
OPTIONS = "app"
Configs = Mapping[str, Mapping[str, Any]]


def serve_declared(settings: Mapping[str, Any]) -> int:
    """Serve the models that the running script has declared, until a signal; returns the exit status.

    Keywords go before variables of the environment. Raises ConfigError, TypeError."""
    chosen = load_settings(None, read_keywords(settings), read_environment(os.environ))
    file = main_file()
    return run_models(configs_of(declared(), file, stamp_app(file)), chosen)


def write_repository(folder: Path) -> None:
    """Write the declared models as a repository, with the script's files in it. Raises ConfigError."""
    copy_app(declared(), main_file(), folder)


def run_script(file: Path, settings: Settings) -> int:
    """Serve the models of a script until a signal, and return the exit status. Raises ConfigError."""
    file = file.absolute()
    return run_models(describe_script(file), settings)


def run_reloading(file: Path, settings: Settings) -> int:
    """Serve the models of a script, and load them anew when it changes; see reload.py. Raises ConfigError."""
    from fastserve.server import run

    if settings.model_control != "poll":
        raise ConfigError(f"model_control: given {settings.model_control} with --reload, allowed: poll")
    reloader = Reloader(file.absolute())
    configs = reloader.first(say_on_terminal)
    quick = msgspec.structs.replace(settings, keep_going=True, poll_s=min(settings.poll_s, LOOK_S))
    with written(configs) as root, reloader.following(root):
        return run(app_settings(quick, root, configs))


def run_models(configs: Configs, settings: Settings) -> int:
    """Serve models by their configurations, and return the exit status. Raises ConfigError."""
    from fastserve.server import run

    with written(configs) as root:
        return run(app_settings(settings, root, configs))


@contextlib.contextmanager
def written(configs: Configs) -> Iterator[Path]:
    """Hold a temporary repository of the models. Raises ConfigError."""
    list_paths(configs)
    with tempfile.TemporaryDirectory(prefix="fastserve-app-") as folder:
        write_models(configs, Path(folder))
        yield Path(folder)


def app_settings(settings: Settings, root: Path, configs: Configs) -> Settings:
    """Return the settings with the repository of an app, and its API. Raises ConfigError."""
    if settings.repository:
        raise ConfigError("repository: an app has its own; serve the other models by a server of theirs")
    return msgspec.structs.replace(_with_api(settings, configs), repository=str(root))


def with_app_api(settings: Settings) -> Settings:
    """Return the settings with the API of apps, where the repository holds models of scripts: those that
    `App.to_repository` has written. Raises ConfigError."""
    configs = read_apps(Path(settings.repository)) if settings.repository not in ("", "demo") else {}
    return _with_api(settings, configs) if configs else settings


def _with_api(settings: Settings, configs: Configs) -> Settings:
    """Return the settings with the API of apps before the others. Raises ConfigError."""
    dialects = settings.dialects if DIALECT in settings.dialects else (DIALECT, *settings.dialects)
    options = {**settings.dialect_options, OPTIONS: {"paths": list_paths(configs)}}
    return msgspec.structs.replace(settings, dialects=dialects, dialect_options=options)


def read_keywords(given: Mapping[str, Any]) -> dict[str, object]:
    """Return keywords by the paths of their settings: log_level is log.level. Raises TypeError."""
    known = {field.flag.lstrip("-").replace("-", "_"): field.path for field in list_fields(Settings)}
    found: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"serve: there is no setting {name!r}{hint(name, sorted(known))}")
        found[known[name]] = tuple(value) if isinstance(value, list) else value
    return found


def main_file() -> Path:
    """Return the file of the script that runs. Raises ConfigError at a prompt, where there is none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        raise ConfigError("models are served from a file: workers run it; at a prompt use BatchedService")
    return Path(file).absolute()
