"""`fastserve serve` and its TensorFlow Serving twin: which settings a command line becomes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

import fastserve.server
from fastserve.cli import main
from fastserve.demo import demo_repository
from fastserve.settings import Listener, Settings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings a server would have been started with."""
    found: list[Settings] = []
    monkeypatch.setattr(fastserve.server, "run", lambda settings, **more: found.append(settings) or 0)
    return found


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


def test_the_contract_of_scripts(started):
    line = (
        "serve demo --http 127.0.0.1:0=tfserving --http :9 --grpc off --frontends 2 --model-control explicit"
    )
    assert run(*line.split(), "--load-model", "digits", "--load-model", "*", "--keep-going") == (0, "")
    (settings,) = started
    assert settings.repository == "demo"
    assert settings.http == (Listener("127.0.0.1:0", ("tfserving",)), Listener(":9"))
    assert settings.grpc == ()
    assert (settings.frontends, settings.model_control) == (2, "explicit")
    assert (settings.load_models, settings.keep_going) == (("digits", "*"), True)


def test_defaults_and_every_other_setting_as_a_flag(started):
    assert run("serve", "demo", "--limits-body-bytes", "10", "--tfserving-cors")[0] == 0
    (settings,) = started
    assert settings.http == (Listener("127.0.0.1:8000"),)
    assert settings.grpc == (Listener("127.0.0.1:8001"),)
    assert settings.limits.body_bytes == 10
    assert settings.tfserving.cors


def test_tritons_flags_as_triton_spells_them(started):
    line = (
        "serve demo --http-max-input-size 99 --http-restricted-api health,trace:a=b "
        "--trace-config triton,file=f --trace-config level=TIMESTAMPS --grpc-restricted-protocol=health:a=b "
        "--rate-limit-resource=R:2 --http-header-forward-pattern ^x- --grpc-header-forward-pattern=.*"
    )
    assert run(*line.split()) == (0, "")
    given = started[0].triton
    assert (given.http_max_input_size, given.http_restricted_api) == (99, ("health,trace:a=b",))
    assert given.trace_config == ("triton,file=f", "level=TIMESTAMPS")
    assert (given.http_header_forward_pattern, given.grpc_header_forward_pattern) == ("^x-", ".*")
    assert (given.grpc_restricted_protocol, started[0].rate_limit_resources) == (("health:a=b",), ("R:2",))


def test_a_file_of_settings_and_a_flag_over_it(started, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("repository: demo\nfrontends: 3\ndrain_s: 1\n")
    assert run("serve", "--config", str(file), "--frontends", "4")[0] == 0
    assert (started[0].frontends, started[0].drain_s) == (4, 1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "name the folder"),
        (["serve", "demo", "--frontends", "0"], "frontends"),
        (["serve", "demo", "--http", "nowhere"], "HOST:PORT"),
        (["serve", "demo", "--model-control", "often"], "poll"),
    ],
)
def test_faults_name_the_field_and_what_is_allowed(started, arguments, words):
    code, output = run(*arguments)
    assert code != 0
    assert words in output
    assert started == []


def test_help_all_lists_the_rare_flags():
    assert "--limits-body-bytes" not in run("serve", "--help")[1]
    assert "--limits-body-bytes" in run("serve", "--help-all")[1]


def test_the_command_line_of_tensorflow_serving(started):
    base = str(demo_repository() / "digits")
    code, output = run(
        "tensorflow-model-server",
        "--port=0",
        "--rest_api_port=8501",
        "--model_name=digits",
        f"--model_base_path={base}",
        "--rest_api_timeout_in_ms=5000",
        "--tensorflow_session_parallelism=2",
        "--ssl_config_file=",
        "--use_alts_credentials=false",
    )
    assert code == 0
    (ignored,) = output.splitlines()
    assert ignored.startswith("ignored: --tensorflow_session_parallelism: ")
    (settings,) = started
    assert [listener.port for listener in settings.http] == [8501]
    assert settings.grpc == ()
    assert [(m.name, m.base_path) for m in settings.models] == [("digits", base)]
    assert settings.tfserving.rest_timeout_ms == 5000


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--use_alts_credentials", '--use_alts_credentials: given "true", allowed: false'),
        ("--saved_model_tags=serve,gpu", '--saved_model_tags: given "serve,gpu", allowed: serve'),
        ("--nonsense=1", "unknown argument: --nonsense=1"),
        ("--rest_api_port", "unknown argument: --rest_api_port"),
        ("9000", "unknown argument: 9000"),
    ],
)
def test_a_flag_that_would_have_no_effect_ends_the_start(started, flag, words):
    code, output = run("tensorflow-model-server", "--model_base_path=/m", flag)
    assert (code, started) == (255, [])
    assert output.startswith(words)


def test_serve_starts_nothing_with_a_flag_or_a_key_nobody_knows(started, tmp_path):
    file = tmp_path / "settings.yaml"
    for key in ("ssl_config_file: a", "limits: {bodybytes: 1}", "http: [{address: ':1', cert: {}}]"):
        file.write_text(f"repository: demo\n{key}\n")
        code, output = run("serve", "--config", str(file))
        assert code == 1
        assert "unknown field, " in output
        assert "allowed: " in output
    for flag in ("--ssl-config-file=a", "--http-ssl", "--strict-readiness=false"):
        code, output = run("serve", "demo", flag)
        assert code == 2
        assert flag.partition("=")[0] in output
    assert started == []


def test_tensorflow_serving_says_what_is_missing(started):
    code, output = run("tensorflow-model-server", "--rest_api_port=8501")
    assert code == 1
    assert output.strip() == (
        "Failed to start server. Error: INVALID_ARGUMENT: Both server_options.model_base_path and "
        "server_options.model_config_file are empty!"
    )
    assert run("tensorflow-model-server", "--port=many")[0] == 255


def test_variables_of_the_environment(started, monkeypatch, tmp_path):
    (tmp_path / "s.yaml").write_text("{poll_s: 5, drain_s: 6, frontends: 7}")
    monkeypatch.setenv("FASTSERVE_CONFIG", str(tmp_path / "s.yaml"))
    monkeypatch.setenv("FASTSERVE_REPOSITORY", "demo")
    monkeypatch.setenv("FASTSERVE_HTTP", ":7 :8=tfserving,ops")
    monkeypatch.setenv("FASTSERVE_DRAIN_S", "8")
    monkeypatch.setenv("FASTSERVE_SERVICE_HOST", "10.0.0.1")
    assert run("serve", "--drain-s", "9") == (0, "")
    (settings,) = started
    assert (settings.repository, settings.drain_s, settings.frontends) == ("demo", 9.0, 7)
    assert settings.http == (Listener(":7"), Listener(":8", ("tfserving", "ops")))
    monkeypatch.setenv("FASTSERVE_" + "HTPP", "x")
    status, said = run("serve")
    assert (status, "HTPP: unknown variable, did you mean FASTSERVE_HTTP?" in said) == (1, True)


def test_help_names_the_variables():
    assert "[FASTSERVE_LIMITS_BODY_BYTES]" in run("serve", "--help-all")[1]
    said = run("serve", "--help")[1]
    assert "[FASTSERVE_HTTP]" not in said
    assert "FASTSERVE_HTTP=HOST:PORT for" in said


def test_strangers_are_served_where_the_command_line_says_so(started, monkeypatch, tmp_path):
    assert run("serve", "demo", "--http", ":9", "--insecure-public")[0] == 0
    monkeypatch.setenv("FASTSERVE_INSECURE_PUBLIC", "true")
    assert run("serve", "demo", "--http", ":9")[0] == 0
    assert run("serve", "demo", "--http", ":9", "--no-insecure-public")[0] == 0
    monkeypatch.delenv("FASTSERVE_INSECURE_PUBLIC")
    assert run("serve", "demo", "--http", ":9")[0] == 0
    assert [one.insecure_public for one in started] == [True, True, False, False]
    started.clear()
    model = tmp_path / "m"
    model.mkdir()
    assert run("tensorflow-model-server", "--port=9", f"--model_base_path={model}")[0] == 0
    assert run("tritonserver", f"--model-repository={tmp_path}")[0] == 0
    assert [one.insecure_public for one in started] == [True, True]  # they listen as the originals do


def test_a_start_that_would_serve_strangers(tmp_path):
    """Nothing is bound: it ends before."""
    for command in (["serve", "demo", "--http", ":0"], ["check", "demo", "--no-load", "--grpc", "[::]:0"]):
        ended = subprocess.run(
            [sys.executable, "-m", "fastserve.cli", *command], capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 1
        assert "other machines may reach this, and nobody needs a key. Give --keys FILE" in ended.stderr
    ended = subprocess.run(
        [sys.executable, "-m", "fastserve.cli", "serve", "demo", "--http", ":0", "--keys", "none.yaml"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert "none.yaml: cannot be read" in ended.stderr  # which is looked at next
