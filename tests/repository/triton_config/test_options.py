"""Options of a config.pbtxt for engine and workers, in neutral words."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastserve.errors import ConfigError
from fastserve.repository.model_config import config_json
from fastserve.repository.triton_config.reading import amend, parse_triton_text, to_model_config
from fastserve.settings.model_options import (
    EnsembleStep,
    MadeInput,
    Needs,
    Options,
    QueueOptions,
    QueuePolicy,
    Reshape,
    Scatter,
    SequenceControl,
    SequenceStateOptions,
    SessionOptions,
    read_options,
)

TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""


def options(text: str, tensors: str = TENSORS) -> Options:
    """Read as a model's config is, and once more as a worker reads what it is sent."""
    config = to_model_config(parse_triton_text(tensors + text, "m"), Path())
    assert read_options(config_json(config)) == config.options
    return config.options


def test_a_plain_model_asks_for_nothing() -> None:
    found = options('backend: "python"')
    assert found == Options(origin="config.pbtxt", model_file="model.py", needs=[Needs()])


def test_queues() -> None:
    found = options(
        """backend: "python" max_batch_size: 8 dynamic_batching {
          preferred_batch_size: [ 2, 4 ] priority_levels: 3 default_priority_level: 2
          default_queue_policy { max_queue_size: 9 }
          priority_queue_policy { key: 1 value {
            timeout_action: DELAY default_timeout_microseconds: 5 allow_timeout_override: true } } }"""
    )
    own = QueuePolicy(reject=False, timeout_us=5, may_override=True)
    others = [QueuePolicy(max_requests=9)] * 2
    assert found.queue == QueueOptions(policies=[own, *others], default_level=2, preferred_sizes=[2, 4])


def test_sequences() -> None:
    found = options(
        """backend: "python" max_batch_size: 8 sequence_batching { max_sequence_idle_microseconds: 7
          oldest { max_candidate_sequences: 3 max_queue_delay_microseconds: 11 }
          control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
          control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
          state { input_name: "in" output_name: "y" data_type: TYPE_INT32 dims: [ -1 ]
                  initial_state { name: "first" data_type: TYPE_INT32 dims: [ 2 ] data_file: "two" } }
          state { input_name: "in2" output_name: "out2" data_type: TYPE_INT32 dims: [ -1 ] } }"""
    ).sequences
    assert found is not None
    assert (found.direct, found.max_candidates, found.delay_us, found.idle_us) == (False, 3, 11, 7)
    assert found.controls == [
        SequenceControl(name="start", signal="start", dtype="float32", values=[0.0, 1.0]),
        SequenceControl(name="id", signal="id", dtype="bytes"),
    ]
    first, second = found.states
    assert first == SequenceStateOptions(
        input="in", output="y", dtype="int32", shape=[-1], first_shape=[2], first_file="two",
        first_name="first", hidden=False,
    )  # fmt: skip
    assert (second.first_shape, second.hidden) == ([1], True)
    assert found.inputs == {"start", "id", "in", "in2"}


STEPS = """ensemble_scheduling { step { model_name: "a" model_version: -1
  input_map { key: "i" value: "x" } output_map { key: "o" value: "z" }
} step { model_name: "b" model_version: 3
  input_map { key: "i" value: "z" } output_map { key: "o" value: "y" } } }"""


def test_ensembles() -> None:
    found = options(f'platform: "ensemble" {STEPS}').ensemble
    assert found is not None
    assert found.steps == [
        EnsembleStep(model="a", version=None, inputs={"i": "x"}, outputs={"o": "z"}),
        EnsembleStep(model="b", version=3, inputs={"i": "z"}, outputs={"o": "y"}),
    ]
    assert (found.inputs, found.outputs) == ({"x": False}, ["y"])


def test_an_ensemble_keeps_no_responses() -> None:
    written = parse_triton_text(
        f'{TENSORS} platform: "ensemble" {STEPS} response_cache {{ enable: true }}', "m"
    )
    assert "response_cache.enable" in to_model_config(written).fault


def test_tensors() -> None:
    found = options(
        """backend: "onnxruntime" max_batch_size: 4
        batch_input { kind: BATCH_ITEM_SHAPE target_name: [ "t", "u" ] data_type: TYPE_INT32
          source_input: "x" }
        batch_output { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }""",
        """input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }""",
    )
    assert found.ragged_inputs == ["x"]
    assert found.made_inputs == [
        MadeInput(kind="item_shape", names=["t", "u"], source="x", dtype="int32"),
    ]
    assert found.scattered_outputs == {"y": Scatter(source="x", dims=[-1, 2, 2])}
    assert found.reshaped_outputs == {"y": Reshape(dims=[4], shape=[2, 2])}
    assert found.tells_requests


def test_the_rest() -> None:
    found = options(
        """backend: "onnxruntime" default_model_filename: "net.onnx" metric_tags { key: "k" value: "v" }
        optimization { graph { level: -1 }
          execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }
        parameters { key: "inter_op_thread_count" value { string_value: "3" } }
        parameters { key: "execution_mode" value { string_value: "1" } }
        instance_group { count: 1 kind: KIND_CPU rate_limiter { priority: 2
          resources { name: "r" count: 1 } resources { name: "r" count: 2 } } }
        response_cache { enable: true } model_metrics { metric_control {
          metric_identifier { family: "nv_inference_first_response_histogram_ms" }
          histogram_options { buckets: [ 1, 2 ] } } }"""
    )
    assert found.model_file == "net.onnx"
    assert found.metric_tags == {"k": "v"}
    assert found.session == SessionOptions(
        graph_level=-1, inter_op_threads=3, parallel=True, accelerators=["openvino"]
    )
    assert found.needs == [Needs(resources={"r": 3}, priority=2)]
    assert (found.cached, found.first_response_ms) == (True, [1.0, 2.0])


def test_what_a_model_says_of_itself_is_compiled_again() -> None:
    config = to_model_config(parse_triton_text(TENSORS + 'backend: "python"', "m"))
    amended = amend(
        config, {"max_batch_size": 4, "dynamic_batching": {}, "model_transaction_policy": {"decoupled": True}}
    )
    assert (amended.max_batch_size, amended.options.queue, amended.options.decoupled) == (
        4,
        QueueOptions(preferred_sizes=[4]),
        True,
    )
    with pytest.raises(ConfigError):
        amend(config, {"max_batch_size": 4, "dynamic_batching": {"no": 1}})
