"""Settings: one YAML file, flags on top, and errors that name field, value and what is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.errors import ConfigError
from fastserve.repository.model_config import (
    DTypeName,
    NativeConfig,
    config_json,
    load_config_json,
    parse_model_config,
    round_up,
)
from fastserve.settings import Limits, Listener, Settings, list_fields, load_settings
from fastserve.settings.config_files import FILE_BYTES, parse_yaml
from fastserve.tensor import DTYPES
from tests.repository.folders import BASE


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_are_the_command_line_contract() -> None:
    settings = load_settings()
    assert settings == Settings()
    assert [(o.host, o.port, o.dialects) for o in settings.http] == [("127.0.0.1", 8000, ())]
    assert [(o.host, o.port, o.dialects) for o in settings.grpc] == [("127.0.0.1", 8001, ())]
    assert settings.limits == Limits()


def test_flags_override_the_file_field_by_field(tmp_path: Path) -> None:
    file = write(
        tmp_path / "server.yaml",
        """
        repository: models
        http: ["127.0.0.1:0=tfserving, kserve_v2", {address: "[::1]:9000"}]
        grpc: off
        model_control: none
        limits: {body_bytes: 5, header_count: 7}
        tfserving: {result_keys: [results]}
        """,
    )
    settings = load_settings(file, {"limits.body_bytes": "9", "keep_going": True, "load_models": ("a", "b")})
    assert settings.http == (
        Listener("127.0.0.1:0", ("tfserving", "kserve_v2")),
        Listener("[::1]:9000"),
    )
    assert (settings.http[1].host, settings.http[1].port) == ("::1", 9000)
    assert settings.grpc == ()
    assert settings.limits == Limits(body_bytes=9, header_count=7)
    assert settings.tfserving.result_keys == ("results",)
    assert settings.load_models == ("a", "b")
    assert settings.model_control == "none"
    assert load_settings(file, {"tfserving.result_keys": "result,results"}).tfserving.result_keys == (
        "result",
        "results",
    )
    assert load_settings(file, {"http": [":1=x"]}).http == (Listener(":1", ("x",)),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("frontends: 0", "s.yaml: frontends: given 0, allowed: a whole number from 1 to 64 or auto"),
        ("frontends: '2'", 's.yaml: frontends: given "2", allowed: a whole number from 1 to 64 or auto'),
        ("model_control: auto", 'model_control: given "auto", allowed: none or poll or explicit'),
        (
            "grpc_options: {transport: native}",
            "grpc_options.transport: unknown field, allowed: message_bytes",
        ),
        ("limits: {bodies: 1}", "limits.bodies: unknown field, allowed: header_bytes, header_count"),
        ("limits: 3", "limits: given 3, allowed: a mapping of fields header_bytes"),
        ("keep_going: yes", 'keep_going: given "yes", allowed: true or false'),
        ("http: [localhost]", 'http[0].address: given "localhost", allowed: HOST:PORT'),
        ("http: ['a:70000']", 'http[0].address: given "a:70000", allowed: HOST:PORT'),
        ("http: 8000", "http: given 8000, allowed: a list of HOST:PORT[=dialect,...], or off"),
        ("tfserving: {result_keys: [answer]}", 'tfserving.result_keys[0]: given "answer", allowed: results'),
        ("tfserving: {result_keys: []}", "tfserving.result_keys: given []"),
        ("tfserving: {result_keys: [result, result]}", "tfserving.result_keys: given the same key twice"),
        ("models: [{name: a}]", "models[0].base_path: missing, write base_path: with text"),
        ("models: [{name: a/b, base_path: x}]", 'models[0].name: given "a/b", allowed: text matching'),
        ("models: [{name: a, base_path: x, labels: {b: -1}}]", "models[0].labels.b: given -1"),
        ("poll_s: .nan", "poll_s: given NaN, allowed: a number above 0"),
        ("log: {level: loud}", 'log.level: given "loud", allowed: debug or info or warning or error'),
        ("a: 1\na: 2", "key 'a' is given twice, line 2, column 1"),
        ("[1, 2]", "given list, allowed: a mapping of field: value lines"),
        ("a: {", "not readable as YAML"),
        ("!!python/object:os.system {}", "not readable as YAML"),
        ("{1: {2: {? [a] : b}}}", "a key must be a word"),
    ],
)
def test_faults_name_the_field_the_value_and_what_is_allowed(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as fault:
        load_settings(write(tmp_path / "s.yaml", text))
    assert words in str(fault.value)
    assert str(fault.value).startswith("s.yaml: ")


def test_faults_of_flags() -> None:
    for overrides, words in (
        ({"frontends": "many"}, 'flags: frontends: given "many", allowed: a whole number'),
        ({"nope": 1}, "flags: nope: unknown field, allowed: admin."),
        ({"limits.body_bytes": "-1"}, 'flags: limits.body_bytes: given "-1", allowed: a whole number from 0'),
    ):
        with pytest.raises(ConfigError) as fault:
            load_settings(None, overrides)
        assert words in str(fault.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "none.yaml")
    (tmp_path / "big.yaml").write_bytes(b"#" * (FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        load_settings(tmp_path / "big.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 3"):
        load_settings(tmp_path / "latin.yaml")


def test_words_stay_words() -> None:
    text = "a: off\nb: no\nc: true\nd: 010\ne: -1e3\nf: 0x10\ng: 12:30\nh: null\ni:\nj: -.inf\nl: 2026-01-01"
    assert parse_yaml(text, "t") == {
        "a": "off",
        "b": "no",
        "c": True,
        "d": 10,
        "e": -1000.0,
        "f": 16,
        "g": "12:30",
        "h": None,
        "i": None,
        "j": float("-inf"),
        "l": "2026-01-01",
    }
    assert parse_yaml("", "t") == {}


@given(st.text(max_size=60))
def test_any_text_is_a_mapping_or_a_fault(text: str) -> None:
    try:
        assert isinstance(parse_yaml(text, "t"), dict)
    except ConfigError as fault:
        assert str(fault).startswith("t: ")  # noqa: PT017


def test_every_setting_has_help_and_a_flag_of_its_own() -> None:
    fields = list(list_fields(Settings))
    assert [f.path for f in fields if not f.help] == []
    assert len({f.flag for f in fields}) == len(fields)
    assert {"--model-control", "--keep-going", "--frontends", "--limits-body-bytes"} <= {
        f.flag for f in fields
    }
    assert [f.path for f in list_fields(NativeConfig) if not f.help] == []


@given(
    st.sampled_from(list(list_fields(Settings))),
    st.one_of(st.none(), st.integers(), st.text(), st.lists(st.none())),
)
def test_any_override_is_taken_or_refused_by_name(field: Any, value: object) -> None:
    try:
        load_settings(None, {field.path: value})
    except ConfigError as fault:
        assert field.path in str(fault)  # noqa: PT017


# -- model.yaml


def test_dtype_names_are_those_of_tensors() -> None:
    assert get_args(DTypeName) == tuple(DTYPES)


def test_a_model_config_travels_as_plain_values() -> None:
    config = parse_model_config(
        {
            **BASE,
            "class": "Other",
            "warmup": [{"inputs": {"x": "zeros"}}],
            "version_policy": {"specific": [2]},
        }
    )
    plain = msgspec.json.decode(msgspec.json.encode(config_json(config)))
    assert plain["class"] == "Other"
    assert load_config_json(plain) == config
    with pytest.raises(ConfigError):
        load_config_json([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"backend": "tf"},
            'backend: given "tf", allowed: python, onnx, torch, tensorflow, sklearn, xgboost, '
            "lightgbm, catboost, treelite, transformers, text, ",
        ),
        ({"inputs": {}}, "inputs: given nothing, allowed: a mapping of name: dtype, shape"),
        ({"outputs": {}}, "outputs: given nothing"),
        (
            {"inputs": {"x": {"dtype": "f32", "shape": []}}},
            'inputs.x.dtype: given "f32", allowed: bool or uint8',
        ),
        (
            {"inputs": {"x": {"dtype": "int8", "shape": [-2]}}},
            "inputs.x.shape[0]: given -2, allowed: a whole",
        ),
        ({"inputs": {"x": {"dtype": "int8"}}}, "inputs.x.shape: missing, write shape: with a list of"),
        ({"inputs": {"": {"dtype": "int8", "shape": []}}}, "inputs: given"),
        ({"max_batch_size": -1}, "max_batch_size: given -1, allowed: a whole number from 0 to 1048576"),
        ({"max_batch_size": True}, "max_batch_size: given true, allowed: a whole number"),
        ({"max_batch_size": 8, "allowed_batch_sizes": [4, 2, 8]}, "allowed_batch_sizes: given [4, 2, 8]"),
        (
            {"max_batch_size": 64, "max_queue_rows": 32},
            "max_queue_rows: given 32, allowed: a whole number from",
        ),
        ({"version_policy": "some"}, 'version_policy: given "some"'),
        ({"version_policy": {"latest": 1, "specific": [1]}}, "version_policy.latest, specific: exactly one"),
        ({"warmup": [{"rows": 1}]}, "warmup[0].inputs: missing"),
        ({"signatures": {"s": {"inputs": {"a": "z"}}}}, 'signatures.s.inputs.a: given "z", allowed: x'),
        ({"signatures": {"s": {"outputs": {"a": "z"}}}}, 'signatures.s.outputs.a: given "z", allowed: y'),
        ({"signatures": {"s": {"features": {"f": "z"}}}}, 'signatures.s.features.f: given "z", allowed: x'),
        ({"signatures": {"s": {"method": "ask"}}}, 'signatures.s.method: given "ask", allowed: predict or'),
        ({"env": {"A B": "1"}}, "env: given"),
        ({"class": "a-b"}, 'class: given "a-b"'),
        ({"max_batch": 1}, "max_batch: unknown field, did you mean max_batch_size? allowed: backend, inputs"),
    ],
)
def test_faults_of_a_model_config(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as fault:
        parse_model_config({**BASE, **changes})
    assert words in str(fault.value)


def test_defaults_fill_only_what_is_not_given() -> None:
    defaults = {"instances": 2, "max_batch_size": 4, "allowed_batch_sizes": [2, 4], "max_queue_rows": 8}
    config = parse_model_config(BASE, defaults=defaults)
    assert (config.instances, config.max_batch_size, config.allowed_batch_sizes) == (2, 4, [2, 4])
    own = parse_model_config({**BASE, "max_batch_size": 16}, defaults=defaults)
    assert (own.max_batch_size, own.allowed_batch_sizes, own.max_queue_rows) == (16, None, 16)


@given(st.sets(st.integers(1, 200), min_size=1), st.integers(1, 300))
def test_round_up(sizes: set[int], rows: int) -> None:
    filled = round_up(rows, sorted(sizes))
    assert filled == min((size for size in sizes if size >= rows), default=rows)
    assert round_up(rows, None) == rows


def test_the_documented_fields_are_the_fields() -> None:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "tools/describe_settings.py", "--check"], cwd=root)
    assert done.returncode == 0, "run tools/describe_settings.py"
