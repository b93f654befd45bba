"""The shared vectors of kinds grpc and grpc_details against a server; those of tensors are in tests/ext."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import uvloop

from fastserve.dialects.tfserving.service import status_error
from fastserve.errors import Kind, ServeError
from tests.dialects.tfserving.deviations import is_deviation
from tests.dialects.tfserving.grpc_rig import TFS, fill, serving, status_of, write_halves
from tests.dialects.tfserving.vectors import ALL, Vector, each

REQUESTS = {
    "Predict": "PredictRequest",
    "Classify": "ClassificationRequest",
    "Regress": "RegressionRequest",
    "MultiInference": "MultiInferenceRequest",
    "GetModelMetadata": "GetModelMetadataRequest",
    "GetModelStatus": "GetModelStatusRequest",
    "HandleReloadConfigRequest": "ReloadConfigRequest",
}


def fill_spec(spec: Any, given: dict[str, Any]) -> None:
    spec.SetInParent()
    for key, value in given.items():
        if key == "version":
            spec.version.value = value
        else:
            setattr(spec, key, value)


def fill_tensor(tensor: Any, given: dict[str, Any]) -> None:
    fill(tensor, TFS.DataType.Value(given["dtype"]), tuple(given.get("shape", ())))
    for key in given.keys() - {"dtype", "shape"}:
        values = [value.encode() if isinstance(value, str) else value for value in given[key]]
        getattr(tensor, key).extend(values)


def fill_input(target: Any, given: dict[str, Any]) -> None:
    target.example_list.SetInParent()
    for features in given["example_list"]:
        example = target.example_list.examples.add()
        example.SetInParent()
        for name, feature in features.items():
            for kind, values in feature.items():
                getattr(example.features.feature[name], kind).value.extend(values)


def make_request(kind: str, given: dict[str, Any]) -> Any:
    request = getattr(TFS, kind)()
    if "model_spec" in given:
        fill_spec(request.model_spec, given["model_spec"])
    for name, tensor in given.get("inputs", {}).items():
        fill_tensor(request.inputs[name], tensor)
    for key in ("output_filter", "metadata_field"):
        if key in given:
            getattr(request, key).extend(given[key])
    for task in given.get("tasks", ()):
        added = request.tasks.add(method_name=task["method_name"])
        fill_spec(added.model_spec, task["model_spec"])
    if "input" in given:
        fill_input(request.input, given["input"])
    for model in given.get("config", {}).get("model_config_list", ()):
        request.config.model_config_list.config.add(**model)
    return request


# --- what came back, as the vectors write it -------------------------------------------------------


def spec_as_dict(spec: Any) -> dict[str, Any]:
    found = {"name": spec.name, "version": spec.version.value, "signature_name": spec.signature_name}
    return {key: value for key, value in found.items() if value}


def show(kind: str, data: bytes) -> dict[str, Any]:
    response = getattr(TFS, kind.replace("Request", "Response")).FromString(data)
    shown: dict[str, Any] = {}
    if kind == "MultiInferenceRequest":
        return {"results": [show_task(task) for task in response.results]}
    if kind == "GetModelStatusRequest":
        states = response.model_version_status
        return {"model_version_status": [show_status(one) for one in states]}
    shown["model_spec"] = spec_as_dict(response.model_spec)
    if kind == "PredictRequest":
        shown["outputs"] = {name: show_tensor(response.outputs[name]) for name in response.outputs}
    elif kind == "GetModelMetadataRequest":
        shown["metadata_keys"] = list(response.metadata)
        (held,) = response.metadata.values()
        assert held.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
        assert "serving_default" in TFS.SignatureDefMap.FromString(held.value).signature_def
    else:
        shown["result"] = {"regressions": [{"value": one.value} for one in response.result.regressions]}
    return shown


def show_tensor(tensor: Any) -> dict[str, Any]:
    assert tensor.HasField("tensor_shape")
    assert not tensor.tensor_content
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    dtype = TFS.DataType.Name(tensor.dtype)
    return {"dtype": dtype, "shape": shape, "float_val": list(tensor.float_val)}


def show_task(task: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {"model_spec": spec_as_dict(task.model_spec)}
    kind = task.WhichOneof("result")
    if kind == "regression_result":
        shown[kind] = [one.value for one in task.regression_result.regressions]
    else:
        rows = task.classification_result.classifications
        shown[kind] = [[[each.label, each.score] for each in row.classes] for row in rows]
    return shown


def show_status(told: Any) -> dict[str, Any]:
    state = TFS.ModelVersionStatus.State.Name(told.state)
    status = {"error_code": told.status.error_code, "error_message": told.status.error_message}
    return {"version": told.version, "state": state, "status": status}


# --- the run ---------------------------------------------------------------------------------------

Answers = dict[str, tuple[str, str, dict[str, Any]]]


async def answer_all(folder: Path) -> Answers:
    """Code, text and response to every vector, twice the same: a second one may take another path."""
    found: Answers = {}
    write_halves(folder)
    async with serving(folder) as served:
        for vector in ALL:
            if vector["kind"] != "grpc":
                continue
            name = vector["rpc"].rpartition("/")[2]
            kind = REQUESTS.get(name, "PredictRequest")
            data = make_request(kind, vector["input"]).SerializeToString()
            answers = []
            for _ in range(2):
                try:
                    reply = await served.send(f"/tensorflow.serving.{vector['rpc']}", data)
                    answers.append(("OK", "", show(kind, reply)))
                except grpc.aio.AioRpcError as error:
                    answers.append((*status_of(error), {}))
            assert answers[0] == answers[1], vector["id"]
            found[vector["id"]] = answers[0]
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return uvloop.run(asyncio.wait_for(answer_all(tmp_path_factory.mktemp("vectors")), 60))


@each("grpc")
def test_vector(answers: Answers, vector: Vector) -> None:
    code, text, response = answers[vector["id"]]
    if is_deviation(vector["id"]):  # the one there is: its model cannot be served
        assert code == "NOT_FOUND"
        return
    expected = vector["expected"]
    assert code == expected["grpc_code"], text
    if "details" in expected:
        assert text == expected["details"]
    assert expected.get("details_contains", "") in text
    for key, value in expected.get("response", {}).items():
        assert response[key] == value


@each("grpc_details")
def test_long_details_are_cut(vector: Vector) -> None:
    told = status_error(ServeError(Kind.INTERNAL, "x" * vector["input"]["message_length"])).message
    assert len(told) == vector["expected"]["details_length"]
    assert told.endswith(vector["expected"]["suffix"])
