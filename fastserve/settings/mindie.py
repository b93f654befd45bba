"""MindIE's config.json as settings of this server.

    mindie_overrides(read_config(Path("conf/config.json")))

Every key works here or is reported as ignored; one that cannot be kept (disaggregated serving) is refused by
its name. Relative paths begin at the installation, which is the folder above `conf`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from fastserve.errors import ConfigError
from fastserve.settings.fields import convert

FILE = "config.json"
MOST_SEQUENCES = 1024
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=1)]


class ServerConfig(msgspec.Struct, frozen=True):
    """The keys of `ServerConfig` that have an effect."""

    ipAddress: str = "127.0.0.1"
    managementIpAddress: str = "127.0.0.2"
    port: Port = 1025
    managementPort: Port = 1026
    metricsPort: Port = 1027
    allowAllZeroIpListening: bool = False
    maxLinkNum: Count = 1000
    httpsEnabled: bool = True
    fullTextEnabled: bool = False
    tlsCaPath: str = ""
    tlsCaFile: list[str] = []
    tlsCert: str = ""
    tlsPk: str = ""
    inferMode: Literal["standard"] = "standard"
    tokenTimeout: Annotated[int, Meta(ge=1, le=3600)] = 600
    e2eTimeout: Annotated[int, Meta(ge=1, le=65535)] = 600
    maxRequestLength: Annotated[int, Meta(ge=1, le=100)] = 40
    maxJsonDepth: Annotated[int, Meta(ge=10, le=100)] = 10


class OneModel(msgspec.Struct, frozen=True):
    """The keys of a `ModelConfig` that have an effect."""

    modelName: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    modelWeightPath: Annotated[str, Meta(min_length=1)]


class ModelDeployConfig(msgspec.Struct, frozen=True):
    """The keys of `ModelDeployConfig` that have an effect."""

    ModelConfig: Annotated[list[OneModel], Meta(min_length=1)]
    maxSeqLen: Count = 2560
    maxInputTokenLen: Count = 2048
    truncation: int | bool = 0


class ScheduleConfig(msgspec.Struct, frozen=True):
    """The keys of `ScheduleConfig` that have an effect."""

    maxBatchSize: Count = 200
    maxIterTimes: Count = 512


class BackendConfig(msgspec.Struct, frozen=True):
    """The keys of `BackendConfig` that have an effect."""

    ModelDeployConfig: ModelDeployConfig
    ScheduleConfig: ScheduleConfig = ScheduleConfig()
    modelInstanceNumber: Count = 1
    multiNodesInferEnabled: Literal[False] = False


class MindieConfig(msgspec.Struct, frozen=True):
    """The whole file."""

    BackendConfig: BackendConfig
    ServerConfig: ServerConfig = ServerConfig()


@dataclass(frozen=True, slots=True)
class Given:
    """A file as read: its effective keys, the ignored ones, and the root of its relative paths."""

    config: MindieConfig
    ignored: list[str]
    root: Path


def read_config(path: Path) -> Given:
    """Return a checked file. Raises ConfigError naming key and allowed values."""
    try:
        raw = json.loads(path.read_bytes())
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: not a JSON file") from None
    ignored: list[str] = []
    config = convert(_split(raw, MindieConfig, "", ignored), MindieConfig, FILE)
    _check_host(config.ServerConfig)
    folder = path.absolute().parent
    root = folder.parent if folder.name == "conf" else folder
    return Given(config, ignored, root)


def mindie_overrides(given: Given) -> dict[str, Any]:
    """Return settings by their dotted paths. Raises ConfigError."""
    server, backend = given.config.ServerConfig, given.config.BackendConfig
    deployed, schedule = backend.ModelDeployConfig, backend.ScheduleConfig
    text = {
        "max_tokens": deployed.maxSeqLen,
        "max_prompt_tokens": deployed.maxInputTokenLen,
        "max_new_tokens": schedule.maxIterTimes,
        "max_sequences": min(schedule.maxBatchSize, MOST_SEQUENCES),
    }
    return {
        "models": [
            {"name": model.modelName, "base_path": str(given.root / model.modelWeightPath)}
            for model in deployed.ModelConfig
        ],
        "model_defaults": {"text": text, "instances": backend.modelInstanceNumber},
        "http": [{"address": address, "dialects": ["textgen"]} for address in _addresses(server)],
        "grpc": [],
        "limits.connections": server.maxLinkNum,
        "kserve_replies": False,
        "textgen.default_model": deployed.ModelConfig[0].modelName,
        "textgen.full_text": server.fullTextEnabled,
        "textgen.token_timeout_s": float(server.tokenTimeout),
        "textgen.e2e_timeout_s": float(server.e2eTimeout),
        "textgen.request_mb": server.maxRequestLength,
        "textgen.json_depth": server.maxJsonDepth,
        "textgen.truncate": bool(deployed.truncation),
        "textgen.metrics": "mindie",
        "textgen.tgi_flavor": "mindie",
        "textgen.openai_flavor": "mindie",
        **_tls(server, given.root),
    }


def _addresses(server: ServerConfig) -> list[str]:
    """Return the addresses of requests, management and metrics, each once."""
    own, managed = _host(server.ipAddress), _host(server.managementIpAddress)
    places = (f"{own}:{server.port}", f"{managed}:{server.managementPort}", f"{managed}:{server.metricsPort}")
    return list(dict.fromkeys(places))


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _check_host(server: ServerConfig) -> None:
    for name in ("ipAddress", "managementIpAddress"):
        if getattr(server, name) in ("0.0.0.0", "::") and not server.allowAllZeroIpListening:
            given = getattr(server, name)
            raise ConfigError(
                f"{FILE}: ServerConfig.{name}: given {given}, allowed: with allowAllZeroIpListening true"
            )


def _tls(server: ServerConfig, root: Path) -> dict[str, Any]:
    """Return settings of TLS. $FASTSERVE_TLS_KEY_PASSWORD has the key's password, which MindIE encrypts."""
    if not server.httpsEnabled:
        return {}
    for name in ("tlsCert", "tlsPk"):
        if not getattr(server, name):
            raise ConfigError(
                f"{FILE}: ServerConfig.{name}: missing, name a PEM file, or write httpsEnabled: false"
            )
    said = {"tls.cert": str(root / server.tlsCert), "tls.key": str(root / server.tlsPk)}
    if len(server.tlsCaFile) > 1:
        raise ConfigError(
            f"{FILE}: ServerConfig.tlsCaFile: given {len(server.tlsCaFile)} files, allowed: one, with all of "
            "their certificates"
        )
    if server.tlsCaFile:
        said["tls.client_ca"] = str(root / server.tlsCaPath / server.tlsCaFile[0])
    return said


def _split(raw: Any, kind: Any, path: str, ignored: list[str]) -> Any:
    """Return the effective keys of a value; the others are appended to `ignored`."""
    if get_origin(kind) is list and isinstance(raw, list):
        (inner,) = get_args(kind)
        return [_split(one, inner, f"{path}[{number}]", ignored) for number, one in enumerate(raw)]
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(raw, Mapping)):
        return raw
    known = {name: _bare(hint) for name, hint in get_type_hints(kind).items()}
    dot = f"{path}." if path else ""
    ignored += [f"{dot}{key}" for key in raw if key not in known]
    return {key: _split(raw[key], known[key], f"{dot}{key}", ignored) for key in raw if key in known}


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint
