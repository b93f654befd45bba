"""The RPCs of TensorFlow Serving's two services against a server, beyond what the shared vectors ask."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fastserve.settings import AdminOptions, TFServingOptions
from tests.dialects.tfserving.grpc_rig import (
    MODELS,
    PREDICTION,
    TFS,
    TfsServed,
    copy_digits,
    fill,
    rows_of,
    serving,
    status_of,
    write_halves,
)
from tests.ext.wire_strategies import field
from tests.server.rig import run, write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe


async def refused(served: TfsServed, path: str, data: bytes) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.send(path, data, timeout=30)
    return status_of(caught.value)


# --- bytes that are wrong ----------------------------------------------------------------------------

SHAPE = field(2, 2, field(2, 2, field(1, 0, b"\x02")) + field(2, 2, field(1, 0, b"\x02")))
FLOAT = field(1, 0, b"\x01") + SHAPE


def predict_bytes(tensor: bytes, more: bytes = b"") -> bytes:
    entry = field(1, 2, b"x") + field(2, 2, tensor)
    return field(1, 2, field(1, 2, b"twice")) + field(2, 2, entry) + more


def shape_of(*sizes: int) -> bytes:
    shape = TFS.TensorShapeProto()
    for size in sizes:
        shape.dim.add(size=size)
    return field(2, 2, shape.SerializeToString())


HUGE = 1 << 30
HOSTILE = {
    "cut": (predict_bytes(FLOAT + field(5, 2, bytes(16)))[:-3], "malformed PredictRequest: BAD_LENGTH"),
    "past the end": (predict_bytes(FLOAT + b"\x2a\xff\xff\xff\x7f"), "malformed PredictRequest: BAD_LENGTH"),
    "packed overrun": (predict_bytes(FLOAT + field(5, 2, bytes(15))), "malformed PredictRequest: BAD_PACKED"),
    "deep": (b"\x9b\x06" * 5000, "malformed PredictRequest: TOO_DEEP"),
    "no content's size": (predict_bytes(FLOAT + field(4, 2, bytes(15))), "tensor parsing error: x"),
    "negative": (predict_bytes(field(1, 0, b"\x01") + shape_of(-1)), "tensor parsing error: x"),
    "many axes": (predict_bytes(field(1, 0, b"\x01") + shape_of(*[1] * 300)), "tensor parsing error: x"),
    "overflow": (predict_bytes(field(1, 0, b"\x01") + shape_of(2**40, 2**40)), "tensor parsing error: x"),
    "no type": (predict_bytes(SHAPE), "tensor parsing error: x"),
    "unknown type": (predict_bytes(field(1, 0, b"\x63") + SHAPE), "tensor parsing error: x"),
    "resource": (
        predict_bytes(field(1, 0, b"\x14") + SHAPE),
        "Expects arg[0] to be float but resource is provided",
    ),
    "double": (
        predict_bytes(field(1, 0, b"\x02") + SHAPE),
        "Expects arg[0] to be float but double is provided",
    ),
    "one for a billion": (
        predict_bytes(field(1, 0, b"\x01") + shape_of(HUGE, 2) + field(5, 2, bytes(4))),
        "tensor parsing error: the inputs are 8589934592 bytes in memory, allowed: up to 134217728 "
        "(grpc_options.message_bytes)",
    ),
    "other shape": (predict_bytes(field(1, 0, b"\x01") + shape_of(1, 7)), "input 'x' has shape [1, 7]"),
    "scalar": (
        predict_bytes(field(1, 0, b"\x01")),
        "Batching Run() input tensors must have at least one dimension",
    ),
    "many inputs": (field(2, 2, b"") * 20_000, "PredictRequest: at most 16384 inputs"),
    "empty values": (
        predict_bytes(field(1, 0, b"\x07") + shape_of(1, 2) + b"\x42\x00" * 10_000_000),
        "Expects arg[0] to be float but string is provided",
    ),
    "empty filter": (field(3, 2, b"") * 10_000_000, "PredictRequest: at most 16384 inputs"),
}


def test_hostile_predicts(tmp_path: Path) -> None:
    """Each is told what is wrong, soon, and a good one after each is answered."""
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            for name, (data, text) in HOSTILE.items():
                began = time.monotonic()
                code, told = await refused(served, PREDICTION + "Predict", data)
                assert (code, text in told) == ("INVALID_ARGUMENT", True), (name, code, told)
                assert time.monotonic() - began < 60, name
                assert await served.predict(3) == [6]

    run(work(), 120)


def test_hostile_examples_and_questions(tmp_path: Path) -> None:
    write_halves(tmp_path)
    spec = field(1, 2, field(1, 2, b"default") + field(3, 2, b"regress_x_to_y"))
    feature = field(1, 2, b"x") + field(2, 2, field(3, 2, field(1, 2, b"\x01" * 600_000)))
    many = field(1, 2, field(1, 2, field(1, 2, field(1, 2, feature))))
    cases = {
        PREDICTION + "Regress": [
            (b"\xff", "malformed RegressionRequest"),
            (spec, "Input is empty."),
            (
                spec + field(2, 2, b"\x0a\x00" * 3_000_000),
                "a RegressionRequest of 6000032 bytes, allowed: up to 4194304",
            ),
            (
                spec + field(2, 2, field(1, 2, b"\x0a\x00" * 1_000_000)),
                "more than 524288 features and values",
            ),
            (spec + field(2, 2, many), "more than 524288 features and values"),
        ],
        PREDICTION + "MultiInference": [
            (b"", "ModelSpec has no name specified."),
            (field(1, 2, b""), "Missing ModelSpec"),
            (field(1, 2, field(1, 2, field(1, 2, b"default"))) * 2000, "2000 tasks, allowed: up to 1024"),
        ],
        PREDICTION + "GetModelMetadata": [
            (spec, "GetModelMetadataRequest must specify at least one metadata_field"),
        ],
        MODELS + "GetModelStatus": [
            (b"\x0a\x05m", "malformed GetModelStatusRequest"),
            (b"", "Missing ModelSpec"),
        ],
        MODELS + "HandleReloadConfigRequest": [
            (
                b"",
                "ServerModelConfig type not supported by HandleReloadConfigRequest. "
                "Only ModelConfigList is currently supported",
            )
        ],
    }

    async def work() -> None:
        async with serving(tmp_path) as served:
            for path, given in cases.items():
                for data, text in given:
                    code, told = await refused(served, path, data)
                    assert (code, text in told) == ("INVALID_ARGUMENT", True), (path, code, told)
            # What infers nothing is held to its size by the wire, before a message is made of it.
            for path in (PREDICTION + "GetModelMetadata", MODELS + "HandleReloadConfigRequest"):
                code, told = await refused(served, path, field(2, 2, b"") * 600_000)
                assert (code, "larger than max (1200000 vs. 1048576)" in told) == ("RESOURCE_EXHAUSTED", True)

    run(work(), 120)


# --- Predict ------------------------------------------------------------------------------------------


def test_filters_signatures_and_forms_of_values(tmp_path: Path) -> None:
    write_halves(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:

            async def ask(**more: Any) -> Any:
                spec = {"name": "default", **more.pop("spec", {})}
                request = TFS.PredictRequest(model_spec=spec, **more)
                tensor = request.inputs["inputs" if "signature_name" in spec else "x"]
                fill(tensor, 1, (2,))
                tensor.float_val.extend([1.0, 2.0])
                for _ in range(2):
                    reply = await served.ask(PREDICTION + "Predict", request, "PredictResponse")
                return reply

            reply = await ask()
            assert list(reply.outputs["y"].float_val) == [2.5, 3.0]
            assert (reply.model_spec.version.value, reply.model_spec.signature_name) == (
                123,
                "serving_default",
            )
            reply = await ask(spec={"signature_name": "classify_x2_to_y3"}, output_filter=["scores"])
            assert list(reply.outputs["scores"].float_val) == [3.5, 4.0]
            assert list(reply.outputs) == ["scores"]
            reply = await ask(spec={"version_label": "stable"})
            assert reply.model_spec.WhichOneof("version_choice") == "version"
            for filter, text in (
                (["y", "y"], "duplicate output tensor alias: y"),
                (
                    ["z"],
                    "output tensor alias not found in signature: z Outputs expected to be in the set {y}.",
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(output_filter=filter)
                assert status_of(caught.value) == ("INVALID_ARGUMENT", text)
            request = TFS.PredictRequest(model_spec={"name": "default"})
            fill(request.inputs["z"], 1, ())
            code, told = await refused(served, PREDICTION + "Predict", request.SerializeToString())
            assert (code, told) == (
                "INVALID_ARGUMENT",
                "Signature input alias: x(feed name: x:0) not found in request and no default value "
                "provided. Inputs expected to be in the request {z}, or default input alias set: ",
            )

    run(work())


def test_tensor_content_in_answers(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        options = TFServingOptions(tensor_content=True, monitoring=True)
        async with serving(tmp_path, tfserving=options) as served:
            for content in (True, False, True):
                request = rows_of(3, 4, content=content)
                reply = await served.ask(PREDICTION + "Predict", request, "PredictResponse")
                tensor = reply.outputs["y"]
                assert not tensor.float_val
                assert list(memoryview(tensor.tensor_content).cast("f")) == [6, 1, 8, 1]
            client = await served.client()
            status, page = await client.get("/monitoring/prometheus/metrics")
            assert status == 200
            assert b':tensorflow:serving:request_count{model_name="twice",status="OK"} 3' in page
            assert b'API="Predict",entrypoint="GRPC",le="+Inf"} 3' in page

    run(work())


# --- examples -----------------------------------------------------------------------------------------


def add_example(examples: Any, pixels: list[float]) -> None:
    examples.add().features.feature["image"].float_list.value.extend(pixels)


def test_classify(tmp_path: Path) -> None:
    copy_digits(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            spec = {"name": "digits", "signature_name": "classify", "version_label": "stable"}
            request = TFS.ClassificationRequest(model_spec=spec)
            for _ in range(2):
                add_example(request.input.example_list.examples, [8.0] * 64)
            reply = await served.ask(PREDICTION + "Classify", request, "ClassificationResponse")
            assert reply.model_spec.signature_name == "classify"
            assert reply.model_spec.version.value == 1
            first, second = reply.result.classifications
            assert [one.label for one in first.classes] == [str(n) for n in range(10)]
            assert sum(one.score for one in second.classes) == pytest.approx(1, abs=1e-3)
            # an example's own feature goes before that of the context
            request.input.example_list_with_context.context.features.feature["image"].float_list.value.append(
                1.0
            )
            with_context = request.input.example_list_with_context
            add_example(with_context.examples, [8.0] * 64)
            again = await served.ask(PREDICTION + "Classify", request, "ClassificationResponse")
            scores = [one.score for one in again.result.classifications[0].classes]
            assert scores == pytest.approx([one.score for one in first.classes], rel=1e-3)
            del with_context.examples[:]
            with_context.examples.add()
            code, told = await refused(served, PREDICTION + "Classify", request.SerializeToString())
            assert (code, "image" in told) == ("INVALID_ARGUMENT", True)

    run(work())


# --- the models ----------------------------------------------------------------------------------------


def config_of(**models: tuple[Path, dict[str, int]]) -> Any:
    request = TFS.ReloadConfigRequest()
    for name, (folder, labels) in models.items():
        added = request.config.model_config_list.config.add(
            name=name, base_path=str(folder), model_platform="tensorflow", version_labels=labels
        )
        added.model_version_policy.all.SetInParent()
    return request


def test_models_are_replaced(tmp_path: Path) -> None:
    """The whole list: what is new comes, what is not named goes, labels move."""
    folders = [write_model(tmp_path, name, numbers=(1, 2)) for name in ("a", "b", "c")]

    async def work() -> None:
        async with serving(Path(""), model_control="poll", load_models=(), keep_going=True) as served:
            path = MODELS + "HandleReloadConfigRequest"

            async def states(name: str) -> list[tuple[int, int]]:
                request = TFS.GetModelStatusRequest(model_spec={"name": name, "version_label": "ignored"})
                found = await served.ask(MODELS + "GetModelStatus", request, "GetModelStatusResponse")
                return [(one.version, one.state) for one in found.model_version_status]

            request = config_of(a=(folders[0], {"best": 1}), b=(folders[1], {}))
            reply = await served.ask(path, request, "ReloadConfigResponse")
            assert reply.status.error_code == 0
            assert await states("a") == await states("b") == [(2, 30), (1, 30)]
            assert await served.predict(3, model="a") == [6]
            asked = rows_of(3, model="a")
            asked.model_spec.version_label = "best"
            found = await served.ask(PREDICTION + "Predict", asked, "PredictResponse")
            assert found.model_spec.version.value == 1

            request = config_of(a=(folders[0], {"best": 2}), c=(folders[2], {}))
            await served.ask(path, request, "ReloadConfigResponse")
            while (left := await states("b")) != [(2, 50), (1, 50)]:  # awaited is only what comes
                assert {state for _, state in left} <= {40, 50}
            assert await served.predict(4, model="c") == [8]
            found = await served.ask(PREDICTION + "Predict", asked, "PredictResponse")
            assert found.model_spec.version.value == 2

            request = config_of(a=(folders[0], {"best": 7}))
            code, told = await refused(served, path, request.SerializeToString())
            assert code == "FAILED_PRECONDITION"
            assert "Request to assign label to version 7 of model a, which is not currently available" in told
            code, told = await refused(
                served, path, config_of(gone=(tmp_path / "no", {})).SerializeToString()
            )
            assert code == "UNKNOWN"
            assert "1 model(s) did not become available" in told

    run(work())


def test_lists_that_cannot_be(tmp_path: Path) -> None:
    """Nothing changes for them."""
    write_model(tmp_path)

    def one(**fields: Any) -> Any:
        whole = {"name": "a", "base_path": str(tmp_path), "model_platform": "tensorflow", **fields}
        return TFS.ModelConfig(**whole)

    cases = {
        "model_config_list.config[0]: name": [one(name="../up")],
        "model_config_list.config[0]: name ": [one(name="")],
        "model_config_list.config[0]: labels": [one(version_labels={"best": -1})],
        "model_config_list.config[0]: version_policy": [
            one(model_version_policy={"specific": {"versions": [-1]}})
        ],
        "model_config_list.config[0]: version_policy ": [one(model_version_policy={"specific": {}})],
        "Illegal to list model a multiple times in config list": [one(), one()],
        "allowed: a folder of this machine": [one(base_path="s3://bucket")],
        "logs of requests are not built": [one(logging_config={})],
        "ModelServerConfig::model_type choice 2 not supported.": [one(model_platform="", model_type=2)],
        "Illegal setting both ModelServerConfig::model_type": [one(model_type=1)],
        "Expected model b to have an absolute path or URI; got base_path()=": [  # paths before platforms
            one(model_platform="foo"),
            one(name="b", base_path=""),
        ],
    }

    async def work() -> None:
        async with serving(tmp_path) as served:
            for text, models in cases.items():
                request = TFS.ReloadConfigRequest(config={"model_config_list": {"config": models}})
                data = request.SerializeToString()
                code, told = await refused(served, MODELS + "HandleReloadConfigRequest", data)
                assert (code, text.strip() in told) == ("INVALID_ARGUMENT", True), told
            assert await served.predict(3) == [6]

    run(work())


def test_who_may_replace_them(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, admin=AdminOptions()) as served:
            code, told = await refused(served, MODELS + "HandleReloadConfigRequest", b"")
            assert (code, "--admin-reload-config" in told) == ("UNIMPLEMENTED", True)

    run(work())


def test_metadata(tmp_path: Path) -> None:
    copy_digits(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            request = TFS.GetModelMetadataRequest(
                model_spec={"name": "digits"}, metadata_field=["signature_def"]
            )
            reply = await served.ask(PREDICTION + "GetModelMetadata", request, "GetModelMetadataResponse")
            held = TFS.SignatureDefMap.FromString(reply.metadata["signature_def"].value)
            default = held.signature_def["serving_default"]
            assert default.method_name == "tensorflow/serving/predict"
            image = default.inputs["image"]
            assert (image.name, image.dtype, [dim.size for dim in image.tensor_shape.dim]) == (
                "image:0",
                1,
                [-1, 64],
            )
            assert (reply.model_spec.version.value, reply.model_spec.signature_name) == (1, "")

    run(work())


def test_reflection_and_health(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path) as served:
            for name in ("", "tensorflow.serving.PredictionService", "PredictionService", "ModelService"):
                data = health_pb2.HealthCheckRequest(service=name).SerializeToString()
                reply = await served.send("/grpc.health.v1.Health/Check", data)
                assert health_pb2.HealthCheckResponse.FromString(reply).status == 1
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="tensorflow.TensorProto")
            call = served.channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )
            (found,) = [one async for one in call(iter([asked.SerializeToString()]))]
            reply = reflection_pb2.ServerReflectionResponse.FromString(found)
            assert reply.file_descriptor_response.file_descriptor_proto

    run(work())
