"""A request taken apart, against reading all of it with proto_wire: FP32[1,4], and 600 KB of raw bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fastserve._ext.message_skeleton import DATA, LEADS, TEXT, Scheme, TemplateFields, write_from_template
from fastserve._ext.proto_wire import read_infer_request, write_infer_response
from tests.oracles import message_skeleton as oracle
from tests.oracles.proto_wire import KSERVE

SIZES = (16, 600_000)
TENSOR = KSERVE.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 4])
OUTPUTS = [("OUTPUT0", "FP32", (1, 4), None)]
BEFORE = write_infer_response("simple", "1", "", None, (), ())
SCHEME = Scheme({3: TEXT, 5: {3: LEADS, 5: dict.fromkeys(range(1, 8), DATA)}, 7: DATA})
AFTER = write_infer_response("", "", "", None, OUTPUTS, ())


def read_known(data: bytes, memory: bytearray) -> str:
    skeleton = SCHEME.read(data)
    assert skeleton.copy_data(0, memory)
    return skeleton.id


def read_whole(data: bytes, memory: bytearray) -> str:
    message = read_infer_request(data)
    message.copy_raw(0, memory)
    return message.id


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("read", [read_known, read_whole], ids=["outline", "whole"])
def test_read(benchmark, read, size) -> None:  # type: ignore[no-untyped-def]
    request = KSERVE.ModelInferRequest(
        model_name="m", id="7", inputs=[TENSOR], raw_input_contents=[bytes(size)]
    )
    assert benchmark(read, request.SerializeToString(), bytearray(size)) == "7"


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
def test_known(benchmark, compiled) -> None:  # type: ignore[no-untyped-def]
    """From a skeleton to the rows, as TemplatesPath and TemplateFields do it."""
    request = KSERVE.ModelInferRequest(model_name="m", inputs=[TENSOR], raw_input_contents=[bytes(16)])
    skeleton, memory, sources = SCHEME.read(request.SerializeToString()), [bytearray(16)], [(0, 0, False)]
    known = TemplateFields()
    known.batching, known.sources = True, sources
    queue = SimpleNamespace(max_rows=32)

    def run() -> bool:
        if compiled:
            return known.is_met_by(skeleton, queue) and known.fill(skeleton, memory)
        rows = oracle.meets(skeleton, (), True, queue.max_rows)
        return bool(rows) and oracle.fill(skeleton, sources, memory)

    assert benchmark(run)


@pytest.mark.parametrize("size", SIZES)
def test_write(benchmark, size) -> None:  # type: ignore[no-untyped-def]
    whole = write_infer_response("simple", "1", "7", None, OUTPUTS, [bytes(size)])
    assert benchmark(write_from_template, BEFORE, "7", AFTER, [bytes(size)]) == whole
