"""Signatures against the tensors a model really has."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastserve.errors import ConfigError
from fastserve.repository.model_config import build_signatures, build_specs, parse_model_config
from fastserve.repository.version import Version
from tests.repository.folders import BASE


def test_serving_default_is_added_unless_named() -> None:
    config = parse_model_config({**BASE, "signatures": {"other": {"inputs": {"a": "x"}}}})
    inputs, outputs = build_specs(config.inputs), build_specs(config.outputs)
    signatures = build_signatures(config, inputs, outputs)
    assert list(signatures) == ["other", "serving_default"]
    assert signatures["other"].input_names == {"a": "x"}
    assert signatures["other"].inputs["a"] is inputs["x"]
    assert signatures["other"].output_names == {"y": "y"}
    own = parse_model_config({**BASE, "signatures": {"serving_default": {"outputs": {"b": "y"}}}})
    assert build_signatures(own, inputs, outputs)["serving_default"].output_names == {"b": "y"}


def test_features_are_the_inputs_unless_given() -> None:
    config = parse_model_config(
        {**BASE, "signatures": {"c": {"method": "classify", "inputs": {"inputs": "x"}}}}
    )
    signature = build_signatures(config, build_specs(config.inputs), build_specs(config.outputs))["c"]
    assert signature.features == {"inputs": "inputs"}


def test_a_model_that_tells_its_tensors_late(tmp_path: Path) -> None:
    signatures = {"s": {"inputs": {"a": "x"}, "features": {"f": "a"}, "method": "regress"}}
    config = parse_model_config({"backend": "onnx", "signatures": signatures})
    version = Version("m", 1, tmp_path, config)
    assert version.signatures == {}
    told = parse_model_config(BASE)
    version.describe(build_specs(told.inputs), build_specs(told.outputs))
    assert version.signatures["s"].features == {"f": "a"}
    other = parse_model_config({**BASE, "inputs": {"z": {"dtype": "int8", "shape": []}}})
    with pytest.raises(ConfigError, match=r'signatures.s.inputs.a: given "x", allowed: z'):
        version.describe(build_specs(other.inputs), build_specs(other.outputs))


def test_a_feature_must_lead_to_an_input(tmp_path: Path) -> None:
    signatures = {"s": {"method": "regress", "features": {"f": "nope"}}}
    config = parse_model_config({"backend": "onnx", "signatures": signatures})
    told = parse_model_config(BASE)
    with pytest.raises(ConfigError, match=r'signatures.s.features.f: given "nope", allowed: x'):
        Version("m", 1, tmp_path, config).describe(build_specs(told.inputs), build_specs(told.outputs))
