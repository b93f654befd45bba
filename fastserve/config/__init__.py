"""The server's configuration: what may be set, read from one YAML file and from flags."""

from fastserve.config.fields import Field, convert, list_fields
from fastserve.config.grps import GrpsOptions
from fastserve.config.policy import DEFAULT_POLICY, PolicyChoice, VersionPolicy
from fastserve.config.reading import load_settings, parse_listener
from fastserve.config.settings import (
    AdminOptions,
    GrpcOptions,
    Limits,
    Listener,
    LogOptions,
    ModelEntry,
    RepositorySettings,
    Settings,
    TFServingOptions,
)
from fastserve.config.textgen import TextgenOptions
from fastserve.config.tls import TlsOptions
from fastserve.config.triton import TritonOptions

__all__ = [
    "DEFAULT_POLICY",
    "AdminOptions",
    "Field",
    "GrpcOptions",
    "GrpsOptions",
    "Limits",
    "Listener",
    "LogOptions",
    "ModelEntry",
    "PolicyChoice",
    "RepositorySettings",
    "Settings",
    "TFServingOptions",
    "TextgenOptions",
    "TlsOptions",
    "TritonOptions",
    "VersionPolicy",
    "convert",
    "list_fields",
    "load_settings",
    "parse_listener",
]
