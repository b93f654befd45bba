"""MindIE's config.json: what each key becomes, what is ignored by its name, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ConfigError
from fastserve.settings import load_settings
from fastserve.settings.mindie import mindie_overrides, read_config

# As it is delivered, but for the model and TLS.
CONFIG: dict[str, Any] = {
    "Version": "1.1.0",
    "LogConfig": {"logLevel": "Info"},
    "ServerConfig": {
        "ipAddress": "127.0.0.1", "managementIpAddress": "127.0.0.2", "port": 1025, "managementPort": 1026,
        "metricsPort": 1027, "allowAllZeroIpListening": False, "maxLinkNum": 300, "httpsEnabled": False,
        "fullTextEnabled": True, "tlsCaPath": "security/ca/", "tlsCaFile": ["ca.pem"],
        "tlsCert": "security/certs/server.pem", "tlsPk": "security/keys/server.key.pem",
        "tlsPkPwd": "security/pass/key_pwd.txt", "inferMode": "standard", "interCommTLSEnabled": True,
        "interCommPort": 1121, "openAiSupport": "vllm", "tokenTimeout": 60, "e2eTimeout": 90,
    },
    "BackendConfig": {
        "backendName": "mindieservice_llm_engine", "modelInstanceNumber": 2, "npuDeviceIds": [[0, 1]],
        "tokenizerProcessNumber": 8, "multiNodesInferEnabled": False,
        "ModelDeployConfig": {
            "maxSeqLen": 3000, "maxInputTokenLen": 2000, "truncation": 1,
            "ModelConfig": [
                {
                    "modelInstanceType": "Standard", "modelName": "qwen", "modelWeightPath": "weights/qwen",
                    "worldSize": 2, "cpuMemSize": 5, "npuMemSize": -1, "backendType": "atb",
                    "trustRemoteCode": False,
                },
                {"modelName": "other", "modelWeightPath": "/data/other"},
            ],
        },
        "ScheduleConfig": {"cacheBlockSize": 128, "maxBatchSize": 1500, "maxIterTimes": 700},
    },
}  # fmt: skip
IGNORED = {
    "Version", "LogConfig", "BackendConfig.backendName", "BackendConfig.npuDeviceIds",
    "BackendConfig.tokenizerProcessNumber", "BackendConfig.ScheduleConfig.cacheBlockSize",
    "BackendConfig.ModelDeployConfig.ModelConfig[0].modelInstanceType",
    "BackendConfig.ModelDeployConfig.ModelConfig[0].worldSize",
    "BackendConfig.ModelDeployConfig.ModelConfig[0].cpuMemSize",
    "BackendConfig.ModelDeployConfig.ModelConfig[0].npuMemSize",
    "BackendConfig.ModelDeployConfig.ModelConfig[0].backendType",
    "BackendConfig.ModelDeployConfig.ModelConfig[0].trustRemoteCode",
    "ServerConfig.tlsPkPwd", "ServerConfig.interCommTLSEnabled", "ServerConfig.interCommPort",
    "ServerConfig.openAiSupport",
}  # fmt: skip


MODELS = "BackendConfig.ModelDeployConfig.ModelConfig"


def write(folder: Path, config: Any) -> Path:
    path = folder / "conf" / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def changed(path: str, value: Any) -> dict[str, Any]:
    """The config with one key of another value."""
    config = json.loads(json.dumps(CONFIG))
    *way, last = path.split(".")
    place = config
    for name in way:
        place = place[int(name) if isinstance(place, list) else name]
    place[last] = value
    return config


def test_what_the_keys_become(tmp_path: Path) -> None:
    given = read_config(write(tmp_path, CONFIG))
    settings = load_settings(None, mindie_overrides(given))
    assert [one.address for one in settings.http] == ["127.0.0.1:1025", "127.0.0.2:1026", "127.0.0.2:1027"]
    assert {one.dialects for one in settings.http} == {("textgen",)}
    assert settings.grpc == ()
    assert [(model.name, model.base_path) for model in settings.models] == [
        ("qwen", f"{tmp_path}/weights/qwen"),
        ("other", "/data/other"),
    ]
    text = {"max_tokens": 3000, "max_prompt_tokens": 2000, "max_new_tokens": 700, "max_sequences": 1024}
    assert settings.model_defaults == {"text": text, "instances": 2}
    options = settings.textgen
    assert (options.default_model, options.full_text, options.truncate) == ("qwen", True, True)
    assert (options.token_timeout_s, options.e2e_timeout_s) == (60, 90)
    assert (options.metrics, options.tgi_flavor, settings.limits.connections) == ("mindie", "mindie", 300)
    assert settings.tls.cert == ""
    assert set(given.ignored) == IGNORED


def test_tls(tmp_path: Path) -> None:
    given = read_config(write(tmp_path, changed("ServerConfig.httpsEnabled", True)))
    tls = load_settings(None, mindie_overrides(given)).tls
    assert (tls.cert, tls.key, tls.client_ca) == (
        f"{tmp_path}/security/certs/server.pem",
        f"{tmp_path}/security/keys/server.key.pem",
        f"{tmp_path}/security/ca/ca.pem",
    )


def test_the_least_there_may_be(tmp_path: Path) -> None:
    model = {"modelName": "m", "modelWeightPath": "w"}
    least = {
        "ServerConfig": {"httpsEnabled": False, "managementPort": 1025, "managementIpAddress": "127.0.0.1"},
        "BackendConfig": {"ModelDeployConfig": {"ModelConfig": [model]}},
    }
    settings = load_settings(None, mindie_overrides(read_config(write(tmp_path, least))))
    assert [one.address for one in settings.http] == ["127.0.0.1:1025", "127.0.0.1:1027"]
    assert settings.model_defaults["text"]["max_tokens"] == 2560


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "not a JSON file"),
        ("[" * 100_000, "not a JSON file"),
        ([], "BackendConfig"),
        ({}, "BackendConfig: missing"),
        (changed("ServerConfig.port", 0), "ServerConfig.port: given 0"),
        (changed("ServerConfig.inferMode", "dmi"), 'inferMode: given "dmi", allowed: standard'),
        (changed("ServerConfig.ipAddress", "0.0.0.0"), "ipAddress: given 0.0.0.0"),
        (changed("BackendConfig.multiNodesInferEnabled", True), "multiNodesInferEnabled: given true"),
        (changed(MODELS, []), "ModelConfig: given []"),
        (changed(MODELS + ".0.modelName", "a/b"), "ModelConfig[0].modelName"),
        (changed("BackendConfig.ModelDeployConfig.maxSeqLen", "2"), "maxSeqLen: given"),
        (changed("ServerConfig.maxRequestLength", 101), "maxRequestLength: given 101"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, config: Any, told: str) -> None:
    with pytest.raises(ConfigError) as fault:
        read_config(write(tmp_path, config))
    assert told in str(fault.value)


def test_tls_that_cannot_be(tmp_path: Path) -> None:
    for path, value in (("ServerConfig.tlsCert", ""), ("ServerConfig.tlsCaFile", ["a", "b"])):
        config = changed(path, value)
        config["ServerConfig"]["httpsEnabled"] = True
        with pytest.raises(ConfigError, match=path.rpartition(".")[2]):
            mindie_overrides(read_config(write(tmp_path, config)))
