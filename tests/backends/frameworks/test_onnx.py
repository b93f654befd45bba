"""The onnx backend against models made here."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest
import yaml

from fastserve.backends import create
from fastserve.backends.frameworks.onnx import _open_session
from fastserve.errors import ConfigError, Kind, ServeError
from tests.backends.models import FLOAT, affine, helper, save, strings, value
from tests.workers.pair import pair

F32 = "float32"


def load(version_dir: Path, **config: Any) -> Any:
    backend = create({"backend": "onnx", "max_batch_size": 8, "threads": 1, **config}, version_dir, 0)
    backend.load()
    return backend


def spec(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


def test_tensors_are_read_from_the_model(tmp_path: Path) -> None:
    backend = load(affine(tmp_path))
    assert {n: (s.dtype.name, s.shape) for n, s in backend.inputs.items()} == {"x": (F32, (3,))}
    assert {n: (s.dtype.name, s.shape) for n, s in backend.outputs.items()} == {
        "y": (F32, (3,)),
        "z": (F32, ()),
    }
    backend.close()


def test_a_batch_runs_on_read_only_memory(tmp_path: Path) -> None:
    backend = load(affine(tmp_path))
    memory = bytes(np.arange(6, dtype=np.float32))
    outputs = backend.run({"x": np.frombuffer(memory, np.float32).reshape(2, 3)})
    np.testing.assert_array_equal(outputs["y"], [[1, 3, 5], [7, 9, 11]])
    np.testing.assert_array_equal(outputs["z"], [9, 27])
    assert outputs["y"].dtype == np.float32


def test_without_a_batch_axis_shapes_are_whole(tmp_path: Path) -> None:
    backend = load(affine(tmp_path, batch=2), max_batch_size=0)
    assert backend.inputs["x"].shape == (2, 3)
    assert backend.run({"x": np.zeros((2, 3), np.float32)})["z"].shape == (2,)


def test_strings_go_both_ways(tmp_path: Path) -> None:
    backend = load(strings(tmp_path))
    assert backend.inputs["s"].dtype.name == "bytes"
    words = np.array([[b"a", "grün".encode()], [b"", "snow ☃".encode()]], dtype=object)
    outputs = backend.run({"s": words})
    assert outputs["t"].tolist() == [["a", "grün"], ["", "snow ☃"]]
    with pytest.raises(ServeError, match="input 's' holds a string that is not UTF-8") as caught:
        backend.run({"s": np.array([[b"\xff", b""]], dtype=object)})
    assert caught.value.kind is Kind.INVALID_ARGUMENT


def test_declared_tensors_narrow_the_model(tmp_path: Path) -> None:
    version_dir = save(
        tmp_path,
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["unused"])],
        [value("x", FLOAT, ["n", "length"])],
        [value("y", FLOAT, ["n", "length"]), value("unused", FLOAT, ["n", "length"])],
    )
    assert load(version_dir).inputs["x"].shape == (-1,)
    backend = load(version_dir, inputs={"x": spec(F32, 4)}, outputs={"y": spec(F32, 4)})
    assert backend.inputs["x"].shape == (4,)
    assert list(backend.run({"x": np.zeros((1, 4), np.float32)})) == ["y"]
    with pytest.raises(ServeError, match=r"output 'y' has rows of shape \[5\], model.yaml says \[4\]"):
        backend.run({"x": np.zeros((1, 5), np.float32)})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"inputs": {"a": spec(F32, 3)}}, "the model has no input 'a'; its inputs are x"),
        ({"outputs": {"a": spec(F32, 3)}}, "the model has no output 'a'; its outputs are y, z"),
        ({"inputs": {"x": spec("int64", 3)}}, "input 'x': model.yaml says int64, the model float32"),
        (
            {"inputs": {"x": spec(F32, 4)}},
            "input 'x': model.yaml says shape [4], the model [3] (without the batch axis)",
        ),
        ({"inputs": {"x": spec(F32, -1)}}, "input 'x': model.yaml says shape [-1], the model [3]"),
        ({"outputs": {"z": spec(F32, 1)}}, "output 'z': model.yaml says shape [1], the model []"),
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:N, not 'tpu'"),
    ],
)
def test_disagreements_are_named(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(affine(tmp_path), **config)
    assert str(caught.value).startswith(words)


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    version_dir = save(
        tmp_path,
        [helper.make_node("Add", ["a", "b"], ["y"])],
        [value("a", FLOAT, ["n"]), value("b", FLOAT, ["n"])],
        [value("y", FLOAT, ["n"])],
    )
    with pytest.raises(ConfigError, match=r"needs inputs that model\.yaml does not declare: b"):
        load(version_dir, inputs={"a": spec(F32)})


def test_a_fixed_batch_axis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"input 'x' has no batch axis: its shape is \[1, 3\]; set max_batch"
    ):
        load(affine(tmp_path, batch=1))


def test_a_map_output_is_refused_by_name(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("y", FLOAT, ["n"])
    version_dir = save(
        tmp_path,
        [helper.make_node("SequenceConstruct", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])],
        [value("x", FLOAT, ["n"])],
        [sequence, value("z", FLOAT, ["n"])],
    )
    with pytest.raises(ConfigError, match=r"output 'y' is a seq\(tensor\(float\)\), which cannot be served"):
        load(version_dir)
    assert list(load(version_dir, outputs={"z": spec(F32)}).outputs) == ["z"]


def zipmap(folder: Path) -> Path:
    """x float32 [rows, 2] -> label int64 [rows], probability: a dictionary of each row."""
    key_value = helper.make_map_type_proto(7, helper.make_tensor_type_proto(FLOAT, None))
    sequence = helper.make_sequence_type_proto(key_value)
    nodes = [
        helper.make_node("ArgMax", ["x"], ["label"], axis=1, keepdims=0),
        helper.make_node("ZipMap", ["x"], ["probability"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]),
    ]
    outputs = [value("label", 7, ["rows"]), helper.make_value_info("probability", sequence)]
    return save(folder, nodes, [value("x", FLOAT, ["rows", 2])], outputs)


def test_a_dictionary_of_each_row_says_how_to_convert_without_it(tmp_path: Path) -> None:
    version_dir = zipmap(tmp_path)
    with pytest.raises(ConfigError) as fault:
        load(version_dir, max_batch_size=4)
    words = str(fault.value)
    assert words.startswith("output 'probability' is a seq(map(int64,tensor(float))), which cannot be served")
    assert ": ZipMap makes a dictionary of each row; convert the model without it" in words
    assert "skl2onnx.to_onnx(model, X[:1], options={'zipmap': False})" in words
    assert "onnxmltools.convert_lightgbm(model, initial_types=..., zipmap=False)" in words
    backend = load(version_dir, max_batch_size=4, outputs={"label": spec("int64")})
    x = np.array([[1, 2], [4, 3], [5, 6]], np.float32)
    np.testing.assert_array_equal(backend.run({"x": x})["label"], [1, 0, 1])


def test_labels_that_say_one_and_are_one_a_row(tmp_path: Path) -> None:
    """As LightGBM's converter writes them."""
    nodes = [
        helper.make_node("ArgMax", ["x"], ["label"], axis=1, keepdims=0),
        helper.make_node("Softmax", ["x"], ["probabilities"], axis=1),
    ]
    outputs = [value("label", 7, [1]), value("probabilities", FLOAT, ["rows", 2])]
    version_dir = save(tmp_path, nodes, [value("x", FLOAT, ["rows", 2])], outputs)
    with pytest.raises(ConfigError, match=r"'label' has no batch axis: its shape is \[1\]; if") as fault:
        load(version_dir, max_batch_size=4)
    advice = re.search(r"outputs: (\{.*\});", str(fault.value))
    assert advice is not None
    declared = yaml.safe_load(advice[1])
    assert declared == {"label": spec("int64"), "probabilities": spec("float32", 2)}
    backend = load(version_dir, max_batch_size=4, outputs=declared)
    answers = backend.run({"x": np.array([[1, 2], [4, 3], [5, 6]], np.float32)})
    np.testing.assert_array_equal(answers["label"], [1, 0, 1])
    with pytest.raises(ConfigError, match=r"output 'label': model\.yaml says float32, the model int64"):
        load(version_dir, max_batch_size=4, outputs={**declared, "label": spec("float32")})


def test_refused_inputs_are_the_clients_fault(tmp_path: Path) -> None:
    backend = load(affine(tmp_path))
    with pytest.raises(ServeError, match=r"ONNX Runtime: .*invalid dimensions") as caught:
        backend.run({"x": np.zeros((1, 4), np.float32)})
    assert caught.value.kind is Kind.INVALID_ARGUMENT


def test_a_failing_kernel_is_internal_and_tells_no_folder(tmp_path: Path) -> None:
    version_dir = save(
        tmp_path,
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [value("x", FLOAT, ["n", 3])],
        [value("y", FLOAT, ["m", 2])],
        helper.make_tensor("shape", 7, [2], [-1, 2]),
    )
    with pytest.raises(ServeError, match="ONNX Runtime") as caught:
        load(version_dir).run({"x": np.zeros((1, 3), np.float32)})
    assert caught.value.kind is Kind.INTERNAL
    assert "/" not in caught.value.message.replace("n/a", "")


def test_a_broken_file_is_explained_without_its_folder(tmp_path: Path) -> None:
    version_dir = affine(tmp_path)
    (version_dir / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ServeError, match=r"ONNX Runtime: .*model\.onnx") as caught:
        load(version_dir)
    assert str(tmp_path) not in caught.value.message
    (version_dir / "model.onnx").unlink()
    with pytest.raises(ConfigError, match=r"no file model\.onnx"):
        load(version_dir)


def test_the_runtime_does_not_report_home(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from fastserve.backends import create\n"
        "create({'backend': 'onnx', 'max_batch_size': 8}, Path(sys.argv[1]), 0).load()\n"
        "print([fd for fd in range(3, 64) if os.path.exists(f'/proc/self/fd/{fd}')])"
    )
    env = {"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}
    arguments = [sys.executable, "-c", code, str(affine(tmp_path))]
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert not (tmp_path / "home").exists()


def test_a_missing_runtime_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ServeError, match="pip install onnxruntime, as fastserve's extra onnx does"):
        load(affine(tmp_path))


def open_on_cuda(folder: Path, monkeypatch: pytest.MonkeyPatch, found: list[str]) -> Mock:
    """Open a model on a device with an ONNX Runtime that knows CUDA, and what its session got of it."""
    session = Mock(get_providers=lambda: found)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", Mock(return_value=session))
    config = {"device": "cuda:1", "device_memory_bytes": 1 << 20}
    assert _open_session(folder / "model.onnx", config) is session
    return session


def test_a_session_on_a_device_says_when_it_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime goes on by itself on the CPU where CUDA's libraries do not load, or a run on it fails."""
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    open_on_cuda(tmp_path, monkeypatch, both).disable_fallback.assert_called_once_with()
    (cuda, cpu) = onnxruntime.InferenceSession.call_args.kwargs["providers"]
    assert cuda == (both[0], {"device_id": 1, "gpu_mem_limit": 1 << 20})
    assert cpu == both[1]
    with pytest.raises(ServeError, match=r"device 'cuda:1': ONNX Runtime has opened the model on the CPU"):
        open_on_cuda(tmp_path, monkeypatch, both[1:])


def test_io_binding_puts_results_into_the_slot(tmp_path: Path) -> None:
    """A worker with a CUDA provider binds its outputs so; here on the CPU's provider: the same calls, and
    memory of the host."""
    backend = create({"backend": "onnx", "max_batch_size": 4}, affine(tmp_path), 0)
    backend.load()
    assert not backend.binds_outputs
    backend._on_device = True
    assert backend.binds_outputs
    with pair(backend, allowed_batch_sizes=[2, 4]) as it:
        rows = np.arange(9, dtype=np.float32).reshape(3, 3)
        place = it.put(x=rows)
        it.step()
        found = it.get(*place)
    np.testing.assert_array_equal(found["y"], 2 * rows + 1)
    np.testing.assert_array_equal(found["z"], (2 * rows + 1).sum(axis=1))
    with pytest.raises(ServeError, match="ONNX Runtime"):
        backend.run_into({"x": rows}, {"y": np.zeros((2, 3), np.float32), "z": np.zeros(3, np.float32)})
