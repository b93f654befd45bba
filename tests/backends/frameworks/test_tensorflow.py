"""The tensorflow backend: every signature of a SavedModel, types and shapes, what does not load, a server.

Skipped without TensorFlow, which `make test-extras` installs; what is said of a SavedModel then is tested in
tests/repository/test_folder_config.py.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml

from fastserve.backends import create
from fastserve.dialects.tfserving.warmup import FILE
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.protos import load as load_protos
from fastserve.repository.model_config import config_json, parse_model_config
from fastserve.server.server import dry_run
from fastserve.settings import Settings
from tests.dialects.tfserving.test_warmup import framed
from tests.running import Running

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None,
        reason="TensorFlow is not installed: pip install tensorflow",
    ),
    pytest.mark.lingers,  # TensorFlow's threads never end
    pytest.mark.timeout(240),
]
X = np.array([1.0, 2.0, 5.0, -7.25], np.float32)
WORDS = np.array([[b"a", b"bcd"], [b"\xff\x00", b""]], object)
IMAGE = np.random.default_rng(4).standard_normal((3, 4, 2)).astype(np.float32)
TFS = load_protos("tfserving")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    code = str(Path(__file__).with_name("saved_models.py"))
    done = subprocess.run([sys.executable, code, str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root


def load(folder: Path, **changes: Any) -> Any:
    config = config_json(parse_model_config({"backend": "tensorflow", **changes}))
    backend = create(config, folder, 0)
    try:
        backend.load()
    except BaseException:
        backend.close()
        raise
    return backend


def described(specs: Any) -> dict[str, Any]:
    return {name: (spec.dtype.name, spec.shape) for name, spec in specs.items()}


def example(**features: float) -> bytes:
    found = TFS.Example()
    for name, value in features.items():
        found.features.feature[name].float_list.value.append(value)
    return bytes(found.SerializeToString())


# --- signatures, types and shapes ----------------------------------------------------------------


def test_every_signature_has_its_tensors(saved: Path) -> None:
    backend = load(saved / "half" / "1")
    assert described(backend.inputs) == {
        "x": ("float32", ()),
        "refuse/x": ("float32", ()),
        "regress/inputs": ("bytes", ()),
        "several/a": ("int64", ()),
        "several/b": ("float32", (-1, 2)),
        "strings/words": ("bytes", (-1,)),
    }
    assert list(backend.outputs) == [
        "y", "refuse/y", "regress/outputs", "several/axes", "several/same", "several/total",
        "strings/joined", "strings/length",
    ]  # fmt: skip
    assert list(backend.signatures) == ["serving_default", "refuse", "regress", "several", "strings"]
    assert backend.signatures["several"] == {
        "method": "predict",
        "inputs": {"a": "several/a", "b": "several/b"},
        "outputs": {"axes": "several/axes", "same": "several/same", "total": "several/total"},
    }


def test_a_batch_gets_the_outputs_of_the_signature_whose_inputs_it_brings(saved: Path) -> None:
    backend, expected = load(saved / "half" / "1"), np.load(saved / "expected.npz")
    (y,) = backend.run({"x": X}).values()
    np.testing.assert_array_equal(y, expected["y"])
    found = backend.run({"several/b": IMAGE, "several/a": np.array([1, 2, 3])})
    np.testing.assert_array_equal(found["several/total"], expected["total"])
    np.testing.assert_array_equal(found["several/axes"], [2, 3, 4])
    np.testing.assert_array_equal(found["several/same"], IMAGE)
    both = backend.run({"x": X, "strings/words": np.tile(WORDS, (2, 1))})
    assert set(both) == {"y", "strings/joined", "strings/length"}
    with pytest.raises(ServeError, match="no signature takes the inputs several/a; they are") as raised:
        backend.run({"several/a": np.array([1])})
    assert raised.value.kind is Kind.INVALID_ARGUMENT


def test_strings_are_bytes_both_ways(saved: Path) -> None:
    found = load(saved / "half" / "1").run({"strings/words": WORDS})
    assert found["strings/joined"].tolist() == [b"abcd", b"\xff\x00"]
    assert found["strings/length"].tolist() == [[1, 3], [2, 0]]


def test_every_type_goes_through_unchanged(saved: Path) -> None:
    backend = load(saved / "types" / "1")
    given = {}
    for name, one in backend.inputs.items():
        kind = "uint16" if one.dtype.name == "bfloat16" else one.dtype.name
        given[name] = np.array([0, 1, 1], kind)
    given["bfloat16"] = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)
    given["half"] = np.array([1.5, -2, np.inf], np.float16)
    assert backend.inputs["bfloat16"].dtype.name == "bfloat16"
    assert backend.inputs["half"].dtype.name == "float16"
    for name, array in backend.run(given).items():
        np.testing.assert_array_equal(array, given[name.removesuffix("_out")])
        assert array.dtype == given[name.removesuffix("_out")].dtype


def test_signatures_of_one_graph_share_its_tensors(saved: Path) -> None:
    backend = load(saved / "graph" / "1")
    assert list(backend.inputs) == ["x", "classify/inputs"]
    assert list(backend.outputs) == ["y"]
    assert backend.signatures["regress"] == {
        "method": "regress", "inputs": {"inputs": "classify/inputs"}, "outputs": {"outputs": "y"}
    }  # fmt: skip
    serialized = np.array([example(x=3.0), example(x=-1.0)], object)
    np.testing.assert_array_equal(backend.run({"classify/inputs": serialized})["y"], [[3.5], [1.5]])


def test_a_keras_export_has_one_signature_of_two_names(saved: Path) -> None:
    backend = load(saved / "keras" / "1")
    assert len(backend.inputs) == len(backend.outputs) == 1
    assert backend.signatures["serve"] == backend.signatures["serving_default"]
    ((name, _),) = backend.inputs.items()
    (got,) = backend.run({name: np.ascontiguousarray(IMAGE[:, :, 0])}).values()
    np.testing.assert_allclose(got, np.load(saved / "expected.npz")["keras"], rtol=1e-6)


def test_text_form_is_read_too(saved: Path) -> None:
    np.testing.assert_array_equal(load(saved / "text" / "1").run({"x": X})["y"], X / 2 + 2)


def test_a_model_keeps_nothing_of_a_batch(saved: Path) -> None:
    backend, rows = load(saved / "keeps" / "1"), np.zeros(4096, np.float32)
    rows[:] = 1
    backend.run({"x": rows})
    rows[:] = 100  # the next batch's
    np.testing.assert_array_equal(backend.run({"x": rows[:1]})["y"], [4096])


def test_a_refusal_of_a_kernel_keeps_its_code_and_words(saved: Path) -> None:
    with pytest.raises(ServeError, match=r"^not a number : Tensor had NaN values") as raised:
        load(saved / "half" / "1").run({"refuse/x": np.array([np.nan], np.float32)})
    assert raised.value.kind is Kind.INVALID_ARGUMENT
    assert "Op:" not in str(raised.value)


def test_model_yaml_narrows_an_open_axis(saved: Path) -> None:
    narrow = {"several/b": {"dtype": "float32", "shape": [4, 2]}}
    assert load(saved / "half" / "1", inputs=narrow).inputs["several/b"].shape == (4, 2)
    with pytest.raises(
        ConfigError, match=r"'several/b': model.yaml says shape \[4, 3\], the model \[-1, 2\]"
    ):
        load(saved / "half" / "1", inputs={"several/b": {"dtype": "float32", "shape": [4, 3]}})
    with pytest.raises(ConfigError, match=r"input 'x': model\.yaml says int8, the model float32"):
        load(saved / "half" / "1", inputs={"x": {"dtype": "int8", "shape": []}})
    with pytest.raises(ConfigError, match="the model has no output 'z'; its outputs are y"):
        load(saved / "half" / "1", outputs={"z": {"dtype": "int8", "shape": []}})


def test_a_signature_without_rows_is_left_out_and_needs_max_batch_size_0(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(saved / "half" / "1")
    assert (
        "signature 'scalar' is not served: input 'x' has no free first axis: its shape is []" in caplog.text
    )
    with pytest.raises(ConfigError, match="signature 'serving_default' cannot be served: input 'x' has no"):
        load(saved / "scalar" / "1")
    backend = load(saved / "scalar" / "1", max_batch_size=0)
    assert backend.run({"x": np.array(3, np.float32)})["y"] == 3


# --- what does not load ---------------------------------------------------------------------------


def broken(saved: Path, tmp_path: Path, name: str = "plain") -> Path:
    return shutil.copytree(saved / name / "1", tmp_path / "1")


def fails(folder: Path, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as raised:
        load(folder)
    assert str(folder) not in str(raised.value)


def test_folders_that_are_no_model(saved: Path, tmp_path: Path) -> None:
    folder = broken(saved, tmp_path)
    file = folder / "saved_model.pb"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    fails(folder, ServeError, "saved_model.pb is no SavedModel, or is not whole")
    file.write_bytes(b"\xff" * 100)
    fails(folder, ServeError, "saved_model.pb is no SavedModel, or is not whole")
    file.write_bytes(b"")
    fails(folder, ConfigError, "no graph with the tag serve alone; it has: no graph at all")
    file.write_bytes(whole.replace(b"\x05serve", b"\x05train"))
    fails(folder, ConfigError, "no graph with the tag serve alone; it has: train")
    file.unlink()
    fails(folder, ConfigError, "no file saved_model.pb or saved_model.pbtxt")


@pytest.mark.parametrize("gone", ["variables.index", "variables.data-00000-of-00001"])
def test_missing_variables(saved: Path, tmp_path: Path, gone: str) -> None:
    folder = broken(saved, tmp_path)
    (folder / "variables" / gone).unlink()
    fails(folder, ServeError, "TensorFlow cannot load the SavedModel: .*variables")


def test_a_model_without_signatures(saved: Path) -> None:
    fails(saved / "without" / "1", ConfigError, "no signatures: save it with tf.saved_model.save")


@pytest.mark.logs_errors
def test_warm_up_records_run_on_the_signature_they_name(saved: Path, tmp_path: Path) -> None:
    """The second is one that its signature's graph refuses: so both did run."""
    folder = tmp_path / "m" / "1"
    shutil.copytree(saved / "half" / "1", folder)
    (folder / "assets.extra").mkdir()
    records = []
    for signature, value in (("regress", example(x=1.0)), ("refuse", np.float32(np.nan))):
        log = TFS.PredictionLog()
        log.predict_log.request.model_spec.signature_name = signature
        tensor = log.predict_log.request.inputs["inputs" if signature == "regress" else "x"]
        tensor.tensor_shape.dim.add().size = 1
        tensor.dtype = TFS.DataType.Value("DT_STRING" if signature == "regress" else "DT_FLOAT")
        (tensor.string_val if signature == "regress" else tensor.float_val).append(value)
        records.append(log.SerializeToString())
    (folder / FILE).write_bytes(framed(records))
    (problem,) = dry_run(Settings(repository=str(tmp_path))).problems["m"]
    assert f"{FILE}: record 1: not a number : Tensor had NaN values" in problem


# --- a server -------------------------------------------------------------------------------------

SERVED = ("half", "plain", "named", "graph", "keras", "types")


@pytest.fixture(scope="module", params=[1, 2], ids=["one front", "two fronts"])
def server(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("served")
    names = SERVED if request.param == 1 else ("half",)
    for name in names:
        shutil.copytree(saved / name, root / name)
    yaml_text = yaml.safe_dump({"backend": "tensorflow", "max_batch_size": 8})
    (root / "half" / "model.yaml").write_text(yaml_text)
    shutil.copytree(saved / "plain/1", root / "triton/1/model.savedmodel")
    (root / "triton/config.pbtxt").write_text('platform: "tensorflow_savedmodel" max_batch_size: 8')
    options = ["--frontends", "2"] if request.param == 2 else []
    with Running(root, root.parent / f"log{request.param}", *options) as running:
        yield running


def post(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    host, _, port = server.http.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def predict(server: Running, model: str, signature: str = "", **tensors: np.ndarray) -> dict[str, Any]:
    """Over gRPC."""
    request = TFS.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for alias, array in tensors.items():
        tensor = request.inputs[alias]
        for size in array.shape:
            tensor.tensor_shape.dim.add().size = size
        if array.dtype == object:
            tensor.dtype = TFS.DataType.Value("DT_STRING")
            tensor.string_val.extend(array.reshape(-1).tolist())
        else:
            tensor.dtype = TFS.DataType.Value({"float32": "DT_FLOAT", "int64": "DT_INT64"}[array.dtype.name])
            tensor.tensor_content = array.tobytes()
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        reply = TFS.PredictResponse.FromString(call(request.SerializeToString(), timeout=60))
    assert reply.model_spec.signature_name == (signature or "serving_default")
    return dict(reply.outputs)


def test_rest_answers_for_every_signature(server: Running) -> None:
    path = "/v1/models/half:predict"
    assert post(server, path, {"instances": X.tolist()}) == (200, {"predictions": (X / 2 + 2).tolist()})
    several = {"inputs": {"b": IMAGE.tolist(), "a": [1, 2, 3]}, "signature_name": "several"}
    status, reply = post(server, path, several)
    assert status == 200
    np.testing.assert_allclose(reply["outputs"]["total"], IMAGE.sum(1), rtol=1e-5)
    assert reply["outputs"]["axes"] == [2, 3, 4]
    words = {"instances": [["a", "bcd"], ["x", "y"]], "signature_name": "strings"}
    assert post(server, path, words)[1]["predictions"][0] == {"joined": "abcd", "length": [1, 3]}
    examples = {"signature_name": "regress", "examples": [{"x": 2.0}, {"x": 4.0}]}
    assert post(server, "/v1/models/half:regress", examples)[1]["results"] == [3.0, 4.0]
    assert post(server, path, {"instances": [1.0], "signature_name": "no"}) == (
        400, {"error": 'Serving signature name: "no" not found in signature def'}
    )  # fmt: skip
    assert post(server, "/v1/models/half:regress", {**examples, "examples": [{"z": 2.0}]}) == (
        400,
        {"error": "Name: <unknown>, Feature: x (data type: float) is required but could not be "
                  "found.   [[{{node ParseExample/ParseExampleV2}}]]"},
    )  # fmt: skip


def test_grpc_answers_for_every_signature_fast_and_slow(server: Running) -> None:
    for _ in range(3):  # the second is on the fast path
        for rows in (1, 4):
            assert list(predict(server, "half", x=X[:rows])["y"].float_val) == (X[:rows] / 2 + 2).tolist()
            found = predict(server, "half", "several", b=IMAGE[:rows], a=np.arange(len(IMAGE[:rows])))
            assert sorted(found) == ["axes", "same", "total"]
            np.testing.assert_allclose(found["total"].float_val, IMAGE[:rows].sum(1).reshape(-1), rtol=1e-5)
    joined = predict(server, "half", "strings", words=WORDS)["joined"]
    assert list(joined.string_val) == [b"abcd", b"\xff\x00"]
    with pytest.raises(grpc.RpcError) as raised:
        predict(server, "half", "several", a=np.arange(3))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "several" not in raised.value.details()


def test_metadata_is_the_signature_def(server: Running) -> None:
    _, reply = post(server, "/v1/models/half/metadata", {})
    found = reply["metadata"]["signature_def"]["signature_def"]
    assert set(found) == {"serving_default", "refuse", "regress", "several", "strings"}
    assert found["regress"]["method_name"] == "tensorflow/serving/predict"  # TF 2 writes no other
    info = found["several"]["inputs"]["b"]
    assert info["dtype"] == "DT_FLOAT"
    assert [dim["size"] for dim in info["tensor_shape"]["dim"]] == ["-1", "-1", "2"]


def test_v2_names_tensors_of_other_signatures_by_them(server: Running) -> None:
    row = {"shape": [2], "datatype": "FP32", "data": [1.0, 2.0]}
    for _ in range(3):
        _, reply = post(server, "/v2/models/half/infer", {"inputs": [{"name": "x", **row}]})
        assert [(one["name"], one["data"]) for one in reply["outputs"]] == [("y", [2.5, 3.0])]
    wrong = {"inputs": [{"name": "x", **row}], "outputs": [{"name": "strings/joined"}]}
    status, reply = post(server, "/v2/models/half/infer", wrong)
    assert (status, reply["error"]) == (400, "output 'strings/joined' does not come of these inputs, but y")


def test_requests_of_different_signatures_do_not_mix(server: Running) -> None:
    """Many at a time, so that batches hold several."""
    from concurrent.futures import ThreadPoolExecutor

    def one(number: int) -> bool:
        x = float(number)
        if number % 2:
            body = {"signature_name": "regress", "examples": [{"x": x}]}
            return bool(post(server, "/v1/models/half:regress", body)[1]["results"] == [x / 2 + 2])
        return bool(
            post(server, "/v1/models/half:predict", {"instances": [x]})[1]["predictions"] == [x / 2 + 2]
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(200)))


def test_tritons_folder_of_a_saved_model(server: Running) -> None:
    """The tensors of `model.savedmodel` are those of its signature, and the config call shows them."""
    _, config = post(server, "/v2/models/triton/config", {})
    assert (config["backend"], config["platform"]) == ("tensorflow", "tensorflow_savedmodel")
    assert config["default_model_filename"] == "model.savedmodel"
    (given,) = config["input"]
    assert (given["dims"], given["reshape"]) == ([1], {"shape": []})
    tensor = {"name": given["name"], "shape": [2, 1], "datatype": "FP32", "data": [2.0, 4.0]}
    for _ in range(8):  # by any of the front processes
        status, reply = post(server, "/v2/models/triton/infer", {"inputs": [tensor]})
        assert status == 200, reply
        assert [(output["shape"], output["data"]) for output in reply["outputs"]] == [([2, 1], [3.0, 4.0])]


@pytest.mark.parametrize("server", [1], indirect=True, ids=["one front"])
def test_other_models_without_a_config(server: Running) -> None:
    assert post(server, "/v1/models/plain:predict", {"instances": [2.0]})[1] == {"predictions": [3.0]}
    assert list(predict(server, "named", "a", x=X)["y"].float_val) == (X / 2 + 2).tolist()
    assert post(server, "/v1/models/named:predict", {"instances": [2.0]}) == (
        400, {"error": "Failed to get input map for signature: DEFAULT"}
    )  # fmt: skip
    _, reply = post(server, "/v1/models/graph/metadata", {})
    defs = reply["metadata"]["signature_def"]["signature_def"]
    assert defs["regress"]["method_name"] == "tensorflow/serving/regress"
    examples = {"signature_name": "classify", "examples": [{"x": 2.0}]}
    assert post(server, "/v1/models/graph:classify", examples)[1]["results"] == [[["", 3.0]]]
    rows = IMAGE[:, :, 0].tolist()
    for name in ("serve", "serving_default"):
        _, reply = post(server, "/v1/models/keras:predict", {"instances": rows, "signature_name": name})
        assert np.shape(reply["predictions"]) == (3, 3)
