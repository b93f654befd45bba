"""Triton's own flags: their forms, and what is said of others."""

from __future__ import annotations

import pytest

from fastserve.errors import ConfigError
from fastserve.settings import load_settings
from fastserve.settings.kserve_options import CATEGORIES, parse_restrictions, parse_trace_config


def test_restrictions_by_category() -> None:
    found = parse_restrictions("f", ["health,trace:a-b=c:d=e", "logging:X=1"])
    assert found == {"health": ("a-b", "c:d=e"), "trace": ("a-b", "c:d=e"), "logging": ("X", "1")}
    assert parse_restrictions("f", [f"{','.join(CATEGORIES)}:k=v"]).keys() == set(CATEGORIES)


@pytest.mark.parametrize(
    "given", ["", "health", "health:k", "health:=v", "health:k=", "nope:k=v", "health,:k=v"]
)
def test_no_restriction(given: str) -> None:
    with pytest.raises(ValueError, match=r"^f: given .* allowed: API,\.\.\.:HEADER=VALUE"):
        parse_restrictions("f", [given])


def test_a_category_is_restricted_once() -> None:
    with pytest.raises(ValueError, match="each once of health, "):
        parse_restrictions("f", ["health:a=b", "trace,health:c=d"])


def test_trace_settings() -> None:
    flags = [
        "triton,file=/tmp/t,=x",
        "level=TENSORS",
        "level=TIMESTAMPS",
        "rate=5",
        "count=-1",
        "mode=triton",
    ]
    assert parse_trace_config([*flags, "triton,log-frequency=0"]) == {
        "trace_file": "/tmp/t,=x", "trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "5",
        "trace_count": "-1", "trace_mode": "triton", "log_frequency": "0",
    }  # fmt: skip
    assert parse_trace_config(["level=OFF"]) == {"trace_level": ["OFF"]}


@pytest.mark.parametrize(
    "given",
    ["rate", "rate=0", "rate=x", "file=f", "triton,rate=1", "opentelemetry,url=x", "level=ALL", "count=-2"],
)
def test_no_trace_setting(given: str) -> None:
    with pytest.raises(ValueError, match=r"^trace_config: given "):
        parse_trace_config([given])


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("triton.http_restricted_api", ("x",), "triton.http_restricted_api: given"),
        ("triton.trace_config", ("level=TIMESTAMPS",), 'allowed: with "triton,file=FILE"'),
        ("triton.grpc_header_forward_pattern", "(", "allowed: a regular expression"),
        ("triton.http_max_input_size", "134217729", "allowed: up to limits.body_bytes, 134217728"),
    ],
)
def test_settings_name_the_field(path: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {path: value})
    assert words in str(caught.value)


def test_flags_have_no_other_name() -> None:
    from fastserve.settings import Settings, list_fields

    flags = {field.path: field.flag for field in list_fields(Settings)}
    assert flags["triton.http_max_input_size"] == "--http-max-input-size"
    assert flags["tfserving.cors"] == "--tfserving-cors"
