"""Sources of settings: variables of the environment beside flags and the file, and which one each came from.

Every setting that can be a flag can be a variable: `limits.body_bytes` is FASTSERVE_LIMITS_BODY_BYTES. A flag
goes before a variable, a variable before the file, the file before the default. A FASTSERVE_ variable that
nobody knows is an error, since it was meant for this server. Kubernetes sets variables in each pod for every
service, by the service's name: those of a service that is called fastserve are recognised and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from fastserve.errors import ConfigError
from fastserve.settings.config_files import read_yaml
from fastserve.settings.fields import ConfigField, convert, list_fields
from fastserve.settings.server_settings import (
    LISTENER_FIELDS,
    PASSWORD_VARIABLE,
    PLAIN,
    Listener,
    Settings,
    names_file,
    parse_listener,
)

PREFIX = "FASTSERVE_"
CONFIG_VARIABLE = "FASTSERVE_CONFIG"  # the file of settings, as --config
WITHOUT_VARIABLE = ("deployment", "models", "model_defaults", "dialect_options")

OTHER_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        PASSWORD_VARIABLE,
        *("FASTSERVE_URL", "FASTSERVE_CACERT", "FASTSERVE_API_KEY"),  # commands that are clients
        *("FASTSERVE_EXT", "FASTSERVE_DEBUG", "FASTSERVE_PORTABLE", "FASTSERVE_JOBS"),  # the build
        "FASTSERVE_REPOSITORY_URL",  # the site of the docs
        *("FASTSERVE_GRPC_JS", "FASTSERVE_H2SPEC", "FASTSERVE_TRITON", "FASTSERVE_SMOKE"),  # the tests
        *("FASTSERVE_SIMULATED_DEVICE", "FASTSERVE_TEST_PROBE", "FASTSERVE_FLOAT_STEP"),
    }
)
"""Variables of this name that are no settings."""

# Items of these lists have commas in them: they are separated by spaces alone.
COMMAS_INSIDE = (
    *LISTENER_FIELDS,
    "triton.http_restricted_api",
    "triton.grpc_restricted_protocol",
    "triton.trace_config",
)
# Of a service NAME: NAME_SERVICE_HOST, NAME_SERVICE_PORT[_PORTNAME], NAME_PORT, NAME_PORT_8000_TCP[_ADDR].
_SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_PLACE = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
_WHERE_LISTENERS = (
    ", listeners are FASTSERVE_LISTEN=HOST:PORT, or FASTSERVE_HTTP=HOST:PORT and FASTSERVE_GRPC=HOST:PORT"
)
_TO_LISTENERS = ("PORT", "HOST", "ADDRESS", "BIND", "HTTP_PORT", "GRPC_PORT", "HTTP_HOST", "GRPC_HOST")


def variable_of(field: ConfigField) -> str:
    """Return the name of a setting's variable."""
    return PREFIX + field.flag[2:].replace("-", "_").upper()


@cache
def list_variables() -> dict[str, ConfigField]:
    """Return every setting that has a variable, by the variable's name."""
    return {variable_of(one): one for one in list_fields(Settings) if one.path not in WITHOUT_VARIABLE}


def is_of_service(name: str, value: str) -> bool:
    """Return whether Kubernetes sets such a variable for a service whose name begins with `fastserve`."""
    if name.endswith("_PORT") and _SERVICE_PLACE.match(value):
        return True
    return _SERVICE.search(name) is not None


def read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the settings that variables give, by their paths. An empty variable gives none.

    Raises ConfigError for a value that does not fit, and for a FASTSERVE_ variable that nobody knows.
    """
    known, found = list_variables(), dict[str, object]()
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES or is_of_service(name, value):
            continue
        if name not in known:
            raise ConfigError(f"{name}: unknown variable{_guess(name)}")
        if value.strip():
            found[known[name].path] = _read_value(known[name], name, value)
    return found


def _read_value(field: ConfigField, name: str, value: str) -> object:
    given: object = value
    if field.path in COMMAS_INSIDE:
        given = value.split()
    elif isinstance(field.default, tuple):
        given = value.replace(",", " ").split()
    checked: object = given
    if field.path in LISTENER_FIELDS:
        checked = [parse_listener(item) for item in value.split() if item != "off"]
    convert(checked, field.hint, name, lax=True)
    return given


def _guess(name: str) -> str:
    """Return the rest of an error: which variable may have been meant."""
    said = name.removeprefix(PREFIX)
    if said in _TO_LISTENERS:
        return _WHERE_LISTENERS
    names = [one.removeprefix(PREFIX) for one in (*list_variables(), CONFIG_VARIABLE)]
    ends = [one for one in names if one.endswith(f"_{said}")]
    close = ends if len(ends) == 1 else get_close_matches(said, names, 1, 0.75)
    if close:
        return f", did you mean {PREFIX}{close[0]}?"
    return ", `fastserve serve --help-all` names every one"


class EffectiveSetting(msgspec.Struct, frozen=True):
    """One setting with the value that a server would have, and where it came from."""

    name: str
    value: Any
    source: Literal["flag", "environment", "file", "default"]
    origin: str = ""
    """The variable or the file."""

    def source_fields(self) -> dict[str, str]:
        """Return where the setting came from, for JSON."""
        return {"source": self.source, **({"origin": self.origin} if self.origin else {})}

    def line(self) -> str:
        """Return the setting on one line of text."""
        value = " ".join(self.value) if _is_words(self.value) else self.value
        if not isinstance(value, str):
            value = msgspec.json.encode(value).decode()
        came = {"environment": self.origin, "file": self.origin}.get(self.source, self.source)
        return f"{self.name}: {value or '(empty)'}  ({came})"


def list_effective(
    settings: Settings,
    file: Path | None,
    flags: Iterable[str],
    environment: Iterable[str],
) -> list[EffectiveSetting]:
    """Return every setting of a server, without secrets. `flags` and `environment` are the paths of settings
    that these gave. Raises ConfigError for a file that cannot be read."""
    flags, environment = set(flags), set(environment)
    in_file = set(_list_paths(read_yaml(file, file.name), "")) if file else set[str]()
    found: list[EffectiveSetting] = []
    for field in list_fields(Settings):
        path, value = field.path, _shown_value(field.path, _value_of(settings, field.path))
        if path in ("http", "grpc") and path not in flags | environment | in_file:
            path = "listen"  # which takes the place of both where it is given
        if path in flags:
            found.append(EffectiveSetting(field.path, value, "flag"))
        elif path in environment:
            variable = next(name for name, one in list_variables().items() if one.path == path)
            found.append(EffectiveSetting(field.path, value, "environment", variable))
        elif path in in_file:
            found.append(EffectiveSetting(field.path, value, "file", str(file)))
        else:
            found.append(EffectiveSetting(field.path, value, "default"))
    return found


def _list_paths(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the path of each field of a file, and of each group of fields."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _list_paths(value, f"{prefix}{name}.")


def _value_of(settings: Settings, path: str) -> Any:
    found: Any = settings
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _shown_value(path: str, value: Any) -> Any:
    """Return the value for a reader, in the words that flags have; secrets are left out."""
    if path in LISTENER_FIELDS:
        return [_listener_text(listener) for listener in value] or "off"
    if path in ("tls.cert", "tls.key", "tls.client_ca") and value and not names_file(value):
        return "(text in PEM)"
    if path in ("triton.http_restricted_api", "triton.grpc_restricted_protocol", "otel.headers"):
        return [f"{item.partition('=')[0]}=(secret)" for item in value]
    if isinstance(value, Mapping):  # environments of models, options of dialects: anything may be there
        return dict.fromkeys(value, "(given)")
    return msgspec.to_builtins(value)


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _listener_text(listener: Listener) -> str:
    plain = "" if listener.tls else PLAIN
    spoken = f"={','.join(listener.dialects)}" if listener.dialects else ""
    return f"{plain}{listener.address}{spoken}"
