"""The server's configuration, read from one YAML file and from flags."""

from fastserve.settings.fields import ConfigField, convert, list_fields
from fastserve.settings.grps import GrpsOptions
from fastserve.settings.kserve_options import TritonOptions
from fastserve.settings.model_options import TextgenOptions
from fastserve.settings.server_settings import (
    DEFAULT_POLICY,
    LEAST_MEMORY_BYTES,
    AdminOptions,
    GrpcOptions,
    Limits,
    Listener,
    LogOptions,
    ModelEntry,
    OtelOptions,
    PolicyChoice,
    RepositorySettings,
    Settings,
    StorageOptions,
    TFServingOptions,
    TlsOptions,
    VersionPolicy,
    load_settings,
    parse_listener,
)

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
    "OtelOptions",
    "PolicyChoice",
    "RepositorySettings",
    "Settings",
    "StorageOptions",
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
