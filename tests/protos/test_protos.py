"""The dialects' messages: private, side by side, and with the numbers of the public API."""

from __future__ import annotations

import subprocess
import sys

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from fastserve.net.grpc.health import make_pool
from fastserve.protos import load
from fastserve.protos.text import print_line, schema_of
from fastserve.settings.text_proto import parse_text

# What an official client does when it is imported: files and messages of our names in the default pool.
OFFICIAL = """
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from fastserve.settings.text_proto import parse_text
from fastserve.protos import load
from fastserve.protos.text import print_line, schema_of
sets = [load(name).descriptor_set for name in ("kserve_v2", "triton_v1")]
for blob in sets:
    for file in FileDescriptorSet.FromString(blob).file:
        descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
official = descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")
ours = load("kserve_v2").ModelInferRequest
assert official is not ours.DESCRIPTOR and official.full_name == ours.DESCRIPTOR.full_name
assert ours(model_name="m").SerializeToString() == b"\\x0a\\x01m"
"""


def test_an_official_client_fits_in_the_same_process() -> None:
    subprocess.run([sys.executable, "-c", OFFICIAL], check=True, timeout=120)


@pytest.mark.parametrize("name", ["kserve_v2", "triton_v1"])  # tfserving brings protobuf's own files too
def test_the_default_pool_learns_nothing(name: str) -> None:
    messages = load(name)
    for file in FileDescriptorSet.FromString(messages.descriptor_set).file:
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindFileByName(file.name)


def test_file_names_of_the_two_differ() -> None:
    files: list[FileDescriptorProto] = []
    for name in ("kserve_v2", "triton_v1"):
        files += FileDescriptorSet.FromString(load(name).descriptor_set).file
    names = [file.name for file in files]
    assert len(names) == len(set(names)) == 7


def test_messages_and_enums() -> None:
    kserve, triton = load("kserve_v2"), load("triton_v1")
    assert load("kserve_v2") is kserve
    assert kserve.services == ["inference.GRPCInferenceService"]
    assert triton.services == ["nvidia.inferenceserver.GRPCService"]
    assert kserve.DataType.Value("TYPE_BF16") == 14
    assert "TYPE_BF16" not in set(triton.DataType.keys())
    assert triton.RequestStatusCode.Name(8) == "ALREADY_EXISTS"
    assert kserve.ModelInferRequest is kserve.ModelInferRequest
    config = kserve.ModelConfig(sequence_batching={"direct": {}}, parameters={"a": {"string_value": "b"}})
    assert kserve.ModelConfig.FromString(config.SerializeToString()) == config
    with pytest.raises(AttributeError, match="Nothing"):
        _ = kserve.Nothing
    with pytest.raises(FileNotFoundError):
        load("nobody")


def test_packages_of_one_set() -> None:
    tfserving = load("tfserving")
    services = ["PredictionService", "ModelService"]
    assert tfserving.services == [f"tensorflow.serving.{name}" for name in services]
    assert tfserving.TensorProto.DESCRIPTOR.full_name == "tensorflow.TensorProto"
    assert tfserving.Code.Name(9) == "FAILED_PRECONDITION"
    assert tfserving.DataType.Value("DT_HALF") == 19
    spec = tfserving.ModelSpec(name="m", version={"value": 3})
    assert spec.SerializeToString() == b"\x0a\x01m\x12\x02\x08\x03"


def test_methods_that_stream() -> None:
    services = [
        load(name).pool.FindServiceByName(load(name).services[0]) for name in ("kserve_v2", "triton_v1")
    ]
    streams = [method.name for service in services for method in service.methods if method.client_streaming]
    assert streams == ["ModelStreamInfer", "StreamInfer"]
    assert [len(service.methods) for service in services] == [20, 7]


def test_reflection_shows_both_at_once() -> None:
    sets = [load("kserve_v2"), load("triton_v1")]
    pool = make_pool([messages.descriptor_set for messages in sets])
    for messages in sets:
        for service in messages.services:
            found = pool.FindFileContainingSymbol(service)
            assert found.services_by_name[service.rpartition(".")[2]].full_name == service
    assert len(pool.FindServiceByName("inference.GRPCInferenceService").methods) == 20


def test_the_text_form_of_a_message_is_read_by_its_descriptor() -> None:
    header = load("triton_v1").InferRequestHeader
    message = header(
        batch_size=2,
        input=[{"name": 'a"b', "dims": [-1, 3], "shared_memory": {"name": "r", "offset": 2**64 - 1}}],
        output=[{"name": "y", "cls": {"count": 3}}],
        id=7,
    )
    read = parse_text(print_line(message), schema_of(header.DESCRIPTOR), "header")
    assert header(**read) == message
