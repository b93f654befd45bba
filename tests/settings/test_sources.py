"""Settings by variables of the environment, the variables that are none, and where each setting came from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastserve.errors import ConfigError
from fastserve.settings import Listener, Settings, list_fields, load_settings
from fastserve.settings.sources import (
    OTHER_VARIABLES,
    WITHOUT_VARIABLE,
    EffectiveSetting,
    is_of_service,
    list_effective,
    list_variables,
    read_environment,
)

ROOT = Path(__file__).resolve().parent.parent.parent
# What Kubernetes sets in a pod for a service `fastserve`, whose port is named http, and `fastserve-metrics`.
SERVICES = {
    "FASTSERVE_SERVICE_HOST": "10.0.171.239",
    "FASTSERVE_SERVICE_PORT": "8000",
    "FASTSERVE_SERVICE_PORT_HTTP": "8000",
    "FASTSERVE_PORT": "tcp://10.0.171.239:8000",
    "FASTSERVE_PORT_8000_TCP": "tcp://10.0.171.239:8000",
    "FASTSERVE_PORT_8000_TCP_PROTO": "tcp",
    "FASTSERVE_PORT_8000_TCP_PORT": "8000",
    "FASTSERVE_PORT_8000_TCP_ADDR": "10.0.171.239",
    "FASTSERVE_METRICS_SERVICE_HOST": "10.0.171.240",
    "FASTSERVE_METRICS_PORT": "tcp://10.0.171.240:8002",
    "FASTSERVE_METRICS_PORT_8002_UDP": "udp://10.0.171.240:8002",
}


def test_every_setting_that_is_a_flag_is_a_variable_of_its_own() -> None:
    variables = list_variables()
    assert {field.path for field in variables.values()} == {
        field.path for field in list_fields(Settings) if field.path not in WITHOUT_VARIABLE
    }
    assert variables["FASTSERVE_LIMITS_BODY_BYTES"].path == "limits.body_bytes"
    assert variables["FASTSERVE_HTTP_MAX_INPUT_SIZE"].path == "triton.http_max_input_size"
    assert not OTHER_VARIABLES & variables.keys()
    assert not [name for name in variables if is_of_service(name, "1")]


def test_values_of_variables() -> None:
    found = read_environment(
        {
            "FASTSERVE_HTTP": "127.0.0.1:0=tfserving,kserve_v2 :9",
            "FASTSERVE_GRPC": "off",
            "FASTSERVE_LOAD_MODELS": "a,b c",
            "FASTSERVE_KEEP_GOING": "true",
            "FASTSERVE_LIMITS_BODY_BYTES": "9",
            "FASTSERVE_HTTP_RESTRICTED_API": "health,trace:a=b",
            "FASTSERVE_LOG_LEVEL": " ",  # an empty one gives nothing
            "HOME": "/",
            "fastserve_http": "no variable of this server",
        }
    )
    settings = load_settings(None, None, found)
    assert settings.http == (Listener("127.0.0.1:0", ("tfserving", "kserve_v2")), Listener(":9"))
    assert (settings.grpc, settings.load_models, settings.keep_going) == ((), ("a", "b", "c"), True)
    assert settings.limits.body_bytes == 9
    assert settings.triton.http_restricted_api == ("health,trace:a=b",)
    assert settings.log.level == "info"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FRONTENDS", "0", ': given "0", allowed: a whole number from 1 to 64 or auto'),
        ("KEEP_GOING", "yes", ': given "yes", allowed: true or false'),
        ("HTTP", "localhost", ': [0].address: given "localhost", allowed: HOST:PORT'),
        ("MODEL_CONTROL", "auto", ': given "auto", allowed: none or poll or explicit'),
        ("LISEN", "", ": unknown variable, did you mean FASTSERVE_LISTEN?"),
        ("LOAD_MODEL", "a", ": unknown variable, did you mean FASTSERVE_LOAD_MODELS?"),
        ("BODY_BYTES", "1", ": unknown variable, did you mean FASTSERVE_LIMITS_BODY_BYTES?"),
        ("CONFIGURATION", "f", ": unknown variable, `fastserve serve --help-all` names every one"),
        ("PORT", "8000", ": unknown variable, listeners are FASTSERVE_LISTEN=HOST:PORT, or"),
        ("MODELS", "a", ": unknown variable, did you mean FASTSERVE_LOAD_MODELS?"),
        ("METRICS_PORT", "http", ': given "http", allowed: a whole number from 0 to 65535'),
    ],
)
def test_faults_name_the_variable(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as fault:
        read_environment({f"FASTSERVE_{name}": value})
    assert str(fault.value).startswith(f"FASTSERVE_{name}{words}")


def test_the_variables_of_kubernetes_for_a_service_of_this_name_are_left_alone() -> None:
    assert read_environment(SERVICES) == {}
    assert read_environment({**SERVICES, "FASTSERVE_METRICS_PORT": "8002"}) == {"metrics_port": "8002"}


def test_every_variable_that_is_named_in_this_repository_is_known() -> None:
    """Those of the build and of tests, which a shell may have set, do not keep a server from starting."""
    files = [ROOT / "Makefile", ROOT / "setup.py", *ROOT.glob("docs/*.md")]
    files += [file for folder in ("fastserve", "tests", "tools") for file in ROOT.glob(f"{folder}/**/*.py")]
    others = set[str]()
    for file in files:
        if file != Path(__file__):
            others |= set(re.findall(r"\bFASTSERVE_[A-Z0-9_]*[A-Z0-9]\b", file.read_text()))
    others -= list_variables().keys()
    assert {name for name in others if not is_of_service(name, "tcp://a")} == OTHER_VARIABLES
    assert read_environment(dict.fromkeys(OTHER_VARIABLES, "1")) == {}


def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "{frontends: 2, poll_s: 3, drain_s: 4, limits: {streams: 5}, listen: ['a:1'], tls: {poll_s: 1}}"
    )
    given = read_environment({"FASTSERVE_FRONTENDS": "3", "FASTSERVE_POLL_S": "4"})
    flags: dict[str, object] = {"frontends": "4"}
    settings = load_settings(file, flags, given)
    assert (settings.frontends, settings.poll_s, settings.drain_s) == (4, 4.0, 4.0)
    found = {one.name: one for one in list_effective(settings, file, flags, given)}
    assert found["frontends"] == EffectiveSetting("frontends", 4, "flag")
    assert found["poll_s"] == EffectiveSetting("poll_s", 4.0, "environment", "FASTSERVE_POLL_S")
    assert found["limits.streams"] == EffectiveSetting("limits.streams", 5, "file", str(file))
    assert found["limits.body_bytes"].source == "default"
    assert found["http"] == EffectiveSetting("http", "off", "file", str(file))  # listen is in its place
    assert found["poll_s"].line() == "poll_s: 4.0  (FASTSERVE_POLL_S)"
    assert found["listen"].line() == f"listen: a:1  ({file})"
    assert set(found) == {field.path for field in list_fields(Settings)}


def test_secrets_are_not_shown() -> None:
    flags = {
        "http": [":1=ops,tfserving", "tcp://:2"],
        "tls.cert": "-----BEGIN CERTIFICATE-----",
        "triton.http_restricted_api": ("health:key=sesame",),
        "model_defaults": {"env": {"TOKEN": "sesame"}},
    }
    found = {one.name: one.value for one in list_effective(load_settings(None, flags), None, flags, ())}
    assert found["http"] == [":1=ops,tfserving", "tcp://:2"]
    assert found["tls.cert"] == "(text in PEM)"
    assert found["triton.http_restricted_api"] == ["health:key=(secret)"]
    assert "sesame" not in str(found)


def test_a_fault_of_several_settings_says_that_the_environment_gave_them() -> None:
    with pytest.raises(ConfigError, match=r"^environment: tls\.key: given without cert"):
        load_settings(None, None, read_environment({"FASTSERVE_TLS_KEY": "key.pem"}))
