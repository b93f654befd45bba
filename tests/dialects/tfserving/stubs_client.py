"""TensorFlow Serving's own generated stubs, as a client of theirs uses them: `python -m ... HOST:PORT`.

A process of its own: the stubs register files and messages of our names in protobuf's default pool. What
they import of TensorFlow are the messages of tensors, examples, signatures and codes; those are described
here from protos/tfserving, in files of TensorFlow's names that pass them on. The package is unmodified.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from fastserve.protos import load

OURS = {"tensorflow": "tfserving/framework.proto", "tensorflow.error": "tfserving/error_codes.proto"}
# What the stubs import -> where its messages are.
THEIRS = {
    "tensorflow.core.framework.tensor": "tensorflow",
    "tensorflow.core.example.example": "tensorflow",
    "tensorflow.core.protobuf.meta_graph": "tensorflow",
    "tensorflow.core.protobuf.error_codes": "tensorflow.error",
}


def stand_in_for_tensorflow() -> None:
    """Modules as `tensorflow` has them, with the messages that the stubs need."""
    pool = descriptor_pool.Default()
    for file in FileDescriptorSet.FromString(load("tfserving").descriptor_set).file:
        if file.name in OURS.values():
            pool.AddSerializedFile(file.SerializeToString())
    for name, package in THEIRS.items():
        passes = FileDescriptorProto(name=name.replace(".", "/") + ".proto", syntax="proto3")
        passes.dependency.append(OURS[package])
        passes.public_dependency.append(0)
        pool.AddSerializedFile(passes.SerializeToString())
        _add_module(name + "_pb2", pool.FindFileByName(OURS[package]).message_types_by_name)


def _add_module(name: str, messages: Any) -> None:
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path not in sys.modules:
            module = sys.modules[path] = ModuleType(path)
            module.__path__ = []
            if count > 1:
                setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], module)
    sys.modules[name].xla_dot_tsl_dot_protobuf_dot_error__codes__pb2 = None  # named, and not looked at
    for each, descriptor in messages.items():
        setattr(sys.modules[name], each, message_factory.GetMessageClass(descriptor))


SPEC = {"name": "default", "signature_name": "classify_x_to_y"}
OTHER = {"name": "default", "signature_name": "regress_x_to_y"}
EXAMPLE = {"features": {"feature": {"x": {"float_list": {"value": [2.0]}}}}}
INPUT = {"example_list": {"examples": [EXAMPLE]}}


def ask(address: str) -> dict[str, Any]:
    """One call of every RPC, and what they said."""
    from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        return {
            "predict": [predict(stub, values) for values in ([1.0], [2.0, 5.0], [3.0])],
            **by_examples(stub),
            **about_models(stub, models),
        }


def predict(stub: Any, values: list[float]) -> list[Any]:
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    request.model_spec.name = "default"
    request.inputs["x"].dtype = 1
    request.inputs["x"].tensor_shape.dim.add(size=len(values))
    request.inputs["x"].float_val.extend(values)
    reply = stub.Predict(request, timeout=30)
    return [list(reply.outputs["y"].float_val), reply.model_spec.version.value]


def by_examples(stub: Any) -> dict[str, Any]:
    from tensorflow_serving.apis import classification_pb2, inference_pb2, regression_pb2

    classes = stub.Classify(
        classification_pb2.ClassificationRequest(model_spec=SPEC, input=INPUT), timeout=30
    )
    values = stub.Regress(regression_pb2.RegressionRequest(model_spec=OTHER, input=INPUT), timeout=30)
    tasks = [
        {"model_spec": SPEC, "method_name": "tensorflow/serving/classify"},
        {"model_spec": OTHER, "method_name": "tensorflow/serving/regress"},
    ]
    both = stub.MultiInference(inference_pb2.MultiInferenceRequest(tasks=tasks, input=INPUT), timeout=30)
    return {
        "classify": [[one.label, one.score] for one in classes.result.classifications[0].classes],
        "regress": [one.value for one in values.result.regressions],
        "multi": [one.WhichOneof("result") for one in both.results],
    }


def about_models(stub: Any, models: Any) -> dict[str, Any]:
    from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_management_pb2

    asked = get_model_metadata_pb2.GetModelMetadataRequest(model_spec=SPEC, metadata_field=["signature_def"])
    held = get_model_metadata_pb2.SignatureDefMap()
    assert stub.GetModelMetadata(asked, timeout=30).metadata["signature_def"].Unpack(held)
    status = get_model_status_pb2.GetModelStatusRequest(model_spec={"name": "default"})
    try:
        models.HandleReloadConfigRequest(model_management_pb2.ReloadConfigRequest(), timeout=30)
    except grpc.RpcError as error:
        refused = [error.code().name, error.details()]
    return {
        "metadata": sorted(held.signature_def),
        "status": [one.version for one in models.GetModelStatus(status, timeout=30).model_version_status],
        "reload": refused,
    }


if __name__ == "__main__":
    stand_in_for_tensorflow()
    print(json.dumps(ask(sys.argv[1])))
