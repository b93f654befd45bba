"""config.pbtxt as Triton shows it, and what becomes of it here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastserve.errors import ConfigError
from fastserve.repository.triton_config.completion import complete
from fastserve.repository.triton_config.messages import to_json
from fastserve.repository.triton_config.reading import (
    config_json,
    parse_triton_json,
    parse_triton_text,
    read_triton_config,
    to_model_config,
    triton_view,
)
from fastserve.settings import PolicyChoice
from fastserve.tensor import DTYPES, TensorSpec

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "triton_config.jsonl"
CAPTURED = [json.loads(line) for line in VECTORS.read_text().splitlines()]
SMALL = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_STRING dims: [ -1, 3 ] }
"""


@pytest.mark.parametrize("case", CAPTURED, ids=lambda case: str(case["id"]))
def test_shown_as_a_real_server_shows_it(case: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / case["name"]
    folder.mkdir()
    (folder / "config.pbtxt").write_text(case["pbtxt"])
    config = read_triton_config(folder)
    assert config_json(config) == case["config"]
    assert config_json(to_model_config(config)) == case["config"]
    assert parse_triton_json(json.dumps(case["config"]), case["name"]) == config


def test_what_the_engine_goes_by() -> None:
    text = (
        SMALL
        + """
        instance_group [ { count: 2 kind: KIND_CPU }, { count: 3 } ]
        dynamic_batching { max_queue_delay_microseconds: 250 }
        version_policy { specific { versions: [3, 1] } }
        parameters { key: "a" value { string_value: "b" } }
    """
    )
    config = to_model_config(parse_triton_text(text, "m"))
    assert (config.backend, config.fault, config.instances) == ("triton_python", "", 5)
    assert (config.max_batch_size, config.max_queue_delay_us) == (4, 250)
    assert config.version_policy == PolicyChoice(specific=[3, 1])
    assert config.parameters == {"a": "b"}
    assert (config.inputs["IN"].dtype, config.inputs["IN"].shape) == ("float32", [2])
    assert (config.outputs["OUT"].dtype, config.outputs["OUT"].shape) == ("bytes", [-1, 3])
    assert not config.split_large_requests
    assert config.triton is not None
    assert config.triton["dynamic_batching"]["preferred_batch_size"] == [4]


def test_a_backend_that_is_not_there_is_a_fault_of_loading() -> None:
    config = to_model_config(parse_triton_text('backend: "nosuchbackend"', "bad"))
    assert config.fault == (
        "Invalid argument: unable to find backend library for backend 'nosuchbackend', "
        "try specifying runtime on the model configuration."
    )


def test_a_model_of_the_vllm_backend_is_told_what_to_change() -> None:
    text = 'backend: "vllm" instance_group [ { count: 1 kind: KIND_MODEL } ]'
    fault = to_model_config(parse_triton_text(text, "llm")).fault
    assert fault.startswith("Invalid argument: backend 'vllm' is not run here")
    assert "model.yaml with `backend: text`" in fault
    assert "model.json" in fault
    assert "unable to find" not in fault


def test_complete_fills_only_what_is_missing() -> None:
    config = parse_triton_text('backend: "onnxruntime" max_batch_size: 2 input { name: "B" dims: 7 }', "m")
    inputs = {
        "A": TensorSpec("A", DTYPES["int64"], (-1,)),
        "B": TensorSpec("B", DTYPES["bytes"], (-1,)),
    }
    done = complete(config, inputs, {"C": TensorSpec("C", DTYPES["float16"], (4, -1))})
    assert [(t.name, t.data_type, t.dims) for t in done.input] == [
        ("B", "TYPE_STRING", [7]),
        ("A", "TYPE_INT64", [-1]),
    ]
    assert [(t.name, t.data_type, t.dims) for t in done.output] == [("C", "TYPE_FP16", [4, -1])]
    shown = to_json(done)
    assert (shown["platform"], shown["default_model_filename"]) == ("onnxruntime_onnx", "model.onnx")


def test_unknown_fields_are_named() -> None:
    with pytest.raises(ConfigError, match=r"config\.pbtxt: line 1, column 1: unknown field 'max_batchsize'"):
        parse_triton_text("max_batchsize: 3", "m")
    with pytest.raises(ConfigError, match=r"config\.input\[0\]|config: input\[0\]: unknown field 'dim'"):
        parse_triton_json('{"input": [{"dim": [1]}]}', "m")
    with pytest.raises(ConfigError, match=r"config: not JSON"):
        parse_triton_json("{x", "m")


def test_what_is_kept_as_json_is_read_back_the_same() -> None:
    text = """
        backend: "python" max_batch_size: 4
        dynamic_batching { priority_levels: 2 default_priority_level: 1
          priority_queue_policy { key: 2 value { timeout_action: DELAY default_timeout_microseconds: 7 } } }
    """
    config = parse_triton_text(text, "m")
    assert triton_view(to_model_config(config), "m") == config
