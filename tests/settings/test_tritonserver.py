"""Triton's flags: each is built, named as ignored, or refused by name, and what they become."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from fastserve.errors import ConfigError
from fastserve.settings import Settings, load_settings
from fastserve.settings.tritonserver import read_triton_flags, triton_overrides, triton_usage

# Every flag of `tritonserver --help` of 2.51; --allow-client-shm, --http-max-input-size of later ones.
ALL = shlex.split("""
allow-client-shm allow-cpu-metrics allow-gpu-metrics allow-grpc allow-http allow-metrics allow-sagemaker
allow-vertex-ai backend-config backend-directory buffer-manager-thread-count cache-config cache-directory
cuda-memory-pool-byte-size cuda-virtual-address-size disable-auto-complete-config enable-peer-access
exit-on-error exit-timeout-secs grpc-address grpc-header-forward-pattern grpc-http2-max-ping-strikes
grpc-http2-max-pings-without-data grpc-http2-min-recv-ping-interval-without-data
grpc-infer-allocation-pool-size grpc-infer-response-compression-level grpc-keepalive-permit-without-calls
grpc-keepalive-time grpc-keepalive-timeout grpc-max-connection-age grpc-max-connection-age-grace grpc-port
grpc-restricted-protocol grpc-root-cert grpc-server-cert grpc-server-key grpc-use-ssl grpc-use-ssl-mutual
host-policy http-address http-header-forward-pattern http-max-input-size http-port http-restricted-api
http-thread-count id load-model log-error log-file log-format log-info log-verbose log-warning
metrics-address metrics-config metrics-interval-ms metrics-port min-supported-compute-capability
model-config-name model-control-mode model-load-gpu-limit model-load-retry-count model-load-thread-count
model-namespacing model-repository model-store pinned-memory-pool-byte-size rate-limit rate-limit-resource
repoagent-directory repository-poll-secs response-cache-byte-size reuse-grpc-port reuse-http-port
sagemaker-port sagemaker-safe-port-range sagemaker-thread-count strict-model-config strict-readiness
trace-config trace-count trace-file trace-level trace-log-frequency trace-rate vertex-ai-default-model
vertex-ai-port vertex-ai-thread-count
""")


def settings_of(line: str) -> Settings:
    read = read_triton_flags(shlex.split(line))
    assert read.faults == []
    return load_settings(None, triton_overrides(read.given))


@pytest.mark.parametrize("name", ALL)
def test_every_flag_of_the_original_is_known(name: str) -> None:
    faults = read_triton_flags([f"--{name}=1"]).faults
    assert not any("unknown argument" in fault for fault in faults), faults


def test_its_defaults() -> None:
    found = settings_of("--model-repository=/models")
    assert [(one.address, one.dialects) for one in found.http] == [
        ("0.0.0.0:8000", ("kserve_v2",)),
        ("0.0.0.0:8002", ("metrics",)),
    ]
    assert [(one.address, one.dialects) for one in found.grpc] == [("0.0.0.0:8001", ("kserve_v2",))]
    assert (found.repository, found.model_control, found.load_models) == ("/models", "none", ())
    assert (found.log.level, found.keep_going, found.strict_readiness) == ("info", False, True)
    assert not found.allow_client_shm


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("--model-control-mode explicit --load-model a --load-model=b", "load_models", ("a", "b")),
        ("--load-model a", "load_models", ()),  # without explicit control it has no effect there
        ("--model-control-mode=poll --repository-poll-secs=3", "poll_s", 3),
        ("--exit-on-error=false", "keep_going", True),
        ("--strict-readiness False", "strict_readiness", False),
        ("--exit-timeout-secs 7", "drain_s", 7),
        ("--log-verbose 2 --log-info=0", "log.level", "debug"),
        ("--log-info false", "log.level", "warning"),
        ("--log-info=false --log-warning=false", "log.level", "error"),
        ("--cache-config local,size=1048576", "response_cache_bytes", 1048576),
        ("--response-cache-byte-size=77", "response_cache_bytes", 77),
        ("--allow-client-shm=true", "allow_client_shm", True),
        ("--allow-metrics=false", "allow_metrics", False),
        ("--metrics-config summary_latencies=true", "metrics_config", ("summary_latencies=true",)),
        ("--rate-limit=execution_count", "rate_limit", "execution_count"),
        ("--rate-limit-resource R1:4", "rate_limit_resources", ("R1:4",)),
        ("--model-load-retry-count 2", "load_retries", 2),
        ("--http-header-forward-pattern 'x-.*'", "triton.http_header_forward_pattern", "x-.*"),
        ("--http-restricted-api=health:k=v", "triton.http_restricted_api", ("health:k=v",)),
        ("--trace-config=triton,file=t.json --trace-config level=TIMESTAMPS", "triton.trace_config",
         ("triton,file=t.json", "level=TIMESTAMPS")),
        ("--trace-file t.json --trace-level TIMESTAMPS --trace-rate 5", "triton.trace_config",
         ("level=TIMESTAMPS", "triton,file=t.json", "rate=5")),
        ("--grpc-keepalive-time 60000", "grpc_options.keepalive_s", 60.0),
        ("--grpc-keepalive-timeout=500", "grpc_options.keepalive_timeout_s", 0.5),
        ("--grpc-max-connection-age 90000", "grpc_options.max_connection_age_s", 90.0),
        ("--grpc-max-connection-age-grace 1500", "grpc_options.max_connection_age_grace_s", 1.5),
    ],
)  # fmt: skip
def test_what_flags_become(line: str, path: str, value: Any) -> None:
    found: Any = settings_of(f"--model-repository /models {line}")
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_ports_addresses_and_what_is_off() -> None:
    flags = "--model-repository /m --http-address ::1 --http-port=9000 --grpc-port 9001 --metrics-port=9002"
    found = settings_of(flags)
    assert [one.address for one in (*found.http, *found.grpc)] == ["[::1]:9000", "[::1]:9002", "0.0.0.0:9001"]
    found = settings_of("--model-repository /m --allow-http=0 --allow-grpc=false --allow-metrics=False")
    assert (found.http, found.grpc) == ((), ())


def test_tls_is_of_grpc_alone() -> None:
    files = "--grpc-server-cert c.pem --grpc-server-key k.pem --grpc-root-cert r.pem"
    assert settings_of(f"--model-repository /m {files}").tls.cert == ""
    found = settings_of(f"--model-repository /m --grpc-use-ssl=true {files}")
    assert (found.tls.cert, found.tls.key, found.tls.client_ca) == ("c.pem", "k.pem", "")
    assert [one.tls for one in (*found.http, *found.grpc)] == [False, False, True]
    assert settings_of(f"--model-repository /m --grpc-use-ssl-mutual=1 {files}").tls.client_ca == "r.pem"
    with pytest.raises(ConfigError, match="--grpc-server-key: missing"):
        triton_overrides({"model-repository": ["/m"], "grpc-use-ssl": ["1"], "grpc-server-cert": ["c"]})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("--http-prot=1", "unknown argument: --http-prot=1, allowed: flags of tritonserver"),
        ("models", "unknown argument: models, allowed: flags of tritonserver"),
        ("--http-port", "--http-port: missing its value, write --http-port=VALUE"),
        ("--http-port=12x", '--http-port: given "12x", allowed: a whole number from 0 on'),
        ("--allow-http=maybe", '--allow-http: given "maybe", allowed: true or false or 1 or 0'),
        ("--model-control-mode=all", '--model-control-mode: given "all", allowed: none, poll, explicit'),
        ("--allow-sagemaker=true", '--allow-sagemaker: given "true", allowed: false: this flag is not built'),
        ("--log-file=x", '--log-file: given "x", allowed: nothing: this flag is not built'),
        ("--disable-auto-complete-config",
         '--disable-auto-complete-config: given "true", allowed: false: this flag is not built'),
    ],
)  # fmt: skip
def test_what_cannot_be_taken(line: str, fault: str) -> None:
    assert read_triton_flags(line.split()).faults == [fault]


def test_flags_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="--model-repository must be specified"):
        triton_overrides({})
    with pytest.raises(ConfigError, match="--cache-config: given"):
        triton_overrides({"model-repository": ["/m"], "cache-config": ["redis,host=x"]})


def test_what_only_tunes_its_machinery_is_named() -> None:
    read = read_triton_flags(
        ["--pinned-memory-pool-byte-size=0", "--backend-directory", "/b", "--allow-sagemaker=0"]
    )
    assert read.ignored == ["--pinned-memory-pool-byte-size", "--backend-directory"]
    assert read.faults == []


def test_the_usage_names_what_is_built() -> None:
    assert "--http-port <8000>" in triton_usage()
    assert "--sagemaker-port" not in triton_usage()
