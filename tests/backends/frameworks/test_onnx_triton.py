"""Options of the onnx backend that only a config.pbtxt has: another file, reshape, the session's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.backends import create
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.repository.model_config import config_json
from fastserve.repository.triton_config.reading import parse_triton_text, to_model_config
from fastserve.workers.warmup import run_samples
from tests.backends.models import affine

TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 3, 1 ] reshape { shape: [ 3 ] } }
output { name: "z" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
"""


def load(version_dir: Path, text: str) -> Any:
    config = to_model_config(parse_triton_text('backend: "onnxruntime" max_batch_size: 4' + text, "net"))
    assert config.fault == ""
    backend = create(config_json(config), version_dir, 0)
    backend.load()
    return backend


def test_clients_see_dims_and_the_model_its_own_shape(tmp_path: Path) -> None:
    backend = load(affine(tmp_path), TENSORS)
    assert backend.inputs["x"].shape == (3, 1)
    assert backend.outputs["z"].shape == (1,)
    outputs = backend.run({"x": np.arange(6, dtype=np.float32).reshape(2, 3, 1)})
    np.testing.assert_array_equal(outputs["z"], [[9], [27]])


def test_another_file_and_options(tmp_path: Path) -> None:
    folder = affine(tmp_path)
    (folder / "model.onnx").rename(folder / "net.onnx")
    text = """
        default_model_filename: "net.onnx" optimization { graph { level: -1 } }
        parameters { key: "inter_op_thread_count" value { string_value: "1" } }
        parameters { key: "execution_mode" value { string_value: "1" } }
    """
    assert load(folder, TENSORS + text).run({"x": np.ones((1, 3, 1), np.float32)})["z"].shape == (1, 1)
    with pytest.raises(ConfigError, match=r"no file model\.onnx"):
        load(folder, TENSORS)


def test_a_reshape_that_is_not_the_models(tmp_path: Path) -> None:
    wrong = TENSORS.replace("shape: [ 3 ]", "shape: [ 1, 3 ]")
    with pytest.raises(ConfigError, match=r"config\.pbtxt says shape \[1, 3\], the model \[3\]"):
        load(affine(tmp_path), wrong)


def test_an_output_that_does_not_fit_its_dims(tmp_path: Path) -> None:
    text = TENSORS.replace("dims: [ 1 ] reshape { shape: [ ] }", "dims: [ 1 ]")
    with pytest.raises(ConfigError, match=r"output 'z'"):
        load(affine(tmp_path), text)
    backend = load(affine(tmp_path / "b"), TENSORS)
    backend._reshapes = (backend._reshapes[0], {"z": ((), (7,))})
    with pytest.raises(ServeError) as error:
        backend.run({"x": np.ones((1, 3, 1), np.float32)})
    assert error.value.kind is Kind.INTERNAL


def test_warm_up_samples(tmp_path: Path) -> None:
    text = (
        TENSORS
        + """
        model_warmup { name: "a" batch_size: 2 inputs { key: "x" value {
            data_type: TYPE_FP32 dims: [ 3, 1 ] %s } } }
    """
    )
    folder = affine(tmp_path)
    (folder.parent / "warmup").mkdir()
    (folder.parent / "warmup" / "x.raw").write_bytes(np.ones(6, np.float32).tobytes())
    for data in ("zero_data: true", "random_data: true", 'input_data_file: "x.raw"'):
        written = parse_triton_text('backend: "onnxruntime" max_batch_size: 4' + text % data, "net")
        config = config_json(to_model_config(written, folder.parent))
        backend = create(config, folder, 0)
        backend.load()
        run_samples(backend, config["warmup"], batching=True)
    (folder.parent / "warmup" / "x.raw").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"x\.raw has 3 bytes, not 24"):
        run_samples(backend, config["warmup"], batching=True)


def test_an_accelerator_that_is_not_there_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "optimization { execution_accelerators { cpu_execution_accelerator { name: %s } } }"
    backend = load(affine(tmp_path), TENSORS + text % '"openvino"')
    assert backend.run({"x": np.ones((1, 3, 1), np.float32)})["z"].tolist() == [[9]]
    assert "openvino has no effect: this ONNX Runtime has no OpenVINOExecutionProvider" in caplog.text
    refused = to_model_config(parse_triton_text('backend: "onnxruntime"' + text % '"other"', "net"))
    assert 'cpu_execution_accelerator: given "other", allowed: openvino' in refused.fault
