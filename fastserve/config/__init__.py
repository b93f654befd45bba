"""The server's configuration, read from one YAML file and from flags."""

from fastserve.config.fields import ConfigField, convert, list_fields
from fastserve.config.grps import GrpsOptions
from fastserve.config.settings import (
    DEFAULT_POLICY,
    LEAST_MEMORY_BYTES,
    AdminOptions,
    GrpcOptions,
    Limits,
    Listener,
    LogOptions,
    ModelEntry,
    PolicyChoice,
    RepositorySettings,
    Settings,
    TFServingOptions,
    TlsOptions,
    VersionPolicy,
    load_settings,
    parse_listener,
)
from fastserve.config.text_options import TextgenOptions
from fastserve.config.triton import TritonOptions

__all__ = [
    "DEFAULT_POLICY",
    "LEAST_MEMORY_BYTES",
    "AdminOptions",
    "ConfigField",
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
