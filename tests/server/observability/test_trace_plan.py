"""Which requests are traced and where their spans go: by settings, by OpenTelemetry's variables, by Triton's
flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from fastserve.cli.check import check
from fastserve.errors import ConfigError
from fastserve.server import trace_export
from fastserve.server.otlp_exporter import SpanQueue
from fastserve.server.span_records import SpanRecord
from fastserve.server.trace_export import read_sampler, read_trace_plan
from fastserve.settings import OtelOptions, Settings, TritonOptions, load_settings
from tests.server.rig import write_model

NAMED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}


def test_nothing_is_traced_by_default() -> None:
    assert read_trace_plan(Settings(), {}) is None
    assert read_trace_plan(Settings(), {"OTEL_SERVICE_NAME": "a", "OTEL_TRACES_SAMPLER": "always_on"}) is None
    assert read_trace_plan(Settings(), {**NAMED, "OTEL_SDK_DISABLED": "true"}) is None
    assert read_trace_plan(Settings(), {**NAMED, "OTEL_TRACES_EXPORTER": "none"}) is None


@pytest.mark.parametrize(
    ("endpoint", "given", "protocol"),
    [
        ("c:4317", "", "grpc"),
        ("c:4318", "", "http/protobuf"),
        ("https://c:4318/v1/traces", "", "http/protobuf"),
        ("http://c:4318", "grpc", "grpc"),
        ("http://c", "http/protobuf", "http/protobuf"),
    ],
)
def test_the_port_tells_the_protocol_unless_it_is_given(endpoint: str, given: str, protocol: str) -> None:
    options = OtelOptions(endpoint=endpoint, protocol=given, headers=("a=b=c",), service_name="s")  # type: ignore[arg-type]
    plan = read_trace_plan(Settings(otel=options), {})
    assert plan is not None
    assert (plan.protocol, plan.headers, plan.resource) == (protocol, {"a": "b=c"}, {"service.name": "s"})
    assert plan.endpoint == endpoint if "://" in endpoint else f"http://{endpoint}"
    assert (plan.ratio, plan.parent_based) == (0.01, True)


def test_a_variable_turns_traces_on_and_settings_go_before_it() -> None:
    plan = read_trace_plan(Settings(), NAMED)
    assert plan is not None
    assert (plan.endpoint, plan.protocol) == ("", "http/protobuf")  # the SDK reads the variable itself
    of_traces = {**NAMED, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    plan = read_trace_plan(Settings(otel=OtelOptions(endpoint="http://d:4318", ratio=0.5)), of_traces)
    assert plan is not None
    assert (plan.endpoint, plan.protocol, plan.ratio) == ("http://d:4318", "grpc", 0.5)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (0.01, True)),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.25"}, (0.25, True)),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, (1.0, False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, (0.0, True)),
        ({"OTEL_TRACES_SAMPLER": "traceidratio"}, (1.0, False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, (0.0, True)),
    ],
)
def test_samplers_by_opentelemetrys_names(variables: Mapping[str, str], found: tuple[float, bool]) -> None:
    assert read_sampler(variables) == found


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_TRACES_SAMPLER": "xray"}, "OTEL_TRACES_SAMPLER: given 'xray', allowed"),
        ({"OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG: given '2', allowed"),
        ({"OTEL_TRACES_SAMPLER_ARG": "nan"}, "OTEL_TRACES_SAMPLER_ARG: given 'nan', allowed"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL: given 'http/json'"),
    ],
)
def test_a_variable_that_cannot_be_says_so(variables: Mapping[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace_plan(Settings(), {**NAMED, **variables})


@pytest.mark.parametrize("endpoint", ["ftp://c:1", "http://", "user:secret@c:4317", "http://c d"])
def test_an_address_that_cannot_be_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        load_settings(overrides={"otel.endpoint": endpoint})


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "_is_installed", lambda package: False)
    with pytest.raises(ConfigError, match="opentelemetry-sdk is not installed: pip install"):
        read_trace_plan(Settings(otel=OtelOptions(endpoint="c:4317")), {})
    assert read_trace_plan(Settings(), NAMED) is None


def test_tritons_mode() -> None:
    given = ("mode=opentelemetry", "rate=4", "opentelemetry,bsp_max_queue_size=99", "level=TIMESTAMPS")
    plan = read_trace_plan(Settings(triton=TritonOptions(trace_config=given)), {})
    assert plan is not None
    assert (plan.endpoint, plan.protocol) == ("http://localhost:4318/v1/traces", "http/protobuf")
    assert (plan.ratio, plan.parent_based, plan.queue_spans) == (0.25, True, 99)
    off = read_trace_plan(Settings(triton=TritonOptions(trace_config=("mode=opentelemetry",))), {})
    assert off is not None
    assert (off.ratio, off.parent_based) == (0.0, False)
    for wrong in ("count=5", "level=TENSORS", "triton,file=f", "opentelemetry,url=c", "opentelemetry,x=1"):
        with pytest.raises(ConfigError, match="trace_config"):
            load_settings(overrides={"triton.trace_config": ("mode=opentelemetry", wrong)})


def test_check_says_what_a_start_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "xray")
    told = CliRunner().invoke(check, [str(tmp_path), "--no-load", "--otel", "127.0.0.1:4317"])
    assert (told.exit_code, "OTEL_TRACES_SAMPLER: given 'xray'" in told.output) == (1, True)
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")
    flags = ["--otel", "127.0.0.1:4317", "--otel-headers", "api-key=hidden"]
    told = CliRunner().invoke(check, [str(tmp_path), "--no-load", *flags])
    assert (told.exit_code, "hidden" in told.output) == (0, False)
    assert "otel.headers: api-key=(secret)" in told.output


def test_spans_without_room_are_lost_and_counted() -> None:
    queue, span = (
        SpanQueue(3),
        SpanRecord("0" * 32, "0" * 16, "", "", "a", "internal", 1, 2, {}, [], [], None),
    )
    queue.put([span] * 2)
    queue.put([span] * 4)
    lost, reason = queue.report()
    assert lost == {"full": 3}
    assert "3 wait for the collector" in reason
    queue.end()
    assert len(queue.take()) == 3
    assert not queue.take()
